"""A device whose streams work late, and in any order that their events allow: the worst case of a GPU.

Enqueued work is kept. ``run_all`` executes it piece by piece, each from a random stream whose next piece may run. An
order that the code under test does not enforce by an event is therefore violated sooner or later. Sources of a batch that are
declared final are read at once or late, each at random.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from kvclient.device.driver import Addresses, HostPinning, PinRefused
from kvstore.core.errors import Internal, Unsupported


class DeferredEvent:
    def __init__(self, device: DeferredDevice) -> None:
        self._device = device
        self.reached = False

    def done(self) -> bool:
        if not self.reached:
            self._device.step()
        return self.reached


class DeferredStream:
    def __init__(self, device: DeferredDevice) -> None:
        self._device = device
        self.work: deque[Callable[[], None] | DeferredEvent] = deque()
        self.launches = 0

    def run(self, work: Callable[[], None]) -> None:
        self._device.check_work()
        self.launches += 1
        self.work.append(work)

    def wait(self, event: DeferredEvent) -> None:
        self.work.append(event)

    def record(self) -> DeferredEvent:
        event = DeferredEvent(self._device)
        self.work.append(lambda: setattr(event, "reached", True))
        return event

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        self._device.check_host(target, target_pitch, source, source_pitch, width, rows)

        def work() -> None:
            for row in range(rows):
                ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)

        self.run(work)

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, *, final_sources: bool = False) -> None:
        if self._device.batches_left is not None:
            if not self._device.batches_left:
                raise Unsupported("this device does not support batched copies")
            self._device.batches_left -= 1
        self._device.batches.append((targets, sources, sizes, final_sources))
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self._device.check_host(target, size, source, size, size, 1)

        ahead: dict[int, bytes] = {}
        """Sources that the driver reads before the stream gets here."""

        def work() -> None:
            for at in self._device.random.sample(range(len(targets)), len(targets)):
                ctypes.memmove(int(targets[at]), ahead.get(at, int(sources[at])), int(sizes[at]))

        self.run(work)
        for at in range(len(targets) if final_sources else 0):
            if self._device.random.random() < 0.5:
                ahead[at] = ctypes.string_at(int(sources[at]), int(sizes[at]))


class FakePinning:
    """Pins of a fake driver: records calls, and refuses them on request."""

    def __init__(self, refuse_from: int | None = None) -> None:
        self._lock = threading.Lock()
        self.pinned: dict[int, int] = {}
        self.calls = 0
        self.refuse_from = refuse_from
        self.before_pin: Callable[[int], None] = lambda _: None
        self.refuse_unpin = False
        self.captures = 0
        """Number of calls to refuse, as during a graph capture."""
        self.free: int | None = 1 << 30
        self.cost_per_page = 0
        """Device memory that each pinned page takes."""

    @property
    def scope(self) -> object:
        return id(self)

    def free_bytes(self) -> int | None:
        return self.free

    def _captured(self) -> None:
        with self._lock:
            if self.captures:
                self.captures -= 1
                raise PinRefused(900, "operation not permitted when stream is capturing")

    def pin(self, address: int, nbytes: int) -> None:
        with self._lock:
            self.calls += 1
            call = self.calls
        self.before_pin(call)
        self._captured()
        with self._lock:
            if self.refuse_from is not None and len(self.pinned) >= self.refuse_from:
                raise PinRefused(2, "out of memory")
            for start, length in self.pinned.items():
                assert address + nbytes <= start or start + length <= address, "pinned twice"
            self.pinned[address] = nbytes
            if self.free is not None:
                self.free -= self.cost_per_page * (nbytes // 4096)

    def unpin(self, address: int) -> None:
        self._captured()
        if self.refuse_unpin:
            raise PinRefused(713, "not registered")
        del self.pinned[address]


class DeferredDevice:
    memory = torch.device("cpu")
    bus_id = ""
    has_batch = True
    reads_host = True

    def __init__(self, seed: int = 0, pinning: HostPinning | None = None) -> None:
        self.random = random.Random(seed)
        self.pinning = pinning
        self.streams: list[DeferredStream] = []
        self.fail_after: int | None = None
        """Number of copies to accept; the next is refused."""
        self.work_after: int | None = None
        """Number of pieces of work to accept; the next is refused."""
        self.batches_left: int | None = None
        """Number of batched copies to accept; the device does not support later ones."""
        self.batches: deque[tuple[Addresses, Addresses, Addresses, bool]] = deque(maxlen=1000)
        """Targets, sources and sizes of the last batched copies, and whether their sources were final."""
        self.paused = False
        self._lock = threading.RLock()

    def stream(self) -> DeferredStream:
        self.streams.append(DeferredStream(self))
        return self.streams[-1]

    def mark(self) -> DeferredEvent:
        event = DeferredEvent(self)
        event.reached = True
        return event

    def wait_event(self, event: DeferredEvent) -> None:
        until_s = time.monotonic() + 30
        while not event.done():
            assert time.monotonic() < until_s

    def run(self, work: Callable[[], None]) -> None:
        work()

    def check_work(self) -> None:
        if self.work_after is not None:
            if not self.work_after:
                raise Internal("the CUDA device rejects work")
            self.work_after -= 1

    def check_host(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        """Reject a copy that crosses from one pin into the next, like the driver."""
        if self.fail_after is not None:
            if not self.fail_after:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            self.fail_after -= 1
        pins = dict(getattr(self.pinning, "pinned", {}))  # a copy: another thread may pin
        for begin, pitch in ((target, target_pitch), (source, source_pitch)):
            end = begin + pitch * (rows - 1) + width
            touched = [start for start, length in pins.items() if begin < start + length and start < end]
            assert len(touched) <= 1, "a copy over the border of two pins"

    def step(self) -> bool:
        """Run one piece of work. Returns False if none may run."""
        with self._lock:
            return not self.paused and self.run_next()

    def run_next(self) -> bool:
        """Run one piece of work, for ``step``, which holds the lock."""
        ready = []
        for stream in self.streams:
            while stream.work and isinstance(stream.work[0], DeferredEvent) and stream.work[0].reached:
                stream.work.popleft()
            if stream.work and not isinstance(stream.work[0], DeferredEvent):
                ready.append(stream)
        if not ready:
            return False
        work = self.choose(ready).work.popleft()
        assert not isinstance(work, DeferredEvent)
        work()
        return True

    def choose(self, ready: list[DeferredStream]) -> DeferredStream:
        return self.random.choice(ready)

    def run_all(self) -> None:
        while self.step():
            pass
        assert not any(stream.work for stream in self.streams), "work that waits for ever"


class ComputingDevice(DeferredDevice):
    """A device whose current stream, on which an engine computes, also works late.

    ``first`` is the work that runs first if both may: ``compute`` or ``copies``; otherwise the order is random.
    """

    def __init__(self, seed: int = 0, first: str = "") -> None:
        super().__init__(seed)
        self.compute = self.stream()
        self._first = first

    def mark(self) -> DeferredEvent:
        return self.compute.record()

    def wait_event(self, event: DeferredEvent) -> None:
        self.compute.wait(event)

    def run(self, work: Callable[[], None]) -> None:
        self.compute.work.append(work)

    def choose(self, ready: list[DeferredStream]) -> DeferredStream:
        wanted = [stream for stream in ready if (stream is self.compute) == (self._first == "compute")]
        return super().choose(wanted if self._first and wanted else ready)


def bytes_of(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)
