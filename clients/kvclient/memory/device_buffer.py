"""Buffers in memory that this processor does not write itself: a device's. ``kvclient.device`` has the one there is.

Whoever moves bytes here knows three ways into such a buffer. Out of the arena that is mapped here the device copies by itself, in
order, while the caller goes on: ``read_arena``, and later ``drain``. A pool's memory on the same device is copied from and to
while the caller waits: ``read_pool``, ``write_pool``. Everything else (sockets, pools elsewhere) writes into ``segments``, which
is host memory, and says so: ``landed``. An arena may not be given up, a lease not given back and a block not counted before
``drain`` has returned.
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
    """A device does not come to an end with copies: the memory that they touch must be taken to be touched for ever."""


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """Memory of a device that whole blocks lie in.

    Attributes:
        device: where, as torch names it: ``cuda:0``, ``cpu``.
        tensor: all of it: a torch tensor, uint8 ``[bytes]``, contiguous.
    """

    device: str
    tensor: object


class DeviceBuffer(ABC):
    """A ``BlockBuffer`` behind a device's copies. Used by one load or store; its methods by one thread at a time or another."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many blocks."""

    @property
    @abstractmethod
    def shape(self) -> BlockShape:
        """The size of each."""

    @abstractmethod
    def check(self, spec: CacheSpec) -> None:
        """Holds a namespace against what these blocks are: bytes of the same size may mean something else.

        Raises:
            InvalidArgument: it is not theirs.
        """

    @abstractmethod
    def segments(self, block: int, first_layer: int, layer_count: int) -> Sequence[memoryview]:
        """Host memory that stands for those layers: of a ``source`` it holds their bytes, else it is to be filled."""

    @abstractmethod
    def read_arena(self, arena: memoryview, offsets: Offsets, first: int, first_layer: int, layer_count: int) -> None:
        """Begins to copy layers of blocks ``[first, first + len(offsets))`` out of an arena. Returns at once.

        Raises:
            InvalidArgument: a block outside the arena.
            Internal: the device failed.
        """

    @abstractmethod
    def write_arena(self, arena: memoryview, offsets: Offsets) -> None:
        """Begins to copy all its blocks into an arena; errors as ``read_arena``."""

    @abstractmethod
    def pool_gap(self, memory: PoolMemory) -> str:
        """Why blocks cannot be copied from and to a pool's memory without leaving the device, in words; empty: they can."""

    @abstractmethod
    def read_pool(self, memory: PoolMemory, offsets: Offsets, first: int) -> None:
        """Copies blocks ``[first, first + len(offsets))`` out of a pool's memory, on the device; returns when they are there.

        Args:
            memory: the pool's, one without ``pool_gap``.
            offsets: where in it each Full Block begins, in bytes. Nobody may write to them before this has returned.
            first: position of the first block.

        Raises:
            InvalidArgument: a block outside the memory, or memory that the device's copies do not reach.
            Internal: the device failed; nothing is under way any more.
            DeviceHung: what was begun does not end. Bounded.
        """

    @abstractmethod
    def write_pool(self, memory: PoolMemory, offsets: Offsets) -> None:
        """Copies all its blocks into a pool's memory, on the device; returns when they are there. See ``read_pool``."""

    @abstractmethod
    def landed(self, positions: npt.NDArray[np.intp], first_layer: int, layer_count: int) -> None:
        """Layers of some blocks are complete, if they came by ``segments``: begins to copy them to the device.

        Raises:
            Internal: the device failed.
        """

    @abstractmethod
    def drain(self) -> None:
        """Waits until all that was begun is done. Bounded.

        Raises:
            Internal: the device failed, or does not come to an end; then its memory must be taken to be written for ever.
        """

    @abstractmethod
    def follow(self, layer: int) -> None:
        """Whatever the caller asks its device to do next waits, on the device, for what was begun of a layer."""

    @abstractmethod
    def pick(self, blocks: Sequence[int]) -> DeviceBuffer:
        """Some of its blocks as a buffer of their own."""

    @abstractmethod
    def source(self) -> BlockBuffer:
        """The same blocks to be read from."""


class ArenaPin(Protocol):
    """What somebody keeps about an arena for as long as it is mapped."""

    def close(self) -> bool:
        """The arena is about to be unmapped. False: it must stay, a device may still touch it."""


@runtime_checkable
class ArenaPinner(Protocol):
    """Whose device copies out of arenas: is told of them as they are mapped."""

    def check(self, spec: CacheSpec) -> None:
        """Holds the namespace of a client against what the device keeps.

        Raises:
            InvalidArgument: its blocks are not the device's.
        """

    def mapped(self, arena: memoryview) -> ArenaPin:
        """An arena is mapped. Brief; keeps no view of it."""
