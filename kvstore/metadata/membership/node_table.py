"""Nodes as one server process sees them: a cache of their registrations, their heartbeats, and which nodes are alive.

All servers share the index. A server reads registrations and volume epochs again if ``revision`` has changed. It exchanges
heartbeats with the other servers several times per time to live (``exchange``), so all agree within two ticks on which nodes are
alive, whichever server a heartbeat reaches. Each judges by its own clock (``liveness``).

Everything runs on the event loop, and no method takes longer than a read of the heartbeats or the registrations.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash

from kvproto.v1.common_pb2 import NODE_STATE_ACTIVE, NODE_STATE_DRAINING, DrainOrder, DrainProgress, NodeInfo, NodeState
from kvproto.v1.metadata_pb2 import HeartbeatRequest, NodeStatus
from kvstore.core.clock import Clock
from kvstore.core.errors import KVStoreError, NotFound
from kvstore.core.types import BootId, NodeId, VolumeId
from kvstore.index.contract import PrefixIndex, VolumeEpoch
from kvstore.metadata.membership.exchange import HeartbeatExchange, UnsharedBeats
from kvstore.metadata.membership.liveness import Liveness, LivenessChange
from kvstore.metadata.membership.records import BootReport
from kvstore.metadata.membership.refusals import NodeRefusals
from kvstore.metadata.membership.view import MembershipView, VolumeLocation, is_engine_cache, read_view
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.rpc.auth.interceptor import RefusedNode

logger = logging.getLogger(__name__)

READ_RATE_AGE_S: Final = 5.0
"""Age at which the read rate of a node whose heartbeats other servers receive is read again."""

CACHE_FORGET_S: Final = 60.0
"""Silence after which the cache of an engine is forgotten: the engine has ended, and its next start has another node id."""

CLOCK_STEP_MS: Final = 1_000
"""Change of a node's clock offset that is told to other servers."""


@dataclass(frozen=True, slots=True)
class ForgettableBoot:
    """A boot that is to be forgotten.

    Attributes:
        node_id: its node.
        boot_id: the boot.
        silence_s: how long it was silent.
        is_cache: whether it is the cache of an engine.
    """

    node_id: NodeId
    boot_id: BootId
    silence_s: float
    is_cache: bool


@dataclass(frozen=True, slots=True)
class UnsharedChanges:
    """Heartbeats and rejected calls that other servers do not know yet."""

    beats: UnsharedBeats = field(default_factory=UnsharedBeats)
    refusals: dict[str, bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.beats.beats or self.refusals)

    def write(self, index: PrefixIndex) -> None:
        """Write them to the index: heartbeats first, which must not wait."""
        self.beats.write(index)
        if self.refusals:
            index.put_notes(self.refusals, announce=False)


