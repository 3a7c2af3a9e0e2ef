"""Superblock: description of a slab file, stored twice, so that a torn write never loses both copies.

The first MiB of a slab file is reserved for it: copy A at byte 0, copy B at byte 4096, the rest zero. Each open increments the
*epoch*, overwrites the older (or damaged) copy, then syncs. Generations of slots begin at ``epoch << 40``, so a later process
never allocates a generation of an earlier one, without a counter that must be synced at each allocation.

The *token* fences owners of a volume on a shared file system (``kvstore.tiers.nvme.ownership``). Of two valid copies the one
with the higher token is newer, then the one with the higher epoch. Version 1 had no token and was in no release.

Little-endian::

    0   8s  magic "KVSLAB", carriage return, line feed
    8   Q   xxh3-64 of bytes [16, 4096)
    16  H   version      18 H length of the volume id      20 4x
    24  16s volume uid
    40  Q   capacity (bytes of slots)    48 Q chunk bytes    56 Q epoch    64 Q token
    72      volume id, UTF-8
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvstore.core import limits
from kvstore.core.errors import CorruptBlock
from kvstore.core.types import VolumeId
from kvstore.tiers.allocator import ALIGNMENT

MAGIC = b"KVSLAB\r\n"
VERSION = 2
SUPERBLOCK_BYTES = 4096
DATA_START = 1 << 20
"""Position of slot offset 0 in the slab file."""
GENERATION_BITS = 40
"""Slots that one opening can give out: 2^40. Epochs take the 24 bits above."""
_PREFIX = struct.Struct("<8sQ")
_BODY = struct.Struct("<HH4x16sQQQQ")
_NAME_AT = 72


class UnknownVersion(CorruptBlock):
    """The volume has a format version that this build does not know. It is not damaged."""


@dataclass(frozen=True, slots=True)
class Superblock:
    """One volume on disk. ``uid``: 16 random bytes, drawn when it was made."""

    uid: bytes
    volume_id: VolumeId
    capacity_bytes: int
    chunk_bytes: int
    epoch: int
    token: int = 0
    """Token of the owner; 0: nobody has claimed the volume."""

    @property
    def file_bytes(self) -> int:
        """Length of the slab file."""
        return DATA_START + self.capacity_bytes

    @property
    def first_generation(self) -> int:
        """First slot generation of this epoch."""
        return self.epoch << GENERATION_BITS


def pack_superblock(superblock: Superblock) -> bytes:
    """One copy, a whole page."""
    name = superblock.volume_id.encode()
    body = (
        _BODY.pack(
            VERSION,
            len(name),
            superblock.uid,
            superblock.capacity_bytes,
            superblock.chunk_bytes,
            superblock.epoch,
            superblock.token,
        )
        + name
    ).ljust(SUPERBLOCK_BYTES - _PREFIX.size, b"\0")
    return _PREFIX.pack(MAGIC, xxhash.xxh3_64_intdigest(body)) + body


def parse_superblock(page: bytes | memoryview) -> Superblock:
    """Parse one copy.

    Raises:
        CorruptBlock: not a superblock, or damaged.
        UnknownVersion: of an unknown version.
    """
    if len(page) < SUPERBLOCK_BYTES:
        raise CorruptBlock("a superblock is cut off", bytes=len(page))
    magic, checksum = _PREFIX.unpack_from(page)
    if magic != MAGIC:
        raise CorruptBlock("no superblock here: wrong magic")
    if xxhash.xxh3_64_intdigest(page[_PREFIX.size : SUPERBLOCK_BYTES]) != checksum:
        raise CorruptBlock("a superblock does not match its checksum")
    version, name_bytes, uid, capacity, chunk, epoch, token = _BODY.unpack_from(page, _PREFIX.size)
    if version != VERSION:
        raise UnknownVersion(
            f"the volume has format version {version}, and this build knows version {VERSION} only; start the build that wrote"
            " it, or move the folder away to begin with an empty volume",
            version=version,
        )
    if name_bytes > limits.MAX_NAME_BYTES or chunk < ALIGNMENT or chunk % ALIGNMENT or chunk > capacity or capacity % ALIGNMENT:
        raise CorruptBlock("the superblock has invalid values", chunk_bytes=chunk, capacity_bytes=capacity)
    try:
        name = bytes(page[_NAME_AT : _NAME_AT + name_bytes]).decode()
    except UnicodeDecodeError as error:
        raise CorruptBlock("a superblock's volume id is not UTF-8") from error
    return Superblock(uid, VolumeId(name), capacity, chunk, epoch, token)


def newest_superblock(pages: bytes | memoryview) -> tuple[Superblock, int]:
    """The newest valid copy.

    Args:
        pages: the first 8192 bytes of a slab file.

    Returns:
        The superblock, and the position for its successor: that of the older (or damaged) copy.

    Raises:
        CorruptBlock: neither copy is valid. The message has the fault of copy A.
    """
    good: list[tuple[tuple[int, int], int, Superblock]] = []
    reason: CorruptBlock | None = None
    for start in (0, SUPERBLOCK_BYTES):
        try:
            copy = parse_superblock(pages[start : start + SUPERBLOCK_BYTES])
            good.append(((copy.token, copy.epoch), SUPERBLOCK_BYTES - start, copy))
        except CorruptBlock as error:
            reason = reason or error
    if not good:
        raise reason or CorruptBlock("no superblock")
    _, other, newest = max(good, key=lambda entry: entry[0])
    return newest, other
