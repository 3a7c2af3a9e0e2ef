"""Tests of hostile callers: typed errors, and no lost blocks of others."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from metadata_harness import NAMESPACE, TIMEOUT_S, run_of, server_process

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import BlockRun, NodeInfo, VolumeInfo
from kvproto.v1.metadata_pb2_grpc import MetadataStub
from kvstore.core.errors import ErrorKind
from kvstore.rpc.client import connect
from kvstore.rpc.errors import from_rpc_error
from support.chains import chain

KEYS = chain("good", 100)
GOOD, EVIL = "good", "evil"
BOOT = {GOOD: b"g" * 16, EVIL: b"e" * 16}
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetadataStub]:
    """A real server with one good node that holds a chain, and one evil node that is registered too."""
    folder: Path = tmp_path_factory.mktemp("hostile")
    with server_process(folder, ttl_ms=600_000) as server:
        channel = connect(server.address)
        stub = MetadataStub(channel)
        for name in (GOOD, EVIL):
            stub.RegisterNode(pb.RegisterNodeRequest(operation_id=secrets.token_bytes(16), node=info(name)), timeout=TIMEOUT_S)
        list(stub.Publish(iter([batch(GOOD, 1, [run_of(KEYS)])]), timeout=TIMEOUT_S))
        yield stub
        assert "rpc_unexpected_errors_total" not in stub.GetStats(pb.GetStatsRequest(), timeout=TIMEOUT_S).counters
        channel.close()
        assert server.stop() == 0


def info(name: str) -> NodeInfo:
    return NodeInfo(
        node_id=name,
        boot_id=BOOT[name],
        control_address="127.0.0.1:1",
        data_address="127.0.0.1:2",
        volumes=[VolumeInfo(volume_id=f"{name}/nvme0", tier="TIER_NVME", capacity_bytes=1)],
    )


def batch(name: str, sequence: int, stored: list[BlockRun]) -> pb.PublishRequest:
    return pb.PublishRequest(
        node_id=name, boot_id=BOOT[name], sequence=sequence, volume_id=f"{name}/nvme0", stored=stored, sync_end=True
    )


def nothing_is_lost(stub: MetadataStub) -> None:
    """The good node's chain is served in full by the good node."""
    answer = stub.Lookup(pb.LookupRequest(namespace_id=NAMESPACE, keys=b"".join(KEYS)), timeout=TIMEOUT_S)
    assert answer.hit_blocks == len(KEYS)
    assert any((run.start, run.count, answer.nodes[run.node].node_id) == (0, len(KEYS), GOOD) for run in answer.runs)


def typed(error: grpc.RpcError) -> None:
    """A typed error other than Internal."""
    assert from_rpc_error(error).kind is not ErrorKind.INTERNAL, error  # type: ignore[arg-type]


some_bytes = st.one_of(st.binary(max_size=40), st.just(b"x" * 16), st.sampled_from(KEYS), st.just(NAMESPACE))
packed = st.one_of(st.binary(max_size=64), st.lists(st.sampled_from(KEYS), max_size=5).map(b"".join))
u32 = st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1))
names = st.one_of(st.sampled_from([EVIL, GOOD, f"{EVIL}/nvme0", f"{GOOD}/nvme0"]), st.text(max_size=8))
block_runs = st.builds(BlockRun, namespace_id=some_bytes, parent=some_bytes, depth=u32, keys=packed)
publishes = st.builds(
    pb.PublishRequest,
    node_id=st.one_of(st.just(EVIL), names),
    boot_id=st.one_of(st.just(BOOT[EVIL]), some_bytes),
    sequence=st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1)),
    volume_id=st.one_of(st.just(f"{EVIL}/nvme0"), names),
    stored=st.lists(block_runs, max_size=4),
    removed=packed,
    sync_end=st.booleans(),
)


@SETTINGS
@given(messages=st.lists(publishes, min_size=1, max_size=4))
def test_hostile_publish_gets_typed_errors(stub: MetadataStub, messages: list[pb.PublishRequest]) -> None:
    last = 0
    try:
        for answer in stub.Publish(iter(messages), timeout=TIMEOUT_S):
            assert answer.sequence >= last
            last = answer.sequence
    except grpc.RpcError as error:
        typed(error)
    nothing_is_lost(stub)


@SETTINGS
@given(
    request=st.builds(
        pb.RepairRangesRequest,
        operation_id=some_bytes,
        node_id=st.one_of(st.just(EVIL), names),
        boot_id=st.one_of(st.just(BOOT[EVIL]), some_bytes),
        volume_id=st.one_of(st.just(f"{EVIL}/nvme0"), names),
        ranges=st.lists(st.one_of(u32, st.sampled_from([key[0] << 4 | key[1] >> 4 for key in KEYS])), max_size=70),
        blocks=st.lists(block_runs, max_size=3),
    )
)
def test_hostile_repair_gets_typed_errors(stub: MetadataStub, request: pb.RepairRangesRequest) -> None:
    try:
        stub.RepairRanges(request, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        typed(error)
    nothing_is_lost(stub)


@SETTINGS
@given(
    operation_id=some_bytes,
    node=st.builds(
        NodeInfo,
        node_id=names.filter(lambda name: name != GOOD),  # only the good node may announce a new boot of itself
        boot_id=some_bytes,
        roles=st.lists(st.one_of(st.sampled_from(["prefill", "storage"]), st.text(max_size=4)), max_size=4),
        control_address=st.text(max_size=20),
        data_address=st.text(max_size=20),
        local_socket=st.text(max_size=5),
        volumes=st.lists(
            st.builds(VolumeInfo, volume_id=names, tier=st.integers(0, 9), capacity_bytes=st.integers(0, 2**64 - 1)), max_size=4
        ),
    ),
)
def test_hostile_register_gets_typed_errors(stub: MetadataStub, operation_id: bytes, node: NodeInfo) -> None:
    try:
        stub.RegisterNode(pb.RegisterNodeRequest(operation_id=operation_id, node=node), timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        typed(error)
    nothing_is_lost(stub)
