"""Calls of a node that has other nodes pull its blocks: to the metadata server, and to these nodes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc, node_pb2, node_pb2_grpc
from kvstore.core.errors import NotFound
from kvstore.core.types import BlockKey, NamespaceId, pack_keys
from kvstore.node.state.change_log import runs_of
from kvstore.node.state.model import Block
from kvstore.observe.counters import Counters
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.client import RetryPolicy, call, connect
from kvstore.rpc.codec import run_to_proto, spec_to_proto
from kvstore.rpc.failover.connect import connect_metadata

LOCATE_KEYS: Final = 4_096
RPC_TIMEOUT_S: Final = 5.0
PULL_TIMEOUT_S: Final = 60.0
_RETRY: Final = RetryPolicy(attempts=3)


class PullClient:
    """Calls of one node. Every method raises ``KVStoreError`` if the other side does not answer.

    Args:
        node: this node, as other nodes reach it.
        metadata: address of the metadata server.
        counters: metrics.
        tls: as for every channel of the node.
        token: of the node.
    """

    def __init__(
        self,
        node: common_pb2.NodeInfo,
        metadata: str,
        counters: Counters,
        *,
        tls: TlsConfig | None,
        token: TokenSource | None,
    ) -> None:
        self.node = node
        self._tls = tls
        self._token = token
        self._channel = connect_metadata(metadata, caller=node.node_id, tls=tls, token=token, counters=counters)
        self._stub = metadata_pb2_grpc.MetadataStub(self._channel)

    def close(self) -> None:
        """Close the channel to the metadata server."""
        self._channel.close()

    def nodes(self) -> Sequence[metadata_pb2.NodeStatus]:
        """Return all nodes."""
        answer: metadata_pb2.ListNodesResponse = call(
            self._stub.ListNodes, metadata_pb2.ListNodesRequest(), RPC_TIMEOUT_S, _RETRY
        )
        return answer.nodes

    def specs(self) -> dict[NamespaceId, common_pb2.CacheSpec]:
        """Return the specs of all namespaces."""
        answer = call(self._stub.ListNamespaces, metadata_pb2.ListNamespacesRequest(), RPC_TIMEOUT_S, _RETRY)
        return {NamespaceId(one.namespace_id): one.spec for one in answer.namespaces}

    def holders(
        self,
        blocks: Mapping[NamespaceId, list[BlockKey]],
        counts: Callable[[metadata_pb2.LocatedVolume], bool],
    ) -> Iterator[tuple[BlockKey, str]]:
        """Yield each key with the id of each node that holds it on a durable volume, as far as the volume counts."""
        for namespace_id, keys in blocks.items():
            for at in range(0, len(keys), LOCATE_KEYS):
                part = keys[at : at + LOCATE_KEYS]
                request = metadata_pb2.LocateBlocksRequest(namespace_id=namespace_id, keys=pack_keys(part))
                answer = call(self._stub.LocateBlocks, request, RPC_TIMEOUT_S, _RETRY)
                good = [one.tier == common_pb2.TIER_NVME and counts(one) for one in answer.volumes]
                for replica in answer.replicas:
                    if good[replica.volume]:
                        yield part[replica.key], answer.volumes[replica.volume].node_id

    def pull(
        self,
        control_address: str,
        blocks: Sequence[Block],
        spec: common_pb2.CacheSpec | None,
        *,
        second_copy: bool = False,
        may_evict: bool = False,
    ) -> node_pb2.PullBlocksResponse:
        """Have a node pull blocks of one namespace.

        Args:
            control_address: of that node.
            blocks: the blocks, parents before their children.
            spec: of the namespace, if this node does not know it.
            second_copy: whether this node keeps its blocks.
            may_evict: whether that node may evict others for them.

        Raises:
            NotFound: nobody knows the spec.
        """
        known = blocks[0].namespace.spec
        if spec is None and known is None:
            raise NotFound(
                "the spec of the namespace is unknown, so no ticket can be issued", namespace=blocks[0].namespace_id.hex()
            )
        request = node_pb2.PullBlocksRequest(
            operation_id=secrets.token_bytes(16),
            spec=spec if known is None else spec_to_proto(known),
            runs=[run_to_proto(run) for run in runs_of(blocks)],
            node_id=self.node.node_id,
            control_address=self.node.control_address,
            data_address=self.node.data_address,
            second_copy=second_copy,
            may_evict=may_evict,
        )
        with connect(control_address, tls=self._tls, token=self._token) as channel:
            answer: node_pb2.PullBlocksResponse = call(
                node_pb2_grpc.NodeStub(channel).PullBlocks, request, PULL_TIMEOUT_S, _RETRY
            )
            return answer
