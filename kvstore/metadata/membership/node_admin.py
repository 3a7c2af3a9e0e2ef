"""Calls about whole nodes: drain, undrain, remove, unregister, and locate blocks.

Drain orders are notes in the index, beside the registrations: they survive restarts, and all servers of the index see them. A
node reports its progress with its heartbeats. Changes run on the index thread and decide on the contents of the index, never on
a cache.
"""

from __future__ import annotations

import logging

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import NODE_STATE_DRAINED, DrainOrder, DrainProgress, NodeInfo, Tier
from kvstore.core.errors import Conflict, InvalidArgument, NotFound, Unsupported
from kvstore.core.limits import MAX_NODES, MAX_REASON
from kvstore.core.types import BootId, NamespaceId, NodeId
from kvstore.index.contract import PrefixIndex, VolumeEpoch
from kvstore.metadata.indexing.index_mutations import forget_node
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.membership.records import (
    REMOVED_PREFIX,
    decode_removed,
    drain_note,
    encode_removed,
    left_note,
    node_note,
    removed_note,
)
from kvstore.metadata.membership.view import is_engine_cache
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.rpc.codec import check_id, check_name, keys_from_packed

logger = logging.getLogger(__name__)

MAX_LOCATED = 4_096
"""Maximum number of keys per call of :meth:`NodeAdmin.locate`."""
KEEP_REMOVED = MAX_NODES
"""How many boots that were removed while they were alive may not register. A further removal forgets the oldest."""


class NodeAdmin:
    """Handlers of the calls about whole nodes.

    Args:
        index: the index.
        nodes: registrations and liveness.
        writes: thread that changes the index.
        reads: thread for long reads of the index.
        counters: counters of this process.
    """

    def __init__(self, index: PrefixIndex, nodes: NodeTable, writes: IndexThread, reads: IndexThread, counters: Counters) -> None:
        self._index = index
        self._nodes = nodes
        self._writes = writes
        self._reads = reads
        self._counters = counters

    async def drain(self, request: pb.DrainNodeRequest) -> pb.NodeStatus:
        """Order a node to drain.

        Raises:
            NotFound: no such node.
            InvalidArgument: the call is malformed.
            Unsupported: the node is a pool in an engine's device memory, which ends with its engine.
        """
        operation, node_id = check_id(request.operation_id, "operation_id"), NodeId(check_name(request.node_id, "node_id"))
        await self._index.refresh()  # another server may have registered the node a moment ago
        if await self._writes.run(_put_order, self._index, node_id, DrainOrder(operation_id=operation, move=request.move)):
            self._counters.add(metadata_metrics.DRAINS_ORDERED)
            logger.warning("drain ordered: %s (move=%s)", node_id, request.move)
        return self._nodes.status(node_id)

    async def undrain(self, request: pb.UndrainNodeRequest) -> pb.NodeStatus:
        """Lift a drain order.

        Raises:
            NotFound: no such node.
            InvalidArgument: the call is malformed.
        """
        check_id(request.operation_id, "operation_id")
        node_id = NodeId(check_name(request.node_id, "node_id"))
        await self._index.refresh()
        if await self._writes.run(_put_order, self._index, node_id, None):
            self._counters.add(metadata_metrics.DRAINS_LIFTED)
            logger.warning("drain order lifted: %s", node_id)
        return self._nodes.status(node_id)

    async def remove(self, request: pb.RemoveNodeRequest) -> bool:
        """Forget a node.

        Returns:
            False if no such node is registered.

        Raises:
            Conflict: the node is alive and not drained, and the call does not force the removal.
            InvalidArgument: the call is malformed.
        """
        check_id(request.operation_id, "operation_id")
        node_id = NodeId(check_name(request.node_id, "node_id"))
        await self._index.refresh()
        record = self._nodes.view().nodes.get(node_id)
        if record is None:
            return False
        alive = self._nodes.is_alive(node_id)
        if alive and not request.force and self._nodes.state(node_id) != NODE_STATE_DRAINED:
            raise Conflict("the node is alive and not drained: drain it first, or force the removal", node_id=node_id)
        boot_id = BootId(record.boot_id)
        await self._writes.run(_remove_node, self._index, node_id, boot_id, alive)
        self._nodes.view()
        self._counters.add(metadata_metrics.NODES_REMOVED)
        logger.warning("node removed with all its blocks: %s (alive=%s)", node_id, alive)
        return True

    async def unregister(self, request: pb.UnregisterNodeRequest) -> bool:
        """Record that a boot stops gracefully.

        Returns:
            False if another boot is registered.

        Raises:
            InvalidArgument: the call is malformed.
        """
        check_id(request.operation_id, "operation_id")
        node_id = NodeId(check_name(request.node_id, "node_id"))
        known = await self._writes.run(_put_left, self._index, node_id, BootId(check_id(request.boot_id, "boot_id")))
        record = self._nodes.view().nodes.get(node_id)
        if known and record is not None and not is_engine_cache(record):
            self._counters.add(metadata_metrics.NODES_LEFT)
        return known

    async def locate(self, request: pb.LocateBlocksRequest) -> pb.LocateBlocksResponse:
        """Find the volumes that hold each key.

        Raises:
            InvalidArgument: the call is malformed, or names too many keys.
        """
        namespace = NamespaceId(check_id(request.namespace_id, "namespace_id"))
        keys = keys_from_packed(request.keys, limit=MAX_LOCATED)
        holders = await self._reads.run(self._index.holders, namespace, keys)
        locations = self._nodes.view().locations
        answer = pb.LocateBlocksResponse()
        positions: dict[VolumeEpoch, int] = {}
        for position, volume_epochs in enumerate(holders):
            for volume_epoch in volume_epochs:
                if volume_epoch not in locations:  # its node has just left
                    continue
                if volume_epoch not in positions:
                    positions[volume_epoch] = len(answer.volumes)
                    answer.volumes.append(self._volume(volume_epoch))
                answer.replicas.add(key=position, volume=positions[volume_epoch])
        return answer

    def _volume(self, volume_epoch: VolumeEpoch) -> pb.LocatedVolume:
        location = self._nodes.last_view.locations[volume_epoch]
        volume = self._nodes.last_view.nodes[location.node_id].volumes[location.volume]
        return pb.LocatedVolume(
            node_id=location.node_id,
            volume_id=volume.volume_id,
            tier=volume.tier or Tier.TIER_UNSPECIFIED,
            alive=self._nodes.is_alive(location.node_id),
            state=self._nodes.state(location.node_id),
        )


