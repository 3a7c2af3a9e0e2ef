"""Shared memory of the same pages as the arena of a node, and the peer of a local hit: one copy out of it, by one thread."""

from __future__ import annotations

import ctypes
import os
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvstore.process.memory.shared_memory import COLLAPSE, HUGE_PAGE_BYTES, advise, map_shared


class ArenaMemory:
    """``nbytes`` of shared memory whose pages were exchanged for huge ones, as far as the kernel does so for an arena.

    Attributes:
        view: the memory, writable.
        bytes: the same as an array.
        huge: whether the pages are huge.
    """

    def __init__(self, nbytes: int) -> None:
        mapped_bytes = nbytes + -nbytes % HUGE_PAGE_BYTES
        descriptor = os.memfd_create("benchmark-memory")
        os.ftruncate(descriptor, mapped_bytes)
        self._owner, memory = map_shared(descriptor, mapped_bytes)
        os.close(descriptor)
        self.view = memory[:nbytes]
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.view, np.uint8)
        self.bytes[:] = 1  # no page is missing when it counts
        self.huge = advise(self.bytes.ctypes.data, mapped_bytes, COLLAPSE) == 0

    @property
    def pages(self) -> str:
        """Name of the pages, for the notes of a record."""
        return "huge pages" if self.huge else "pages of 4 KiB"


class SharedCopy:
    """``nbytes`` of shared memory, as an arena is made of, to copy out of with one ``memmove``."""

    def __init__(self, nbytes: int) -> None:
        self.memory = ArenaMemory(nbytes)

    def copy_into(self, destination: npt.NDArray[np.uint8]) -> None:
        """One copy of everything."""
        ctypes.memmove(destination.ctypes.data, self.memory.bytes.ctypes.data, self.memory.bytes.nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        del self.memory
