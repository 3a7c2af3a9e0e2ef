"""The peer of a local hit: one copy of the same bytes, out of shared memory, by one thread."""

from __future__ import annotations

import ctypes
import mmap
import os
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt


class SharedCopy:
    """``nbytes`` of shared memory, as an arena is made of, to copy out of with one ``memmove``."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        descriptor = os.memfd_create("benchmark-peer")
        os.ftruncate(descriptor, nbytes)
        self._map = mmap.mmap(descriptor, nbytes)
        os.close(descriptor)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._bytes[:] = 1  # no page is missing when it counts

    def copy_into(self, destination: npt.NDArray[np.uint8]) -> None:
        """One copy of everything."""
        ctypes.memmove(destination.ctypes.data, self._bytes.ctypes.data, self.nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        del self._bytes
        self._map.close()
