"""A block and a durable volume, as their node knows them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Generic, TypeVar

from kvstore.core.types import BlockKey, NamespaceId, VolumeId
from kvstore.health.cluster import FileSystem
from kvstore.health.host_reports import file_system
from kvstore.node.base.volume_guard import READERS, STALL_S, VolumeGuard, VolumeStalled
from kvstore.node.state.block_states import VOLUME_SHIFT, DramState, VolumeReplica
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.observe.counters import Counters
from kvstore.observe.failure_tracker import FailureTracker
from kvstore.tiers.allocator import ALIGNMENT
from kvstore.tiers.contract import BlockRecord, DurableVolume, Slot
from kvstore.tiers.nvme.slot_header import seal_of

Key = TypeVar("Key", bound=Hashable)

STATE_MASK: Final = 0xF
"""Bits of the state in DRAM. The state of the replica on a volume is ``VOLUME_SHIFT`` bits higher."""
_PRODUCED, _TRANSIENT, CONDEMNED, _SET_APART = 1 << 8, 1 << 9, 1 << 10, 1 << 11
_DEPTH_AT, _DEPTH_MASK = 16, (1 << 32) - 1
_ROW_AT, _ROW_MASK = 48, (1 << 32) - 1
_PAGE_AT, _PAGE_MASK = 80, (1 << 48) - 1
_GENERATION_AT, _SEAL_AT, _WORD_MASK = 128, 192, (1 << 64) - 1
_SLOT_MASK = (1 << _PAGE_AT) - 1
"""Bits below the fields of the NVMe slot."""
EVICTING: Final = (VolumeReplica.EVICTING | VolumeReplica.EVICTING_FOR_QUOTA) << VOLUME_SHIFT
"""Bits of a block that is being evicted from its volume."""
IN_TRANSFER: Final = DramState.WRITING | EVICTING
"""Bits of a block that is being written to a volume, or evicted from it."""


class _Flag:
    """Whether a block has one of some bits."""

    __slots__ = ("_mask",)

    def __init__(self, mask: int) -> None:
        self._mask = mask

    def __get__(self, block: Block, kind: type[Block]) -> bool:
        return block.bits & self._mask != 0


class _SettableFlag(_Flag):
    """One bit of a block."""

    __slots__ = ()

    def __set__(self, block: Block, value: bool) -> None:
        block.bits = block.bits | self._mask if value else block.bits & ~self._mask


class Block:
    """One block and its replicas. Mutable, guarded by the table's lock; ``dram`` stays while ``pins`` > 0.

    A large node holds millions of blocks, nearly all of them on NVMe alone. Such a block is this object of eight fields, its key
    and one integer (``bits``) with its states (``kvstore.node.state.block_states``; only ``Residency`` changes them), all small
    fields and the NVMe slot. Its checksums are kept only while it is in DRAM: the slot's header has them, and ``seal`` proves
    the header.
    """

    __slots__ = ("bits", "checksums", "dram", "key", "namespace", "nvme_volume", "parent", "pins")

    filling = _Flag(DramState.FILLING)
    dirty = _Flag(DramState.DIRTY)
    writing = _Flag(DramState.WRITING)
    clean = _Flag(DramState.CLEAN)
    durable_remotely = _Flag(VolumeReplica.REMOTE << VOLUME_SHIFT)
    evicting = _Flag(EVICTING)
    in_transfer = _Flag(IN_TRANSFER)
    """Whether the block is being written to a volume, or evicted from it."""
    lives_by_pins = _Flag(DramState.FILLING | _TRANSIENT | CONDEMNED)
    """Leaves DRAM when its last pin ends."""
    produced_here = _SettableFlag(_PRODUCED)
    """Stored here by an engine or a peer, so this node must make it durable. False: a copy of another node's block."""
    transient = _SettableFlag(_TRANSIENT)
    """Kept in DRAM only while it is pinned."""
    condemned = _SettableFlag(CONDEMNED)
    """Proved corrupt in DRAM while it was pinned, and left the table. Its last pin gives the slot back."""
    set_apart = _SettableFlag(_SET_APART)
    """Pinned for good after a bug: its space is never free."""

    def __init__(self, namespace: NodeNamespace, key: BlockKey, parent: BlockKey | None, depth: int, checksums: bytes) -> None:
        self.namespace = namespace
        self.key = key
        self.parent = parent
        self.checksums = checksums
        self.dram: Slot | None = None
        self.nvme_volume: NodeVolume | None = None
        self.pins = 0
        self.bits = depth << _DEPTH_AT | _PRODUCED

    @property
    def namespace_id(self) -> NamespaceId:
        """Id of its namespace."""
        return self.namespace.namespace_id

    @property
    def nbytes(self) -> int:
        """Bytes of the whole block."""
        return self.namespace.shape.block_bytes

    @property
    def dram_state(self) -> DramState:
        """State in DRAM."""
        return DramState(self.bits & STATE_MASK)

    @property
    def volume_replica(self) -> VolumeReplica:
        """Replica on a durable volume."""
        return VolumeReplica(self.bits >> VOLUME_SHIFT & STATE_MASK)

    @property
    def durable(self) -> bool:
        """Whether the block survives the end of this process."""
        return self.durable_remotely or (self.nvme_volume is not None and self.nvme_volume.volume.files_present)

    @property
    def volatile(self) -> bool:
        """Whether the block was stored here and would be lost with this process."""
        return self.produced_here and not self.durable

    @property
    def only_in_dram(self) -> bool:
        """Whether the block was stored here and is nowhere but in DRAM."""
        return self.volatile and self.dram is not None and self.nvme_volume is None

    @property
    def depth(self) -> int:
        """Position in its chain."""
        return self.bits >> _DEPTH_AT & _DEPTH_MASK

    @property
    def row(self) -> int:
        """Its row in the eviction policy of the volumes; 0: none."""
        return self.bits >> _ROW_AT & _ROW_MASK

    @row.setter
    def row(self, row: int) -> None:
        self.bits = self.bits & ~(_ROW_MASK << _ROW_AT) | row << _ROW_AT

    @property
    def nvme(self) -> Slot | None:
        """Its slot on ``nvme_volume``."""
        if self.nvme_volume is None:
            return None
        bits = self.bits
        page, generation = bits >> _PAGE_AT & _PAGE_MASK, bits >> _GENERATION_AT & _WORD_MASK
        return Slot(page * ALIGNMENT, self.namespace.slot_bytes, generation)

    def put_on(self, node_volume: NodeVolume, slot: Slot) -> None:
        """Note its slot on a volume."""
        offset, _, generation = slot
        self.nvme_volume = node_volume
        seal = seal_of(self.checksums)
        fields = offset // ALIGNMENT << _PAGE_AT | generation << _GENERATION_AT | seal << _SEAL_AT
        self.bits = self.bits & _SLOT_MASK | fields
        if self.dram is None:
            self.forget_checksums()

    def take_off(self) -> None:
        """Forget its slot on a volume."""
        self.nvme_volume = None
        self.bits &= _SLOT_MASK

    def forget_checksums(self) -> None:
        """Forget the checksums of a block that is not in DRAM, if its slot on NVMe has them."""
        if self.nvme_volume is not None:
            self.checksums = b""

    def record(self) -> BlockRecord:
        """Return the block as a slot header describes it."""
        checksums, namespace = self.checksums, self.namespace
        seal = None if checksums else self.bits >> _SEAL_AT
        return BlockRecord(namespace.namespace_id, self.key, self.parent, self.depth, namespace.shape, checksums, seal)


