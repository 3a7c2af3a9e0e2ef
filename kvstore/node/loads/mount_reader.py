"""Reads of blocks from a mounted volume into the arena: verified, and without the node that owns the volume."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.clock import Clock
from kvstore.core.types import BlockKey, Outcome
from kvstore.node.loads.mounts import Mount
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import volumes as volumes_metrics


class MountReader:
    """Reads blocks of mounts into a node's table. Thread-safe."""

    def __init__(self, table: BlockTable, counters: Counters, clock: Clock) -> None:
        self._table = table
        self._counters = counters
        self._clock = clock

    def read(
        self, mount: Mount, namespace: NodeNamespace, keys: Sequence[BlockKey], deadline_s: float, *, refresh: bool
    ) -> list[Block | None]:
        """Read blocks that the caller has claimed as absent.

        Parent, depth and checksums of a block are those of its slot: the caller may know its key only.

        Args:
            mount: the volume.
            namespace: of the blocks.
            keys: blocks that are in no tier yet.
            deadline_s: of the load.
            refresh: if the mount does not know a block, read the volume's newest manifest first.

        Returns:
            One entry per block: the block, pinned in DRAM, or None if the mount did not deliver it.
        """
        table = self._table
        loaded: list[Block | None] = [None] * len(keys)
        found = mount.find(namespace, keys)
        if refresh and None in found:
            mount.catch_up(deadline_s)
            found = mount.find(namespace, keys)
        known = [(at, slot) for at, slot in enumerate(found) if slot is not None]
        in_time = bool(known) and self._clock.now_s() < deadline_s
        targets = table.reserve(namespace.shape, len(known), deadline_s, namespace) if in_time else None
        if targets is not None:
            views = [table.dram.view(target, namespace.shape.block_bytes) for target in targets]
            items = [(keys[at], slot, view) for (at, slot), view in zip(known, views, strict=True)]
            answers = mount.read(namespace, items, deadline_s, lambda: table.unreserve(targets))
            for (at, _), target, (outcome, record) in zip(known, targets, answers or (), strict=False):
                if outcome is Outcome.HIT:
                    block = Block(namespace, record.key, record.parent, record.depth, record.checksums)
                    loaded[at] = table.insert_fetched(block, target)
                else:
                    table.unreserve((target,))
        hits = len(keys) - loaded.count(None)
        self._counters.add(volumes_metrics.MOUNT_READ_BLOCKS, hits)
        self._counters.add(volumes_metrics.MOUNT_MISSED_BLOCKS, (len(keys) if refresh else len(known)) - hits)
        return loaded
