"""What a volume is: one place that holds blocks in slots. Two kinds here: the DRAM arena and the NVMe slab.

A volume is mechanism only. *Which* block goes or stays is decided by its owner (``kvstore.node``), with the pure parts
``allocator`` (room) and ``policy`` (eviction). A volume's methods may be called from any thread; I/O methods block.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.core.types import BlockKey, BlockShape, NamespaceId, Outcome, Tier, VolumeId


class Slot(NamedTuple):
    """Room for one block in a volume. ``generation`` grows each time the room is given to another block."""

    offset: int
    size: int
    generation: int


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """Everything a slot header and a catalog say of one block (all but where it lies)."""

    namespace: NamespaceId
    key: BlockKey
    parent: BlockKey | None
    depth: int
    shape: BlockShape
    checksums: bytes
    """Little-endian uint64 a layer: xxh3-64 of each Layer Block. Empty: not at hand, and ``seal`` stands for them."""
    seal: int | None = None
    """Xxh3-64 of the checksums that are not at hand. A durable volume finds those in the slot's header."""


@dataclass(frozen=True, slots=True)
class VolumeUsage:
    """How full a volume is. Bytes count whole slots."""

    capacity_bytes: int
    used_bytes: int
    blocks: int


class ReclaimableSpan(NamedTuple):
    """Adjacent room that slots of another size could have, were those free that lie in it."""

    offset: int
    size: int
    """Bytes, of whole spans."""
    used_bytes: int
    """Of the slots given out there now."""
    cold_bytes: int
    """How much of that is cold, as far as the asker knew."""


class Volume(ABC):
    """Room for blocks. The conformance suite is ``kvstore.testing.volume_suite``."""

    volume_id: VolumeId
    tier: Tier

    @abstractmethod
    def allocate(self, shape: BlockShape, count: int) -> list[Slot] | None:
        """Takes ``count`` slots, as contiguous as room allows, or None and nothing changed (atomic). Pure memory work."""

    @abstractmethod
    def free(self, slots: Sequence[Slot]) -> None:
        """Gives slots back. A slot freed twice or of an old generation is an ``Internal`` error: never ignored."""

    @abstractmethod
    def plan_eviction(
        self, shape: BlockShape, count: int, coldest: Iterator[tuple[BlockKey, Slot]], limit: int
    ) -> list[BlockKey] | None:
        """Which blocks would have to leave so that ``allocate(shape, count)`` succeeds.

        ``coldest`` yields evictable blocks, coldest first, children before their parents; the plan is a prefix-closed choice
        among the first ``limit`` of them (whoever evicts the plan leaves no child without its parent). An empty list: there is
        room already. None: not within ``limit``. Changes nothing.
        """

    @abstractmethod
    def reclaimable_spans(self, shape: BlockShape, cold: Sequence[Slot]) -> list[ReclaimableSpan]:
        """Where room for at least one more block of a shape could be made by freeing all slots of other sizes that lie there.

        ``cold`` are held slots whose blocks may well leave. The most promising first: by turns those filled last,
        whose blocks have the fewest descendants elsewhere, and those where the least is warm. Of very many a bounded choice.
        """

    @abstractmethod
    def slots_in(self, span: ReclaimableSpan) -> list[Slot]:
        """The slots given out there now. Once all are free, ``allocate`` finds room."""

    @abstractmethod
    def usage(self) -> VolumeUsage:
        """Fill, at once."""

    @abstractmethod
    def write(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]]) -> list[Exception | None]:
        """Writes payloads (and headers, where the volume keeps them). One entry an item: None, or why it failed."""

    @abstractmethod
    def read(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]], *, verify: bool = True) -> list[Outcome]:
        """Reads Full Blocks into writable views: HIT, CORRUPT (header or checksums differ), or UNAVAILABLE (I/O error)."""

    @abstractmethod
    def close(self) -> None:
        """Stops I/O and lets go of files and memory."""


class MappedVolume(Volume):
    """A volume in this process's memory."""

    @abstractmethod
    def view(self, slot: Slot, size: int) -> memoryview:
        """The first ``size`` bytes of a slot: writable, valid while the volume is open. The caller holds the slot."""

    @abstractmethod
    def fileno(self) -> int:
        """File descriptor that maps the whole volume (offset 0 = slot offset 0), for ``SCM_RIGHTS``."""