class Recent(Generic[Key]):
    """A bounded set of the keys added last. Not thread-safe."""

    MOST = 65_536

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def add(self, key: Key) -> None:
        """Add a key, and forget the oldest beyond ``MOST``."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self.MOST:
            self._keys.popitem(last=False)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys


@dataclass(slots=True, eq=False)
class NodeVolume:
    """A durable volume, and the state that its node keeps for it."""

    volume: DurableVolume
    quarantined: int = 0
    """Corrupt replicas. Their slots are out of use until the next start."""
    uncommitted: list[tuple[BlockKey, Slot]] = field(default_factory=list)
    """Corrupt replicas that its catalog still names: as many as it has slots, at most."""
    resting_until_s: float = 0.0
    """End of the back-off after a failure: no writes before this time."""
    failing: FailureTracker = field(default_factory=FailureTracker)
    """Whether writes to it fail."""
    aside: dict[BlockKey, Block] = field(default_factory=dict)
    """Its blocks that are left out of the order of eviction while it accepts no changes (``eviction.volumes``)."""
    folder: Path | None = None
    """Its folder; None: it has none."""
    disk: FileSystem | None = None
    """Space on its file system when it was last measured; None: unknown."""
    guard: VolumeGuard = field(init=False)
    """Runs its I/O after the node has started, so that a hung disk blocks no other thread."""

    def __post_init__(self) -> None:
        self.set_guard(Counters())

    @property
    def volume_id(self) -> VolumeId:
        """Id of the volume."""
        return self.volume.volume_id

    def set_guard(self, counters: Counters, *, stall_s: float = STALL_S, readers: int = READERS) -> None:
        """Guard the volume with settings other than the defaults. Call before its first I/O."""
        volume = self.volume
        self.guard = VolumeGuard(
            volume.volume_id, counters, answered_s=lambda: volume.answered_s, stall_s=stall_s, readers=readers
        )

    def takes_changes(self, now_s: float) -> bool:
        """Whether blocks can be written to it and evicted from it."""
        return self.volume.read_only is None and self.resting_until_s <= now_s and self.guard.takes_changes

    def look_in_place(self) -> bool:
        """Have the volume check whether its files are present. A stalled volume counts as present."""
        try:
            return self.guard.look_up(self.volume.check_files)
        except VolumeStalled:
            return True

    def measure_space(self) -> None:
        """Measure the space on its file system. A stalled volume keeps the last result."""
        if (folder := self.folder) is not None:
            with suppress(VolumeStalled):
                self.disk = self.guard.look_up(lambda: file_system(folder))
