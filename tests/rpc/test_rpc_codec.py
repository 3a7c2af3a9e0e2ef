"""Codec: valid messages are decoded unchanged; invalid ones are rejected before memory is allocated for them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.v1 import common_pb2
from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.core.spec import CacheSpec, HashAlgorithm
from kvstore.core.types import BlockKey, BlockRun, NamespaceId, Tier
from kvstore.rpc import codec

ID = st.binary(min_size=16, max_size=16)
RUNS = st.builds(
    lambda namespace, parent, depth, keys: BlockRun(
        NamespaceId(namespace), BlockKey(parent) if depth else None, depth, tuple(BlockKey(key) for key in keys)
    ),
    ID,
    ID,
    st.integers(0, limits.MAX_DEPTH - 20),
    st.lists(ID, min_size=1, max_size=20),
)
SHOWN = st.characters(codec="utf-8").filter(str.isprintable)
SPECS = st.builds(
    CacheSpec,
    model=st.text(SHOWN, min_size=1, max_size=20),
    weights_epoch=st.text(SHOWN, max_size=20),
    block_tokens=st.integers(1, limits.MAX_BLOCK_TOKENS),
    layers=st.integers(1, 16),
    layer_block_bytes=st.integers(1, 1 << 20),
    hash_algorithm=st.sampled_from(HashAlgorithm),
    shard_count=st.just(4),
    shard_rank=st.integers(0, 3),
    salt=st.binary(max_size=limits.MAX_SALT_BYTES),
)


@given(RUNS)
def test_runs_round_trip(run: BlockRun) -> None:
    message = common_pb2.BlockRun.FromString(codec.run_to_proto(run).SerializeToString())
    assert codec.run_from_proto(message) == run


@given(SPECS)
def test_specs_round_trip_with_same_digest(spec: CacheSpec) -> None:
    message = common_pb2.CacheSpec.FromString(codec.spec_to_proto(spec).SerializeToString())
    back = codec.spec_from_proto(message)
    assert back == spec
    assert back.namespace == spec.namespace


def test_spec_fields_all_round_trip() -> None:
    names = {field.name for field in common_pb2.CacheSpec.DESCRIPTOR.fields}
    assert names == set(CacheSpec.__dataclass_fields__)


@pytest.mark.parametrize(
    "message",
    [
        common_pb2.BlockRun(namespace_id=b"n" * 16, keys=b""),
        common_pb2.BlockRun(namespace_id=b"n" * 16, keys=b"k" * 17),
        common_pb2.BlockRun(namespace_id=b"n" * 15, keys=b"k" * 16),
        common_pb2.BlockRun(namespace_id=b"n" * 16, keys=b"k" * 16, parent=b"p" * 16),
        common_pb2.BlockRun(namespace_id=b"n" * 16, keys=b"k" * 16, depth=1),
        common_pb2.BlockRun(namespace_id=b"n" * 16, keys=b"k" * 16, depth=1, parent=b"p" * 15),
        common_pb2.BlockRun(namespace_id=b"n" * 16, keys=b"k" * 16, depth=2**32 - 1, parent=b"p" * 16),
        common_pb2.BlockRun(namespace_id=b"n" * 16, keys=b"k" * 16 * (limits.MAX_KEYS_PER_CALL + 1)),
    ],
    ids=["no keys", "torn key", "short namespace", "parent of head", "no parent", "short parent", "too deep", "too many"],
)
def test_malformed_runs_are_rejected(message: common_pb2.BlockRun) -> None:
    with pytest.raises(InvalidArgument):
        codec.run_from_proto(message)


def test_runs_are_limited_in_size_and_number() -> None:
    half = common_pb2.BlockRun(namespace_id=b"n" * 16, keys=b"k" * 16 * (limits.MAX_KEYS_PER_CALL // 2 + 1))
    codec.runs_from_proto([half])
    with pytest.raises(InvalidArgument, match="too many"):
        codec.runs_from_proto([half, half])
    with pytest.raises(InvalidArgument, match="too many"):
        codec.runs_from_proto([common_pb2.BlockRun()] * 11, limit=10)


@pytest.mark.parametrize(
    "change",
    [{"hash_algorithm": "md5"}, {"model": ""}, {"layers": 0}, {"layers": 2**32 - 1}, {"shard_rank": 4}, {"salt": b"s" * 257}],
    ids=str,
)
def test_malformed_specs_are_rejected(change: dict[str, object]) -> None:
    message = codec.spec_to_proto(CacheSpec(model="m", block_tokens=64, layers=2, layer_block_bytes=512, shard_count=4))
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(InvalidArgument):
        codec.spec_from_proto(message)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_packed_arrays_round_trip(values: list[int]) -> None:
    packed = codec.pack_u64(values)
    assert packed == b"".join(value.to_bytes(8, "little") for value in values)
    array = codec.unpack_u64(packed, "checksums", len(values))
    assert array.tolist() == values
    assert codec.pack_u64(array) == packed
    assert codec.pack_u64(np.array(values, ">u8")) == packed


def test_packed_arrays_wrong_length_are_rejected() -> None:
    with pytest.raises(InvalidArgument):
        codec.unpack_u64(b"1234567", "offsets")
    with pytest.raises(InvalidArgument):
        codec.unpack_u64(b"12345678", "offsets", 2)


@pytest.mark.parametrize("value", ["", "x" * 513, "a\nb", "a\x00b"])
def test_names_unsafe_in_logs_or_files_are_rejected(value: str) -> None:
    with pytest.raises(InvalidArgument):
        codec.check_name(value, "node_id")


@pytest.mark.parametrize("value", [0, 9])
def test_unspecified_and_unknown_tiers_are_rejected(value: int) -> None:
    with pytest.raises(InvalidArgument):
        codec.tier_from_proto(value)
    assert codec.tier_from_proto(common_pb2.TIER_NVME) is Tier.NVME


@pytest.mark.parametrize("tier", Tier)
def test_tiers_round_trip(tier: Tier) -> None:
    message = common_pb2.VolumeInfo(tier=codec.tier_to_proto(tier))
    assert codec.tier_from_proto(message.tier) is tier


@given(st.binary(max_size=200))
def test_packed_keys_are_split_or_rejected(packed: bytes) -> None:
    if len(packed) % 16:
        with pytest.raises(InvalidArgument):
            codec.keys_from_packed(packed)
    else:
        assert b"".join(codec.keys_from_packed(packed)) == packed
        assert codec.count_keys(packed) == len(packed) // 16
