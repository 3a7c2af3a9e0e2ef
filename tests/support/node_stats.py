"""Statistics and counters of a running node."""

from __future__ import annotations

import grpc

from kvproto.v1 import node_pb2, node_pb2_grpc
from kvstore.embedded.cluster import LocalCluster
from support.wait import wait_until

TIMEOUT_S = 5.0


def node_stats(cluster: LocalCluster, node: str) -> node_pb2.GetNodeStatsResponse:
    """Ask a node for its statistics."""
    with grpc.insecure_channel(cluster.node(node).address) as channel:
        return node_pb2_grpc.NodeStub(channel).GetNodeStats(node_pb2.GetNodeStatsRequest(), timeout=TIMEOUT_S)


def node_counter(cluster: LocalCluster, node: str, name: str) -> int:
    """Return a counter of a node; 0 if it was never counted."""
    return int(node_stats(cluster, node).counters.get(name, 0))


def empty_dram(cluster: LocalCluster, node: str) -> None:
    """Write all back, and evict until nothing is in DRAM."""
    with grpc.insecure_channel(cluster.node(node).address) as channel:
        stub = node_pb2_grpc.NodeStub(channel)
        assert stub.Flush(node_pb2.FlushRequest(timeout_ms=10_000), timeout=12).complete

        def is_empty() -> bool:
            stub.Evict(node_pb2.EvictRequest(operation_id=bytes(16), tier=2), timeout=10)  # type: ignore[arg-type]
            return node_stats(cluster, node).tiers[0].blocks == 0

        wait_until(is_empty)
