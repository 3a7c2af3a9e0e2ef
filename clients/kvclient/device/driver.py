"""The CUDA driver, as far as torch does not have it: pinning memory that is mapped already, and many copies in one call.

It is called by ctypes in ``libcuda.so.1``, not through ``torch.cuda.cudart()`` (which has no batched and no two-dimensional copy)
nor through ``libcudart`` (whose major version must be guessed, and of which torch has one of its own, linked into it or beside
it): the driver library is there wherever a GPU works, its entry points never change their meaning, and ctypes lets go of the
interpreter lock, so that pinning gigabytes in a thread stops nobody. Streams and events stay torch's, and so does the context.
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
"""Pinned for every context of the process, and readable by kernels at its own address."""
_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: a stream that does not wait for the default one."""
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""
_CAPTURING = frozenset({900, 901})
"""CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and …_INVALIDATED: somebody captures a graph at the moment"""
_ATTRIBUTE_SAME_ADDRESS = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"""
_UNIFIED = 4
"""CU_MEMORYTYPE_UNIFIED: the driver tells host from device by the address."""
_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM"""


class PinRefused(Exception):
    """The driver did not pin memory.

    Attributes:
        code: of the driver.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{message} (CUDA error {code})")
        self.code = code

    @property
    def passes(self) -> bool:
        """Whether the driver may do it a moment later: it does not while a graph is captured."""
        return self.code in _CAPTURING


class HostPinning(Protocol):
    """Page-locks memory for a device: the boundary to the driver that pinning is tested at. Thread-safe."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pins mapped memory.

        Raises:
            PinRefused: the driver does not.
        """

    def unpin(self, address: int) -> None:
        """Ends the pin that began at an address.

        Raises:
            PinRefused: the driver does not.
        """


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
        index: of the device, as torch counts.

    Raises:
        Unavailable: there is no driver, or not this device.
    """

    def __init__(self, index: int) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unavailable("no CUDA driver on this host: libcuda.so.1 is not found", error=error) from error
        self._check("initialise CUDA", self._lib.cuInit(0))
        handle = ctypes.c_int()
        self._check("find the device", self._lib.cuDeviceGet(ctypes.byref(handle), index))
        # never released: it is torch's, which keeps it for the life of the process, and pins and copies may need it until then
        self._context = ctypes.c_void_p()
        self._check("find the device's context", self._lib.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), handle))
        same = ctypes.c_int()
        self._lib.cuDeviceGetAttribute(ctypes.byref(same), _ATTRIBUTE_SAME_ADDRESS, handle)
        self.reads_host = bool(same.value)
        """Whether kernels may use pinned memory's own address."""
        bus = ctypes.create_string_buffer(16)
        found = self._lib.cuDeviceGetPCIBusId(bus, len(bus), handle) == _SUCCESS
        self.bus_id = bus.value.decode().lower() if found else ""
        version = ctypes.c_int()
        self._lib.cuDriverGetVersion(ctypes.byref(version))
        self.version = version.value
        """CUDA version that the driver speaks: 12080 is 12.8."""
        # the symbol without a suffix has kept its first signature, with an index of the copy that failed
        self._batch: Callable[..., int] | None = getattr(self._lib, "cuMemcpyBatchAsync", None)

    @property
    def has_batch(self) -> bool:
        """Whether many copies may go in one call (CUDA 12.8). That the device takes them shows with the first."""
        return self._batch is not None

    def stream(self) -> int:
        """Handle of a new stream. It is never given back: what torch allocates on a stream names it for as long as it lives.

        Raises:
            Internal: the driver refused.
        """
        handle = ctypes.c_void_p()
        with self._entered():
            self._check("make a stream", self._lib.cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING))
        assert handle.value is not None
        return handle.value

    # ---- pins ----
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
        """Enqueues the copy of some rows of equal length, either side in host or device memory.

        Args:
            target: address of the first.
            target_pitch: bytes from row to row.
            source: address of the first.
            source_pitch: bytes from row to row.
            width: bytes of a row.
            rows: how many.
            stream: handle of a CUDA stream.

        Raises:
            Internal: the driver refused.
        """
        if rows == 1:
            place = (ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(width), ctypes.c_void_p(stream))
            with self._entered():
                self._check("copy", self._lib.cuMemcpyAsync(*place))
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

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """Enqueues many copies in one call; they have no order among each other.

        Args:
            targets: addresses, int64.
            sources: addresses.
            sizes: bytes of each.
            stream: handle of a CUDA stream, not the default one.

        Raises:
            Internal: the driver refused.
            Unsupported: it does not know such copies, or this device has none; nothing was copied.
        """
        if self._batch is None:
            raise Unsupported("this driver has no batched copies", version=self.version)
        if not len(targets):
            return
        # kept in names: the driver reads them during the call
        arrays = [np.ascontiguousarray(array, np.int64) for array in (targets, sources, sizes)]
        attributes, first, failed = _BatchAttributes(order=_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t(0)
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
        if code == _NOT_SUPPORTED:  # the driver has the call, and the device, or how it is shared, does not
            raise Unsupported("this device has no batched copies", version=self.version, reason=self._message(code))
        self._check("copy a batch", code)

    # ---- errors ----
    @contextmanager
    def _entered(self) -> Iterator[None]:
        """The driver knows a current context by thread, and torch's must be the same afterwards."""
        self._check("enter the device's context", self._lib.cuCtxPushCurrent_v2(self._context))
        try:
            yield
        finally:
            self._lib.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    @contextmanager
    def _relaxed(self) -> Iterator[None]:
        """This thread may do what it may not while another captures a graph, and does not spoil that graph."""
        mode = ctypes.c_int(_RELAXED)
        self._check("leave the mode of captures", self._lib.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
        try:
            yield
        finally:
            self._lib.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # the mode that it was

    def _message(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._lib.cuGetErrorString(code, ctypes.byref(text))
        return text.value.decode() if text.value else "unknown error"

    def _check(self, what: str, code: int) -> None:
        if code != _SUCCESS:
            raise Internal(f"the CUDA driver cannot {what}", code=code, reason=self._message(code))
