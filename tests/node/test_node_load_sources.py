"""Sources of a load come from clients: their ids are valid, and name the node at their address."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc, node_pb2
from kvstore.core.errors import InvalidArgument, PermissionDenied
from kvstore.core.limits import MAX_NAME_BYTES, MAX_SOURCES
from kvstore.core.types import NodeId
from kvstore.node.loads.peers import PeerAddress
from kvstore.node.rpc.service import load_sources
from kvstore.node.rpc.trusted_nodes import TrustedNodes
from kvstore.rpc.auth.tokens import TokenSource

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


def test_trusted_address_names_its_own_node(metadata: str) -> None:
    """Otherwise a tenant could blame a fast node for the slow loads of another."""
    trusted = TrustedNodes(metadata, None, TokenSource("a-token-of-the-node"))
    for data_address in ("h1:2", "h1:3"):
        trusted.check(PeerAddress(NodeId("a"), "h1:1", data_address))
    for node_id, control_address, data_address in (("b", "h1:1", "h1:2"), ("a", "h1:1", "h2:2"), ("c", "h1:1", "h1:2")):
        with pytest.raises(PermissionDenied, match="no node of this store has this address"):
            trusted.check(PeerAddress(NodeId(node_id), control_address, data_address))
