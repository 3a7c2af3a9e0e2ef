"""What two sides tell each other about one-sided transfers; heads, outcomes and checksums are those of ``transport.frames``.

    ATTACH {host, wish, agent}            ->  ATTACHED {way, agent}         once a connection, and for each new agent
    FETCH {READ's header, where to}       ->  PLACED {DATA's header, where from}, any number of them, then READ_END
        TAKEN                                                               for each PLACED that wants it, where the reader pulls

A reader that *pulls* is told where the blocks lie, and says TAKEN once it has all that it was told of: until then they stay
pinned. To one that has blocks *pushed* PLACED says that they are there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np

from kvstore.transport import frames
from kvstore.transport.frames import HEAD_BYTES, BadFrame, DataFrame, FrameKind, ReadFrame
from kvstore.transport.nixl.landing import Addresses, Landing

HOST_BYTES = 16
MAX_ADDRESS = 1 << 57
"""End of the largest user address space of x86-64 and AArch64: addresses below it cannot overflow when lengths are added."""
_ATTACH = struct.Struct("<16sBBHI")  # host, wish, has RDMA, zero, bytes of the agent's metadata
_ATTACHED = struct.Struct("<BBHI")  # way, zero, zero, bytes of the agent's metadata
_FETCH = struct.Struct("<IQ")  # bytes of the READ header, layer stride; then the header, then addresses
_PLACED = struct.Struct("<IQI")  # bytes of the DATA header, bytes moved, TAKEN is wanted; then the header, then addresses


class Way(IntEnum):
    """Who moves the bytes of a read."""

    PULL = 1
    """The reader reads the server's memory: nothing runs on the server."""
    PUSH = 2
    """The server writes into the reader's memory: over TCP that is twice as fast."""


Wish = Literal["auto", "pull", "push"]
_WISHES: dict[Wish, int] = {"auto": 0, "pull": int(Way.PULL), "push": int(Way.PUSH)}


@dataclass(frozen=True, slots=True)
class AttachFrame:
    """An ATTACH: who wants to read, and how."""

    host: bytes
    wish: Wish
    rdma: bool
    agent: bytes


@dataclass(frozen=True, slots=True)
class FetchFrame:
    """A FETCH. ``landing``: where its layers go, one address a key; None where the reader pulls."""

    read: ReadFrame
    landing: Landing | None


@dataclass(frozen=True, slots=True)
class PlacedFrame:
    """A PLACED: outcomes and checksums.

    Attributes:
        data: of the blocks.
        moved_bytes: their payload.
        addresses: where each hit's layers begin, where the reader pulls (else empty).
        wants_taken: the reader says TAKEN once it has these and all before them.
    """

    data: DataFrame
    moved_bytes: int
    addresses: Addresses
    wants_taken: bool = False


def encode_attach(request_id: int, frame: AttachFrame) -> bytes:
    """The whole ATTACH frame."""
    header = _ATTACH.pack(frame.host, _WISHES[frame.wish], frame.rdma, 0, len(frame.agent)) + frame.agent
    return frames.encode_head(FrameKind.ATTACH, request_id, len(header)) + header


def decode_attach(header: bytes) -> AttachFrame:
    """Reads an ATTACH header.

    Raises:
        BadFrame: lengths that disagree, an unknown wish.
    """
    if len(header) < _ATTACH.size:
        raise BadFrame("frame header too short", kind=FrameKind.ATTACH.name, bytes=len(header))
    host, code, rdma, zero, length = _ATTACH.unpack_from(header)
    wish = next((name for name, known in _WISHES.items() if known == code), None)
    if wish is None or zero or rdma > 1 or not length or len(header) != _ATTACH.size + length:
        raise BadFrame("malformed ATTACH", wish=code, bytes=len(header))
    return AttachFrame(host, wish, bool(rdma), header[_ATTACH.size :])


def encode_attached(request_id: int, way: Way, agent: bytes) -> bytes:
    """The whole ATTACHED frame; ``agent`` is empty where the server pushes."""
    header = _ATTACHED.pack(way, 0, 0, len(agent)) + agent
    return frames.encode_head(FrameKind.ATTACHED, request_id, len(header)) + header


