"""Adoption of volumes on shared storage: this node takes over the volume of an absent owner, and gives up its own ones.

Theory of operation.

1. One thread per volume looks at it every ``POLL_S``. The next step is decided from the volume's files
   (``kvstore.tiers.nvme.ownership``). The metadata servers only say whether the owner is absent.
2. An owner is absent if the metadata servers have considered it silent or unknown for ``node.adopt_after``, without a gap in
   their answers. A volume's first owner that stopped gracefully is not absent. If no metadata server answers, no owner is.
3. A volume that this node owns and does not have open is opened as at a start: from its catalog or, if that is damaged, from
   its slot headers. Its blocks join the table beside loads and stores. Then the node registers with the volume, which closes
   the replicas of the old owner in the index, and sends its inventory.
4. A volume of this node that another node has adopted is dropped: its blocks leave the table, and the node mounts it for reading.
5. A node's own volumes (``node.nvme``) are watched in the same way, so the node takes them back once their adopter has released
   them or is absent. An adopter releases a volume when it stops gracefully.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import grpc

from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc
from kvstore.core.clock import Clock
from kvstore.core.errors import Conflict, CorruptBlock, KVStoreError
from kvstore.core.types import NodeId, VolumeId
from kvstore.health import codes
from kvstore.health.findings import HealthFinding
from kvstore.node.durability.recovery import VolumeFolder, drop_blocks, recover_while_running
from kvstore.node.eviction.operator_requests import restore_hinted
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import NodeVolume
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.rpc.client import call
from kvstore.tiers.nvme.fsck import check_volume
from kvstore.tiers.nvme.ownership import (
    ClaimsMissing,
    Owner,
    Step,
    VolumeAdopted,
    VolumeObservation,
    claim,
    claim_in_force,
    home_of,
    newest_catalog,
    next_step,
    read_superblock,
    release,
)
from kvstore.tiers.nvme.slab import NvmeSlab
from kvstore.tiers.nvme.superblock import UnknownVersion

log = logging.getLogger(__name__)
_limited = LimitedLog(log)

POLL_S: Final = 1.0
GAP_S: Final = 10.0
"""Observations further apart than this do not prove that the owner was absent in between."""
RETRY_S: Final = 5.0
"""Pause after a failure. It doubles with each further one, because an attempt may read the whole volume."""
MOST_RETRY_S: Final = 60.0
DROP_POLL_S: Final = 0.2
_RPC_TIMEOUT_S: Final = 5.0


class OwnerTimer:
    """How long the owner of one volume has been absent. Pure.

    Args:
        after_s: time after which it counts as absent.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._node_id: NodeId | None = None
        self._since_s = 0.0
        self._last_s = 0.0

    def judge(self, node_id: NodeId, *, away: bool, now_s: float) -> Owner:
        """Add an observation: whether an owner is away now."""
        if not away:
            self._node_id = None
            return Owner.PRESENT
        if node_id != self._node_id or now_s - self._last_s > GAP_S:
            self._node_id, self._since_s = node_id, now_s
        self._last_s = now_s
        return Owner.ABSENT if now_s - self._since_s >= self._after_s else Owner.PRESENT


