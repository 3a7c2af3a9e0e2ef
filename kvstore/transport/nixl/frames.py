"""Frames of one-sided transfers. Heads, outcomes and checksums are the same as in ``tcp.frames``.

    ATTACH {host, mode, agent}            ->  ATTACHED {mode, agent}        once per connection, and for each new agent
    FETCH {header of READ, addresses}     ->  PLACED {header of DATA, addresses}, any number of times, then READ_END
        TAKEN                                                               for each PLACED that requests it (pull only)

The mode says who moves the bytes. In *pull* mode, PLACED gives the addresses of the blocks, which stay pinned until the reader
sends TAKEN after it has read them. In *push* mode, FETCH gives the addresses of the destination, and PLACED says that the server
has written the blocks.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np

from kvstore.transport.nixl.address_table import Addresses, AddressTable
from kvstore.transport.tcp import frames
from kvstore.transport.tcp.frames import HEAD_BYTES, BadFrame, DataFrame, FrameKind, ReadFrame

MAX_ADDRESS = 1 << 57
"""End of the largest user address space of x86-64 and AArch64: addresses below it cannot overflow when lengths are added."""
_ATTACH = struct.Struct("<16sBBHI")  # host, requested mode, has RDMA, zero, bytes of the agent's metadata
_ATTACHED = struct.Struct("<BBHI")  # mode, zero, zero, bytes of the agent's metadata
_FETCH = struct.Struct("<IQ")  # bytes of the READ header, layer stride; the header and the addresses follow
_PLACED = struct.Struct("<IQI")  # bytes of the DATA header, bytes moved, TAKEN requested; the header and the addresses follow


class TransferMode(IntEnum):
    """The side that moves the bytes of a read."""

    PULL = 1
    """The reader reads the server's memory; the server's CPU does nothing."""
    PUSH = 2
    """The server writes into the reader's memory. Over TCP this is twice as fast."""


RequestedMode = Literal["auto", "pull", "push"]
_REQUESTED_MODES: dict[RequestedMode, int] = {"auto": 0, "pull": int(TransferMode.PULL), "push": int(TransferMode.PUSH)}


@dataclass(frozen=True, slots=True)
class AttachFrame:
    """An ATTACH: the reader's host, agent and requested mode."""

    host: bytes
    mode: RequestedMode
    rdma: bool
    agent: bytes


@dataclass(frozen=True, slots=True)
class FetchFrame:
    """A FETCH. ``destination``: address of the destination of each key; None if the reader pulls."""

    read: ReadFrame
    destination: AddressTable | None


@dataclass(frozen=True, slots=True)
class PlacedFrame:
    """A PLACED: outcomes and checksums.

    Attributes:
        data: the DATA header of the blocks.
        moved_bytes: payload bytes of the blocks.
        addresses: address of each hit's layers if the reader pulls, else empty.
        wants_taken: the reader must send TAKEN after it has read these blocks and all before them.
    """

    data: DataFrame
    moved_bytes: int
    addresses: Addresses
    wants_taken: bool = False


def encode_attach(request_id: int, frame: AttachFrame) -> bytes:
    """Return an ATTACH frame."""
    header = _ATTACH.pack(frame.host, _REQUESTED_MODES[frame.mode], frame.rdma, 0, len(frame.agent)) + frame.agent
    return frames.encode_head(FrameKind.ATTACH, request_id, len(header)) + header


def decode_attach(header: bytes) -> AttachFrame:
    """Decode the header of an ATTACH.

    Raises:
        BadFrame: lengths disagree, or the mode is unknown.
    """
    if len(header) < _ATTACH.size:
        raise BadFrame("frame header too short", kind=FrameKind.ATTACH.name, bytes=len(header))
    host, code, rdma, zero, length = _ATTACH.unpack_from(header)
    mode = next((name for name, known in _REQUESTED_MODES.items() if known == code), None)
    if mode is None or zero or rdma > 1 or not length or len(header) != _ATTACH.size + length:
        raise BadFrame("malformed ATTACH", mode=code, bytes=len(header))
    return AttachFrame(host, mode, bool(rdma), header[_ATTACH.size :])


