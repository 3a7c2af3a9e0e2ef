"""DRAM arena: a shared memory mapping with blocks, which engines on the host map too.

The memory is a memfd. It is not in a file system, so a killed process leaves no file, and other processes can
receive its descriptor (``SCM_RIGHTS``) and read blocks without a copy. Huge pages are used if requested and available;
``backing`` names the memory in use.

The kernel zeroes a page at its first use, which costs more than a copy into it. So background threads touch the memory in
advance (``prefault``), while the arena is already in use.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading

import numpy as np

from kvstore.core.errors import CapacityExceeded, InvalidArgument
from kvstore.core.types import BlockShape, Tier, VolumeId
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.process.host_memory import memory_total
from kvstore.tiers.contract import MappedVolume, Slot
from kvstore.tiers.slot_pool import MemoryVolume, SlotPool

_log = logging.getLogger(__name__)

_HUGE_PAGE_BYTES = 2 << 20
_PREFAULT_BYTES = 32 << 20
_MADV_POPULATE_WRITE = 23
_COPY_WITHOUT_GIL_BYTES = 16 << 10
"""From this size on, a copy by numpy, which releases the GIL, is worth its overhead."""
_CLOSE_TIMEOUT_S = 10.0


class DramArena(MemoryVolume, MappedVolume):
    """Blocks in this process's memory. Thread-safe.

    Args:
        volume_id: name of the volume.
        capacity_bytes: size; rounded up to whole pages of the backing.
        huge_pages: use huge pages: reserved ones, else transparent ones, if the host allows either.
        prefault_threads: number of background threads that touch the memory; 0: each page at its first use.
        counters: counts fallbacks and corrupt blocks.

    Raises:
        InvalidArgument: the capacity is less than a page.
        CapacityExceeded: the capacity exceeds the memory of the host or of the control group.
        OSError: the host cannot allocate the memory.
    """

    _corrupt_event = volumes_metrics.ARENA_CORRUPT_BLOCKS

    def __init__(
        self,
        volume_id: VolumeId,
        capacity_bytes: int,
        *,
        huge_pages: bool = False,
        prefault_threads: int = 0,
        counters: Counters | None = None,
    ) -> None:
        self.volume_id = volume_id
        self.tier = Tier.DRAM
        self._counters = counters or Counters()
        self.slot_pool = SlotPool(capacity_bytes)
        self._closing = threading.Event()
        self._fd, self._map, self._backing = self._make_memory(capacity_bytes, huge_pages)
        self._memory = memoryview(self._map)
        self._array = np.frombuffer(self._map, np.uint8)
        self._prefaulters = [
            threading.Thread(
                target=self._prefault, args=(first, prefault_threads), name=f"prefault-{volume_id}-{first}", daemon=True
            )
            for first in range(prefault_threads)
        ]
        for thread in self._prefaulters:
            thread.start()
        _log.info("arena mapped: %s (mib=%d, memory=%s)", volume_id, capacity_bytes >> 20, self._backing)

    # ---- memory ----
    def _make_memory(self, capacity_bytes: int, huge_pages: bool) -> tuple[int, mmap.mmap, str]:
        name = f"kvstore-{self.volume_id}"[:200]
        most = memory_total()
        if most is not None and capacity_bytes > most:  # the kernel would map it, and kill the process that fills it
            raise CapacityExceeded(
                "the DRAM arena exceeds the memory of this host or control group; lower node.dram",
                bytes=capacity_bytes, memory_bytes=most,
            )  # fmt: skip
        if huge_pages:
            made = self._try_reserved_huge_pages(name, capacity_bytes)
            if made is not None:
                return made
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, capacity_bytes)
            memory = mmap.mmap(fd, capacity_bytes, mmap.MAP_SHARED)
        except (OSError, OverflowError, ValueError) as error:
            os.close(fd)
            raise CapacityExceeded(
                "the memory of the DRAM arena cannot be allocated; lower node.dram",
                bytes=capacity_bytes, reason=error,
            ) from error  # fmt: skip
        if not huge_pages:
            return fd, memory, "memfd"
        refused = _transparent_huge_pages_refused()
        if refused is None:
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                refused = error.strerror or str(error)
        if refused is None:
            return fd, memory, "memfd, transparent huge pages"
        self._counters.add(volumes_metrics.ARENA_HUGE_PAGES_REFUSED)
        _log.warning(
            "huge pages refused: %s (reason=%s); pages of 4 KiB cost more at first use and in the TLB", self.volume_id, refused
        )
        return fd, memory, f"memfd (huge pages refused: {refused})"

    def _try_reserved_huge_pages(self, name: str, capacity_bytes: int) -> tuple[int, mmap.mmap, str] | None:
        """Map reserved huge pages (``vm.nr_hugepages``). The mapping reserves all of them, or fails immediately."""
        size = -(-capacity_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_HUGETLB)
        except OSError:
            return None
        try:
            os.ftruncate(fd, size)
            return fd, mmap.mmap(fd, size, mmap.MAP_SHARED), "memfd, reserved huge pages of 2 MiB"
        except (OSError, ValueError):
            os.close(fd)
            return None

    def _prefault(self, first: int, threads: int) -> None:
        """Touch every ``threads``-th piece. The kernel adds missing pages; the content does not change."""
        libc = ctypes.CDLL(None, use_errno=True)  # ctypes releases the GIL, mmap.madvise does not
        base = self._array.ctypes.data
        for start in range(first * _PREFAULT_BYTES, len(self._array), threads * _PREFAULT_BYTES):
            if self._closing.is_set():
                return
            length = min(_PREFAULT_BYTES, len(self._array) - start)
            if libc.madvise(ctypes.c_void_p(base + start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
                # an older kernel (EINVAL), or not enough memory: pages are added at their first use
                self._counters.add(volumes_metrics.ARENA_PREFAULT_STOPPED)
                _log.warning(
                    "arena prefault stopped: %s (error=%s)", self.volume_id, errno.errorcode.get(ctypes.get_errno(), "?")
                )
                return

    @property
    def backing(self) -> str:
        """The memory in use, e.g. ``memfd`` or ``memfd, reserved huge pages of 2 MiB``."""
        return self._backing

    @property
    def address(self) -> int:
        """Address of the mapping in this process."""
        return int(self._array.__array_interface__["data"][0])

    def fileno(self) -> int:
        return self._fd

    @property
    def mapped_bytes(self) -> int:
        """Size of the mapping of ``fileno``."""
        return len(self._array)

    def view(self, slot: Slot, size: int) -> memoryview:
        if not 0 <= size <= slot.size:
            raise InvalidArgument("a view must not exceed its slot", size=size, slot=slot)
        return self._memory[slot.offset : slot.offset + size]

    # ---- bytes ----
    def _copy_in(self, slot: Slot, shape: BlockShape, payload: memoryview) -> None:
        self._copy(self._memory[slot.offset : slot.offset + shape.block_bytes], payload)

    def _copy_out(self, slot: Slot, shape: BlockShape, destination: memoryview) -> None:
        self._copy(destination, self._memory[slot.offset : slot.offset + shape.block_bytes])

    @staticmethod
    def _copy(destination: memoryview, source: memoryview) -> None:
        if destination.nbytes < _COPY_WITHOUT_GIL_BYTES:
            destination.cast("B")[:] = source.cast("B")
        else:
            np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))

    def close(self) -> None:
        """Release the memory. Existing views keep their pages until they are dropped."""
        if self._closing.is_set():
            return
        self._closing.set()
        for thread in self._prefaulters:
            thread.join(_CLOSE_TIMEOUT_S)
        os.close(self._fd)
        del self._array
        self._memory.release()
        try:
            self._map.close()
        except BufferError:
            self._counters.add(volumes_metrics.ARENA_CLOSED_WITH_VIEWS)
            _log.warning("arena closed with open views: %s; their memory is freed with them", self.volume_id)


def _transparent_huge_pages_refused() -> str | None:
    """Why the kernel would ignore ``MADV_HUGEPAGE`` on shared memory; None: it would not."""
    path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    try:
        with open(path, encoding="ascii") as file:
            state = file.read()
    except OSError:
        return f"{path} cannot be read"
    chosen = state[state.find("[") + 1 : state.find("]")]
    return f"shmem_enabled is {chosen}" if chosen in ("never", "deny") else None
