"""Which nodes count as holders of copies. Pure.

A node that became silent or stopped counts for a while, because most nodes come back with their volumes: a restart must not copy
all its blocks. A node that drains with ``move`` does not count: it leaves. A volume that was lost and created again has another
``uid``, so its loss is noticed although its node is back.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvproto.v1 import common_pb2
from kvproto.v1.metadata_pb2 import NodeStatus
from kvstore.core.types import NodeId
from kvstore.node.copies.placement import Member, Members


class Membership:
    """The nodes of the store, from the lists of the metadata server.

    Args:
        here: this node.
        recopy_after_s: how long a silent node counts.
    """

    def __init__(self, here: NodeId, recopy_after_s: float) -> None:
        self._recopy_after_s = recopy_after_s
        self._silent_s: dict[NodeId, float] = {}
        """Nodes that are silent, and since when."""
        self.members = Members(here, ())
        self.volumes: frozenset[tuple[NodeId, bytes]] = frozenset()
        """Durable volumes of nodes that count: the node, and the volume's uid."""
        self.zones: dict[NodeId, str] = {}
        """Zones of these nodes."""
        self.until_s = 0.0
        """When the list must be read again, because a silent node then ceases to count; infinite: no node is silent."""

    def update(self, statuses: Iterable[NodeStatus], now_s: float) -> None:
        """Apply a list of nodes."""
        counted: list[Member] = []
        volumes: set[tuple[NodeId, bytes]] = set()
        silent_s: dict[NodeId, float] = {}
        for status in statuses:
            node, node_id = status.node, NodeId(status.node.node_id)
            if not status.alive:
                silent_s[node_id] = min(now_s - status.heartbeat_age_ms / 1000, self._silent_s.get(node_id, now_s))
                if silent_s[node_id] + self._recopy_after_s <= now_s:
                    continue
            uids = [volume.uid for volume in node.volumes if volume.tier == common_pb2.TIER_NVME]
            if status.order.move or not uids:
                continue
            volumes.update((node_id, uid) for uid in uids)
            host = node.control_address.rpartition(":")[0]
            takes = status.alive and status.state == common_pb2.NODE_STATE_ACTIVE
            counted.append(Member(node_id, node.zone, host, takes))
        self._silent_s = silent_s
        ends = [since + self._recopy_after_s for since in silent_s.values()]
        self.until_s = min((end for end in ends if end > now_s), default=float("inf"))
        self.members, self.volumes = Members(self.members.here, counted), frozenset(volumes)
        self.zones = {member.node_id: member.zone for member in counted}
