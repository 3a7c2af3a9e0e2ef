"""Findings that are shown only after they lasted for some seconds, because a failover raises and ends them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvstore.health import codes
from kvstore.health.findings import HealthFinding

SETTLE_S: Final = 5.0
"""A replica has replaced its primary by then, and nodes publish to another metadata server."""
_PASSING: Final = frozenset(
    {
        codes.INDEX_READ_ONLY,
        codes.ONE_METADATA_SERVER,
        codes.PUBLISH_FAILS,
        codes.SHARD_AWAY,
        codes.SHARD_WITHOUT_REPLICA,
    }
)


class SettledFindings:
    """Remembers since when findings are present. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[str, str], float] = {}

    def filter(self, found: Iterable[HealthFinding], now_s: float) -> list[HealthFinding]:
        """Return the findings to show: those that do not pass by themselves, and those that are as old as ``SETTLE_S``."""
        found = list(found)
        self._since_s = {one.identity: self._since_s.get(one.identity, now_s) for one in found}
        return [one for one in found if one.code not in _PASSING or now_s - self._since_s[one.identity] >= SETTLE_S]