def encode_attached(request_id: int, mode: TransferMode, agent: bytes) -> bytes:
    """Return an ATTACHED frame. ``agent`` is empty if the server pushes."""
    header = _ATTACHED.pack(mode, 0, 0, len(agent)) + agent
    return frames.encode_head(FrameKind.ATTACHED, request_id, len(header)) + header


def decode_attached(header: bytes) -> tuple[TransferMode, bytes]:
    """Decode the header of an ATTACHED.

    Raises:
        BadFrame: lengths disagree, or the mode is unknown.
    """
    if len(header) < _ATTACHED.size:
        raise BadFrame("frame header too short", kind=FrameKind.ATTACHED.name, bytes=len(header))
    code, zero, zeros, length = _ATTACHED.unpack_from(header)
    if code not in (TransferMode.PULL, TransferMode.PUSH) or zero or zeros or len(header) != _ATTACHED.size + length:
        raise BadFrame("malformed ATTACHED", mode=code, bytes=len(header))
    return TransferMode(code), header[_ATTACHED.size :]


def encode_fetch(request_id: int, frame: FetchFrame) -> bytes:
    """Return a FETCH frame."""
    read = frames.encode_read(request_id, frame.read)[HEAD_BYTES:]
    stride, addresses = (
        (0, b"") if frame.destination is None else (frame.destination.layer_stride, _packed(frame.destination.addresses))
    )
    size = _FETCH.size + len(read) + len(addresses)
    return b"".join(
        (frames.encode_head(FrameKind.FETCH, request_id, size), _FETCH.pack(len(read), stride), read, addresses)
    )  # fmt: skip


def decode_fetch(header: bytes) -> FetchFrame:
    """Decode the header of a FETCH.

    Raises:
        BadFrame: as ``decode_read``, or the number of addresses differs from the number of keys.
    """
    read_bytes, stride = _sizes(_FETCH, header, FrameKind.FETCH)
    at = _FETCH.size + read_bytes
    read = frames.decode_read(header[_FETCH.size : at])
    addresses = _unpacked(header, at)
    if not stride:
        if len(addresses):
            raise BadFrame("FETCH with addresses but without a layer stride", addresses=len(addresses))
        return FetchFrame(read, None)
    if len(addresses) != len(read.keys) or not read.shape.layer_block_bytes <= stride < 1 << 48:
        raise BadFrame("FETCH with a wrong number of addresses", keys=len(read.keys), addresses=len(addresses))
    if len(addresses) and int(addresses.max()) >= MAX_ADDRESS:
        raise BadFrame("FETCH with an address outside user space", address=int(addresses.max()))
    return FetchFrame(read, AddressTable(addresses, stride, read.shape.layer_block_bytes))


def encode_placed(request_id: int, frame: PlacedFrame) -> bytes:
    """Return a PLACED frame."""
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
    """Decode the header of a PLACED.

    Raises:
        BadFrame: as ``decode_data``, or the number of addresses differs from the number of hits.
    """
    data_bytes, moved_bytes, wanted = _sizes(_PLACED, header, FrameKind.PLACED)
    at = _PLACED.size + data_bytes
    data = frames.decode_data(header[_PLACED.size : at], moved_bytes, layer_block_bytes)
    addresses = _unpacked(header, at)
    if len(addresses) not in (0, data.hits) or wanted > 1:
        raise BadFrame("PLACED with a wrong number of addresses", hits=data.hits, addresses=len(addresses))
    return PlacedFrame(data, moved_bytes, addresses, bool(wanted))


def _sizes(struct_: struct.Struct, header: bytes, kind: FrameKind) -> tuple[int, ...]:
    if len(header) < struct_.size:
        raise BadFrame("frame header too short", kind=kind.name, bytes=len(header))
    found: tuple[int, ...] = struct_.unpack_from(header)
    if found[0] > len(header) - struct_.size:  # the first field is always the length of the inner header
        raise BadFrame("inner header longer than its frame", kind=kind.name, bytes=len(header), inner=found[0])
    return found


def _packed(addresses: Addresses) -> bytes:
    return np.ascontiguousarray(addresses, "<u8").tobytes()


def _unpacked(header: bytes, at: int) -> Addresses:
    if (len(header) - at) % 8:
        raise BadFrame("addresses must have 8 bytes each", bytes=len(header) - at)
    return np.frombuffer(header, "<u8", offset=at).astype(np.uint64)
