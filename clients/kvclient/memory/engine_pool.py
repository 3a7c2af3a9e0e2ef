"""Contracts of an engine's own pool of blocks and of reads into device memory, as its client uses them.

``kvclient.hbm`` and ``kvclient.gds`` implement them with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import BlockBuffer
from kvstore.core.cancel_scope import CancelScope
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey, VolumeId

Demote = Callable[[Sequence[BlockKey], BlockKey | None, int, BlockBuffer], bool]
"""``demote(keys, parent, depth, blocks)``: offers blocks to the tiers below. Returns whether they hold all of them. Bounded."""


@dataclass(frozen=True, slots=True)
class StoredVolume:
    """An NVMe volume of the local node."""

    volume_id: VolumeId
    path: Path
    """Its folder on this host."""


@dataclass(frozen=True, slots=True)
class DiskLocations:
    """Locations of consecutive blocks on NVMe volumes; each array has one entry per block."""

    volumes: npt.NDArray[np.uint8]
    """Position of the volume among the session's."""
    offsets: npt.NDArray[np.uint64]
    """Offset of the slot among the volume's slots."""
    generations: npt.NDArray[np.uint64]
    """Generation of the slot."""


class DiskReader(Protocol):
    """Reads blocks of one namespace from the local node's volumes directly into device memory. Thread-safe.

    Failures are misses, never errors.
    """

    def prepare_disks(self, volumes: Sequence[StoredVolume]) -> None:
        """Begin to find out whether blocks can be read from these volumes straight into device memory. Returns at once.

        Raises:
            Unsupported: such reads are required and not possible. Only then the call waits to find out.
        """

    def reads_disks(self, volumes: Sequence[StoredVolume]) -> bool:
        """Whether such reads are known to be possible now. Does no I/O; begins to find out about new volumes."""

    def accepts(self, buffer: BlockBuffer) -> bool:
        """Whether blocks can be copied to a buffer."""

    def fetch_stored(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        depth: int,
        volumes: Sequence[StoredVolume],
        places: DiskLocations,
        buffer: BlockBuffer,
        first: int,
        scope: CancelScope,
        *,
        verify: bool,
    ) -> int:
        """Read blocks from the node's volumes into device memory, verified, and copy them from there to a buffer.

        Args:
            keys: consecutive keys of a chain.
            parent: key before the first, None at the head.
            depth: position of the first.
            volumes: the local node's.
            places: locations of the blocks on them.
            buffer: destination.
            first: position of the first block in the buffer.
            scope: bounds the read; part of its time is left for the source that is asked for missing blocks.
            verify: also compare checksums of the copies in the buffer.

        Returns:
            Number of leading blocks that are in the buffer now.
        """


@runtime_checkable
class DiskReaderFactory(Protocol):
    """Memory of an engine's device that blocks are read into (``kvclient.gds.LandingRing``)."""

    def attach(self, spec: CacheSpec) -> DiskReader:
        """Register a namespace.

        Raises:
            InvalidArgument: the namespace does not match the engine's pages.
        """


class PoolNamespace(DiskReader, Protocol):
    """The blocks of one namespace in the pool. Thread-safe. Failures of the pool are misses and skips, never errors."""

    @property
    def node_id(self) -> str:
        """Name of the pool in the index: a client does not read from its own pool over a wire."""

    def fetch(self, keys: Sequence[BlockKey], buffer: BlockBuffer, scope: CancelScope, *, verify: bool) -> int:
        """Copy leading blocks into a buffer; on the device, if the buffer consists of pages on the pool's device.

        Args:
            keys: consecutive keys of a chain.
            buffer: space for them.
            scope: ends the copy early.
            verify: compare checksums of the copies. Blocks that were kept without checksums are then left to the tiers below.

        Returns:
            Number of leading blocks that are in the buffer now.
        """

    def insert(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        depth: int,
        buffer: BlockBuffer,
        scope: CancelScope | None,
        *,
        checksums: bool,
    ) -> int:
        """Copy blocks from a buffer into the pool, as many leading ones as there is space for. Colder blocks are evicted.

        Args:
            keys: consecutive keys of a chain.
            parent: key before the first, None at the head.
            depth: position of the first.
            buffer: their bytes.
            scope: ends the copy early; None: nothing does.
            checksums: compute checksums now, for ``fetch`` to compare; also of blocks that were kept without any.

        Returns:
            Number of blocks that were copied; blocks that were in the pool already do not count.
        """

    def detach(self) -> None:
        """Stop demoting blocks through the client, because it is being closed."""


@runtime_checkable
class EnginePool(Protocol):
    """A pool that clients of several namespaces share."""

    def attach(self, spec: CacheSpec, demote: Demote) -> PoolNamespace:
        """Register a namespace.

        Raises:
            InvalidArgument: the pool is closed, or smaller than one block of this namespace.
        """