def decode_attached(header: bytes) -> tuple[Way, bytes]:
    """Reads an ATTACHED header.

    Raises:
        BadFrame: lengths that disagree, an unknown way.
    """
    if len(header) < _ATTACHED.size:
        raise BadFrame("frame header too short", kind=FrameKind.ATTACHED.name, bytes=len(header))
    code, zero, zeros, length = _ATTACHED.unpack_from(header)
    if code not in (Way.PULL, Way.PUSH) or zero or zeros or len(header) != _ATTACHED.size + length:
        raise BadFrame("malformed ATTACHED", way=code, bytes=len(header))
    return Way(code), header[_ATTACHED.size :]


def encode_fetch(request_id: int, frame: FetchFrame) -> bytes:
    """The whole FETCH frame."""
    read = frames.encode_read(request_id, frame.read)[HEAD_BYTES:]
    stride, addresses = (0, b"") if frame.landing is None else (frame.landing.layer_stride, _packed(frame.landing.addresses))
    size = _FETCH.size + len(read) + len(addresses)
    return b"".join(
        (frames.encode_head(FrameKind.FETCH, request_id, size), _FETCH.pack(len(read), stride), read, addresses)
    )  # fmt: skip


def decode_fetch(header: bytes) -> FetchFrame:
    """Reads a FETCH header.

    Raises:
        BadFrame: as ``decode_read``; another number of addresses than keys.
    """
    read_bytes, stride = _sizes(_FETCH, header, FrameKind.FETCH)
    at = _FETCH.size + read_bytes
    read = frames.decode_read(header[_FETCH.size : at])
    addresses = _unpacked(header, at)
    if not stride:
        if len(addresses):
            raise BadFrame("FETCH with addresses that it says it has not", addresses=len(addresses))
        return FetchFrame(read, None)
    if len(addresses) != len(read.keys) or not read.shape.layer_block_bytes <= stride < 1 << 48:
        raise BadFrame("FETCH names another number of places than of keys", keys=len(read.keys), places=len(addresses))
    if len(addresses) and int(addresses.max()) >= MAX_ADDRESS:
        raise BadFrame("FETCH names an address outside user space", address=int(addresses.max()))
    return FetchFrame(read, Landing(addresses, stride, read.shape.layer_block_bytes))


def encode_placed(request_id: int, frame: PlacedFrame) -> bytes:
    """The whole PLACED frame."""
    data = frames.encode_data(request_id, frame.data, 0)[HEAD_BYTES:]
    addresses = _packed(frame.addresses)
    size = _PLACED.size + len(data) + len(addresses)
    return b"".join(
        (
            frames.encode_head(FrameKind.PLACED, request_id, size),
            _PLACED.pack(len(data), frame.moved_bytes, frame.wants_taken),
            data,
            addresses,
        )
    )


def decode_placed(header: bytes, layer_block_bytes: int) -> PlacedFrame:
    """Reads a PLACED header.

    Raises:
        BadFrame: as ``decode_data``; another number of addresses than hits.
    """
    data_bytes, moved_bytes, wanted = _sizes(_PLACED, header, FrameKind.PLACED)
    at = _PLACED.size + data_bytes
    data = frames.decode_data(header[_PLACED.size : at], moved_bytes, layer_block_bytes)
    addresses = _unpacked(header, at)
    if len(addresses) not in (0, data.hits) or wanted > 1:
        raise BadFrame("PLACED names another number of places than of hits", hits=data.hits, places=len(addresses))
    return PlacedFrame(data, moved_bytes, addresses, bool(wanted))


def _sizes(struct_: struct.Struct, header: bytes, kind: FrameKind) -> tuple[int, ...]:
    if len(header) < struct_.size:
        raise BadFrame("frame header too short", kind=kind.name, bytes=len(header))
    found: tuple[int, ...] = struct_.unpack_from(header)
    if found[0] > len(header) - struct_.size:  # the first is always the length of the header within
        raise BadFrame("a header longer than its frame", kind=kind.name, bytes=len(header), inner=found[0])
    return found


def _packed(addresses: Addresses) -> bytes:
    return np.ascontiguousarray(addresses, "<u8").tobytes()


def _unpacked(header: bytes, at: int) -> Addresses:
    if (len(header) - at) % 8:
        raise BadFrame("addresses take 8 bytes each", bytes=len(header) - at)
    return np.frombuffer(header, "<u8", offset=at).astype(np.uint64)
