"""Moves what lies on no other volume off a node that drains: asks where each block lies, and others to take what must go.

The others pull, over the data plane, one batch at a time in all: that bounds what is in flight, and a pause after each batch
bounds the bandwidth. Nothing is remembered that must be right: each round asks the index anew, so a round that was cut off (a
restart of anybody) is gone on with. What a node has said to be durable there counts until that node leaves, for the index is
told a moment later.
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
from kvstore.node.control.migration_plan import Batch, free_room, plan_moves
from kvstore.node.state.change_log import runs_of
from kvstore.node.state.model import Block
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.client import RetryPolicy, call, connect
from kvstore.rpc.codec import run_to_proto, spec_to_proto

log = logging.getLogger(__name__)
_limited = LimitedLog(log)

LOCATE_KEYS = 4_096
BATCH_BLOCKS = 1_024
RPC_TIMEOUT_S = 5.0
PULL_TIMEOUT_S = 60.0
_RETRY = RetryPolicy(attempts=3)


@dataclass(frozen=True, slots=True)
class Round:
    """What a round left."""

    left: int
    """Blocks that lie on no other volume that stays."""
    why: str
    """Why, in a few words."""


class Mover:
    """Of one node. Driven by one thread.

    Args:
        node: this node, as others reach it.
        metadata: address of the metadata server.
        counters: events.
        clock: time.
        tls: as for every channel of the node.
        token: likewise.
        window_bytes: the most in flight.
        bytes_per_s: the most over time; 0: no bound.
        pause: waits so many seconds; True: stop what you are doing.
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
        self._channel = connect(metadata, tls=tls, token=token)
        self._stub = metadata_pb2_grpc.MetadataStub(self._channel)
        self._taken: dict[BlockKey, NodeId] = {}
        self.left = 0
        self.moved_blocks = 0
        self.moved_bytes = 0

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def forget(self) -> None:
        """A new order: what was counted belongs to the one before."""
        self._taken.clear()
        self.left = self.moved_blocks = self.moved_bytes = 0

    def is_safe(self, key: BlockKey) -> bool:
        """Whether another node has said that it is durable there, in this round or the one before."""
        return key in self._taken

    def round(self, blocks: Sequence[Block]) -> Round:
        """Moves what must go, as far as it can. Ends early where ``pause`` says so.

        Raises:
            KVStoreError: the metadata server does not answer.
        """
        takers = self._takers()
        stays = {status.node.node_id for status in takers}
        self._taken = {key: node_id for key, node_id in self._taken.items() if node_id in stays}
        ours = [block for block in blocks if block.produced_here and not block.durable_remotely and not block.evicting]
        safe = self._safe(ours)
        room = {NodeId(status.node.node_id): _room(status) for status in takers}
        moves = plan_moves(ours, safe, {one: size for one, size in room.items() if size}, self._window_bytes, BATCH_BLOCKS)
        self.left = len(moves.left) + sum(len(batch.blocks) for batch in moves.batches)
        why = "no other active node has free room on a volume" if moves.left else ""
        if self.left:
            specs = self._specs()
            nodes = {status.node.node_id: status.node for status in takers}
            for batch in moves.batches:
                why = self._send(batch, nodes[batch.node_id], specs.get(batch.namespace_id)) or why
                if self._pause(self._rest_s(batch)):
                    return Round(self.left, "")
        return Round(self.left, why)

    def _rest_s(self, batch: Batch[Block]) -> float:
        return sum(block.nbytes for block in batch.blocks) / self._bytes_per_s if self._bytes_per_s else 0.0

    # ---- asking ----
    def _takers(self) -> list[metadata_pb2.NodeStatus]:
        """Other nodes that stay."""
        statuses = call(self._stub.ListNodes, metadata_pb2.ListNodesRequest(), RPC_TIMEOUT_S, _RETRY).nodes
        return [
            status
            for status in statuses
            if status.alive and status.state == common_pb2.NODE_STATE_ACTIVE and status.node.node_id != self._node.node_id
        ]

    def _safe(self, blocks: Sequence[Block]) -> set[BlockKey]:
        """Keys that lie on a durable volume of another node that stays."""
        safe = set(self._taken)
        asked: dict[NamespaceId, list[BlockKey]] = defaultdict(list)
        for block in blocks:
            if block.key not in safe:
                asked[block.namespace_id].append(block.key)
        for namespace_id, keys in asked.items():
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

    # ---- moving ----
    def _send(self, batch: Batch[Block], taker: common_pb2.NodeInfo, spec: common_pb2.CacheSpec | None) -> str:
        """Has a node take a batch. Why it did not take all of it; empty: it did."""
        known = batch.blocks[0].namespace.spec
        try:
            if spec is None and known is None:
                raise NotFound(
                    "nobody knows the spec of the namespace, so no ticket is to be had", namespace=batch.namespace_id.hex()
                )
            request = node_pb2.PullBlocksRequest(
                operation_id=secrets.token_bytes(16),
                spec=spec if known is None else spec_to_proto(known),
                runs=[run_to_proto(run) for run in runs_of(batch.blocks)],
                node_id=self._node.node_id,
                control_address=self._node.control_address,
                data_address=self._node.data_address,
            )
            with connect(taker.control_address, tls=self._tls, token=self._token) as channel:
                answer = call(node_pb2_grpc.NodeStub(channel).PullBlocks, request, PULL_TIMEOUT_S, _RETRY)
        except KVStoreError as error:
            self._counters.add("drain_moves_failed_total")
            _limited.warning("node %s does not take over blocks: %s", taker.node_id, error)
            return f"{taker.node_id}: {error}"
        moved = [
            block
            for block, outcome in zip(batch.blocks, answer.outcomes, strict=False)
            if outcome in (StoreOutcome.STORED, StoreOutcome.EXISTS)
        ]
        for block in moved:
            self._taken[block.key] = batch.node_id
        self.left -= len(moved)
        self.moved_blocks += len(moved)
        self.moved_bytes += (nbytes := sum(block.nbytes for block in moved))
        self._counters.add("drain_moved_blocks_total", len(moved))
        self._counters.add("drain_moved_bytes_total", nbytes)
        return "" if len(moved) == len(batch.blocks) else f"{taker.node_id}: {answer.why or 'did not take all'}"


def _room(status: metadata_pb2.NodeStatus) -> int:
    """Bytes free on the roomiest volume of a node: what one batch goes to."""
    used = {usage.volume_id: usage for usage in status.usages}
    rooms = [
        free_room(volume.capacity_bytes, used[volume.volume_id].used_bytes)
        for volume in status.node.volumes
        if volume.tier == common_pb2.TIER_NVME and volume.volume_id in used and not used[volume.volume_id].read_only
    ]
    return max(rooms, default=0)
