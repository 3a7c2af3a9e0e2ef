"""Gauges of the metadata server: index size, live nodes, load plans and requests in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

import kvstore
from kvstore.core.index_backend import IndexBackend
from kvstore.health.cluster import FileSystem
from kvstore.index.contract import PrefixIndex, ServerRole
from kvstore.metadata.events.contract import EventSource
from kvstore.metadata.events.event_log import BlockEventLog
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.membership.server_table import ServerTable
from kvstore.metadata.membership.view import is_engine_cache
from kvstore.metadata.roles.roles import Roles
from kvstore.metadata.scheduling.planner_service import PlannerService
from kvstore.metadata.scheduling.scheduler_service import SchedulerService
from kvstore.observe.exposition import Sample
from kvstore.observe.metric_definitions import common as common_metrics
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.observe.metric_definitions.label_values import MOST_SHARDS

_ANSWER_S: Final = 2.0


class MetadataGauges:
    """Computes the gauges of a scrape: called in a thread of the metrics server, computed on the event loop.

    Args:
        loop: the loop.
        index: the index.
        nodes: registrations and liveness.
        roles: roles of this process.
        planner: load plans.
        scheduler: request scheduling.
        events: block events.
        event_log: log of this process for ``events``; None: it has none.
        servers: the metadata servers that serve the index.
        index_disk: space on the file system of the index; None: unknown.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        index: PrefixIndex,
        nodes: NodeTable,
        roles: Roles,
        planner: PlannerService,
        scheduler: SchedulerService,
        events: EventSource,
        event_log: BlockEventLog | None,
        servers: ServerTable,
        index_disk: Callable[[], FileSystem | None],
    ) -> None:
        self._loop = loop
        self._index = index
        self._nodes = nodes
        self._roles = roles
        self._planner = planner
        self._scheduler = scheduler
        self._events = events
        self._event_log = event_log
        self._servers = servers
        self._index_disk = index_disk

    def __call__(self) -> list[Sample]:
        async def read() -> list[Sample]:
            return list(self._samples())

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result(_ANSWER_S)

    def _samples(self) -> Iterator[Sample]:
        yield Sample(common_metrics.BUILD_INFO, 1, {"version": kvstore.__version__})
        stats = self._index.stats()
        yield Sample(metadata_metrics.INDEX_BLOCKS, stats.blocks)
        yield Sample(metadata_metrics.INDEX_SIZE_BYTES, stats.bytes)
        yield Sample(metadata_metrics.INDEX_CHANGES_FAILING_SECONDS, stats.failing_s)
        if (disk := self._index_disk()) is not None:
            yield Sample(metadata_metrics.INDEX_DISK_BYTES, disk.total_bytes)
            yield Sample(metadata_metrics.INDEX_DISK_FREE_BYTES, disk.free_bytes)
        yield from _of_shards(self._index.backend())
        yield Sample(metadata_metrics.METADATA_SERVERS, len(self._servers.servers()))
        statuses = [status for status in self._nodes.statuses() if not is_engine_cache(status.node)]
        alive = sum(status.alive for status in statuses)
        yield Sample(metadata_metrics.NODES, alive, {"state": "alive"})
        refused = sum(bool(status.refused) for status in statuses)
        yield Sample(metadata_metrics.NODES, len(statuses) - alive - refused, {"state": "silent"})
        yield Sample(metadata_metrics.NODES, refused, {"state": "refused"})
        draining = sum(status.HasField("order") for status in statuses)
        yield Sample(metadata_metrics.NODES_DRAINING, draining)
        for status in statuses:
            age_s = status.heartbeat_age_ms / 1000
            yield Sample(metadata_metrics.NODE_HEARTBEAT_AGE_SECONDS, age_s, {"node": status.node.node_id})
            yield Sample(metadata_metrics.NODE_REFUSED, bool(status.refused), {"node": status.node.node_id})
        for server_role in ServerRole:
            yield Sample(metadata_metrics.ROLE_HELD, self._roles.holds(server_role), {"role": server_role.value})
        yield Sample(metadata_metrics.LIVE_PLANS, len(self._planner.planner))
        yield Sample(metadata_metrics.WATCH_SUBSCRIBERS, self._events.subscribers)
        if self._event_log is not None:
            yield Sample(metadata_metrics.FEED_BYTES, self._event_log.held_bytes)
        found = self._scheduler.gauges()
        yield Sample(metadata_metrics.SCHEDULER_ENGINES, found["metadata_scheduler_engines"])
        yield Sample(metadata_metrics.SCHEDULER_REQUESTS, found["metadata_scheduler_requests"])
        yield Sample(metadata_metrics.SCHEDULER_BYTES, found["metadata_scheduler_bytes"])
        for role in ("prefill", "decode"):
            yield Sample(metadata_metrics.SCHEDULER_WAITING, found[f"metadata_scheduler_waiting_{role}"], {"role": role})


def _of_shards(backend: IndexBackend) -> Iterator[Sample]:
    if not backend.is_shared:
        return
    yield Sample(metadata_metrics.UNSERVED_SLOTS, backend.unserved_slots)
    for server in backend.servers:
        if not server.primary or server.shard is None or server.shard >= MOST_SHARDS:
            continue
        labels = {"shard": str(server.shard)}
        yield Sample(metadata_metrics.SHARD_UP, server.away_s is None, labels)
        yield Sample(metadata_metrics.SHARD_REPLICAS, server.replicas, labels)
        for metric, value in (
            (metadata_metrics.SHARD_KEYS, server.keys),
            (metadata_metrics.SHARD_MEMORY_BYTES, server.used_bytes),
            (metadata_metrics.SHARD_MEMORY_LIMIT_BYTES, server.limit_bytes or None),
        ):
            if value is not None and server.away_s is None:
                yield Sample(metric, value, labels)
