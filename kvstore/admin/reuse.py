"""Answers told again: a question that comes again and again is not carried to metadata server and nodes each time.

Whoever asks now and then has what is true now. Where one question comes more than ``OFTEN`` times a second, from several
dashboards or a script without a pause, the answer of a moment ago (``FRESH_S`` at most) is told again, so that asking costs the
store's processes no more than so many questions a second for each path. A change through this server forgets all answers.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from starlette.types import Message, Send

OFTEN: Final = 4
"""Times in a second that a question is answered anew, whoever asks."""
FRESH_S: Final = 0.5
"""How old an answer may be that is told again."""
MOST_BYTES: Final = 16 << 20
"""Of all answers kept."""
MOST_ANSWERS: Final = 1_024

Question = tuple[str, bytes]
"""Path and query. Whoever may ask for a path is told the same."""


@dataclass(slots=True)
class _Asked:
    """How many new answers a question may have now, and what was told last."""

    seen_s: float
    left: float = OFTEN
    told_s: float = float("-inf")
    messages: list[Message] = field(default_factory=list)
    nbytes: int = 0


class Answers:
    """The last answers of one server, on its event loop.

    Args:
        now_s: a monotonic clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._asked: OrderedDict[Question, _Asked] = OrderedDict()  # by when they were asked last
        self._nbytes = 0
        self._changes = 0

    def again(self, question: Question) -> list[Message] | None:
        """What is to be told again, as messages that the caller may change; None: find out."""
        now_s = self._now_s()
        asked = self._asked.get(question)
        if asked is None:
            asked = self._asked[question] = _Asked(now_s)
            self._bound()
        self._asked.move_to_end(question)
        asked.left = min(float(OFTEN), asked.left + (now_s - asked.seen_s) * OFTEN)
        asked.seen_s = now_s
        if asked.left >= 1 or not asked.messages or now_s - asked.told_s > FRESH_S:
            asked.left = max(0.0, asked.left - 1)
            return None
        return [_copied(message) for message in asked.messages]

    def keeping(self, question: Question, send: Send) -> Send:
        """Sends an answer on, and keeps it where it is a good one and whole."""
        messages: list[Message] = []
        changes = self._changes

        async def sending(message: Message) -> None:
            messages.append(_copied(message))
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            if whole and changes == self._changes:  # else it may be what was before
                self._keep(question, messages)

        return sending

    def forget(self) -> None:
        """Something changed: nothing that was told, or is being found out, may be told again."""
        self._changes += 1
        for asked in self._asked.values():
            asked.messages, asked.nbytes = [], 0
        self._nbytes = 0

    def _keep(self, question: Question, messages: list[Message]) -> None:
        asked = self._asked.get(question)
        if asked is None or messages[0].get("status") != 200:
            return
        nbytes = sum(len(message.get("body", b"")) for message in messages)
        self._nbytes += nbytes - asked.nbytes
        asked.messages, asked.nbytes, asked.told_s = messages, nbytes, self._now_s()
        self._bound()

    def _bound(self) -> None:
        while self._asked and (len(self._asked) > MOST_ANSWERS or self._nbytes > MOST_BYTES):
            _, oldest = self._asked.popitem(last=False)
            self._nbytes -= oldest.nbytes


def _copied(message: Message) -> Message:
    """Headers are added to on the way out."""
    return {**message, "headers": list(message["headers"])} if "headers" in message else dict(message)
