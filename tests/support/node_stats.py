"""Statistics and counters of a running node."""

from __future__ import annotations

import grpc

from kvproto.v1 import node_pb2, node_pb2_grpc
from kvstore.embedded.cluster import LocalCluster

TIMEOUT_S = 5.0


def node_stats(cluster: LocalCluster, node: str) -> node_pb2.GetNodeStatsResponse:
    """Ask a node for its statistics."""
    with grpc.insecure_channel(cluster.node(node).address) as channel:
        return node_pb2_grpc.NodeStub(channel).GetNodeStats(node_pb2.GetNodeStatsRequest(), timeout=TIMEOUT_S)


def node_counter(cluster: LocalCluster, node: str, name: str) -> int:
    """Return a counter of a node; 0 if it was never counted."""
    return int(node_stats(cluster, node).counters.get(name, 0))
