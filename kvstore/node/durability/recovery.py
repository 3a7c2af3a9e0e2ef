"""Recovery: opens the durable volumes, and fills the block table from their catalogs.

1. ``open_volumes`` opens each volume's files. The volume repairs its catalog after a crash (``kvstore.tiers.nvme``).
2. ``recover`` reads each catalog. An entry was committed only after its slot was written and synced, so every entry names a block
   that survived ``kill -9``. Header and checksums verify the bytes when they are read.
3. A key that two volumes hold stays on the first, unless that replica proves corrupt (``duplicates``).
4. The rules of namespaces are read after that: ``kvstore.node.control.retention.RetentionEnforcer.recall``.
5. ``recover_while_running`` does the same for a volume that the node adopts (``adoption``), beside loads and stores.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from kvstore.config.node import NodeConfig
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockKey, NodeId, VolumeId
from kvstore.node.durability.duplicates import settle_duplicates
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.state.namespaces import NamespaceRegistry, NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.io_engines.probe import check_gds
from kvstore.tiers.nvme.ownership import VolumeAdopted
from kvstore.tiers.nvme.slab import NvmeSlab

log = logging.getLogger(__name__)


ATTACH_WAIT_S: Final = 60.0
"""How long a block of an adopted volume may be in use by a load or store of its key."""
ATTACH_POLL_S: Final = 0.2
_REMOVALS: Final = 1_024


@dataclass(frozen=True, slots=True)
class VolumeFolder:
    """Where a volume is that this node owns or mounts, and how it is opened.

    Attributes:
        volume_id: its name.
        path: its folder on this host.
        capacity_bytes: configured space for slots; 0: the present one.
        direct: use O_DIRECT if the file system supports it.
    """

    volume_id: VolumeId
    path: Path
    capacity_bytes: int = 0
    direct: bool = True


@dataclass(slots=True)
class OpenedVolumes:
    """A node's durable volumes at start.

    Attributes:
        slabs: those that this node owns.
        adopted_by_others: those of its configuration that other nodes have adopted.
        gds_lines: a line about GPUDirect Storage for each owned volume.
    """

    slabs: list[NvmeSlab] = field(default_factory=list)
    adopted_by_others: list[VolumeFolder] = field(default_factory=list)
    gds_lines: list[str] = field(default_factory=list)


def own_volumes(config: NodeConfig) -> list[VolumeFolder]:
    """Return the volumes of ``config.nvme``."""
    return [
        VolumeFolder(VolumeId(f"{config.node_id}/nvme{number}"), nvme.path, nvme.capacity_bytes, nvme.direct)
        for number, nvme in enumerate(config.nvme)
    ]


def open_volumes(config: NodeConfig, counters: Counters) -> OpenedVolumes:
    """Open a node's durable volumes, except those that other nodes have adopted.

    Raises:
        InvalidArgument: GPUDirect Storage is required but ``config.nvme`` is empty, or the folder of a volume cannot be made.
    """
    opened = OpenedVolumes()
    if config.gds == "required" and not config.nvme:
        raise InvalidArgument("node.gds = required needs an NVMe volume; set node.nvme")
    for location in own_volumes(config):
        try:
            location.path.mkdir(parents=True, exist_ok=True, mode=0o700)  # the probe measures the folder's file system
        except OSError as error:
            advice = "the folder of the volume cannot be made; set node.nvme to a folder that this user can write to"
            raise InvalidArgument(advice, path=location.path, cause=error.strerror or str(error)) from error
        found = check_gds(config.gds, location.path, counters=counters)  # for engines: the node reads into host memory
        try:
            opened.slabs.append(open_owned(config, location, counters=counters))
        except VolumeAdopted as error:
            counters.add(volumes_metrics.FENCED_VOLUMES)
            log.error("volume not opened: %s; this node only reads it", error)  # noqa: TRY400  # no bug, no trace
            opened.adopted_by_others.append(location)
            continue
        opened.gds_lines.append(f"GPUDirect Storage of {location.volume_id}: {found.describe()}")
    return opened


def open_owned(config: NodeConfig, location: VolumeFolder, *, counters: Counters) -> NvmeSlab:
    """Open a volume that this node owns.

    Raises:
        As ``NvmeSlab.open``.
    """
    return NvmeSlab.open(
        location.path,
        volume_id=location.volume_id,
        capacity_bytes=location.capacity_bytes,
        node_id=NodeId(config.node_id),
        io_threads=config.io_threads,
        direct=location.direct,
        counters=counters,
    )


def recover(table: BlockTable, namespaces: NamespaceRegistry, counters: Counters) -> None:
    """Fill the table with the blocks that its volumes hold."""
    keys: dict[BlockKey, BlockKey] = {}
    for node_volume in table.node_volumes:
        restored = 0
        duplicates: list[tuple[Slot, BlockRecord]] = []

        def attach(slot: Slot, record: BlockRecord, node_volume: NodeVolume = node_volume) -> bool:
            return table.restore(node_volume, namespaces.of_shape(record.namespace, record.shape), record, slot)

        for slot, stored in node_volume.volume.recover():
            record = _share_keys(stored, keys)
            if attach(slot, record):
                restored += 1
            else:
                duplicates.append((slot, record))
        restored += settle_duplicates(table, node_volume, duplicates, attach, counters)
        log.info("volume recovered: %s (blocks=%d, io_engine=%s)", node_volume.volume_id, restored, node_volume.volume.io_engine)


class _Attached(Enum):
    """Result for one block of an adopted volume."""

    RESTORED = "restored"
    BUSY = "busy"
    DUPLICATE = "duplicate"
    """Another volume of this node holds the block."""
    UNUSED = "unused"
    """DRAM holds other bytes under this key, or the block is on a volume of this node whose files are gone.

    The slot is left out until the next opening of the volume.
    """


def recover_while_running(table: BlockTable, node_volume: NodeVolume, namespaces: NamespaceRegistry, counters: Counters) -> int:
    """Fill the table with the blocks of one more volume, which the table expects. Returns how many it has now.

    Keys that loads or stores are using are tried again when these have ended.
    """
    volume = node_volume.volume
    keys: dict[BlockKey, BlockKey] = {}
    found: Counter[_Attached] = Counter()
    busy: list[tuple[Slot, BlockRecord]] = []
    duplicates: list[tuple[Slot, BlockRecord]] = []

    def attach(slot: Slot, record: BlockRecord) -> bool:
        result = _attach(table, node_volume, namespaces.of_shape(record.namespace, record.shape), record, slot)
        if result is _Attached.BUSY:
            return False
        found[result] += 1
        if result is _Attached.DUPLICATE:
            duplicates.append((slot, record))
        return True

    for slot, stored in volume.recover():
        record = _share_keys(stored, keys)
        if not attach(slot, record):
            busy.append((slot, record))
    deadline_s = table.clock.now_s() + ATTACH_WAIT_S
    while busy and table.clock.now_s() < deadline_s:
        busy = [(slot, record) for slot, record in busy if not attach(slot, record)]
        with table.residency.lock:
            table.wait_changed(min(deadline_s, table.clock.now_s() + ATTACH_POLL_S))

    def replace(slot: Slot, record: BlockRecord) -> bool:
        namespace = namespaces.of_shape(record.namespace, record.shape)
        return _attach(table, node_volume, namespace, record, slot) is _Attached.RESTORED

    found[_Attached.RESTORED] += settle_duplicates(table, node_volume, duplicates, replace, counters)
    if unused := found[_Attached.UNUSED] + len(busy):
        counters.add(volumes_metrics.ADOPTED_BLOCKS_UNUSED, unused)
        log.warning("blocks of an adopted volume left out: %s (blocks=%d)", node_volume.volume_id, unused)
    return found[_Attached.RESTORED]


def _attach(table: BlockTable, node_volume: NodeVolume, namespace: NodeNamespace, record: BlockRecord, slot: Slot) -> _Attached:
    residency = table.residency
    with residency.lock:
        key = record.key
        block = residency.blocks.get(key)
        if key in residency.preparing or key in residency.loading or (block is not None and block.in_transfer):
            return _Attached.BUSY
        if block is None:
            block = residency.blocks[key] = Block(namespace, key, record.parent, record.depth, record.checksums)
        elif block.nvme_volume is not None and not block.nvme_volume.volume.files_present:
            return _Attached.UNUSED
        elif block.nvme_volume is not None:
            return _Attached.DUPLICATE if block.durable and not block.evicting else _Attached.BUSY
        elif block.namespace is not namespace or block.checksums != record.checksums or block.durable_remotely:
            return _Attached.UNUSED
        block.produced_here = True  # a copy in DRAM becomes a block of this node, which drains move
        residency.put_on_volume(block, node_volume, slot)
        return _Attached.RESTORED


def drop_blocks(table: BlockTable, node_volume: NodeVolume) -> int:
    """Forget the blocks of a volume that another node has adopted. Returns how many are still in use.

    Blocks in DRAM stay there as copies of another node's blocks: the new owner keeps them durable.
    """
    residency = table.residency
    mine = [block for block in table.snapshot() if block.nvme_volume is node_volume]
    for first in range(0, len(mine), _REMOVALS):
        with residency.lock:
            for block in mine[first : first + _REMOVALS]:
                if block.nvme_volume is node_volume and residency.is_idle(block):
                    residency.mark_evicting((block,))
                    residency.remove_from_volume(block, node_volume)
                    block.produced_here = False
                    residency.drop_if_nowhere(block)
            residency.changed.notify_all()
    return sum(block.nvme_volume is node_volume for block in mine)


def _share_keys(record: BlockRecord, keys: dict[BlockKey, BlockKey]) -> BlockRecord:
    """Return a record whose key and parent are shared objects: a block and its children share one object per key."""
    parent = None if record.parent is None else keys.setdefault(record.parent, record.parent)
    key = keys.setdefault(record.key, record.key)
    return BlockRecord(record.namespace, key, parent, record.depth, record.shape, record.checksums)  # replace() is slower
