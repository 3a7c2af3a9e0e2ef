"""Disk locations of blocks, for an engine of the same host that reads them directly into its device's memory.

Only blocks on NVMe that are not in the arena are located: a copy from the arena is faster. Locating a block counts as a use for
the volume's eviction policy. A located block is pinned until its lease ends, so that its slot is not reused under the reader. A
reader that outlives its lease detects a reused slot by the slot's header and checksums, as a node that mounts the volume does
(``kvstore.tiers.nvme.mounted``).

A volume is named by its position in the list that the session got when it was opened. Blocks of volumes that the node has
adopted since are not located.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvproto.v1 import node_pb2
from kvstore.core.types import BlockKey, VolumeId
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.rpc.codec import pack_u64
from kvstore.tiers.contract import Slot

Located = tuple[int, Block, int, Slot]
"""Position among the keys, the block (pinned), position of its volume among the session's, its slot there."""


def pin_stored(
    table: BlockTable, namespace: NodeNamespace, keys: Sequence[BlockKey], volume_ids: Sequence[VolumeId]
) -> list[Located]:
    """Pin blocks that are on these volumes and not in DRAM, and mark them used there."""
    numbers = {volume_id: number for number, volume_id in enumerate(volume_ids)}
    found: list[Located] = []
    used: list[BlockKey] = []
    residency = table.residency
    with residency.lock:
        for position, key in enumerate(keys):
            block = residency.blocks.get(key)
            if (
                block is None
                or block.namespace is not namespace
                or block.dram is not None
                or block.evicting
                or key in residency.loading
            ):
                continue  # a block that is being loaded will soon be in DRAM
            if block.nvme is None or block.nvme_volume is None or block.nvme_volume.guard.stalled:
                continue
            volume_number = numbers.get(block.nvme_volume.volume_id)
            if volume_number is None:
                continue
            block.pins += 1
            used.append(key)
            found.append((position, block, volume_number, block.nvme))
        residency.volume_evictor.touch(namespace, used)
    return found


def located_runs(found: Sequence[Located]) -> list[node_pb2.LocatedRun]:
    """Return locations as messages: one run per stretch of consecutive positions."""
    runs = []
    for _, stretch in groupby(enumerate(found), lambda item: item[1][0] - item[0]):
        located = [one for _, one in stretch]
        run = node_pb2.LocatedRun(
            start=located[0][0], count=len(located), volumes=bytes(volume_number for _, _, volume_number, _ in located)
        )
        run.offsets = pack_u64(slot.offset for _, _, _, slot in located)
        run.generations = pack_u64(slot.generation for _, _, _, slot in located)
        runs.append(run)
    return runs
