"""What a pool is made of, shared by the namespaces in it, by those who read from it and by the thread that demotes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvclient.hbm import memory
from kvclient.hbm.volume import HbmVolume
from kvclient.memory.device_buffer import DeviceHung
from kvstore.core.clock import Clock
from kvstore.core.errors import KVStoreError
from kvstore.node.state.model import Block
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog

_log = logging.getLogger(__name__)
_limited = LimitedLog(_log)


class PoolState:
    """The parts, and whether they are of any use now. Thread-safe."""

    def __init__(
        self,
        node_id: str,
        volume: HbmVolume,
        table: BlockTable,
        counters: Counters,
        clock: Clock,
        room_wait_s: float,
        *,
        demote: bool,
    ) -> None:
        self.node_id = node_id
        self.volume = volume
        self.table = table
        self.counters = counters
        self.clock = clock
        self.room_wait_s = room_wait_s
        self.demote = demote
        self.closed = False
        self.resizing = False
        self.lost = False
        """The device has failed."""
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        """Whether anything comes in or out at all."""
        return not (self.closed or self.resizing or self.lost)

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Within, a failure ends the work and is kept from the caller; one of the device is the end of the pool."""
        try:
            yield
        except torch.OutOfMemoryError as error:  # of what a copy takes for itself: the device is well
            self.counters.add("hbm_out_of_memory_total")
            _limited.warning("pool %s: no memory to %s %s: %s", self.node_id, what, self.volume.device, error)
        except RuntimeError as error:  # what torch raises where a device fails
            self.broken(what, error)
        except KVStoreError as error:  # closed under our hands
            self.counters.add("hbm_failed_operations_total")
            _limited.warning("pool %s: cannot %s %s: %s", self.node_id, what, self.volume.device, error)

    @contextmanager
    def kept_if_stuck(self, what: str) -> Iterator[None]:
        """Within, a device copies from or to slots that are held; one that does not come to an end is the end of the pool."""
        try:
            yield
        except DeviceHung as error:
            memory.leave(self.volume.memory)
            self.broken(what, error)
            raise

    def by_host(self, gap: str, blocks: int) -> None:
        """Blocks between the pool and a device's pages pass through host memory: for a gap between the two, or as was asked."""
        self.counters.add("hbm_by_host_blocks_total", blocks)
        if gap:
            _limited.warning("pool %s: blocks from and to pages pass through host memory: %s", self.node_id, gap)

    def broken(self, what: str, error: RuntimeError | DeviceHung) -> None:
        """The device failed: from now on everything is a miss, and what was here is no longer shown to others."""
        self.counters.add("hbm_device_errors_total")
        with self._lock:
            first, self.lost = not self.lost, True
        if first:
            _log.error("pool %s cannot %s %s any more and is left alone: %s", self.node_id, what, self.volume.device, error)
        self.table.give_up_pending()
        self.table.discard_after_use(self.table.snapshot())
        self.table.evict_dram()

    def condemn(self, block: Block) -> None:
        """A block that the caller has pinned has other bytes than it came with: it leaves with its last pin, for nowhere."""
        self.table.discard_after_use([block])
        self.counters.add("hbm_corrupt_blocks_total")
        _limited.warning("pool %s: a block on %s does not match its checksums and is dropped", self.node_id, self.volume.device)
