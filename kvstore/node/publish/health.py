"""What is wrong with a node now, in words: told with each heartbeat, for whoever asks whether the store is well."""

from __future__ import annotations

from typing import Final

from kvstore.core.clock import Clock
from kvstore.core.limits import MAX_PROBLEMS_TOLD, MAX_REASON
from kvstore.core.types import VolumeId
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import NodeVolume
from kvstore.node.table import BlockTable
from kvstore.observe.failure_tracker import FailureTracker

QUARANTINE_TOLD_S: Final = 600.0
"""How long a replica that proved bad is told of."""
BEHIND_S: Final = 15.0
"""Without an acknowledgement for so long, what waits to be published is behind."""
_FAILED: Final = "writes fail, and are tried again: "


class Troubles:
    """Of one node. Asked by its heart alone; whoever fails tells it from any thread.

    Args:
        table: of it, the durable volumes.
        replica_log: what waits to be published; None: nothing is.
        clock: the node's.
        sent_away: how writing behind to another node fares.
    """

    def __init__(self, table: BlockTable, replica_log: ReplicaChangeLog | None, clock: Clock, sent_away: FailureTracker) -> None:
        self._table = table
        self._log = replica_log
        self._clock = clock
        self._sent_away = sent_away
        self._publishing = FailureTracker()
        self._acknowledged_s = clock.now_s()
        self._seen: dict[VolumeId, tuple[int, int, float]] = {}
        """Of each volume: replicas that had proved bad before the last lot, all of them, and when the last one was seen."""

    # ---- publishing
    def interrupted(self, why: object) -> None:
        """Publishing broke off."""
        self._publishing.failed(self._clock.now_s(), why)

    def acknowledged(self) -> None:
        """The index has taken something in."""
        self._acknowledged_s = self._clock.now_s()
        self._publishing.succeeded(self._acknowledged_s)

    def caught_up(self) -> None:
        """It has taken everything in."""
        self._acknowledged_s = self._clock.now_s()
        self._publishing.clear()

    def publish_failing_s(self) -> float:
        """For how long publishing has failed, or what waits has not been acknowledged; 0: all is well."""
        now_s = self._clock.now_s()
        behind_s = now_s - self._acknowledged_s if self._waiting() else 0.0
        return max(self._publishing.seconds(now_s), behind_s if behind_s > BEHIND_S else 0.0)

    def _waiting(self) -> int:
        return 0 if self._log is None else self._log.waiting()

    # ---- volumes
    def why_no_blocks(self, node_volume: NodeVolume) -> str:
        """Why a durable volume takes no blocks now, or failed to a moment ago; empty: it takes them."""
        if node_volume.volume.read_only is not None:
            return node_volume.volume.read_only[:MAX_REASON]
        failing = node_volume.failing.reason(self._clock.now_s())
        return (_FAILED + failing)[:MAX_REASON] if failing else ""

    # ---- all of it
    def told(self) -> list[str]:
        """What is wrong beside volumes that take no blocks."""
        now_s = self._clock.now_s()
        found = []
        if failing_s := self.publish_failing_s():
            why = self._publishing.reason(now_s) or "nothing is acknowledged"
            found.append(
                f"the index does not take what changes here since {failing_s:.0f} s ({self._waiting()} changes wait): {why}"
            )
        if why := self._sent_away.reason(now_s):
            found.append(f"the storage node does not take its blocks: {why}")
        for node_volume in self._table.node_volumes:
            if silent := node_volume.guard.why():
                found.append(f"Volume {node_volume.volume_id} {silent}; its blocks are misses, or read from other nodes")
            bad = self._lately_bad(node_volume, now_s)
            lately = f"within {QUARANTINE_TOLD_S / 60:.0f} minutes"
            found += [f"{bad} blocks on {node_volume.volume_id} proved bad {lately} and are quarantined"] if bad else []
        return [problem[:MAX_REASON] for problem in found[:MAX_PROBLEMS_TOLD]]

    def _lately_bad(self, node_volume: NodeVolume, now_s: float) -> int:
        """How many replicas proved bad since a time without any."""
        before, known, last_s = self._seen.get(node_volume.volume_id, (0, 0, now_s))
        if now_s - last_s > QUARANTINE_TOLD_S:
            before = known
        if node_volume.quarantined != known:
            last_s = now_s
        self._seen[node_volume.volume_id] = before, node_volume.quarantined, last_s
        return node_volume.quarantined - before
