"""Slot header: the on-disk format of a slot's description.

A slot is ``[header pages][payload, padded to 4 KiB]``. The header names the block, its slot and its volume, so that a slot which
was swapped, moved, copied from another volume or reused is detected. The same bytes, without padding, are the value in the
catalog. A slot is checked by comparing its header with the catalog's entry and the caller's description.

Little-endian::

    0   8s  magic "KVSLOT", carriage return, line feed
    8   Q   xxh3-64 of bytes [16, 168 + 8 * layers)
    16  H   version
    18  H   flags: bit 0 = has a parent
    20  I   header length, 168 + 8 * layers
    24  16s volume uid (random and secret, so that a payload cannot imitate a header)
    40  16s namespace
    56  16s block key
    72  16s parent key (zero without one)
    88  Q   generation
    96  Q   slot offset
    104 Q   slot size
    112 I   first chunk of the span    116 I chunks of the span
    120 I   depth                      124 I layers
    128 Q   layer block bytes
    136 Q   payload bytes
    144 24x reserved, zero
    168 Q * layers  xxh3-64 of each layer block
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvstore.core import limits
from kvstore.core.errors import CorruptBlock, InvalidArgument
from kvstore.core.types import KEY_BYTES, BlockKey, BlockShape, NamespaceId
from kvstore.tiers.allocator import ALIGNMENT, round_up
from kvstore.tiers.contract import BlockRecord, Slot

MAGIC = b"KVSLOT\r\n"
VERSION = 1
_HAS_PARENT = 1
_PREFIX = struct.Struct("<8sQ")
_BODY = struct.Struct("<HHI16s16s16s16sQQQIIIIQQ24x")
FIXED_BYTES = _PREFIX.size + _BODY.size
_PLACE = struct.Struct("<QQQ")
_PLACE_AT = 88
_NO_PARENT = bytes(KEY_BYTES)


class SlotHeader(NamedTuple):
    """A header, parsed: the block, and the place that it was written for."""

    volume_uid: bytes
    slot: Slot
    first_chunk: int
    chunks: int
    record: BlockRecord


def header_bytes(layers: int) -> int:
    """Space that a header takes in a slot: whole pages."""
    return round_up(FIXED_BYTES + 8 * layers)


def seal_of(checksums: bytes) -> int:
    """Seal of a block's checksums, used if the checksums are not in memory."""
    return xxhash.xxh3_64_intdigest(checksums)


def slot_bytes(shape: BlockShape) -> int:
    """Size of a slot for blocks of a shape: header pages and the padded payload."""
    return header_bytes(shape.layers) + round_up(shape.block_bytes)


def check_shape(shape: BlockShape) -> None:
    """Check a shape before anything is computed from it.

    Raises:
        InvalidArgument: the shape exceeds a limit.
    """
    if not 1 <= shape.layers <= limits.MAX_LAYERS:
        raise InvalidArgument("layers out of bounds", layers=shape.layers, limit=limits.MAX_LAYERS)
    if not limits.MIN_LAYER_BLOCK_BYTES <= shape.layer_block_bytes <= limits.MAX_LAYER_BLOCK_BYTES:
        raise InvalidArgument(
            "layer block bytes out of bounds", bytes=shape.layer_block_bytes, limit=limits.MAX_LAYER_BLOCK_BYTES
        )
    if shape.block_bytes > limits.MAX_BLOCK_BYTES:
        raise InvalidArgument("block bytes out of bounds", bytes=shape.block_bytes, limit=limits.MAX_BLOCK_BYTES)


def pack_header(volume_uid: bytes, slot: Slot, first_chunk: int, chunks: int, record: BlockRecord) -> bytes:
    """The header's bytes, without padding.

    Raises:
        InvalidArgument: the record does not fit together (number of checksums, length of keys).
    """
    shape = record.shape
    layers = shape.layers
    checksums = record.checksums
    parent = record.parent
    if len(checksums) != 8 * layers or len(record.key) != KEY_BYTES or len(record.namespace) != KEY_BYTES:
        raise InvalidArgument(
            "a record must have 8 bytes of checksums per layer, and keys of 16 bytes", layers=layers, checksums=len(checksums)
        )
    body = (
        _BODY.pack(
            VERSION,
            0 if parent is None else _HAS_PARENT,
            FIXED_BYTES + 8 * layers,
            volume_uid,
            record.namespace,
            record.key,
            _NO_PARENT if parent is None else parent,
            slot.generation,
            slot.offset,
            slot.size,
            first_chunk,
            chunks,
            record.depth,
            layers,
            shape.layer_block_bytes,
            shape.block_bytes,
        )
        + checksums
    )
    return _PREFIX.pack(MAGIC, xxhash.xxh3_64_intdigest(body)) + body


def place_in(header: bytes) -> Slot:
    """The slot that a header names, of one that is known to be good: nothing is checked."""
    generation, offset, size = _PLACE.unpack_from(header, _PLACE_AT)
    return Slot(offset, size, generation)


def parse_header(data: bytes | memoryview) -> SlotHeader:
    """Parse bytes that begin with a header and ignore the rest.

    The checksum is verified before any field is used, and each length before its use.

    Raises:
        CorruptBlock: the header is invalid.
    """
    if len(data) < FIXED_BYTES:
        raise CorruptBlock("a slot header is cut off", bytes=len(data))
    magic, checksum = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise CorruptBlock("no slot header here: wrong magic")
    (
        version, flags, length, volume_uid, namespace, key, parent, generation, offset, size, first_chunk, chunks,
        depth, layers, layer_block_bytes, payload_bytes,
    ) = _BODY.unpack_from(data, _PREFIX.size)  # fmt: skip
    if version != VERSION:
        raise CorruptBlock("a slot header of a version that this build does not know", version=version)
    if not 1 <= layers <= limits.MAX_LAYERS or length != FIXED_BYTES + 8 * layers or length > len(data):
        raise CorruptBlock("the slot header is truncated or has a wrong length", length=length, layers=layers)
    if xxhash.xxh3_64_intdigest(data[_PREFIX.size : length]) != checksum:
        raise CorruptBlock("a slot header does not match its checksum")
    if (
        flags & ~_HAS_PARENT
        or not limits.MIN_LAYER_BLOCK_BYTES <= layer_block_bytes <= limits.MAX_LAYER_BLOCK_BYTES
        or payload_bytes != layers * layer_block_bytes
        or payload_bytes > limits.MAX_BLOCK_BYTES
        or depth > limits.MAX_DEPTH
        or not generation
        or offset % ALIGNMENT
        or size != round_up(length) + round_up(payload_bytes)
    ):
        raise CorruptBlock(
            "the slot header has invalid values", offset=offset, size=size, depth=depth, payload_bytes=payload_bytes
        )
    record = BlockRecord(
        NamespaceId(namespace),
        BlockKey(key),
        BlockKey(parent) if flags & _HAS_PARENT else None,
        depth,
        BlockShape(layers, layer_block_bytes),
        bytes(data[FIXED_BYTES:length]),
    )
    return SlotHeader(volume_uid, Slot(offset, size, generation), first_chunk, chunks, record)
