"""Metrics of clients for Prometheus: in an engine's own registry, or over HTTP (``ClientOptions.metrics_listen``).

``import kvclient`` does not import this module: an engine without metrics does not load ``prometheus_client``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import kvstore
from kvstore import native
from kvstore.observe.counters import Counters
from kvstore.observe.exposition import Sample, StoreCollector
from kvstore.observe.http import MetricsServer, serve
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.observe.metric_definitions import common as common_metrics

if TYPE_CHECKING:
    from kvclient.client import KVClient


class _Registries:
    """The counters of some clients, read again at each iteration."""

    def __init__(self, clients: Iterable[KVClient]) -> None:
        self._clients = clients

    def __iter__(self) -> Iterator[Counters]:
        return (client.counters for client in self._clients)


def collector(clients: Iterable[KVClient]) -> StoreCollector:
    """Return a collector of the metrics of some clients of one process, added up.

        prometheus_client.REGISTRY.register(collector(clients))

    Args:
        clients: iterated at each scrape, so a list may grow.
    """

    def gauges() -> Iterator[Sample]:
        yield Sample(common_metrics.BUILD_INFO, 1, {"version": kvstore.__version__})
        yield Sample(common_metrics.COPY_KERNEL, 1, {"kernel": native.kernel_name()})
        yield Sample(common_metrics.PYTHON_COPIES, native.fallback_calls())
        yield Sample(client_metrics.SESSION_OPEN, sum(client.stats()["client_session_open"] for client in clients))

    return StoreCollector(_Registries(clients), [gauges], process="client")


def serve_client(client: KVClient, address: str) -> MetricsServer | None:
    """Serve one client's metrics and its slowest loads. None: the address is not available, which is logged."""
    return serve(address, collector([client]), {"/loads": client.recent_loads.page}, client.counters)
