"""A block as its node knows it, and the records that pass between the table and those who act for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvstore.core.types import BlockKey, BlockRun, NamespaceId, StoreOutcome, VolumeId
from kvstore.node.base.volume_guard import READERS, STALL_S, VolumeGuard, VolumeStalled
from kvstore.node.state.eviction_reason import Leaving
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.observe.counters import Counters
from kvstore.observe.failure_tracker import FailureTracker
from kvstore.tiers.allocator import ALIGNMENT
from kvstore.tiers.contract import BlockRecord, DurableVolume, Slot
from kvstore.tiers.nvme.slot_header import seal_of

Key = TypeVar("Key", bound=Hashable)


_PENDING, _EXPENDABLE, _ELSEWHERE, _OURS, _ARRIVING, _PASSING = (1 << bit for bit in range(6))
_LEAVING_AT, _LEAVING_MASK = 6, 3
_DISPUTED_AT, _DISPUTED_MASK = 8, (1 << 8) - 1
_DEPTH_AT, _DEPTH_MASK = 16, (1 << 32) - 1
_ROW_AT, _ROW_MASK = 48, (1 << 32) - 1
_PAGE_AT, _PAGE_MASK = 80, (1 << 48) - 1
_GENERATION_AT, _SEAL_AT, _WORD_MASK = 128, 192, (1 << 64) - 1
_PLACE_MASK = (1 << _PAGE_AT) - 1
"""What is below the fields of the NVMe slot."""


class _Flag:
    """One bit of a block's state."""

    __slots__ = ("_mask",)

    def __init__(self, mask: int) -> None:
        self._mask = mask

    def __get__(self, block: Block, kind: type[Block]) -> bool:
        return block._bits & self._mask != 0

    def __set__(self, block: Block, value: bool) -> None:
        block._bits = block._bits | self._mask if value else block._bits & ~self._mask


class Block:
    """One block and where it lies. Mutable, guarded by the table's lock; ``dram`` stays put while ``pins`` > 0.

    A large node holds millions of blocks, nearly all of them on NVMe alone: such a block is this object of eight fields, its key
    and one integer (``_bits``) that holds all small fields and the NVMe slot. Its checksums are not kept: they are in the slot's
    header, and ``seal`` proves them. They are here as long as it lies in DRAM.
    """

    __slots__ = ("_bits", "checksums", "dram", "key", "namespace", "nvme_volume", "parent", "pins")

    expendable = _Flag(_EXPENDABLE)
    """May leave DRAM as it is: it lies elsewhere, could not be written, or is only a copy of a peer's block."""
    elsewhere = _Flag(_ELSEWHERE)
    """Durable on the storage node."""
    ours = _Flag(_OURS)
    """Stored here by an engine or a peer; False: only a copy of a peer's block, whose durability is the peer's affair."""
    pending = _Flag(_PENDING)
    """Waits for write-behind, or is being written."""
    arriving = _Flag(_ARRIVING)
    """Its first layers are in its DRAM slot and the others on their way: not in the table yet, its slot lives by its pins."""
    passing = _Flag(_PASSING)
    """Only staged here for somebody: leaves DRAM as soon as nobody has it pinned."""

    leaves = _Flag(_LEAVING_MASK << _LEAVING_AT)
    """Whether it is ``leaving``."""
    moves = _Flag(_PENDING | _LEAVING_MASK << _LEAVING_AT)
    """It is on its way to a volume, or out of it."""
    transient = _Flag(_ARRIVING | _PASSING)
    """It lives by its pins."""

    def __init__(self, namespace: NodeNamespace, key: BlockKey, parent: BlockKey | None, depth: int, checksums: bytes) -> None:
        self.namespace = namespace
        self.key = key
        self.parent = parent
        self.checksums = checksums
        self.dram: Slot | None = None
        self.nvme_volume: NodeVolume | None = None
        self.pins = 0
        self._bits = depth << _DEPTH_AT | _OURS

    @property
    def namespace_id(self) -> NamespaceId:
        """Whose it is."""
        return self.namespace.namespace_id

    @property
    def nbytes(self) -> int:
        """Bytes of the Full Block."""
        return self.namespace.shape.block_bytes

    @property
    def durable(self) -> bool:
        """Outlives this process."""
        return self.elsewhere or (self.nvme_volume is not None and self.nvme_volume.volume.files_present)

    @property
    def depth(self) -> int:
        """Position in its chain."""
        return self._bits >> _DEPTH_AT & _DEPTH_MASK

    @property
    def disputed(self) -> int:
        """Stores that claimed another place for its key and were refused."""
        return self._bits >> _DISPUTED_AT & _DISPUTED_MASK

    def dispute(self) -> None:
        """One more; 255 at most are counted."""
        if self.disputed < _DISPUTED_MASK:
            self._bits += 1 << _DISPUTED_AT

    @property
    def row(self) -> int:
        """Its row in the eviction policy of the volumes; 0: none."""
        return self._bits >> _ROW_AT & _ROW_MASK

    @row.setter
    def row(self, row: int) -> None:
        self._bits = self._bits & ~(_ROW_MASK << _ROW_AT) | row << _ROW_AT

    # ---- its NVMe replica
    @property
    def nvme(self) -> Slot | None:
        """Its slot on ``nvme_volume``."""
        if self.nvme_volume is None:
            return None
        bits = self._bits
        page, generation = bits >> _PAGE_AT & _PAGE_MASK, bits >> _GENERATION_AT & _WORD_MASK
        return Slot(page * ALIGNMENT, self.namespace.slot_bytes, generation)

    def settle(self, node_volume: NodeVolume, slot: Slot) -> None:
        """It lies in a slot of a volume from now on."""
        offset, _, generation = slot
        self.nvme_volume = node_volume
        seal = seal_of(self.checksums)
        place = offset // ALIGNMENT << _PAGE_AT | generation << _GENERATION_AT | seal << _SEAL_AT
        self._bits = self._bits & _PLACE_MASK | place
        if self.dram is None:
            self.forget_checksums()

    def unsettle(self) -> None:
        """It no longer does."""
        self.nvme_volume = None
        self._bits &= _PLACE_MASK

    @property
    def leaving(self) -> Leaving:
        """Whether its NVMe replica is about to leave: nobody may begin to read it then. Changed by ``leave`` and ``stay``."""
        return _LEAVING[self._bits >> _LEAVING_AT & _LEAVING_MASK]

    def leave(self, why: Leaving = Leaving.FOR_ROOM) -> None:
        """Its NVMe replica is on its way out from now on."""
        if not self.leaving:
            self.namespace.parting += 1
        self._bits = self._bits & ~(_LEAVING_MASK << _LEAVING_AT) | why << _LEAVING_AT

    def stay(self) -> Leaving:
        """It is not: it left, or could not. Returns why it was."""
        why = self.leaving
        if why:
            self._bits &= ~(_LEAVING_MASK << _LEAVING_AT)
            self.namespace.parting -= 1
        return why

    def forget_checksums(self) -> None:
        """It is not in DRAM: where it lies on NVMe, its slot's header holds its checksums."""
        if self.nvme_volume is not None:
            self.checksums = b""

    def record(self) -> BlockRecord:
        """What a slot header says of it."""
        checksums, namespace = self.checksums, self.namespace
        seal = None if checksums else self._bits >> _SEAL_AT
        return BlockRecord(namespace.namespace_id, self.key, self.parent, self.depth, namespace.shape, checksums, seal)


