"""Queries: the state of a store, for the REST handlers and the command line."""

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
from kvstore.control_api.schemas.cluster import Cluster, MetadataServerEntry
from kvstore.control_api.schemas.health import ClusterEventEntry, ClusterHealth
from kvstore.control_api.schemas.shards import Shards
from kvstore.control_api.store_rpc import NodeRpc, StoreRpc
from kvstore.core.errors import InvalidArgument, KVStoreError, NotFound
from kvstore.core.keys import KeyChain
from kvstore.core.limits import MAX_KEYS_PER_CALL
from kvstore.core.types import KEY_BYTES
from kvstore.health.findings import from_proto
from kvstore.rpc.codec import spec_from_proto

NAMESPACES_A_CALL: Final = 500


def id_from_hex(shown: str) -> bytes:
    """Parse an id of 32 hexadecimal digits.

    Raises:
        InvalidArgument: the text is not an id.
    """
    try:
        found = bytes.fromhex(shown)
    except ValueError:
        found = b""
    if len(found) != KEY_BYTES:
        raise InvalidArgument("an id must have 32 hexadecimal digits", got=shown[:64])
    return found


async def describe(node: NodeRpc) -> pb.DescribeNodeResponse:
    """State that a node reports."""
    return await node(node.stub.DescribeNode, pb.DescribeNodeRequest())


