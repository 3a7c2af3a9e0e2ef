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
        """Copy ``nbytes`` bytes from host memory. Returns after the copy has ended."""

    def fetch(self, target: memoryview) -> None:
        """Copy ``nbytes`` bytes to host memory. Returns after the copy has ended."""


class IoEngine(ABC):
    """One slab file, open. Thread-safe.

    Positions and lengths of pieces are multiples of 4096, and so are the addresses of host memory, where ``direct``.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The I/O path in use now, e.g. ``posix O_DIRECT``."""

    @abstractmethod
    def read(self, pieces: Sequence[memoryview], position: int) -> int:
        """Fill pieces one after the other from the file, from ``position`` on.

        Blocks until no I/O uses the memory any more, also after a failure.

        Returns:
            Bytes read. If fewer than requested, the file ends before, and the content of the pieces is undefined.

        Raises:
            OSError: they cannot be read. The content of the pieces is undefined.
        """

    @abstractmethod
    def read_device(self, memory: DeviceMemory, position: int) -> bool:
        """Fill device memory from the file, from ``position`` on, without a copy through host memory of this process.

        Blocks until no I/O uses the memory any more, also after a failure.

        Returns:
            False: this engine cannot, or not now. The reason is counted, and the content of ``memory`` is undefined. Read
            into host memory and copy instead.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the file. No I/O may be under way."""
