"""Mappings of shared memory, placed so that the kernel can use huge pages, and advice to the kernel about them.

Pages of 4 KiB may be anywhere in the host's memory. A request to a disk lists each piece that is contiguous there, and may have a
few hundred. So reads into scattered pages are cut into small requests: a virtual disk read at 1.4 GB/s instead of 2.5. Huge pages
of 2 MiB avoid this, and cost less in the TLB.

Most hosts give shared memory no transparent huge pages (``shmem_enabled`` is ``never``), but Linux 6.1 and later exchange pages
that exist for a huge one on request (``COLLAPSE``), unless that setting is ``deny``. Contents stay, also while others use them.
Pages that a device or a call is using stay as they are.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

HUGE_PAGE_BYTES: Final = 2 << 20
POPULATE_WRITE: Final = 23
"""Add missing pages, writable (``MADV_POPULATE_WRITE``, Linux 5.14)."""
PREFER_HUGE: Final = 14
"""Add huge pages where pages are missing, if ``shmem_enabled`` allows it (``MADV_HUGEPAGE``)."""
COLLAPSE: Final = 25
"""Exchange pages for huge ones (``MADV_COLLAPSE``, Linux 6.1)."""
_FIXED: Final = 0x10
_NORESERVE: Final = 0x4000
"""``MAP_FIXED`` and ``MAP_NORESERVE``, which the mmap module does not define."""

_libc = ctypes.CDLL(None, use_errno=True)
"""ctypes releases the interpreter lock during a call, the mmap module does not."""
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def map_shared(descriptor: int, size: int) -> tuple[mmap.mmap, memoryview]:
    """Map a file at an address that is a multiple of the size of a huge page, if that is possible.

    For a moment the kernel counts as much private memory: where it may promise no more (``vm.overcommit_memory`` 2), the address
    is any.

    Args:
        descriptor: of the file.
        size: bytes from its start.

    Returns:
        The owner of the mapping, which unmaps it, and the mapped memory.

    Raises:
        OSError, ValueError, OverflowError: the file cannot be mapped, or is smaller.
    """
    if os.fstat(descriptor).st_size < size:
        raise ValueError("the file is smaller than the mapping")
    try:
        owner = mmap.mmap(-1, size + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except OSError:
        return _map_anywhere(descriptor, size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(owner))
    skipped = -start % HUGE_PAGE_BYTES
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(start + skipped, size, access, mmap.MAP_SHARED | _FIXED, descriptor, 0) != start + skipped:
        owner.close()  # e.g. huge pages of another size
        return _map_anywhere(descriptor, size)
    return owner, memoryview(owner)[skipped : skipped + size]


def _map_anywhere(descriptor: int, size: int) -> tuple[mmap.mmap, memoryview]:
    owner = mmap.mmap(descriptor, size, mmap.MAP_SHARED)
    return owner, memoryview(owner)


def advise(address: int, nbytes: int, advice: int) -> int:
    """Advise the kernel about mapped memory; no advice used here changes its content.

    Args:
        address: start, a multiple of the page size.
        nbytes: length.
        advice: e.g. ``POPULATE_WRITE``.

    Returns:
        0, or the error number.
    """
    failed = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(advice))
    return ctypes.get_errno() if failed else 0
