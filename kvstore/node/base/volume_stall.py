"""When a volume is stalled. Pure: events and the time go in, the state comes out.

1. An I/O of a volume begins once and ends once. While it has not ended it is *outstanding*.
2. The volume *answers* when an I/O ends, and when its device answers a part of a larger I/O.
3. An outstanding I/O is *overdue* once its patience has passed both since it began and since the volume answered last.
4. The volume is STALLED while an outstanding I/O is overdue, and ANSWERING otherwise.

5. Time counts only between frequent looks: of a longer gap between two looks at an ANSWERING volume, ``gap_s`` counts. The
   process may not have run, and answers may wait for it.

So a slow disk under load is not stalled while it answers some I/O, and any answer ends a stall.
"""

from __future__ import annotations

import math
from enum import StrEnum


class VolumeState(StrEnum):
    """Whether a volume answers I/O."""

    ANSWERING = "answering"
    STALLED = "stalled"


class VolumeStallDetector:
    """The outstanding I/Os of one volume. Not thread-safe. Times are of one monotonic clock.

    Args:
        gap_s: maximum part of the time between two looks that counts.
    """

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self.looked_s = -math.inf
        """When ``look`` was called last, or the first outstanding I/O began."""
        self.state = VolumeState.ANSWERING
        """As of the last ``look``."""
        self._outstanding: dict[int, tuple[float, float]] = {}  # number -> (when it began, its patience)
        self._begun = 0
        self._answered_s = -math.inf

    @property
    def outstanding(self) -> int:
        """Number of I/Os that have begun and not ended."""
        return len(self._outstanding)

    def begin(self, now_s: float, patience_s: float) -> int:
        """Note that an I/O begins. Returns its number, for ``end``."""
        if not self._outstanding:
            self.looked_s = now_s
        self._begun += 1
        self._outstanding[self._begun] = now_s, patience_s
        return self._begun

    def end(self, number: int, now_s: float, *, answered: bool = True) -> None:
        """Note that an I/O has ended, with success or an error. ``answered``: the volume answered it, and not a cache."""
        del self._outstanding[number]
        if answered:
            self.answer(now_s)

    def answer(self, at_s: float) -> None:
        """Note that the device answered a part of an outstanding I/O. A time before the last answer changes nothing."""
        self._answered_s = max(self._answered_s, at_s)

    def due_s(self) -> float:
        """When the volume becomes stalled unless it answers before; infinity if no I/O is outstanding."""
        waits = ((max(began_s, self._answered_s) + patience_s) for began_s, patience_s in self._outstanding.values())
        return min(waits, default=math.inf)

    def silent_s(self, now_s: float) -> float:
        """How long the volume has owed an answer; 0 if no I/O is outstanding."""
        oldest_s = min((began_s for began_s, _ in self._outstanding.values()), default=now_s)
        return max(0.0, now_s - max(oldest_s, self._answered_s))

    def look(self, now_s: float) -> bool:
        """Set the state as of now. Returns whether it changed."""
        if self.state is VolumeState.ANSWERING and (missed_s := now_s - self.looked_s - self._gap_s) > 0:
            self._outstanding = {
                number: (began_s + missed_s, patience_s) for number, (began_s, patience_s) in self._outstanding.items()
            }
            self._answered_s = min(now_s, self._answered_s + missed_s)
        self.looked_s = now_s
        state = VolumeState.STALLED if now_s >= self.due_s() else VolumeState.ANSWERING
        changed, self.state = state is not self.state, state
        return changed
