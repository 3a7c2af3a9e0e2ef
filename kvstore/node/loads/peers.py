"""Connections to the data planes of other nodes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.core.errors import NotFound
from kvstore.core.types import NamespaceId, NodeId
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.transport.contract import BlockPeer

MAX_PEERS = 64


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Addresses of another node, from the metadata server or a caller."""

    node_id: NodeId
    control_address: str
    data_address: str


MakePeer = Callable[[PeerAddress, NodeNamespace], BlockPeer]


class Peers:
    """Open peers: one per node and namespace. Beyond ``MAX_PEERS`` the least recently used one is closed. Thread-safe.

    Args:
        make: opens a peer.
        check: raises if an address is not trusted; None: all are.
    """

    def __init__(self, make: MakePeer, check: Callable[[PeerAddress], None] | None = None) -> None:
        self._make = make
        self._check = check
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[PeerAddress, NamespaceId], BlockPeer] = OrderedDict()

    def peer(self, address: PeerAddress, namespace: NodeNamespace) -> BlockPeer:
        """Return the peer to move blocks of a namespace with.

        Raises:
            NotFound: this node does not know the namespace's spec, which a ticket requires.
            KVStoreError: the address is not trusted.
        """
        if namespace.spec is None:
            raise NotFound("this node does not know the spec of the namespace", namespace=namespace.namespace_id.hex())
        key = (address, namespace.namespace_id)
        if self._check is not None and key not in self._open:  # may call the metadata server: without the lock
            self._check(address)
        with self._lock:
            peer = self._open.get(key)
            if peer is None:
                peer = self._open[key] = self._make(address, namespace)
            self._open.move_to_end(key)
            retired = self._open.popitem(last=False)[1] if len(self._open) > MAX_PEERS else None
        if retired is not None:
            retired.close()
        return peer

    def close(self) -> None:
        """Close all peers."""
        with self._lock:
            peers = list(self._open.values())
            self._open.clear()
        for peer in peers:
            peer.close()
