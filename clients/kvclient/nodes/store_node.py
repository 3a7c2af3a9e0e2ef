"""Where stores go without a local node."""

from __future__ import annotations

from kvclient.nodes.metadata_client import MetadataClient, by_roles
from kvclient.nodes.peers import PeerPool
from kvclient.options import ClientOptions
from kvclient.results import NodeRef
from kvproto.v1 import common_pb2
from kvstore.core.clock import Clock
from kvstore.core.errors import Unavailable
from kvstore.core.types import NodeId

_VALID_S = 5.0


class StoreNodeFinder:
    """Chooses a node to store to, and keeps the choice for a few seconds. Thread-safe."""

    def __init__(self, metadata: MetadataClient | None, peers: PeerPool, clock: Clock, options: ClientOptions) -> None:
        self._metadata = metadata
        self._peers = peers
        self._clock = clock
        self._options = options
        self._chosen: tuple[NodeRef, float] | None = None

    def find(self, timeout_s: float) -> NodeRef:
        """Return the node named by the options, or the first living one by roles that takes stores.

        Raises:
            Unavailable: there is none.
            KVStoreError: the metadata server does not answer.
        """
        now_s = self._clock.now_s()
        if self._chosen is not None and now_s < self._chosen[1] and not self._peers.hung(self._chosen[0]):
            return self._chosen[0]
        if self._metadata is None:
            raise Unavailable("no local node and no metadata server: nowhere to store")
        options = self._options
        nodes = by_roles(self._metadata.writable_nodes(min(timeout_s, options.lookup_deadline_s)), options.store_roles)
        for node in nodes:
            if node.volumes and all(volume.tier == common_pb2.TIER_HBM for volume in node.volumes):
                continue  # an engine's own pool, which accepts nothing from outside
            if options.store_node is None or node.node_id == options.store_node:
                ref = NodeRef(NodeId(node.node_id), node.control_address, node.data_address)
                if self._peers.hung(ref):
                    continue
                self._chosen = (ref, now_s + _VALID_S)
                return ref
        which = "living node" if options.store_node is None else f"node {options.store_node}, which the option store_node names,"
        raise Unavailable(f"no {which} takes stores; `kvstore status` lists nodes, `kvstore node` starts one on this host")

    def forget(self) -> None:
        """Choose again next time: a store to the chosen node failed."""
        self._chosen = None
