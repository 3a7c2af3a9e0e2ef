"""The wire format of the data plane. Pure: bytes in, values out, no I/O.

A connection is a sequence of *frames*. Each frame has a fixed head, a header of ``header_bytes`` and a payload of
``payload_bytes``::

    head     <4s magic "KVB1", u8 kind, u8 version, u16 zero, u32 request_id, u32 header_bytes, u64 payload_bytes>   24 bytes

All integers are little-endian. The client's frames are on the left, the server's on the right. An answer carries the
``request_id`` of its request:

    HELLO {ticket}                        ->  WELCOME                       first, once
    READ {layers, keys}                   ->  DATA {outcomes, checksums} + payload, any number of times, then READ_END
    WRITE {run}                           ->  GRANT {outcomes}
        PAYLOAD + bytes of the granted                                                (only if slots were granted)
        CHECKSUMS {of the granted}        ->  WRITTEN {outcomes of the granted}
    WRITE {run, layerwise}                ->  GRANT {outcomes}
        LAYERS {range} + bytes, CHECKSUMS     repeated in any order until all layers have been sent
                                          ->  WRITTEN {outcomes of the granted}
    PING                                  ->  PONG
    ATTACH, FETCH, TAKEN                  ->  ATTACHED, PLACED              one-sided transfers, see ``nixl.frames``
    any request                           ->  ERROR {kind, message}         ends the request; the connection stays open if
                                                                            both sides are in step, else it is closed

Checksums of a write follow its bytes, so that a writer can hash a piece while the pieces before it are sent. Nothing becomes
visible before the checksums have arrived and match. A client may send further READs before the first is answered; they are
answered in order. Lengths are checked against ``kvstore.core.limits`` and against each other before the receiver allocates
memory. The head limits the length of the header (``HEADER_LIMITS``), and the payload must have exactly the length that the header
implies.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

import numpy as np

from kvstore.core import errors, limits
from kvstore.core.errors import ErrorKind, InvalidArgument, KVStoreError
from kvstore.core.types import KEY_BYTES, BlockKey, BlockRun, BlockShape, NamespaceId, Outcome, StoreOutcome, Tier
from kvstore.transport.contract import Checksums

MAGIC = b"KVB1"
VERSION = 2

HEAD = struct.Struct("<4sBBHIIQ")
HEAD_BYTES = HEAD.size

_HELLO = struct.Struct("<HH")  # zero, ticket bytes
_READ = struct.Struct(
    "<16sIIIIIII"
)  # namespace, layers, layer block bytes, first layer, layer count, layer group, budget ms, keys
_DATA = struct.Struct("<IIIIIII")  # first key, keys, hits, first layer, layer count, tier, zero
_WRITE = struct.Struct("<16s16sIIIIII")  # namespace, parent, flags, depth, layers, layer block bytes, budget ms, keys
_LAYERS = struct.Struct("<II")  # first layer, layer count
_COUNT = struct.Struct("<I")
_ERROR = struct.Struct("<HH")  # bytes of the kind, bytes of the message

_HAS_PARENT, _DURABLE, _LAYERWISE, _TAIL = 1, 2, 4, 8
_NO_PARENT = bytes(KEY_BYTES)

MAX_BUDGET_MS = (1 << 32) - 1
MAX_MESSAGE_BYTES = 4_096
MAX_CHECKSUMS_PER_DATA = 131_072
"""Maximum checksums per DATA frame, so that its header stays below 1.1 MiB. Larger parts need several frames."""


class FrameKind(IntEnum):
    """Kind of a frame."""

    HELLO = 1
    WELCOME = 2
    READ = 3
    DATA = 4
    READ_END = 5
    WRITE = 6
    GRANT = 7
    PAYLOAD = 8
    WRITTEN = 9
    ERROR = 10
    PING = 11
    PONG = 12
    CHECKSUMS = 13
    LAYERS = 14
    ATTACH = 15
    ATTACHED = 16
    FETCH = 17
    PLACED = 18
    TAKEN = 19


HEADER_LIMITS: dict[FrameKind, int] = {
    FrameKind.HELLO: _HELLO.size + limits.MAX_TICKET_BYTES,
    FrameKind.WELCOME: 0,
    FrameKind.READ: _READ.size + KEY_BYTES * limits.MAX_KEYS_PER_CALL,
    FrameKind.DATA: _DATA.size + limits.MAX_KEYS_PER_CALL + 8 * MAX_CHECKSUMS_PER_DATA,
    FrameKind.READ_END: 0,
    FrameKind.WRITE: _WRITE.size + KEY_BYTES * limits.MAX_KEYS_PER_CALL,
    FrameKind.GRANT: _COUNT.size + limits.MAX_KEYS_PER_CALL,
    FrameKind.PAYLOAD: 0,
    FrameKind.WRITTEN: _COUNT.size + limits.MAX_KEYS_PER_CALL,
    FrameKind.ERROR: _ERROR.size + 64 + MAX_MESSAGE_BYTES,
    FrameKind.PING: 0,
    FrameKind.PONG: 0,
    FrameKind.CHECKSUMS: limits.MAX_FRAME_HEADER_BYTES,
    FrameKind.LAYERS: _LAYERS.size,
    FrameKind.ATTACH: 64 + limits.MAX_AGENT_BYTES,
    FrameKind.ATTACHED: 64 + limits.MAX_AGENT_BYTES,
    FrameKind.FETCH: 64 + _READ.size + (KEY_BYTES + 8) * limits.MAX_KEYS_PER_CALL,
    FrameKind.PLACED: 64 + _DATA.size + 9 * limits.MAX_KEYS_PER_CALL + 8 * MAX_CHECKSUMS_PER_DATA,
    FrameKind.TAKEN: 0,
}
"""Maximum header length of each kind of frame."""

_WITH_PAYLOAD = (FrameKind.DATA, FrameKind.PAYLOAD, FrameKind.LAYERS)
MAX_PAYLOAD_BYTES = limits.MAX_KEYS_PER_CALL * limits.MAX_BLOCK_BYTES

_KINDS = {int(kind): kind for kind in FrameKind}
_OUTCOMES = {int(outcome): outcome for outcome in Outcome}
_STORE_OUTCOMES = {int(outcome): outcome for outcome in StoreOutcome}
_TIERS = {int(tier): tier for tier in Tier}
_ERRORS: dict[str, type[KVStoreError]] = {
    str(found.kind): found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, KVStoreError)
}
_ERRORS[str(ErrorKind.INTERNAL)] = errors.Internal  # the base class has the same kind


class BadFrame(InvalidArgument):
    """The bytes are not a frame of this protocol. The two sides are no longer in step, so the connection is closed."""


@dataclass(frozen=True, slots=True)
class Head:
    """The fixed start of a frame."""

    kind: FrameKind
    request_id: int
    header_bytes: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class ReadFrame:
    """A READ: layers ``[first_layer, first_layer + layer_count)`` of ``keys``."""

    namespace: NamespaceId
    keys: Sequence[BlockKey]
    shape: BlockShape
    first_layer: int
    layer_count: int
    layer_group: int
    budget_ms: int
    """Time left until the caller's deadline. A deadline itself cannot be sent, because the clocks of two hosts differ."""