class DurableVolume(Volume):
    """A volume that outlives the process."""

    @abstractmethod
    def fits(self, shape: BlockShape) -> bool:
        """Whether a block of this shape has room on it at all, were it empty."""

    @abstractmethod
    def commit(self, stored: Sequence[tuple[Slot, BlockRecord]], removed: Sequence[BlockKey]) -> None:
        """Group commit: first ``removed`` leave the catalog, then ``stored`` enter it, atomically.

        When it returns, written data of ``stored`` is on stable storage and the catalog says so; slots of ``removed`` may be
        freed after it. Raises ``OSError`` or ``KVStoreError``; then nothing of it counts.
        """

    @abstractmethod
    def read_with_checksums(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]]) -> list[tuple[Outcome, bytes]]:
        """As ``read``, verified. One entry an item: the outcome and, of a HIT, the checksums by which it was verified."""

    @abstractmethod
    def recover(self) -> Iterator[tuple[Slot, BlockRecord]]:
        """All blocks the catalog holds, their slots taken. Called once and used up, right after opening, before ``allocate``.

        Entries that cannot be (overlap, outside the slab, malformed) are dropped from the catalog and counted.
        """

    @property
    @abstractmethod
    def io_engine(self) -> str:
        """What is really in use, e.g. ``posix O_DIRECT`` or ``posix buffered (O_DIRECT refused: …)``."""

    @property
    def read_only(self) -> str | None:
        """Why nothing can be stored or removed now, in a few words; None: all is well. What the volume holds is served."""
        return None

    @property
    def lasting(self) -> bool:
        """Whether what it holds outlives the process, as far as is known; ``in_place`` looks anew."""
        return True

    def in_place(self) -> bool:
        """Whether its files are where they were opened. If not, it is read-only: what it holds is served while the process lives.

        A few microseconds on a local file system; ``commit`` asks by itself.
        """
        return True

    @property
    def answered_s(self) -> float:
        """When its device answered an I/O request last, by ``CLOCK_MONOTONIC``; of a volume that does not know: minus infinity.

        Large reads and writes are many requests: this shows that a slow device is at work on one. Memory only.
        """
        return -math.inf

    def resume(self) -> bool:
        """Tries to leave the read-only state; whether the volume can be written to. Blocks for I/O."""
        return self.read_only is None


class Rows(Protocol):
    """Where an eviction policy keeps the row of each key that it knows; rows are 1 or more. A dict is one."""

    def get(self, key: BlockKey, default: int, /) -> int:
        """The row of a key, or ``default``."""

    def __setitem__(self, key: BlockKey, row: int, /) -> None: ...

    def __delitem__(self, key: BlockKey, /) -> None: ...


class EvictionPolicy(Protocol):
    """Which blocks are cold, in the arena or on the durable volumes together. Called under its owner's lock; pure.

    The conformance suite is ``kvstore.testing.policy_suite``.
    """

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        """A block came in. ``parent`` may be absent from the volume."""

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Blocks were used, given in chain order; unknown keys are ignored."""

    def remove(self, key: BlockKey) -> None:
        """A block left (evicted or not)."""

    def coldest(self, evictable: Callable[[BlockKey], bool | None]) -> Iterator[BlockKey]:
        """Evictable blocks, coldest first, a parent only after all its children in the volume were yielded.

        Where ``evictable`` says None, the block is not to be asked about again before ``restore``: one that may stay for long.
        A policy may ask again all the same; what it looks at then costs time. May reorder its queues, but removes nothing; the
        owner calls ``remove`` for those it evicts. While the iterator is used no other method than ``touch`` is called: a
        block used meanwhile may come once more, and its parent too early. It ends when nothing evictable is left.
        """

    def restore(self, keys: Iterable[BlockKey]) -> None:
        """Blocks that ``evictable`` said None of may be asked about again; others, and unknown keys, are ignored."""

    def with_descendants(self, keys: Iterable[BlockKey], evictable: Callable[[BlockKey], bool]) -> list[BlockKey] | None:
        """Blocks held and all below them, each once, children before parents: what leaves if ``keys`` do.

        None where one of them is not ``evictable``, which is asked once for each. Takes time for what it looks at alone.
        """

    def is_parent(self, key: BlockKey) -> bool:
        """Whether children of a block are held, be it held itself or not."""

    def __len__(self) -> int:
        """Blocks held."""


ChecksumArray = npt.NDArray[np.uint64]
