"""A node's block table over real volumes, without threads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvstore.core.checksum import layer_checksums
from kvstore.core.clock import ManualClock
from kvstore.core.types import BlockKey, BlockRun, BlockShape, NamespaceId, VolumeId
from kvstore.node.durability.writeback import LocalTarget
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.node.state.residency import Residency
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.tiers.arena import DramArena
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.eviction.policy import make_policy
from kvstore.tiers.nvme.slab import NvmeSlab
from support.chains import key_of

SHAPE = BlockShape(2, 2048)
BATCH = 8


class FailingSlab(NvmeSlab):
    """A volume whose commits fail while ``fails`` is set, and that becomes read-only on command."""

    fails = False

    def make_read_only(self, reason: str | None) -> None:
        """Accept no changes any more; None: accept them again."""
        self._read_only = reason

    def commit(self, added: Sequence[tuple[Slot, BlockRecord]], removed: Sequence[BlockKey]) -> None:
        if self.fails and (added or removed):
            raise OSError(5, "told to")
        super().commit(added, removed)


class SessionHarness:
    """A block table with a real arena and real volumes. ``turn`` writes back, and ``close`` checks the invariants."""

    def __init__(
        self, folder: Path, policy: str = "reuse-distance", sizes: Sequence[int] = (1 << 20,) * 3, shape: BlockShape = SHAPE
    ) -> None:
        names = [VolumeId(f"n/nvme{number}") for number in range(len(sizes))]
        self.clock = ManualClock()
        self.counters = counters = Counters()
        log = ReplicaChangeLog([VolumeId("n/dram"), *names], counters, self.clock, keep=False)
        self.arena = DramArena(volume_id=VolumeId("n/dram"), capacity_bytes=1 << 20)
        self.slabs = [
            FailingSlab.open(folder / name[2:], volume_id=name, capacity_bytes=size, io_threads=1)
            for name, size in zip(names, sizes, strict=True)
        ]
        for slab in self.slabs:
            assert list(slab.recover()) == []
        residency = Residency(
            self.arena,
            make_policy(policy),
            [NodeVolume(slab) for slab in self.slabs],
            log,
            counters,
            self.clock,
            make_durable_policy=partial(make_policy, policy),
        )
        self.table = BlockTable(residency, writes_back=True)
        self.target = LocalTarget(self.table, counters, self.clock)
        self.namespace = NamespaceRegistry().of_shape(NamespaceId(b"n" * 16), shape)
        self.lengths: dict[int, int] = {}

    def close(self) -> None:
        self.table.validate()
        self.table.close()
        for slab in self.slabs:
            slab.close()
        self.arena.close()

    def turn(self, chain: int, more: int) -> None:
        """Continue a session: store its evicted blocks again and new ones, and write them back."""
        self.store_only(chain, more, write_back=True)

    def store_only(self, chain: int, more: int, *, write_back: bool = False) -> None:
        """Continue a session, by default without write-back."""
        shape = self.namespace.shape
        length = self.lengths[chain] = self.lengths.get(chain, 0) + more
        keys = tuple(key_of(chain, depth) for depth in range(length))
        known = {block.key for block in self.table.snapshot()}
        first = next((depth for depth, key in enumerate(keys) if key not in known), length)
        self.table.unpin(block for block in self.table.pin_resident(self.namespace, keys[:first]) if block is not None)
        for start in range(first, length, BATCH):
            run = BlockRun(self.namespace.namespace_id, keys[start - 1] if start else None, start, keys[start : start + BATCH])
            prepared = self.table.prepare(self.namespace, run, self.clock.now_s())
            sums = []
            for key, slot in prepared.slots.items():
                payload = hashlib.sha256(key).digest() * (shape.block_bytes // 32)
                self.arena.view(slot, shape.block_bytes)[:] = payload
                sums.append(layer_checksums(memoryview(payload), shape))
            self.table.complete(prepared, list(prepared.slots), sums)
            while write_back and (blocks := self.table.take_pending(BATCH, 1 << 20, 0.0)):
                self.target.persist(blocks, lambda: None)
        self.table.validate()

    def durable(self) -> dict[BlockKey, Block]:
        return {block.key: block for block in self.table.snapshot() if block.nvme is not None}

    def unreachable(self) -> float:
        """Return the fraction of durable blocks that no lookup finds because an ancestor was evicted."""
        durable, reached = self.durable(), set[BlockKey]()
        for block in sorted(self.table.snapshot(), key=lambda block: block.depth):
            if block.parent is None or block.parent in reached:
                reached.add(block.key)
        return 1 - len(durable.keys() & reached) / len(durable)

    def blocks_on(self) -> list[int]:
        return [slab.usage().blocks for slab in self.slabs]
