"""Blocks that exist only in DRAM, and sending them to write-back again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.core.types import BlockKey
from kvstore.node.durability.writeback import BATCH_BLOCKS
from kvstore.node.state.change_log import in_chains
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable

ARENA_PART = 4
"""``requeue_dram_only`` sends at most this fraction (1/n) of the arena, so that new stores find space in the queue."""


def by_namespace(blocks: Iterable[Block]) -> list[tuple[NodeNamespace, list[BlockKey]]]:
    """Keys of blocks, namespace by namespace, each in the order given."""
    found: dict[NodeNamespace, list[BlockKey]] = {}
    for block in blocks:
        found.setdefault(block.namespace, []).append(block.key)
    return list(found.items())


def is_dram_only(block: Block) -> bool:
    """Whether a block that was stored here would be lost with this process."""
    return block.volatile and block.dram is not None and block.nvme is None


def fits_some(block: Block, volumes: Iterable[NodeVolume]) -> bool:
    """Whether a volume can hold blocks of this size at all."""
    return any(volume.volume.fits(block.namespace.shape) for volume in volumes)


def requeue(table: BlockTable, blocks: Sequence[Block]) -> None:
    """Send blocks to write-back, in their order except that each batch is sorted by namespace."""
    for first in range(0, len(blocks), BATCH_BLOCKS):
        for namespace, keys in by_namespace(blocks[first : first + BATCH_BLOCKS]):
            table.requeue_writeback(namespace, keys)


def requeue_dram_only(table: BlockTable) -> int:
    """Send DRAM-only blocks to write-back again, after a volume did not answer. Returns how many such blocks there were."""
    volumes = table.node_volumes
    dram_only = [block for block in table.snapshot() if is_dram_only(block) and not block.writing and fits_some(block, volumes)]
    space = table.dram.usage().capacity_bytes // ARENA_PART
    sent: list[Block] = []
    for block in in_chains(sorted(dram_only, key=lambda block: block.depth)):
        if space <= 0:
            break
        sent.append(block)
        space -= block.nbytes
    requeue(table, sent)
    return len(dram_only)
