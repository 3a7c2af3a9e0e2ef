"""DRAM arena: a shared memory mapping with blocks, which engines on the host map too.

The memory is a memfd. It is not in a file system, so a killed process leaves no file, and other processes can
receive its descriptor (``SCM_RIGHTS``) and read blocks without a copy. ``backing`` names the memory in use.

The kernel zeroes a page at its first use, which costs more than a copy into it. So a background thread touches the memory in
advance (``prefault``), while the arena is already in use, and has the kernel exchange it for huge pages (``shared_memory``).
"""

from __future__ import annotations

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
from kvstore.process.memory.host_memory import memory_total
from kvstore.process.memory.shared_memory import COLLAPSE, HUGE_PAGE_BYTES, POPULATE_WRITE, PREFER_HUGE, advise, map_shared
from kvstore.tiers.contract import MappedVolume, Slot
from kvstore.tiers.slot_pool import MemoryVolume, SlotPool

_log = logging.getLogger(__name__)

_PREFAULT_BYTES = 32 << 20
_EXCHANGE_ATTEMPTS = 4
_EXCHANGE_PAUSE_S = 5.0
_REFUSALS = {errno.EINVAL: "this kernel makes none of this memory", errno.EBUSY: "the memory limit of the control group"}
_COPY_WITHOUT_GIL_BYTES = 16 << 10
"""From this size on, a copy by numpy, which releases the GIL, is worth its overhead."""
_CLOSE_TIMEOUT_S = 10.0


