"""The part of the GDS probe that may hang or crash, as a separate process: ``python -m …probe_process [FILE]``.

It prints one JSON object per step, so that the parent knows how far it got. It reads a file into device memory through kvikio,
as the node would, and reports which of kvikio's backends transferred the bytes.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.core.errors import KVStoreError, Unsupported
from kvstore.tiers.io_engines.kvikio_library import (
    CUDA_DRIVER,
    KVIKIO_ERRORS,
    compat_is_forced,
    first_line,
    load_kvikio,
)

PROBE_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20
_THREADS = 8


def main(path: Path | None) -> None:
    """Run and print the steps, until something is missing.

    Args:
        path: a file of at least ``PROBE_BYTES``, or an empty one, which is filled; None: read nothing.
    """
    _tell(begun="driver")
    cuda = ctypes.CDLL(CUDA_DRIVER)
    version = ctypes.c_int()
    status = cuda.cuInit(0)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    _tell(cuda_init=status, cuda_version=version.value)
    if status:
        return
    name = ctypes.create_string_buffer(256)
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    cuda.cuDeviceGetName(name, ctypes.c_int(256), ctypes.c_int(0))
    _tell(devices=count.value, device=name.value.decode(errors="replace"), begun="kvikio")
    try:
        kvikio = load_kvikio(threads=_THREADS)
    except Unsupported as error:
        _tell(kvikio_error=str(error))
        return
    _tell(kvikio=kvikio.version, compat_forced=compat_is_forced())
    try:
        _tell(**kvikio.driver_facts(), begun="read")
        if path is None:
            return
        if not path.stat().st_size:
            _fill(path)
        with _device_memory(cuda, PROBE_BYTES) as memory:
            _tell(**_read(kvikio, path, memory))
    except (KVStoreError, *KVIKIO_ERRORS) as error:
        _tell(read_error=first_line(error))


def _tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


class _Memory:
    """Memory of device 0."""

    def __init__(self, cuda: ctypes.CDLL, address: int, nbytes: int) -> None:
        self._cuda = cuda
        self.address = address
        self.nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        data = (self.address, False)
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": data, "strides": None, "version": 3}

    def part(self, start: int, nbytes: int) -> _Memory:
        return _Memory(self._cuda, self.address + start, nbytes)

    def fetch(self, target: memoryview) -> None:
        to = (ctypes.c_char * len(target)).from_buffer(target)
        _check(self._cuda.cuMemcpyDtoH_v2(to, ctypes.c_size_t(self.address), ctypes.c_size_t(self.nbytes)), "cuMemcpyDtoH")

    def fill(self, source: memoryview) -> None:
        raise NotImplementedError  # the probe only reads


@contextmanager
def _device_memory(cuda: ctypes.CDLL, nbytes: int) -> Iterator[_Memory]:
    context = ctypes.c_void_p()
    address = ctypes.c_size_t()
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), ctypes.c_int(0)), "cuDevicePrimaryCtxRetain")
    _check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    _check(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes)), "cuMemAlloc")
    try:
        yield _Memory(cuda, address.value, nbytes)
    finally:
        cuda.cuMemFree_v2(address)


def _check(status: int, call: str) -> None:
    if status:
        raise RuntimeError(f"{call} answers {status}")


def _fill(path: Path) -> None:
    with path.open("wb") as file:
        for _ in range(0, PROBE_BYTES, _PIECE_BYTES):
            file.write(os.urandom(_PIECE_BYTES))
        file.flush()
        os.fsync(file.fileno())


def _read(kvikio: Any, path: Path, memory: _Memory) -> dict[str, object]:  # noqa: ANN401
    pieces = [(start, memory.part(start, _PIECE_BYTES)) for start in range(0, PROBE_BYTES, _PIECE_BYTES)]
    with kvikio.open(path) as file, kvikio.carried() as carried:
        kvikio.register(memory)

        def read() -> None:
            futures = [file.pread(piece, _PIECE_BYTES, start, _PIECE_BYTES) for start, piece in pieces]
            done = sum([future.get() for future in futures])
            if done != PROBE_BYTES:
                raise RuntimeError(f"{done} of {PROBE_BYTES} bytes came")

        read()  # the first includes the setup time
        seconds = _seconds(read)
        backends = carried()
    found = bytearray(PROBE_BYTES)
    memory.fetch(memoryview(found))
    with path.open("rb") as plain:
        same = plain.read(PROBE_BYTES) == found
    return {"same": same, "backends": backends, "gigabytes_per_s": round(PROBE_BYTES / seconds / 1e9, 2)}


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-9)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
