"""Sources of a load come from clients: their ids are valid, and name the node at their address."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc, node_pb2
from kvstore.core.chain import ChainSlice
from kvstore.core.errors import InvalidArgument, PermissionDenied
from kvstore.core.limits import MAX_NAME_BYTES, MAX_SOURCES, MAX_SOURCES_PER_BLOCK
from kvstore.core.types import BlockShape, NamespaceId, NodeId
from kvstore.node.loads.peers import PeerAddress
from kvstore.node.loads.runs import BlockRequest, SourceRange
from kvstore.node.rpc.service import load_sources
from kvstore.node.rpc.trusted_nodes import TrustedNodes
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.rpc.auth.tokens import TokenSource
from support.chains import key_of

LISTED = {
    "a": common_pb2.NodeInfo(node_id="a", control_address="h1:1", data_address="h1:2", storage_address="h1:3"),
    "b": common_pb2.NodeInfo(node_id="b", control_address="h2:1", data_address="h2:2"),
}


class Listing(metadata_pb2_grpc.MetadataServicer):
    """A metadata server that only lists its nodes."""

    def ListNodes(  # noqa: N802
        self, request: metadata_pb2.ListNodesRequest, context: grpc.ServicerContext
    ) -> metadata_pb2.ListNodesResponse:
        return metadata_pb2.ListNodesResponse(nodes=[metadata_pb2.NodeStatus(node=node) for node in LISTED.values()])


@pytest.fixture
def metadata() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    metadata_pb2_grpc.add_MetadataServicer_to_server(Listing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.parametrize("node_id", ["", "x" * (MAX_NAME_BYTES + 1), "host\n2", "é" * MAX_NAME_BYTES])
def test_load_source_with_invalid_id_is_refused(node_id: str) -> None:
    with pytest.raises(InvalidArgument, match="node_id"):
        load_sources([node_pb2.LoadSource(count=1, node_id=node_id)], "home")


def test_load_sources_leave_out_the_node_itself() -> None:
    one = node_pb2.LoadSource(start=1, count=2, node_id="b", control_address="h2:1", data_address="h2:2", volume_id="b/nvme0")
    (found,) = load_sources([node_pb2.LoadSource(count=1, node_id="home"), one], "home")
    assert (found.start, found.count, found.volume_id) == (1, 2, "b/nvme0")
    assert found.peer == PeerAddress(NodeId("b"), "h2:1", "h2:2")
    with pytest.raises(InvalidArgument, match="too many sources"):
        load_sources([one] * (MAX_SOURCES + 1), "home")


def request_of(count: int, ranges: Sequence[tuple[int, int]]) -> BlockRequest:
    namespace = NamespaceRegistry().of_shape(NamespaceId(bytes(16)), BlockShape(1, 8))
    chain = ChainSlice(namespace.namespace_id, [key_of("a", depth) for depth in range(count)])
    sources = [SourceRange(start, size, PeerAddress(NodeId(f"n{at}"), "", "")) for at, (start, size) in enumerate(ranges)]
    return BlockRequest(namespace, chain, 0.0, sources)


@given(
    count=st.integers(0, 12),
    ranges=st.lists(st.tuples(st.integers(-3, 14), st.integers(0, 14)), max_size=40),
    part=st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
def test_sources_of_block_are_its_first_ones(count: int, ranges: list[tuple[int, int]], part: tuple[int, int]) -> None:
    request = request_of(count, ranges)
    start, stop = sorted(min(count, end) for end in part)
    expected = [
        [source.peer for source in request.sources if source.start <= at < source.start + source.count][:MAX_SOURCES_PER_BLOCK]
        for at in range(count)
    ]
    found = [[source.peer for source in sources] for sources in request.sources_by_block()]
    assert found == expected
    named = sum(source.start <= at < source.start + source.count for source in request.sources for at in range(count))
    assert request.sources_ignored() == named - sum(map(len, expected))
    of_part = [[source.peer for source in sources] for sources in request.part(start, stop).sources_by_block()]
    assert of_part == expected[start:stop]


def test_sources_that_all_overlap_are_found_at_once() -> None:
    request = request_of(16_384, [(at % 7, 16_384) for at in range(MAX_SOURCES)])
    assert {len(sources) for sources in request.sources_by_block()} == {MAX_SOURCES_PER_BLOCK}
    assert request.sources_ignored() > 16_384 * (MAX_SOURCES - MAX_SOURCES_PER_BLOCK) - 7 * MAX_SOURCES


def test_trusted_address_names_its_own_node(metadata: str) -> None:
    """Otherwise a tenant could blame a fast node for the slow loads of another."""
    trusted = TrustedNodes(metadata, None, TokenSource("a-token-of-the-node"))
    for data_address in ("h1:2", "h1:3"):
        trusted.check(PeerAddress(NodeId("a"), "h1:1", data_address))
    for node_id, control_address, data_address in (("b", "h1:1", "h1:2"), ("a", "h1:1", "h2:2"), ("c", "h1:1", "h1:2")):
        with pytest.raises(PermissionDenied, match="no node of this store has this address"):
            trusted.check(PeerAddress(NodeId(node_id), control_address, data_address))
