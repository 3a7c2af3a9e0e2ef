"""Supervision of a node's durable volumes.

A thread notices missing files, resumes read-only volumes, and writes blocks back that were given up during a stall.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvstore.node.base.volume_guard import VolumeStalled, ignore
from kvstore.node.state.change_log import in_chains
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics

log = logging.getLogger(__name__)

INTERVAL_S: Final = 2.0
"""Interval of the rounds: file checks, attempts to resume, write-back after a stall, and the measurement of the read rate."""
ARENA_PART: Final = 4
"""A round writes back at most this fraction (1/n) of the arena, so that new stores find space in the queue."""


class VolumeWatch:
    """The thread. ``start`` and ``stop`` once each.

    Args:
        table: its volumes are supervised.
        counters: count failures.
        measure: called after each round: measures the read rate of the volumes, as soon as they hold enough.
    """

    def __init__(self, table: BlockTable, counters: Counters, measure: Callable[[], object]) -> None:
        self._table = table
        self._measure = measure
        self._counters = counters
        self._stalls: dict[NodeVolume, int] = {}
        """Number of stalls of each volume at the last round."""
        self._dram_only: dict[NodeVolume, int] = {}
        """Per volume that was stalled: number of blocks in DRAM only at the last round. 0: none to write back."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-volumes", daemon=True)

    def start(self) -> None:
        """Measure the space of each volume once, so that metrics show it from the beginning, and start the thread."""
        for node_volume in self._table.node_volumes:
            node_volume.measure_space()
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop the thread, and wait for it at most this long."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def look(self) -> None:
        """Check each volume once."""
        node_volumes = list(self._table.node_volumes)
        for known in (self._stalls, self._dram_only):
            for gone in known.keys() - set(node_volumes):
                del known[gone]
        for node_volume in node_volumes:
            try:
                node_volume.measure_space()
                self._keep_open(node_volume)
                self._write_back(node_volume)
            except Exception:  # process edge: the other volumes must be checked
                self._counters.add(node_metrics.NVME_WATCH_BUGS)
                log.exception("volume supervision failed: %s, trying again", node_volume.volume_id)

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            self.look()
            try:
                self._measure()
            except Exception:  # thread edge: volumes must be supervised
                self._counters.add(node_metrics.NVME_WATCH_BUGS)
                log.exception("read rate of the volumes not measured, trying again")

    def _keep_open(self, node_volume: NodeVolume) -> None:
        volume = node_volume.volume
        with suppress(VolumeStalled):
            if not node_volume.look_in_place() or volume.read_only is not None:
                node_volume.guard.change(volume.resume, ignore)

    def _write_back(self, node_volume: NodeVolume) -> None:
        """Send blocks to write-back again that were given up during a stall, a part per round."""
        if node_volume.guard.stalls != self._stalls.get(node_volume, 0):
            self._stalls[node_volume], self._dram_only[node_volume] = node_volume.guard.stalls, sys.maxsize
        if not self._dram_only.get(node_volume, 0) or not node_volume.guard.takes_changes:
            return
        dram_only = requeue_dram_only(self._table, node_volume)
        if dram_only:
            log.info("blocks sent to write-back again: %s answers again (dram_only=%d)", node_volume.volume_id, dram_only)
        # if their number does not fall, the volume is full or fails: the rest is tried again when the node stops
        self._dram_only[node_volume] = dram_only if dram_only < self._dram_only[node_volume] else 0


def requeue_dram_only(table: BlockTable, node_volume: NodeVolume) -> int:
    """Send DRAM-only blocks that fit a volume to write-back again, after it did not answer. Returns how many there were."""
    dram_only = [
        block
        for block in sorted(table.snapshot(), key=lambda block: block.depth)
        if block.only_in_dram and not block.writing and node_volume.volume.fits(block.namespace.shape)
    ]
    sent: list[Block] = []
    space = table.dram.usage().capacity_bytes // ARENA_PART
    for block in in_chains(dram_only):
        if space <= 0:
            break
        sent.append(block)
        space -= block.nbytes
    table.requeue_writeback(sent)
    return len(dram_only)
