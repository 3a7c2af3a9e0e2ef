"""Commands: changes of a store, for the REST handlers and the command line. Every command is idempotent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from kvproto.v1 import admin_pb2 as pb
from kvproto.v1.common_pb2 import CacheSpec
from kvproto.v1.metadata_pb2 import NodeStatus, RegisterNamespaceRequest
from kvproto.v1.node_pb2 import HINT_KIND_END, HINT_KIND_KEEP, HintRequest
from kvstore.control_api import serializers
from kvstore.control_api.schemas import hints as hint_models
from kvstore.control_api.schemas import retention as retention_models
from kvstore.control_api.schemas import store as models
from kvstore.control_api.store_rpc import NodeRpc, StoreRpc, operation_id
from kvstore.core.errors import Conflict, InvalidArgument, NotFound
from kvstore.rpc.codec import spec_from_proto

IN_USE_S: Final = 15.0
"""How long a node waits for blocks in use of an invalidated namespace; longer than a lease."""
PASSES = 4
"""Passes over all nodes to drop a namespace. A pass that finds no block is the last."""


class Commands:
    """Commands of a store.

    Args:
        rpc: calls to the store.
    """

    def __init__(self, rpc: StoreRpc) -> None:
        self._rpc = rpc

    async def evict_volume(self, node_id: str, name: str, to_percent: int) -> models.VolumeEviction:
        """Evict the coldest blocks of a volume until at most ``to_percent`` (0 to 100) of its capacity is used.

        Raises:
            NotFound: the node or the volume does not exist.
            KVStoreError: the node failed or does not answer.
        """
        volume_id = f"{node_id}/{name}"
        status = await self._rpc.node(node_id)
        volume = next((one for one in status.node.volumes if one.volume_id == volume_id), None)
        if volume is None:
            raise NotFound("the node has no such volume", volume_id=volume_id[:64])
        down_to = volume.capacity_bytes * to_percent // 100

        async def ask(node: NodeRpc) -> pb.EvictBlocksResponse:
            asked = pb.EvictBlocksRequest(operation_id=operation_id(), volume_id=volume_id, down_to_bytes=down_to)
            return await node(node.stub.EvictBlocks, asked)

        done = await self._rpc.change_node(status, ask)
        return models.VolumeEviction(evicted_blocks=done.evicted_blocks, kept_blocks=done.kept_blocks, used_bytes=done.used_bytes)

    async def evict_namespace(self, namespace_id: bytes, tiers: Iterable[str]) -> models.NamespaceEvicted:
        """Evict the blocks of a namespace from some tiers (``"dram"``, ``"nvme"``) on every node.

        Raises:
            NotFound: the namespace is not registered.
            Conflict: the namespace is kept.
        """
        if (await self._rpc.namespace(namespace_id)).kept:
            raise Conflict("the namespace is kept; end that first (kvstore namespaces unkeep)", namespace_id=namespace_id.hex())
        wanted = set(tiers)

        def volumes(status: NodeStatus) -> list[str]:
            """The volumes to evict from; an empty name selects all volumes of the node."""
            found = [volume.volume_id for volume in status.node.volumes if serializers.tier_name(volume.tier) in wanted]
            return [""] if len(wanted) == 2 and found else found

        statuses = [status for status in (await self._rpc.nodes()).values() if volumes(status)]

        async def evict(node: NodeRpc) -> tuple[int, int]:
            left = stay = 0
            for volume_id in volumes(node.status):
                asked = pb.EvictBlocksRequest(operation_id=operation_id(), namespace_id=namespace_id, volume_id=volume_id)
                done = await node(node.stub.EvictBlocks, asked)
                left, stay = left + done.evicted_blocks, stay + done.kept_blocks
            return left, stay

        return await self._everywhere(namespace_id, statuses, evict)

    async def invalidate_namespace(self, namespace_id: bytes) -> models.NamespaceEvicted:
        """Drop every block of a namespace on every node, durable or not.

        Raises:
            NotFound: the namespace is not registered.
        """
        await self._rpc.namespace(namespace_id)
        return await self._invalidate(namespace_id)

    async def bump_weights(self, namespace_id: bytes, weights_epoch: str, *, invalidate: bool) -> models.WeightsBump:
        """Register the namespace with the same spec and new weights; with ``invalidate``, drop the old namespace's blocks.

        Raises:
            NotFound: the namespace is not registered.
            Conflict: the namespace has these weights already.
            InvalidArgument: ``weights_epoch`` is invalid.
        """
        old = await self._rpc.namespace(namespace_id)
        if old.spec.weights_epoch == weights_epoch:
            raise Conflict("the namespace has this weights epoch already", weights_epoch=weights_epoch)
        spec = CacheSpec()
        spec.CopyFrom(old.spec)
        try:
            spec.weights_epoch = weights_epoch
        except (ValueError, UnicodeError) as error:
            raise InvalidArgument("weights_epoch is not valid Unicode", field="weights_epoch") from error
        spec_from_proto(spec)  # validate before the call
        made = await self._rpc.register_namespace(RegisterNamespaceRequest(spec=spec))
        dropped = await self._invalidate(namespace_id) if invalidate else None
        return models.WeightsBump(namespace_id=made.hex(), spec=serializers.spec(spec), invalidated=dropped)

    async def hint_session(self, namespace_id: bytes, wanted: hint_models.HintSession) -> hint_models.SessionHinted:
        """Give a hint about a session to every node that protects its blocks.

        Raises:
            NotFound: the namespace is not registered, or no node knows the session.
            KVStoreError: no node knows the session, and a node failed or does not answer.
        """
        await self._rpc.namespace(namespace_id)
        next_turn_ms = 0 if wanted.next_turn_s is None else max(1, round(wanted.next_turn_s * 1000))
        hint = HintRequest(session=wanted.session, kind=HINT_KIND_END)
        if not wanted.end:
            hint.kind, hint.keep_ms = HINT_KIND_KEEP, round(wanted.keep_for_s * 1000)
            hint.next_turn_ms, hint.priority = next_turn_ms, wanted.priority

        async def ask(node: NodeRpc) -> pb.HintSessionResponse:
            return await node(node.stub.HintSession, pb.HintSessionRequest(namespace_id=namespace_id, hint=hint))

        alive = [status for status in (await self._rpc.nodes()).values() if status.alive and status.node.volumes]
        asked = await self._rpc.change_nodes(alive, ask)
        known = {node_id: answer.result for node_id, answer in asked.answers.items() if answer.known}
        if not known and asked.failed:
            raise next(iter(asked.failed.values()))
        if not known:
            raise NotFound(
                "no node protects blocks of this session; the engine gives a session's first hint, and node.hint_share = 0"
                " switches hints off",
                session=wanted.session,
            )
        return serializers.session_hinted(namespace_id.hex(), wanted.session, known, asked.failed)

    async def set_quota(
        self, tenant: str, dram_bytes: int | None, nvme_bytes: int | None, expected: retention_models.Quota | None
    ) -> tuple[retention_models.Quota, retention_models.Quota]:
        """Set the quota of a tenant in payload bytes over all nodes; None: no quota.

        Args:
            tenant: tenant name; empty: default tenant.
            dram_bytes: quota in DRAM.
            nvme_bytes: quota on NVMe volumes.
            expected: current quota that the change requires; None: any.

        Returns:
            The quota in force, and the one before.

        Raises:
            Conflict: the current value is not ``expected``.
            InvalidArgument: the tenant name is invalid.
            CapacityExceeded: too many quotas, or the metadata server's disk is full.
        """
        wanted = pb.TenantQuota(dram_bytes=dram_bytes, nvme_bytes=nvme_bytes)
        seen = None if expected is None else pb.TenantQuota(dram_bytes=expected.dram_bytes, nvme_bytes=expected.nvme_bytes)
        done = await self._rpc.set_quota(tenant, wanted, seen)
        return serializers.quota(tenant, done.quota), serializers.quota(tenant, done.before)

    async def set_rule(
        self, wanted: retention_models.Rule, expected: retention_models.Rule | None
    ) -> tuple[retention_models.Rule, retention_models.Rule]:
        """Set the retention rule of a namespace.

        Args:
            wanted: the new rule.
            expected: current rule that the change requires; None: any.

        Returns:
            The rule in force, and the one before.

        Raises:
            NotFound: the namespace is not registered.
            Conflict: the current value is not ``expected``.
            CapacityExceeded: too many rules, or the metadata server's disk is full.
        """
        seen = None if expected is None else serializers.rule_to_proto(expected)
        done = await self._rpc.set_rule(serializers.rule_to_proto(wanted), seen)
        return serializers.rule(done.rule), serializers.rule(done.before)

    async def _invalidate(self, namespace_id: bytes) -> models.NamespaceEvicted:
        async def drop(node: NodeRpc) -> tuple[int, int]:
            asked = pb.InvalidateNamespaceRequest(
                operation_id=operation_id(), namespace_id=namespace_id, wait_ms=int(IN_USE_S * 1000)
            )
            done = await node(node.stub.InvalidateNamespace, asked)
            return done.dropped_blocks, done.kept_blocks

        # write-back from one node may reach another node after that one was asked, so repeat until no block is found
        nodes = list((await self._rpc.nodes()).values())
        dropped: Counter[str] = Counter()
        now_s = asyncio.get_running_loop().time
        ends_s = now_s() + self._rpc.change_timeout_s
        for _ in range(PASSES):
            done = await self._everywhere(namespace_id, nodes, drop, ends_s - now_s())
            dropped.update({node.node_id: node.evicted_blocks for node in done.nodes})
            if not done.evicted_blocks or now_s() >= ends_s:  # a silent node takes all the time: the answer names it
                break
        each = [node.model_copy(update={"evicted_blocks": dropped[node.node_id]}) for node in done.nodes]
        return done.model_copy(
            update={
                "evicted_blocks": dropped.total(),
                "complete": done.complete and not done.evicted_blocks,
                "nodes": each,
            }
        )

    async def _everywhere(
        self,
        namespace_id: bytes,
        statuses: list[NodeStatus],
        change: Callable[[NodeRpc], Awaitable[tuple[int, int]]],
        timeout_s: float | None = None,
    ) -> models.NamespaceEvicted:
        """Apply a change on several nodes. Each returns (evicted blocks, kept blocks)."""
        asked = await self._rpc.change_nodes(statuses, change, timeout_s)
        return serializers.namespace_evicted(namespace_id.hex(), asked.answers, asked.failed)
