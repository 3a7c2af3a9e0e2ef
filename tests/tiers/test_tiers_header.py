"""Slot headers and superblocks: golden bytes that today's code must read and write, and invalid bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import CorruptBlock, InvalidArgument
from kvstore.core.types import BlockKey, BlockShape, NamespaceId, VolumeId
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.nvme.slot_header import SlotHeader, check_shape, header_bytes, pack_header, parse_header, slot_bytes
from kvstore.tiers.nvme.superblock import Superblock, UnknownVersion, newest_superblock, pack_superblock, parse_superblock

GOLDEN = Path(__file__).parent / "golden"

HEADER = SlotHeader(
    volume_uid=bytes(range(16)),
    slot=Slot(1 << 21, 12_288, (3 << 40) + 7),
    first_chunk=2,
    chunks=5,
    record=BlockRecord(
        NamespaceId(b"N" * 16),
        BlockKey(b"K" * 16),
        BlockKey(b"P" * 16),
        41,
        BlockShape(3, 2000),
        b"".join(number.to_bytes(8, "little") for number in (1, 1 << 63, 0xDEADBEEF)),
    ),
)
SUPERBLOCK = Superblock(bytes(range(16, 32)), VolumeId("node-1/nvme0 ü"), 1 << 30, 8 << 20, 12, 3)


def test_golden_header() -> None:
    """The format on disk does not change by accident: volumes outlive releases."""
    golden = (GOLDEN / "slot_header_v1.bin").read_bytes()
    assert pack_header(*HEADER) == golden
    assert parse_header(golden) == HEADER


def test_golden_superblock() -> None:
    golden = (GOLDEN / "superblock_v2.bin").read_bytes()
    assert pack_superblock(SUPERBLOCK) == golden
    assert parse_superblock(golden) == SUPERBLOCK


def test_superblock_of_version_1_is_refused_by_name() -> None:
    """It had no token, so its owner could not be fenced."""
    with pytest.raises(UnknownVersion, match=r"format version 1, .* knows version 2"):
        parse_superblock((GOLDEN / "superblock_v1.bin").read_bytes())


def test_newest_superblock_has_highest_token() -> None:
    """A fenced owner may write its next epoch late: the token of its successor wins."""
    late, newest = replace(SUPERBLOCK, epoch=99), replace(SUPERBLOCK, token=4)
    assert newest_superblock(pack_superblock(late) + pack_superblock(newest)) == (newest, 0)


records = st.builds(
    lambda layers, size, parent, depth, namespace, key: BlockRecord(
        NamespaceId(namespace), BlockKey(key), parent, depth, BlockShape(layers, size), bytes(8 * layers)
    ),
    layers=st.integers(1, 1024),
    size=st.integers(1, 200_000),
    parent=st.none() | st.binary(min_size=16, max_size=16).map(BlockKey),
    depth=st.integers(0, 1 << 24),
    namespace=st.binary(min_size=16, max_size=16),
    key=st.binary(min_size=16, max_size=16),
)


@given(record=records, page=st.integers(0, 1 << 40), generation=st.integers(1, (1 << 64) - 1))
def test_headers_round_trip(record: BlockRecord, page: int, generation: int) -> None:
    slot = Slot(page * 4096, slot_bytes(record.shape), generation)
    packed = pack_header(b"u" * 16, slot, 1, 2, record)
    assert len(packed) <= header_bytes(record.shape.layers) <= slot.size
    assert parse_header(packed + b"whatever follows") == SlotHeader(b"u" * 16, slot, 1, 2, record)


@given(position=st.integers(0, len(pack_header(*HEADER)) - 1), flip=st.integers(1, 255))
def test_header_flipped_bit_is_detected(position: int, flip: int) -> None:
    data = bytearray(pack_header(*HEADER))
    data[position] ^= flip
    with pytest.raises(CorruptBlock):
        parse_header(bytes(data))


@given(length=st.integers(0, len(pack_header(*HEADER)) - 1))
def test_header_truncated_is_detected(length: int) -> None:
    with pytest.raises(CorruptBlock):
        parse_header(pack_header(*HEADER)[:length])


@given(data=st.binary(max_size=600), prefix=st.booleans())
def test_header_random_bytes_are_rejected(data: bytes, prefix: bool) -> None:
    with pytest.raises(CorruptBlock):
        parse_header(b"KVSLOT\r\n" + data if prefix else data)
    with pytest.raises(CorruptBlock):
        parse_superblock((b"KVSLAB\r\n" if prefix else b"") + data + bytes(4096))


@pytest.mark.parametrize(
    "change",
    [
        {"slot": Slot(100, 12_288, 1)},
        {"slot": Slot(4096, 4096, 1)},
        {"slot": Slot(4096, 12_288, 0)},
    ],
    ids=str,
)
def test_header_valid_checksum_is_not_enough(change: dict[str, Slot]) -> None:
    with pytest.raises(CorruptBlock):
        parse_header(pack_header(*HEADER._replace(**change)))


def test_inconsistent_record_is_rejected() -> None:
    record = BlockRecord(NamespaceId(b"N" * 16), BlockKey(b"K" * 16), None, 0, BlockShape(2, 10), bytes(8))
    with pytest.raises(InvalidArgument):
        pack_header(*HEADER._replace(record=record))
    with pytest.raises(InvalidArgument):
        check_shape(BlockShape(1, 512 << 20))


def test_newest_valid_superblock_is_used() -> None:
    older, newer = (
        pack_superblock(SUPERBLOCK),
        pack_superblock(replace(SUPERBLOCK, epoch=13)),
    )
    torn = newer[:60] + bytes(4096 - 60)
    assert newest_superblock(older + newer)[0].epoch == 13
    assert newest_superblock(older + newer)[1] == 0  # the next one overwrites the older
    assert newest_superblock(newer + older)[1] == 4096
    assert newest_superblock(older + torn) == (SUPERBLOCK, 4096)  # ... or the damaged
    with pytest.raises(CorruptBlock):
        newest_superblock(torn + torn)
