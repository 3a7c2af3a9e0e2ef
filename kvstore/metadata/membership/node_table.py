"""Nodes as one server process sees them: a cache of their registrations, their heartbeats, and which nodes are alive.

All workers share the index. A worker reads registrations and volume epochs again if ``revision`` has changed. It exchanges
heartbeats with the other workers several times per time to live, so all workers agree within one tick on which nodes are alive,
whichever worker a heartbeat reaches. Ages are comparable because all workers use the monotonic clock of one host.

After a start, known nodes get a grace period of one time to live: they could not send heartbeats while no server ran.

Everything runs on the event loop, and no method takes longer than a read of the index's notes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from kvproto.v1.common_pb2 import NODE_STATE_ACTIVE, NODE_STATE_DRAINING, DrainOrder, DrainProgress, NodeInfo, NodeState
from kvproto.v1.metadata_pb2 import HeartbeatRequest, NodeStatus
from kvstore.core.clock import Clock
from kvstore.core.errors import NotFound
from kvstore.core.limits import MAX_REASON
from kvstore.core.types import BootId, NodeId, VolumeId
from kvstore.index.contract import PrefixIndex, VolumeEpoch
from kvstore.metadata.membership.records import (
    HEARTBEAT_PREFIX,
    REFUSED_PREFIX,
    CallRefusal,
    Heartbeat,
    heartbeat_note,
    refused_note,
)
from kvstore.metadata.membership.view import MembershipView, VolumeLocation, read_view
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.rpc.auth.interceptor import RefusedNode

logger = logging.getLogger(__name__)
_Note = TypeVar("_Note", Heartbeat, CallRefusal)

REFUSED_S: Final = 10.0
"""How long a silent node is shown as refused after a rejected call. A node repeats the call within 2 seconds."""


class NodeTable:
    """Registrations, volume epochs and liveness of all nodes.

    Args:
        index: the index.
        clock: the host's monotonic clock.
        ttl_s: silence after which a node is not alive.
        counters: counters of this process.
        wall_s: time of day in seconds since 1970.
    """

    def __init__(
        self, index: PrefixIndex, clock: Clock, ttl_s: float, counters: Counters, wall_s: Callable[[], float] = time.time
    ) -> None:
        self._index = index
        self._clock = clock
        self._ttl_s = ttl_s
        self._counters = counters
        self._wall_s = wall_s
        self._clock_offsets_ms: dict[NodeId, int] = {}
        """Of nodes whose heartbeats arrived at this process."""
        self._started_s = clock.now_s()
        self._view = MembershipView()
        self._heartbeats: dict[NodeId, Heartbeat] = {}
        self._last_reports: dict[NodeId, HeartbeatRequest] = {}
        """Last heartbeat of any boot of a known node, so that a node which cannot register is shown, too."""
        self._refusals: dict[NodeId, CallRefusal] = {}
        """Of known nodes only, so that strangers cannot make it grow."""
        self._unshared_heartbeats: set[NodeId] = set()
        self._unshared_refusals: set[NodeId] = set()
        self._alive: frozenset[NodeId] = frozenset()
        self._visible: frozenset[VolumeEpoch] = frozenset()
        self._mounting_nodes: dict[VolumeEpoch, tuple[VolumeLocation, ...]] = {}
        """Live nodes that mount the volume of a silent owner."""
        self._turn = 0

    # ---- reading ----
    def view(self) -> MembershipView:
        """The current registrations; read again only if the index's revision has changed."""
        if self._index.revision != self._view.revision:
            self._view = read_view(self._index)
            self._update_liveness()
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
        """Volume epochs that a live node owns or mounts, as of the last :meth:`view` or :meth:`read_shared_notes`."""
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
        order, record = self._view.drain_orders.get(node_id), self._view.nodes.get(node_id)
        heartbeat = self._heartbeat_of(node_id, BootId(record.boot_id)) if record is not None else None
        if order is None or heartbeat is None or heartbeat.report.drain.operation_id != order.operation_id:
            return None
        return heartbeat.report.drain

    def heard_within(self, node_id: NodeId, boot_id: BootId, seconds: float) -> bool:
        """Whether a heartbeat of this boot arrived within the last ``seconds``."""
        heartbeat = self._heartbeat_of(node_id, boot_id)
        return heartbeat is not None and self._clock.now_s() - heartbeat.at_s < seconds

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

    def statuses(self) -> list[NodeStatus]:
        """All nodes, by id."""
        return [self.status(node_id) for node_id in sorted(self.view().nodes)]

    def status(self, node_id: NodeId) -> NodeStatus:
        """One node.

        Raises:
            NotFound: the node is unknown.
        """
        record = self.view().nodes.get(node_id)
        if record is None:
            raise NotFound("no such node", node_id=node_id)
        heartbeat = self._heartbeat_of(node_id, BootId(record.boot_id))
        age_s = self._clock.now_s() - (heartbeat.at_s if heartbeat is not None else self._started_s)
        if heartbeat is not None and heartbeat.report.usages:
            report = heartbeat.report
        else:
            report = self._last_reports.get(node_id, HeartbeatRequest())
        return NodeStatus(
            node=record,
            alive=node_id in self._alive,
            heartbeat_age_ms=max(0, round(age_s * 1000)),
            usages=report.usages,
            state=self.state(node_id),
            stopped=node_id in self._view.left,
            order=self._view.drain_orders.get(node_id),
            drain=self._progress(node_id),
            findings=report.findings,
            refused=self._refusal_reason(node_id),
            clock_offset_ms=self._clock_offsets_ms.get(node_id, 0),
        )

    def read_bytes_per_s(self, node_id: NodeId) -> int:
        """Read rate of all volumes of a node, as its registered boot has measured it; 0: not measured."""
        record = self._view.nodes.get(node_id)
        heartbeat = None if record is None else self._heartbeat_of(node_id, BootId(record.boot_id))
        return 0 if heartbeat is None else heartbeat.report.read_bytes_per_s

    def _refusal_reason(self, node_id: NodeId) -> str:
        """Why calls of a silent node are rejected; empty: the node is alive, or no call was rejected lately."""
        refusal = self._refusals.get(node_id)
        if refusal is None or node_id in self._alive or self._clock.now_s() - refusal.at_s > REFUSED_S:
            return ""
        return refusal.why

    def live_nodes(self) -> Iterator[tuple[NodeInfo, HeartbeatRequest | None]]:
        """Live nodes by id, each with the last heartbeat of its registered boot (None: none has arrived)."""
        view = self.view()
        for node_id in sorted(self._alive & view.nodes.keys()):
            heartbeat = self._heartbeat_of(node_id, BootId(view.nodes[node_id].boot_id))
            yield view.nodes[node_id], heartbeat.report if heartbeat is not None else None

    def forgettable(self, forget_s: float) -> list[tuple[NodeId, BootId]]:
        """Boots that were silent for ``forget_s`` and whose volumes no live node mounts."""
        oldest_s = self._clock.now_s() - forget_s
        view = self.view()
        mounted = {view.locations[epoch].node_id for epoch in self._mounting_nodes if epoch in view.locations}
        return [
            (node_id, BootId(record.boot_id))
            for node_id, record in view.nodes.items()
            if self._heard_s(node_id, record) < oldest_s and node_id not in mounted
        ]

    # ---- liveness ----
    def record_registration(self, node_id: NodeId, boot_id: BootId, host: str = "") -> None:
        """A boot has registered, perhaps again: it is alive. Its last report stays valid."""
        report = self._last_reports.get(node_id)
        if report is None or report.boot_id != boot_id:
            report = HeartbeatRequest(node_id=node_id, boot_id=boot_id)
        self.record_heartbeat(report, host)

    def record_heartbeat(self, report: HeartbeatRequest, host: str = "") -> bool:
        """Process a heartbeat.

        Args:
            report: the heartbeat.
            host: host that sent it; empty: unknown.

        Returns:
            False if this boot is not registered.
        """
        node_id, boot_id = NodeId(report.node_id), BootId(report.boot_id)
        record = self.view().nodes.get(node_id)
        if record is not None:
            self._last_reports[node_id] = report
            if report.unix_ms:
                self._clock_offsets_ms[node_id] = report.unix_ms - round(self._wall_s() * 1000)
        if record is None or BootId(record.boot_id) != boot_id:
            return False
        self._heartbeats[node_id] = Heartbeat(boot_id, self._clock.now_s(), report, host)
        self._unshared_heartbeats.add(node_id)
        if node_id not in self._alive:
            self._update_liveness()
        return True

    def record_refusal(self, call: RefusedNode) -> None:
        """Record that a call in a node's name was rejected. It changes only what operators see.

        The name is not proven. So it counts only for a known node, and only from the host of its last heartbeat or of one of its
        registered addresses.
        """
        node_id = NodeId(call.node_id)
        record = self._view.nodes.get(node_id)
        if record is None or not call.host:
            return
        heartbeat = self._heartbeats.get(node_id)
        addresses = (record.control_address, record.data_address, record.storage_address)
        hosts = {address.rpartition(":")[0].strip("[]") for address in addresses}
        if call.host not in hosts and (heartbeat is None or call.host != heartbeat.host):
            return
        before = self._refusals.get(node_id)
        if before is None or self._clock.now_s() - before.at_s > REFUSED_S:
            logger.warning("rejected a node's call: %s (reason=%s, host=%s)", node_id, call.why, call.host)
        self._refusals[node_id] = CallRefusal(self._clock.now_s(), call.why[:MAX_REASON])
        self._unshared_refusals.add(node_id)

    def take_unshared_notes(self) -> list[tuple[str, bytes]]:
        """Notes for the other workers: heartbeats and refusals that arrived here since the last call."""
        heartbeats, refusals = (
            self._unshared_heartbeats & self._heartbeats.keys(),
            self._unshared_refusals & self._refusals.keys(),
        )
        notes = [(heartbeat_note(node_id), self._heartbeats[node_id].encode()) for node_id in heartbeats]
        notes += [(refused_note(node_id), self._refusals[node_id].encode()) for node_id in refusals]
        self._unshared_heartbeats.clear()
        self._unshared_refusals.clear()
        return notes

    def read_shared_notes(self) -> None:
        """Read heartbeats and refusals of the other workers, and update liveness."""
        now_s = self._clock.now_s()
        for name, value in self._index.notes().items():
            if name.startswith(REFUSED_PREFIX):
                _keep_newer(self._refusals, NodeId(name.removeprefix(REFUSED_PREFIX)), CallRefusal.decode(value), now_s)
            elif name.startswith(HEARTBEAT_PREFIX):
                _keep_newer(self._heartbeats, NodeId(name.removeprefix(HEARTBEAT_PREFIX)), Heartbeat.decode(value), now_s)
        known = self.view().nodes
        self._heartbeats = {node_id: one for node_id, one in self._heartbeats.items() if node_id in known}
        self._last_reports = {node_id: one for node_id, one in self._last_reports.items() if node_id in known}
        self._refusals = {node_id: one for node_id, one in self._refusals.items() if node_id in known}
        self._clock_offsets_ms = {node_id: one for node_id, one in self._clock_offsets_ms.items() if node_id in known}
        self._update_liveness()

    def _heartbeat_of(self, node_id: NodeId, boot_id: BootId) -> Heartbeat | None:
        heartbeat = self._heartbeats.get(node_id)
        return heartbeat if heartbeat is not None and heartbeat.boot_id == boot_id else None

    def _heard_s(self, node_id: NodeId, record: NodeInfo) -> float:
        """When the registered boot was last heard of; not before the start of this process."""
        heartbeat = self._heartbeat_of(node_id, BootId(record.boot_id))
        return self._started_s if heartbeat is None else max(self._started_s, heartbeat.at_s)

    def _update_liveness(self) -> None:
        """Compute from heartbeats and the view which nodes are alive and which volume epochs are visible; log changes."""
        view, oldest_s = self._view, self._clock.now_s() - self._ttl_s
        alive = frozenset(
            node_id
            for node_id, record in view.nodes.items()
            if node_id not in view.left and self._heard_s(node_id, record) >= oldest_s
        )
        for node_id in self._alive - alive:
            if node_id in view.left:
                logger.info("node left: %s (hidden from lookups)", node_id)
            elif node_id in view.nodes:
                self._counters.add(metadata_metrics.NODES_EXPIRED)
                logger.warning("node silent: %s (hidden from lookups)", node_id)
        for node_id in alive - self._alive:
            self._counters.add(metadata_metrics.NODES_APPEARED)
            logger.info("node alive: %s", node_id)
        self._alive = alive
        owned = frozenset(epoch for epoch, location in view.locations.items() if location.node_id in alive)
        self._mounting_nodes = {
            epoch: live
            for epoch, locations in view.mounted.items()
            if epoch not in owned and (live := tuple(location for location in locations if location.node_id in alive))
        }
        self._visible = owned | self._mounting_nodes.keys()


def _keep_newer(known: dict[NodeId, _Note], node_id: NodeId, note: _Note | None, now_s: float) -> None:
    """Keep a note of another worker if it is newer. A time in the future is from before a restart of the host."""
    before = known.get(node_id)
    if note is not None and note.at_s <= now_s and (before is None or note.at_s > before.at_s):
        known[node_id] = note
