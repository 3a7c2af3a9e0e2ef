"""Changes that take several calls, for whoever asks for them: the REST's handlers and the command line.

Nothing here knows HTTP. Doing one twice does no harm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from kvproto.v1 import admin_pb2 as pb
from kvproto.v1.common_pb2 import CacheSpec
from kvproto.v1.metadata_pb2 import NamespaceRule, NodeStatus, RegisterNamespaceRequest
from kvstore.control_api import serializers
from kvstore.control_api.schemas import retention as retention_models
from kvstore.control_api.schemas import store as models
from kvstore.control_api.store_rpc import NodeRpc, StoreRpc, operation_id
from kvstore.core.errors import Conflict, InvalidArgument, NotFound
from kvstore.rpc.codec import spec_from_proto

IN_USE_S: Final = 15.0
"""How long a node waits for blocks in use, of a namespace that is invalidated: longer than leases last."""
PASSES = 4
"""Times that all nodes are asked to drop a namespace; one in which nothing is found ends it."""


class Commands:
    """Changes of a store.

    Args:
        rpc: whom to ask.
    """

    def __init__(self, rpc: StoreRpc) -> None:
        self._rpc = rpc

    async def evict_volume(self, node_id: str, name: str, to_percent: int) -> models.Evicted:
        """Evicts a volume's coldest blocks until no more than ``to_percent`` (0 to 100) of its capacity is used.

        Raises:
            NotFound: there is no such node, or it has no such volume.
            KVStoreError: as the node answers, or that it does not.
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
        return models.Evicted(evicted_blocks=done.evicted_blocks, kept_blocks=done.kept_blocks, used_bytes=done.used_bytes)

    async def evict_namespace(self, namespace_id: bytes, tiers: Iterable[str]) -> models.NamespaceEvicted:
        """Evicts a namespace's blocks from the tiers named (``"dram"``, ``"nvme"``), at every node.

        Raises:
            NotFound: nobody registered it.
            Conflict: it is pinned.
        """
        if (await self._rpc.namespace(namespace_id)).pinned:
            raise Conflict("the namespace is pinned: unpin it first", namespace_id=namespace_id.hex())
        wanted = set(tiers)

        def volumes(status: NodeStatus) -> list[str]:
            """Which volumes, if any; an empty name: all of the node's."""
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
        """Drops every block of a namespace, durable or not, at every node.

        Raises:
            NotFound: nobody registered it.
        """
        await self._rpc.namespace(namespace_id)
        return await self._invalidate(namespace_id)

    async def bump_weights(self, namespace_id: bytes, weights_epoch: str, *, invalidate: bool) -> models.Bumped:
        """Registers the namespace of the same spec with other weights; drops what the old one holds where ``invalidate``.

        Raises:
            NotFound: nobody registered it.
            Conflict: it has these weights already.
            InvalidArgument: ``weights_epoch`` cannot name any.
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
        spec_from_proto(spec)  # refused here rather than there
        made = await self._rpc.register_namespace(RegisterNamespaceRequest(spec=spec))
        dropped = await self._invalidate(namespace_id) if invalidate else None
        return models.Bumped(namespace_id=made.hex(), spec=serializers.spec(spec), invalidated=dropped)

    async def set_quota(
        self, tenant: str, dram_bytes: int | None, nvme_bytes: int | None, expected: retention_models.Quota | None
    ) -> tuple[retention_models.Quota, retention_models.Quota]:
        """Sets a tenant's quota, in bytes of payload of all nodes together; None: no bound.

        Args:
            tenant: whose; empty: the default tenant's.
            dram_bytes: in DRAM.
            nvme_bytes: on volumes.
            expected: only where it has this quota now; None: whatever it has.

        Returns:
            The quota in force, and the one before.

        Raises:
            Conflict: it has another one than expected.
            InvalidArgument: no tenant can be called so.
            CapacityExceeded: too many have a quota, or there is no room on the metadata server's disk.
        """
        wanted = pb.TenantQuota(dram_bytes=dram_bytes, nvme_bytes=nvme_bytes)
        seen = None if expected is None else pb.TenantQuota(dram_bytes=expected.dram_bytes, nvme_bytes=expected.nvme_bytes)
        done = await self._rpc.set_quota(tenant, wanted, seen)
        return serializers.quota(tenant, done.quota), serializers.quota(tenant, done.before)

    async def set_rule(
        self, namespace_id: bytes, ttl_s: float | None, *, pinned: bool, expected: retention_models.Rule | None
    ) -> tuple[retention_models.Rule, retention_models.Rule]:
        """Sets what may stay of a namespace.

        Args:
            namespace_id: whose.
            ttl_s: time to live of blocks that nobody uses; None: none.
            pinned: whether its blocks are kept from eviction.
            expected: only where this is the rule now; None: whatever it is.

        Returns:
            The rule in force, and the one before.

        Raises:
            NotFound: nobody registered it.
            Conflict: it has another one than expected.
            CapacityExceeded: too many have one, or there is no room on the metadata server's disk.
        """
        wanted = NamespaceRule(namespace_id=namespace_id, ttl_ms=round((ttl_s or 0) * 1000), pinned=pinned)
        seen = None
        if expected is not None:
            ttl_ms = round((expected.ttl_s or 0) * 1000)
            seen = NamespaceRule(namespace_id=namespace_id, ttl_ms=ttl_ms, pinned=expected.pinned)
        done = await self._rpc.set_rule(wanted, seen)
        return serializers.rule(done.rule), serializers.rule(done.before)

    async def _invalidate(self, namespace_id: bytes) -> models.NamespaceEvicted:
        async def drop(node: NodeRpc) -> tuple[int, int]:
            asked = pb.InvalidateNamespaceRequest(
                operation_id=operation_id(), namespace_id=namespace_id, wait_ms=int(IN_USE_S * 1000)
            )
            done = await node(node.stub.InvalidateNamespace, asked)
            return done.dropped_blocks, done.kept_blocks

        # what a node was writing behind to another one may land there after that one was asked: until nothing is found any more
        nodes = list((await self._rpc.nodes()).values())
        dropped: Counter[str] = Counter()
        for _ in range(PASSES):
            done = await self._everywhere(namespace_id, nodes, drop)
            dropped.update({node.node_id: node.evicted_blocks for node in done.nodes})
            if not done.evicted_blocks:
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
    ) -> models.NamespaceEvicted:
        """A change at many nodes: (blocks that left, blocks that stay) of each."""
        asked = await self._rpc.change_nodes(statuses, change)
        return serializers.namespace_evicted(namespace_id.hex(), asked.answers, asked.failed)
