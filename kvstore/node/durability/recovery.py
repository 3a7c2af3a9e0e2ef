"""Recovery at start: opens the durable volumes, and fills the block table from their catalogs.

1. ``open_volumes`` opens each volume's files. The volume repairs its catalog after a crash (``kvstore.tiers.nvme``).
2. ``recover`` reads each catalog. An entry was committed only after its slot was written and synced, so every entry names a block
   that survived ``kill -9``. Header and checksums verify the bytes when they are read.
3. A key that two volumes hold (after a crash between a commit on one and the removal from the other) stays on the first.
4. The rules of namespaces are read after that: ``kvstore.node.control.retention.RetentionEnforcer.recall``.
"""

from __future__ import annotations

import logging

from kvstore.config.node import NodeConfig
from kvstore.core.errors import InvalidArgument, KVStoreError
from kvstore.core.types import BlockKey, VolumeId
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.tiers.contract import BlockRecord, DurableVolume, Slot
from kvstore.tiers.io_engines.probe import choose_gds
from kvstore.tiers.nvme.slab import NvmeSlab

log = logging.getLogger(__name__)


def open_volumes(config: NodeConfig, counters: Counters) -> tuple[list[NvmeSlab], list[str]]:
    """Open a node's durable volumes.

    Returns:
        The volumes in the order of ``config.nvme``, and a line about GPUDirect Storage for each.

    Raises:
        InvalidArgument: GPUDirect Storage is required but ``config.nvme`` is empty.
    """
    slabs: list[NvmeSlab] = []
    gds_lines: list[str] = []
    if config.gds == "required" and not config.nvme:
        raise InvalidArgument("node.gds = required needs an NVMe volume; set node.nvme")
    for number, nvme in enumerate(config.nvme):
        volume_id = VolumeId(f"{config.node_id}/nvme{number}")
        nvme.path.mkdir(parents=True, exist_ok=True, mode=0o700)  # the probe measures the folder's file system
        threads = config.io_threads * len(config.nvme)
        gds, found = choose_gds(config.gds, nvme.path, threads=threads, counters=counters)
        gds_lines.append(f"GPUDirect Storage of {volume_id}: {found.describe()}")
        slabs.append(
            NvmeSlab.open(
                nvme.path,
                volume_id=volume_id,
                capacity_bytes=nvme.capacity_bytes,
                io_threads=config.io_threads,
                direct=nvme.direct,
                counters=counters,
                gds=gds,
                gds_required=config.gds == "required",
            )
        )
    return slabs, gds_lines


def recover(table: BlockTable, namespaces: NamespaceRegistry, counters: Counters) -> None:
    """Fill the table with the blocks that its volumes hold."""
    keys: dict[BlockKey, BlockKey] = {}
    for node_volume in table.node_volumes:
        restored = 0
        for slot, record in node_volume.volume.recover():
            namespace = namespaces.of_shape(record.namespace, record.shape)
            if table.restore(node_volume, namespace, _share_keys(record, keys), slot):
                restored += 1
            else:
                _drop_duplicate(node_volume.volume, record.key, slot, counters)
        log.info("volume recovered: %s (blocks=%d, io_engine=%s)", node_volume.volume_id, restored, node_volume.volume.io_engine)


def _drop_duplicate(volume: DurableVolume, key: BlockKey, slot: Slot, counters: Counters) -> None:
    """Remove a block that another volume holds too. If the catalog cannot be changed, the slot stays out of use."""
    try:
        volume.commit([], [key])
    except (KVStoreError, OSError) as error:
        counters.add(node_metrics.RECOVERY_DOUBLES_KEPT)
        log.info("duplicate block kept: %s (key=%s): %s", volume.volume_id, key.hex(), error)
    else:
        volume.free([slot])


def _share_keys(record: BlockRecord, keys: dict[BlockKey, BlockKey]) -> BlockRecord:
    """Return a record whose key and parent are shared objects: a block and its children share one object per key."""
    parent = None if record.parent is None else keys.setdefault(record.parent, record.parent)
    key = keys.setdefault(record.key, record.key)
    return BlockRecord(record.namespace, key, parent, record.depth, record.shape, record.checksums)  # replace() is slower