@dataclass(frozen=True, slots=True)
class DataFrame:
    """A DATA header. Its payload holds layers ``[first_layer, first_layer + layer_count)`` of each HIT, in order."""

    first: int
    outcomes: bytes
    """One ``Outcome`` per key, from key ``first`` of the request on."""
    hits: int
    first_layer: int
    layer_count: int
    tier: Tier
    checksums: Checksums
    """``[hits, layer_count]``."""


@dataclass(frozen=True, slots=True)
class WriteFrame:
    """A WRITE: requests slots for a run."""

    run: BlockRun
    shape: BlockShape
    durable: bool
    budget_ms: int
    layerwise: bool = False
    """Its bytes are sent layer by layer."""
    tail: bool = False
    """Its last key is a partial block, which is handed over and not kept."""


def encode_head(kind: FrameKind, request_id: int, header_bytes: int = 0, payload_bytes: int = 0) -> bytes:
    """Return the head of a frame. WELCOME, READ_END, PAYLOAD, PING and PONG have nothing but a head."""
    return HEAD.pack(MAGIC, kind, VERSION, 0, request_id, header_bytes, payload_bytes)


def decode_head(data: bytes | bytearray | memoryview) -> Head:
    """Decode a head, and check the lengths against the limits of its kind.

    Raises:
        BadFrame: wrong magic or version, an unknown kind, or a length above its limit.
    """
    if len(data) != HEAD_BYTES:
        raise BadFrame("a frame must begin with a head", bytes=len(data), expected=HEAD_BYTES)
    magic, code, version, zero, request_id, header_bytes, payload_bytes = HEAD.unpack(data)
    if magic != MAGIC:
        raise BadFrame("not a frame of the block protocol", magic=bytes(magic).hex())
    if version != VERSION:
        raise BadFrame("unsupported version of the block protocol", version=version, ours=VERSION)
    if zero:
        raise BadFrame("the reserved field of a head must be 0 in this version", reserved=zero, version=version)
    kind = _KINDS.get(code)
    if kind is None:
        raise BadFrame("unknown frame kind", kind=code)
    if header_bytes > HEADER_LIMITS[kind]:
        raise BadFrame("frame header too long", kind=kind.name, bytes=header_bytes, limit=HEADER_LIMITS[kind])
    if payload_bytes > (MAX_PAYLOAD_BYTES if kind in _WITH_PAYLOAD else 0):
        raise BadFrame("frame payload too long", kind=kind.name, bytes=payload_bytes)
    return Head(kind, request_id, header_bytes, payload_bytes)


