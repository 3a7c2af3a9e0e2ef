"""Answers told again: a question that comes again and again is not carried to metadata server and nodes each time.

Whoever asks now and then has what is true now. Where one question comes more than ``BURST`` times in a moment, and more than once
a second from then on (dashboards, a script without a pause), the answer of a moment ago, ``FRESH_S`` old at most, is told again:
so asking costs the store's processes about one call a second for each question, however many ask. A change through this server
forgets all answers.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T")
Question = TypeVar("Question", bound=Hashable)

BURST: Final = 5
"""Times in a row that a question is answered anew, whoever asks; one more each second."""
FRESH_S: Final = 1.0
"""How old an answer may be that is told again."""
MOST_BYTES: Final = 16 << 20
"""Of all answers kept."""
MOST_ANSWERS: Final = 1_024


@dataclass(slots=True)
class _Asked(Generic[T]):
    """How many new answers a question may have now, and what was told last."""

    seen_s: float
    left: float
    answer: T | None = None
    told_s: float = 0.0
    nbytes: int = 0


class Answers(Generic[Question, T]):
    """The last answers of one server, on its event loop.

    Args:
        now_s: a monotonic clock.
        burst: times in a row that a question is answered anew.

    Attributes:
        changes: counts ``forget``: an answer that was begun to be found out under another count may be what was before.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic, burst: int = BURST) -> None:
        self._now_s = now_s
        self._burst = float(burst)
        self._asked: OrderedDict[Question, _Asked[T]] = OrderedDict()  # by when they were asked last
        self._nbytes = 0
        self.changes = 0

    def again(self, question: Question) -> T | None:
        """What is to be told again; None: find out, and ``keep`` it."""
        now_s = self._now_s()
        asked = self._asked.get(question)
        if asked is None:
            asked = self._asked[question] = _Asked(now_s, self._burst)
            self._bound()
        self._asked.move_to_end(question)
        asked.left = min(self._burst, asked.left + now_s - asked.seen_s)
        asked.seen_s = now_s
        if asked.left >= 1 or asked.answer is None or now_s - asked.told_s > FRESH_S:
            asked.left = max(0.0, asked.left - 1)
            return None
        return asked.answer

    def keep(self, question: Question, answer: T, nbytes: int, changes: int) -> None:
        """An answer of so many bytes was found out, since ``changes`` was so many."""
        asked = self._asked.get(question)
        if asked is None or changes != self.changes:
            return
        self._nbytes += nbytes - asked.nbytes
        asked.answer, asked.nbytes, asked.told_s = answer, nbytes, self._now_s()
        self._bound()

    def forget(self) -> None:
        """Something changed: nothing that was told, or is being found out, may be told again."""
        self.changes += 1
        for asked in self._asked.values():
            asked.answer, asked.nbytes = None, 0
        self._nbytes = 0

    def _bound(self) -> None:
        while len(self._asked) > MOST_ANSWERS or self._nbytes > MOST_BYTES:
            _, oldest = self._asked.popitem(last=False)
            self._nbytes -= oldest.nbytes
