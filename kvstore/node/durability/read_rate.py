"""Measure the read rate of a node's volumes: once, on blocks that they hold, after the node serves.

The planner and volume checks start from this figure instead of an assumed one. Theory of operation:

1. Space that was never written is read at the speed of memory. So the node measures when every volume holds ``LEAST_BYTES``,
   which after a restart is at once.
2. All volumes are read at the same time. If they share a disk, the sum is the rate of the disk.
3. Each volume reads random blocks, ``MOST_BYTES`` or ``MOST_S`` at most. The blocks are pinned during the read. Checksums are not
   compared, as the bytes are dropped. A volume that stalls is not measured.
4. A volume without O_DIRECT reads from the page cache. A node with such a volume does not measure.
"""

from __future__ import annotations

import logging
import mmap
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvstore.core.clock import Clock
from kvstore.core.types import Outcome, VolumeId
from kvstore.node.base.volume_guard import VolumeStalled, ignore
from kvstore.node.durability.volume_checks import batches_of, pinned_on, read_items
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics

log = logging.getLogger(__name__)

LEAST_BYTES: Final = 64 << 20
"""A volume with fewer bytes of blocks is not read."""
MOST_BYTES: Final = 64 << 20
MOST_S: Final = 0.25
GIVE_UP_S: Final = 5.0
"""Maximum duration of the whole measurement, because a disk may hang."""
_PICKS: Final = 100_000
"""Number of blocks visited to find some of each volume."""


@dataclass(slots=True)
class _Sample:
    """Bytes and time of one volume."""

    nbytes: int = 0
    seconds: float = 0.0


class ReadRate:
    """The read rates of one node. One thread measures; any thread reads.

    Args:
        table: the blocks of the node.
        counters: count failed measurements.
        clock: time.
        direct: all volumes use O_DIRECT.
    """

    def __init__(self, table: BlockTable, counters: Counters, clock: Clock, *, direct: bool) -> None:
        self._table = table
        self._counters = counters
        self._clock = clock
        self._due = direct and bool(table.node_volumes)
        self._rates: dict[VolumeId, float] = {}

    @property
    def bytes_per_s(self) -> float | None:
        """Read rate of all volumes together; None: not measured."""
        return sum(self._rates.values()) or None

    def of(self, node_volume: NodeVolume) -> float | None:
        """Read rate of one volume while the others are read too; None: not measured."""
        return self._rates.get(node_volume.volume_id)

    def measure_if_due(self) -> bool:
        """Measure once, when every volume holds enough blocks. Returns whether this call measured."""
        volumes = [node_volume.volume for node_volume in self._table.node_volumes]
        if not self._due or not volumes or any(volume.usage().used_bytes < LEAST_BYTES for volume in volumes):
            return False
        self._due = False
        node_volumes = list(self._table.node_volumes)
        picked = self._pick(node_volumes)
        samples = {node_volume.volume_id: _Sample() for node_volume in node_volumes}
        threads = [
            threading.Thread(
                target=self._read,
                args=(node_volume, picked[node_volume.volume_id], samples[node_volume.volume_id]),
                name=f"kvstore-read-rate-{number}",
                daemon=True,
            )
            for number, node_volume in enumerate(node_volumes)
        ]
        for thread in threads:
            thread.start()
        until_s = self._clock.now_s() + GIVE_UP_S
        for thread in threads:
            thread.join(max(0.0, until_s - self._clock.now_s()))
        if any(thread.is_alive() for thread in threads):
            samples = {name: _Sample() for name in samples}  # a disk hangs: the sum of the others says nothing
        rates = {name: one.nbytes / one.seconds for name, one in samples.items() if one.nbytes and one.seconds > 0}
        if len(rates) < len(samples):
            self._counters.add(node_metrics.READ_RATE_FAILED)
            log.warning("read rate not measured: a volume did not answer (measured=%d, volumes=%d)", len(rates), len(samples))
            return True
        self._rates = rates
        log.info(
            "read rate measured: %.2f GB/s (%s)",
            sum(rates.values()) / 1e9,
            ", ".join(f"{name}={rate / 1e9:.2f} GB/s" for name, rate in rates.items()),
        )
        return True

    def _pick(self, node_volumes: Sequence[NodeVolume]) -> dict[VolumeId, list[Block]]:
        """Pick random blocks of each volume."""
        picked: dict[VolumeId, list[Block]] = {node_volume.volume_id: [] for node_volume in node_volumes}
        missing = dict.fromkeys(picked, MOST_BYTES)
        known = self._table.snapshot()
        for block in random.sample(known, min(len(known), _PICKS)):
            node_volume = block.nvme_volume
            if node_volume is None or missing.get(node_volume.volume_id, 0) <= 0:
                continue
            picked[node_volume.volume_id].append(block)
            missing[node_volume.volume_id] -= block.nbytes
            if max(missing.values()) <= 0:
                break
        return picked

    def _read(self, node_volume: NodeVolume, blocks: Sequence[Block], sample: _Sample) -> None:
        try:
            memory = memoryview(mmap.mmap(-1, max((sum(one.nbytes for one in batch) for batch in batches_of(blocks)), default=1)))
            until_s = self._clock.now_s() + MOST_S
            for batch in batches_of(blocks):
                if self._clock.now_s() >= until_s:
                    return
                self._read_batch(node_volume, batch, memory, sample)
        except VolumeStalled:  # counted and logged by ``measure_if_due``
            sample.nbytes = 0
        except Exception:  # edge of the thread: the figure is missing, nothing else
            self._counters.add(node_metrics.READ_RATE_BUGS)
            log.exception("read rate not measured: %s, unexpected error", node_volume.volume_id)

    def _read_batch(self, node_volume: NodeVolume, batch: Sequence[Block], memory: memoryview, sample: _Sample) -> None:
        with pinned_on(self._table, node_volume, batch) as pinned:
            read = partial(node_volume.volume.read, read_items(pinned, memory), verify=False)
            began_s = self._clock.now_s()
            outcomes = node_volume.guard.read(read, ignore)  # if this raises, the caller does not use the memory again
            sample.seconds += self._clock.now_s() - began_s
        sample.nbytes += sum(block.nbytes for (block, _), outcome in zip(pinned, outcomes, strict=True) if outcome is Outcome.HIT)
