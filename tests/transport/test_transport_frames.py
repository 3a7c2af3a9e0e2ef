"""The wire format: golden bytes, round trips, and refusal of invalid bytes before memory is allocated.

The golden file pins the protocol version. A change that alters it requires a new version.
"""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core import errors, limits
from kvstore.core.errors import ErrorKind, KVStoreError
from kvstore.core.types import BlockKey, BlockRun, BlockShape, NamespaceId, Outcome, StoreOutcome, Tier
from kvstore.transport.tcp import frames
from kvstore.transport.tcp.frames import BadFrame, DataFrame, FrameKind, ReadFrame, WriteFrame

GOLDEN = Path(__file__).parent / "golden" / "frames.json"

NAMESPACE = NamespaceId(bytes(range(16)))
KEYS = [BlockKey(bytes([at]) * 15 + b"\0") for at in range(3)]
READ = ReadFrame(NAMESPACE, KEYS, BlockShape(4, 4096), 1, 2, 1, 1500)
DATA = DataFrame(
    5, bytes([Outcome.HIT, Outcome.MISS, Outcome.HIT]), 2, 1, 2, Tier.NVME, np.array([[1, 2], [3, 1 << 63]], np.uint64)
)
WRITE = WriteFrame(
    BlockRun(NAMESPACE, BlockKey(b"p" * 16), 9, tuple(KEYS)),
    BlockShape(2, 100),
    True,
    250,
)
CHECKSUMS = np.array([[5, 1 << 63], [7, 8]], np.uint64)

SAMPLES = {
    "hello": frames.encode_hello(b"a ticket"),
    "welcome": frames.encode_head(FrameKind.WELCOME, 0),
    "read": frames.encode_read(7, READ),
    "data": frames.encode_data(7, DATA, 2 * 2 * 4096),
    "read_end": frames.encode_head(FrameKind.READ_END, 7),
    "write": frames.encode_write(8, WRITE),
    "grant": frames.encode_store_outcomes(FrameKind.GRANT, 8, [StoreOutcome.STORED, StoreOutcome.EXISTS, StoreOutcome.STORED]),
    "payload": frames.encode_head(FrameKind.PAYLOAD, 8, 0, 400),
    "checksums": frames.encode_checksums(8, CHECKSUMS),
    "written": frames.encode_store_outcomes(FrameKind.WRITTEN, 8, [StoreOutcome.STORED, StoreOutcome.CORRUPT]),
    "error": frames.encode_error(9, errors.PermissionDenied("not yours", key="k")),
    "ping": frames.encode_head(FrameKind.PING, 10),
    "pong": frames.encode_head(FrameKind.PONG, 10),
}


def split(frame: bytes) -> tuple[frames.Head, bytes]:
    head = frames.decode_head(frame[: frames.HEAD_BYTES])
    header = frame[frames.HEAD_BYTES :]
    assert head.header_bytes == len(header)
    return head, header


def test_encode_matches_golden_frames() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert {name: frame.hex() for name, frame in SAMPLES.items()} == golden


def test_decode_reads_golden_frames() -> None:
    golden = {name: bytes.fromhex(frame) for name, frame in json.loads(GOLDEN.read_text()).items()}
    assert frames.decode_hello(split(golden["hello"])[1]) == b"a ticket"
    assert frames.decode_read(split(golden["read"])[1]) == READ
    head, header = split(golden["data"])
    data = frames.decode_data(header, head.payload_bytes, 4096)
    assert (data.first, data.outcomes, data.hits, data.first_layer, data.layer_count, data.tier) == (
        5,
        DATA.outcomes,
        2,
        1,
        2,
        Tier.NVME,
    )
    assert np.array_equal(data.checksums, DATA.checksums)
    assert frames.decode_write(split(golden["write"])[1]) == WRITE
    assert np.array_equal(frames.decode_checksums(split(golden["checksums"])[1], 2, 2), CHECKSUMS)
    assert frames.decode_store_outcomes(split(golden["written"])[1], 2) == [StoreOutcome.STORED, StoreOutcome.CORRUPT]
    error = frames.decode_error(split(golden["error"])[1])
    assert isinstance(error, errors.PermissionDenied)
    assert str(error) == "not yours (key=k)"


