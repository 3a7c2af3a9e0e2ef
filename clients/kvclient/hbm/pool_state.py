"""Shared state of a pool: used by its namespaces, its peers and the thread that demotes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvclient.hbm.volume import HbmVolume
from kvclient.memory.device_buffer import DeviceHung
from kvstore.core.clock import Clock
from kvstore.core.errors import KVStoreError
from kvstore.node.eviction.operator_requests import evict_down_to
from kvstore.node.state.model import Block
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import device as device_metrics

_log = logging.getLogger(__name__)
_limited = LimitedLog(_log)


class PoolState:
    """Components and health of a pool. Thread-safe."""

    def __init__(
        self,
        node_id: str,
        volume: HbmVolume,
        table: BlockTable,
        counters: Counters,
        clock: Clock,
        space_wait_s: float,
        *,
        demote: bool,
    ) -> None:
        self.node_id = node_id
        self.volume = volume
        self.table = table
        self.counters = counters
        self.clock = clock
        self.space_wait_s = space_wait_s
        self.demote = demote
        self.closed = False
        self.resizing = False
        self.lost = False
        """The device has failed."""
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        """Whether the pool accepts reads and writes."""
        return not (self.closed or self.resizing or self.lost)

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """End the enclosed work on failure without raising; a failure of the device disables the pool."""
        try:
            yield
        except torch.OutOfMemoryError as error:  # temporary memory of a copy: the device is healthy
            self.counters.add(device_metrics.HBM_OUT_OF_MEMORY)
            _limited.warning(
                "device memory exhausted: pool %s could not %s %s (error=%s)", self.node_id, what, self.volume.device, error
            )
        except RuntimeError as error:  # torch raises it if a device fails
            self.disable(what, error)
        except KVStoreError as error:  # the pool was closed concurrently
            self.counters.add(device_metrics.HBM_FAILED_OPERATIONS)
            _limited.warning(
                "pool operation failed: pool %s could not %s %s (error=%s)", self.node_id, what, self.volume.device, error
            )

    @contextmanager
    def disabled_if_hung(self, what: str) -> Iterator[None]:
        """Guard device copies from or to reserved slots: copies that hang disable the pool."""
        try:
            yield
        except DeviceHung as error:
            self.volume.keep()
            self.disable(what, error)
            raise

    def count_by_host(self, gap: str, blocks: int) -> None:
        """Count blocks that pass through host memory between the pool and pages, and log the reason, if there is one."""
        self.counters.add(device_metrics.HBM_BY_HOST_BLOCKS, blocks)
        if gap:
            _limited.warning("blocks copied through host memory: pool %s (reason=%s)", self.node_id, gap)

    def disable(self, what: str, error: RuntimeError | DeviceHung) -> None:
        """Record a failure of the device: every later request is a miss, and all blocks are unpublished."""
        self.counters.add(device_metrics.HBM_DEVICE_ERRORS)
        with self._lock:
            first, self.lost = not self.lost, True
        if first:
            _log.error("pool disabled: %s could not %s %s (error=%s)", self.node_id, what, self.volume.device, error)
        self.table.give_up_pending()
        self.table.mark_clean(self.table.snapshot(), transient=True)
        evict_down_to(self.table, None, 0)

    def drop_corrupt(self, block: Block) -> None:
        """Drop a pinned block whose bytes no longer match its checksums; it is evicted with its last unpin, without demotion."""
        self.table.mark_clean([block], transient=True)
        self.counters.add(device_metrics.HBM_CORRUPT_BLOCKS)
        _limited.warning("corrupt block dropped: pool %s (device=%s)", self.node_id, self.volume.device)
