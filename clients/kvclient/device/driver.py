"""Bindings to the CUDA driver for functions that torch lacks: pinning memory that is already mapped, and many copies in one call.

The module calls ``libcuda.so.1`` through ctypes. ``torch.cuda.cudart()`` lacks batched and two-dimensional copies.
``libcudart`` would require a guess of its major version, and torch brings its own copy. The driver library exists wherever a
GPU works, its entry points keep their meaning, and ctypes releases the interpreter lock, so that a thread which pins gigabytes
stops no other thread. Streams, events and the context remain torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.core.errors import Internal, Unavailable, Unsupported

Addresses = npt.NDArray[np.int64]

_SUCCESS = 0
_NOT_SUPPORTED = 801
"""CUDA_ERROR_NOT_SUPPORTED"""
_PORTABLE_AND_MAPPED = 0x1 | 0x2
"""Pinned for every context of the process, and readable by kernels at its host address."""
_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: a stream that does not wait for the default one."""
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""
_CAPTURING = frozenset({900, 901})
"""CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and …_INVALIDATED: another thread is capturing a graph"""
_ATTRIBUTE_SAME_ADDRESS = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"""
_UNIFIED = 4
"""CU_MEMORYTYPE_UNIFIED: the driver distinguishes host and device by the address."""
_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM"""
_ANY_ORDER = 3
"""CU_MEMCPY_SRC_ACCESS_ORDER_ANY: sources may be read before earlier work of the stream has ended."""
_PREFER_OVERLAP = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: a hint to leave the multiprocessors to kernels."""


class PinRefused(Exception):
    """The driver refused to pin or unpin memory.

    Attributes:
        code: error code of the driver.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{message} (CUDA error {code})")
        self.code = code

    @property
    def passes(self) -> bool:
        """Whether a retry may succeed: the driver refuses while a graph is captured."""
        return self.code in _CAPTURING


class HostPinning(Protocol):
    """Page-locks memory for a device. Tests replace the driver at this interface. Thread-safe."""

    @property
    def scope(self) -> object:
        """Pins of drivers with equal scopes are the same pins: the CUDA driver pins for the whole process."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pin mapped memory.

        Raises:
            PinRefused: the driver refused.
        """

    def unpin(self, address: int) -> None:
        """Unpin the range that begins at an address.

        Raises:
            PinRefused: the driver refused.
        """

    def free_bytes(self) -> int | None:
        """Return the free memory of the device; None: unknown at the moment."""