def test_head_invalid_field_error_names_it() -> None:
    good = frames.encode_head(frames.FrameKind.PING, 1)
    assert frames.decode_head(good).kind is frames.FrameKind.PING
    with pytest.raises(frames.BadFrame, match=r"unsupported version .*version=9, ours="):
        frames.decode_head(good[:5] + b"\x09" + good[6:])
    with pytest.raises(frames.BadFrame, match="reserved field"):
        frames.decode_head(good[:6] + b"\x07\x00" + good[8:])


identities = st.binary(min_size=16, max_size=16)
shapes = st.builds(BlockShape, st.integers(1, 64), st.integers(1, 1 << 20))
budgets = st.integers(0, frames.MAX_BUDGET_MS)


@given(identities, st.lists(identities, max_size=40), shapes, budgets, st.data())
def test_read_round_trips(namespace: bytes, keys: list[bytes], shape: BlockShape, budget: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, shape.layers - 1))
    count = data.draw(st.integers(1, shape.layers - first))
    group = data.draw(st.integers(0, shape.layers))
    frame = ReadFrame(NamespaceId(namespace), [BlockKey(key) for key in keys], shape, first, count, group, budget)
    head, header = split(frames.encode_read(3, frame))
    assert (head.kind, head.request_id, head.payload_bytes) == (FrameKind.READ, 3, 0)
    assert frames.decode_read(header) == frame


@given(
    identities, identities | st.none(), st.lists(identities, min_size=1, max_size=20), shapes, st.booleans(), budgets, st.data()
)
def test_write_round_trips(
    namespace: bytes, parent: bytes | None, keys: list[bytes], shape: BlockShape, durable: bool, budget: int, data: st.DataObject
) -> None:
    depth = data.draw(st.integers(0, limits.MAX_DEPTH - len(keys)))
    run = BlockRun(
        NamespaceId(namespace), None if parent is None else BlockKey(parent), depth, tuple(BlockKey(key) for key in keys)
    )
    frame = WriteFrame(run, shape, durable, budget)
    assert frames.decode_write(split(frames.encode_write(1, frame))[1]) == frame


@given(st.integers(0, 40), st.integers(1, 80), st.integers(0, 1 << 32))
def test_checksums_round_trip(blocks: int, layers: int, seed: int) -> None:
    checksums = np.random.default_rng(seed).integers(0, 1 << 64, (blocks, layers), np.uint64)
    header = split(frames.encode_checksums(3, checksums))[1]
    assert np.array_equal(frames.decode_checksums(header, blocks, layers), checksums)
    with pytest.raises(BadFrame):
        frames.decode_checksums(header, blocks + 1, layers)


@settings(max_examples=10)
@given(st.integers(1, limits.MAX_LAYERS))
def test_write_too_many_keys_for_checksums_is_refused(layers: int) -> None:
    limit = frames.max_write_keys(layers)
    assert 0 < limit <= limits.MAX_KEYS_PER_CALL
    assert 8 * limit * layers <= frames.HEADER_LIMITS[FrameKind.CHECKSUMS]
    for count in (limit, limit + 1):
        run = BlockRun(NAMESPACE, None, 0, (KEYS[0],) * count)
        frame = WriteFrame(run, BlockShape(layers, limits.MIN_LAYER_BLOCK_BYTES), False, 1)
        header = frames.encode_write(1, frame)[frames.HEAD_BYTES :]
        if count > limit:
            with pytest.raises(BadFrame):
                frames.decode_write(header)
        else:
            assert frames.decode_write(header).run == run


@given(st.lists(st.sampled_from(Outcome), max_size=60), st.integers(1, 8), st.integers(1, 5000), st.sampled_from(Tier))
def test_data_round_trips(outcomes: list[Outcome], layers: int, layer_bytes: int, tier: Tier) -> None:
    hits = outcomes.count(Outcome.HIT)
    checksums = np.arange(hits * layers, dtype=np.uint64).reshape(hits, layers)
    frame = DataFrame(11, bytes(outcomes), hits, 3, layers, tier, checksums)
    head, header = split(frames.encode_data(1, frame, hits * layers * layer_bytes))
    found = frames.decode_data(header, head.payload_bytes, layer_bytes)
    assert (found.first, found.outcomes, found.hits, found.first_layer, found.tier) == (11, bytes(outcomes), hits, 3, tier)
    assert np.array_equal(found.checksums, checksums)


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_error_of_every_kind_round_trips(kind: ErrorKind) -> None:
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, KVStoreError)]
    error = next(value for value in reversed(found) if value.kind is kind)("a long message " * 500)
    arrived = frames.decode_error(split(frames.encode_error(1, error))[1])
    assert type(arrived) is type(error)
    assert arrived.message.startswith("a long message")
    assert len(arrived.message) <= frames.MAX_MESSAGE_BYTES


