"""Queries that take several calls, for whoever asks them: the REST's handlers and the command line. Nothing here knows HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final

import kvstore
from kvproto.v1 import admin_pb2 as pb
from kvproto.v1 import node_pb2
from kvproto.v1.common_pb2 import VolumeInfo
from kvproto.v1.metadata_pb2 import NodeStatus
from kvstore.control_api import serializers
from kvstore.control_api.schemas import retention as retention_models
from kvstore.control_api.schemas import store as models
from kvstore.control_api.store_rpc import NodeRpc, StoreRpc
from kvstore.core.errors import InvalidArgument, NotFound
from kvstore.core.keys import KeyChain
from kvstore.core.limits import MAX_KEYS_PER_CALL
from kvstore.core.types import KEY_BYTES
from kvstore.rpc.codec import spec_from_proto

NAMESPACES_A_CALL: Final = 500
MOST_PROBLEMS: Final = 100


def id_from_hex(shown: str) -> bytes:
    """An id as it travels.

    Raises:
        InvalidArgument: it is none.
    """
    try:
        found = bytes.fromhex(shown)
    except ValueError:
        found = b""
    if len(found) != KEY_BYTES:
        raise InvalidArgument("an id takes 32 hexadecimal digits", got=shown[:64])
    return found


async def describe(node: NodeRpc) -> pb.DescribeNodeResponse:
    """What a node says of itself."""
    return await node(node.stub.DescribeNode, pb.DescribeNodeRequest())


class Queries:
    """What a store is and does.

    Args:
        rpc: whom to ask.
    """

    def __init__(self, rpc: StoreRpc) -> None:
        self._rpc = rpc

    async def cluster(self, address: str) -> models.Cluster:
        """Health, versions, counts. Health counts what the nodes' heartbeats say.

        Args:
            address: of the metadata server, to be shown.
        """
        server, statuses = await self._rpc.server(), await self._rpc.nodes()
        problems = serializers.problems(server.problems, list(statuses.values()), MOST_PROBLEMS)
        return models.Cluster(
            health="degraded" if problems else "ok",
            problems=problems,
            admin_version=kvstore.__version__,
            metadata_version=server.version,
            metadata_address=address,
            metadata_workers=server.workers,
            metadata_uptime_s=server.uptime_ms / 1000,
            index_epoch=server.index_epoch.hex(),
            index_blocks=server.blocks,
            index_bytes=server.index_bytes,
            namespaces=server.namespaces,
            nodes_alive=server.nodes_alive,
            nodes_silent=server.nodes_silent,
            nodes_refused=server.nodes_refused,
            live_plans=server.live_plans,
            path_policy=server.path_policy,
        )

    async def nodes(self) -> list[models.Node]:
        """All that the metadata server knows, in order of their ids, with their links as the planner sees them."""
        statuses, planning = await self._rpc.nodes(), await self._rpc.planning()
        return _with_queues([status for _, status in sorted(statuses.items())], planning)

    async def node(self, node_id: str) -> models.NodeDetail:
        """A node as the metadata server knows it, and what it says of itself.

        Raises:
            NotFound: there is none of that id.
        """
        status = await self._rpc.node(node_id)
        planning = await self._rpc.planning()
        queue = next((queue for queue in planning.queues if queue.node_id == node_id), None)
        asked = await self._rpc.ask_nodes([status], describe)
        found = asked.answers.get(node_id)
        return models.NodeDetail(
            **serializers.node_fields(status, queue),
            process=None if found is None else serializers.node_process(found),
            unreached=None if found is not None else asked.failed[node_id].message,
        )

    async def activities(self, statuses: Sequence[NodeStatus]) -> models.Activities:
        """Totals of links, data plane, loads and faults of some nodes, as they say now."""

        async def ask(node: NodeRpc) -> models.Activity:
            found, stats = await asyncio.gather(describe(node), node(node.node_stub.GetNodeStats, node_pb2.GetNodeStatsRequest()))
            return serializers.activity(node.status.node.node_id, found, stats.counters)

        asked = await self._rpc.ask_nodes(statuses, ask)
        items = [asked.answers[one.node.node_id] for one in statuses if one.node.node_id in asked.answers]
        return models.Activities(items=items, unreached=serializers.unreached(asked.failed), next_cursor=None)

    async def overview(self, statuses: Sequence[NodeStatus], most: int) -> models.Overview:
        """Some nodes with activity, volumes and their slowest loads (``most`` of them): one connection and round trip to each.

        They are taken as a whole: ``known_nodes`` counts them, and there is no next page.
        """

        async def ask(node: NodeRpc) -> tuple[pb.DescribeNodeResponse, node_pb2.GetNodeStatsResponse, pb.ListSlowLoadsResponse]:
            found, stats, loads = await asyncio.gather(
                describe(node),
                node(node.node_stub.GetNodeStats, node_pb2.GetNodeStatsRequest()),
                node(node.stub.ListSlowLoads, pb.ListSlowLoadsRequest(limit=most)),
            )
            return found, stats, loads

        planning, asked = await asyncio.gather(self._rpc.planning(), self._rpc.ask_nodes(statuses, ask))
        answers = {node_id: asked.answers[node_id] for node_id in sorted(asked.answers)}
        described = {node_id: found for node_id, (found, _, _) in answers.items()}
        volumes = [
            serializers.volume(status, volume, described.get(status.node.node_id))
            for status in statuses
            for volume in status.node.volumes
        ]
        return models.Overview(
            nodes=_with_queues(statuses, planning),
            activity=[serializers.activity(node_id, found, stats.counters) for node_id, (found, stats, _) in answers.items()],
            volumes=sorted(volumes, key=lambda volume: volume.volume_id),
            slow_loads=serializers.slow_loads({node_id: loads for node_id, (_, _, loads) in answers.items()}, most),
            unreached=serializers.unreached(asked.failed),
            known_nodes=len(statuses),
            next_cursor=None,
        )

    async def known_volumes(self, node: str | None = None) -> list[tuple[NodeStatus, VolumeInfo]]:
        """All volumes, each with its node, in order of their ids; those of one node alone where it is named."""
        statuses = await self._rpc.nodes()
        known = [
            (status, volume)
            for status in statuses.values()
            if node is None or status.node.node_id == node
            for volume in status.node.volumes
        ]
        return sorted(known, key=lambda pair: pair[1].volume_id)

    async def volumes(self, known: Sequence[tuple[NodeStatus, VolumeInfo]]) -> list[models.Volume]:
        """Some volumes, as their nodes say now or, where one does not answer, as it said last."""
        owners = {status.node.node_id: status for status, _ in known}
        asked = await self._rpc.ask_nodes(owners.values(), describe)
        return [serializers.volume(status, volume, asked.answers.get(status.node.node_id)) for status, volume in known]

    async def volume(self, node_id: str, name: str) -> models.Volume:
        """One of them.

        Raises:
            NotFound: there is no such node, or it has no such volume.
        """
        status = await self._rpc.node(node_id)
        info = next((volume for volume in status.node.volumes if volume.volume_id == f"{node_id}/{name}"), None)
        if info is None:
            raise NotFound("the node has no such volume", volume_id=f"{node_id}/{name}"[:64])
        return (await self.volumes([(status, info)]))[0]

    async def namespaces(self) -> AsyncIterator[models.Namespace]:
        """All that were registered, in that order."""
        after, more = b"", True
        while more:
            found = await self._rpc.namespaces(after, NAMESPACES_A_CALL)
            for one in found.namespaces:
                yield serializers.namespace(one)
            more = found.more and bool(found.namespaces)
            after = found.namespaces[-1].namespace_id if more else b""

    async def tenants(self) -> list[retention_models.Tenant]:
        """All that hold something or have a quota, by name, as nodes said with their last heartbeats."""
        return [serializers.tenant(one) for one in (await self._rpc.tenants()).tenants]

    async def quota(self, tenant: str) -> retention_models.Quota:
        """A tenant's quota; one without bounds where it has none."""
        (found,) = (await self._rpc.tenants(tenant)).tenants
        return serializers.quota(tenant, found.quota)

    async def rule(self, namespace_id: bytes) -> retention_models.Rule:
        """What may stay of a namespace.

        Raises:
            NotFound: nobody registered it, and it has no rule.
        """
        try:
            found = await self._rpc.namespace(namespace_id)
        except NotFound:
            rules = await self.rules()
            kept = next((rule for rule in rules if rule.namespace_id == namespace_id.hex()), None)
            if kept is None:
                raise
            return kept
        return retention_models.Rule(namespace_id=namespace_id.hex(), ttl_s=found.ttl_ms / 1000 or None, pinned=found.pinned)

    async def rules(self) -> list[retention_models.Rule]:
        """What may stay of the namespaces that something was ordered of, by id, whether they are registered or not."""
        return [serializers.rule(one) for one in await self._rpc.rules()]

    async def usage(self, namespace_id: bytes) -> models.Usage:
        """Where a namespace's blocks lie, counted by every node now: each looks at all of its blocks.

        Raises:
            NotFound: nobody registered it.
        """
        await self._rpc.namespace(namespace_id)

        async def ask(node: NodeRpc) -> pb.DescribeUsageResponse:
            return await node(node.stub.DescribeUsage, pb.DescribeUsageRequest(namespace_id=namespace_id))

        asked = await self._rpc.ask_nodes((await self._rpc.nodes()).values(), ask)
        return serializers.usage(namespace_id.hex(), asked.answers, asked.failed)

    async def block(self, key: str) -> models.Block:
        """What the index says of a block, named by 32 hexadecimal digits."""
        found = await self._rpc.blocks(b"", id_from_hex(key))
        return serializers.block(key, found.runs[0])

    async def look_up(self, chain: models.LookUp) -> models.LookedUp:
        """What a lookup of this chain would answer now, run by run, and why the rest misses. It counts as no lookup.

        Raises:
            InvalidArgument: it has keys and tokens, or neither, or too many.
            NotFound: nobody registered the namespace.
        """
        wanted = id_from_hex(chain.namespace_id)
        keys = await self._keys(wanted, chain)
        found = await self._rpc.blocks(wanted, keys)
        runs = [serializers.block_run(run, found.hit_blocks) for run in found.runs]
        missed = next((run.why for run in runs if not run.hit), None)
        return models.LookedUp(blocks=len(keys) // KEY_BYTES, hit_blocks=found.hit_blocks, first_miss=missed, runs=runs)

    async def _keys(self, namespace_id: bytes, chain: models.LookUp) -> bytes:
        """Packed keys of a chain."""
        if (chain.keys is None) == (chain.tokens is None):
            raise InvalidArgument("give keys, or the tokens that they are made of", field="keys")
        if chain.keys is not None:
            return b"".join([bytes.fromhex(key) for key in chain.keys])
        spec = spec_from_proto((await self._rpc.namespace(namespace_id)).spec)
        assert chain.tokens is not None
        if len(chain.tokens) // spec.block_tokens > MAX_KEYS_PER_CALL:
            raise InvalidArgument("too many tokens", limit=MAX_KEYS_PER_CALL * spec.block_tokens)
        return b"".join(KeyChain(spec).keys(chain.tokens))

    async def plans(self, most: int) -> list[models.LivePlan]:
        """Planned loads under way, by plan id. Of several metadata workers, one answers."""
        return [serializers.live_plan(plan) for plan in (await self._rpc.planning(live=most)).live]

    async def path_policy(self) -> models.PathPolicy:
        """What decides where a request names no policy. Of several metadata workers, one answers."""
        found = await self._rpc.planning()
        return models.PathPolicy(policy=found.path_policy, configured=found.configured_policy)

    async def decisions(self, most: int) -> models.Decisions:
        """The last load decisions, newest first; 256 at most. Of several metadata workers, one answers."""
        found = await self._rpc.planning(decisions=most)
        return models.Decisions(items=[serializers.decision(one) for one in found.decisions])

    async def slow_loads(self, most: int) -> models.SlowLoads:
        """The slowest loads of the last minute, and what each waited for, as the nodes that served them say; 50 at most."""

        async def ask(node: NodeRpc) -> pb.ListSlowLoadsResponse:
            return await node(node.stub.ListSlowLoads, pb.ListSlowLoadsRequest(limit=most))

        asked = await self._rpc.ask_nodes((await self._rpc.nodes()).values(), ask)
        return models.SlowLoads(items=serializers.slow_loads(asked.answers, most), unreached=serializers.unreached(asked.failed))


def _with_queues(statuses: Sequence[NodeStatus], planning: pb.DescribePlanningResponse) -> list[models.Node]:
    """Nodes, with their links as the planner sees them."""
    queues = {queue.node_id: queue for queue in planning.queues}
    return [serializers.node(status, queues.get(status.node.node_id)) for status in statuses]
