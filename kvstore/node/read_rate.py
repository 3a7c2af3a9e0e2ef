"""What the volumes of a node read at most: measured once, on blocks that they hold, after the node serves.

The planner and volume checks start from this figure instead of an assumed one. Theory of operation:

1. A volume whose blocks were never written reads holes, at the speed of memory. So nothing is measured before every volume holds
   ``LEAST_BYTES``. After a restart that is at once.
2. All volumes are read at the same time. If they share a disk, the sum is what the disk reads.
3. Each volume reads blocks picked at random, ``MOST_BYTES`` or ``MOST_S`` at most, pinned meanwhile. Checksums are not compared:
   the bytes are thrown away.
4. A volume without O_DIRECT would answer out of the page cache. Such a node measures nothing.
"""

from __future__ import annotations

import logging
import mmap
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.core.clock import Clock
from kvstore.core.types import Outcome, VolumeId
from kvstore.node.block import Block, Home
from kvstore.node.checking import batches_of, pin_held
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters

log = logging.getLogger(__name__)

LEAST_BYTES: Final = 64 << 20
"""A volume that holds less is not read."""
MOST_BYTES: Final = 64 << 20
MOST_S: Final = 0.25
GIVE_UP_S: Final = 5.0
"""A disk that has not answered by then is left alone."""
_PICKS: Final = 100_000
"""Blocks looked at to find some of each volume."""


@dataclass(slots=True)
class _Sample:
    """What one volume read."""

    nbytes: int = 0
    seconds: float = 0.0


class ReadRate:
    """The figures of one node. Measured by one thread; read by any.

    Args:
        table: whose blocks are read.
        direct: whether all volumes are read with O_DIRECT.
        counters: where measurements are counted.
        clock: time.
    """

    def __init__(self, table: BlockTable, counters: Counters, clock: Clock, *, direct: bool) -> None:
        self._table = table
        self._counters = counters
        self._clock = clock
        self._due = direct and bool(table.homes)
        self._rates: dict[VolumeId, float] = {}

    @property
    def bytes_per_s(self) -> float | None:
        """All volumes together; None: not measured."""
        return sum(self._rates.values()) or None

    def of(self, home: Home) -> float | None:
        """One volume, while the others read too; None: not measured."""
        return self._rates.get(home.volume.volume_id)

    def measure_if_due(self) -> bool:
        """Measures once, as soon as every volume holds enough. Returns whether it did now."""
        if not self._due or any(home.volume.usage().used_bytes < LEAST_BYTES for home in self._table.homes):
            return False
        self._due = False
        picked = self._pick()
        samples = {home.volume.volume_id: _Sample() for home in self._table.homes}
        threads = [
            threading.Thread(
                target=self._read,
                args=(home, picked[home.volume.volume_id], samples[home.volume.volume_id]),
                name=f"kvstore-read-rate-{number}",
                daemon=True,
            )
            for number, home in enumerate(self._table.homes)
        ]
        for thread in threads:
            thread.start()
        until_s = self._clock.now_s() + GIVE_UP_S
        for thread in threads:
            thread.join(max(0.0, until_s - self._clock.now_s()))
        if any(thread.is_alive() for thread in threads):
            samples = {name: _Sample() for name in samples}  # a disk that hangs: what the others read alone says nothing
        rates = {name: one.nbytes / one.seconds for name, one in samples.items() if one.nbytes and one.seconds > 0}
        if len(rates) < len(samples):
            self._counters.add("node_read_rate_failed_total")
            log.warning("read rate not measured: a volume did not answer (measured=%d, volumes=%d)", len(rates), len(samples))
            return True
        self._rates = rates
        log.info(
            "read rate measured: %.2f GB/s (%s)",
            sum(rates.values()) / 1e9,
            ", ".join(f"{name}={rate / 1e9:.2f} GB/s" for name, rate in rates.items()),
        )
        return True

    def _pick(self) -> dict[VolumeId, list[Block]]:
        """Some blocks of each volume, at random."""
        picked: dict[VolumeId, list[Block]] = {home.volume.volume_id: [] for home in self._table.homes}
        missing = dict.fromkeys(picked, MOST_BYTES)
        known = self._table.snapshot()
        for block in random.sample(known, min(len(known), _PICKS)):
            home = block.nvme_home
            if home is None or missing[home.volume.volume_id] <= 0:
                continue
            picked[home.volume.volume_id].append(block)
            missing[home.volume.volume_id] -= block.nbytes
            if max(missing.values()) <= 0:
                break
        return picked

    def _read(self, home: Home, blocks: Sequence[Block], sample: _Sample) -> None:
        try:
            memory = memoryview(mmap.mmap(-1, max((sum(one.nbytes for one in batch) for batch in batches_of(blocks)), default=1)))
            until_s = self._clock.now_s() + MOST_S
            for batch in batches_of(blocks):
                if self._clock.now_s() >= until_s:
                    return
                self._read_batch(home, batch, memory, sample)
        except Exception:  # the thread's edge: a figure less, and nothing else
            self._counters.add("node_read_rate_bugs_total")
            log.exception("measuring volume %s failed", home.volume.volume_id)

    def _read_batch(self, home: Home, batch: Sequence[Block], memory: memoryview, sample: _Sample) -> None:
        pinned = pin_held(self._table, home, batch)
        try:
            items, at = [], 0
            for block, slot in pinned:
                items.append((slot, block.record(), memory[at : at + block.nbytes]))
                at += block.nbytes
            began_s = self._clock.now_s()
            outcomes = home.volume.read(items, verify=False)
            sample.seconds += self._clock.now_s() - began_s
        finally:
            self._table.unpin([block for block, _ in pinned])
        sample.nbytes += sum(block.nbytes for (block, _), outcome in zip(pinned, outcomes, strict=True) if outcome is Outcome.HIT)
