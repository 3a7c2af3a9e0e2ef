"""Connections to other nodes' data planes, each with the ticket that it needs."""

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
    """Another node, as the metadata server or a caller names it."""

    node_id: NodeId
    control_address: str
    data_address: str


MakePeer = Callable[[PeerAddress, NodeNamespace], BlockPeer]


class Peers:
    """Open peers, one a (node, namespace), the least recently used closed beyond ``MAX_PEERS``. Thread-safe.

    Args:
        make: opens one.
        check: refuses addresses; None: all are good.
    """

    def __init__(self, make: MakePeer, check: Callable[[PeerAddress], None] | None = None) -> None:
        self._make = make
        self._check = check
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[PeerAddress, NamespaceId], BlockPeer] = OrderedDict()

    def peer(self, address: PeerAddress, namespace: NodeNamespace) -> BlockPeer:
        """The peer to move blocks of a namespace with.

        Raises:
            NotFound: this node has not seen the namespace's spec, without which no ticket is to be had.
            KVStoreError: the address is refused.
        """
        if namespace.spec is None:
            raise NotFound("the spec of the namespace is not known here", namespace=namespace.namespace_id.hex())
        key = (address, namespace.namespace_id)
        if self._check is not None and key not in self._open:  # it may ask others: not in the lock
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
        """Closes all."""
        with self._lock:
            peers = list(self._open.values())
            self._open.clear()
        for peer in peers:
            peer.close()