class Queries:
    """Queries of a store.

    Args:
        rpc: calls to the store.
    """

    def __init__(self, rpc: StoreRpc) -> None:
        self._rpc = rpc

    async def cluster(self, address: str) -> Cluster:
        """Health, versions and counts.

        Args:
            address: the setting that names the metadata servers, for display.
        """
        server = await self._rpc.server()
        return Cluster(
            **serializers.health(from_proto(server.findings)).model_dump(),
            admin_version=kvstore.__version__,
            metadata_version=server.version,
            metadata_address=address,
            metadata_servers=[
                MetadataServerEntry(address=one.address, state=one.condition, used=one.used)
                for one in await self._rpc.metadata_servers()
            ],
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

    async def shards(self) -> Shards:
        """Servers that hold the index, and the metadata servers that serve it."""
        return serializers.shards(await self._rpc.shards())

    async def health(self) -> ClusterHealth:
        """Health of the store and its findings, errors first."""
        return serializers.health(from_proto((await self._rpc.server()).findings))

    async def cluster_events(self, after_id: int, since_s: float, limit: int) -> tuple[list[ClusterEventEntry], bool]:
        """Events after an id, of the last ``since_s`` seconds (0: of 24 hours), oldest first, and whether there are more."""
        found = await self._rpc.cluster_events(after_id, since_s, limit)
        return [serializers.cluster_event(one) for one in found.events], found.more

    async def nodes(self) -> list[models.Node]:
        """All known nodes by id, with their links as the planner sees them."""
        statuses, planning = await self._rpc.nodes(), await self._rpc.planning()
        return _with_queues([status for _, status in sorted(statuses.items())], planning)

    async def node(self, node_id: str) -> models.NodeDetail:
        """A node as the metadata server knows it, and the state that it reports.

        Raises:
            NotFound: the node does not exist.
        """
        status = await self._rpc.node(node_id)
        planning = await self._rpc.planning()
        queue = next((queue for queue in planning.queues if queue.node_id == node_id), None)

        async def ask(node: NodeRpc) -> models.NodeProcess:
            return serializers.node_process(await describe(node))

        asked = await self._rpc.ask_nodes([status], ask)
        found = asked.answers.get(node_id)
        return models.NodeDetail(
            **serializers.node_fields(status, queue),
            process=found,
            unreached=None if found is not None else _why_unreached(asked.failed.get(node_id)),
        )

    async def activities(self, statuses: Sequence[NodeStatus]) -> models.Activities:
        """Totals of links, data plane, loads and errors of some nodes."""

        async def ask(node: NodeRpc) -> models.Activity:
            found, stats = await asyncio.gather(describe(node), node(node.node_stub.GetNodeStats, node_pb2.GetNodeStatsRequest()))
            return serializers.activity(node.status.node.node_id, found, stats.counters)

        asked = await self._rpc.ask_nodes(statuses, ask)
        items = [asked.answers[one.node.node_id] for one in statuses if one.node.node_id in asked.answers]
        return models.Activities(items=items, unreached=serializers.unreached(asked.failed), next_cursor=None)

    async def overview(self, statuses: Sequence[NodeStatus], most: int) -> models.Overview:
        """Nodes with activity, volumes and their ``most`` slowest loads. Each node is queried once.

        The result is not paged; ``known_nodes`` counts all nodes.
        """

        async def ask(node: NodeRpc) -> tuple[models.Activity, list[models.Volume], list[models.SlowLoad]]:
            found, stats, loads = await asyncio.gather(
                describe(node),
                node(node.node_stub.GetNodeStats, node_pb2.GetNodeStatsRequest()),
                node(node.stub.ListSlowLoads, pb.ListSlowLoadsRequest(limit=most)),
            )
            node_id = node.status.node.node_id
            volumes = [serializers.volume(node.status, volume, found) for volume in node.status.node.volumes]
            return serializers.activity(node_id, found, stats.counters), volumes, serializers.slow_loads(node_id, loads)

        planning, asked = await asyncio.gather(self._rpc.planning(), self._rpc.ask_nodes(statuses, ask))
        answers = [asked.answers[node_id] for node_id in sorted(asked.answers)]
        volumes = [volume for _, current, _ in answers for volume in current]
        volumes += [
            serializers.volume(status, volume, None)
            for status in statuses
            if status.node.node_id not in asked.answers
            for volume in status.node.volumes
        ]
        return models.Overview(
            nodes=_with_queues(statuses, planning),
            activity=[activity for activity, _, _ in answers],
            volumes=sorted(volumes, key=lambda volume: volume.volume_id),
            slow_loads=serializers.slowest((loads for _, _, loads in answers), most),
            unreached=serializers.unreached(asked.failed),
            known_nodes=len(statuses),
            next_cursor=None,
        )

    async def known_volumes(self, node: str | None = None) -> list[tuple[NodeStatus, VolumeInfo]]:
        """Volumes by id, each with its node; of all nodes or of one."""
        statuses = await self._rpc.nodes()
        known = [
            (status, volume)
            for status in statuses.values()
            if node is None or status.node.node_id == node
            for volume in status.node.volumes
        ]
        return sorted(known, key=lambda pair: pair[1].volume_id)

    async def volumes(self, known: Sequence[tuple[NodeStatus, VolumeInfo]]) -> list[models.Volume]:
        """Volumes with current values, or those of the last heartbeat if the node does not answer."""
        owners = {status.node.node_id: status for status, _ in known}

        async def ask(node: NodeRpc) -> dict[str, models.Volume]:
            found = await describe(node)
            return {info.volume_id: serializers.volume(node.status, info, found) for info in node.status.node.volumes}

        asked = await self._rpc.ask_nodes(owners.values(), ask)
        current = {volume_id: one for answer in asked.answers.values() for volume_id, one in answer.items()}
        return [current.get(info.volume_id) or serializers.volume(status, info, None) for status, info in known]

    async def volume(self, node_id: str, name: str) -> models.Volume:
        """A volume.

        Raises:
            NotFound: the node or the volume does not exist.
        """
        status = await self._rpc.node(node_id)
        info = next((volume for volume in status.node.volumes if volume.volume_id == f"{node_id}/{name}"), None)
        if info is None:
            raise NotFound("the node has no such volume", volume_id=f"{node_id}/{name}"[:64])
        return (await self.volumes([(status, info)]))[0]

    async def namespaces(self) -> AsyncIterator[models.Namespace]:
        """All registered namespaces in order of registration."""
        after, more = b"", True
        while more:
            found = await self._rpc.namespaces(after, NAMESPACES_A_CALL)
            for one in found.namespaces:
                yield serializers.namespace(one)
            more = found.more and bool(found.namespaces)
            after = found.namespaces[-1].namespace_id if more else b""

    async def tenants(self) -> list[retention_models.Tenant]:
        """Tenants with usage or quota by name, from the last heartbeats."""
        return [serializers.tenant(one) for one in (await self._rpc.tenants()).tenants]

    async def quota(self, tenant: str) -> retention_models.Quota:
        """The quota of a tenant; without limits if none was set."""
        (found,) = (await self._rpc.tenants(tenant)).tenants
        return serializers.quota(tenant, found.quota)

    async def rule(self, namespace_id: bytes) -> retention_models.Rule:
        """Retention rule of a namespace.

        Raises:
            NotFound: the namespace is neither registered nor under a rule.
        """
        try:
            found = await self._rpc.namespace(namespace_id)
        except NotFound:
            rules = await self.rules()
            kept = next((rule for rule in rules if rule.namespace_id == namespace_id.hex()), None)
            if kept is None:
                raise
            return kept
        return retention_models.Rule(
            namespace_id=namespace_id.hex(),
            ttl_s=found.ttl_ms / 1000 or None,
            kept=found.kept,
            copies=found.copies or 1,
        )

    async def rules(self) -> list[retention_models.Rule]:
        """All retention rules by namespace id, also of namespaces that are not registered."""
        return [serializers.rule(one) for one in await self._rpc.rules()]

    async def usage(self, namespace_id: bytes) -> models.Usage:
        """Usage of a namespace. Every node scans its block table.

        Raises:
            NotFound: the namespace is not registered.
        """
        await self._rpc.namespace(namespace_id)

        async def ask(node: NodeRpc) -> list[models.UsageEntry]:
            found = await node(node.stub.DescribeUsage, pb.DescribeUsageRequest(namespace_id=namespace_id))
            return serializers.usage_entries(node.status.node.node_id, found)

        asked = await self._rpc.ask_nodes((await self._rpc.nodes()).values(), ask)
        return serializers.usage(namespace_id.hex(), asked.answers, asked.failed)

    async def block(self, key: str) -> models.Block:
        """Index record of a block, by its key of 32 hexadecimal digits."""
        found = await self._rpc.blocks(b"", id_from_hex(key))
        return serializers.block(key, found.runs[0])

    async def look_up(self, chain: models.LookupQuery) -> models.LookupAnswer:
        """The result of a lookup of this chain, with the reason of each miss. It is not counted as a lookup.

        Raises:
            InvalidArgument: the request has both keys and tokens, neither, or too many.
            NotFound: the namespace is not registered.
        """
        wanted = id_from_hex(chain.namespace_id)
        keys = await self._keys(wanted, chain)
        found = await self._rpc.blocks(wanted, keys)
        runs = [serializers.block_run(run, found.hit_blocks) for run in found.runs]
        missed = next((run.why for run in runs if not run.hit), None)
        tokens = None if chain.tokens is None else len(chain.tokens)
        return models.LookupAnswer(
            blocks=len(keys) // KEY_BYTES, hit_blocks=found.hit_blocks, first_miss=missed, runs=runs, tokens=tokens
        )

    async def _keys(self, namespace_id: bytes, chain: models.LookupQuery) -> bytes:
        """Packed keys of a chain."""
        if (chain.keys is None) == (chain.tokens is None):
            raise InvalidArgument("give either keys or tokens", field="keys")
        if chain.keys is not None:
            return b"".join([bytes.fromhex(key) for key in chain.keys])
        spec = spec_from_proto((await self._rpc.namespace(namespace_id)).spec)
        assert chain.tokens is not None
        if len(chain.tokens) // spec.block_tokens > MAX_KEYS_PER_CALL:
            raise InvalidArgument("too many tokens", limit=MAX_KEYS_PER_CALL * spec.block_tokens)
        return b"".join(KeyChain(spec).keys(chain.tokens))

    async def plans(self, most: int) -> list[models.LivePlan]:
        """Planned loads in progress, by plan id."""
        return [serializers.live_plan(plan) for plan in (await self._rpc.planning(live=most)).live]

    async def path_policy(self) -> models.PathPolicy:
        """The policy of loads whose request names none."""
        found = await self._rpc.planning()
        return models.PathPolicy(policy=found.path_policy, configured=found.configured_policy)

    async def decisions(self, most: int) -> models.Decisions:
        """The last load decisions, newest first, at most 256."""
        found = await self._rpc.planning(decisions=most)
        return models.Decisions(items=[serializers.decision(one) for one in found.decisions])

    async def slow_loads(self, most: int) -> models.SlowLoads:
        """The slowest loads of the last minute with the cause of their duration, at most 50."""

        async def ask(node: NodeRpc) -> list[models.SlowLoad]:
            found = await node(node.stub.ListSlowLoads, pb.ListSlowLoadsRequest(limit=most))
            return serializers.slow_loads(node.status.node.node_id, found)

        asked = await self._rpc.ask_nodes((await self._rpc.nodes()).values(), ask)
        answers = [asked.answers[node_id] for node_id in sorted(asked.answers)]
        return models.SlowLoads(items=serializers.slowest(answers, most), unreached=serializers.unreached(asked.failed))


def _why_unreached(error: KVStoreError | None) -> str:
    """Return why a node did not answer; it was not called if it is the cache of an engine."""
    return "the cache of an engine answers no calls" if error is None else error.message


def _with_queues(statuses: Sequence[NodeStatus], planning: pb.DescribePlanningResponse) -> list[models.Node]:
    """Nodes with their links as the planner sees them."""
    queues = {queue.node_id: queue for queue in planning.queues}
    return [serializers.node(status, queues.get(status.node.node_id)) for status in statuses]
