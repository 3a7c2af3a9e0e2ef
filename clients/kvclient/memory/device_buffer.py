"""Contract of buffers in the memory of a device. ``kvclient.device`` implements it.

Bytes get into such a buffer in three ways:

1. The device copies from the mapped arena, in order, while the caller continues: ``read_arena``, and later ``drain``.
2. The device copies from and to a pool in its own memory while the caller waits: ``read_pool``, ``write_pool``.
3. All other sources (sockets, pools elsewhere) write to ``segments``, which is host memory, and then call ``host_copy_ready``.

Before ``drain`` has returned, the arena must not be unmapped, leases must not be released, and blocks must not count as hits.
``begun`` names the copies of a piece, so that a load or store can wait for them while the next piece is copied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import BlockBuffer
from kvstore.core.errors import Internal
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockShape

Offsets = npt.NDArray[np.uint64] | npt.NDArray[np.int64]


class DeviceHung(Internal):
    """Copies of a device do not end. The memory that they access must never be used or freed again."""


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """Memory of a device that holds whole blocks.

    Attributes:
        device: its name in torch: ``cuda:0``, ``cpu``.
        tensor: all of the memory: a torch tensor, uint8 ``[bytes]``, contiguous.
    """

    device: str
    tensor: object


class CopyEvent(Protocol):
    """The end of copies that a device has begun."""

    def done(self) -> bool:
        """Whether the copies have ended. Raises ``Internal`` if the device failed."""


class DeviceChecksums(Protocol):
    """Checksums that a device computes."""

    def result(self) -> npt.NDArray[np.uint64]:
        """Wait for them, for a bounded time: ``[blocks, layers]``.

        Raises:
            Internal: the device failed or hung.
        """


class DeviceBuffer(ABC):
    """A ``BlockBuffer`` that is filled or read by copies of a device. Used by one load or store, by one thread at a time."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of blocks."""

    @property
    @abstractmethod
    def shape(self) -> BlockShape:
        """Size of each block."""

    @abstractmethod
    def check(self, spec: CacheSpec) -> None:
        """Check that these blocks belong to a namespace: blocks of another layout may have the same size.

        Raises:
            InvalidArgument: they do not.
        """

    @abstractmethod
    def segments(self, block: int, first_layer: int, layer_count: int) -> Sequence[memoryview]:
        """Return host memory in place of those layers. For a ``source`` it holds their bytes, otherwise it is to be filled."""

    @abstractmethod
    def read_arena(self, arena: memoryview, offsets: Offsets, first: int, first_layer: int, layer_count: int) -> None:
        """Start to copy layers of blocks ``[first, first + len(offsets))`` out of an arena. Returns at once.

        Raises:
            InvalidArgument: a block outside the arena.
            Internal: the device failed.
        """

    @abstractmethod
    def write_arena(self, arena: memoryview, offsets: Offsets) -> None:
        """Start to copy all blocks into an arena. Raises the errors of ``read_arena``."""

    def begin_checksums(self, first: int, count: int, first_layer: int, layer_count: int) -> DeviceChecksums | None:  # noqa: ARG002
        """Start to compute checksums of blocks ``[first, first + count)`` on the device, after all copies that have begun.

        Returns:
            None: this device does not compute checksums; hash the bytes on the host instead.
        """
        return None

    @abstractmethod
    def pool_gap(self, memory: PoolMemory) -> str:
        """Return the reason why blocks cannot be copied from and to a pool's memory on the device; empty: they can."""

    @abstractmethod
    def read_pool(self, memory: PoolMemory, offsets: Offsets, first: int) -> None:
        """Copy blocks ``[first, first + len(offsets))`` out of a pool's memory on the device, and wait for the copies.

        Args:
            memory: the pool's memory, without a ``pool_gap``.
            offsets: offset of each full block in bytes. The blocks must not be written to before this returns.
            first: position of the first block.

        Raises:
            InvalidArgument: a block outside the memory, or memory that the device cannot access.
            Internal: the device failed; no copy is under way.
            DeviceHung: the copies do not end within a bounded time.
        """

    @abstractmethod
    def write_pool(self, memory: PoolMemory, offsets: Offsets) -> None:
        """Copy all blocks into a pool's memory on the device, and wait for the copies. See ``read_pool``."""

    @abstractmethod
    def host_copy_ready(self, positions: npt.NDArray[np.intp], first_layer: int, layer_count: int) -> None:
        """Start to copy layers of some blocks to the device, because they are complete in ``segments``. No effect on others.

        Raises:
            Internal: the device failed.
        """

    @abstractmethod
    def begun(self) -> Sequence[CopyEvent]:
        """Return the end of the copies that are under way, to wait for these alone: see ``drain``."""

    @abstractmethod
    def drain(self, begun: Sequence[CopyEvent] | None = None) -> None:
        """Wait until copies have ended. Bounded.

        Args:
            begun: only those that were under way when ``begun`` returned this; None: all.

        Raises:
            Internal: the device failed; no copy is under way.
            DeviceHung: the copies do not end within a bounded time. The memory must never be used or freed again.
        """

    @abstractmethod
    def wait_on_stream(self, layer: int) -> None:
        """Make the next work that the caller enqueues on its device wait, on the device, for the copies of a layer."""

    @abstractmethod
    def pick(self, blocks: Sequence[int]) -> DeviceBuffer:
        """Return some of its blocks as a buffer."""

    @abstractmethod
    def source(self) -> BlockBuffer:
        """Return the same blocks as a buffer to read from."""


class ArenaPin(Protocol):
    """A pinned arena, for as long as it is mapped."""

    def close(self) -> bool:
        """Unpin the arena, which is about to be unmapped. False: it must stay mapped, because a device may still access it."""


@runtime_checkable
class ArenaPinner(Protocol):
    """Pins arenas for a device that copies out of them."""

    def check(self, spec: CacheSpec) -> None:
        """Check that the namespace of a client belongs to the device's cache.

        Raises:
            InvalidArgument: it does not.
        """

    def describe(self) -> str:
        """Say in a few printable words how the device copies, for ``kvstore doctor``."""

    def mapped(self, arena: memoryview, descriptor: int | None = None) -> ArenaPin:
        """Pin an arena that was mapped. Returns soon; keeps no view of the arena.

        Args:
            arena: the whole mapping.
            descriptor: of the arena's memory, open until the pin is closed; None: the memory belongs to this process.
        """
