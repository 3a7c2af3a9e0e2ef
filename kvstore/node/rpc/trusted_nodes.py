"""Which addresses are nodes' of this store: a node shows its token there and nowhere else.

Loads name the peers to read from, and callers may be tenants: one that named a server of its own would be shown the node's token,
which reaches every namespace. So, where a node has a token, an address counts only as the metadata server names it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
from kvstore.core.errors import PermissionDenied
from kvstore.node.loads.peers import PeerAddress
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.client import call, connect

_ASK_S: Final = 2.0
_PAUSE_S: Final = 1.0
"""An address that is not known is asked about so often at most: whoever makes them up must not set the pace."""


class KnownNodes:
    """The nodes that a metadata server names. Thread-safe.

    Args:
        metadata: its address; None: there is none, and no address is known.
        tls: as for every channel of the node.
        token: what it is shown.
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
        self._known: frozenset[tuple[str, str]] = frozenset()
        self._asked_s = -_PAUSE_S

    def check(self, address: PeerAddress) -> None:
        """Whether it is a node's.

        Raises:
            PermissionDenied: no node of the store has it.
            KVStoreError: the metadata server does not answer.
        """
        wanted = (address.control_address, address.data_address)
        if wanted in self._known:
            return
        with self._lock:  # one asks for all that wait
            if wanted not in self._known and self._now_s() - self._asked_s >= _PAUSE_S:
                self._asked_s = self._now_s()
                self._known = self._ask()
            if wanted not in self._known:
                raise PermissionDenied("no node of this store has this address", control_address=address.control_address[:64])

    def _ask(self) -> frozenset[tuple[str, str]]:
        if self._metadata is None:
            return frozenset()
        with connect(self._metadata, tls=self._tls, token=self._token) as channel:
            stub = metadata_pb2_grpc.MetadataStub(channel)
            nodes = [one.node for one in call(stub.ListNodes, metadata_pb2.ListNodesRequest(), _ASK_S).nodes]
        places = ((node, data) for node in nodes for data in (node.data_address, node.storage_address) if data)
        return frozenset((node.control_address, data) for node, data in places)