class OwnerPresence:
    """Asks the metadata servers whether nodes are away.

    Args:
        connect: opens the channel to the metadata servers.
    """

    def __init__(self, connect: Callable[[], grpc.Channel]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None

    def is_away(self, node_id: NodeId, home: NodeId) -> bool:
        """Whether the owner of a volume is silent or unknown. False also if the call to the metadata server fails.

        An owner whose calls are refused is not away, nor is ``home`` if it stopped gracefully: it will be started again. Another
        owner should have released the volume when it stopped.
        """
        if not node_id:
            return True  # an unreadable claim
        with self._lock:
            if self._channel is None:
                self._channel = self._connect()
            stub = metadata_pb2_grpc.MetadataStub(self._channel)
        try:
            found = call(stub.ListNodes, metadata_pb2.ListNodesRequest(node_ids=[node_id]), _RPC_TIMEOUT_S).nodes
        except KVStoreError as error:
            _limited.warning("volume not adopted: liveness of its owner is unknown (owner=%s, error=%s)", node_id, error)
            return False
        return not any(one.alive or one.refused or (one.stopped and node_id == home) for one in found)

    def close(self) -> None:
        """Close the channel."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()


class Registration(Protocol):
    """The node's registration with the metadata servers."""

    def add_volume(self, volume: common_pb2.VolumeInfo) -> None:
        """Register with one more volume."""

    def remove_volume(self, volume_id: VolumeId) -> None:
        """Register without a volume."""


@dataclass(slots=True)
class AdoptionParts:
    """Parts that the adopters of a node share.

    Attributes:
        node_id: this node.
        after_s: ``node.adopt_after``.
        table: receives the blocks.
        namespaces: of the blocks.
        replica_log: changes to publish.
        is_away: whether the owner of a volume is away; also gets the node that the volume is named after.
        may_adopt: whether this node accepts new work.
        open_volume: opens a volume that this node owns.
        make_guard: sets up the guard of an opened volume.
        mount: mounts a volume for reading.
        counters: metrics.
        clock: time.
        registration: of the node; None: it runs without a metadata server.
        poll_s: time between two looks at a volume.
    """

    node_id: NodeId
    after_s: float
    table: BlockTable
    namespaces: NamespaceRegistry
    replica_log: ReplicaChangeLog
    is_away: Callable[[NodeId, NodeId], bool]
    may_adopt: Callable[[], bool]
    open_volume: Callable[[VolumeFolder], NvmeSlab]
    make_guard: Callable[[NodeVolume], None]
    mount: Callable[[VolumeFolder], None]
    counters: Counters
    clock: Clock
    registration: Registration | None = None
    poll_s: float = POLL_S
    stopping: threading.Event = field(default_factory=threading.Event)


class VolumeAdopter:
    """The thread of one volume. ``start`` and ``stop`` once each; ``look`` is one round, for tests.

    Args:
        location: the volume.
        parts: of the node.
        held: the open volume; None: this node does not own it.
    """

    def __init__(self, location: VolumeFolder, parts: AdoptionParts, held: NodeVolume | None = None) -> None:
        self.location = location
        self._parts = parts
        self._held = held
        self._home = home_of(location.volume_id)
        self._is_home = self._home == parts.node_id
        self._timer = OwnerTimer(parts.after_s)
        self._token = -1
        self._owner: NodeId | None = None
        self._unclosed: list[NodeVolume] = []
        """Dropped volumes with I/O that has not returned. They are closed once it has."""
        self._thread = threading.Thread(target=self._run, name=f"kvstore-adopt-{location.path.name}", daemon=True)

    @property
    def adopted(self) -> bool:
        """Whether this node has adopted the volume of another node."""
        return self._held is not None and not self._is_home

    @property
    def lost_to(self) -> NodeId | None:
        """The node that has adopted this node's volume; None: none has, or it is unknown."""
        is_lost = self._is_home and self._held is None and self._owner != self._parts.node_id
        return self._owner if is_lost else None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Wait for the thread, after ``stopping`` was set. An adoption in progress may take longer."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def release(self) -> None:
        """Give an adopted volume back to the node that it is named after. Call after it was closed.

        A volume with an outstanding write stays claimed until this node counts as absent.
        """
        held = self._held
        if held is None or not self.adopted or held.volume.adopted_by is not None or held.guard.outstanding:
            return
        location = self.location
        try:
            given = release(location.path, location.volume_id, self._token)
        except (KVStoreError, OSError) as error:
            log.warning("volume not released: %s (error=%s)", location.volume_id, error)
        else:
            log.info("volume released: %s (token=%d, released=%s)", location.volume_id, self._token + 1, given)

    def _run(self) -> None:
        pause_s, retry_s = self._parts.poll_s, RETRY_S
        while not self._parts.stopping.wait(pause_s):
            pause_s = retry_s
            try:
                self.look()
                pause_s, retry_s = self._parts.poll_s, RETRY_S
                continue
            except VolumeAdopted as error:
                log.info("volume not adopted: %s", error)
            except (KVStoreError, OSError) as error:
                self._parts.counters.add(volumes_metrics.ADOPTIONS_FAILED)
                _limited.warning("volume not adopted, trying again: %s (error=%s)", self.location.volume_id, error)
            except Exception:  # thread edge: the volume would stay without an owner
                self._parts.counters.add(volumes_metrics.ADOPTIONS_FAILED)
                log.exception("volume not adopted: %s, unexpected error, trying again", self.location.volume_id)
            retry_s = min(MOST_RETRY_S, retry_s * 2)

    def look(self) -> None:
        """Look at the volume, and do its next step.

        Raises:
            KVStoreError: it could not be adopted.
            OSError: see ``KVStoreError``.
        """
        self._close_dropped()
        if self._held is not None:
            if self._held.volume.adopted_by is not None:
                self._lose(self._held)
            return
        parts, path = self._parts, self.location.path
        found = claim_in_force(path, self._home)
        self._owner = found.node_id
        if not parts.may_adopt():
            return
        if found.node_id == parts.node_id:
            owner = Owner.SELF
        else:
            away = parts.is_away(found.node_id, self._home)
            owner = self._timer.judge(found.node_id, away=away, now_s=parts.clock.now_s())
            if owner is Owner.PRESENT:
                return
        superblock = read_superblock(path)
        if superblock.volume_id != self.location.volume_id:  # a claim would fence its owner
            volume_id = self.location.volume_id
            raise Conflict(
                f"the folder has volume {superblock.volume_id}; correct the path of {volume_id} in node.mounts or node.nvme",
                path=path,
            )
        step = next_step(VolumeObservation(owner, found.token, superblock.token, newest_catalog(path, found.token)))
        if step is Step.CLAIM:
            _limited.warning(
                "adoption begun: %s (owner=%s, absent=%.0f s or more, token=%d)",
                self.location.volume_id, found.node_id, parts.after_s, found.token + 1,
            )  # fmt: skip
            if claim(path, found.token + 1, parts.node_id):
                self._adopt(found.token + 1)
            else:
                log.info("volume claimed by another node first: %s (token=%d)", self.location.volume_id, found.token + 1)
        elif step is Step.REFUSE:
            raise ClaimsMissing(path, superblock.token)
        elif step is not Step.WAIT:
            self._adopt(found.token)

    # ---- taking
    def _adopt(self, token: int) -> None:
        parts, location = self._parts, self.location
        began_s = parts.clock.now_s()
        try:
            slab, node_volume, blocks = self._recover()
        except (ClaimsMissing, UnknownVersion):
            raise  # a repair would only do harm
        except CorruptBlock as error:  # no operator is there to repair it
            log.warning("catalog rebuild begun: %s (reason=%s)", location.volume_id, error)
            check_volume(location.path, repair=True, direct=location.direct, token=token)
            parts.counters.add(volumes_metrics.ADOPTED_CATALOGS_REBUILT)
            slab, node_volume, blocks = self._recover()
        residency = parts.table.residency
        with residency.lock:
            residency.add_volume(node_volume)
            residency.changed.notify_all()
        restore_hinted(parts.table, None)
        self._held, self._token, self._owner = node_volume, token, parts.node_id
        if parts.registration is not None:
            capacity_bytes = slab.usage().capacity_bytes
            parts.registration.add_volume(
                common_pb2.VolumeInfo(
                    volume_id=location.volume_id, tier=common_pb2.TIER_NVME, capacity_bytes=capacity_bytes, uid=slab.uid
                )
            )
        parts.counters.add(volumes_metrics.ADOPTED_VOLUMES)
        log.warning(
            "volume adopted: %s (path=%s, token=%d, blocks=%d, seconds=%.1f)",
            location.volume_id, location.path, token, blocks, parts.clock.now_s() - began_s,
        )  # fmt: skip

    def _recover(self) -> tuple[NvmeSlab, NodeVolume, int]:
        """Open the volume, and put its blocks into the table. Returns how many there are.

        Raises:
            CorruptBlock: its catalog is damaged.
        """
        parts = self._parts
        slab = parts.open_volume(self.location)
        node_volume = NodeVolume(slab, folder=slab.path)
        parts.make_guard(node_volume)
        with parts.table.residency.lock:
            parts.table.residency.expect_volume(node_volume)
        try:
            return slab, node_volume, recover_while_running(parts.table, node_volume, parts.namespaces, parts.counters)
        except BaseException:
            self._drop(node_volume)
            raise

    # ---- losing
    def _lose(self, node_volume: NodeVolume) -> None:
        parts, volume_id = self._parts, self.location.volume_id
        self._owner = node_volume.volume.adopted_by
        parts.mount(self.location)
        parts.replica_log.forget_volume(volume_id)
        if parts.registration is not None:
            parts.registration.remove_volume(volume_id)
        if self._drop(node_volume):
            self._held = None
            log.warning("volume dropped: %s (adopted_by=%s); this node only reads it", volume_id, self._owner)

    def _drop(self, node_volume: NodeVolume) -> bool:
        """Take the blocks of a volume out of the table, and close it. Waits until no load uses them.

        Returns:
            False: the node is stopping, and closes the volume itself.
        """
        parts = self._parts
        parts.replica_log.forget_volume(node_volume.volume_id)
        while left := drop_blocks(parts.table, node_volume):
            _limited.warning("volume waits for loads that use its blocks: %s (blocks=%d)", node_volume.volume_id, left)
            if parts.stopping.wait(DROP_POLL_S):
                break
        if parts.stopping.is_set():
            return False
        with parts.table.residency.lock:
            parts.table.residency.remove_volume(node_volume)
        node_volume.guard.close()
        self._unclosed.append(node_volume)
        self._close_dropped()
        return True

    def _close_dropped(self) -> None:
        for node_volume in self._unclosed.copy():
            if not node_volume.guard.outstanding:
                node_volume.volume.close()
                self._unclosed.remove(node_volume)


def findings(adopters: Sequence[VolumeAdopter]) -> Iterator[HealthFinding]:
    """Report volumes that changed their owner."""
    for adopter in adopters:
        volume_id = adopter.location.volume_id
        if adopter.adopted:
            facts = f"This node has adopted volume {volume_id} of node {home_of(volume_id)}."
            yield HealthFinding(codes.VOLUME_ADOPTED, volume_id, facts)
        elif (owner := adopter.lost_to) is not None:
            facts = f"Volume {volume_id} of this node was adopted by node {owner or 'unknown'}; this node only reads it."
            yield HealthFinding(codes.VOLUME_FENCED, volume_id, facts)
