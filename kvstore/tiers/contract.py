"""Contracts of volumes and eviction policies. A volume holds blocks in slots: the DRAM arena, the NVMe slab, device memory.

A volume never chooses victims. Its owner (``kvstore.node``) chooses them with an ``EvictionPolicy``. Methods of a volume
are thread-safe; methods that do I/O block.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.core.types import BlockKey, BlockShape, NamespaceId, NodeId, Outcome, Tier, VolumeId


class Slot(NamedTuple):
    """Space for one block in a volume. ``generation`` is unique per volume: it grows with each allocation."""

    offset: int
    size: int
    generation: int


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """Description of one block, as in its slot header and in the catalog, without the slot."""

    namespace: NamespaceId
    key: BlockKey
    parent: BlockKey | None
    depth: int
    shape: BlockShape
    checksums: bytes
    """One little-endian uint64 per layer: xxh3-64 of each layer block. Empty: not in memory; then ``seal`` is set."""
    seal: int | None = None
    """Xxh3-64 of the checksums, if they are not in memory. A durable volume reads them from the slot's header."""


@dataclass(frozen=True, slots=True)
class VolumeUsage:
    """Space in use. Bytes count whole slots."""

    capacity_bytes: int
    used_bytes: int
    blocks: int


class Volume(ABC):
    """Space for blocks. The conformance suite is ``kvstore.testing.volume_suite``."""

    volume_id: VolumeId
    tier: Tier

    @abstractmethod
    def allocate(self, shape: BlockShape, count: int) -> list[Slot] | None:
        """Allocate ``count`` slots, as contiguous as possible; None: not enough space, and nothing has changed. No I/O."""

    @abstractmethod
    def free(self, slots: Sequence[Slot]) -> None:
        """Free slots. A slot that is not allocated, or of an old generation, raises ``Internal``."""

    @abstractmethod
    def plan_eviction(
        self, shape: BlockShape, count: int, coldest: Iterator[tuple[BlockKey, Slot]], limit: int
    ) -> list[BlockKey] | None:
        """Blocks to evict so that ``allocate(shape, count)`` succeeds. Changes nothing.

        Args:
            shape: shape of the blocks to allocate.
            count: number of blocks to allocate.
            coldest: evictable blocks, coldest first, children before their parents.
            limit: maximum number of blocks to take from ``coldest``.

        Returns:
            A prefix of ``coldest``, so that no evicted block leaves a child. Empty: there is enough space. None: ``limit`` is
            too low.
        """

    @abstractmethod
    def coldest_spans(self, shape: BlockShape, cold: Sequence[Slot]) -> Iterator[list[Slot]]:
        """Slots of other sizes that, once all are freed, give space for at least one more block of a shape; coldest first.

        The coldest spans are those with the largest fraction of ``cold`` bytes. Of equal ones, the most recently filled come
        first, because their blocks have the fewest descendants elsewhere. If there are very many, only some are yielded.

        Args:
            shape: shape of the block to allocate.
            cold: allocated slots of the coldest blocks.
        """

    @abstractmethod
    def usage(self) -> VolumeUsage:
        """Space in use. No I/O."""

    @abstractmethod
    def write(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]]) -> list[Exception | None]:
        """Write payloads, and headers if the volume has them. One entry per item: None, or the error."""

    @abstractmethod
    def read(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]], *, verify: bool = True) -> list[Outcome]:
        """Read blocks into writable views.

        Returns:
            One outcome per item: HIT; CORRUPT if the header or the checksums differ, or the slot was freed or allocated to
            another block since; UNAVAILABLE after an I/O error. Callers pin blocks, so a pinned block's slot is never freed.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop I/O and release files and memory."""


class MappedVolume(Volume):
    """A volume in this process's memory."""

    @abstractmethod
    def view(self, slot: Slot, size: int) -> memoryview:
        """The first ``size`` bytes of a slot, writable, valid while the volume is open. The caller must hold the slot."""

    @abstractmethod
    def fileno(self) -> int:
        """File descriptor to map the whole volume (offset 0 = slot offset 0), for ``SCM_RIGHTS``."""


