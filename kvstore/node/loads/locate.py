"""Where blocks lie on a node's disks, told to an engine of the same host that reads them itself, into its device's memory.

Only what is on NVMe and not in the arena is told: from there a copy is sooner had. It counts as a use, for nobody else tells the
volume's eviction policy. A block that was told has a pin until its lease ends, so that its slot is not given to another one
under the reader. Should it be all the same (a reader that outlives its lease), the reader finds out by the slot's header and
checksums, as whoever mounts a volume does (``kvstore.tiers.nvme.mounted``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvproto.v1 import node_pb2
from kvstore.core.types import BlockKey
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.rpc.codec import pack_u64
from kvstore.tiers.contract import Slot

Located = tuple[int, Block, int, Slot]
"""Position among the keys, the block (pinned), position of its volume among the table's, its slot there."""


def pin_stored(table: BlockTable, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> list[Located]:
    """Pins those of the keys that lie on NVMe and nowhere nearer, and marks them used there."""
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
                continue  # what is being loaded will be in DRAM in a moment
            if block.nvme is None or block.nvme_volume is None or block.nvme_volume.guard.stalled:
                continue
            node_volume = table.node_volumes.index(block.nvme_volume)
            block.pins += 1
            used.append(key)
            found.append((position, block, node_volume, block.nvme))
        residency.volumes.touch(namespace, used)
    return found


def runs_of(found: Sequence[Located]) -> list[node_pb2.LocatedRun]:
    """Places as they travel: a run for each stretch of positions without a gap."""
    runs = []
    for _, stretch in groupby(enumerate(found), lambda item: item[1][0] - item[0]):
        places = [place for _, place in stretch]
        run = node_pb2.LocatedRun(
            start=places[0][0], count=len(places), volumes=bytes(node_volume for _, _, node_volume, _ in places)
        )
        run.offsets = pack_u64(slot.offset for _, _, _, slot in places)
        run.generations = pack_u64(slot.generation for _, _, _, slot in places)
        runs.append(run)
    return runs
