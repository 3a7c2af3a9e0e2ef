"""What another agent says of itself, read here before NIXL sees it: NIXL's own reader ends the process over some malformed bytes.

The format is NIXL's: items of a tag, a length of 8 bytes, so many bytes and ``|``. Only what agents of this store send is taken:
one UCX connection and host memory. The connection's own address is UCX's and stays unread.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core.errors import Unsupported
from kvstore.transport.nixl.landing import Rows

MOST_BYTES = 64 << 10
"""Of an agent's metadata; what is seen is half a kilobyte."""
MOST_REGIONS = 256
_MAGIC = b"nixlSerDes|"
_NAME = re.compile(rb"[A-Za-z0-9_.-]{1,200}-[0-9a-f]{32}")
_LENGTH = struct.Struct("<Q")
_REGION = struct.Struct("<QQQ")  # address, length, device; a key of UCX's follows
_HOST_MEMORY = bytes(4)


class BadMetadata(Unsupported):
    """Bytes that no agent of this store says of itself."""


@dataclass(frozen=True, slots=True)
class AgentMetadata:
    """An agent, as it says.

    Attributes:
        name: unique; its last 33 characters are ``-`` and a number.
        regions: ``[regions, 2]``: first byte, and the one behind the last, of each piece of memory that it registered.
    """

    name: str
    regions: npt.NDArray[np.uint64]

    def holds(self, rows: Rows) -> bool:
        """Whether each piece lies within one of its regions."""
        begins = rows[:, 0]
        ends = begins + rows[:, 1]
        if bool((ends < begins).any()):
            return False
        within = (self.regions[:, 0] <= begins[:, None]) & (ends[:, None] <= self.regions[:, 1])
        return bool(within.any(axis=1).all())


class _Items:
    """The items that are left."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, tag: bytes) -> bytes:
        """The next item, which has this tag."""
        begin = self._at + len(tag) + _LENGTH.size
        if self._data[self._at : self._at + len(tag)] != tag or begin > len(self._data):
            raise BadMetadata("malformed metadata of an agent", wanted=tag.decode(), at=self._at)
        (length,) = _LENGTH.unpack_from(self._data, begin - _LENGTH.size)
        end = begin + length
        if end >= len(self._data) or self._data[end : end + 1] != b"|":
            raise BadMetadata("malformed metadata of an agent", length=length, at=self._at)
        self._at = end + 1
        return self._data[begin:end]

    def expect(self, tag: bytes, value: bytes) -> None:
        """The next item, which says this."""
        if (found := self.take(tag)) != value:
            raise BadMetadata("metadata that an agent of this store does not have", tag=tag.decode(), bytes=len(found))

    def end(self) -> None:
        """There are no more."""
        if self._at != len(self._data):
            raise BadMetadata("metadata goes on behind its end", at=self._at)


def read_metadata(data: bytes) -> AgentMetadata:
    """Reads what an agent says of itself.

    Raises:
        BadMetadata: it is malformed, too long, not of this store, or names memory that cannot be.
    """
    if len(data) > MOST_BYTES or not data.startswith(_MAGIC):
        raise BadMetadata("not the metadata of an agent, or too much of it", bytes=len(data), most=MOST_BYTES)
    items = _Items(data[len(_MAGIC) :])
    name = items.take(b"Agent")
    if not _NAME.fullmatch(name):
        raise BadMetadata("an agent of another name than this store gives", bytes=len(name))
    items.expect(b"Conns", _LENGTH.pack(1))
    items.expect(b"t", b"UCX")
    if not items.take(b"c"):
        raise BadMetadata("an agent without an address")
    items.expect(b"", b"MemSection")
    items.expect(b"nixlSecElms", _LENGTH.pack(1))
    items.expect(b"bknd", b"UCX")
    items.expect(b"nixlDList", b"nixlSDList")
    items.expect(b"t", _HOST_MEMORY)
    count = items.take(b"n")
    regions = int.from_bytes(count, "little")
    if len(count) != _LENGTH.size or not 1 <= regions <= MOST_REGIONS:
        raise BadMetadata("an agent with too many regions, or none", regions=regions, most=MOST_REGIONS)
    found = np.array([_region(items.take(b"")) for _ in range(regions)], np.uint64)
    items.end()
    return AgentMetadata(name.decode("ascii"), found)


def _region(item: bytes) -> tuple[int, int]:
    if len(item) <= _REGION.size:
        raise BadMetadata("a region without a key", bytes=len(item))
    address, length, device = _REGION.unpack_from(item)
    if not address or not length or device or address + length >= 1 << 64:
        raise BadMetadata("a region that no memory has", address=address, length=length, device=device)
    return address, address + length
