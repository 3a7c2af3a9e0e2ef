"""Devices as the copies use them: ordered streams, events, and copies of memory by address.

``CudaDevice`` is a GPU. ``CpuDevice`` does all work synchronously: for engines on a CPU that quantise their cache, and for
tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Protocol

import torch

from kvclient.device.driver import Addresses, CudaDriver, HostPinning
from kvstore.core.errors import Internal, KVStoreError, Unavailable


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether all work before the event has ended.

        Raises:
            Internal: the device failed.
        """


class UnknownEnd:
    """Event after work of which no event could be recorded. It may run at any time, until the process ends.

    Args:
        error: the device's error.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def done(self) -> bool:
        """Raise ``Internal``."""
        raise Internal("the device failed: the end of its copies is unknown", error=self._error) from self._error


def done_or_failed(event: Event) -> bool:
    """Whether all work before an event has ended, or the device failed.

    True for ``UnknownEnd``, too, whose work may still run: check for it before memory is used again.
    """
    try:
        return event.done()
    except Internal:
        return True


def has_ended(event: Event) -> bool:
    """Whether all work before an event has ended for certain: not if the device failed."""
    try:
        return event.done()
    except Internal:
        return False


class DeviceStream(Protocol):
    """A queue of work that the device does in order."""

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue the work that ``work`` enqueues on torch's current stream."""

    def wait(self, event: Event) -> None:
        """Let later work of this stream begin after an event."""

    def record(self) -> Event:
        """Return an event after all enqueued work."""

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        """Enqueue the copy of rows; see ``CudaDriver.copy_rows``."""

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, *, final_sources: bool = False) -> None:
        """Enqueue many copies in one call; see ``CudaDriver.copy_batch``."""


