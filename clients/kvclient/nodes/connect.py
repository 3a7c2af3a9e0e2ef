"""The steps of ``KVClient.connect``: what it was given, where the local node is, what may fail."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvclient.memory.engine_pool import EnginePool
from kvclient.nodes.local_session import local_address
from kvclient.nodes.metadata_client import MetadataClient, by_roles
from kvclient.options import ClientOptions
from kvstore.core.errors import InvalidArgument, KVStoreError
from kvstore.core.spec import CacheSpec
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.process.tls import TlsConfig
from kvstore.rpc.client import connect
from kvstore.rpc.health_probe import HealthProbe
from kvstore.transport.liveness import LivenessMonitor


class NodeFinder:
    """Where the local node is: as named, or found through the metadata server; without that, where it was last."""

    def __init__(self, node: str, metadata: MetadataClient | None, options: ClientOptions) -> None:
        self._named = None if node == "auto" else node
        self._metadata = metadata
        self._options = options
        self._last: str | None = None

    def find(self) -> str | None:
        """Its address, or None where this host has none."""
        if self._named is not None or self._metadata is None:
            return self._named
        try:
            nodes = self._metadata.nodes(self._options.lookup_deadline_s)
        except KVStoreError:
            if self._last is None:
                raise
            return self._last
        self._last = local_address(by_roles(nodes, self._options.local_roles)) or self._last
        return self._last


def watch_servers(tls: TlsConfig | None, counters: Counters) -> LivenessMonitor:
    """What finds out whether the servers of one client answer."""
    probe = HealthProbe(partial(connect, tls=tls))
    return LivenessMonitor(probe, counters, on_close=probe.close)


def attempt(options: ClientOptions, incidents: LimitedLog, work: partial[None] | object) -> object:
    """A step of ``connect`` that may fail where ``require_store`` is False; then None."""
    try:
        return work()  # type: ignore[operator]
    except KVStoreError as error:
        if options.require_store or isinstance(error, InvalidArgument):
            raise
        incidents.report(client_metrics.CONNECT_FAILED, "connecting without a part of the store", error)
        return None


def check_types(metadata: object, spec: object, node: object, tls: object, options: object, hbm: object) -> None:
    """What ``connect`` was given, before anything fails deep inside on it."""
    wanted: tuple[tuple[str, object, Any], ...] = (
        ("metadata", metadata, str | None),
        ("spec", spec, CacheSpec),
        ("node", node, str | None),
        ("tls", tls, TlsConfig | None),
        ("options", options, ClientOptions),
        ("hbm", hbm, EnginePool | None),
    )
    for name, value, kind in wanted:
        if not isinstance(value, kind):
            raise InvalidArgument("an argument of another type", argument=name, got=type(value).__name__)
