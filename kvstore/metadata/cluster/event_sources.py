"""Derive events from two successive observations: nodes that registered or left, findings that were raised or cleared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvproto.v1 import common_pb2
from kvproto.v1.metadata_pb2 import NodeStatus
from kvstore.health.findings import HealthFinding
from kvstore.health.quantities import show_duration
from kvstore.metadata.cluster.event_journal import EventJournal
from kvstore.metadata.membership.view import is_engine_cache

_DRAIN_WORDS: Final = {
    common_pb2.NODE_STATE_DRAINING: "drains",
    common_pb2.NODE_STATE_DRAINED: "is drained",
    common_pb2.NODE_STATE_DRAIN_BLOCKED: "cannot be drained",
    common_pb2.NODE_STATE_ACTIVE: "is active again",
}


class FindingEvents:
    """Records findings that were raised or cleared since the last round.

    Args:
        journal: receives the events.
    """

    def __init__(self, journal: EventJournal) -> None:
        self._journal = journal
        self._known: dict[tuple[str, str], HealthFinding] = {}

    def observe(self, found: Sequence[HealthFinding]) -> None:
        """Compare the present findings with the last ones."""
        present = {one.identity: one for one in found}
        for identity in present.keys() - self._known.keys():
            one = present[identity]
            self._journal.record("finding_raised", one.subject, one.facts, code=one.code.name)
        for identity in self._known.keys() - present.keys():
            one = self._known[identity]
            whose = f"{one.subject}: " if one.subject else ""
            self._journal.record("finding_cleared", one.subject, f"{whose}no longer: {one.code.title}.", code=one.code.name)
        self._known = present


class NodeEvents:
    """Records nodes that registered, restarted, drained or were removed since the last round.

    Args:
        journal: receives the events.
    """

    def __init__(self, journal: EventJournal) -> None:
        self._journal = journal
        self._known: dict[str, NodeStatus] | None = None

    def observe(self, statuses: Sequence[NodeStatus]) -> None:
        """Compare the present nodes with the last ones. The first round after a start records nothing."""
        before, present = self._known, {status.node.node_id: status for status in statuses}
        self._known = present
        if before is None:
            return
        for node_id, status in present.items():
            old = before.get(node_id)
            if old is None:
                if is_engine_cache(status.node):
                    text = f"Engine cache {node_id} registered."
                else:
                    text = f"Node {node_id} registered ({status.node.control_address})."
                self._journal.record("node_registered", node_id, text)
                continue
            if old.node.boot_id != status.node.boot_id:
                self._journal.record("node_restarted", node_id, f"Node {node_id} registered again after a restart.")
            elif status.alive and not old.alive:
                self._journal.record("node_back", node_id, f"Node {node_id} reports again.")
            if old.state != status.state and status.state in _DRAIN_WORDS:
                self._journal.record("node_drain", node_id, f"Node {node_id} {_DRAIN_WORDS[status.state]}.")
        for node_id in before.keys() - present.keys():
            old = before[node_id]
            if is_engine_cache(old.node):
                silence = show_duration(old.heartbeat_age_ms / 1000)
                text = f"Engine cache {node_id} was forgotten {silence} after its last heartbeat."
            else:
                text = f"Node {node_id} was removed or forgotten with all its blocks."
            self._journal.record("node_removed", node_id, text)