class DurableVolume(Volume):
    """A volume whose blocks survive the process."""

    @abstractmethod
    def fits(self, shape: BlockShape) -> bool:
        """Whether a block of this shape fits the empty volume."""

    @abstractmethod
    def commit(self, stored: Sequence[tuple[Slot, BlockRecord]], removed: Sequence[BlockKey]) -> None:
        """Group commit: atomically remove ``removed`` from the catalog, then add ``stored``.

        After it returns, the data of ``stored`` is on stable storage and in the catalog, and slots of ``removed`` may be freed.
        If it raises ``OSError`` or ``KVStoreError``, nothing is removed, and ``stored`` does not count. A read-only volume may
        still accept removals.
        """

    @abstractmethod
    def remove_replicas(self, replicas: Sequence[tuple[BlockKey, Slot]]) -> None:
        """Remove keys from the catalog that still name these slots. The same errors as ``commit``."""

    @property
    def next_generation(self) -> int:
        """All slots that are allocated from now on have at least this generation. No I/O."""
        return 0

    def note_invalid(self, namespace: NamespaceId, generation: int | None = None) -> None:
        """Note durably that what was stored of a namespace is invalid, so neither a restart nor a repair brings it back.

        It removes no block until the volume is opened again. The same errors as ``commit``.

        Args:
            namespace: the namespace.
            generation: catalog entries of lower generations are invalid; None: all present entries. A repair that has lost the
                catalog brings no present slot back.
        """

    @abstractmethod
    def read_with_checksums(self, items: Sequence[tuple[Slot, BlockRecord, memoryview]]) -> list[tuple[Outcome, bytes]]:
        """As ``read``, verified. One entry per item: the outcome, and for a HIT the verified checksums."""

    @abstractmethod
    def recover(self) -> Iterator[tuple[Slot, BlockRecord]]:
        """Iterate over all blocks in the catalog and allocate their slots.

        Call it once after opening, and exhaust it, before ``allocate``. Invalid entries (overlapping, outside of the slab,
        malformed, noted by ``note_invalid``) are removed from the catalog and counted.
        """

    @property
    @abstractmethod
    def io_engine(self) -> str:
        """The I/O engine in use, e.g. ``posix O_DIRECT`` or ``posix buffered (O_DIRECT refused: …)``."""

    @property
    def read_only(self) -> str | None:
        """Why blocks cannot be stored now; None: they can. Nothing may be evicted for space. Blocks can be read in any case."""
        return None

    @property
    def adopted_by(self) -> NodeId | None:
        """The other node that owns the volume now; None: this node does. Once set, the volume stays read-only."""
        return None

    @property
    def files_present(self) -> bool:
        """Whether its files were at their path when last checked. If not, its blocks are lost when the process ends."""
        return True

    def check_files(self) -> bool:
        """Check whether its files are at their path. If not, the volume becomes read-only.

        Takes several microseconds on a local file system. ``commit`` does it too.
        """
        return True

    @property
    def answered_s(self) -> float:
        """Time of the last completed I/O request by ``CLOCK_MONOTONIC``; minus infinity: unknown. No I/O.

        A large read or write is many requests, so this shows the progress of a slow device.
        """
        return -math.inf

    def resume(self) -> bool:
        """Try to end the read-only state. Returns whether the volume is writable. Blocks for I/O."""
        return self.read_only is None


class Rows(Protocol):
    """Map from keys to rows of an eviction policy; rows are at least 1. A dict is one."""

    def get(self, key: BlockKey, default: int, /) -> int:
        """The row of a key, or ``default``."""

    def __setitem__(self, key: BlockKey, row: int, /) -> None: ...

    def __delitem__(self, key: BlockKey, /) -> None: ...


Evictable = bool | None
"""Whether a block may leave. True: yes. False: not now. None: not until ``EvictionPolicy.restore``, so the search may skip it.

Most predicates are plain conditions, and None counts as False for callers that only ask for a yes.
"""


class EvictionPolicy(Protocol):
    """Order of eviction of the blocks in the arena, or on all durable volumes together. The caller must hold its lock. No I/O.

    The conformance suite is ``kvstore.testing.policy_suite``.
    """

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        """Add a block. ``parent`` may be absent from the volume."""

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Record a use of blocks, in chain order. Unknown keys are ignored."""

    def remove(self, key: BlockKey) -> None:
        """Remove a block."""

    def coldest(self, evictable: Callable[[BlockKey], Evictable]) -> Iterator[BlockKey]:
        """Evictable blocks, coldest first, a parent only after all its children in the volume were yielded.

        Asking again is allowed but costs time. The policy may reorder its queues but removes nothing; the owner calls
        ``remove`` for evicted blocks. While the iterator is in use, only ``touch`` may be called: a touched block may be
        yielded again, and its parent too early. It ends when no evictable block is left.
        """

    def restore(self, keys: Iterable[BlockKey]) -> None:
        """Ask ``evictable`` about these blocks again after it returned None. Other keys are ignored."""

    def demote(self, keys: Iterable[BlockKey]) -> None:
        """Make blocks the coldest until their next use; children still leave before their parents. Other keys are ignored."""

    def with_descendants(self, keys: Iterable[BlockKey], evictable: Callable[[BlockKey], bool]) -> list[BlockKey] | None:
        """Blocks held and all below them, each once, children before parents: the blocks to evict with ``keys``.

        None: one of them is not ``evictable``, which is called once per block. The time depends only on the blocks examined.
        """

    def children(self, key: BlockKey) -> int:
        """Number of a block's children in the volume. The block itself may be absent."""

    def __len__(self) -> int:
        """Number of blocks."""


ChecksumArray = npt.NDArray[np.uint64]
