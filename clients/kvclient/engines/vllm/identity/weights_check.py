"""A check of the weights: which step asks the workers for digests, and their answers.

vLLM changes weights while no request runs, but it runs steps then that compute nothing, e.g. for an aborted request. So a check
waits for a step that computes, or for which a request was held back.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping

CHECK_DEADLINE_S = 60.0
"""Time from the step that asks, after which a check ends without a result. The workers read all weights in that step."""
_DIGEST_CHARS = 32


def combined_digest(digests: Iterable[str]) -> str:
    """One digest for the weights of all ranks, in the order of ranks."""
    return f"xxh3:{hashlib.sha256(' '.join(digests).encode()).hexdigest()[:_DIGEST_CHARS]}"


class WeightsCheck:
    """Pure: events in, decisions out. Called by one thread.

    Args:
        workers: how many workers answer.
        clock: the time in seconds.
    """

    def __init__(self, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = workers
        self._clock = clock
        self.number = 0
        """Of the latest check."""
        self.in_progress = False
        """Whether the latest check has not ended."""
        self._wanted = False
        self._sent = 0
        """Number of the last check that a step has asked."""
        self._asked: dict[int, tuple[float, dict[int, str]]] = {}
        """By check without a result: when it was asked, and digests by rank."""

    def begin(self) -> None:
        """Begin a check. Earlier ones that were asked may still be answered."""
        self.number += 1
        self.in_progress, self._wanted = True, False

    def abandon(self) -> None:
        """End all checks without a result."""
        self.in_progress = False
        self._asked.clear()

    def hold_back(self) -> bool:
        """Whether a request must wait for a check. If so, the step asks."""
        self._wanted = self._wanted or self.in_progress
        return self.in_progress

    def plan(self, *, computes: bool) -> int:
        """Return the number of the check that a step asks; 0: none.

        Args:
            computes: the step computes tokens.
        """
        if not self.in_progress or self._sent == self.number or not (computes or self._wanted):
            return 0
        self._sent = self.number
        self._asked[self.number] = self._clock(), {}
        return self.number

    def answered(self, digests: Mapping[tuple[int, int], str]) -> None:
        """Record digests, by number of the check and rank."""
        for (number, rank), digest in digests.items():
            if number in self._asked:
                self._asked[number][1][rank] = digest

    def take(self) -> list[tuple[int, str]]:
        """Return the checks that have ended, in order: number, and digest of the weights of all ranks (empty: too late)."""
        if not self._asked:
            return []
        ended, now_s = [], self._clock()
        for number, (asked_s, digests) in list(self._asked.items()):
            if len(digests) >= self._workers:
                ended.append((number, combined_digest(digest for _, digest in sorted(digests.items()))))
            elif now_s - asked_s > CHECK_DEADLINE_S:
                ended.append((number, ""))
            else:
                continue
            del self._asked[number]
        if any(number == self.number for number, _ in ended):
            self.in_progress = False
        return ended
