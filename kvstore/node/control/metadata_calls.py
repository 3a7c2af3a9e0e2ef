"""Calls of a node to the metadata servers, apart from publication and pulls."""

from __future__ import annotations

import grpc

from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc
from kvstore.config.node import NodeConfig
from kvstore.core.errors import Unavailable
from kvstore.core.types import NodeId
from kvstore.node.loads.peers import PeerAddress
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.client import call
from kvstore.rpc.failover.connect import connect_metadata

RPC_TIMEOUT_S = 5.0


class MetadataCalls:
    """Calls with a connection of their own.

    Args:
        config: names the metadata servers.
        token: this node's token; None: no server requires one.
    """

    def __init__(self, config: NodeConfig, token: TokenSource | None) -> None:
        self._config = config
        self._token = token

    def connect(self) -> grpc.Channel:
        """Connect to the metadata servers, which the configuration must name."""
        config = self._config
        assert config.metadata is not None
        return connect_metadata(config.metadata, caller=config.node_id, tls=config.tls.resolve(), token=self._token)

    def list_specs(self) -> list[common_pb2.CacheSpec]:
        """Return the specs of all namespaces that the metadata server knows."""
        if self._config.metadata is None:
            return []
        with self.connect() as channel:
            stub = metadata_pb2_grpc.MetadataStub(channel)
            known = call(stub.ListNamespaces, metadata_pb2.ListNamespacesRequest(), RPC_TIMEOUT_S).namespaces
        return [one.spec for one in known]

    def find_storage_node(self) -> PeerAddress:
        """Return the addresses of the node that blocks are written back to.

        Raises:
            Unavailable: it is not alive, or no metadata server is configured.
        """
        storage_node = self._config.write_back_to
        if self._config.metadata is None or storage_node is None:
            raise Unavailable("a storage node is found through the metadata server: set node.metadata")
        with self.connect() as channel:
            stub = metadata_pb2_grpc.MetadataStub(channel)
            for status in call(stub.ListNodes, metadata_pb2.ListNodesRequest(), RPC_TIMEOUT_S).nodes:
                if status.node.node_id == storage_node and status.alive:
                    return PeerAddress(NodeId(storage_node), status.node.control_address, status.node.data_address)
        raise Unavailable("the storage node is not alive", node_id=storage_node)
