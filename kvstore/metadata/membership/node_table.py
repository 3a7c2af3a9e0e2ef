"""What one server process knows of nodes: a cache of what the index keeps, and who is alive.

The index is the shared memory of all workers. Registrations and volume epochs are read again when its ``revision`` has moved,
heartbeats by :meth:`NodeTable.exchange_beats`, which every worker calls a few times per time to live; so all workers agree
within a tick on who is alive, wherever a node's heartbeats arrive. The monotonic clock is host-wide, which makes ages comparable.

After a start, nodes known from before get a grace of one time to live: they could not call while there was no server.

Runs on the event loop only; nothing here blocks longer than a read of the index's small records.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError

from kvproto.v1.common_pb2 import (
    NODE_STATE_ACTIVE,
    NODE_STATE_DRAINING,
    DrainOrder,
    DrainProgress,
    NodeInfo,
    NodeState,
)
from kvproto.v1.metadata_pb2 import HeartbeatRequest, LookupResponse, NodeStatus
from kvstore.core.clock import Clock
from kvstore.core.errors import NotFound
from kvstore.core.limits import MAX_REASON
from kvstore.core.types import BootId, NodeId, Tier, VolumeId
from kvstore.index.contract import PrefixIndex, VolumeEpoch
from kvstore.metadata.membership.records import (
    BEAT_PREFIX,
    DRAIN_PREFIX,
    LEFT_PREFIX,
    NODE_PREFIX,
    REFUSED_PREFIX,
    CallRefusal,
    Heartbeat,
    beat_note,
    refused_note,
)
from kvstore.observe.counters import Counters
from kvstore.rpc.auth.interceptor import RefusedNode

logger = logging.getLogger(__name__)

REFUSED_S: Final = 10.0
"""A node that does not report is shown as refused for so long after a call of it was refused; it tries again within 2 seconds."""


@dataclass(frozen=True, slots=True)
class VolumeLocation:
    """A node that serves a volume epoch, and the position of the volume in its list of volumes and mounts."""

    node_id: NodeId
    volume: int


@dataclass(frozen=True, slots=True)
class MembershipView:
    """All registrations and open volume epochs, at one revision of the index."""

    revision: int = -1
    nodes: Mapping[NodeId, NodeInfo] = field(default_factory=dict)
    encoded_nodes: Mapping[NodeId, bytes] = field(default_factory=dict)
    """Each as a ``LookupResponse`` that names it alone, to be appended to one."""
    places: Mapping[VolumeEpoch, VolumeLocation] = field(default_factory=dict)
    volume_epochs: Mapping[tuple[VolumeId, BootId], VolumeEpoch] = field(default_factory=dict)
    owners: Mapping[VolumeId, frozenset[NodeId]] = field(default_factory=dict)
    mounted: Mapping[VolumeEpoch, tuple[VolumeLocation, ...]] = field(default_factory=dict)
    """Durable volume epochs that other nodes can read without the owner, and the position of the volume at those nodes."""
    orders: Mapping[NodeId, DrainOrder] = field(default_factory=dict)
    """Of nodes that are to drain."""
    left: frozenset[NodeId] = frozenset()
    """Nodes whose registered boot ended in order."""


class NodeTable:
    """Registrations, volume epochs and liveness, as of now."""

    def __init__(self, index: PrefixIndex, clock: Clock, ttl_s: float, counters: Counters) -> None:
        self._index = index
        self._clock = clock
        self._ttl_s = ttl_s
        self._counters = counters
        self._started_s = clock.now_s()
        self._view = MembershipView()
        self._beats: dict[NodeId, Heartbeat] = {}
        self._said: dict[NodeId, HeartbeatRequest] = {}
        """The last heartbeat here of any boot of a known node: one whose registration the index does not take is seen, too."""
        self._refusals: dict[NodeId, CallRefusal] = {}
        """Of known nodes alone, so that strangers cannot make it grow."""
        self._unshared_refusals: set[NodeId] = set()
        self._unshared: set[NodeId] = set()  # beats that arrived here and the other workers have not seen
        self._alive: frozenset[NodeId] = frozenset()
        self._visible: frozenset[VolumeEpoch] = frozenset()
        self._stand_ins: dict[VolumeEpoch, tuple[VolumeLocation, ...]] = {}
        self._turn = 0

    # ---- reading ----
    def view(self) -> MembershipView:
        """The present registrations; read again only when the index says that something changed."""
        if self._index.revision != self._view.revision:
            self._view = _read_view(self._index)
            self._judge()
        return self._view

    @property
    def last_view(self) -> MembershipView:
        """What :meth:`view` answered last; nothing is asked."""
        return self._view

    @property
    def revision(self) -> int:
        """The index's revision that :attr:`visible` and :attr:`last_view` are of."""
        return self._view.revision

    @property
    def visible(self) -> frozenset[VolumeEpoch]:
        """Volume epochs that a live node owns or mounts, as of the last :meth:`view` or :meth:`exchange_beats`."""
        return self._visible

    def server_of(self, volume_epoch: VolumeEpoch) -> VolumeLocation:
        """The node that serves a visible volume epoch: its owner or, if it is silent, each node that mounts it in turn."""
        stand_ins = self._stand_ins.get(volume_epoch)
        if stand_ins is None:
            return self._view.places[volume_epoch]
        self._turn += 1
        return stand_ins[self._turn % len(stand_ins)]

    def is_alive(self, node_id: NodeId) -> bool:
        """Whether heartbeats of a node arrive."""
        return node_id in self._alive

    def drains(self, node_id: str) -> bool:
        """Whether a node is to drain: it gets nothing new."""
        return node_id in self._view.orders

    def order(self, node_id: NodeId) -> DrainOrder | None:
        """What a node is to do, where it is to drain."""
        return self.view().orders.get(node_id)

    def state(self, node_id: NodeId) -> NodeState:
        """Whether a node takes part; how far its draining is it says itself."""
        if node_id not in self._view.orders:
            return NODE_STATE_ACTIVE
        progress = self._progress(node_id)
        return NODE_STATE_DRAINING if progress is None or progress.state <= NODE_STATE_ACTIVE else progress.state

    def _progress(self, node_id: NodeId) -> DrainProgress | None:
        """What the registered boot of a node said last of the order in force."""
        order, record = self._view.orders.get(node_id), self._view.nodes.get(node_id)
        beat = self._beat_of(node_id, BootId(record.boot_id)) if record is not None else None
        if order is None or beat is None or beat.report.drain.operation_id != order.operation_id:
            return None
        return beat.report.drain

    def heard_within(self, node_id: NodeId, boot_id: BootId, seconds: float) -> bool:
        """Whether a heartbeat of this very boot came so lately."""
        beat = self._beat_of(node_id, boot_id)
        return beat is not None and self._clock.now_s() - beat.at_s < seconds

    def record(self, node_id: NodeId, boot_id: BootId) -> NodeInfo:
        """The registration of a boot.

        Raises:
            NotFound: the node is unknown, or another boot of it has registered last: register again.
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
        view = self._view
        volume_epoch = view.volume_epochs.get((volume_id, boot_id))
        if volume_epoch is None or view.places[volume_epoch].node_id != node_id:
            raise NotFound("the node did not register this volume: register again", node_id=node_id, volume_id=volume_id)
        return volume_epoch

    def statuses(self) -> list[NodeStatus]:
        """All nodes, by id."""
        return [self.status(node_id) for node_id in sorted(self.view().nodes)]

    def status(self, node_id: NodeId) -> NodeStatus:
        """One node.

        Raises:
            NotFound: it is not known.
        """
        record = self.view().nodes.get(node_id)
        if record is None:
            raise NotFound("no such node", node_id=node_id)
        beat = self._beat_of(node_id, BootId(record.boot_id))
        age_s = self._clock.now_s() - (beat.at_s if beat is not None else self._started_s)
        said = beat.report if beat is not None and beat.report.usages else self._said.get(node_id, HeartbeatRequest())
        return NodeStatus(
            node=record,
            alive=node_id in self._alive,
            heartbeat_age_ms=max(0, round(age_s * 1000)),
            usages=said.usages,
            state=self.state(node_id),
            stopped=node_id in self._view.left,
            order=self._view.orders.get(node_id),
            drain=self._progress(node_id),
            problems=said.problems,
            refused=self._refused(node_id),
        )

    def read_bytes_per_s(self, node_id: NodeId) -> int:
        """What the volumes of a node read together, as its registered boot has measured; 0: not measured."""
        record = self._view.nodes.get(node_id)
        beat = None if record is None else self._beat_of(node_id, BootId(record.boot_id))
        return 0 if beat is None else beat.report.read_bytes_per_s

    def _refused(self, node_id: NodeId) -> str:
        """Why the calls of a node that does not report are refused; empty: it reports, or nothing was refused lately."""
        refusal = self._refusals.get(node_id)
        if refusal is None or node_id in self._alive or self._clock.now_s() - refusal.at_s > REFUSED_S:
            return ""
        return refusal.why

    def living(self) -> Iterator[tuple[NodeInfo, HeartbeatRequest | None]]:
        """Nodes whose heartbeats arrive, by id, with the last one of their registered boot; None: it has not come yet."""
        view = self.view()
        for node_id in sorted(self._alive & view.nodes.keys()):
            beat = self._beat_of(node_id, BootId(view.nodes[node_id].boot_id))
            yield view.nodes[node_id], beat.report if beat is not None else None

    def long_silent(self, forget_s: float) -> list[tuple[NodeId, BootId]]:
        """Boots that have not called for so long, none of whose volumes a living node serves in its place."""
        oldest_s = self._clock.now_s() - forget_s
        view = self.view()
        served = {view.places[volume_epoch].node_id for volume_epoch in self._stand_ins if volume_epoch in view.places}
        silent = []
        for node_id, record in view.nodes.items():
            beat = self._beat_of(node_id, BootId(record.boot_id))
            heard_s = max(self._started_s, beat.at_s if beat is not None else self._started_s)
            if heard_s < oldest_s and node_id not in served:
                silent.append((node_id, BootId(record.boot_id)))
        return silent

    # ---- liveness ----
    def registered(self, node_id: NodeId, boot_id: BootId, host: str = "") -> None:
        """A boot has registered, perhaps again: it lives, and what it said last of what it holds is as true as before."""
        said = self._said.get(node_id)
        if said is None or said.boot_id != boot_id:
            said = HeartbeatRequest(node_id=node_id, boot_id=boot_id)
        self.beat(said, host)

    def refused(self, call: RefusedNode) -> None:
        """Note that a call in a node's name was refused. This changes what people are shown, and nothing that is served.

        The name is not proven. It counts only for a node that is known, and only from a host where that node is: the host of its
        last heartbeat, or one of its registered addresses.
        """
        node_id = NodeId(call.node_id)
        record = self._view.nodes.get(node_id)
        if record is None or not call.host:
            return
        beat = self._beats.get(node_id)
        addresses = (record.control_address, record.data_address, record.storage_address)
        if call.host not in {beat.host if beat is not None else "", *(one.rpartition(":")[0].strip("[]") for one in addresses)}:
            return
        before = self._refusals.get(node_id)
        if before is None or self._clock.now_s() - before.at_s > REFUSED_S:  # also while it counts as alive: it soon does not
            logger.warning("refused a node: %s (node=%s, host=%s)", call.why, node_id, call.host)
        self._refusals[node_id] = CallRefusal(self._clock.now_s(), call.why[:MAX_REASON])
        self._unshared_refusals.add(node_id)

    def beat(self, report: HeartbeatRequest, host: str = "") -> bool:
        """Takes a heartbeat in.

        Args:
            report: what the node says.
            host: where it came from; empty: that is not known.

        Returns:
            False when this boot is not registered.
        """
        node_id, boot_id = NodeId(report.node_id), BootId(report.boot_id)
        record = self.view().nodes.get(node_id)
        if record is not None:
            self._said[node_id] = report
        if record is None or BootId(record.boot_id) != boot_id:
            return False
        self._beats[node_id] = Heartbeat(boot_id, self._clock.now_s(), report, host)
        self._unshared.add(node_id)
        if node_id not in self._alive:
            self._judge()
        return True

    def unshared_beats(self) -> list[tuple[str, bytes]]:
        """Notes of the heartbeats that arrived here since the last call, for the other workers."""
        notes = [(beat_note(node_id), self._beats[node_id].encode()) for node_id in self._unshared if node_id in self._beats]
        notes += [(refused_note(one), self._refusals[one].encode()) for one in self._unshared_refusals if one in self._refusals]
        self._unshared.clear()
        self._unshared_refusals.clear()
        return notes

    def exchange_beats(self) -> None:
        """Takes in what other workers heard, and judges anew who is alive."""
        now_s = self._clock.now_s()
        for name, value in self._index.notes().items():
            if name.startswith(REFUSED_PREFIX):
                self._take_refusal(NodeId(name.removeprefix(REFUSED_PREFIX)), CallRefusal.decode(value), now_s)
            if not name.startswith(BEAT_PREFIX):
                continue
            node_id = NodeId(name.removeprefix(BEAT_PREFIX))
            beat = Heartbeat.decode(value)
            known = self._beats.get(node_id)
            # a time ahead of now is from before the host was restarted, when its monotonic clock began anew
            if beat is not None and beat.at_s <= now_s and (known is None or beat.at_s > known.at_s):
                self._beats[node_id] = beat
        known_nodes = self.view().nodes
        self._beats = {node_id: beat for node_id, beat in self._beats.items() if node_id in known_nodes}
        self._said = {node_id: report for node_id, report in self._said.items() if node_id in known_nodes}
        self._refusals = {node_id: one for node_id, one in self._refusals.items() if node_id in known_nodes}
        self._judge()

    def _take_refusal(self, node_id: NodeId, refusal: CallRefusal | None, now_s: float) -> None:
        """Takes over what another worker refused; a time ahead of now is from before the host was restarted."""
        known = self._refusals.get(node_id)
        if refusal is not None and refusal.at_s <= now_s and (known is None or refusal.at_s > known.at_s):
            self._refusals[node_id] = refusal

    def _beat_of(self, node_id: NodeId, boot_id: BootId) -> Heartbeat | None:
        beat = self._beats.get(node_id)
        return beat if beat is not None and beat.boot_id == boot_id else None

    def _judge(self) -> None:
        """Computes who is alive and what is visible from beats and view; counts and logs changes."""
        oldest_s = self._clock.now_s() - self._ttl_s
        alive = set()
        for node_id, record in self._view.nodes.items():
            beat = self._beat_of(node_id, BootId(record.boot_id))
            heard_s = max(self._started_s, beat.at_s if beat is not None else self._started_s)
            if heard_s >= oldest_s and node_id not in self._view.left:
                alive.add(node_id)
        for node_id in self._alive - alive:
            if node_id in self._view.left:
                logger.info("node %s has ended: hidden from lookups", node_id)
            elif node_id in self._view.nodes:
                self._counters.add("metadata_nodes_expired_total")
                logger.warning("node %s does not report: hidden from lookups", node_id)
        for node_id in alive - self._alive:
            self._counters.add("metadata_nodes_appeared_total")
            logger.info("node %s is alive", node_id)
        self._alive = frozenset(alive)
        served = frozenset(volume_epoch for volume_epoch, place in self._view.places.items() if place.node_id in alive)
        self._stand_ins = {
            volume_epoch: living
            for volume_epoch, places in self._view.mounted.items()
            if volume_epoch not in served and (living := tuple(place for place in places if place.node_id in alive))
        }
        self._visible = served | self._stand_ins.keys()


def _read_view(index: PrefixIndex) -> MembershipView:
    """Reads registrations and volume epochs. The revision is read first: a change in between only means reading once more."""
    revision = index.revision
    nodes: dict[NodeId, NodeInfo] = {}
    orders: dict[NodeId, DrainOrder] = {}
    boots_left: dict[NodeId, bytes] = {}
    for name, value in index.notes().items():
        try:
            if name.startswith(NODE_PREFIX):
                info = NodeInfo.FromString(value)
                nodes[NodeId(info.node_id)] = info
            elif name.startswith(DRAIN_PREFIX):
                orders[NodeId(name.removeprefix(DRAIN_PREFIX))] = DrainOrder.FromString(value)
            elif name.startswith(LEFT_PREFIX):
                boots_left[NodeId(name.removeprefix(LEFT_PREFIX))] = value
        except DecodeError:
            logger.exception("the record %s cannot be read: a node will be asked to register again, an order is void", name)
    left = frozenset(node_id for node_id, boot in boots_left.items() if node_id in nodes and nodes[node_id].boot_id == boot)
    positions = {
        (node_id, VolumeId(volume.volume_id)): position
        for node_id, record in nodes.items()
        for position, volume in enumerate(record.volumes)
    }
    places: dict[VolumeEpoch, VolumeLocation] = {}
    volume_epochs: dict[tuple[VolumeId, BootId], VolumeEpoch] = {}
    owners: dict[VolumeId, set[NodeId]] = {}
    mounts: dict[VolumeId, list[VolumeLocation]] = {}
    for node_id, record in nodes.items():
        for number, mount in enumerate(record.mounts):
            mounts.setdefault(VolumeId(mount), []).append(VolumeLocation(node_id, len(record.volumes) + number))
    mounted: dict[VolumeEpoch, tuple[VolumeLocation, ...]] = {}
    for volume_epoch in index.volume_epochs():
        position = positions.get((volume_epoch.node_id, volume_epoch.volume_id))
        if position is not None:  # else: between the writes of a registration; its last write moves the revision again
            places[volume_epoch.volume_epoch] = VolumeLocation(volume_epoch.node_id, position)
            volume_epochs[volume_epoch.volume_id, volume_epoch.boot_id] = volume_epoch.volume_epoch
            owners.setdefault(volume_epoch.volume_id, set()).add(volume_epoch.node_id)
            if volume_epoch.tier is Tier.NVME and volume_epoch.volume_id in mounts:
                mounted[volume_epoch.volume_epoch] = tuple(mounts[volume_epoch.volume_id])
    encoded = {node_id: LookupResponse(nodes=[info]).SerializeToString() for node_id, info in nodes.items()}
    by_volume = {volume_id: frozenset(ids) for volume_id, ids in owners.items()}
    return MembershipView(revision, nodes, encoded, places, volume_epochs, by_volume, mounted, orders, left)
