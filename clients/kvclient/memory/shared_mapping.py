"""One mapping of each arena per process, however many sessions use it.

Each KV cache group, namespace and weights epoch of an engine has its own session, and each session receives a descriptor of
the same memory. A second mapping would cost page tables, and on a device all pins again.

This module also knows which pages of an arena exist. The process that first touches a page of shared memory is charged for it: an
engine that touched pages before the node does would be killed for memory that belongs to the node.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref

import numpy as np

from kvstore.core.errors import Conflict, Unavailable
from kvstore.process.memory.shared_memory import POPULATE_WRITE, advise, map_shared

_libc = ctypes.CDLL(None, use_errno=True)
"""ctypes releases the interpreter lock during a call, the mmap module does not."""


class SharedMapping:
    """Memory of one file, mapped once in this process. Thread-safe.

    Args:
        key: device and inode of the file.
        owner: unmaps the memory; owned from now on.
        memory: the mapped memory.
        descriptor: of the file; owned from now on.
    """

    def __init__(self, key: tuple[int, int], owner: mmap.mmap, memory: memoryview, descriptor: int) -> None:
        self.key = key
        self.owner = owner
        self.memory = memory
        self.descriptor = descriptor
        self.users = 0
        """Guarded by the table."""


class MappingUse:
    """One session's use of a mapping, with its own view.

    Args:
        shared: the mapping.
        first: whether no other session of this process used it.
    """

    def __init__(self, shared: SharedMapping, *, first: bool) -> None:
        self._shared = shared
        self.first = first
        array = np.frombuffer(shared.memory, np.uint8)
        self._array: weakref.ref[np.ndarray] = weakref.ref(array)  # lives as long as any slice of the view
        self.view = array.data
        """All of the memory, writable."""

    @property
    def descriptor(self) -> int:
        """Descriptor of the memory's file, open as long as this use."""
        return self._shared.descriptor

    def close(self) -> None:
        """End the use; the last one unmaps the memory.

        Raises:
            Conflict: views of this use are still referenced. Nothing has changed.
        """
        try:
            self.view.release()
        except BufferError as error:
            raise Conflict("views of the arena are still in use", error=error) from error
        array = self._array()
        if array is not None:
            self.view = array.data
            raise Conflict("views of the arena are still in use")
        _table.release(self._shared)


class MappingTable:
    """The mappings of this process by file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mappings: dict[tuple[int, int], SharedMapping] = {}

    def open(self, descriptor: int, size: int) -> MappingUse:
        """Use the mapping of a file, and map the file if no mapping exists.

        Args:
            descriptor: of the file; the caller keeps it.
            size: bytes to map.

        Raises:
            OSError: the file cannot be mapped.
            Unavailable: the file is mapped with another size.
        """
        status = os.fstat(descriptor)
        key = (status.st_dev, status.st_ino)  # unique as long as the mapping keeps the file alive
        with self._lock:
            shared = self._mappings.get(key)
            if shared is None:
                shared = self._mappings[key] = SharedMapping(key, *map_shared(descriptor, size), os.dup(descriptor))
            if len(shared.memory) != size:
                raise Unavailable("the arena is mapped with another size", mapped=len(shared.memory), size=size)
            shared.users += 1
            return MappingUse(shared, first=shared.users == 1)

    def release(self, shared: SharedMapping) -> None:
        """End one use of a mapping."""
        with self._lock:
            shared.users -= 1
            if shared.users:
                return
            if self._mappings.get(shared.key) is shared:
                del self._mappings[shared.key]
        os.close(shared.descriptor)
        shared.memory.release()
        shared.owner.close()

    def forget(self) -> None:
        """Empty the table in a forked child, whose sessions map their arenas again. No other thread holds the lock there."""
        self._lock = threading.Lock()
        self._mappings = {}


_table = MappingTable()
os.register_at_fork(after_in_child=_table.forget)


def map_file(descriptor: int, size: int) -> MappingUse:
    """See ``MappingTable.open``."""
    return _table.open(descriptor, size)


def is_resident(address: int, nbytes: int) -> bool:
    """Whether all pages of a mapped range exist, so that touching them costs this process no memory.

    Args:
        address: start, a multiple of the page size.
        nbytes: length.
    """
    found = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
    failed = _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_void_p(found.ctypes.data))
    return not failed and bool((found & 1).all())


def populate(address: int, nbytes: int) -> bool:
    """Enter the pages of a mapped range into this process's page table. Never changes content. False: see ``errno``.

    Kernels before 5.14 refuse.

    Args:
        address: start, a multiple of the page size.
        nbytes: length.
    """
    return not advise(address, nbytes, POPULATE_WRITE)


def is_charged_to_first_user(descriptor: int) -> bool:
    """Whether the pages of a file are charged to the process that touches them first. Reserved huge pages are not."""
    return os.fstatvfs(descriptor).f_bsize <= mmap.PAGESIZE
