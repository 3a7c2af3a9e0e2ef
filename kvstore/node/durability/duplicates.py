"""Blocks that two volumes of a node hold, e.g. after a crash between a commit on one volume and the removal from the other.

The table has one of the two replicas. The other is removed from its catalog only after the table's one was read and verified. If
that one is corrupt and the other is good, they change places: the corruption may be new, or its quarantine could not be
committed. If neither can be verified, both stay in their catalogs.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockKey, Outcome
from kvstore.node.base.volume_guard import ignore
from kvstore.node.durability.volume_checks import READ_BYTES, pinned_on, read_items
from kvstore.node.eviction.volume_commits import by_volume, quarantine
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.tiers.contract import BlockRecord, Slot

log = logging.getLogger(__name__)

_REMOVALS: Final = 1_024

Stored = tuple[Slot, BlockRecord]
"""A block as a catalog names it."""


class _Held(NamedTuple):
    """The replica that the table has, and the outcome of its read."""

    block: Block
    node_volume: NodeVolume
    slot: Slot
    outcome: Outcome


def settle_duplicates(
    table: BlockTable,
    node_volume: NodeVolume,
    duplicates: Sequence[Stored],
    attach: Callable[[Slot, BlockRecord], bool],
    counters: Counters,
) -> int:
    """Remove blocks that another volume of the table holds too, unless the other replica is corrupt or cannot be read.

    Args:
        table: the blocks.
        node_volume: has the duplicates.
        duplicates: of the volume.
        attach: puts a duplicate into the table, in place of a replica that proved corrupt. Returns whether it did.
        counters: metrics.

    Returns:
        How many duplicates are in the table now.
    """
    attached = kept = 0
    removable: list[Stored] = []
    largest = max((record.shape.block_bytes for _, record in duplicates), default=1)
    size = max(1, READ_BYTES // largest)
    for first in range(0, len(duplicates), size):
        batch = duplicates[first : first + size]
        held = _read_held(table, batch)
        for slot, record in batch:
            other = held.get(record.key)
            if other is not None and other.outcome is Outcome.HIT:
                removable.append((slot, record))
            elif other is not None and other.outcome is Outcome.CORRUPT and _is_good(node_volume, slot, record):
                quarantine(table, other.node_volume, other.block, other.slot, counters)
                if attach(slot, record):
                    attached += 1
                    names = (record.key.hex(), other.node_volume.volume_id, node_volume.volume_id)
                    log.warning("corrupt replica replaced: %s (volume=%s, replaced_by=%s)", *names)
                else:
                    kept += 1
            else:
                kept += 1
    if kept:
        counters.add(node_metrics.RECOVERY_DUPLICATES_KEPT, kept)
        log.warning("duplicate blocks kept: %s (blocks=%d): no replica could be verified", node_volume.volume_id, kept)
    _remove(node_volume, removable, counters)
    return attached


def _read_held(table: BlockTable, batch: Sequence[Stored]) -> dict[BlockKey, _Held]:
    """Read and verify the replicas that the table has. Those of a volume that does not answer are missing."""
    with table.residency.lock:
        find = table.residency.blocks.get
        blocks = [block for _, record in batch if (block := find(record.key)) and block.namespace_id == record.namespace]
    found: dict[BlockKey, _Held] = {}
    for node_volume, mine in by_volume(blocks):
        with pinned_on(table, node_volume, mine) as pinned:
            memory = memoryview(mmap.mmap(-1, max(1, sum(block.nbytes for block, _ in pinned))))
            outcomes = _read(node_volume, read_items(pinned, memory))
            for (block, slot), outcome in zip(pinned, outcomes, strict=True):
                found[block.key] = _Held(block, node_volume, slot, outcome)
    return found


def _is_good(node_volume: NodeVolume, slot: Slot, record: BlockRecord) -> bool:
    memory = memoryview(mmap.mmap(-1, record.shape.block_bytes))
    return _read(node_volume, [(slot, record, memory)]) == [Outcome.HIT]


def _read(node_volume: NodeVolume, items: Sequence[tuple[Slot, BlockRecord, memoryview]]) -> list[Outcome]:
    try:
        return node_volume.guard.read(partial(node_volume.volume.read, items), ignore)
    except (KVStoreError, OSError) as error:  # the volume is stalled or closed
        log.warning("duplicate blocks not verified: %s (blocks=%d, reason=%s)", node_volume.volume_id, len(items), error)
        return [Outcome.UNAVAILABLE] * len(items)


def _remove(node_volume: NodeVolume, duplicates: Sequence[Stored], counters: Counters) -> None:
    """Remove blocks from the catalog of a volume. If that fails, their slots stay out of use until the next opening."""
    volume = node_volume.volume
    for first in range(0, len(duplicates), _REMOVALS):
        batch = duplicates[first : first + _REMOVALS]
        try:
            volume.commit([], [record.key for _, record in batch])
        except (KVStoreError, OSError) as error:
            counters.add(node_metrics.RECOVERY_DUPLICATES_KEPT, len(batch))
            log.warning("duplicate blocks kept: %s (blocks=%d, reason=%s)", volume.volume_id, len(batch), error)
        else:
            volume.free([slot for slot, _ in batch])
