"""Findings about a node, as its heartbeats report them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from kvstore.core.clock import Clock
from kvstore.core.limits import MAX_NODE_FINDINGS, MAX_REASON
from kvstore.core.types import NodeId, VolumeId
from kvstore.health import codes
from kvstore.health.findings import HealthFinding, by_severity
from kvstore.health.host_reports import CertificateWatch
from kvstore.health.quantities import show_size
from kvstore.node.base.process_stall import ProcessStallDetector
from kvstore.node.base.slow_sources import SlowSources
from kvstore.node.publish.contract import PublishedBlocks
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import NodeVolume
from kvstore.observe.failure_tracker import FailureTracker

QUARANTINE_REPORT_S: Final = 600.0
"""How long a corrupt replica is reported."""
BEHIND_S: Final = 15.0
"""Publication is behind if nothing has been acknowledged for this long while changes wait."""
MIN_STALLS: Final = 3
STALLED_S: Final = 10.0
"""A process is slow that stalled this often, and for this long in total, in the last minute. One long stall is a hung node."""
_WRITES_FAIL: Final = "writes fail and are retried: "


class _Series(NamedTuple):
    """Corrupt replicas of one volume, and the time since the first of them was reported."""

    blocks: int
    seconds: float


class HealthReporter:
    """The findings about one node. The heartbeat asks for them; any thread may report a failure.

    Args:
        table: the blocks and volumes.
        replica_log: changes that wait to be published; None: the node publishes nothing.
        clock: time.
        storage_node: failures of write-back to another node.
        certificate: expiry of the node's certificate; None: it has none.
        sources: what slow loads waited for; None: nothing is reported.
        stalls: times in which the process did not run; None: nothing is reported.
        owners: findings about volumes that changed their owner.
    """

    def __init__(
        self,
        table: PublishedBlocks,
        replica_log: ReplicaChangeLog | None,
        clock: Clock,
        storage_node: FailureTracker,
        certificate: CertificateWatch | None = None,
        sources: SlowSources | None = None,
        stalls: ProcessStallDetector | None = None,
        owners: Callable[[], Iterable[HealthFinding]] = lambda: (),
    ) -> None:
        self._table = table
        self._log = replica_log
        self._clock = clock
        self._storage_node = storage_node
        self._certificate = certificate or CertificateWatch(None, "")
        self._sources = sources or SlowSources(NodeId(""), clock)
        self._stalls = stalls or ProcessStallDetector(clock)
        self._owners = owners
        self.why_copies_late: Callable[[], str] = lambda: ""
        """Returns why second copies are late; empty: they are not."""
        self._publishing = FailureTracker()
        self._acknowledged_s = clock.now_s()
        self.different_indexes: HealthFinding | None = None
        """The finding that the metadata servers of this node's list have different indexes."""
        self._seen: dict[VolumeId, tuple[int, int, float, float]] = {}
        """Per volume: corrupt replicas before the current series and in all, when the series began and when it last grew."""

    # ---- publication
    def publish_failed(self, why: object) -> None:
        """Record that publication failed."""
        self._publishing.failed(self._clock.now_s(), why)

    def why_not_published(self) -> str:
        """Return why publication fails; empty: it does not, or was not tried yet."""
        return self._publishing.reason(self._clock.now_s())

    def publish_acknowledged(self) -> None:
        """Record that the index accepted some changes."""
        self._acknowledged_s = self._clock.now_s()
        self._publishing.succeeded(self._acknowledged_s)

    def publish_caught_up(self) -> None:
        """Record that the index accepted all changes."""
        self._acknowledged_s = self._clock.now_s()
        self._publishing.clear()

    def publish_failing_s(self) -> float:
        """Return how long publication has failed or been behind; 0: it works."""
        now_s = self._clock.now_s()
        behind_s = now_s - self._acknowledged_s if self._waiting() else 0.0
        return max(self._publishing.seconds(now_s), behind_s if behind_s > BEHIND_S else 0.0)

    def _waiting(self) -> int:
        return 0 if self._log is None else self._log.waiting()

    # ---- volumes
    def why_not_writable(self, node_volume: NodeVolume) -> str:
        """Return why a volume rejects blocks, or that its last writes failed; empty: it accepts them."""
        if node_volume.volume.read_only is not None:
            return node_volume.volume.read_only[:MAX_REASON]
        reason = node_volume.failing.reason(self._clock.now_s())
        return (_WRITES_FAIL + reason)[:MAX_REASON] if reason else ""

    # ---- all findings
    def findings(self) -> list[HealthFinding]:
        """Return all findings about this node, its volumes and its certificate."""
        now_s = self._clock.now_s()
        found = []
        if failing_s := self.publish_failing_s():
            why = self._publishing.reason(now_s) or "no acknowledgement"
            waiting, node_id = self._waiting(), self._sources.node_id
            facts = f"The index has accepted no changes of node {node_id} for {failing_s:.0f} s ({waiting:,} wait): {why}"
            found.append(HealthFinding(codes.PUBLISH_FAILS, "", facts))
        if self.different_indexes is not None:
            found.append(self.different_indexes)
        if why := self._storage_node.reason(now_s):
            found.append(HealthFinding(codes.STORAGE_NODE_FAILS, "", f"The storage node does not accept blocks: {why}"))
        if why := self.why_copies_late():
            found.append(HealthFinding(codes.SECOND_COPIES_LATE, "", why))
        for node_volume in self._table.node_volumes:
            found += self._of_volume(node_volume, now_s)
        found += self._owners()
        found += self._slow()
        found += self._certificate.findings()
        return by_severity(found)[:MAX_NODE_FINDINGS]

    def _slow(self) -> Iterator[HealthFinding]:
        """Report what makes loads of this node slow: its process, its volumes or another node."""
        stalls_s = self._stalls.recent_s()
        if len(stalls_s) >= MIN_STALLS and sum(stalls_s) >= STALLED_S:
            facts = f"The process of node {self._sources.node_id} did not run for {sum(stalls_s):.0f} s of the last minute."
            yield HealthFinding(codes.NODE_SLOW, "", facts)
            return  # its loads wait for this process, whatever they seem to wait for
        for one in self._sources.found():
            volumes = one.node_id == self._sources.node_id
            what = "its volumes" if volumes else f"node {one.node_id}"
            facts = (
                f"Loads at node {self._sources.node_id} wait for {what}:"
                f" {one.loads} slow loads in the last minute, the longest {one.longest_s:.1f} s."
            )
            yield HealthFinding(codes.VOLUME_SLOW if volumes else codes.NODE_SLOW, "" if volumes else one.node_id, facts)

    def _of_volume(self, node_volume: NodeVolume, now_s: float) -> Iterator[HealthFinding]:
        volume_id = node_volume.volume_id
        disk = node_volume.disk
        free = "" if disk is None else f" {node_volume.folder} has {show_size(disk.free_bytes)} free."
        if node_volume.volume.read_only is not None:
            facts = f"Volume {volume_id} accepts no blocks: {node_volume.volume.read_only}.{free}"
            yield HealthFinding(codes.VOLUME_READ_ONLY, volume_id, facts)
        elif reason := node_volume.failing.reason(now_s):
            yield HealthFinding(codes.VOLUME_WRITE_FAILS, volume_id, f"Writes to volume {volume_id} fail: {reason}.{free}")
        elif disk is not None and disk.nearly_full:
            where = f"{node_volume.folder} of volume {volume_id}"
            facts = f"{where} has {show_size(disk.free_bytes)} free of {show_size(disk.total_bytes)}."
            yield HealthFinding(codes.VOLUME_DISK_NEARLY_FULL, volume_id, facts)
        if silent := node_volume.guard.why():
            yield HealthFinding(codes.VOLUME_HUNG, volume_id, f"Volume {volume_id} {silent}.")
        if (recent := self._recently_corrupt(node_volume, now_s)).blocks:
            minutes = max(1, round(recent.seconds / 60))
            facts = f"{recent.blocks:,} blocks on volume {volume_id} were found corrupt in the last {minutes} min."
            yield HealthFinding(codes.BLOCKS_CORRUPT, volume_id, facts)

    def _recently_corrupt(self, node_volume: NodeVolume, now_s: float) -> _Series:
        """Return the current series of corrupt replicas: it ends after ``QUARANTINE_REPORT_S`` without another one."""
        before, known, began_s, last_s = self._seen.get(node_volume.volume_id, (0, 0, now_s, now_s))
        if now_s - last_s > QUARANTINE_REPORT_S:
            before = known
        if node_volume.quarantined != known:
            began_s = now_s if known == before else began_s
            last_s = now_s
        self._seen[node_volume.volume_id] = before, node_volume.quarantined, began_s, last_s
        return _Series(node_volume.quarantined - before, now_s - began_s)
