"""Outbox of an engine group: numbered events that are sent in each answer until the group acknowledges them. Pure.

An answer may be lost, and no request in it may be lost with it. An engine cannot count work that it has not acknowledged in its
figures; ``unread`` adds that work up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.errors import InvalidArgument


class PendingWork(NamedTuple):
    """Work of an engine.

    Attributes:
        sequences: number of requests.
        tokens: their total length.
        hbm_tokens: KV memory that they need on a decode engine, in tokens.
    """

    sequences: int = 0
    tokens: int = 0
    hbm_tokens: int = 0


NO_WORK = PendingWork()


@dataclass(frozen=True, slots=True)
class _Message:
    event: pb.SchedulerEvent
    engine: str
    work: PendingWork


class Outbox:
    """Events for one membership of one group."""

    def __init__(self) -> None:
        self._messages: deque[_Message] = deque()
        self._last_number = 0
        self._unread: dict[str, PendingWork] = {}

    def __len__(self) -> int:
        """Number of unacknowledged events."""
        return len(self._messages)

    def put(self, event: pb.SchedulerEvent, engine: str = "", work: PendingWork = NO_WORK) -> None:
        """Append an event.

        Args:
            event: the event, without a number.
            engine: an engine that gets new work by it.
            work: the new work.
        """
        self._last_number += 1
        event.number = self._last_number
        self._messages.append(_Message(event, engine, work))
        self._count(engine, work, 1)

    def acknowledge(self, number: int) -> None:
        """Remove all events up to a number. An old acknowledgement has no effect.

        Raises:
            InvalidArgument: no event had this number.
        """
        if number > self._last_number:
            raise InvalidArgument("acknowledged event was never sent", acknowledged=number, last_sent=self._last_number)
        while self._messages and self._messages[0].event.number <= number:
            message = self._messages.popleft()
            self._count(message.engine, message.work, -1)

    def first(self, most: int) -> list[pb.SchedulerEvent]:
        """The oldest unacknowledged events."""
        return [message.event for message in islice(self._messages, most)]

    def unread(self, engine: str) -> PendingWork:
        """Work of an engine that its group has not acknowledged."""
        return self._unread.get(engine, NO_WORK)

    def _count(self, engine: str, work: PendingWork, sign: int) -> None:
        if work is NO_WORK:
            return
        before = self._unread.get(engine, NO_WORK)
        after = PendingWork(*(old + sign * change for old, change in zip(before, work, strict=True)))
        if after.sequences:
            self._unread[engine] = after
        else:
            self._unread.pop(engine, None)
