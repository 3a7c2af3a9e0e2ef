"""What an engine group must be told: events, numbered, in every answer until the group has acknowledged them. Pure.

An answer may be lost on its way, and then nobody may lose the request that was in it: so nothing leaves before the group says
that it has it. What an engine has not acknowledged it cannot count in its figures; ``unread`` adds it up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.errors import InvalidArgument


class PendingWork(NamedTuple):
    """What requests cost an engine.

    Attributes:
        sequences: how many.
        tokens: their length.
        room: KV tokens that they need on a decode engine.
    """

    sequences: int = 0
    tokens: int = 0
    room: int = 0


NO_WORK = PendingWork()


@dataclass(frozen=True, slots=True)
class _Message:
    event: pb.SchedulerEvent
    engine: str
    load: PendingWork


class Outbox:
    """Events for one stay of one group."""

    def __init__(self) -> None:
        self._letters: deque[_Message] = deque()
        self._written = 0
        self._unread: dict[str, PendingWork] = {}

    def __len__(self) -> int:
        """Events not acknowledged."""
        return len(self._letters)

    def put(self, event: pb.SchedulerEvent, engine: str = "", load: PendingWork = NO_WORK) -> None:
        """One more event.

        Args:
            event: without a number.
            engine: whose work grows by it.
            load: by how much.
        """
        self._written += 1
        event.number = self._written
        self._letters.append(_Message(event, engine, load))
        self._count(engine, load, 1)

    def acknowledge(self, number: int) -> None:
        """The group has all events up to this one; an older acknowledgement changes nothing.

        Raises:
            InvalidArgument: no such event was ever told.
        """
        if number > self._written:
            raise InvalidArgument("an event is acknowledged that was never told", acknowledged=number, told=self._written)
        while self._letters and self._letters[0].event.number <= number:
            letter = self._letters.popleft()
            self._count(letter.engine, letter.load, -1)

    def first(self, most: int) -> list[pb.SchedulerEvent]:
        """The oldest events that are not acknowledged."""
        return [letter.event for letter in islice(self._letters, most)]

    def unread(self, engine: str) -> PendingWork:
        """Work of an engine that its group has not acknowledged."""
        return self._unread.get(engine, NO_WORK)

    def _count(self, engine: str, load: PendingWork, sign: int) -> None:
        if load is NO_WORK:
            return
        had = self._unread.get(engine, NO_WORK)
        now = PendingWork(*(before + sign * change for before, change in zip(had, load, strict=True)))
        if now.sequences:
            self._unread[engine] = now
        else:
            self._unread.pop(engine, None)