class _Copy2D(ctypes.Structure):
    _fields_ = [
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class _BatchAttributes(ctypes.Structure):
    _fields_ = [
        ("order", ctypes.c_uint),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


class CudaDriver:
    """libcuda for one device. Thread-safe.

    Args:
        index: index of the device, as torch counts.

    Raises:
        Unavailable: the driver or this device does not exist.
    """

    def __init__(self, index: int) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unavailable("no CUDA driver on this host: libcuda.so.1 is not found", error=error) from error
        self._check("initialise CUDA", self._lib.cuInit(0))
        handle = ctypes.c_int()
        self._check("find the device", self._lib.cuDeviceGet(ctypes.byref(handle), index))
        # never released: torch keeps the context for the life of the process, and pins and copies may need it until then
        self._context = ctypes.c_void_p()
        self._check("find the device's context", self._lib.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), handle))
        same = ctypes.c_int()
        self._lib.cuDeviceGetAttribute(ctypes.byref(same), _ATTRIBUTE_SAME_ADDRESS, handle)
        self.reads_host = bool(same.value)
        """Whether kernels can use the host address of pinned memory."""
        bus = ctypes.create_string_buffer(16)
        found = self._lib.cuDeviceGetPCIBusId(bus, len(bus), handle) == _SUCCESS
        self.bus_id = bus.value.decode().lower() if found else ""
        version = ctypes.c_int()
        self._lib.cuDriverGetVersion(ctypes.byref(version))
        self.version = version.value
        """CUDA version of the driver: 12080 is 12.8."""
        # the symbol without a suffix has the first signature, which returns the index of the failed copy
        self._batch: Callable[..., int] | None = getattr(self._lib, "cuMemcpyBatchAsync", None)

    @property
    def has_batch(self) -> bool:
        """Whether many copies may go in one call (CUDA 12.8). Whether the device supports it is known after the first call."""
        return self._batch is not None

    def stream(self) -> int:
        """Create a stream and return its handle. It is never destroyed: memory that torch allocates on a stream refers to it.

        Raises:
            Internal: the driver refused.
        """
        handle = ctypes.c_void_p()
        with self._entered():
            self._check("make a stream", self._lib.cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING))
        assert handle.value is not None
        return handle.value

    # ---- pins ----
    @property
    def scope(self) -> object:
        """See ``HostPinning``."""
        return "cuda"

    def free_bytes(self) -> int | None:
        """See ``HostPinning``."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self._entered(), self._relaxed():
            code = self._lib.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        return free.value if code == _SUCCESS else None

    def pin(self, address: int, nbytes: int) -> None:
        """See ``HostPinning``."""
        with self._entered(), self._relaxed():
            code = self._lib.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _PORTABLE_AND_MAPPED)
        if code != _SUCCESS:
            raise PinRefused(code, self._message(code))

    def unpin(self, address: int) -> None:
        """See ``HostPinning``."""
        with self._entered(), self._relaxed():
            code = self._lib.cuMemHostUnregister(ctypes.c_void_p(address))
        if code != _SUCCESS:
            raise PinRefused(code, self._message(code))

    # ---- copies ----
    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        """Enqueue the copy of rows of equal length; each side is in host or device memory.

        Args:
            target: address of the first row.
            target_pitch: bytes from row to row.
            source: address of the first row.
            source_pitch: bytes from row to row.
            width: bytes of a row.
            rows: number of rows.
            stream: handle of a CUDA stream.

        Raises:
            Internal: the driver refused.
        """
        if rows == 1:
            arguments = (ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(width), ctypes.c_void_p(stream))
            with self._entered():
                self._check("copy", self._lib.cuMemcpyAsync(*arguments))
            return
        copy = _Copy2D(
            src_type=_UNIFIED,
            src_device=source,
            src_pitch=source_pitch,
            dst_type=_UNIFIED,
            dst_device=target,
            dst_pitch=target_pitch,
            width=width,
            height=rows,
        )
        with self._entered():
            self._check("copy rows", self._lib.cuMemcpy2DAsync_v2(ctypes.byref(copy), ctypes.c_void_p(stream)))

    def copy_batch(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int, *, final_sources: bool = False
    ) -> None:
        """Enqueue many copies in one call; their order is undefined.

        Args:
            targets: addresses, int64.
            sources: addresses.
            sizes: bytes of each.
            stream: handle of a CUDA stream, not the default one.
            final_sources: the sources have their final content already, and keep it until the copies have ended. The driver
                may then read them before earlier work of the stream has ended. It is also asked to overlap the copies with
                kernels. Targets are written in the order of the stream.

        Raises:
            Internal: the driver refused.
            Unsupported: the driver or the device does not support batched copies; nothing was copied.
        """
        if self._batch is None:
            raise Unsupported("this driver does not support batched copies", version=self.version)
        if not len(targets):
            return
        # kept in names: the driver reads them during the call
        arrays = [np.ascontiguousarray(array, np.int64) for array in (targets, sources, sizes)]
        attributes = _BatchAttributes(order=_STREAM_ORDER)
        if final_sources:
            attributes = _BatchAttributes(order=_ANY_ORDER, flags=_PREFER_OVERLAP)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        with self._entered():
            code = self._batch(
                *(ctypes.c_void_p(array.ctypes.data) for array in arrays),
                ctypes.c_size_t(len(targets)),
                ctypes.byref(attributes),
                ctypes.byref(first),
                ctypes.c_size_t(1),
                ctypes.byref(failed),
                ctypes.c_void_p(stream),
            )
        if code == _NOT_SUPPORTED:  # the driver supports the call, but the device (or its virtualisation) does not
            raise Unsupported("this device does not support batched copies", version=self.version, reason=self._message(code))
        self._check("copy a batch", code)

    # ---- errors ----
    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Make the context current for this thread, and restore torch's afterwards."""
        self._check("enter the device's context", self._lib.cuCtxPushCurrent_v2(self._context))
        try:
            yield
        finally:
            self._lib.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    @contextmanager
    def _relaxed(self) -> Iterator[None]:
        """Allow this thread calls that are forbidden while another thread captures a graph, without invalidating that graph."""
        mode = ctypes.c_int(_RELAXED)
        self._check("leave the mode of captures", self._lib.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
        try:
            yield
        finally:
            self._lib.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # restores the earlier mode

    def _message(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._lib.cuGetErrorString(code, ctypes.byref(text))
        return text.value.decode() if text.value else "unknown error"

    def _check(self, what: str, code: int) -> None:
        if code != _SUCCESS:
            raise Internal(f"the CUDA driver cannot {what}", code=code, reason=self._message(code))
