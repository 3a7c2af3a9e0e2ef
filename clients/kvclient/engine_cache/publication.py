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
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import TokenSource

_log = logging.getLogger(__name__)

INTERVAL_S: Final = 0.5
"""Changes within this time are published together: the engine's process needs its CPU for steps."""
MOST_CHANGES: Final = 8_192
"""Changes that are published at a time, so at most twice as many per second. The others wait."""
MOST_WAITING: Final = 4 * MOST_CHANGES
"""Changes that wait for the metadata server. If there are more, an inventory replaces them."""
ANTI_ENTROPY_S: Final = 60.0
WARNING_INTERVAL_S: Final = 3_600.0
"""Time between two equal warnings: an engine may run without the permission to publish."""
STOP_S: Final = 1.0
_COUNTS: Final = {
    "cache_publication_failures": (node_metrics.REGISTRATIONS_REFUSED, node_metrics.PUBLISH_INTERRUPTED),
    "cache_inventories": (node_metrics.PUBLISH_LOG_OVERFLOW,),
    "bugs": (node_metrics.PUBLISH_BUGS, node_metrics.HEARTBEAT_BUGS, node_metrics.ANTI_ENTROPY_BUGS),
}
"""Counters of the engine's hook, each the sum of some counters of the publisher."""


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
        setting_names: where people set ``tls`` and ``token``, for errors.
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
        setting_names: tuple[str, str] = ("tls", "token"),
    ) -> None:
        self.node_id = node_id
        self._take_changes = take_changes
        self._count = count
        self._denied = False
        volume = CacheVolume(VolumeId(f"{node_id}/cache"), capacity_bytes, block_bytes)
        self._counters = Counters()
        self._counted: dict[str, int] = {}
        self._log = ReplicaChangeLog([volume.volume_id], self._counters, MonotonicClock(), bound=MOST_WAITING)
        self._table = CacheTable(volume, self._log)
        info = common_pb2.NodeInfo(node_id=node_id, boot_id=secrets.token_bytes(16))
        info.volumes.add(volume_id=volume.volume_id, tier=common_pb2.TIER_HBM, capacity_bytes=capacity_bytes)
        self._publisher = IndexPublisher(
            metadata,
            info,
            self._table,
            self._log,
            self._counters,
            tls=tls,
            token=token,
            setting_names=setting_names,
            anti_entropy_interval_s=ANTI_ENTROPY_S,
            warning_interval_s=WARNING_INTERVAL_S,
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-engine-cache", daemon=True)

    @property
    def is_connected(self) -> bool:
        """Whether the index follows this cache: the metadata server accepts its heartbeats and its changes."""
        return self._publisher.connected and self._publisher.denied is None and not self._stopping.is_set()

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
                self._count_failures()
                self._note_denial()
            except Exception:  # noqa: BLE001  # thread edge: a stale entry costs a router a worse choice
                self._count("bugs", 1)
                _log.exception("cache not published: unexpected error, trying again")

    def _count_failures(self) -> None:
        """Count what the publisher counted since the last call."""
        for name, counters in _COUNTS.items():
            total = sum(map(self._counters.get, counters))
            self._count(name, total - self._counted.get(name, 0))
            self._counted[name] = total

    def _note_denial(self) -> None:
        """Count and log that the metadata server begins to refuse the token, or accepts it again. The publisher keeps trying."""
        reason = self._publisher.denied
        if (reason is not None) == self._denied:
            return
        self._denied = reason is not None
        if reason is None:
            _log.info("cache published: the metadata server accepts the token")
        else:
            self._count("cache_publication_denied", 1)
            _log.warning("cache not published, trying again: %s", reason)


def cache_name(engine: str) -> str:
    """Return a unique name of a cache: engine, host and random digits.

    A process that is restored from a snapshot must not publish (``published_blocks`` = 0): its copies share one name.
    """
    host = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in socket.gethostname().partition(".")[0])
    return f"{engine}-{host[:30] or 'host'}-{secrets.token_hex(4)}"