class DramArena(MemoryVolume, MappedVolume):
    """Blocks in this process's memory. Thread-safe.

    Args:
        volume_id: name of the volume.
        capacity_bytes: size; rounded up to whole pages of the backing.
        huge_pages: use reserved huge pages, if the host has enough.
        prefault: touch the memory in the background, and exchange it for transparent huge pages; False: each page is touched at
            its first use.
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
        prefault: bool = False,
        counters: Counters | None = None,
    ) -> None:
        self.volume_id = volume_id
        self.tier = Tier.DRAM
        self._counters = counters or Counters()
        self.slot_pool = SlotPool(capacity_bytes)
        self._closing = threading.Event()
        self._reserved = self._refused = False
        """The memory is in reserved huge pages; transparent ones were refused."""
        self._huge_bytes: list[int] = []
        """Lengths of the pieces that were exchanged for huge pages."""
        self._fd, self._map, self._memory = self._make_memory(capacity_bytes, huge_pages)
        self._array = np.frombuffer(self._memory, np.uint8)
        self.mapped_bytes = len(self._array)
        """Size of the mapping of ``fileno``."""
        self._prefaulter = threading.Thread(target=self._prefault, name=f"prefault-{volume_id}", daemon=True)
        if prefault:
            self._prefaulter.start()
        _log.info("arena mapped: %s (mib=%d, memory=%s)", volume_id, capacity_bytes >> 20, self.backing)

    # ---- memory ----
    def _make_memory(self, capacity_bytes: int, huge_pages: bool) -> tuple[int, mmap.mmap, memoryview]:
        """Allocate the memory. Returns its descriptor, the owner of the mapping, and the mapped memory."""
        name = f"kvstore-{self.volume_id}"[:200]
        most = memory_total()
        if most is not None and capacity_bytes > most:  # the kernel would map it, and kill the process that fills it
            raise CapacityExceeded(
                "the DRAM arena exceeds the memory of this host or control group; lower node.dram",
                bytes=capacity_bytes, memory_bytes=most,
            )  # fmt: skip
        if huge_pages:
            made = _try_reserved_huge_pages(name, capacity_bytes)
            if made is not None:
                self._reserved = True
                return made
            self._counters.add(volumes_metrics.ARENA_HUGE_PAGES_REFUSED)
            _log.warning("too few huge pages reserved: %s (raise vm.nr_hugepages, or unset node.huge_pages)", self.volume_id)
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, capacity_bytes)
            owner, memory = map_shared(fd, capacity_bytes)
        except (OSError, OverflowError, ValueError) as error:
            os.close(fd)
            raise CapacityExceeded(
                "the memory of the DRAM arena cannot be allocated; lower node.dram",
                bytes=capacity_bytes, reason=error,
            ) from error  # fmt: skip
        advise(np.frombuffer(memory, np.uint8).ctypes.data, capacity_bytes, PREFER_HUGE)  # no effect on most hosts
        return fd, owner, memory

    def _prefault(self) -> None:
        """Touch the memory piece by piece, and exchange it for huge pages. The content does not change."""
        left: list[tuple[int, int]] = []
        for start in range(0, self.mapped_bytes, _PREFAULT_BYTES):
            if self._closing.is_set():
                return
            address, length = self.address + start, min(_PREFAULT_BYTES, self.mapped_bytes - start)
            if failed := advise(address, length, POPULATE_WRITE):
                # an older kernel (EINVAL), or not enough memory: pages are added at their first use
                self._counters.add(volumes_metrics.ARENA_PREFAULT_STOPPED)
                _log.warning("arena prefault stopped: %s (error=%s)", self.volume_id, _name(failed))
                return
            whole = length - length % HUGE_PAGE_BYTES
            if whole and not self._reserved and not self._exchange(address, whole):
                left.append((address, whole))
        for _ in range(_EXCHANGE_ATTEMPTS - 1):
            if not left or self._refused or self._closing.wait(_EXCHANGE_PAUSE_S):
                break
            left = [piece for piece in left if not self._exchange(*piece)]
        if left and not self._closing.is_set():
            self._refuse_huge_pages()
        _log.info("arena prefaulted: %s (memory=%s)", self.volume_id, self.backing)

    def _exchange(self, address: int, length: int) -> bool:
        """Exchange memory for huge pages. False: some are left, for a later attempt if huge pages were not refused."""
        if self._refused:
            return False
        failed = advise(address, length, COLLAPSE)
        if not failed:
            self._huge_bytes.append(length)
        elif failed not in (errno.EAGAIN, errno.ENOMEM):  # these pages are in use now, or no huge page is free now
            self._refuse_huge_pages()
            _log.info("huge pages refused: %s (reason=%s)", self.volume_id, _REFUSALS.get(failed, _name(failed)))
        return not failed

    def _refuse_huge_pages(self) -> None:
        if not self._refused:
            self._refused = True
            self._counters.add(volumes_metrics.ARENA_HUGE_PAGES_REFUSED)

    @property
    def backing(self) -> str:
        """The memory in use, e.g. ``memfd, reserved huge pages of 2 MiB`` or ``memfd, 100 % transparent huge pages``.

        The share is a lower bound: pieces that were exchanged in part do not count.
        """
        if self._reserved:
            return "memfd, reserved huge pages of 2 MiB"
        share = 100 * sum(self._huge_bytes) // self.mapped_bytes
        return f"memfd, {share} % transparent huge pages" if share else "memfd"

    @property
    def address(self) -> int:
        """Address of the mapping in this process."""
        return int(self._array.__array_interface__["data"][0])

    def fileno(self) -> int:
        return self._fd

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
        if self._prefaulter.ident is not None:
            self._prefaulter.join(_CLOSE_TIMEOUT_S)
        os.close(self._fd)
        del self._array
        self._memory.release()
        try:
            self._map.close()
        except BufferError:
            self._counters.add(volumes_metrics.ARENA_CLOSED_WITH_VIEWS)
            _log.warning("arena closed with open views: %s; their memory is freed with them", self.volume_id)


def _try_reserved_huge_pages(name: str, capacity_bytes: int) -> tuple[int, mmap.mmap, memoryview] | None:
    """Map reserved huge pages (``vm.nr_hugepages``). The mapping reserves all of them, or fails immediately."""
    size = -(-capacity_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_HUGETLB)
    except OSError:
        return None
    try:
        os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size, mmap.MAP_SHARED)
    except (OSError, ValueError):
        os.close(fd)
        return None
    return fd, memory, memoryview(memory)


def _name(number: int) -> str:
    return errno.errorcode.get(number, str(number))
