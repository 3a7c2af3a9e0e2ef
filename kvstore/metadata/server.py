"""One metadata server process: index, service, upkeep, and their lifecycle."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence

from kvproto.v1.admin_pb2_grpc import add_MetadataAdminServicer_to_server
from kvstore.config.metadata import MetadataConfig
from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.types import NamespaceId
from kvstore.dualpath.scheduler import SchedulerLimits
from kvstore.index.contract import PrefixIndex
from kvstore.index.lmdb import LmdbIndex
from kvstore.metadata.admin_service import SERVICE_NAME as METADATA_ADMIN
from kvstore.metadata.admin_service import MetadataAdminParts, MetadataAdminServicer
from kvstore.metadata.events.event_log import BlockEventLog
from kvstore.metadata.events.subscription import tell_served
from kvstore.metadata.gauges import MetadataGauges
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.indexing.lookup import Lookups
from kvstore.metadata.membership.maintenance import Maintenance
from kvstore.metadata.membership.node_admin import NodeAdmin
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.retention.policies import RetentionPolicies
from kvstore.metadata.retention.settings_store import SettingsStore
from kvstore.metadata.scheduling.planner_service import PlannerService
from kvstore.metadata.scheduling.scheduler_service import SchedulerService
from kvstore.metadata.service import SERVICE_NAME, MetadataParts, MetadataService, add_to_server
from kvstore.observe.counters import Counters
from kvstore.observe.exposition import StoreCollector
from kvstore.observe.http import MetricsServer, serve
from kvstore.rpc.auth.tokens import tokens_file
from kvstore.rpc.server import BoundServer, build_aio_server

logger = logging.getLogger(__name__)


class MetadataServer:
    """Serves the Metadata service; ``start`` and ``stop`` once each, on one event loop.

    Args:
        config: what to serve. ``workers`` and ``ready_file`` concern ``kvstore.metadata.main``, not this class.
        worker: number of this process among those that share the port; worker 0 sweeps.
        clock: the host's monotonic clock; tests bring their own.
        counters: events, shown by ``GetStats``.
        namespaces: specs that the index before had: engines tell them only when they connect.
    """

    def __init__(
        self,
        config: MetadataConfig,
        *,
        worker: int = 0,
        clock: Clock | None = None,
        counters: Counters | None = None,
        namespaces: Sequence[tuple[NamespaceId, bytes]] = (),
    ) -> None:
        self._config = config
        self._worker = worker
        self._clock = clock if clock is not None else MonotonicClock()
        self.counters = counters if counters is not None else Counters()
        self.damaged = asyncio.Event()
        """Set when the index turns out to be damaged or is given up: stop this server, and start another, which makes it anew."""
        self._namespaces = namespaces
        self.kept_namespaces: Sequence[tuple[NamespaceId, bytes]] = ()
        """What the next server is to be given, where the index was given up."""
        self._index: LmdbIndex | None = None
        self._writes: IndexThread | None = None
        self._reads: IndexThread | None = None
        self._upkeep: Maintenance | None = None
        self._bound: BoundServer | None = None
        self._service: MetadataService | None = None
        self._metrics: MetricsServer | None = None
        self._feed: BlockEventLog | None = None

    async def start(self) -> str:
        """Opens the index, binds, and serves.

        Returns:
            The address, with its real port.

        Raises:
            Unavailable: the address cannot be bound, or the index cannot be opened.
            InvalidArgument: TLS files that cannot be read.
        """
        config = self._config
        loop = asyncio.get_running_loop()
        try:
            index = self._index = LmdbIndex.open(
                config.index_path,
                map_bytes=config.index_size_bytes,
                count=self.counters.add,
                on_damage=functools.partial(_set_soon, loop, self.damaged),
            )
            writes = self._writes = IndexThread("metadata-writes")
            reads = self._reads = IndexThread("metadata-reads")
            for namespace, spec in self._namespaces:
                index.put_namespace(namespace, spec)
            ttl_s = config.node_ttl_ms / 1000
            nodes = NodeTable(index, self._clock, ttl_s, self.counters)
            nodes.view()  # before a port is taken: damage shows here, and the next server needs the port
            planning = PlannerService(nodes, config.path_policy, self.counters, self._clock)
            scheduling = self._scheduling(planning, nodes) if config.workers == 1 else None
            feed = self._feed = self._block_feed(loop, index) if config.workers == 1 else None
            lookups = Lookups(index, nodes, self.counters)
            orders = NodeAdmin(index, nodes, writes, reads, self.counters, self._clock)
            orders_file = SettingsStore(config.orders_path)
            retention = RetentionPolicies(
                orders_file,
                index,
                nodes,
                writes,
                self.counters,
                self._clock,
                config.heartbeat_interval_ms / 2_000,
            )
            parts = MetadataParts(
                index,
                nodes,
                writes,
                reads,
                self.counters,
                config.heartbeat_interval_ms,
                planning,
                scheduling,
                lookups=lookups,
                orders=orders,
                retention=retention,
                feed=feed,
            )
            service = self._service = MetadataService(parts)
            admin = MetadataAdminParts(
                index,
                nodes,
                reads,
                lookups,
                planning,
                self._clock,
                config.workers,
                config.path_policy,
                config.settings,
                self._rebuild,
                retention,
                orders_file,
            )
            self._bound = await build_aio_server(
                [
                    functools.partial(add_to_server, service),
                    functools.partial(add_MetadataAdminServicer_to_server, MetadataAdminServicer(admin)),
                ],
                addresses=[config.listen],
                services=[SERVICE_NAME, METADATA_ADMIN],
                counters=self.counters,
                tls=config.tls.resolve(),
                tokens=None if config.tokens_file is None else tokens_file(config.tokens_file),
                on_refused_node=nodes.record_refusal,
                reuse_port=config.workers > 1,
            )
            also: list[Callable[[], None]] = [] if scheduling is None else [scheduling.expire]
            if feed is not None:
                also += [feed.expire, functools.partial(tell_served, feed, nodes)]
            self._upkeep = Maintenance(
                index,
                nodes,
                writes,
                self.counters,
                ttl_s=ttl_s,
                forget_s=config.node_forget_ms / 1000,
                sweeps=self._worker == 0,
                on_tick=[planning.expire, *also],
            )
            self._upkeep.start()
            await self._bound.start()
            if config.metrics_listen is not None:
                gauges = MetadataGauges(loop, index, nodes, planning, scheduling, feed)
                labels = {"worker": str(self._worker)} if config.workers > 1 else None
                collector = StoreCollector([self.counters], [gauges], process="metadata", labels=labels)
                self._metrics = serve(_moved(config.metrics_listen, self._worker), collector, {}, self.counters)
        except BaseException:
            await self.stop(0.0)
            raise
        (address,) = self._bound.addresses
        logger.info("metadata server listens on %s, index epoch %s", address, index.epoch.hex())
        return address

    def _rebuild(self) -> None:
        """Gives the index up: ``damaged`` is set, once the caller has been answered. Specs are kept for the next one."""
        assert self._index is not None
        self.kept_namespaces = self._index.namespaces()
        self._index.request_rebuild()

    def _block_feed(self, loop: asyncio.AbstractEventLoop, index: PrefixIndex) -> BlockEventLog:
        feed = BlockEventLog(loop, self._config.events_memory_bytes, self._config.max_subscribers, self._clock)
        index.listen(feed)
        return feed

    def _scheduling(self, planning: PlannerService, nodes: NodeTable) -> SchedulerService:
        config = self._config
        return SchedulerService(
            SchedulerLimits(config.alpha_tokens, config.beta_tokens, max_waiting=config.max_requests),
            planning.planner.queues,
            engine_ttl_s=config.engine_ttl_ms / 1000,
            request_ttl_s=config.request_ttl_ms / 1000,
            counters=self.counters,
            clock=self._clock,
            shut_nodes=lambda: frozenset(nodes.view().drain_orders),
        )

    @property
    def metrics_address(self) -> str:
        """Where ``/metrics`` is; empty: it is not served."""
        return self._metrics.address if self._metrics is not None else ""

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, lets those in progress end for up to ``grace_s``, and lets go of everything."""
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)  # a scrape under way is answered by this loop
            self._metrics = None
        if self._service is not None:
            self._service.end_streams()
        if self._feed is not None:
            self._feed.close()  # streams without end would wait for the grace to be over
        if self._bound is not None:
            await self._bound.stop(grace_s)
        if self._upkeep is not None:
            await self._upkeep.stop()
        for thread in (self._writes, self._reads):
            if thread is not None:
                await thread.close()
        if self._index is not None:
            self._index.close()
        self._bound = self._upkeep = self._writes = self._reads = self._index = self._feed = None


def _moved(address: str, worker: int) -> str:
    """A worker's own metrics address: as many ports further as its number; with port 0, any."""
    host, _, port = address.rpartition(":")
    return address if port == "0" else f"{host}:{int(port) + worker}"


def _set_soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Sets an event of a loop from any thread."""
    loop.call_soon_threadsafe(event.set)
