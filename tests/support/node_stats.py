"""Statistics of a running node, and calls that empty its tiers."""

from __future__ import annotations

import secrets

import grpc

from kvproto.v1 import node_pb2, node_pb2_grpc
from kvstore.core.types import Tier
from kvstore.embedded.cluster import LocalCluster
from support.wait import wait_until

TIMEOUT_S = 10.0


def node_stats(cluster: LocalCluster, node: str) -> node_pb2.GetNodeStatsResponse:
    """Ask a node for its statistics."""
    with grpc.insecure_channel(cluster.node(node).address) as channel:
        return node_pb2_grpc.NodeStub(channel).GetNodeStats(node_pb2.GetNodeStatsRequest(), timeout=TIMEOUT_S)


def node_counter(cluster: LocalCluster, node: str, name: str) -> int:
    """Return a counter of a node; 0 if it was never counted."""
    return int(node_stats(cluster, node).counters.get(name, 0))


def evict(cluster: LocalCluster, node: str, tier: int = Tier.DRAM) -> int:
    """Evict all blocks of a tier that are not in use. Returns their number."""
    request = node_pb2.EvictRequest(operation_id=secrets.token_bytes(16), tier=tier)  # type: ignore[arg-type]
    with grpc.insecure_channel(cluster.node(node).address) as channel:
        return node_pb2_grpc.NodeStub(channel).Evict(request, timeout=TIMEOUT_S).evicted_blocks


def flush(cluster: LocalCluster, node: str, timeout_s: float = 10.0) -> bool:
    """Write all blocks back. Returns whether all are durable."""
    request = node_pb2.FlushRequest(timeout_ms=int(timeout_s * 1000))
    with grpc.insecure_channel(cluster.node(node).address) as channel:
        return node_pb2_grpc.NodeStub(channel).Flush(request, timeout=timeout_s + 2.0).complete


def empty_dram(cluster: LocalCluster, node: str) -> None:
    """Evict until nothing is in DRAM. One round may miss blocks, because leases are returned late."""

    def is_empty() -> bool:
        evict(cluster, node)
        return node_stats(cluster, node).tiers[0].blocks == 0

    wait_until(is_empty, f"{node} holds nothing in DRAM")
