"""Connections to the data planes of other nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.core.errors import NotFound
from kvstore.core.types import NamespaceId, NodeId
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.transport.contract import BlockPeer
from kvstore.transport.idle_cache import IdleCache

MAX_PEERS = 64


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Addresses of another node, from the metadata server or a caller."""

    node_id: NodeId
    control_address: str
    data_address: str


MakePeer = Callable[[PeerAddress, NodeNamespace], BlockPeer]


class Peers:
    """Open peers: one per node and namespace. Beyond ``MAX_PEERS``, unused ones are closed. Thread-safe.

    Args:
        make: opens a peer.
        check: raises if an address is not trusted; None: all are.
    """

    def __init__(self, make: MakePeer, check: Callable[[PeerAddress], None] | None = None) -> None:
        self._make = make
        self._check = check
        self._lock = threading.Lock()
        self._open: IdleCache[tuple[PeerAddress, NamespaceId], BlockPeer] = IdleCache(MAX_PEERS)

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
        retired = []
        with self._lock:
            now_s = time.monotonic()
            peer = self._open.get(key, now_s)
            if peer is None:
                peer = self._make(address, namespace)
                retired = self._open.put(key, peer, now_s)
        for one in retired:
            one.close()
        return peer

    def close(self) -> None:
        """Close all peers."""
        with self._lock:
            peers = self._open.clear()
        for peer in peers:
            peer.close()
