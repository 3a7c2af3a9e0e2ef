"""Supervision of a node's durable volumes.

A thread notices missing files, resumes read-only volumes, and writes blocks back that were given up during a stall.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from kvstore.node.base.volume_guard import VolumeStalled, ignore
from kvstore.node.durability.requeue import requeue_dram_only
from kvstore.node.state.model import NodeVolume
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics

log = logging.getLogger(__name__)

INTERVAL_S: Final = 2.0
"""How often a read-only volume is tried again."""


class VolumeWatch:
    """The thread. ``start`` and ``stop`` once each.

    Args:
        table: whose volumes are looked after.
        counters: where failures are counted.
        measure: called after each look: measures how fast the volumes are read, as soon as they hold enough.
    """

    def __init__(self, table: BlockTable, counters: Counters, measure: Callable[[], object]) -> None:
        self._table = table
        self._measure = measure
        self._counters = counters
        self._stalls = [0] * len(table.node_volumes)
        """Stalls of each volume that were seen."""
        self._dirty = [0] * len(table.node_volumes)
        """For each volume that was stalled: blocks in DRAM only at the last look. 0: nothing to write back."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-volumes", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End, without waiting longer than this."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def look(self) -> None:
        """Look after each volume once."""
        node_volumes: Sequence[NodeVolume] = self._table.node_volumes
        for number, node_volume in enumerate(node_volumes):
            try:
                self._keep_open(node_volume)
                self._write_back(number, node_volume)
            except Exception:  # process edge: the other volumes are to be looked after
                self._counters.add(node_metrics.NVME_WATCH_BUGS)
                log.exception("looking after volume %s failed, trying again", node_volume.volume_id)

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            self.look()
            self._measure()

    def _keep_open(self, node_volume: NodeVolume) -> None:
        volume = node_volume.volume
        with suppress(VolumeStalled):
            if volume.read_only is not None or not node_volume.look_in_place():
                node_volume.guard.change(volume.resume, ignore)

    def _write_back(self, number: int, node_volume: NodeVolume) -> None:
        """Send blocks again that write-behind gave up during a stall, a part at each look."""
        if node_volume.guard.stalls != self._stalls[number]:
            self._stalls[number], self._dirty[number] = node_volume.guard.stalls, sys.maxsize
        if not self._dirty[number] or not node_volume.guard.takes_changes:
            return
        dirty = requeue_dram_only(self._table)
        if dirty:
            log.info("blocks sent to write-behind again: %s answers again (dirty=%d)", node_volume.volume_id, dirty)
        # if they become no fewer, the volume is full or fails: the rest is tried again when the node stops
        self._dirty[number] = dirty if dirty < self._dirty[number] else 0
