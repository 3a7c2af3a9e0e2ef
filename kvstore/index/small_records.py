"""Encodings of volume epochs, notes and heartbeats in an index, and the checks of their sizes and of lease holders.

In LMDB, a note is stored under its name, so that all names with a common prefix are neighbours. LMDB limits keys to 511 bytes:
a longer name is cut, and a digest of the whole name follows. The value repeats the whole name.

In LMDB, a heartbeat is stored under a digest of its node's id.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Final

from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import KEY_BYTES, BootId, NodeId, Tier, VolumeId
from kvstore.index.contract import Beat, LeaseHolder, VolumeEpoch, VolumeEpochInfo

_DIGEST_BYTES: Final = 32
_NAME_IN_KEY: Final = 511 - _DIGEST_BYTES
_BEAT: Final = struct.Struct("<16sQQ")
_SIZE: Final = struct.Struct("<I")
_MAX_NUMBER: Final = (1 << 64) - 1


# ---- volume epochs ----
def encode_volume_epoch(info: VolumeEpochInfo) -> bytes:
    """Encode a volume epoch, without its number."""
    fields = (info.volume_id.encode(), info.node_id.encode(), bytes([info.tier]), bytes(info.boot_id))
    return b"".join(_SIZE.pack(len(field)) + field for field in fields)


def decode_volume_epoch(volume_epoch: VolumeEpoch, value: bytes) -> VolumeEpochInfo:
    """Decode a volume epoch."""
    fields: list[bytes] = []
    at = 0
    while at < len(value):
        (size,) = _SIZE.unpack_from(value, at)
        fields.append(value[at + _SIZE.size : at + _SIZE.size + size])
        at += _SIZE.size + size
    volume_id, node_id, tier, boot_id = fields
    return VolumeEpochInfo(volume_epoch, VolumeId(volume_id.decode()), NodeId(node_id.decode()), Tier(tier[0]), BootId(boot_id))


# ---- notes ----
def check_notes(notes: Mapping[str, bytes | None]) -> None:
    """Check the sizes of notes.

    Raises:
        InvalidArgument: a name or a value is too long, or there are too many.
    """
    if len(notes) > limits.MAX_NODES:
        raise InvalidArgument("too many notes in one batch", got=len(notes), limit=limits.MAX_NODES)
    for name, value in notes.items():
        if not name or len(name.encode()) > limits.MAX_NOTE_NAME_BYTES:
            raise InvalidArgument("the name of a note is empty or too long", limit=limits.MAX_NOTE_NAME_BYTES)
        if value is not None and len(value) > limits.MAX_NOTE_BYTES:
            raise InvalidArgument("a note is too long", name=name[:64], got=len(value), limit=limits.MAX_NOTE_BYTES)


def note_key(name: str) -> bytes:
    """The key of a note."""
    encoded = name.encode()
    if len(encoded) <= _NAME_IN_KEY:
        return encoded
    return encoded[:_NAME_IN_KEY] + hashlib.sha256(encoded).digest()


def note_key_prefix(prefix: str) -> bytes:
    """The first bytes of the keys of all notes whose names begin with ``prefix``."""
    return prefix.encode()[:_NAME_IN_KEY]


def encode_note(name: str, value: bytes) -> bytes:
    """Encode a note with its name."""
    encoded = name.encode()
    return struct.pack("<I", len(encoded)) + encoded + value


def decode_note(entry: bytes) -> tuple[str, bytes]:
    """Decode a note: (name, value)."""
    end: int = 4 + struct.unpack_from("<I", entry)[0]
    return entry[4:end].decode(), entry[end:]


# ---- heartbeats ----
def check_beats(beats: Mapping[NodeId, Beat | None]) -> None:
    """Check heartbeats.

    Raises:
        InvalidArgument: an id or a number is out of range, or there are too many.
    """
    if len(beats) > limits.MAX_NODES:
        raise InvalidArgument("too many heartbeats in one batch", got=len(beats), limit=limits.MAX_NODES)
    for node_id, beat in beats.items():
        if not node_id or len(node_id.encode()) > limits.MAX_NAME_BYTES:
            raise InvalidArgument("a node id is empty or too long", limit=limits.MAX_NAME_BYTES)
        if beat is None:
            continue
        if len(beat.boot_id) != KEY_BYTES:
            raise InvalidArgument(f"a boot id must have {KEY_BYTES} bytes", bytes=len(beat.boot_id))
        if not 0 <= beat.counter <= _MAX_NUMBER or not 0 <= beat.report <= _MAX_NUMBER:
            raise InvalidArgument("numbers of heartbeats must have at most 64 bits", node_id=node_id)


def beat_key(node_id: NodeId) -> bytes:
    """The key of a node's heartbeat."""
    return hashlib.blake2b(node_id.encode(), digest_size=16).digest()


def encode_beat(node_id: NodeId, beat: Beat) -> bytes:
    """Encode a heartbeat with its node."""
    return _BEAT.pack(*beat) + node_id.encode()


def decode_beat(entry: bytes) -> tuple[NodeId, Beat]:
    """Decode a heartbeat."""
    boot_id, counter, report = _BEAT.unpack_from(entry)
    return NodeId(entry[_BEAT.size :].decode()), Beat(BootId(boot_id), counter, report)


# ---- leases ----
def check_holder(holder: LeaseHolder) -> None:
    """Check the names of a lease holder.

    Raises:
        InvalidArgument: the id or the address is empty, too long or contains a space.
    """
    if not all(name and " " not in name and len(name.encode()) <= limits.MAX_NAME_BYTES for name in holder):
        raise InvalidArgument(
            f"the id and the address of a server must be names of at most {limits.MAX_NAME_BYTES} bytes without spaces",
            server=holder.server[:64],
            address=holder.address[:64],
        )
