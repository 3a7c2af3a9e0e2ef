"""Problems of a node, in words, as its heartbeats report them."""

from __future__ import annotations

from typing import Final

from kvstore.core.clock import Clock
from kvstore.core.limits import MAX_PROBLEMS_TOLD, MAX_REASON
from kvstore.core.types import VolumeId
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import NodeVolume
from kvstore.node.table import BlockTable
from kvstore.observe.failure_tracker import FailureTracker

QUARANTINE_REPORT_S: Final = 600.0
"""How long a corrupt replica is reported."""
BEHIND_S: Final = 15.0
"""Publication is behind if nothing has been acknowledged for this long while changes wait."""
_WRITES_FAIL: Final = "writes fail and are retried: "


class HealthReporter:
    """The problems of one node. Its heart asks for them; any thread may report one.

    Args:
        table: the blocks and volumes.
        replica_log: changes that wait to be published; None: the node publishes nothing.
        clock: time.
        storage_node: failures of write-back to another node.
    """

    def __init__(
        self, table: BlockTable, replica_log: ReplicaChangeLog | None, clock: Clock, storage_node: FailureTracker
    ) -> None:
        self._table = table
        self._log = replica_log
        self._clock = clock
        self._storage_node = storage_node
        self._publishing = FailureTracker()
        self._acknowledged_s = clock.now_s()
        self._seen: dict[VolumeId, tuple[int, int, float]] = {}
        """Per volume: corrupt replicas before the current series, all of them, and when the last one was seen."""

    # ---- publication
    def publish_failed(self, why: object) -> None:
        """Record that publication failed."""
        self._publishing.failed(self._clock.now_s(), why)

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
    def why_read_only(self, node_volume: NodeVolume) -> str:
        """Return why a volume rejects blocks, or that its last writes failed; empty: it accepts them."""
        if node_volume.volume.read_only is not None:
            return node_volume.volume.read_only[:MAX_REASON]
        reason = node_volume.failing.reason(self._clock.now_s())
        return (_WRITES_FAIL + reason)[:MAX_REASON] if reason else ""

    # ---- all problems
    def problems(self) -> list[str]:
        """Return all problems except volumes that reject blocks."""
        now_s = self._clock.now_s()
        found = []
        if failing_s := self.publish_failing_s():
            why = self._publishing.reason(now_s) or "no acknowledgement"
            found.append(f"the index accepts no changes of this node since {failing_s:.0f} s ({self._waiting()} wait): {why}")
        if why := self._storage_node.reason(now_s):
            found.append(f"the storage node does not accept blocks: {why}")
        for node_volume in self._table.node_volumes:
            if silent := node_volume.guard.why():
                found.append(f"volume {node_volume.volume_id} {silent}; its blocks are misses, or read from other nodes")
            if corrupt := self._recently_corrupt(node_volume, now_s):
                minutes = QUARANTINE_REPORT_S / 60
                found.append(f"{corrupt} corrupt blocks on {node_volume.volume_id} quarantined within {minutes:.0f} minutes")
        return [problem[:MAX_REASON] for problem in found[:MAX_PROBLEMS_TOLD]]

    def _recently_corrupt(self, node_volume: NodeVolume, now_s: float) -> int:
        """Return the number of corrupt replicas since the last time without any."""
        before, known, last_s = self._seen.get(node_volume.volume_id, (0, 0, now_s))
        if now_s - last_s > QUARANTINE_REPORT_S:
            before = known
        if node_volume.quarantined != known:
            last_s = now_s
        self._seen[node_volume.volume_id] = before, node_volume.quarantined, last_s
        return node_volume.quarantined - before
