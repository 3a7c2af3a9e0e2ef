"""States of the 4,096 ranges of key space, as one metadata server sees them. Pure.

Theory of operation.

1. A *marker* key per range holds the index epoch: the range is complete. If primary and replica of a shard are lost and restart
   empty, its markers are lost, too: its ranges are *lost*. The server that notices writes a marker that adds a number to the
   epoch, the *token* of the repair. So all servers agree on the repair, also after a restart.
2. While a range is lost or under repair, a record that is not found is *unknown*, not absent.
3. Nodes send their blocks of these ranges again and report that. After all living nodes have, or after ``REPAIR_S``, the
   marker says again that the range is complete.
4. If a range has another primary, or its primary was connected again, its marker must be read before absence counts. If the
   range is complete, its last changes may still be lost, because replication is asynchronous. So it is *suspect* for a time:
   nodes compare it first.

| state     | moved  | marker complete | marker with a token | marker gone | time passed |
|-----------|--------|-----------------|---------------------|-------------|-------------|
| unread    | unread | good            | repairing           | lost        |             |
| moved     | moved  | suspect         | repairing           | lost        |             |
| good      | moved  |                 | repairing           | lost        |             |
| suspect   | moved  |                 | repairing           | lost        | good        |
| lost      | moved  | good            | repairing           |             |             |
| repairing | moved  | good            |                     | lost        |             |
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from kvstore.core.limits import DIGEST_RANGES
from kvstore.core.types import KEY_BYTES
from kvstore.index.contract import RangeCheck

TOKEN_BYTES: Final = 8
REPAIR_S: Final = 60.0
"""Time after which a repair ends, even if some living nodes have not reported it."""
SUSPECT_S: Final = 60.0
"""Time for which nodes are asked to compare ranges whose last changes may be lost."""


class RangeState(IntEnum):
    """State of one range."""

    UNREAD = 0
    """Its marker was not read yet."""
    MOVED = 1
    """Its marker was not read since the range has another primary, or another connection."""
    GOOD = 2
    SUSPECT = 3
    """Its last changes may be lost."""
    LOST = 4
    """Its marker is missing or of another epoch."""
    REPAIRING = 5
    """Nodes send its blocks again."""


class RangeEvent(IntEnum):
    """What happens to a range."""

    MOVED = 0
    COMPLETE = 1
    """The marker says that the range is complete."""
    TOKEN = 2
    """The marker has a token."""
    GONE = 3
    """The marker is missing or of another epoch."""
    EXPIRED = 4
    """The time to compare has passed."""


_S, _E = RangeState, RangeEvent
TRANSITIONS: Final[Mapping[tuple[RangeState, RangeEvent], RangeState]] = MappingProxyType(
    {
        (_S.UNREAD, _E.MOVED): _S.UNREAD,
        (_S.UNREAD, _E.COMPLETE): _S.GOOD,
        (_S.MOVED, _E.COMPLETE): _S.SUSPECT,
        (_S.LOST, _E.COMPLETE): _S.GOOD,
        (_S.REPAIRING, _E.COMPLETE): _S.GOOD,
        (_S.SUSPECT, _E.EXPIRED): _S.GOOD,
    }
    | {(state, _E.MOVED): _S.MOVED for state in _S if state is not _S.UNREAD}
    | {(state, _E.TOKEN): _S.REPAIRING for state in _S}
    | {(state, _E.GONE): _S.LOST for state in _S}
)
"""Pairs that are missing change nothing."""
TRUSTED: Final = frozenset({RangeState.GOOD, RangeState.SUSPECT})
"""States in which a record that is not found is absent."""


def complete_marker(epoch: bytes) -> bytes:
    """The marker of a complete range."""
    return epoch


def repair_marker(epoch: bytes, token: int) -> bytes:
    """The marker of a range under repair."""
    return epoch + token.to_bytes(TOKEN_BYTES, "big")


def new_token() -> int:
    """Draw the number of a check or a repair."""
    return 1 + secrets.randbits(62)


@dataclass(slots=True)
class _Check:
    """A set of ranges that nodes compare or send, since a time."""

    began_s: float
    ranges: set[int]
    token: int
    """Number that nodes report. The number of a repair depends on its ranges, because markers are read in parts: a node that
    checked some of the ranges has not checked all."""


class FinishedRepair(NamedTuple):
    """A repair that can end.

    Args:
        repair: the token of its markers.
        ranges: its ranges.
        reported: whether all living nodes have sent their blocks; else its time is up.
    """

    repair: int
    ranges: Sequence[int]
    reported: bool


class RangeStates:
    """States of all ranges, as one server sees them. Times are of the server's monotonic clock."""

    def __init__(self) -> None:
        self._states = [RangeState.UNREAD] * DIGEST_RANGES
        self.trusted = bytearray(DIGEST_RANGES)
        """1: a record of the range that is not found is absent."""
        self._repairs: dict[int, _Check] = {}
        self._suspicions: dict[int, _Check] = {}

    def state(self, number: int) -> RangeState:
        """The state of one range."""
        return self._states[number]

    def counts(self) -> dict[RangeState, int]:
        """The number of ranges in each state."""
        return {state: self._states.count(state) for state in RangeState}

    def unread(self) -> list[int]:
        """Ranges whose markers must be read."""
        return [number for number, state in enumerate(self._states) if state in (RangeState.UNREAD, RangeState.MOVED)]

    def lost(self) -> list[int]:
        """Ranges for which a repair must begin."""
        return [number for number, state in enumerate(self._states) if state is RangeState.LOST]

    # ---- events
    def moved(self, ranges: Iterable[int]) -> None:
        """Ranges have another primary, or its connection is new."""
        for number in ranges:
            self._apply(number, RangeEvent.MOVED)
        self._forget_finished()

    def read(self, markers: Mapping[int, bytes | None], epoch: bytes, now_s: float) -> None:
        """Take the markers that were read."""
        suspects: set[int] = set()
        under_repair: dict[int, set[int]] = {}
        for number, marker in markers.items():
            if marker == complete_marker(epoch):
                self._apply(number, RangeEvent.COMPLETE)
                if self._states[number] is RangeState.SUSPECT:
                    suspects.add(number)
            elif marker is not None and len(marker) == KEY_BYTES + TOKEN_BYTES and marker[:KEY_BYTES] == epoch:
                self._apply(number, RangeEvent.TOKEN)
                under_repair.setdefault(int.from_bytes(marker[KEY_BYTES:], "big"), set()).add(number)
            else:
                self._apply(number, RangeEvent.GONE)
        for repair, ranges in under_repair.items():
            self._add_to_repair(repair, ranges, now_s)
        known = {number for check in self._suspicions.values() for number in check.ranges}
        if suspects - known:
            token = new_token()
            self._suspicions[token] = _Check(now_s, suspects - known, token)
        self._forget_finished()

    def tick(self, now_s: float) -> None:
        """Let time pass."""
        for check in self._suspicions.values():
            if now_s - check.began_s >= SUSPECT_S:
                for number in check.ranges:
                    self._apply(number, RangeEvent.EXPIRED)
        self._forget_finished()

    # ---- requests to nodes
    def checks(self) -> list[RangeCheck]:
        """Checks that nodes are asked for: repairs first."""
        repairs = [RangeCheck(check.token, frozenset(check.ranges), lost=True) for check in self._repairs.values()]
        return repairs + [RangeCheck(check.token, frozenset(check.ranges), lost=False) for check in self._suspicions.values()]

    def finished(self, reported: Collection[int], now_s: float) -> list[FinishedRepair]:
        """Repairs that are finished.

        Args:
            reported: tokens that all living nodes have reported.
            now_s: time.
        """
        return [
            FinishedRepair(repair, sorted(check.ranges), check.token in reported)
            for repair, check in self._repairs.items()
            if check.token in reported or now_s - check.began_s >= REPAIR_S
        ]

    # ---- parts
    def _add_to_repair(self, repair: int, ranges: set[int], now_s: float) -> None:
        for other, check in self._repairs.items():
            if other != repair:
                check.ranges -= ranges
        check = self._repairs.setdefault(repair, _Check(now_s, set(), 0))
        if ranges - check.ranges:
            check.ranges |= ranges
            content = b"".join([number.to_bytes(TOKEN_BYTES, "big") for number in (repair, *sorted(check.ranges))])
            check.token = int.from_bytes(hashlib.blake2b(content, digest_size=TOKEN_BYTES).digest(), "big")

    def _apply(self, number: int, event: RangeEvent) -> None:
        before = self._states[number]
        after = TRANSITIONS.get((before, event), before)
        self._states[number] = after
        self.trusted[number] = after in TRUSTED

    def _forget_finished(self) -> None:
        for checks, state in ((self._repairs, RangeState.REPAIRING), (self._suspicions, RangeState.SUSPECT)):
            for token in list(checks):
                check = checks[token]
                check.ranges = {number for number in check.ranges if self._states[number] is state}
                if not check.ranges:
                    del checks[token]
