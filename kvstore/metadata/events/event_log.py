"""What the index learned lately, numbered, for those who watch it: a ring in memory that has a bound.

The index tells each change right after its commit, in the one thread that makes changes (``IndexListener``). Where nobody
watches, or has lately, a change is one number counted up. Else it is kept as the message that goes out, once for all subscribers,
so that one who reads slowly, or never, holds nothing but a number; who falls behind the ring's end is told to begin anew.

A snapshot needs no standstill. What is told are facts of one key in one volume, the later of two is right, and each may come
twice. So pages of the index, read one after the other while it changes, and the changes since before the first page, in their
order, end in the truth (``kvstore.metadata.events.subscription``).
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.clock import Clock
from kvstore.core.errors import CapacityExceeded, Unavailable
from kvstore.core.types import KEY_BYTES, BlockRun
from kvstore.index.contract import RemovedKeys, VolumeEpoch, VolumeEpochInfo
from kvstore.rpc.codec import run_to_proto, tier_to_proto

_LINGER_S: Final = 600.0
"""How long changes are kept after the last subscriber left: it may only have been restarted."""
_RECORD_BYTES: Final = 256
"""What a change takes in memory beside its encoded size."""


@dataclass(frozen=True, slots=True)
class LogPosition:
    """The feed as of one moment: where to go on from, and which volumes there are."""

    sequence: int
    volumes: Mapping[VolumeEpoch, pb.VolumeOpened]


class BlockEventLog:
    """The changes of one server process since it started. Thread-safe; subscribers run on one event loop.

    Args:
        loop: where subscribers run.
        ring_bytes: the most that past changes may take.
        most: subscribers at once.
        clock: of the time since the last one left.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring_bytes: int, most: int, clock: Clock) -> None:
        self.feed_id: Final = secrets.token_bytes(KEY_BYTES)
        """Names this count: another process, or this one started again, counts anew."""
        self._loop = loop
        self._ring_bytes = ring_bytes
        self.most: Final = most
        """Subscribers at once."""
        self._clock = clock
        self._lock = threading.Lock()
        self._sequence = 0
        self._floor = 0  # the ring holds all changes after this one, while it records
        self._ring: deque[tuple[int, list[pb.BlockEvent]]] = deque()  # what each takes, and says
        self._bytes = 0
        self._recording = False
        self._volumes: dict[VolumeEpoch, pb.VolumeOpened] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False
        self._subscribers = 0
        self._idle_since_s = 0.0

    @property
    def subscribers(self) -> int:
        """How many there are."""
        return self._subscribers

    @property
    def held_bytes(self) -> int:
        """What past changes take in memory, about."""
        return self._bytes

    # ---- what the index tells, in its thread ----
    def opened(self, info: VolumeEpochInfo) -> None:
        """A volume came. Whether it is served is told by :meth:`serve`."""

        def events() -> list[pb.BlockEvent]:
            if info.volume_epoch in self._volumes:
                return []
            volume = self._volumes[info.volume_epoch] = _volume(info, served=False)
            return [pb.BlockEvent(opened=volume)]

        self._tell(events)

    def closed(self, volume_epoch: VolumeEpoch) -> None:
        """A volume is gone: one event, whatever it held."""

        def events() -> list[pb.BlockEvent]:
            self._volumes.pop(volume_epoch, None)
            return [pb.BlockEvent(closed=pb.VolumeClosed(volume=volume_epoch))]

        self._tell(events)

    def published(self, volume_epoch: VolumeEpoch, stored: Sequence[BlockRun], removed: Sequence[RemovedKeys]) -> None:
        """A batch took effect."""

        def events() -> list[pb.BlockEvent]:
            told = [
                pb.BlockEvent(removed=pb.BlocksRemoved(volume=whose, namespace_id=namespace, keys=b"".join(keys)))
                for whose, namespace, keys in removed
            ]
            if stored:
                told.append(
                    pb.BlockEvent(stored=pb.BlocksStored(volume=volume_epoch, runs=[run_to_proto(run) for run in stored]))
                )
            return told

        self._tell(events)

    def _tell(self, events: Callable[[], list[pb.BlockEvent]]) -> None:
        with self._lock:
            self._sequence += 1
            if not self._recording:
                self._floor = self._sequence
                return
            told = events()
            size = _RECORD_BYTES + sum(event.ByteSize() for event in told)
            self._ring.append((size, told))
            self._bytes += size
            while self._bytes > self._ring_bytes:
                self._bytes -= self._ring.popleft()[0]
                self._floor += 1
            if self._waiting:
                waiting, self._waiting = self._waiting, set()
                self._loop.call_soon_threadsafe(_wake, waiting)

    # ---- subscribers, on the event loop ----
    def join(self, volume_epochs: Callable[[], list[VolumeEpochInfo]], visible: Container[VolumeEpoch]) -> None:
        """One more subscriber; from the first on, changes are kept.

        Args:
            volume_epochs: reads the open volume epochs out of the index.
            visible: which of them can be read.

        Raises:
            CapacityExceeded: there are too many.
            Unavailable: the server is about to leave.
        """
        if self._closed:
            raise Unavailable("the server is about to end: come again")
        if self._subscribers >= self.most:
            raise CapacityExceeded("too many subscribers to block events", limit=self.most)
        with self._lock:
            if not self._recording:
                # read while no change is told: one that is committed and not told yet comes as an event as well
                self._volumes = {
                    info.volume_epoch: _volume(info, served=info.volume_epoch in visible) for info in volume_epochs()
                }
                self._floor = self._sequence
                self._recording = True
        self._subscribers += 1

    def leave(self) -> None:
        """One less."""
        self._subscribers -= 1
        self._idle_since_s = self._clock.now_s()

    def expire(self) -> None:
        """Lets go of what nobody has asked for in a while."""
        if self._recording and not self._subscribers and self._clock.now_s() - self._idle_since_s > _LINGER_S:
            with self._lock:
                self._recording = False
                self._ring.clear()
                self._volumes.clear()
                self._bytes = 0
                self._sequence += 1  # who falls silent from here on is not told: nobody may go on from before
                self._floor = self._sequence

    def serve(self, visible: Container[VolumeEpoch]) -> None:
        """Tells which volumes can be read now, as far as that has changed."""
        if not self._recording:
            return
        with self._lock:
            changed = [
                volume_epoch for volume_epoch, volume in self._volumes.items() if volume.served != (volume_epoch in visible)
            ]
        for volume_epoch in changed:
            self._tell(functools.partial(self._served, volume_epoch, served=volume_epoch in visible))

    def _served(self, volume_epoch: VolumeEpoch, *, served: bool) -> list[pb.BlockEvent]:
        volume = self._volumes.get(volume_epoch)
        if volume is None:
            return []  # closed meanwhile
        now = self._volumes[volume_epoch] = pb.VolumeOpened()  # the old one may be in the ring
        now.CopyFrom(volume)
        now.served = served
        return [pb.BlockEvent(served=pb.VolumeServed(volume=volume_epoch, served=served))]

    def state(self) -> LogPosition:
        """Now."""
        with self._lock:
            return LogPosition(self._sequence, dict(self._volumes))

    def resumes(self, sequence: int) -> LogPosition | None:
        """The volumes of now, for who has seen all changes up to one; None: what came since is not all remembered."""
        with self._lock:
            if not self._floor <= sequence <= self._sequence:
                return None
            return LogPosition(sequence, dict(self._volumes))

    def since(self, sequence: int, most_bytes: int) -> tuple[list[pb.BlockEvent], int] | None:
        """What came after a change, up to about so many bytes, and the last change that it reaches to; None: not remembered."""
        with self._lock:
            if sequence < self._floor:
                return None
            events: list[pb.BlockEvent] = []
            taken = 0
            while sequence < self._sequence and taken < most_bytes:
                size, told = self._ring[sequence - self._floor]
                events += told
                taken += size
                sequence += 1
            return events, sequence

    async def wait(self, sequence: int, timeout_s: float) -> None:
        """Until there is something after a change, or the time is up.

        Raises:
            Unavailable: the server is about to leave.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("the server is about to end: come again")
            if self._sequence != sequence:
                return  # the caller has changes to read, and does not wait
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiting.add(future)
        try:
            await asyncio.wait([future], timeout=timeout_s)
        finally:
            with self._lock:
                self._waiting.discard(future)

    def close(self) -> None:
        """Ends the waits of all subscribers."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, set()
        _wake(waiting)


def _wake(waiting: set[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)


def _volume(info: VolumeEpochInfo, *, served: bool) -> pb.VolumeOpened:
    return pb.VolumeOpened(
        volume=info.volume_epoch,
        volume_id=info.volume_id,
        node_id=info.node_id,
        tier=tier_to_proto(info.tier),
        boot_id=info.boot_id,
        served=served,
    )