def encode_hello(ticket: bytes) -> bytes:
    """Return a HELLO frame.

    Raises:
        InvalidArgument: the ticket is too long.
    """
    if len(ticket) > limits.MAX_TICKET_BYTES:
        raise InvalidArgument("ticket too long", bytes=len(ticket), limit=limits.MAX_TICKET_BYTES)
    return encode_head(FrameKind.HELLO, 0, _HELLO.size + len(ticket)) + _HELLO.pack(0, len(ticket)) + ticket


def decode_hello(header: bytes) -> bytes:
    """Decode the header of a HELLO; return its ticket."""
    _need(header, _HELLO.size, FrameKind.HELLO)
    zero, length = _HELLO.unpack_from(header)
    if zero or len(header) != _HELLO.size + length:
        raise BadFrame("malformed HELLO", bytes=len(header), ticket_bytes=length)
    return header[_HELLO.size :]


def encode_read(request_id: int, frame: ReadFrame) -> bytes:
    """Return a READ frame."""
    header = _READ.pack(
        frame.namespace,
        frame.shape.layers,
        frame.shape.layer_block_bytes,
        frame.first_layer,
        frame.layer_count,
        frame.layer_group,
        frame.budget_ms,
        len(frame.keys),
    )
    keys = b"".join(frame.keys)
    return encode_head(FrameKind.READ, request_id, len(header) + len(keys)) + header + keys


def decode_read(header: bytes) -> ReadFrame:
    """Decode the header of a READ.

    Raises:
        BadFrame: lengths disagree, there are too many keys, or the shape or layer range is out of bounds.
    """
    _need(header, _READ.size, FrameKind.READ)
    namespace, layers, layer_block_bytes, first_layer, layer_count, layer_group, budget_ms, count = _READ.unpack_from(header)
    if count > limits.MAX_KEYS_PER_CALL or len(header) != _READ.size + KEY_BYTES * count:
        raise BadFrame("READ with a wrong number of keys", keys=count, bytes=len(header))
    shape = check_shape(layers, layer_block_bytes)
    if not (0 < layer_count <= layers - first_layer and layer_group <= layers):
        raise BadFrame(
            "layers outside the block shape",
            layers=layers,
            first_layer=first_layer,
            layer_count=layer_count,
            layer_group=layer_group,
        )
    keys = _split_keys(header, _READ.size, count)
    return ReadFrame(NamespaceId(namespace), keys, shape, first_layer, layer_count, layer_group, budget_ms)


def encode_data(request_id: int, frame: DataFrame, payload_bytes: int) -> bytes:
    """Return head and header of a DATA frame; the payload follows."""
    checksums = np.ascontiguousarray(frame.checksums, "<u8").tobytes()
    header = _DATA.pack(
        frame.first, len(frame.outcomes), frame.hits, frame.first_layer, frame.layer_count, frame.tier, 0
    )  # fmt: skip
    head = encode_head(FrameKind.DATA, request_id, len(header) + len(frame.outcomes) + len(checksums), payload_bytes)
    return b"".join((head, header, frame.outcomes, checksums))


