"""The node daemon: builds the parts, recovers the volumes, serves, and stops gracefully."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

from kvproto.v1 import admin_pb2_grpc, common_pb2, node_pb2, node_pb2_grpc
from kvstore import native
from kvstore.config.node import MountSection, NodeConfig
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import NotFound
from kvstore.core.types import BootId, NodeId, SessionId, VolumeId
from kvstore.health.host_reports import CertificateWatch
from kvstore.node.ahead.read_ahead import AheadReader
from kvstore.node.base.buffer_budget import BufferBudget
from kvstore.node.base.process_stall import ProcessStallDetector
from kvstore.node.base.slow_sources import SlowSources
from kvstore.node.control.admission_gate import AdmissionGate
from kvstore.node.control.drain import Drainer
from kvstore.node.control.metadata_calls import MetadataCalls
from kvstore.node.control.migrator import BlockMigrator
from kvstore.node.control.pull import Puller
from kvstore.node.control.pull_client import PullClient
from kvstore.node.control.retention import RetentionEnforcer
from kvstore.node.control.rules_file import NAME as RULES_FILE
from kvstore.node.copies.copier import Copier
from kvstore.node.durability.adoption import AdoptionParts, OwnerPresence, VolumeAdopter, findings
from kvstore.node.durability.read_rate import ReadRate
from kvstore.node.durability.recovery import VolumeFolder, open_owned, open_volumes, own_volumes, recover
from kvstore.node.durability.shutdown_flush import flush_on_shutdown
from kvstore.node.durability.volume_checks import VolumeChecks
from kvstore.node.durability.volume_watch import VolumeWatch
from kvstore.node.durability.writeback import LocalTarget, RemoteTarget, WriteBack
from kvstore.node.hints.session_hints import SessionHints
from kvstore.node.loads.layered import LayeredLoader
from kvstore.node.loads.loader import Loader
from kvstore.node.loads.mounts import Mount, Mounts
from kvstore.node.loads.nixl import NixlAgents
from kvstore.node.loads.peers import PeerAddress, Peers
from kvstore.node.loads.prompt_wait import PromptWaits
from kvstore.node.loads.provider import NodeProvider
from kvstore.node.loads.timings import LoadTimings
from kvstore.node.publish.health import HealthReporter
from kvstore.node.publish.publisher import IndexPublisher
from kvstore.node.rpc.admin_service import SERVICE_NAME as NODE_ADMIN
from kvstore.node.rpc.admin_service import NodeAdminServicer
from kvstore.node.rpc.gauges import NodeGauges
from kvstore.node.rpc.history import read_totals
from kvstore.node.rpc.links import Links
from kvstore.node.rpc.parts import NodeParts
from kvstore.node.rpc.service import NodeServicer
from kvstore.node.rpc.sessions import Sessions
from kvstore.node.rpc.trusted_nodes import TrustedNodes
from kvstore.node.rpc.wait_threads import WaitThreads
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import NodeVolume
from kvstore.node.state.namespaces import NamespaceRegistry, NodeNamespace, TenantLedger
from kvstore.node.state.residency import Residency
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.exposition import StoreCollector
from kvstore.observe.failure_tracker import FailureTracker
from kvstore.observe.history import History
from kvstore.observe.http import MetricsServer, serve
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.observe.slow_loads import RecentLoads
from kvstore.process.ready_file import write_ready_file_aio
from kvstore.rpc.address import check_listen_address, check_metrics_address, is_unix
from kvstore.rpc.auth.tokens import TokenSource, tokens_file
from kvstore.rpc.client import call_in_current_scope, connect
from kvstore.rpc.codec import spec_to_proto
from kvstore.rpc.health_probe import HealthProbe
from kvstore.rpc.server import METADATA_SERVICE, BoundServer, build_aio_server
from kvstore.tiers.arena import DramArena
from kvstore.tiers.eviction.policy import make_policy
from kvstore.tiers.nvme.slab import NvmeSlab
from kvstore.transport.addresses import parse_address
from kvstore.transport.contract import BlockPeer
from kvstore.transport.liveness import LivenessMonitor
from kvstore.transport.nixl.agent import NixlAgent, Region
from kvstore.transport.nixl.peer import NixlPeer
from kvstore.transport.nixl.responder import NixlResponder
from kvstore.transport.shaping.traffic import KvTraffic, TrafficClass
from kvstore.transport.shm import ArenaServer
from kvstore.transport.tcp.peer import TcpPeer
from kvstore.transport.tcp.server import TcpServer
from kvstore.transport.tickets import TicketAuthority
from kvstore.transport.tls import PeerTls, server_context

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.5
BUFFER_SHARE = 4
"""Default size of the prefill buffer and of the decode buffer: this fraction (1/n) of the arena."""
REGISTER_WAIT_S = 10.0
STOP_PARTS = 4
"""Each wait of an orderly stop may use this fraction (1/n) of the remaining time; write-back may use all but one."""
STOP_CALLS_S = 1.0
"""Bound for calls and reads in progress, after all blocks are durable."""
STOP_POLL_S = 0.01
LEAVE_S = 2.0
"""Timeout of the unregistration."""
MAX_HINT_CALLS = 256
"""Maximum number of concurrent calls with hints."""
MOVE_SHARE = 8
"""Other nodes pull at most this fraction (1/n) of the arena at once."""
RPC_TIMEOUT_S = 5.0


class NodeDaemon:
    """A running node. ``start`` and ``stop`` once each, on one event loop."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.counters = Counters()
        self._clock = MonotonicClock()
        self._boot_id = BootId(secrets.token_bytes(16))
        self._accounts = TenantLedger(partial(make_policy, config.policy))
        self._namespaces = NamespaceRegistry(self._accounts)
        has_tls = config.tls.resolve() is not None
        for address in (config.listen, config.data_listen, config.storage_listen or config.data_listen):
            check_listen_address(address, "node.", tls=has_tls, allow_insecure=config.allow_insecure_remote)
        check_metrics_address(config.metrics_listen, allow_remote=config.allow_insecure_remote or config.allow_insecure_metrics)
        self._tokens = None if config.tokens_file is None else tokens_file(config.tokens_file)
        self._token = TokenSource.of(file=config.token_file)
        self._metadata = MetadataCalls(config, self._token)
        config.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._socket = config.run_dir / f"{config.node_id}.sock"
        self._arena_socket = config.run_dir / f"{config.node_id}.arena"
        self._open_volumes()
        self._build()
        self._stopping = threading.Event()
        self._lease_expiry_thread = threading.Thread(target=self._expire_leases, name="kvstore-leases", daemon=True)
        self._watch = VolumeWatch(self.table, self.counters, self._read_rate.measure_if_due)
        self._server: BoundServer | None = None
        self._publisher: IndexPublisher | None = None
        self._recent = RecentLoads()
        self._history = History(partial(read_totals, self.counters, self.table))
        self._metrics: MetricsServer | None = None

    # ---------------------------------------------------------------- parts
    def _open_volumes(self) -> None:
        config = self.config
        self._arena = DramArena(
            volume_id=VolumeId(f"{config.node_id}/dram"),
            capacity_bytes=config.dram_bytes,
            huge_pages=config.huge_pages,
            prefault=config.prefault,
            counters=self.counters,
        )
        self._opened = open_volumes(config, self.counters)

    def _build(self) -> None:
        node_volumes = self._build_table()
        self._build_loads()
        self._build_services()
        self._adopters = self._make_adopters(node_volumes)

    def _build_table(self) -> list[NodeVolume]:
        """Make the block table with the blocks of the volumes, which are returned, and the rules of their namespaces."""
        config, counters, clock = self.config, self.counters, self._clock
        slabs = self._opened.slabs
        volumes = [self._arena.volume_id, *(slab.volume_id for slab in slabs)]
        self._log = ReplicaChangeLog(volumes, counters, clock, keep=config.metadata is not None)
        node_volumes = [NodeVolume(slab, folder=slab.path) for slab in slabs]
        for node_volume in node_volumes:
            self._set_guard(node_volume)
        self._writes_back = bool(config.nvme) or config.write_back_to is not None
        residency = Residency(
            self._arena,
            make_policy(config.policy),
            node_volumes,
            self._log,
            counters,
            clock,
            make_durable_policy=partial(make_policy, config.policy),
            accounts=self._accounts,
        )
        self.table = BlockTable(residency, writes_back=self._writes_back, cache_loads=config.cache_loads)
        rules_file = config.nvme[0].path / RULES_FILE if config.nvme and config.metadata is not None else None
        self._enforcer = RetentionEnforcer(self.table, self._namespaces, self._metadata.list_specs, counters, rules_file)
        recover(self.table, self._namespaces, counters)
        self._enforcer.recall()
        return node_volumes

    def _build_loads(self) -> None:
        """Make what brings blocks into the arena: peers, mounts, loaders, and buffers that bound them."""
        config, counters, clock = self.config, self.counters, self._clock
        self._traffic = _compute_traffic(config, counters)
        self._nixl = NixlAgents(config, Region(self._arena.address, self._arena.mapped_bytes), counters)
        self._nixl.open()
        known = None if self._token is None else TrustedNodes(config.metadata, config.tls.resolve(), self._token)
        probe = HealthProbe(partial(connect, tls=config.tls.resolve()))
        self._liveness = LivenessMonitor(probe, counters, on_close=probe.close)
        self._peers = Peers(self._make_peer, None if known is None else known.check)
        self._mounts = Mounts([])
        for mount in config.mounts:
            self._mount(VolumeFolder(VolumeId(mount.volume), mount.path, direct=mount.direct))
        for adopted in self._opened.adopted_by_others:
            self._mount(adopted)
        self._loader = Loader(
            NodeId(config.node_id),
            self.table,
            self._peers,
            self._mounts,
            counters,
            clock,
            window_bytes=config.load_window_bytes,
            threads=config.load_threads,
        )
        share = config.dram_bytes // BUFFER_SHARE
        prefill_buffer = BufferBudget("prefill_buffer", config.prefill_buffer_bytes or share, clock, counters)
        decode_buffer = BufferBudget("decode_buffer", config.decode_buffer_bytes or share, clock, counters)
        ahead_bytes = share if config.read_ahead_bytes is None else config.read_ahead_bytes
        read_ahead = BufferBudget("read_ahead", ahead_bytes, clock, counters)
        self._buffers = {"prefill_buffer": prefill_buffer, "decode_buffer": decode_buffer, "read_ahead": read_ahead}
        self._ahead = AheadReader(self.table, self._loader, read_ahead, counters, clock)
        self._hints = SessionHints(self.table, self._ahead, config.hint_share, counters, clock)
        self._hint_calls = WaitThreads(MAX_HINT_CALLS, "hints", counters, threads=1)
        self._layered = LayeredLoader(
            NodeId(config.node_id),
            self.table,
            self._peers,
            self._loader,
            prefill_buffer,
            counters,
            clock,
            window_bytes=config.load_window_bytes,
            threads=config.load_threads,
        )
        self._prompts = PromptWaits(NodeId(config.node_id), self.table, self._loader, decode_buffer, counters)

    def _build_services(self) -> None:
        """Make what serves engines and peers, write-back, and reports about this node."""
        config, counters, clock = self.config, self.counters, self._clock
        self._gate = AdmissionGate(self.table, counters)
        self._drainer = Drainer(
            config.node_id,
            self._gate,
            self.table,
            self._busy,
            counters,
            clock,
            writes_back=self._writes_back,
            patience_s=config.prepare_ttl_ms / 1000,
        )
        self.sessions = Sessions(
            self.table,
            self._gate,
            counters,
            clock,
            lease_s=config.lease_ms / 1000,
            prepare_ttl_s=config.prepare_ttl_ms / 1000,
        )
        self._authority = TicketAuthority(secrets.token_bytes(32), self._boot_id, clock)
        provider = NodeProvider(self._namespaces, self.table, self._gate, self._loader, self._layered, clock)
        self._puller = Puller(self.table, provider, self._peers, self._gate, counters)
        self._data = self._data_server(provider, config.data_listen, self._traffic, self._nixl.serving)
        marked = KvTraffic(TrafficClass(config.kv_dscp), counters)
        self._storage_data = None if config.storage_listen is None else self._data_server(provider, config.storage_listen, marked)
        self._data_servers = [self._data] if self._storage_data is None else [self._data, self._storage_data]
        self._arena_server = ArenaServer(self._arena_socket, self._share_arena, self.sessions.end, counters=counters)
        storage_node_failures = FailureTracker()
        target = (
            LocalTarget(self.table, counters, clock)
            if config.write_back_to is None
            else RemoteTarget(self.table, self._peers, self._metadata.find_storage_node, counters, clock, storage_node_failures)
        )
        self._stall_detector = ProcessStallDetector(clock)
        self._slow_sources = SlowSources(NodeId(config.node_id), clock)
        self._health = HealthReporter(
            self.table,
            self._log if config.metadata is not None else None,
            clock,
            storage_node_failures,
            CertificateWatch(config.tls.resolve(), f"node {config.node_id}"),
            self._slow_sources,
            self._stall_detector,
            lambda: findings(self._adopters),
        )
        self._write_back = WriteBack(self.table, target, counters)
        self._read_rate = ReadRate(self.table, counters, clock, direct=all(slab.direct for slab in self._opened.slabs))

    def _set_guard(self, node_volume: NodeVolume) -> None:
        node_volume.set_guard(self.counters, stall_s=self.config.volume_stall_ms / 1000, readers=self.config.load_threads)

    def _mount(self, location: VolumeFolder) -> None:
        """Mount a volume for reading."""
        self._mounts.add(
            Mount(
                MountSection(volume=location.volume_id, path=location.path, direct=location.direct),
                io_threads=self.config.io_threads,
                counters=self.counters,
                clock=self._clock,
                stall_s=self.config.volume_stall_ms / 1000,
            )
        )

    def _make_adopters(self, node_volumes: Sequence[NodeVolume]) -> list[VolumeAdopter]:
        """Return the adopters of this node's own volumes and, if it adopts others, of its mounts."""
        config = self.config
        self._presence = OwnerPresence(self._metadata.connect)
        self._adoption = AdoptionParts(
            node_id=NodeId(config.node_id),
            after_s=config.adopt_after_ms / 1000,
            table=self.table,
            namespaces=self._namespaces,
            replica_log=self._log,
            is_away=self._presence.is_away,
            may_adopt=lambda: not self._gate.closed,
            open_volume=partial(open_owned, config, counters=self.counters),
            make_guard=self._set_guard,
            mount=self._mount,
            counters=self.counters,
            clock=self._clock,
        )
        held = {node_volume.volume_id: node_volume for node_volume in node_volumes}
        locations = own_volumes(config)
        if config.adopt_mounts:
            locations += [VolumeFolder(VolumeId(mount.volume), mount.path, direct=mount.direct) for mount in config.mounts]
        return [VolumeAdopter(one, self._adoption, held.get(one.volume_id)) for one in locations]

    def _data_server(self, provider: NodeProvider, listen: str, traffic: KvTraffic, nixl: NixlAgent | None = None) -> TcpServer:
        tls = self.config.tls.resolve()
        return TcpServer(
            provider,
            listen,
            authority=self._authority,
            tls=server_context(tls) if tls is not None else None,
            counters=self.counters,
            traffic=traffic,
            one_sided=None if nixl is None else partial(NixlResponder, nixl),
        )

    def _make_peer(self, address: PeerAddress, namespace: NodeNamespace) -> BlockPeer:
        spec = namespace.spec
        if spec is None:
            raise NotFound("the spec of the namespace is not known here", namespace=namespace.namespace_id.hex())
        channel = connect(address.control_address, tls=self.config.tls.resolve(), token=self._token)
        stub = node_pb2_grpc.NodeStub(channel)
        request = node_pb2.IssueTicketRequest(spec=spec_to_proto(spec))

        server = self._liveness.server(address.control_address)

        def ticket() -> bytes:
            return bytes(call_in_current_scope(stub.IssueTicket, request, RPC_TIMEOUT_S, server.waiting).ticket)

        reading = self._nixl.reading
        make = TcpPeer if reading is None else partial(NixlPeer, agent=reading)
        return make(
            address.data_address,
            ticket=ticket,
            streams=self.config.peer_streams,
            tls=PeerTls.of(self.config.tls.resolve()),
            counters=self.counters,
            traffic=self._traffic,
            liveness=self._liveness,
            control_address=address.control_address,
        )

    def _pull_client(self, metadata: str) -> PullClient:
        return PullClient(self.info, metadata, self.counters, tls=self.config.tls.resolve(), token=self._token)

    def _share_arena(self, session_id: SessionId) -> tuple[int, int] | None:
        if not self.sessions.connect(session_id):
            return None
        return self._arena.fileno(), self._arena.mapped_bytes

    # ---------------------------------------------------------------- start and stop
    async def start(self) -> common_pb2.NodeInfo:
        """Start serving. Returns this node's addresses."""
        config = self.config
        for data_server in self._data_servers:
            data_server.start()
        self._arena_server.start()
        self.info = self._describe_node()
        self._parts = self._make_parts()
        self._servicer, self._admin = NodeServicer(self._parts), NodeAdminServicer(self._parts)
        self._socket.unlink(missing_ok=True)
        self._server = server = await build_aio_server(
            [
                partial(node_pb2_grpc.add_NodeServicer_to_server, self._servicer),
                partial(admin_pb2_grpc.add_NodeAdminServicer_to_server, self._admin),
            ],
            addresses=[config.listen, f"unix:{self._socket}"],
            services=["kvstore.v1.Node", NODE_ADMIN],
            counters=self.counters,
            tls=config.tls.resolve(),
            tokens=self._tokens,
        )
        self.info.control_address = next(self._advertised(one) for one in server.addresses if not is_unix(one))
        await server.start()
        self._socket.chmod(0o600)
        self._stall_detector.start()
        self._mounts.start()
        self._write_back.start()
        self._lease_expiry_thread.start()
        self._watch.start()
        if config.metadata is not None:
            await self._start_index(config.metadata, server)
        if config.metrics_listen is not None:
            collector = StoreCollector([self.counters], [NodeGauges(self._parts)], process="node")
            self._metrics = serve(config.metrics_listen, collector, {"/loads": self._recent.page}, self.counters)
        if config.ready_file is not None:
            await self._write_ready(config.ready_file)
        log.info("node started: %s (control=%s, data=%s)", config.node_id, self.info.control_address, self.info.data_address)
        return self.info

    def _describe_node(self) -> common_pb2.NodeInfo:
        """Return what registrations say about this node. Its control address follows when the server is bound."""
        config = self.config
        info = common_pb2.NodeInfo(
            node_id=config.node_id,
            boot_id=self._boot_id,
            roles=config.roles,
            data_address=self._advertised(self._data.address),
            storage_bytes_per_s=config.storage_bandwidth or config.storage_link_bytes_per_s,
            compute_bytes_per_s=config.compute_bandwidth or config.compute_link_bytes_per_s,
            storage_source=_source(config.storage_bandwidth, config.storage_link_bytes_per_s),
            compute_source=_source(config.compute_bandwidth, config.compute_link_bytes_per_s),
            local_socket=f"unix:{self._socket}",
            mounts=[mount.volume_id for mount in self._mounts.all],
            zone=config.zone,
        )
        if self._storage_data is not None:
            host, _, port = self._storage_data.address.rpartition(":")
            info.storage_address = f"{config.storage_advertise_host or host}:{port}"
        for volume in (self._arena, *self._opened.slabs):
            capacity = volume.usage().capacity_bytes
            uid = volume.uid if isinstance(volume, NvmeSlab) else b""
            tier = cast("common_pb2.Tier", int(volume.tier))
            info.volumes.add(volume_id=volume.volume_id, tier=tier, capacity_bytes=capacity, uid=uid)
        return info

    def _make_parts(self) -> NodeParts:
        """Return the parts that the RPCs use."""
        config = self.config
        networks = {"compute": self._data.address}
        if self._storage_data is not None:
            networks["storage"] = self._storage_data.address
        return NodeParts(
            config=config,
            info=self.info,
            counters=self.counters,
            clock=self._clock,
            table=self.table,
            namespaces=self._namespaces,
            sessions=self.sessions,
            loader=self._loader,
            layered=self._layered,
            prompts=self._prompts,
            ahead=self._ahead,
            hints=self._hints,
            hint_calls=self._hint_calls,
            buffers=self._buffers,
            gate=self._gate,
            puller=self._puller,
            drainer=self._drainer,
            enforcer=self._enforcer,
            checks=VolumeChecks(self.table, self.counters, self._clock, self._read_rate.of),
            replica_log=self._log,
            health=self._health,
            history=self._history,
            timings=LoadTimings(
                NodeId(config.node_id), config.slow_load_ms / 1000, self.counters, self._recent, self._slow_sources, self._clock
            ),
            stall_detector=self._stall_detector,
            authority=self._authority,
            traffic=self._traffic,
            links=Links(networks),
            nixl=self._nixl,
            io_engines=self._io_engines,
            arena_socket=str(self._arena_socket),
            arena_bytes=self._arena.mapped_bytes,
        )

    async def _start_index(self, metadata: str, server: BoundServer) -> None:
        """Register at the metadata server, and start what needs it."""
        config = self.config
        window_bytes = min(config.move_window_bytes, config.dram_bytes // MOVE_SHARE)
        migrator = BlockMigrator(
            self._pull_client(metadata),
            self.counters,
            window_bytes=window_bytes,
            bytes_per_s=config.move_bandwidth,
            pause=self._drainer.pause,
        )
        copier = Copier(
            self._pull_client(metadata),
            self.table,
            self._gate,
            self.counters,
            self._clock,
            window_bytes=window_bytes,
            bytes_per_s=config.move_bandwidth,
            recopy_after_s=config.recopy_after_ms / 1000,
        )
        publisher = IndexPublisher(
            metadata,
            self.info,
            self.table,
            self._log,
            self.counters,
            tls=config.tls.resolve(),
            token=self._token,
            anti_entropy_interval_s=config.anti_entropy_interval_ms / 1000,
            health=self._health,
            listeners=[self._enforcer, self._drainer, copier],
            read_rate=lambda: self._read_rate.bytes_per_s,
            on_connected=partial(self._show_connected, asyncio.get_running_loop(), server),
        )
        # these parts need this node's addresses, which are known only now; the parts that use them were made before
        self._drainer.migrator = migrator
        self._parts.copier, self._parts.publisher = copier, publisher
        self._health.why_copies_late = copier.late
        self._adoption.registration = self._publisher = publisher
        await server.show_serving(METADATA_SERVICE, serving=False)  # until the node has registered
        self._drainer.start()
        publisher.start()
        self._enforcer.start()
        copier.start()
        if not await asyncio.to_thread(publisher.wait_registered, REGISTER_WAIT_S):
            why = self._health.why_not_published() or "no answer yet"
            log.warning("metadata server not used: %s (%s); serving without it, and trying again", metadata, why)
        for adopter in self._adopters:
            adopter.start()

    @staticmethod
    def _show_connected(loop: asyncio.AbstractEventLoop, server: BoundServer, connected: bool) -> None:  # a callback
        """Set in the health service whether the metadata server accepts heartbeats. To be called from any thread."""
        asyncio.run_coroutine_threadsafe(server.show_serving(METADATA_SERVICE, serving=connected), loop)

    async def _write_ready(self, path: Path) -> None:
        ready = {
            "node_id": self.config.node_id,
            "address": self.info.control_address,
            "data_address": self.info.data_address,
            "storage_address": self.info.storage_address or self.info.data_address,
            "local_socket": self.info.local_socket,
            "metrics_address": self._metrics.address if self._metrics is not None else "",
            "stop_grace_s": self.config.stop_grace_ms / 1000,
        }
        await write_ready_file_aio(path, **ready)

    async def stop(self) -> None:
        """Stop gracefully, within ``stop_grace_s``: accept no new blocks, unregister, and finish earlier work.

        Engines and peers are answered until their stores are durable, or their part of the time has passed. Then the servers
        stop. Blocks that are not durable by the deadline are lost and logged.
        """
        until_s = self._clock.now_s() + self.config.stop_grace_ms / 1000
        self._gate.stop()
        await asyncio.to_thread(self._finish, until_s)
        if self._server is not None:
            await self._server.stop(min(STOP_CALLS_S, max(0.0, until_s - self._clock.now_s())))
        self._stopping.set()
        await asyncio.to_thread(self._stop_parts, until_s)

    def _finish(self, until_s: float) -> None:
        """Finish earlier work before the servers stop. Each step may use a part of the remaining time."""
        self._adoption.stopping.set()
        self._drainer.stop(STOP_CALLS_S)
        if self._parts.copier is not None:
            self._parts.copier.stop(STOP_CALLS_S)
        if self._publisher is not None:
            self._publisher.leave(min(LEAVE_S, self.config.stop_grace_ms / 1000 / STOP_PARTS))
        stores_s = self._part_of(until_s)
        while self._gate.stores_under_way() and self._clock.now_s() < stores_s:
            time.sleep(STOP_POLL_S)  # engines still copy, and will complete or abort
        flush_until_s = self._part_of(until_s, STOP_PARTS - 1)
        flushed, saved = flush_on_shutdown(self.table, self._clock, flush_until_s) if self._writes_back else (True, 0)
        if saved:
            self.counters.add(node_metrics.STOPPED_SAVED_BLOCKS, saved)
            log.info("DRAM-only blocks written back on stop (blocks=%d)", saved)
        if lost := self.table.not_durable():
            self.counters.add(node_metrics.STOPPED_NOT_DURABLE_BLOCKS, lost)
            log.warning("blocks lost on stop: not durable (blocks=%d, in_time=%s)", lost, flushed)
        reads_s = min(self._part_of(until_s), self._clock.now_s() + STOP_CALLS_S)
        while any(server.busy for server in self._data_servers) and self._clock.now_s() < reads_s:
            time.sleep(STOP_POLL_S)
        if self._publisher is not None and self.config.nvme:  # so that nodes that mount the volumes find their blocks
            volumes = [node_volume.volume_id for node_volume in self.table.node_volumes]
            self._log.wait_published(volumes, self._part_of(until_s))

    def _part_of(self, until_s: float, parts: int = 1) -> float:
        """Return the time at which some quarters of the remaining time have passed."""
        now_s = self._clock.now_s()
        return now_s + max(0.0, until_s - now_s) * parts / STOP_PARTS

    def _busy(self) -> bool:
        """Return whether work that began before the gate was closed goes on."""
        return bool(self._gate.stores_under_way()) or any(buffer.used_bytes for buffer in self._buffers.values())

    def _stop_parts(self, until_s: float) -> None:
        if self._metrics is not None:
            self._metrics.stop()
        if self._publisher is not None:
            self._publisher.stop(2.0)
        self._enforcer.stop(STOP_CALLS_S)
        self._stall_detector.stop(STOP_CALLS_S)
        self._write_back.stop(max(STOP_CALLS_S, until_s - self._clock.now_s()))
        self.table.close()  # before sessions end: their slots must keep their bytes, as engines may still copy
        for server in self._data_servers:
            server.stop()
        for part in (
            self._servicer,
            self._admin,
            self._hint_calls,
            self._hints,
            self._layered,
            self._loader,
            self._mounts,
            self._peers,
        ):
            part.close()
        self._arena_server.stop()
        self._liveness.close()
        self._nixl.close()
        self._lease_expiry_thread.join(2.0)
        self._watch.stop(2.0)
        for adopter in self._adopters:
            adopter.stop(STOP_CALLS_S)
        self._presence.close()
        for node_volume in list(self.table.node_volumes):
            node_volume.guard.close()
            if node_volume.guard.outstanding:
                log.error("volume not closed: %s (outstanding=%d)", node_volume.volume_id, node_volume.guard.outstanding)
            else:
                node_volume.volume.close()
        for adopter in self._adopters:
            adopter.release()
        self._arena.close()
        self._socket.unlink(missing_ok=True)

    @property
    def hung(self) -> bool:
        """Whether a volume has outstanding I/O after ``stop``. Then the process cannot exit gracefully."""
        return any(node_volume.guard.outstanding for node_volume in self.table.node_volumes)

    def _advertised(self, bound: str) -> str:
        host, _, port = bound.rpartition(":")
        return f"{self.config.advertise_host or host}:{port}"

    def _io_engines(self) -> list[str]:
        engines = [f"{self._arena.volume_id}: {self._arena.backing}"]
        engines += [f"{one.volume_id}: {one.volume.io_engine}" for one in self.table.node_volumes]
        engines += [*self._opened.gds_lines, f"NIXL: {self._nixl.description}", native.describe()]
        engines += [f"engine {name}" for name in self.sessions.engines()]
        return engines + [mount.describe() for mount in self._mounts.all]

    def _expire_leases(self) -> None:
        while not self._stopping.wait(SWEEP_INTERVAL_S):
            try:
                self.sessions.expire()
                self._hints.sweep()
                self._history.record_if_due()
            except Exception:  # thread edge: without this thread, no lease and no hint would expire
                self.counters.add(node_metrics.LEASE_EXPIRY_BUGS)
                log.exception("expiry of leases and hints failed: unexpected error, trying again")


def _source(configured: int, link: int) -> common_pb2.BandwidthSource:
    if configured:
        return common_pb2.BANDWIDTH_SOURCE_CONFIGURED
    return common_pb2.BANDWIDTH_SOURCE_LINK if link else common_pb2.BANDWIDTH_SOURCE_UNSPECIFIED


def _compute_traffic(config: NodeConfig, counters: Counters) -> KvTraffic:
    """Return the traffic settings of all sockets except those of the storage network, which are only marked."""
    uncapped: set[str] = set()
    if config.storage_listen is not None:
        with contextlib.suppress(OSError):  # an unknown name: listening fails with an error
            uncapped = {str(found[4][0]) for found in socket.getaddrinfo(parse_address(config.storage_listen)[0], None)}
    return KvTraffic(TrafficClass(config.kv_dscp, config.compute_cap), counters, uncapped)
