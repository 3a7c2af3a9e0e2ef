"""The ids and addresses of this store's nodes: a node sends its token to no other address.

Loads name the peers to read from, and the caller may be a tenant. A tenant that names its own server would otherwise receive the
node's token, which gives access to every namespace. So a node with a token accepts only addresses that the metadata server lists.
The id must be that of the listed node, because findings name it: a tenant must not blame another node for a slow load.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
from kvstore.core.errors import PermissionDenied
from kvstore.core.types import NodeId
from kvstore.node.loads.peers import PeerAddress
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.client import call
from kvstore.rpc.failover.connect import connect_metadata

_RPC_TIMEOUT_S: Final = 2.0
_REFRESH_INTERVAL_S: Final = 1.0
"""An unknown address causes a refresh at most this often, because callers can invent addresses."""


class TrustedNodes:
    """The nodes that the metadata server lists. Thread-safe.

    Args:
        metadata: addresses of the metadata servers; None: there is none, and no address is trusted.
        tls: as for every channel of the node.
        token: the node's token, for the metadata server.
        now_s: a monotonic clock.
    """

    def __init__(
        self, metadata: str | None, tls: TlsConfig | None, token: TokenSource, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._metadata = metadata
        self._tls = tls
        self._token = token
        self._now_s = now_s
        self._lock = threading.Lock()
        self._trusted: frozenset[PeerAddress] = frozenset()
        self._refreshed_s = -_REFRESH_INTERVAL_S

    def check(self, address: PeerAddress) -> None:
        """Check that an address belongs to the node of this store that it names.

        Raises:
            PermissionDenied: it does not.
            KVStoreError: the metadata server does not answer.
        """
        if address in self._trusted:
            return
        with self._lock:  # one refresh serves all callers that wait for it
            if address not in self._trusted and self._now_s() - self._refreshed_s >= _REFRESH_INTERVAL_S:
                self._refreshed_s = self._now_s()
                self._trusted = self._fetch()
            if address not in self._trusted:
                raise PermissionDenied(
                    "no node of this store has this address",
                    node_id=address.node_id[:64],
                    control_address=address.control_address[:64],
                )

    def _fetch(self) -> frozenset[PeerAddress]:
        """Return the address in each network of each node."""
        if self._metadata is None:
            return frozenset()
        with connect_metadata(self._metadata, tls=self._tls, token=self._token) as channel:
            stub = metadata_pb2_grpc.MetadataStub(channel)
            nodes = [status.node for status in call(stub.ListNodes, metadata_pb2.ListNodesRequest(), _RPC_TIMEOUT_S).nodes]
        return frozenset(
            PeerAddress(NodeId(node.node_id), node.control_address, data_address)
            for node in nodes
            for data_address in (node.data_address, node.storage_address)
            if data_address
        )
