"""Migration of blocks off a draining node: other nodes pull the blocks that no other volume holds.

The other nodes pull one batch at a time over the data plane. That bounds the bytes in flight, and a pause after each batch
bounds the bandwidth. The migrator keeps no state that must be correct: each round reads the index again, so an interrupted round
continues, e.g. after a restart. Blocks that a node has reported durable count as moved until that node leaves, because the index
learns of them later.
"""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc, node_pb2, node_pb2_grpc
from kvstore.core.clock import Clock
from kvstore.core.errors import KVStoreError, NotFound
from kvstore.core.types import BlockKey, NamespaceId, NodeId, StoreOutcome, pack_keys
from kvstore.node.control.migration_plan import Batch, free_space, plan_moves
from kvstore.node.state.change_log import runs_of
from kvstore.node.state.model import Block
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.client import RetryPolicy, call, connect
from kvstore.rpc.codec import run_to_proto, spec_to_proto
from kvstore.rpc.failover.connect import connect_metadata

log = logging.getLogger(__name__)
_limited = LimitedLog(log)

LOCATE_KEYS = 4_096
BATCH_BLOCKS = 1_024
RPC_TIMEOUT_S = 5.0
PULL_TIMEOUT_S = 60.0
_RETRY = RetryPolicy(attempts=3)


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
        node: this node, as other nodes reach it.
        metadata: address of the metadata server.
        counters: metrics.
        clock: time.
        tls: as for every channel of the node.
        token: of the node.
        window_bytes: maximum bytes in flight.
        bytes_per_s: maximum bandwidth; 0: no limit.
        pause: waits some seconds; True: the migration must stop.
    """

    def __init__(
        self,
        node: common_pb2.NodeInfo,
        metadata: str,
        counters: Counters,
        clock: Clock,
        *,
        tls: TlsConfig | None,
        token: TokenSource | None,
        window_bytes: int,
        bytes_per_s: int,
        pause: Callable[[float], bool],
    ) -> None:
        self._node = node
        self._tls = tls
        self._token = token
        self._counters = counters
        self._clock = clock
        self._window_bytes = window_bytes
        self._bytes_per_s = bytes_per_s
        self._pause = pause
        self._channel = connect_metadata(metadata, caller=node.node_id, tls=tls, token=token, counters=counters)
        self._stub = metadata_pb2_grpc.MetadataStub(self._channel)
        self._moved: dict[BlockKey, NodeId] = {}
        """Blocks that another node has reported durable."""
        self.remaining = 0
        self.moved_blocks = 0
        self.moved_bytes = 0

    def close(self) -> None:
        """Close the channel to the metadata server."""
        self._channel.close()

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
            KVStoreError: the metadata server does not answer.
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
            specs = self._specs()
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
        statuses = call(self._stub.ListNodes, metadata_pb2.ListNodesRequest(), RPC_TIMEOUT_S, _RETRY).nodes
        return [
            status
            for status in statuses
            if status.alive and status.state == common_pb2.NODE_STATE_ACTIVE and status.node.node_id != self._node.node_id
        ]

    def _safe(self, blocks: Sequence[Block]) -> set[BlockKey]:
        """Return the keys that a durable volume of another active node holds."""
        safe = set(self._moved)
        unknown: dict[NamespaceId, list[BlockKey]] = defaultdict(list)
        for block in blocks:
            if block.key not in safe:
                unknown[block.namespace_id].append(block.key)
        for namespace_id, keys in unknown.items():
            for at in range(0, len(keys), LOCATE_KEYS):
                part = keys[at : at + LOCATE_KEYS]
                request = metadata_pb2.LocateBlocksRequest(namespace_id=namespace_id, keys=pack_keys(part))
                answer = call(self._stub.LocateBlocks, request, RPC_TIMEOUT_S, _RETRY)
                good = [
                    one.alive
                    and one.tier == common_pb2.TIER_NVME
                    and one.state == common_pb2.NODE_STATE_ACTIVE
                    and one.node_id != self._node.node_id
                    for one in answer.volumes
                ]
                safe.update(part[replica.key] for replica in answer.replicas if good[replica.volume])
        return safe

    def _specs(self) -> dict[NamespaceId, common_pb2.CacheSpec]:
        answer = call(self._stub.ListNamespaces, metadata_pb2.ListNamespacesRequest(), RPC_TIMEOUT_S, _RETRY)
        return {NamespaceId(one.namespace_id): one.spec for one in answer.namespaces}

    # ---- batches ----
    def _send(self, batch: Batch[Block], target: common_pb2.NodeInfo, spec: common_pb2.CacheSpec | None) -> str:
        """Let a node pull a batch. Returns why it did not pull all blocks; empty: it did."""
        known = batch.blocks[0].namespace.spec
        try:
            if spec is None and known is None:
                raise NotFound(
                    "the spec of the namespace is unknown, so no ticket can be issued", namespace=batch.namespace_id.hex()
                )
            request = node_pb2.PullBlocksRequest(
                operation_id=secrets.token_bytes(16),
                spec=spec if known is None else spec_to_proto(known),
                runs=[run_to_proto(run) for run in runs_of(batch.blocks)],
                node_id=self._node.node_id,
                control_address=self._node.control_address,
                data_address=self._node.data_address,
            )
            with connect(target.control_address, tls=self._tls, token=self._token) as channel:
                answer = call(node_pb2_grpc.NodeStub(channel).PullBlocks, request, PULL_TIMEOUT_S, _RETRY)
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
