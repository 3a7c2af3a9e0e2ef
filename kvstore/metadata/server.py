"""One metadata server process: index, services, maintenance, and their lifecycle."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import grpc.aio

from kvproto.v1 import admin_pb2, metadata_pb2
from kvproto.v1.admin_pb2_grpc import add_MetadataAdminServicer_to_server
from kvstore.config.metadata import MetadataConfig
from kvstore.core.clock import BootTimeClock, Clock, MonotonicClock
from kvstore.core.types import NamespaceId
from kvstore.dualpath.scheduler import SchedulerLimits
from kvstore.health.host_reports import CertificateWatch
from kvstore.index.contract import PrefixIndex, ServerRole
from kvstore.metadata.admin_service import SERVICE_NAME as METADATA_ADMIN
from kvstore.metadata.admin_service import MetadataAdminParts, MetadataAdminServicer
from kvstore.metadata.cluster.event_journal import EventJournal
from kvstore.metadata.cluster.health_monitor import HealthMonitor
from kvstore.metadata.cluster.node_probes import NodeProbes
from kvstore.metadata.cluster.other_servers import OtherServers
from kvstore.metadata.events.contract import EventSource
from kvstore.metadata.events.event_log import BlockEventLog
from kvstore.metadata.events.subscription import LoggedEvents, report_served
from kvstore.metadata.gauges import MetadataGauges
from kvstore.metadata.history import read_totals
from kvstore.metadata.indexing.anti_entropy import IndexDigests
from kvstore.metadata.indexing.index_opening import open_index, open_settings, open_shared_feed
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.indexing.lookup import Lookups
from kvstore.metadata.indexing.range_checks import RangeChecks
from kvstore.metadata.membership.maintenance import Maintenance
from kvstore.metadata.membership.node_admin import NodeAdmin
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.membership.pause import PauseWatch
from kvstore.metadata.membership.server_table import ServerTable
from kvstore.metadata.retention.policies import RetentionPolicies
from kvstore.metadata.retention.settings_store import SettingsStore
from kvstore.metadata.roles.lease import LeaseChange
from kvstore.metadata.roles.owner_calls import PLANNING_ADMIN_METHODS, PLANNING_METHODS, OwnerCalls
from kvstore.metadata.roles.roles import AllRoles, LeasedRoles
from kvstore.metadata.scheduling.path_policy import PathPolicyOrder
from kvstore.metadata.scheduling.planner_service import PlannerService
from kvstore.metadata.scheduling.scheduler_service import SchedulerService
from kvstore.metadata.service import SERVICE_NAME, MetadataParts, MetadataService, add_to_server
from kvstore.observe.counters import Counters
from kvstore.observe.exposition import StoreCollector
from kvstore.observe.history import History
from kvstore.observe.http import MetricsServer, serve
from kvstore.process.tls import TlsConfig
from kvstore.rpc.address import reachable_address
from kvstore.rpc.auth.tokens import tokens_file
from kvstore.rpc.health_probe import SHARED_STATE
from kvstore.rpc.server import BoundServer, build_aio_server

logger = logging.getLogger(__name__)


_STOP_S: Final = 5.0
"""Limit for the end of each part of a server, beyond the grace period."""


class MetadataServer:
    """Serves the Metadata and MetadataAdmin services. Call ``start`` and ``stop`` once each, on one event loop.

    Args:
        config: configuration. ``kvstore.metadata.main`` uses ``ready_file``, not this class.
        clock: the host's monotonic clock; tests pass another one, which may jump without that counting as a pause.
        counters: counters of this process.
        namespaces: specs of the previous index: engines send them only when they connect.
    """

    def __init__(
        self,
        config: MetadataConfig,
        *,
        clock: Clock | None = None,
        counters: Counters | None = None,
        namespaces: Sequence[tuple[NamespaceId, bytes]] = (),
    ) -> None:
        self._config = config
        self._clock = clock if clock is not None else MonotonicClock()
        self._node_clock = clock if clock is not None else BootTimeClock()
        self._watches_pauses = clock is None
        self.counters = counters if counters is not None else Counters()
        self.damaged = asyncio.Event()
        """Set if the index is damaged or a rebuild is requested: stop this server and start another, which rebuilds the index."""
        self._namespaces = namespaces
        self.kept_namespaces: Sequence[tuple[NamespaceId, bytes]] = ()
        """Specs for the next server, if a rebuild is requested."""
        self._index: PrefixIndex | None = None
        self._settings: SettingsStore | None = None
        self._writes: IndexThread | None = None
        self._reads: IndexThread | None = None
        self._maintenance: Maintenance | None = None
        self._health: HealthMonitor | None = None
        self._servers: ServerTable | None = None
        self._journal: EventJournal | None = None
        self._bound: BoundServer | None = None
        self._service: MetadataService | None = None
        self._metrics: MetricsServer | None = None
        self._event_log: BlockEventLog | None = None
        self._leased: LeasedRoles | None = None
        self._owner_calls: OwnerCalls | None = None
        self._others: OtherServers | None = None
        self._events: EventSource | None = None

    async def start(self) -> str:
        """Open the index, bind the address, and serve.

        Returns:
            The address, with its real port.

        Raises:
            Unavailable: the address cannot be bound, or the index cannot be opened.
            InvalidArgument: TLS files that cannot be read.
        """
        config = self._config
        try:
            index = await self._open_index()
            settings = self._settings = open_settings(config, index, self.counters)
            await settings.start()
            tls = config.tls.resolve()
            parts = self._make_parts(index, settings, tls)
            servers = parts.others.table
            path_policy = PathPolicyOrder(settings, parts.planner, config.path_policy)
            path_policy.follow()
            health = self._health = self._make_health(parts, settings, tls, servers)
            history = History(functools.partial(read_totals, self.counters, index))
            self._bound = await self._build_server(parts, path_policy, health, history, tls, servers)
            if index.leases_roles:
                await self._bound.show_serving(SHARED_STATE, serving=True)
            shown = self._bound.addresses[0]
            if self._leased is not None:
                shown = await self._advertised(shown)
                await self._leased.start(shown)
            self._maintenance = self._make_maintenance(parts, path_policy, history)
            self._maintenance.start()
            health.start()
            await self._bound.start()
            if config.metrics_listen is not None:
                self._metrics = self._serve_metrics(config.metrics_listen, parts, health, servers)
        except BaseException:
            await self.stop(0.0)
            raise
        (address,) = self._bound.addresses
        servers.start(shown)
        logger.info("metadata server started: %s (index_epoch=%s)", address, index.epoch.hex())
        parts.journal.record(
            "metadata_started", "", f"The metadata server started at {address} (index epoch {index.epoch.hex()})."
        )
        return address

    async def _advertised(self, bound: str) -> str:
        """Where other servers reach this one."""
        if self._config.advertise is not None:
            return self._config.advertise
        return await asyncio.to_thread(reachable_address, bound, self._config.valkey_servers)

    # ---- parts ----
    async def _open_index(self) -> PrefixIndex:
        on_damage = functools.partial(_set_soon, asyncio.get_running_loop(), self.damaged)
        index = self._index = await open_index(self._config, self.counters, on_damage)
        for namespace, spec in self._namespaces:
            await asyncio.to_thread(index.put_namespace, namespace, spec)
        return index

    def _make_parts(self, index: PrefixIndex, settings: SettingsStore, tls: TlsConfig | None) -> MetadataParts:
        config = self._config
        writes = self._writes = IndexThread("metadata-writes")
        reads = self._reads = IndexThread("metadata-reads")
        nodes = NodeTable(index, self._node_clock, config.node_ttl_ms / 1000, self.counters)
        nodes.view()  # before the port is bound: damage shows here, and the next server needs the port
        planner = PlannerService(nodes, config.path_policy, self.counters, self._clock)
        if config.valkey_servers:
            self._events = open_shared_feed(config, index, reads, nodes, self.counters)
        else:
            self._event_log = self._make_event_log(index)
            self._events = LoggedEvents(self._event_log, index, reads, nodes, self.counters)
        scheduler = self._make_scheduler(planner, nodes)
        self._leased = self._make_leased_roles(index, nodes, planner, scheduler) if index.leases_roles else None
        roles = self._leased or AllRoles()
        self._journal = EventJournal(config.events_path, self.counters)
        self._servers = self._make_server_table(index)
        self._others = OtherServers(self._servers, self.counters, tls)
        return MetadataParts(
            index,
            nodes,
            writes,
            reads,
            self.counters,
            config.heartbeat_interval_ms,
            planner,
            scheduler,
            roles=roles,
            lookups=Lookups(index, nodes, self.counters),
            node_admin=NodeAdmin(index, nodes, writes, reads, self.counters),
            retention=RetentionPolicies(
                settings, index, nodes, reads, roles, self.counters, self._clock, config.heartbeat_interval_ms / 2_000
            ),
            events=self._events,
            event_log=self._event_log,
            journal=self._journal,
            digests=IndexDigests(index, reads, self._clock),
            range_checks=RangeChecks(index, nodes),
            others=self._others,
        )

    def _make_leased_roles(
        self, index: PrefixIndex, nodes: NodeTable, planner: PlannerService, scheduler: SchedulerService
    ) -> LeasedRoles:
        def begin_or_end(role: ServerRole, _: LeaseChange) -> None:
            if role is ServerRole.PLAN:
                planner.clear()
                scheduler.clear()

        return LeasedRoles(index, self._node_clock, self.counters, begin_or_end, nodes.index_was_away)

    def _make_server_table(self, index: PrefixIndex) -> ServerTable:
        server_id = secrets.token_hex(8) if self._leased is None else self._leased.server_id
        return ServerTable(index, server_id, self._node_clock, self._config.node_ttl_ms / 1000, self.counters)

    def _make_health(
        self, parts: MetadataParts, settings: SettingsStore, tls: TlsConfig | None, servers: ServerTable
    ) -> HealthMonitor:
        return HealthMonitor(
            parts.index,
            self._config.index_path,
            parts.nodes,
            settings,
            parts.retention,
            NodeProbes(self._clock, tls=tls is not None),
            CertificateWatch(tls, "the metadata server"),
            parts.journal,
            self.counters,
            servers,
        )

    async def _build_server(
        self,
        parts: MetadataParts,
        path_policy: PathPolicyOrder,
        health: HealthMonitor,
        history: History,
        tls: TlsConfig | None,
        servers: ServerTable,
    ) -> BoundServer:
        config = self._config
        service = self._service = MetadataService(parts)
        admin_parts = MetadataAdminParts(
            parts.index,
            parts.nodes,
            parts.reads,
            parts.lookups,
            parts.planner,
            self._clock,
            path_policy,
            config.settings,
            self._rebuild,
            parts.retention,
            health,
            history,
            parts.journal,
            servers,
            parts.others,
        )
        admin = MetadataAdminServicer(admin_parts)
        register: list[Callable[[grpc.aio.Server], None]] = [
            functools.partial(add_to_server, service),
            functools.partial(add_MetadataAdminServicer_to_server, admin),
        ]
        if self._leased is not None:
            calls = self._owner_calls = OwnerCalls(self._leased, self.counters, tls)
            self._leased.on_tick = calls.check_owner
            services = metadata_pb2.DESCRIPTOR.services_by_name, admin_pb2.DESCRIPTOR.services_by_name
            register += [
                functools.partial(calls.register, services[0]["Metadata"], service, PLANNING_METHODS),
                functools.partial(calls.register, services[1]["MetadataAdmin"], admin, PLANNING_ADMIN_METHODS, unowned=True),
            ]
        return await build_aio_server(
            register,
            addresses=[config.listen],
            services=[SERVICE_NAME, METADATA_ADMIN],
            counters=self.counters,
            tls=tls,
            tokens=None if config.tokens_file is None else tokens_file(config.tokens_file),
            on_refused_node=parts.nodes.record_refusal,
        )

    def _make_maintenance(self, parts: MetadataParts, path_policy: PathPolicyOrder, history: History) -> Maintenance:
        def expire() -> None:
            if parts.roles.holds(ServerRole.PLAN):
                parts.planner.expire()
                parts.scheduler.expire()

        on_tick: list[Callable[[], None]] = [
            expire,
            path_policy.follow,
            history.record_if_due,
            parts.retention.tick,
            parts.range_checks.tick,
        ]
        if parts.event_log is not None:
            on_tick += [parts.event_log.expire, functools.partial(report_served, parts.event_log, parts.nodes)]
        ttl_s = self._config.node_ttl_ms / 1000
        return Maintenance(
            parts.index,
            parts.nodes,
            parts.writes,
            self.counters,
            ttl_s=ttl_s,
            forget_s=self._config.node_forget_ms / 1000,
            roles=parts.roles,
            on_tick=on_tick,
            pauses=PauseWatch(ttl_s, parts.nodes.paused) if self._watches_pauses else None,
        )

    def _serve_metrics(
        self, listen: str, parts: MetadataParts, health: HealthMonitor, servers: ServerTable
    ) -> MetricsServer | None:
        gauges = MetadataGauges(
            asyncio.get_running_loop(),
            parts.index,
            parts.nodes,
            parts.roles,
            parts.planner,
            parts.scheduler,
            parts.events,
            parts.event_log,
            servers,
            index_disk=lambda: health.index_disk,
        )
        return serve(listen, StoreCollector([self.counters], [gauges], process="metadata"), {}, self.counters)

    def _rebuild(self) -> None:
        """Request a rebuild of the index: sets ``damaged`` soon. Keeps the specs for the next server."""
        assert self._index is not None
        self.kept_namespaces = self._index.namespaces()
        self._index.request_rebuild()

    def _make_event_log(self, index: PrefixIndex) -> BlockEventLog:
        event_log = BlockEventLog(
            asyncio.get_running_loop(), self._config.events_memory_bytes, self._config.max_subscribers, self._clock
        )
        index.listen(event_log)
        return event_log

    def _make_scheduler(self, planner: PlannerService, nodes: NodeTable) -> SchedulerService:
        config = self._config
        return SchedulerService(
            SchedulerLimits(config.alpha_tokens, config.beta_tokens, max_waiting=config.max_requests),
            planner.planner.queues,
            engine_ttl_s=config.engine_ttl_ms / 1000,
            request_ttl_s=config.request_ttl_ms / 1000,
            counters=self.counters,
            clock=self._clock,
            draining_nodes=lambda: frozenset(nodes.view().drain_orders),
        )

    @property
    def events(self) -> EventSource | None:
        """Block events for subscribers; None: the server does not run."""
        return self._events

    @property
    def event_log(self) -> BlockEventLog | None:
        """Log of block events; None: all servers of the index share the events, or the server does not run."""
        return self._event_log

    @property
    def metrics_address(self) -> str:
        """Address of ``/metrics``; empty: it is not served."""
        return self._metrics.address if self._metrics is not None else ""

    async def stop(self, grace_s: float) -> None:
        """Reject new calls, wait up to ``grace_s`` for the calls in progress, and close everything."""
        if self._metrics is not None:
            await _bounded("the metrics server", asyncio.to_thread(self._metrics.stop))  # this loop answers a scrape in progress
            self._metrics = None
        if self._leased is not None:
            await _bounded("the roles", self._leased.stop())  # before the grace period: another server plans meanwhile
        if self._service is not None:
            self._service.end_streams()
        if self._events is not None:
            self._events.close()  # endless streams would otherwise last until the end of the grace period
        if self._bound is not None:
            await _bounded("gRPC", self._bound.stop(grace_s), grace_s)
        if self._owner_calls is not None:
            await _bounded("the connection to the planning server", self._owner_calls.close())
        if self._others is not None:
            await _bounded("the connections to other metadata servers", self._others.close())
        if self._health is not None:
            await _bounded("the health task", self._health.stop())
        if self._servers is not None:
            await _bounded("the table of metadata servers", self._servers.stop())
        if self._journal is not None:
            if self._bound is not None:
                self._journal.record("metadata_stopped", "", f"The metadata server at {self._bound.addresses[0]} stopped.")
            await _bounded("the file of cluster events", asyncio.to_thread(self._journal.flush))
        if self._maintenance is not None:
            await _bounded("maintenance", self._maintenance.stop())
        if self._settings is not None:
            await _bounded("the settings", self._settings.stop())
        for thread in (self._writes, self._reads):
            if thread is not None:
                await _bounded("an index thread", thread.close())
        if self._index is not None:
            await _bounded("the index", self._index.close_async())
        self._bound = self._health = self._servers = self._journal = self._maintenance = self._writes = self._reads = (
            self._settings
        ) = self._index = self._event_log = self._events = self._leased = self._owner_calls = self._others = None


async def _bounded(what: str, ending: Awaitable[None], grace_s: float = 0.0) -> None:
    """Wait for the end of a part, but not for ever: a server that hangs at its stop would answer no lookup until it is killed."""
    try:
        async with asyncio.timeout(grace_s + _STOP_S):
            await ending
    except TimeoutError:
        logger.exception("shutdown step timed out: %s (timeout_s=%.0f)", what, grace_s + _STOP_S)


def _set_soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set an event of an event loop from any thread."""
    loop.call_soon_threadsafe(event.set)
