"""Clients' metrics for Prometheus: in an engine's own registry, or by a door of their own (``ClientOptions.metrics_listen``).

Kept out of ``import kvclient``: an engine that shows nothing does not load ``prometheus_client``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import kvstore
from kvstore.observe.counters import Counters
from kvstore.observe.exposition import Sample, StoreCollector
from kvstore.observe.http import MetricsServer, serve
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.observe.metric_definitions import common as common_metrics

if TYPE_CHECKING:
    from kvclient.client import KVClient


class _Registries:
    """The counters of some clients, however many there are when somebody looks."""

    def __init__(self, clients: Iterable[KVClient]) -> None:
        self._clients = clients

    def __iter__(self) -> Iterator[Counters]:
        return (client.counters for client in self._clients)


def collector(clients: Iterable[KVClient]) -> StoreCollector:
    """What some clients of one process show, added up; register it once: ``prometheus_client.REGISTRY.register(...)``.

    Args:
        clients: all that are to be seen, such as a list; it is gone through at each scrape and may have grown since.
    """

    def gauges() -> Iterator[Sample]:
        yield Sample(common_metrics.BUILD_INFO, 1, {"version": kvstore.__version__})
        yield Sample(client_metrics.SESSION_OPEN, sum(client.stats()["client_session_open"] for client in clients))

    return StoreCollector(_Registries(clients), [gauges], process="client")


def serve_client(client: KVClient, address: str) -> MetricsServer | None:
    """Serves one client's metrics and its slowest loads; None: the address cannot be had, which is logged."""
    return serve(address, collector([client]), {"/loads": client.recent_loads.page}, client.counters)