def decode_data(header: bytes, payload_bytes: int, layer_block_bytes: int) -> DataFrame:
    """Decode the header of a DATA.

    Args:
        header: bytes of the header.
        payload_bytes: payload length, from the head.
        layer_block_bytes: Layer block size of the requested namespace, from which the expected payload length follows.

    Raises:
        BadFrame: lengths disagree, or an outcome or the tier is unknown.
    """
    _need(header, _DATA.size, FrameKind.DATA)
    first, count, hits, first_layer, layer_count, tier, zero = _DATA.unpack_from(header)
    if zero or tier not in _TIERS or hits > count or count > limits.MAX_KEYS_PER_CALL or not 0 < layer_count <= limits.MAX_LAYERS:
        raise BadFrame("malformed DATA", keys=count, hits=hits, layer_count=layer_count, tier=tier)
    at = _DATA.size + count
    if len(header) != at + 8 * hits * layer_count or payload_bytes != hits * layer_count * layer_block_bytes:
        raise BadFrame("DATA with a wrong length", bytes=len(header), payload_bytes=payload_bytes, hits=hits)
    outcomes = header[_DATA.size : at]
    _check_codes(outcomes, _OUTCOMES, FrameKind.DATA)
    if outcomes.count(Outcome.HIT) != hits:
        raise BadFrame("DATA with a wrong number of hits", hits=hits)
    # a copy, because the checksums may begin at any byte and uint64 must be aligned
    checksums = np.frombuffer(header, "<u8", hits * layer_count, at).astype(np.uint64).reshape(hits, layer_count)
    return DataFrame(first, outcomes, hits, first_layer, layer_count, _TIERS[tier], checksums)


