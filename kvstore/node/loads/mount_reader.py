"""Reads of blocks from a mounted volume into the arena: verified, and without the node that owns the volume."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.clock import Clock
from kvstore.core.types import Outcome
from kvstore.node.loads.mounts import Mount
from kvstore.node.state.model import Block
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import volumes as volumes_metrics


class MountReader:
    """Reads blocks of mounts into a node's table. Thread-safe."""

    def __init__(self, table: BlockTable, counters: Counters, clock: Clock) -> None:
        self._table = table
        self._counters = counters
        self._clock = clock

    def read(self, mount: Mount, blocks: Sequence[Block], deadline_s: float, *, refresh: bool) -> list[Block | None]:
        """Read blocks that the caller has claimed as absent, and set their checksums.

        Args:
            mount: the volume.
            blocks: blocks of one namespace that are in no tier yet.
            deadline_s: of the load.
            refresh: if the mount does not know a block, read the volume's newest manifest first.

        Returns:
            One entry per block: the block, pinned in DRAM, or None if the mount did not deliver it.
        """
        table, namespace = self._table, blocks[0].namespace
        loaded: list[Block | None] = [None] * len(blocks)
        keys = [block.key for block in blocks]
        found = mount.find(namespace, keys)
        if refresh and None in found:
            mount.catch_up(deadline_s)
            found = mount.find(namespace, keys)
        known = [(at, slot) for at, slot in enumerate(found) if slot is not None]
        in_time = bool(known) and self._clock.now_s() < deadline_s
        targets = table.reserve(namespace.shape, len(known), deadline_s, namespace) if in_time else None
        if targets is not None:
            views = [table.dram.view(target, namespace.shape.block_bytes) for target in targets]
            items = [(blocks[at].key, slot, view) for (at, slot), view in zip(known, views, strict=True)]
            answers = mount.read(namespace, items, deadline_s, lambda: table.unreserve(targets))
            for (at, _), target, (outcome, checksums) in zip(known, targets, answers or (), strict=False):
                if outcome is Outcome.HIT:
                    blocks[at].checksums = checksums
                    loaded[at] = table.insert_fetched(blocks[at], target)
                else:
                    table.unreserve((target,))
        hits = len(blocks) - loaded.count(None)
        self._counters.add(volumes_metrics.MOUNT_READ_BLOCKS, hits)
        self._counters.add(volumes_metrics.MOUNT_MISSED_BLOCKS, (len(blocks) if refresh else len(known)) - hits)
        return loaded
