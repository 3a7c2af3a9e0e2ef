"""Devices as the copies use them: ordered streams, events, and copies of memory by address.

``CudaDevice`` is a GPU. ``CpuDevice`` does all work synchronously: for engines on a CPU that quantise their cache, and for
tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch

from kvclient.device.driver import Addresses, CudaDriver, HostPinning
from kvstore.core.errors import Internal


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether all work before the event has ended.

        Raises:
            Internal: the device failed.
        """


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

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
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


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        try:
            return bool(self.event.query())
        except RuntimeError as error:  # torch reports any earlier failure of the device here
            raise Internal("the CUDA device failed", error=error) from error


class _CudaStream:
    """A stream of the driver, created at first use. Torch's few streams rotate, and the engine's own is among them."""

    def __init__(self, device: torch.device, driver: CudaDriver) -> None:
        self._device = device
        self._driver = driver

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.ExternalStream(self._driver.stream(), device=self._device)

    def run(self, work: Callable[[], None]) -> None:
        try:
            # torch.cuda.stream alone restores the device that was current before: in a new thread that is GPU 0, and torch would
            # create a context there
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                work()
        except RuntimeError as error:
            raise Internal("the CUDA device rejects work", error=error) from error

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream.wait_event(event.event)

    def record(self) -> _CudaEvent:
        event = torch.cuda.Event()
        event.record(self._stream)
        return _CudaEvent(event)

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        self._driver.copy_rows(target, target_pitch, source, source_pitch, width, rows, self._stream.cuda_stream)

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        self._driver.copy_batch(targets, sources, sizes, self._stream.cuda_stream)


class CudaDevice:
    """A GPU of this process.

    Args:
        memory: ``cuda:N``.

    Raises:
        Unavailable: the driver or the device does not exist.
    """

    def __init__(self, memory: torch.device) -> None:
        self.memory = torch.device("cuda", torch.cuda.current_device() if memory.index is None else memory.index)
        torch.empty(1, device=self.memory)  # torch creates the context that the driver then uses
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
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.memory))
        return _CudaEvent(event)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        torch.cuda.current_stream(self.memory).wait_event(event.event)

    def run(self, work: Callable[[], None]) -> None:
        try:
            with torch.cuda.device(self.memory):
                work()
        except RuntimeError as error:
            raise Internal("the CUDA device rejects work", error=error) from error


# ---- a CPU ----


class _Done:
    def done(self) -> bool:
        return True


class _AtOnce:
    def run(self, work: Callable[[], None]) -> None:
        work()

    def wait(self, event: Event) -> None:
        assert event.done()

    def record(self) -> _Done:
        return _Done()

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
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