def max_write_keys(layers: int) -> int:
    """Return the maximum number of keys in one WRITE, so that all their checksums fit one frame."""
    return min(limits.MAX_KEYS_PER_CALL, limits.MAX_FRAME_HEADER_BYTES // (8 * layers))


def encode_write(request_id: int, frame: WriteFrame) -> bytes:
    """Return a WRITE frame."""
    run, shape = frame.run, frame.shape
    header = _WRITE.pack(
        run.namespace,
        _NO_PARENT if run.parent is None else run.parent,
        (0 if run.parent is None else _HAS_PARENT)
        | (_DURABLE if frame.durable else 0)
        | (_LAYERWISE if frame.layerwise else 0)
        | (_TAIL if frame.tail else 0),
        run.depth,
        shape.layers,
        shape.layer_block_bytes,
        frame.budget_ms,
        len(run.keys),
    )
    head = encode_head(FrameKind.WRITE, request_id, len(header) + KEY_BYTES * len(run.keys))
    return b"".join((head, header, *run.keys))


def decode_write(header: bytes) -> WriteFrame:
    """Decode the header of a WRITE.

    Raises:
        BadFrame: lengths disagree, a flag is unknown, or the shape, depth or number of keys is out of bounds.
    """
    _need(header, _WRITE.size, FrameKind.WRITE)
    namespace, parent, flags, depth, layers, layer_block_bytes, budget_ms, count = _WRITE.unpack_from(header)
    shape = check_shape(layers, layer_block_bytes)
    if not 0 < count <= max_write_keys(layers) or len(header) != _WRITE.size + KEY_BYTES * count:
        raise BadFrame("WRITE with a wrong number of keys", keys=count, layers=layers, bytes=len(header))
    if flags & ~(_HAS_PARENT | _DURABLE | _LAYERWISE | _TAIL) or depth + count > limits.MAX_DEPTH:
        raise BadFrame("malformed WRITE", flags=flags, depth=depth)
    if not flags & _HAS_PARENT and parent != _NO_PARENT:
        raise BadFrame("WRITE with a parent but without the parent flag")
    keys = tuple(_split_keys(header, _WRITE.size, count))
    run = BlockRun(NamespaceId(namespace), BlockKey(parent) if flags & _HAS_PARENT else None, depth, keys)
    return WriteFrame(run, shape, bool(flags & _DURABLE), budget_ms, bool(flags & _LAYERWISE), bool(flags & _TAIL))


def encode_layers(request_id: int, first_layer: int, layer_count: int, payload_bytes: int) -> bytes:
    """Return a LAYERS frame up to its payload, which holds these layers of each granted block, in order."""
    return encode_head(FrameKind.LAYERS, request_id, _LAYERS.size, payload_bytes) + _LAYERS.pack(first_layer, layer_count)


def decode_layers(header: bytes, layers: int) -> tuple[int, int]:
    """Decode the header of a LAYERS; return the first layer and the number of layers.

    Raises:
        BadFrame: the layers are outside the block shape.
    """
    if len(header) != _LAYERS.size:
        raise BadFrame("malformed LAYERS", bytes=len(header))
    first_layer, layer_count = _LAYERS.unpack(header)
    if not 0 < layer_count <= layers - first_layer:
        raise BadFrame("layers outside the block shape", layers=layers, first_layer=first_layer, layer_count=layer_count)
    return first_layer, layer_count


def encode_checksums(request_id: int, checksums: Checksums) -> bytes:
    """Return a CHECKSUMS frame."""
    header = np.ascontiguousarray(checksums, "<u8").tobytes()
    return encode_head(FrameKind.CHECKSUMS, request_id, len(header)) + header


def decode_checksums(header: bytes, blocks: int, layers: int) -> Checksums:
    """Decode the header of a CHECKSUMS; return an array ``[blocks, layers]``.

    Raises:
        BadFrame: wrong number of checksums.
    """
    if len(header) != 8 * blocks * layers:
        raise BadFrame("CHECKSUMS with a wrong number of blocks", blocks=blocks, bytes=len(header))
    return np.frombuffer(header, "<u8").astype(np.uint64, copy=False).reshape(blocks, layers)


def encode_store_outcomes(kind: FrameKind, request_id: int, outcomes: Sequence[StoreOutcome]) -> bytes:
    """Return a GRANT or WRITTEN frame."""
    return encode_head(kind, request_id, _COUNT.size + len(outcomes)) + _COUNT.pack(len(outcomes)) + bytes(outcomes)


def decode_store_outcomes(header: bytes, expected: int) -> list[StoreOutcome]:
    """Decode the header of a GRANT or WRITTEN that answers ``expected`` keys.

    Raises:
        BadFrame: wrong number of outcomes, or an unknown outcome.
    """
    _need(header, _COUNT.size, FrameKind.GRANT)
    (count,) = _COUNT.unpack_from(header)
    codes = header[_COUNT.size :]
    if count != expected or len(codes) != expected:
        raise BadFrame("answer with a wrong number of keys", keys=count, bytes=len(codes), expected=expected)
    _check_codes(codes, _STORE_OUTCOMES, FrameKind.GRANT)
    return [_STORE_OUTCOMES[code] for code in codes]


def encode_error(request_id: int, error: KVStoreError) -> bytes:
    """Return an ERROR frame. A message that is too long is truncated."""
    kind = str(error.kind).encode()
    message = str(error).encode("utf-8", "replace")[:MAX_MESSAGE_BYTES]
    header = _ERROR.pack(len(kind), len(message)) + kind + message
    return encode_head(FrameKind.ERROR, request_id, len(header)) + header


def decode_error(header: bytes) -> KVStoreError:
    """Decode the header of an ERROR. An unknown kind, e.g. of a later version, becomes ``Internal``."""
    _need(header, _ERROR.size, FrameKind.ERROR)
    kind_bytes, message_bytes = _ERROR.unpack_from(header)
    if len(header) != _ERROR.size + kind_bytes + message_bytes:
        raise BadFrame("malformed ERROR", bytes=len(header))
    kind = header[_ERROR.size : _ERROR.size + kind_bytes].decode("ascii", "replace")
    message = header[_ERROR.size + kind_bytes :].decode("utf-8", "replace")
    return _ERRORS.get(kind, errors.Internal)(message)


def check_shape(layers: int, layer_block_bytes: int) -> BlockShape:
    """Return a block shape, if it is within the limits.

    Raises:
        BadFrame: the shape exceeds a limit.
    """
    if not (
        0 < layers <= limits.MAX_LAYERS
        and limits.MIN_LAYER_BLOCK_BYTES <= layer_block_bytes <= limits.MAX_LAYER_BLOCK_BYTES
        and layers * layer_block_bytes <= limits.MAX_BLOCK_BYTES
    ):
        raise BadFrame("block shape exceeds the limits", layers=layers, layer_block_bytes=layer_block_bytes)
    return BlockShape(layers, layer_block_bytes)


def _need(header: bytes, size: int, kind: FrameKind) -> None:
    if len(header) < size:
        raise BadFrame("frame header too short", kind=kind.name, bytes=len(header), expected=size)


def _split_keys(header: bytes, at: int, count: int) -> list[BlockKey]:
    # three times as fast as slicing; unlike "S16", a void keeps trailing zero bytes
    return cast("list[BlockKey]", np.frombuffer(header, f"V{KEY_BYTES}", count, at).tolist())


def _check_codes(codes: bytes, known: dict[int, Outcome] | dict[int, StoreOutcome], kind: FrameKind) -> None:
    if unknown := set(codes).difference(known):
        raise BadFrame("unknown outcome", kind=kind.name, code=min(unknown))
