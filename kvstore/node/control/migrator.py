"""Migration of blocks off a draining node: other nodes pull the blocks that no other volume holds.

The other nodes pull one batch at a time over the data plane. That bounds the bytes in flight, and a pause after each batch
bounds the bandwidth. The migrator keeps no state that must be correct: each round reads the index again, so an interrupted round
continues, e.g. after a restart. Blocks that a node has reported durable count as moved until that node leaves, because the index
learns of them later.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvproto.v1 import common_pb2, metadata_pb2
from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockKey, NamespaceId, NodeId, StoreOutcome
from kvstore.node.control.migration_plan import Batch, free_space, plan_moves
from kvstore.node.control.pull_client import PullClient
from kvstore.node.state.model import Block
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics

log = logging.getLogger(__name__)
_limited = LimitedLog(log)

BATCH_BLOCKS = 1_024


@dataclass(frozen=True, slots=True)
class MigrationRound:
    """Result of a round."""

    remaining: int
    """Blocks that no volume of a remaining node holds."""
    why: str
    """Why they remain."""


class BlockMigrator:
    """Migrates the blocks of one node. One thread may use it.

    Args:
        calls: calls to the metadata server and to other nodes.
        counters: metrics.
        window_bytes: maximum bytes in flight.
        bytes_per_s: maximum bandwidth; 0: no limit.
        pause: waits some seconds; True: the migration must stop.
    """

    def __init__(
        self,
        calls: PullClient,
        counters: Counters,
        *,
        window_bytes: int,
        bytes_per_s: int,
        pause: Callable[[float], bool],
    ) -> None:
        self._calls = calls
        self._counters = counters
        self._window_bytes = window_bytes
        self._bytes_per_s = bytes_per_s
        self._pause = pause
        self._moved: dict[BlockKey, NodeId] = {}
        """Blocks that another node has reported durable."""
        self.remaining = 0
        self.moved_blocks = 0
        self.moved_bytes = 0

    def close(self) -> None:
        """Close the channel to the metadata server."""
        self._calls.close()

    def reset(self) -> None:
        """Reset the progress, because a new order begins."""
        self._moved.clear()
        self.remaining = self.moved_blocks = self.moved_bytes = 0

    def is_safe(self, key: BlockKey) -> bool:
        """Return whether another node has reported the block durable, in this round or an earlier one."""
        return key in self._moved

    def round(self, blocks: Sequence[Block]) -> MigrationRound:
        """Move as many blocks as other nodes accept. Stops early if ``pause`` returns True.

        Raises:
            KVStoreError: a call to the metadata server failed.
        """
        targets = self._target_nodes()
        staying = {status.node.node_id for status in targets}
        self._moved = {key: node_id for key, node_id in self._moved.items() if node_id in staying}
        ours = [block for block in blocks if block.produced_here and not block.durable_remotely and not block.evicting]
        safe = self._safe(ours)
        free = {NodeId(status.node.node_id): _free_bytes(status) for status in targets}
        moves = plan_moves(ours, safe, {one: size for one, size in free.items() if size}, self._window_bytes, BATCH_BLOCKS)
        self.remaining = len(moves.unplaced) + sum(len(batch.blocks) for batch in moves.batches)
        why = "no other active node has free space on a volume" if moves.unplaced else ""
        if self.remaining:
            specs = self._calls.specs()
            nodes = {status.node.node_id: status.node for status in targets}
            for batch in moves.batches:
                why = self._send(batch, nodes[batch.node_id], specs.get(batch.namespace_id)) or why
                if self._pause(self._pause_s(batch)):
                    return MigrationRound(self.remaining, "")
        return MigrationRound(self.remaining, why)

    def _pause_s(self, batch: Batch[Block]) -> float:
        return sum(block.nbytes for block in batch.blocks) / self._bytes_per_s if self._bytes_per_s else 0.0

    # ---- metadata server ----
    def _target_nodes(self) -> list[metadata_pb2.NodeStatus]:
        """Return the other active nodes."""
        return [
            status
            for status in self._calls.nodes()
            if status.alive and status.state == common_pb2.NODE_STATE_ACTIVE and status.node.node_id != self._calls.node.node_id
        ]

    def _safe(self, blocks: Sequence[Block]) -> set[BlockKey]:
        """Return the keys that a durable volume of another active node holds."""
        safe = set(self._moved)
        unknown: dict[NamespaceId, list[BlockKey]] = defaultdict(list)
        for block in blocks:
            if block.key not in safe:
                unknown[block.namespace_id].append(block.key)
        safe.update(key for key, _ in self._calls.holders(unknown, self._counts))
        return safe

    def _counts(self, volume: metadata_pb2.LocatedVolume) -> bool:
        active = volume.alive and volume.state == common_pb2.NODE_STATE_ACTIVE
        return active and volume.node_id != self._calls.node.node_id

    # ---- batches ----
    def _send(self, batch: Batch[Block], target: common_pb2.NodeInfo, spec: common_pb2.CacheSpec | None) -> str:
        """Let a node pull a batch. Returns why it did not pull all blocks; empty: it did."""
        try:
            answer = self._calls.pull(target.control_address, batch.blocks, spec)
        except KVStoreError as error:
            self._counters.add(node_metrics.DRAIN_MOVES_FAILED)
            _limited.warning("blocks not moved to node %s: %s", target.node_id, error)
            return f"{target.node_id}: {error}"
        moved = [
            block
            for block, outcome in zip(batch.blocks, answer.outcomes, strict=False)
            if outcome in (StoreOutcome.STORED, StoreOutcome.EXISTS)
        ]
        for block in moved:
            self._moved[block.key] = batch.node_id
        self.remaining -= len(moved)
        self.moved_blocks += len(moved)
        self.moved_bytes += (nbytes := sum(block.nbytes for block in moved))
        self._counters.add(node_metrics.DRAIN_MOVED_BLOCKS, len(moved))
        self._counters.add(node_metrics.DRAIN_MOVED_BYTES, nbytes)
        return "" if len(moved) == len(batch.blocks) else f"{target.node_id}: {answer.why or 'did not pull all blocks'}"


def _free_bytes(status: metadata_pb2.NodeStatus) -> int:
    """Return the free bytes of the node's emptiest volume, which takes one batch."""
    used = {usage.volume_id: usage for usage in status.usages}
    free = [
        free_space(volume.capacity_bytes, used[volume.volume_id].used_bytes)
        for volume in status.node.volumes
        if volume.tier == common_pb2.TIER_NVME and volume.volume_id in used and not used[volume.volume_id].read_only
    ]
    return max(free, default=0)
