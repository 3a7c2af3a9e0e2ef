"""The part of a load that a mounted volume brings: from its slots into the arena, verified, without the owner."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.clock import Clock
from kvstore.core.types import Outcome
from kvstore.node.loads.mounts import Mount
from kvstore.node.state.model import Block
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters


class MountLoads:
    """Brings blocks from mounts into a node's table. Thread-safe."""

    def __init__(self, table: BlockTable, counters: Counters, clock: Clock) -> None:
        self._table = table
        self._counters = counters
        self._clock = clock

    def bring(self, mount: Mount, blocks: Sequence[Block], deadline_s: float, *, read_on: bool) -> list[Block | None]:
        """Fills blocks that the caller has claimed as absent, their checksums included.

        Args:
            mount: where they are said to lie.
            blocks: of one namespace, in no tier yet.
            deadline_s: of the load.
            read_on: look for news of blocks of which the mount does not know; else only what is known is read.

        Returns:
            One entry a block: pinned in DRAM, or None where it has to come from elsewhere.
        """
        table, namespace = self._table, blocks[0].namespace
        brought: list[Block | None] = [None] * len(blocks)
        keys = [block.key for block in blocks]
        found = mount.find(namespace, keys)
        if read_on and None in found:
            mount.catch_up(deadline_s)
            found = mount.find(namespace, keys)
        known = [(at, slot) for at, slot in enumerate(found) if slot is not None]
        rooms = (
            table.reserve(namespace.shape, len(known), deadline_s, namespace)
            if known and self._clock.now_s() < deadline_s
            else None
        )
        if rooms is not None:
            views = [table.dram.view(room, namespace.shape.block_bytes) for room in rooms]
            wanted = [(blocks[at].key, slot, view) for (at, slot), view in zip(known, views, strict=True)]
            answers = mount.read(namespace, wanted, deadline_s, lambda: table.unreserve(rooms))
            for (at, _), room, (outcome, checksums) in zip(known, rooms, answers or (), strict=False):
                if outcome is Outcome.HIT:
                    blocks[at].checksums = checksums
                    brought[at] = table.insert_fetched(blocks[at], room)
                else:
                    table.unreserve((room,))
        hits = len(blocks) - brought.count(None)
        self._counters.add("mount_read_blocks_total", hits)
        self._counters.add("mount_missed_blocks_total", (len(blocks) if read_on else len(known)) - hits)
        return brought