_LEAVING = tuple(Leaving)


class Recent(Generic[Key]):
    """The keys added last, a bounded number. Not thread-safe."""

    MOST = 65_536

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def add(self, key: Key) -> None:
        """Remembers a key, and forgets the oldest beyond ``MOST``."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self.MOST:
            self._keys.popitem(last=False)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys


class Outdated:
    """Slots of blocks that left because they were stored at another place, which the catalog names until its next commit.

    Whoever commits takes them, in the order of commits: a key among them may be stored anew, and committed. Thread-safe.
    """

    def __init__(self) -> None:
        self._slots: dict[BlockKey, Slot] = {}
        self._lock = threading.Lock()

    def add(self, key: BlockKey, slot: Slot) -> None:
        """A block left."""
        with self._lock:
            self._slots[key] = slot

    def take(self) -> dict[BlockKey, Slot]:
        """All of them, for one commit; then they are the volume's to free, or come back with ``add``."""
        with self._lock:
            taken, self._slots = self._slots, {}
            return taken

    def slots(self) -> list[Slot]:
        """A look at them."""
        with self._lock:
            return list(self._slots.values())


@dataclass(slots=True)
class NodeVolume:
    """A durable volume, and what its node keeps of it."""

    volume: DurableVolume
    outdated: Outdated = field(default_factory=Outdated)
    quarantined: int = 0
    """Replicas that proved bad: their slots are out of use until the next start."""
    resting_until_s: float = 0.0
    """It failed, and is left alone until then."""
    failing: FailureTracker = field(default_factory=FailureTracker)
    """How writing to it fares."""
    aside: dict[BlockKey, Block] = field(default_factory=dict)
    """Its blocks that are out of the order of eviction while it takes no changes (``kvstore.node.eviction.volumes``)."""
    guard: VolumeGuard = field(init=False)
    """Does all its I/O once the node serves."""

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
        """Whether blocks can be written to it, and leave it."""
        return self.volume.read_only is None and self.resting_until_s <= now_s and self.guard.takes_changes

    def look_in_place(self) -> bool:
        """Have the volume look whether its files are where they were opened. A stalled volume is not asked."""
        try:
            return self.guard.look_up(self.volume.check_files)
        except VolumeStalled:
            return True


@dataclass(slots=True)
class StoreGrant:
    """Slots granted to one store, until it is completed or abandoned."""

    namespace: NodeNamespace
    run: BlockRun
    outcomes: list[StoreOutcome]
    slots: dict[BlockKey, Slot] = field(default_factory=dict)
    """Granted and not yet completed, in order of the run."""
    depths: dict[BlockKey, int] = field(default_factory=dict)
    parents: dict[BlockKey, BlockKey | None] = field(default_factory=dict)
    tail: BlockKey | None = None
    """A partial block among them: handed over to whoever waits for it, neither written behind nor kept."""
    guarded: Block | None = None
    """The parent of the run, where it lies in one tier only: pinned, so that room for its children is not made by its leaving."""


@dataclass(slots=True)
class KeyWaiter:
    """Keys that somebody waits for. Guarded by the table's lock."""

    namespace: NodeNamespace
    missing: dict[BlockKey, list[int]] = field(default_factory=dict)
    """Positions of each key that is not there yet."""
    came: list[tuple[int, Block]] = field(default_factory=list)
    """(position, block), pinned and not yet told."""


@dataclass(slots=True)
class Claim:
    """What a load may do about each key (positions among those asked for)."""

    resident: dict[int, Block] = field(default_factory=dict)
    """In DRAM already; pinned."""
    durable: dict[int, Block] = field(default_factory=dict)
    """On NVMe; pinned and claimed: to be read by the caller."""
    absent: list[int] = field(default_factory=list)
    """Not here."""
    claimed_absent: list[int] = field(default_factory=list)
    """Those of ``absent`` that the caller may fetch from elsewhere."""
    busy: list[int] = field(default_factory=list)
    """Another load or store brings it in now."""
