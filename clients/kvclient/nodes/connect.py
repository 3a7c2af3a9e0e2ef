"""Steps of ``KVClient.connect``: check the arguments, find the local node, tolerate failures if the options allow it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

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

Result = TypeVar("Result")


class NodeFinder:
    """Finds the address of the local node: the named one, or one from the metadata server, or the last one found."""

    def __init__(self, node: str, metadata: MetadataClient | None, options: ClientOptions) -> None:
        self._named = None if node == "auto" else node
        self._metadata = metadata
        self._options = options
        self._last: str | None = None

    def find(self) -> str | None:
        """Return the address, or None if no node runs on this host."""
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
    """Return the monitor that finds out whether the servers of one client answer."""
    probe = HealthProbe(partial(connect, tls=tls))
    return LivenessMonitor(probe, counters, on_close=probe.close)


def attempt(options: ClientOptions, incidents: LimitedLog, work: Callable[[], Result]) -> Result | None:
    """Do a step of ``connect``. If it fails and ``require_store`` is False, return None.

    Raises:
        KVStoreError: the step failed and ``require_store`` is True, or an argument is invalid.
    """
    try:
        return work()
    except KVStoreError as error:
        if options.require_store or isinstance(error, InvalidArgument):
            raise
        incidents.report(client_metrics.CONNECT_FAILED, "connected without a part of the store", error)
        return None


def check_types(metadata: object, spec: object, node: object, tls: object, options: object, hbm: object) -> None:
    """Check the types of the arguments of ``connect`` before anything depends on them.

    Raises:
        InvalidArgument: an argument has another type.
    """
    expected: tuple[tuple[str, object, Any], ...] = (
        ("metadata", metadata, str | None),
        ("spec", spec, CacheSpec),
        ("node", node, str | None),
        ("tls", tls, TlsConfig | None),
        ("options", options, ClientOptions),
        ("hbm", hbm, EnginePool | None),
    )
    for name, value, kind in expected:
        if not isinstance(value, kind):
            raise InvalidArgument("an argument has another type", argument=name, got=type(value).__name__)
