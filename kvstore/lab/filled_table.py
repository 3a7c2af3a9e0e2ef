"""A block table with many durable blocks in memory, to measure the memory of a block and the speed of the table.

All components are real except the durable volume, which allocates slots and keeps no bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count

import xxhash

from kvstore.core.clock import MonotonicClock
from kvstore.core.types import BlockKey, BlockRun, BlockShape, NamespaceId, Outcome, Tier, VolumeId
from kvstore.node.eviction.allocation import allocate_nvme
from kvstore.node.eviction.volume_commits import finish_eviction
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import NodeVolume
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.node.state.residency import Residency
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.tiers.arena import DramArena
from kvstore.tiers.contract import BlockRecord, DurableVolume, Slot
from kvstore.tiers.eviction.policy import make_policy
from kvstore.tiers.nvme.slot_header import slot_bytes
from kvstore.tiers.slot_pool import PooledVolume, SlotPool

DRAM, NVME = VolumeId("table/dram"), VolumeId("table/nvme0")
DEADLINE_S = 60.0


class BytelessVolume(PooledVolume, DurableVolume):
    """A durable volume that gives out slots and keeps no bytes: a read says that there are none."""

    tier = Tier.NVME

    def __init__(self, volume_id: VolumeId, capacity_bytes: int) -> None:
        self.volume_id = volume_id
        self.slot_pool = SlotPool(capacity_bytes)

    def fits(self, shape: BlockShape) -> bool:
        return self.slot_pool.fits(slot_bytes(shape))

    @staticmethod
    def _slot_bytes(shape: BlockShape) -> int:
        return slot_bytes(shape)

    def write(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]]) -> list[Exception | None]:
        return [None] * len(items)

    def read(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]], *, verify: bool = True) -> list[Outcome]:  # noqa: ARG002
        return [Outcome.UNAVAILABLE] * len(items)

    def read_with_checksums(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]]) -> list[tuple[Outcome, bytes]]:
        return [(Outcome.UNAVAILABLE, b"")] * len(items)

    def remove_replicas(self, replicas: Sequence[tuple[BlockKey, Slot]]) -> None:
        del replicas

    def commit(self, stored: Sequence[tuple[Slot, BlockRecord]], removed: Sequence[BlockKey]) -> None:
        """Nothing outlives the process."""

    def recover(self) -> Iterator[tuple[Slot, BlockRecord]]:
        return iter(())

    @property
    def io_engine(self) -> str:
        return "none"

    def close(self) -> None:
        """Nothing is open."""


class FilledTable:
    """A table whose blocks are durable and have left DRAM, but for the last ones.

    Args:
        layers: of each block, a few bytes each.
        chain_blocks: blocks of a chain.
        capacity_blocks: that the volume has space for.
        policy: name of the eviction policy of both tiers.
    """

    def __init__(
        self, *, layers: int = 32, chain_blocks: int = 32, capacity_blocks: int = 1 << 20, policy: str = "reuse-distance"
    ) -> None:
        self.clock = MonotonicClock()
        self.counters = Counters()
        self.shape = BlockShape(layers, 16)
        self.arena = DramArena(volume_id=DRAM, capacity_bytes=16 << 20)
        self.node_volume = NodeVolume(BytelessVolume(NVME, capacity_blocks * slot_bytes(self.shape) * 17 // 16))
        self.log = ReplicaChangeLog([DRAM, NVME], self.counters, self.clock, keep=False)
        residency = Residency(
            self.arena,
            make_policy(policy),
            [self.node_volume],
            self.log,
            self.counters,
            self.clock,
            make_durable_policy=partial(make_policy, policy),
        )
        self.table = BlockTable(residency, writes_back=True)
        self.namespace = NamespaceRegistry().of_shape(NamespaceId(bytes(16)), self.shape)
        self._chain_blocks = chain_blocks
        self._layers = layers
        self._chains = count()

    def fill(self, blocks: int) -> list[list[BlockKey]]:
        """Store a number of blocks and make them durable; returns their keys, chain by chain."""
        return [self._store_chain(next(self._chains)) for _ in range(blocks // self._chain_blocks)]

    def _store_chain(self, chain: int) -> list[BlockKey]:
        digest = xxhash.xxh3_128_digest
        keys = tuple(BlockKey(digest(b"%d/%d" % (chain, depth))) for depth in range(self._chain_blocks))
        run = BlockRun(self.namespace.namespace_id, None, 0, keys)
        prepared = self.table.prepare(self.namespace, run, self.clock.now_s() + DEADLINE_S)
        sums = [key * (self._layers // 2) for key in keys]
        self.table.complete(prepared, keys, sums)
        while blocks := self.table.take_pending(len(keys), 1 << 30, 0.0):
            for block, slot in zip(blocks, self._durable_slots(len(blocks)), strict=True):
                self.table.writeback_done(block, self.node_volume, slot)
        return list(keys)

    def _durable_slots(self, count: int) -> list[Slot]:
        while True:
            slots, victims = allocate_nvme(self.table.residency, self.node_volume, self.shape, count, ahead=4)
            if slots is not None:
                return slots
            if not victims:
                raise RuntimeError("no space can be freed on the volume")
            finish_eviction(self.table.residency, self.node_volume, victims)

    def close(self) -> None:
        """Release the arena."""
        self.table.close()
        self.arena.close()
