"""Log of block events: a bounded, numbered ring in memory for subscribers.

The index reports each change right after its commit, in the thread that makes changes (``IndexListener``). Without
subscribers, present or recent, the log only counts. Otherwise it keeps the change as the message that is sent, once for all
subscribers. A subscriber is only a position in the ring, so one that reads slowly or never costs no memory. If the ring no
longer contains its position, it must resynchronise.

A snapshot needs no lock. An event is a fact about one key in one volume: the later of two facts is right, and repeating a fact
is harmless. So pages of the index, read one after the other while it changes, followed by all changes since before the first
page, in their order, give the true state (``kvstore.metadata.events.subscription``).
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

LINGER_S: Final = 600.0
"""How long changes are kept after the last subscriber left: it may only be restarting."""
_RECORD_BYTES: Final = 256
"""Estimated memory per change, in addition to its encoded size."""
STOPPING: Final = "the server is stopping: subscribe again"


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A position in the log, and the open volumes at that time."""

    sequence: int
    volumes: Mapping[VolumeEpoch, pb.VolumeOpened]


class BlockEventLog:
    """The changes of one server process since its start. Thread-safe; subscribers run on one event loop.

    Args:
        loop: event loop of the subscribers.
        ring_bytes: maximum memory of past changes.
        max_subscribers: maximum number of subscribers.
        clock: clock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring_bytes: int, max_subscribers: int, clock: Clock) -> None:
        self.feed_id: Final = secrets.token_bytes(KEY_BYTES)
        """Identifies this numbering: another process, or a restarted one, numbers its changes from the beginning."""
        self.ring_bytes = ring_bytes
        """Maximum memory of past changes."""
        self.max_subscribers: Final = max_subscribers
        """Maximum number of subscribers."""
        self._loop = loop
        self._clock = clock
        self._lock = threading.Lock()
        self._sequence = 0
        self._floor = 0  # while recording, the ring holds all changes after this one
        self._ring: deque[tuple[int, list[pb.BlockEvent]]] = deque()  # memory and events of each change
        self._bytes = 0
        self._recording = False
        self._volumes: dict[VolumeEpoch, pb.VolumeOpened] = {}
        self._waiters: set[asyncio.Future[None]] = set()
        self._closed = False
        self._subscribers = 0
        self._idle_since_s = 0.0

    @property
    def subscribers(self) -> int:
        """Number of subscribers."""
        return self._subscribers

    @property
    def held_bytes(self) -> int:
        """Estimated memory of past changes."""
        return self._bytes

    @property
    def sequence(self) -> int:
        """Number of the last change."""
        return self._sequence

    # ---- changes of the index, in its thread ----
    def opened(self, info: VolumeEpochInfo) -> None:
        """A volume was opened. :meth:`serve` reports whether it is served."""

        def events() -> list[pb.BlockEvent]:
            if info.volume_epoch in self._volumes:
                return []
            volume = self._volumes[info.volume_epoch] = opened_volume(info, served=False)
            return [pb.BlockEvent(opened=volume)]

        self._append(events)

    def closed(self, volume_epoch: VolumeEpoch) -> None:
        """A volume was closed: one event for all its blocks."""

        def events() -> list[pb.BlockEvent]:
            self._volumes.pop(volume_epoch, None)
            return [pb.BlockEvent(closed=pb.VolumeClosed(volume=volume_epoch))]

        self._append(events)

    def published(self, volume_epoch: VolumeEpoch, stored: Sequence[BlockRun], removed: Sequence[RemovedKeys]) -> None:
        """A batch took effect."""

        def events() -> list[pb.BlockEvent]:
            found = [
                pb.BlockEvent(removed=pb.BlocksRemoved(volume=holder, namespace_id=namespace, keys=b"".join(keys)))
                for holder, namespace, keys in removed
            ]
            if stored:
                runs = [run_to_proto(run) for run in stored]
                found.append(pb.BlockEvent(stored=pb.BlocksStored(volume=volume_epoch, runs=runs)))
            return found

        self._append(events)

    def _append(self, make_events: Callable[[], list[pb.BlockEvent]]) -> None:
        with self._lock:
            self._sequence += 1
            if not self._recording:
                self._floor = self._sequence
                return
            events = make_events()
            size = _RECORD_BYTES + sum(event.ByteSize() for event in events)
            self._ring.append((size, events))
            self._bytes += size
            while self._bytes > self.ring_bytes:
                self._bytes -= self._ring.popleft()[0]
                self._floor += 1
            if self._waiters:
                waiters, self._waiters = self._waiters, set()
                self._loop.call_soon_threadsafe(_wake, waiters)

    # ---- subscribers, on the event loop ----
    def join(self, volume_epochs: Callable[[], list[VolumeEpochInfo]], visible: Container[VolumeEpoch]) -> None:
        """Add a subscriber. The first one starts the recording of changes.

        Args:
            volume_epochs: reads the open volume epochs from the index.
            visible: volume epochs that can be read.

        Raises:
            CapacityExceeded: too many subscribers.
            Unavailable: the server is stopping.
        """
        if self._closed:
            raise Unavailable(STOPPING)
        if self._subscribers >= self.max_subscribers:
            raise CapacityExceeded("too many subscribers to block events", limit=self.max_subscribers)
        with self._lock:
            if not self._recording:
                # the lock holds changes back; one that is committed and not reported yet is seen here and comes as an event, too
                self._volumes = {
                    info.volume_epoch: opened_volume(info, served=info.volume_epoch in visible) for info in volume_epochs()
                }
                self._floor = self._sequence
                self._recording = True
        self._subscribers += 1

    def leave(self) -> None:
        """Remove a subscriber."""
        self._subscribers -= 1
        self._idle_since_s = self._clock.now_s()

    def expire(self) -> None:
        """Stop recording if there was no subscriber for ``LINGER_S``."""
        if self._recording and not self._subscribers and self._clock.now_s() - self._idle_since_s > LINGER_S:
            with self._lock:
                self._recording = False
                self._ring.clear()
                self._volumes.clear()
                self._bytes = 0
                self._sequence += 1  # liveness is no longer recorded: no resumption from earlier positions
                self._floor = self._sequence

    def update_served(self, visible: Container[VolumeEpoch]) -> None:
        """Report which volumes can be read now, as far as that has changed."""
        if not self._recording:
            return
        with self._lock:
            changed = [
                volume_epoch for volume_epoch, volume in self._volumes.items() if volume.served != (volume_epoch in visible)
            ]
        for volume_epoch in changed:
            self._append(functools.partial(self._served, volume_epoch, served=volume_epoch in visible))

    def _served(self, volume_epoch: VolumeEpoch, *, served: bool) -> list[pb.BlockEvent]:
        volume = self._volumes.get(volume_epoch)
        if volume is None:
            return []  # closed since
        changed = self._volumes[volume_epoch] = pb.VolumeOpened()  # a copy: the old message may be in the ring
        changed.CopyFrom(volume)
        changed.served = served
        return [pb.BlockEvent(served=pb.VolumeServed(volume=volume_epoch, served=served))]

    def position(self) -> LogPosition:
        """The present position."""
        with self._lock:
            return LogPosition(self._sequence, dict(self._volumes))

    def resume(self, sequence: int) -> LogPosition | None:
        """Resume after a change.

        Returns:
            The position and the present volumes; None: later changes were dropped, or the number was never used.
        """
        with self._lock:
            if not self._floor <= sequence <= self._sequence:
                return None
            return LogPosition(sequence, dict(self._volumes))

    def since(self, sequence: int, most_bytes: int) -> tuple[list[pb.BlockEvent], int] | None:
        """Events after a change, up to about ``most_bytes``, and the number of the last change; None: they were dropped."""
        with self._lock:
            if sequence < self._floor:
                return None
            events: list[pb.BlockEvent] = []
            taken = 0
            while sequence < self._sequence and taken < most_bytes:
                size, found = self._ring[sequence - self._floor]
                events += found
                taken += size
                sequence += 1
            return events, sequence

    async def wait(self, sequence: int, timeout_s: float) -> None:
        """Wait until there is a change after ``sequence``, or the timeout has passed.

        Raises:
            Unavailable: the server is stopping.
        """
        with self._lock:
            if self._closed:
                raise Unavailable(STOPPING)
            if self._sequence != sequence:
                return
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiters.add(future)
        try:
            await asyncio.wait([future], timeout=timeout_s)
        finally:
            with self._lock:
                self._waiters.discard(future)

    def close(self) -> None:
        """End the waits of all subscribers."""
        with self._lock:
            self._closed = True
            waiters, self._waiters = self._waiters, set()
        _wake(waiters)


def _wake(waiters: set[asyncio.Future[None]]) -> None:
    for future in waiters:
        if not future.done():
            future.set_result(None)


def opened_volume(info: VolumeEpochInfo, *, served: bool) -> pb.VolumeOpened:
    """The event of an open volume."""
    return pb.VolumeOpened(
        volume=info.volume_epoch,
        volume_id=info.volume_id,
        node_id=info.node_id,
        tier=tier_to_proto(info.tier),
        boot_id=info.boot_id,
        served=served,
    )
