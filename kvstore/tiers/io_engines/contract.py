"""Contract of I/O engines: they transfer adjacent pieces of one file from and to memory.

Memory is *host memory*, a ``memoryview``, or *device memory*: any object with an address by ``__cuda_array_interface__`` (torch
tensors, cupy and numba arrays, kvstore's pools) that can be copied from and to the host.

The conformance suite is ``kvstore.testing.io_engine_suite``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class DeviceMemory(Protocol):
    """A contiguous range of writable device memory, as bytes."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        """Address and shape, as numba defined them (version 3); one dimension of ``|u1``, no strides."""

    @property
    def nbytes(self) -> int:
        """Its length."""

    def fill(self, source: memoryview) -> None:
        """Copies ``nbytes`` bytes from host memory. Returns once they are there."""

    def fetch(self, target: memoryview) -> None:
        """Copies ``nbytes`` bytes to host memory. Returns once they are there."""


class IoEngine(ABC):
    """One slab file, open. Thread-safe.

    Positions and lengths of pieces are multiples of 4096, and so are the addresses of host memory, where ``direct``.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """What is really in use now, e.g. ``posix O_DIRECT``."""

    @abstractmethod
    def read(self, pieces: Sequence[memoryview], position: int) -> int:
        """Fills pieces one after the other with what lies in the file from ``position`` on.

        Blocks until nothing touches the memory any more, however it went.

        Returns:
            Bytes read; anything but what was asked for: the file ends before that. Then what the pieces hold is undefined.

        Raises:
            OSError: they cannot be read. What the pieces hold is undefined.
        """

    @abstractmethod
    def read_device(self, memory: DeviceMemory, position: int) -> bool:
        """Fills device memory with what lies in the file from ``position`` on, without a way through host memory of ours.

        Blocks until nothing touches the memory any more, however it went.

        Returns:
            False: this engine cannot, or not now, and why was counted; read into host memory and copy. What ``memory`` holds
            is undefined.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of the file. Nothing is under way any more."""