class Device(Protocol):
    """Device that holds a KV cache."""

    @property
    def memory(self) -> torch.device:
        """Its torch device."""

    @property
    def pinning(self) -> HostPinning | None:
        """Pins host memory; None: this device needs no pins."""

    @property
    def bus_id(self) -> str:
        """PCI address; empty: not a PCI device."""

    @property
    def has_batch(self) -> bool:
        """Whether ``copy_batch`` works."""

    @property
    def reads_host(self) -> bool:
        """Whether kernels can read pinned memory at its host address."""

    def stream(self) -> DeviceStream:
        """Create a stream."""

    def mark(self) -> Event:
        """Return an event after all work on the caller's current stream."""

    def wait_event(self, event: Event) -> None:
        """Let later work on the caller's current stream begin after an event. Does not wait."""

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue the work that ``work`` enqueues, on the caller's current stream.

        Raises:
            Internal: the device failed.
        """


# ---- a GPU ----


@contextmanager
def _current(device: torch.device, failure: str) -> Iterator[None]:
    """Make a device current for this thread, and convert errors. Every call of the CUDA runtime is inside this context.

    In a new thread, GPU 0 is current. A runtime call there, even the query of an event of another GPU, creates a context on
    GPU 0, which takes hundreds of megabytes of its memory per process.

    Args:
        device: the device.
        failure: message of the error.

    Raises:
        Internal: torch, Triton or the driver failed.
    """
    try:
        with torch.cuda.device(device):
            yield
    except KVStoreError:
        raise
    except Exception as error:  # torch, Triton and compilers raise errors of many types
        raise Internal(failure, device=device, error=error) from error


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event = event
        self._device = device

    def done(self) -> bool:
        with _current(self._device, "the CUDA device failed"):  # torch reports any earlier failure of the device here
            return bool(self.event.query())


class _CudaStream:
    """A stream of the driver, created at first use. Torch's few streams rotate, and the engine's own is among them."""

    def __init__(self, device: torch.device, driver: CudaDriver) -> None:
        self._device = device
        self._driver = driver

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.ExternalStream(self._driver.stream(), device=self._device)

    def run(self, work: Callable[[], None]) -> None:
        with self._working(), torch.cuda.stream(self._stream):  # alone, the second would restore GPU 0 in a new thread
            work()

    def wait(self, event: Event) -> None:
        with self._working():
            assert isinstance(event, _CudaEvent)  # not so if the device rejected the event
            self._stream.wait_event(event.event)

    def record(self) -> _CudaEvent:
        with self._working():
            event = torch.cuda.Event()
            event.record(self._stream)
        return _CudaEvent(event, self._device)

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        self._driver.copy_rows(target, target_pitch, source, source_pitch, width, rows, self._handle())

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, *, final_sources: bool = False) -> None:
        self._driver.copy_batch(targets, sources, sizes, self._handle(), final_sources=final_sources)

    def _handle(self) -> int:
        with self._working():
            return int(self._stream.cuda_stream)

    def _working(self) -> AbstractContextManager[None]:
        return _current(self._device, "the CUDA device rejects work")


class CudaDevice:
    """A GPU of this process.

    Args:
        memory: ``cuda:N``.

    Raises:
        Unavailable: the driver or the device does not exist, or the device failed.
    """

    def __init__(self, memory: torch.device) -> None:
        try:
            self.memory = torch.device("cuda", torch.cuda.current_device() if memory.index is None else memory.index)
            torch.empty(1, device=self.memory)  # torch creates the context that the driver then uses
        except Exception as error:  # an AssertionError if torch is built without CUDA
            raise Unavailable("torch cannot use the CUDA device", device=memory, error=error) from error
        self._driver = CudaDriver(self._index_of_driver())
        self.pinning: HostPinning | None = self._driver
        self.bus_id = self._driver.bus_id
        self.has_batch = self._driver.has_batch
        self.reads_host = self._driver.reads_host

    def _index_of_driver(self) -> int:
        """Index of the device: torch and the driver both count the devices of CUDA_VISIBLE_DEVICES."""
        assert self.memory.index is not None
        return self.memory.index

    def stream(self) -> _CudaStream:
        return _CudaStream(self.memory, self._driver)

    def mark(self) -> _CudaEvent:
        with _current(self.memory, "the CUDA device rejects work"):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.memory))
        return _CudaEvent(event, self.memory)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        with _current(self.memory, "the CUDA device rejects work"):
            torch.cuda.current_stream(self.memory).wait_event(event.event)

    def run(self, work: Callable[[], None]) -> None:
        with _current(self.memory, "the CUDA device rejects work"):
            work()


# ---- a CPU ----


class _Done:
    def done(self) -> bool:
        return True


_openmp = ctypes.CDLL(None)
"""The libraries of this process, which torch loaded OpenMP into."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute in the calling thread alone, if torch uses OpenMP.

    With more threads, every operation waits until all of them had a processor, and the engine computes on these. The setting is
    that of the calling thread. ``torch.set_num_threads`` would change the default of other threads, too.
    """
    threads = torch.get_num_threads()  # the first call of a thread sets its default
    limited = threads > 1 and hasattr(_openmp, "omp_set_num_threads")
    if limited:
        _openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        if limited:
            _openmp.omp_set_num_threads(threads)


class _AtOnce:
    def run(self, work: Callable[[], None]) -> None:
        with _one_thread():
            work()

    def wait(self, event: Event) -> None:
        assert event.done()

    def record(self) -> _Done:
        return _Done()

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)

    def copy_batch(
        self,
        targets: Addresses,
        sources: Addresses,
        sizes: Addresses,
        *,
        final_sources: bool = False,  # noqa: ARG002
    ) -> None:
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)


class CpuDevice:
    """Host memory. All work is done when it is requested."""

    memory = torch.device("cpu")
    pinning: HostPinning | None = None
    bus_id = ""
    has_batch = True
    reads_host = False
    """No kernels run here."""

    def stream(self) -> _AtOnce:
        return _AtOnce()

    def mark(self) -> _Done:
        return _Done()

    def wait_event(self, event: Event) -> None:
        assert event.done()

    def run(self, work: Callable[[], None]) -> None:
        work()
