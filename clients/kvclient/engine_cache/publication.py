"""Publishes the cache of one engine: a thread that hands the tracker's changes to the publisher of a node."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Final

from kvclient.engine_cache.cache_table import CacheTable, CacheVolume
from kvclient.engine_cache.tracker import CacheChanges
from kvproto.v1 import common_pb2
from kvstore.core.clock import MonotonicClock
from kvstore.core.types import VolumeId
from kvstore.node.publish.publisher import IndexPublisher
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.observe.counters import Counters
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import TokenSource

_log = logging.getLogger(__name__)

INTERVAL_S: Final = 0.5
"""Changes within this time are published together: the engine's process needs its CPU for steps."""
MOST_CHANGES: Final = 8_192
"""Changes that are published at a time, so at most twice as many per second. The others wait."""
ANTI_ENTROPY_S: Final = 60.0
STOP_S: Final = 1.0


class CachePublication:
    """One engine's cache in the index. Call ``start`` and ``close`` once each.

    Args:
        node_id: its name among nodes.
        metadata: address of the metadata server, or of several.
        capacity_bytes: bytes of the engine's pages.
        block_bytes: bytes of a block.
        take_changes: returns the changes since its last call.
        count: adds to a counter of the engine's hook.
        tls: TLS of the connection.
        token: token for the metadata server; None: none.
    """

    def __init__(
        self,
        node_id: str,
        metadata: str,
        *,
        capacity_bytes: int,
        block_bytes: int,
        take_changes: Callable[[], CacheChanges],
        count: Callable[[str, int], None] = lambda _name, _more: None,
        tls: TlsConfig | None = None,
        token: TokenSource | None = None,
    ) -> None:
        self.node_id = node_id
        self._take_changes = take_changes
        self._count = count
        self.denied = False
        """The token lacks the permission to publish, so nothing more is published."""
        volume = CacheVolume(VolumeId(f"{node_id}/cache"), capacity_bytes, block_bytes)
        counters, clock = Counters(), MonotonicClock()
        self._log = ReplicaChangeLog([volume.volume_id], counters, clock)
        self._clock = clock
        self._table = CacheTable(volume, self._log)
        info = common_pb2.NodeInfo(node_id=node_id, boot_id=secrets.token_bytes(16))
        info.volumes.add(volume_id=volume.volume_id, tier=common_pb2.TIER_HBM, capacity_bytes=capacity_bytes)
        self._publisher = IndexPublisher(
            metadata, info, self._table, self._log, counters, tls=tls, token=token, anti_entropy_interval_s=ANTI_ENTROPY_S
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-engine-cache", daemon=True)

    def start(self) -> None:
        """Register and publish in the background."""
        self._publisher.start()
        self._thread.start()

    def close(self) -> None:
        """Stop, and hide the cache from lookups at once. If the server does not answer, it is hidden after missed heartbeats."""
        self._stopping.set()
        self._publisher.leave(STOP_S)
        self._publisher.stop(STOP_S)
        self._thread.join(STOP_S)

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            try:
                self._table.merge(self._take_changes())
                added, removed = self._table.publish(MOST_CHANGES)
                self._count("cache_published_blocks", added)
                self._count("cache_removed_blocks", removed)
            except Exception:  # noqa: BLE001  # thread edge: the engine must not notice, and anti-entropy repairs the index
                self._count("bugs", 1)
                _log.exception("cache not published: unexpected error, trying again")
            if self._publisher.denied is not None:
                self.denied = True
                self._count("cache_publication_denied", 1)
                _log.warning("cache not published: %s", self._publisher.denied)
                self._publisher.stop(STOP_S)
                return


def cache_name(engine: str) -> str:
    """Return a unique name of a cache: engine, host and random digits."""
    host = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in socket.gethostname().partition(".")[0])
    return f"{engine}-{host[:30] or 'host'}-{secrets.token_hex(4)}"
