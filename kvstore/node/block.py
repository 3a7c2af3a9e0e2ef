"""A block as its node knows it, and the records that pass between the table and those who act for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvstore.core.types import BlockKey, BlockRun, NamespaceId, StoreOutcome
from kvstore.node.domain import Domain
from kvstore.node.leaving import Leaving
from kvstore.node.volume_guard import READERS, STALL_S, VolumeGuard, VolumeStalled
from kvstore.observe.counters import Counters
from kvstore.observe.failing import Failing
from kvstore.tiers.contract import BlockRecord, DurableVolume, Slot

Key = TypeVar("Key", bound=Hashable)


class Block:
    """One block and where it lies. Mutable, guarded by the table's lock; ``dram`` stays put while ``pins`` > 0."""

    __slots__ = (
        *("arriving", "checksums", "depth", "disputed", "domain", "dram", "elsewhere", "expendable", "key"),
        *("leaving", "nvme", "nvme_home", "ours", "parent", "passing", "pending", "pins"),
    )

    def __init__(self, domain: Domain, key: BlockKey, parent: BlockKey | None, depth: int, checksums: bytes) -> None:
        self.domain = domain
        self.key = key
        self.parent = parent
        self.depth = depth
        self.checksums = checksums
        self.dram: Slot | None = None
        self.nvme: Slot | None = None
        self.nvme_home: Home | None = None
        self.pins = 0
        self.disputed = 0
        """Stores that claimed another place for its key and were refused."""
        self.expendable = False
        """May leave DRAM as it is: it lies elsewhere, could not be written, or is only a copy of a peer's block."""
        self.elsewhere = False
        """Durable on the storage node."""
        self.ours = True
        """Stored here by an engine or a peer; False: only a copy of a peer's block, whose durability is the peer's affair."""
        self.pending = False
        """Waits for write-behind, or is being written."""
        self.leaving = Leaving.STAYS
        """Whether its NVMe replica is about to leave: nobody may begin to read it then. Changed by ``leave`` and ``stay``."""
        self.arriving = False
        """Its first layers are in its DRAM slot and the others on their way: not in the table yet, its slot lives by its pins."""
        self.passing = False
        """Only staged here for somebody: leaves DRAM as soon as nobody has it pinned."""

    @property
    def namespace(self) -> NamespaceId:
        """Whose it is."""
        return self.domain.namespace

    @property
    def nbytes(self) -> int:
        """Bytes of the Full Block."""
        return self.domain.shape.block_bytes

    @property
    def durable(self) -> bool:
        """Outlives this process."""
        return self.elsewhere or (self.nvme_home is not None and self.nvme_home.volume.lasting)

    def leave(self, why: Leaving = Leaving.FOR_ROOM) -> None:
        """Its NVMe replica is on its way out from now on."""
        if not self.leaving:
            self.domain.parting += 1
        self.leaving = why

    def stay(self) -> Leaving:
        """It is not: it left, or could not. Returns why it was."""
        why, self.leaving = self.leaving, Leaving.STAYS
        if why:
            self.domain.parting -= 1
        return why

    def record(self) -> BlockRecord:
        """What a slot header says of it."""
        return BlockRecord(self.domain.namespace, self.key, self.parent, self.depth, self.domain.shape, self.checksums)


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
class Home:
    """A durable volume, and what its node keeps of it."""

    volume: DurableVolume
    outdated: Outdated = field(default_factory=Outdated)
    quarantined: int = 0
    """Replicas that proved bad: their slots are out of use until the next start."""
    resting_until_s: float = 0.0
    """It failed, and is left alone until then."""
    failing: Failing = field(default_factory=Failing)
    """How writing to it fares."""
    aside: dict[BlockKey, Block] = field(default_factory=dict)
    """Its blocks that are out of the order of eviction while it takes no changes (``kvstore.node.durable_room``)."""
    guard: VolumeGuard = field(init=False)
    """Does all its I/O once the node serves."""

    def __post_init__(self) -> None:
        self.set_guard(Counters())

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
            return self.guard.look_up(self.volume.in_place)
        except VolumeStalled:
            return True


@dataclass(slots=True)
class Prepared:
    """Slots granted to one store, until it is completed or abandoned."""

    domain: Domain
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
class Vigil:
    """Keys that somebody waits for. Guarded by the table's lock."""

    domain: Domain
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