def check_progress(progress: DrainProgress) -> None:
    """Check a node's report about its drain order.

    Raises:
        InvalidArgument: the report is malformed.
    """
    check_id(progress.operation_id, "operation_id")
    if len(progress.why) > MAX_REASON:
        raise InvalidArgument("why is too long", got=len(progress.why), limit=MAX_REASON)


# ---- on the index thread ----
def _put_order(index: PrefixIndex, node_id: NodeId, order: DrainOrder | None) -> bool:
    """Store or delete a drain order. An equal order stays, with the operation id that the node's progress names.

    Returns:
        Whether anything changed.
    """
    node = index.note(node_note(node_id))
    if node is None:
        raise NotFound("no such node", node_id=node_id)
    volumes = NodeInfo.FromString(node).volumes
    if order is not None and volumes and all(volume.tier == Tier.TIER_HBM for volume in volumes):
        raise Unsupported("device memory of an engine cannot be drained: it ends with its engine", node_id=node_id)
    name = drain_note(node_id)
    note = index.note(name)
    if order is None:
        index.put_note(name, None)
        return note is not None
    if note is not None and DrainOrder.FromString(note).move == order.move:
        return False
    index.put_note(name, order.SerializeToString(deterministic=True))
    return True


def _put_left(index: PrefixIndex, node_id: NodeId, boot_id: BootId) -> bool:
    note = index.note(node_note(node_id))
    if note is None or NodeInfo.FromString(note).boot_id != boot_id:
        return False
    index.put_note(left_note(node_id), boot_id)
    return True


def _remove_node(index: PrefixIndex, node_id: NodeId, boot_id: BootId, alive: bool) -> None:
    if alive:  # first, because the boot may try to register at any moment
        numbers = {
            name: removed[1]
            for name, note in index.notes(REMOVED_PREFIX).items()
            if name != removed_note(node_id) and (removed := decode_removed(note)) is not None
        }
        oldest = sorted(numbers, key=numbers.__getitem__)[: max(0, len(numbers) + 1 - KEEP_REMOVED)]
        removal = encode_removed(boot_id, max(numbers.values(), default=0) + 1)
        index.put_notes({**dict.fromkeys(oldest), removed_note(node_id): removal}, announce=False)
    forget_node(index, node_id, boot_id)
