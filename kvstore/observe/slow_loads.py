"""The last loads of a process, so that the slowest of the last minute, and why it was, can be asked for."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Final

MOST_KEPT: Final = 2_048
SHOWN: Final = 50
WINDOW_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """Record of one load.

    Attributes:
        request_id: the client's id of the load; the same in the logs and traces of all processes involved.
        ago_s: seconds between its end and the request for this record.
        seconds: its duration.
        blocks: number of requested blocks.
        hit_blocks: number of loaded blocks.
        reason: why it was slow, or why blocks are missing, in a few words.
        parts: figures by name, e.g. seconds of the lookup, bytes by source.
        action: what to do about it; empty: nothing.
    """

    request_id: str
    seconds: float
    blocks: int
    hit_blocks: int
    reason: str
    parts: Mapping[str, object] = field(default_factory=dict)
    ago_s: float = 0.0
    action: str = ""


class RecentLoads:
    """A bounded memory of loads. Thread-safe; ``now_s`` is a monotonic clock."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._kept: deque[tuple[float, float, Callable[[], LoadRecord]]] = deque(maxlen=MOST_KEPT)

    def add(self, seconds: float, make: Callable[[], LoadRecord]) -> None:
        """Add a load that ends now and drop the oldest. ``make`` is called on demand, because few records are ever read."""
        with self._lock:
            self._kept.append((self._now_s(), seconds, make))

    def slowest(self, window_s: float = WINDOW_S, most: int = SHOWN) -> list[LoadRecord]:
        """Loads that ended within the last seconds, slowest first."""
        now_s = self._now_s()
        with self._lock:
            found = [kept for kept in self._kept if kept[0] >= now_s - window_s]
        found.sort(key=lambda kept: kept[1], reverse=True)
        return [replace(make(), ago_s=round(now_s - ended_s, 3)) for ended_s, _, make in found[:most]]

    def page(self) -> dict[str, object]:
        """As the page ``/loads`` shows them."""
        return {"window_s": WINDOW_S, "slowest": [asdict(record) for record in self.slowest()]}