class NodeTable:
    """Registrations, volume epochs and liveness of all nodes.

    Args:
        index: the index.
        clock: a monotonic clock of this host. It is not compared with clocks of other servers or nodes.
        ttl_s: silence after which a node is not alive.
        counters: counters of this process.
        wall_s: time of day in seconds since 1970.
    """

    def __init__(
        self, index: PrefixIndex, clock: Clock, ttl_s: float, counters: Counters, wall_s: Callable[[], float] = time.time
    ) -> None:
        self._index = index
        self._clock = clock
        self._counters = counters
        self._wall_s = wall_s
        self._view = MembershipView()
        self._exchange = HeartbeatExchange(index, clock)
        self._liveness = Liveness(ttl_s)
        self._refusals = NodeRefusals(index)
        self._last_heartbeats: dict[NodeId, HeartbeatRequest] = {}
        """Last heartbeat here of any boot of a known node, so that a node which cannot register is shown, too."""
        self._orphaned_beats: set[NodeId] = set()
        self._alive: frozenset[NodeId] = frozenset()
        self._visible: frozenset[VolumeEpoch] = frozenset()
        self._mounting_nodes: dict[VolumeEpoch, tuple[VolumeLocation, ...]] = {}
        """Live nodes that mount the volume of a silent owner."""
        self._turn = 0
        self.updates = 0
        """Number of times that registrations, drain orders or the live nodes changed. Callers compare it to skip work."""
        self.members_token = 0
        """A hash of the nodes, their volumes, zones and drain orders, and of which are alive; equal at all servers. Caches of
        engines are left out."""

    # ---- reading ----
    def view(self) -> MembershipView:
        """The current registrations; read again only if the index's revision has changed."""
        if self._index.revision != self._view.revision:
            view = self._view = read_view(self._index)
            boots = {node_id: BootId(record.boot_id) for node_id, record in view.nodes.items()}
            self._report_changes(self._liveness.registered(boots, view.left, self._clock.now_s()))
            self._update_visible()
        return self._view

    @property
    def last_view(self) -> MembershipView:
        """The last result of :meth:`view`, without reading the index."""
        return self._view

    @property
    def revision(self) -> int:
        """The index revision of :attr:`visible` and :attr:`last_view`."""
        return self._view.revision

    @property
    def visible(self) -> frozenset[VolumeEpoch]:
        """Volume epochs that a live node owns or mounts, as of the last :meth:`view` or :meth:`tick`."""
        return self._visible

    def server_of(self, volume_epoch: VolumeEpoch) -> VolumeLocation:
        """The node that serves a visible volume epoch: its owner or, if it is silent, each node that mounts it in turn."""
        mounting = self._mounting_nodes.get(volume_epoch)
        if mounting is None:
            return self._view.locations[volume_epoch]
        self._turn += 1
        return mounting[self._turn % len(mounting)]

    def is_alive(self, node_id: NodeId) -> bool:
        """Whether heartbeats of a node arrive."""
        return node_id in self._alive

    def is_draining(self, node_id: str) -> bool:
        """Whether a node is to drain: it gets no new work."""
        return node_id in self._view.drain_orders

    def drain_order(self, node_id: NodeId) -> DrainOrder | None:
        """The drain order of a node, if there is one."""
        return self.view().drain_orders.get(node_id)

    def state(self, node_id: NodeId) -> NodeState:
        """Whether a node is active, draining or drained, as far as it has reported."""
        if node_id not in self._view.drain_orders:
            return NODE_STATE_ACTIVE
        progress = self._progress(node_id)
        return NODE_STATE_DRAINING if progress is None or progress.state <= NODE_STATE_ACTIVE else progress.state

    def _progress(self, node_id: NodeId) -> DrainProgress | None:
        """The last report of the registered boot about the current drain order."""
        order = self._view.drain_orders.get(node_id)
        report = None if order is None else self._report_of(node_id)
        if order is None or report is None or report.heartbeat.drain.operation_id != order.operation_id:
            return None
        return report.heartbeat.drain

    def heard_within(self, node_id: NodeId, seconds: float) -> bool:
        """Whether the registered boot was heard within the last ``seconds`` in which this server could hear it."""
        silence_s = self._liveness.silence_s(node_id, self._clock.now_s())
        return silence_s is not None and silence_s < seconds

    def record(self, node_id: NodeId, boot_id: BootId) -> NodeInfo:
        """The registration of a boot.

        Raises:
            NotFound: the node is unknown, or another boot has registered since: register again.
        """
        record = self.view().nodes.get(node_id)
        if record is None or BootId(record.boot_id) != boot_id:
            raise NotFound("this boot of the node is not registered: register again", node_id=node_id)
        return record

    def volume_epoch(self, node_id: NodeId, boot_id: BootId, volume_id: VolumeId) -> VolumeEpoch:
        """The open volume epoch of a registered boot's volume.

        Raises:
            NotFound: the boot is not registered, or not with this volume.
        """
        self.record(node_id, boot_id)
        volume_epoch = self._view.volume_epochs.get((volume_id, boot_id))
        if volume_epoch is None or self._view.locations[volume_epoch].node_id != node_id:
            raise NotFound("the node did not register this volume: register again", node_id=node_id, volume_id=volume_id)
        return volume_epoch

    async def known_volume_epoch(self, node_id: NodeId, boot_id: BootId, volume_id: VolumeId) -> VolumeEpoch:
        """Return the volume epoch of a boot that may have registered at another server a moment ago.

        Raises:
            NotFound: the node did not register this volume.
            Unavailable: the index does not answer.
        """
        try:
            return self.volume_epoch(node_id, boot_id, volume_id)
        except NotFound:
            await self._index.refresh()
            return self.volume_epoch(node_id, boot_id, volume_id)

    def statuses(self, only: Collection[str] = ()) -> list[NodeStatus]:
        """The known nodes of ``only`` (empty: all nodes), by id."""
        known = self.view().nodes
        nodes = sorted(known.keys() & {NodeId(node_id) for node_id in only} if only else known)
        self._exchange.read_reports()
        return [self.status(node_id) for node_id in nodes]

    def status(self, node_id: NodeId) -> NodeStatus:
        """One node.

        Raises:
            NotFound: the node is unknown.
        """
        record = self.view().nodes.get(node_id)
        if record is None:
            raise NotFound("no such node", node_id=node_id)
        now_s = self._clock.now_s()
        heard_s = self._liveness.heard_s(node_id)
        report = self._report_of(node_id)
        if report is not None and report.heartbeat.usages:
            heartbeat = report.heartbeat
        else:
            heartbeat = self._last_heartbeats.get(node_id, HeartbeatRequest())
        return NodeStatus(
            node=record,
            alive=node_id in self._alive,
            heartbeat_age_ms=0 if heard_s is None else max(0, round((now_s - heard_s) * 1000)),
            usages=heartbeat.usages,
            state=self.state(node_id),
            stopped=node_id in self._view.left,
            order=self._view.drain_orders.get(node_id),
            drain=self._progress(node_id),
            findings=heartbeat.findings,
            refused="" if node_id in self._alive else self._refusals.reason(node_id, now_s),
            clock_offset_ms=heartbeat.clock_offset_ms,
            arriving=[
                volume.volume_id
                for volume in record.volumes
                if node_id in self._alive and VolumeId(volume.volume_id) in self._view.arriving
            ],
        )

    def silent(self) -> list[NodeInfo]:
        """Nodes that send no heartbeats, have not unregistered, and had no call rejected lately."""
        now_s, view = self._clock.now_s(), self.view()
        return [
            record
            for node_id, record in view.nodes.items()
            if not (node_id in self._alive or node_id in view.left or self._refusals.reason(node_id, now_s))
        ]

    def read_bytes_per_s(self, node_id: NodeId) -> int:
        """Read rate of all volumes of a node, as its registered boot has measured it; 0: not measured."""
        report = self._report_of(node_id, READ_RATE_AGE_S)
        return 0 if report is None else report.heartbeat.read_bytes_per_s

    def live_nodes(self) -> Iterator[tuple[NodeInfo, HeartbeatRequest | None]]:
        """Live nodes by id, each with the last heartbeat of its registered boot (None: none has arrived)."""
        view = self.view()
        self._exchange.read_reports()
        for node_id in sorted(self._alive & view.nodes.keys()):
            report = self._report_of(node_id)
            yield view.nodes[node_id], report.heartbeat if report is not None else None

    def forgettable(self, forget_s: float) -> list[ForgettableBoot]:
        """Boots that were silent for ``forget_s`` and whose volumes no live node mounts. Caches of engines are forgotten soon."""
        now_s, view = self._clock.now_s(), self.view()
        silent = []
        for node_id in view.nodes.keys() - self._alive:
            silence_s, record = self._liveness.silence_s(node_id, now_s), view.nodes[node_id]
            is_cache = is_engine_cache(record)
            if silence_s is not None and silence_s > (min(forget_s, CACHE_FORGET_S) if is_cache else forget_s):
                silent.append(ForgettableBoot(node_id, BootId(record.boot_id), silence_s, is_cache))
        mounted = {view.locations[epoch].node_id for epoch in self._mounting_nodes if epoch in view.locations} if silent else ()
        return [boot for boot in silent if boot.node_id not in mounted]

    # ---- heartbeats ----
    def record_registration(self, node_id: NodeId, boot_id: BootId, host: str = "") -> None:
        """A boot has registered, perhaps again: it is alive. Its last report stays valid."""
        self.view()
        heartbeat = self._last_heartbeats.get(node_id)
        if heartbeat is None or heartbeat.boot_id != boot_id:
            heartbeat = HeartbeatRequest(node_id=node_id, boot_id=boot_id)
        self._record(heartbeat, host, counter=0)

    def record_heartbeat(self, heartbeat: HeartbeatRequest, host: str = "") -> bool:
        """Process a heartbeat. It must not be changed afterwards.

        Args:
            heartbeat: the heartbeat.
            host: host that sent it; empty: unknown.

        Returns:
            False if this boot is not registered.
        """
        self.view()
        if heartbeat.unix_ms:  # else this heartbeat was recorded before, when its node was unknown
            heartbeat.clock_offset_ms = self._clock_offset_ms(heartbeat)
            heartbeat.unix_ms = 0  # the other contents seldom change, and only changes are shared with other servers
        return self._record(heartbeat, host, counter=heartbeat.sequence)

    def _record(self, heartbeat: HeartbeatRequest, host: str, *, counter: int) -> bool:
        node_id, boot_id = NodeId(heartbeat.node_id), BootId(heartbeat.boot_id)
        record = self._view.nodes.get(node_id)
        if record is not None:
            self._last_heartbeats[node_id] = heartbeat
        if record is None or BootId(record.boot_id) != boot_id:
            return False
        self._exchange.arrived(heartbeat, host, counter=counter)
        self._apply(self._liveness.heartbeat_arrived(node_id, boot_id, self._clock.now_s()))
        return True

    def _clock_offset_ms(self, heartbeat: HeartbeatRequest) -> int:
        """How far the clock of a node's host is ahead. Small differences from the last value are not worth a new report."""
        last = self._last_heartbeats.get(NodeId(heartbeat.node_id))
        offset_ms = heartbeat.unix_ms - round(self._wall_s() * 1000)
        return last.clock_offset_ms if last is not None and abs(offset_ms - last.clock_offset_ms) < CLOCK_STEP_MS else offset_ms

    def record_refusal(self, call: RefusedNode) -> None:
        """Record that a call in a node's name was rejected. It changes only what operators see.

        The name is not proven. So it counts only for a known node, and only from the host of its last heartbeat or of one of its
        registered addresses.
        """
        node_id = NodeId(call.node_id)
        record = self._view.nodes.get(node_id)
        if record is None or not call.host:
            return
        addresses = (record.control_address, record.data_address, record.storage_address)
        hosts = {address.rpartition(":")[0].strip("[]") for address in addresses}
        if call.host not in hosts:
            report = self._report_of(node_id)
            if report is None or report.host != call.host:
                return
        if self._refusals.record(node_id, call.why, self._clock.now_s()):
            logger.warning("call of a node rejected: %s (reason=%s, host=%s)", node_id, call.why, call.host)

    def take_unshared(self) -> UnsharedChanges:
        """Heartbeats and refusals that arrived here since the last call, to be written for the other servers."""
        return UnsharedChanges(self._exchange.take_unshared(), self._refusals.take_unshared())

    def write_failed(self, changes: UnsharedChanges) -> None:
        """Handle that changes could not be written. Further heartbeats replace them."""
        self._exchange.write_failed(changes.beats)

    # ---- liveness ----
    def paused(self) -> None:
        """Handle that this process or its host was stopped until now. Call it before the next :meth:`tick`."""
        self._counters.add(metadata_metrics.PAUSES)
        self._exchange.drop_unshared()
        self._liveness.paused(self._clock.now_s())

    def index_was_away(self) -> None:
        """Handle that the index could not be read or written until now. Call it before the next :meth:`tick`."""
        self._liveness.index_failed()

    def tick(self) -> None:
        """Read heartbeats and refusals of the other servers, and find nodes that became silent.

        Raises:
            Unavailable: the index does not answer. Until it answers again, no node becomes silent.
        """
        now_s = self._clock.now_s()
        try:
            others = self._exchange.read_others()
            known = self.view().nodes  # after the heartbeats: their senders are registered, or were forgotten
            self._refusals.read_others(known.keys(), now_s)
        except KVStoreError:
            self._liveness.index_failed()
            raise
        self._liveness.index_answered(now_s)
        self._apply([*self._liveness.beats_read(others, now_s), *self._liveness.tick(now_s)])
        self._orphaned_beats = others.keys() - known
        self._exchange.forget_others(known.keys())
        for node_id in self._last_heartbeats.keys() - known:
            del self._last_heartbeats[node_id]

    @property
    def orphaned_beats(self) -> Collection[NodeId]:
        """Forgotten nodes of which the index holds a heartbeat, as of the last tick: a server wrote it late."""
        return self._orphaned_beats - self._view.nodes.keys()

    def _report_of(self, node_id: NodeId, max_unread_s: float = 0.0) -> BootReport | None:
        """The last report of the registered boot."""
        record = self._view.nodes.get(node_id)
        if record is None:
            return None
        return self._exchange.report(node_id, BootId(record.boot_id), max_unread_s)

    def _apply(self, changes: Sequence[LivenessChange]) -> None:
        if changes:
            self._report_changes(changes)
            self._update_visible()

    def _report_changes(self, changes: Sequence[LivenessChange]) -> None:
        for node_id, alive in changes:
            if is_engine_cache(self._view.nodes[node_id]):
                logger.info("engine cache %s: %s", "appeared" if alive else "hidden from lookups", node_id)
            elif alive:
                self._counters.add(metadata_metrics.NODES_APPEARED)
                logger.info("node alive: %s", node_id)
            elif node_id in self._view.left:
                logger.info("node left: %s (hidden from lookups)", node_id)
            else:
                self._counters.add(metadata_metrics.NODES_EXPIRED)
                logger.warning("node silent: %s (hidden from lookups)", node_id)

    def _update_visible(self) -> None:
        """Compute which volume epochs can be read: those of live nodes, and those that live nodes mount."""
        view, alive = self._view, self._liveness.alive()
        self._alive = alive
        self.updates += 1
        owned = frozenset(epoch for epoch, location in view.locations.items() if location.node_id in alive)
        self._mounting_nodes = {
            epoch: live
            for epoch, locations in view.mounted.items()
            if epoch not in owned and (live := tuple(location for location in locations if location.node_id in alive))
        }
        self._visible = owned | self._mounting_nodes.keys()
        self.members_token = _members_token(view, alive)


def _members_token(view: MembershipView, alive: Collection[NodeId]) -> int:
    known = []
    for node_id, record in sorted(view.nodes.items()):
        if is_engine_cache(record):
            continue  # no node reads from it, so the start of an engine makes no node list all nodes
        order = view.drain_orders.get(node_id)
        volumes = [volume.uid for volume in record.volumes]
        known.append((node_id, record.zone, volumes, node_id in alive, None if order is None else order.move))
    return xxhash.xxh3_64_intdigest(repr(known).encode())