def test_error_unknown_kind_becomes_internal() -> None:
    frame = frames.encode_error(1, errors.Conflict("x")).replace(b"conflict", b"novelty!")
    assert type(frames.decode_error(split(frame)[1])) is errors.Internal


DECODERS = {
    "hello": frames.decode_hello,
    "read": frames.decode_read,
    "data": lambda header: frames.decode_data(header, 2 * 2 * 4096, 4096),
    "write": frames.decode_write,
    "checksums": lambda header: frames.decode_checksums(header, 2, 2),
    "written": lambda header: frames.decode_store_outcomes(header, 2),
    "error": frames.decode_error,
}


@pytest.mark.parametrize("name", DECODERS)
@given(st.binary(max_size=300))
def test_header_random_bytes_are_refused(name: str, header: bytes) -> None:
    with contextlib.suppress(BadFrame):  # any other exception is a bug
        DECODERS[name](header)


@pytest.mark.parametrize("name", DECODERS)
@given(st.data())
def test_header_damaged_is_refused_or_valid(name: str, data: st.DataObject) -> None:
    """A truncated, extended or changed header is refused with ``BadFrame``, or decodes to a frame within all limits."""
    header = bytearray(split(SAMPLES[name])[1])
    for _ in range(data.draw(st.integers(0, 3))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    change = data.draw(st.integers(-len(header), 8))
    damaged = bytes(header[:change]) if change < 0 else bytes(header) + bytes(change)
    try:
        found = DECODERS[name](damaged)
    except BadFrame:
        return
    if isinstance(found, (ReadFrame, WriteFrame)):
        frames.check_shape(found.shape.layers, found.shape.layer_block_bytes)
    if isinstance(found, ReadFrame):
        assert 0 < found.layer_count <= found.shape.layers - found.first_layer


@given(st.binary(min_size=frames.HEAD_BYTES, max_size=frames.HEAD_BYTES))
def test_head_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadFrame):
        frames.decode_head(data)  # four correct magic bytes by chance are practically impossible


@given(st.sampled_from(FrameKind), st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1))
def test_head_lengths_above_limits_are_refused(kind: FrameKind, header_bytes: int, payload_bytes: int) -> None:
    data = frames.HEAD.pack(frames.MAGIC, kind, frames.VERSION, 0, 1, header_bytes, payload_bytes)
    try:
        head = frames.decode_head(data)
    except BadFrame:
        return
    assert head.header_bytes <= frames.HEADER_LIMITS[kind] <= limits.MAX_FRAME_HEADER_BYTES
    assert head.payload_bytes <= frames.MAX_PAYLOAD_BYTES


@pytest.mark.parametrize("data", [b"", b"KVB1", frames.encode_head(FrameKind.PING, 1) + b"\0"])
def test_head_wrong_length_is_refused(data: bytes) -> None:
    with pytest.raises(BadFrame):
        frames.decode_head(data)


def test_head_other_version_is_refused() -> None:
    data = bytearray(frames.encode_head(FrameKind.PING, 1))
    data[5] = frames.VERSION + 1
    with pytest.raises(BadFrame, match="version"):
        frames.decode_head(data)


def test_header_false_counts_allocate_nothing() -> None:
    """A short header with counts of billions is refused without allocating memory for them."""
    cases = [
        (frames.decode_read, bytearray(split(SAMPLES["read"])[1]), 40),
        (frames.decode_write, bytearray(split(SAMPLES["write"])[1]), 52),
        (DECODERS["data"], bytearray(split(SAMPLES["data"])[1]), 4),
        (DECODERS["data"], bytearray(split(SAMPLES["data"])[1]), 8),
        (DECODERS["written"], bytearray(split(SAMPLES["written"])[1]), 0),
    ]
    tracemalloc.start()
    try:
        for decode, header, at in cases:
            header[at : at + 4] = b"\xff\xff\xff\xff"
            with pytest.raises(BadFrame):
                decode(bytes(header))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
