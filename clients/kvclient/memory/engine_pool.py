"""An engine's own pool of blocks, as its client sees it. ``kvclient.hbm`` has the one there is, and imports torch."""

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
"""``demote(keys, parent, depth, blocks)``: offers a run to the tiers below. Whether they hold all of it now; bounded."""


@dataclass(frozen=True, slots=True)
class StoredVolume:
    """An NVMe volume of the local node, as that tells of it."""

    volume_id: VolumeId
    path: Path
    """Its folder on this host."""


@dataclass(frozen=True, slots=True)
class DiskLocations:
    """Where some consecutive blocks lie on such volumes; one entry a block each."""

    volumes: npt.NDArray[np.uint8]
    """Position of its volume among the session's."""
    offsets: npt.NDArray[np.uint64]
    """Where its slot begins, in the volume's slots."""
    generations: npt.NDArray[np.uint64]
    """Of its slot."""


class PoolNamespace(Protocol):
    """The blocks of one namespace in the pool. Thread-safe; failures of the pool are misses and skips, never errors."""

    @property
    def node_id(self) -> str:
        """What the index calls the pool: nobody reads from its own pool over a wire."""

    def fetch(self, keys: Sequence[BlockKey], buffer: BlockBuffer, scope: CancelScope, *, verify: bool) -> int:
        """Copies leading blocks of some keys into a buffer; on the device, if it is of pages beside the pool.

        Args:
            keys: consecutive keys of a chain.
            buffer: room for them.
            scope: ends the copying early.
            verify: compare checksums of what was copied; what came in without any is left to the tiers below then.

        Returns:
            How many leading blocks are in the buffer now.
        """

    def keep(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        depth: int,
        buffer: BlockBuffer,
        scope: CancelScope | None,
        *,
        checksums: bool,
    ) -> int:
        """Copies blocks out of a buffer into the pool, as many leading ones as there is room for; colder ones make room.

        Args:
            keys: consecutive keys of a chain.
            parent: key before the first, None at the head.
            depth: position of the first.
            buffer: their bytes.
            scope: ends the copying early; None: nothing does.
            checksums: make checksums of them now, for ``fetch`` to compare; also of those that were there without any.

        Returns:
            How many were copied; those that were there already are not.
        """

    def prepare_disks(self, volumes: Sequence[StoredVolume]) -> None:
        """Begins to find out whether blocks may come from these volumes straight into the pool. Returns at once.

        Raises:
            Unsupported: the pool requires that, and it is not so; then only did it wait to find out.
        """

    def reads_disks(self, volumes: Sequence[StoredVolume]) -> bool:
        """Whether they may, now, as far as is known. Memory only; begins to find out about volumes that are new."""

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
        """Reads blocks from the node's volumes into the pool, verified, and copies them from there as ``fetch`` does.

        Args:
            keys: consecutive keys of a chain.
            parent: key before the first, None at the head.
            depth: position of the first.
            volumes: the local node's.
            places: where on them the blocks lie.
            buffer: where they go; and
            first: the position there of the first.
            scope: bounds it; a part of its time is left for who is asked for what does not come.
            verify: compare checksums of what was copied out of the pool, too.

        Returns:
            How many leading blocks are in the buffer now.
        """

    def detach(self) -> None:
        """The client is being closed: nothing is demoted through it any more."""


@runtime_checkable
class EnginePool(Protocol):
    """A pool that clients of several namespaces share."""

    def attach(self, spec: CacheSpec, demote: Demote) -> PoolNamespace:
        """Makes a namespace known to it.

        Raises:
            InvalidArgument: the pool is closed, or has no room for even one block of this namespace.
        """
