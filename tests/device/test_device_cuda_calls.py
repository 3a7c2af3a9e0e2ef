"""Calls of the CUDA driver and of torch for a GPU, with both faked: threads, graph captures, streams."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from kvclient.device.driver import CudaDriver, PinRefused, _BatchAttributes
from kvclient.device.streams import CudaDevice, _CudaStream
from kvstore.core.errors import Internal, Unavailable

GLOBAL, RELAXED = 0, 2
CAPTURING = 900


class Libcuda:
    """The driver's library while another thread captures a graph in the mode that restricts other threads most."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self.refuses = False
        self.streams = 100

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0

    @property
    def mode(self) -> int:
        return getattr(self._of_thread, "mode", GLOBAL)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        given = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))
        self._of_thread.mode, given[0] = given[0], self.mode
        return 0

    def cuMemHostRegister_v2(self, *_: object) -> int:  # noqa: N802
        return CAPTURING if self.refuses or self.mode != RELAXED else 0

    def cuMemHostUnregister(self, *_: object) -> int:  # noqa: N802
        return CAPTURING if self.refuses or self.mode != RELAXED else 0

    def cuStreamCreate(self, handle: Any, flags: int) -> int:  # noqa: N802
        assert flags == 1, "it would wait for the default stream"
        self.streams += 1
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = self.streams
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Libcuda:
    made = Libcuda()
    monkeypatch.setattr("kvclient.device.driver.ctypes.CDLL", lambda _: made)
    return made


@pytest.mark.parametrize("end", ["pin", "unpin"])
def test_pin_during_capture_of_other_thread_succeeds(library: Libcuda, end: str) -> None:
    driver = CudaDriver(0)
    ask = (lambda: driver.pin(4096, 4096)) if end == "pin" else (lambda: driver.unpin(4096))
    ask()
    assert library.mode == GLOBAL, "what else this thread does is as before"
    library.refuses = True
    with pytest.raises(PinRefused) as refused:
        ask()
    assert refused.value.passes, "a moment later the driver may"
    assert library.mode == GLOBAL
    assert not PinRefused(2, "out of memory").passes


class Torch:
    """Torch's current devices and streams in a thread that has used no GPU yet: a context that it creates remains."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 0
        self.contexts: set[int] = set()
        self.made: list[int] = []
        self.error: Exception | None = None
        """Raised by all calls of the runtime."""
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "ExternalStream", self.external)
        monkeypatch.setattr(torch.cuda, "Stream", None)
        monkeypatch.setattr(torch.cuda, "Event", lambda: RuntimeEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: RuntimeStream(self, 7, device))
        monkeypatch.setattr(torch, "empty", lambda _, device: self.call())

    def call(self) -> None:
        """A call of the CUDA runtime: it creates a context on the thread's current device."""
        if self.error is not None:
            raise self.error
        self.contexts.add(self.current)

    def external(self, handle: int, device: torch.device) -> RuntimeStream:
        self.made.append(handle)
        return RuntimeStream(self, handle, device)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        try:
            yield
        finally:
            self.current = before  # without a context, if there is none

    @contextmanager
    def stream(self, stream: RuntimeStream) -> Iterator[None]:
        before, self.current = self.current, stream.device.index
        self.call()
        try:
            yield
        finally:
            self.current = before
            self.contexts.add(before)  # it sets that device's stream again


class RuntimeStream:
    def __init__(self, fake: Torch, handle: int, device: torch.device) -> None:
        self.fake, self.cuda_stream, self.device = fake, handle, device

    def wait_event(self, _: object) -> None:
        self.fake.call()


class RuntimeEvent:
    def __init__(self, fake: Torch) -> None:
        self.fake = fake

    def record(self, _: object) -> None:
        self.fake.call()

    def query(self) -> bool:
        self.fake.call()
        return True


def test_copies_to_one_gpu_create_no_context_on_another(library: Libcuda, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Torch(monkeypatch)
    stream = _CudaStream(torch.device("cuda", 3), CudaDriver(3))
    seen: list[int] = []
    stream.run(lambda: seen.append(fake.current))
    assert seen == [3]
    assert fake.contexts == {3}
    assert fake.current == 0

    def fails() -> None:
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(Internal, match="rejects work"):
        stream.run(fails)
    assert library.mode == GLOBAL


def test_wait_for_a_rejected_event_is_an_error_of_the_device(library: Libcuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copiers give out another kind of event if the device rejected one."""

    class NeverKnown:
        def done(self) -> bool:
            return False

    Torch(monkeypatch)
    stream = _CudaStream(torch.device("cuda", 0), CudaDriver(0))
    assert library.streams == 100
    with pytest.raises(Internal, match="rejects work"):
        stream.wait(NeverKnown())


def every_call(device: CudaDevice) -> list[Callable[[], object]]:
    """All calls of a device and its streams that the copies' threads make."""
    stream, one = device.stream(), np.ones(1, np.int64)
    mark = device.mark()
    return [
        mark.done,
        device.mark,
        lambda: device.wait_event(mark),
        lambda: device.run(lambda: torch.cuda.Event().query()),
        stream.record,
        lambda: stream.wait(mark),
        lambda: stream.run(lambda: torch.cuda.Event().query()),
        lambda: stream.copy_rows(1, 1, 2, 2, 1, 1),
        lambda: stream.copy_rows(1, 1, 2, 2, 1, 2),
        lambda: stream.copy_batch(one, one, one),
    ]


@pytest.mark.usefixtures("library")
def test_calls_in_a_new_thread_leave_gpu_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Torch(monkeypatch)
    device = CudaDevice(torch.device("cuda", 3))
    calls = every_call(device)
    fake.contexts = set()
    for call in calls:
        call()
        assert fake.current == 0
    assert fake.contexts <= {3}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory"), ValueError("no kernel"), AssertionError("no CUDA")])
def test_errors_of_the_runtime_are_internal(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    fake = Torch(monkeypatch)
    calls = every_call(CudaDevice(torch.device("cuda", 3)))
    fake.error = error
    for call in calls[:7]:
        with pytest.raises(Internal, match="the CUDA device"):
            call()
    with pytest.raises(Unavailable, match="cannot use"):
        CudaDevice(torch.device("cuda", 3))


def test_streams_are_created_by_driver_at_first_use(library: Libcuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has 32 and hands them out in rotation: with a few KV cache groups the engine's own would be among the copies'."""
    fake = Torch(monkeypatch)
    driver = CudaDriver(0)
    streams = [_CudaStream(torch.device("cuda", 0), driver) for _ in range(40)]
    assert library.streams == 100, "none is made ahead"
    for stream in (*streams[:3], *streams[:3]):
        stream.run(lambda: None)
    assert fake.made == [101, 102, 103]


def test_batch_attributes_allow_reading_ahead_only_if_asked(library: Libcuda, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []

    def batch(*given: Any) -> int:
        attributes = ctypes.cast(given[4], ctypes.POINTER(_BatchAttributes)).contents
        seen.append((attributes.order, attributes.flags, given[6].value))
        return 0

    monkeypatch.setattr(library, "cuMemcpyBatchAsync", batch, raising=False)
    driver, one = CudaDriver(0), np.ones(3, np.int64)
    driver.copy_batch(one, one, one, 7)
    driver.copy_batch(one, one, one, 7, final_sources=True)
    assert seen == [(1, 0, 1), (3, 1, 1)], "stream order, no flags; any order and overlap with kernels"
