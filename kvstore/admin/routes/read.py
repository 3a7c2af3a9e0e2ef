"""Queries: what the store is and does. They change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Response

from kvproto.v1 import admin_pb2 as pb
from kvstore.admin.etags import tag_of
from kvstore.admin.pagination import USUAL, Cursor, Limit, Page, after, cursor_for, page_of
from kvstore.config.admin import AdminConfig
from kvstore.control_api import serializers
from kvstore.control_api.queries import Queries, describe, id_from_hex
from kvstore.control_api.schemas import store as models
from kvstore.control_api.schemas.store import HEX_ID
from kvstore.control_api.store_rpc import StoreRpc
from kvstore.control_api.volume_checks import VolumeCheck, VolumeChecks
from kvstore.core.errors import InvalidArgument

NodeId = Annotated[str, Path(min_length=1, max_length=512, description="the node", examples=["host-1"])]
VolumeName = Annotated[
    str, Path(min_length=1, max_length=512, description="the volume's id, without its node's", examples=["nvme0"])
]
NamespaceId = Annotated[str, Path(pattern=HEX_ID, description="the namespace", examples=["8c2f0d6e1b7a4c93a5d1e0f97b346c21"])]
Key = Annotated[str, Path(pattern=HEX_ID, description="the block's key", examples=["03b1f2c4d5968778695a4b3c2d1e0f10"])]
Responses = dict[int | str, dict[str, Any]]
MISSING: Final[Responses] = {404: {"description": "it is not there"}}
NODE: Final[Responses] = {**MISSING, 501: {"description": "it is no node daemon"}}
TAGGED: Final[Responses] = {
    200: {
        "description": "as it is now",
        "headers": {"ETag": {"description": "for If-Match", "required": True, "schema": {"type": "string"}}},
    }
}
MOST_LOADS: Final = 50
MOST_DECISIONS: Final = 256


class Reads:
    """Handlers of questions."""

    def __init__(self, rpc: StoreRpc, config: AdminConfig) -> None:
        self._rpc = rpc
        self._queries = Queries(rpc)
        self._checks = VolumeChecks(rpc)
        self._config = config

    def routes(self) -> APIRouter:
        """Where they answer."""
        router = APIRouter(prefix="/v1")
        add = router.add_api_route
        add("/cluster", self.cluster, methods=["GET"], tags=["cluster"], summary="The store at a glance")
        add("/index", self.index, methods=["GET"], tags=["cluster"], summary="The prefix index", responses=TAGGED)
        add("/config", self.config, methods=["GET"], tags=["cluster"], summary="Configuration in force")
        add("/nodes", self.nodes, methods=["GET"], tags=["nodes"], summary="Nodes")
        add("/nodes/{node_id}", self.node, methods=["GET"], tags=["nodes"], summary="A node", responses=MISSING)
        add(
            "/nodes/{node_id}/config",
            self.node_config,
            methods=["GET"],
            tags=["nodes"],
            summary="A node's configuration in force",
            responses=NODE,
        )
        add("/overview", self.overview, methods=["GET"], tags=["nodes"], summary="Nodes, and all that a look at them shows")
        add(
            "/activity",
            self.activity,
            methods=["GET"],
            tags=["nodes"],
            summary="What the nodes have carried, loaded and failed at",
        )
        add("/volumes", self.volumes, methods=["GET"], tags=["volumes"], summary="Volumes")
        add("/volumes/{node_id}/{name}", self.volume, methods=["GET"], tags=["volumes"], summary="A volume", responses=MISSING)
        add(
            "/volumes/{node_id}/{name}/check",
            self.volume_check,
            methods=["GET"],
            tags=["volumes"],
            summary="How far the check of a durable volume is, or what the last one found",
            responses=NODE,
        )
        add(
            "/namespaces",
            self.namespaces,
            methods=["GET"],
            tags=["namespaces"],
            summary="Namespaces, in order of registration",
            responses={404: {"description": "the cursor's namespace is not known any more"}},
        )
        add(
            "/namespaces/{namespace_id}",
            self.namespace,
            methods=["GET"],
            tags=["namespaces"],
            summary="A namespace",
            responses=MISSING,
        )
        add(
            "/namespaces/{namespace_id}/usage",
            self.usage,
            methods=["GET"],
            tags=["namespaces"],
            summary="Where a namespace's blocks lie",
            responses=MISSING,
        )
        add("/blocks/{key}", self.block, methods=["GET"], tags=["blocks"], summary="A block: who holds it")
        add(
            "/blocks/lookup",
            self.look_up,
            methods=["POST"],
            tags=["blocks"],
            summary="A chain: which blocks hit, where they lie, and why the others miss",
            responses=MISSING,
        )
        add("/plans", self.plans, methods=["GET"], tags=["planning"], summary="Planned loads under way")
        add("/decisions", self.decisions, methods=["GET"], tags=["planning"], summary="The last load decisions, newest first")
        add("/queues", self.queues, methods=["GET"], tags=["planning"], summary="Read queues of the nodes")
        add("/loads/slow", self.slow_loads, methods=["GET"], tags=["planning"], summary="The slowest loads of the last minute")
        return router

    # ---- cluster ----
    async def cluster(self) -> models.Cluster:
        """Health, versions, counts. Health counts what the nodes' heartbeats say."""
        return await self._queries.cluster(self._config.metadata)

    async def index(self, response: Response) -> models.Index:
        """Its epoch and size. The ETag is for `POST /v1/index/rebuild`."""
        server = await self._rpc.server()
        epoch = server.index_epoch.hex()
        response.headers["etag"] = tag_of(epoch)
        return models.Index(epoch=epoch, blocks=server.blocks, bytes=server.index_bytes)

    async def config(self) -> models.Configuration:
        """Every value of the metadata server's and of this server's configuration, and where it came from."""
        server = await self._rpc.server()
        mine = [
            pb.SettingInForce(key=one.key, value=one.value, source=one.source, detail=one.detail, description=one.description)
            for one in self._config.settings
        ]
        return models.Configuration(
            processes=[serializers.settings("metadata", server.settings), serializers.settings("admin", mine)]
        )

    # ---- nodes and volumes ----
    async def nodes(self, limit: Limit = USUAL, cursor: Cursor = None) -> Page[models.Node]:
        """All that the metadata server knows, in order of their ids, with their links as the planner sees them."""
        after("nodes", cursor)  # before anybody is asked
        shown, following = page_of("nodes", await self._queries.nodes(), lambda node: node.node_id, cursor, limit)
        return Page[models.Node](items=shown, next_cursor=following)

    async def node(self, node_id: NodeId) -> models.NodeDetail:
        """A node as the metadata server knows it, and what it says of itself."""
        return await self._queries.node(node_id)

    async def activity(self, limit: Limit = USUAL, cursor: Cursor = None) -> models.Activities:
        """Totals of links, data plane, loads and faults, as the nodes say now, in order of their ids."""
        after("activity", cursor)
        known = list((await self._rpc.nodes()).values())
        shown, following = page_of("activity", known, lambda status: status.node.node_id, cursor, limit)
        found = await self._queries.activities(shown)
        return models.Activities(items=found.items, unreached=found.unreached, next_cursor=following)

    async def overview(
        self,
        limit: Limit = USUAL,
        cursor: Cursor = None,
        loads: Annotated[int, Query(ge=1, le=MOST_LOADS, description="so many of the slowest loads")] = 10,
    ) -> models.Overview:
        """Nodes in order of their ids, with their activity, volumes and slowest loads: each is asked once for all of it."""
        after("overview", cursor)
        known = list((await self._rpc.nodes()).values())
        shown, following = page_of("overview", known, lambda status: status.node.node_id, cursor, limit)
        found = await self._queries.overview(shown, loads)
        return found.model_copy(update={"known_nodes": len(known), "next_cursor": following})

    async def node_config(self, node_id: NodeId) -> models.Settings:
        """Every value of a node's configuration, and where it came from."""
        found = await self._rpc.ask_node(await self._rpc.node(node_id), describe)
        return serializers.settings(f"node {node_id}", found.settings)

    async def volumes(
        self,
        limit: Limit = USUAL,
        cursor: Cursor = None,
        node: Annotated[str | None, Query(max_length=512, description="only this node's", examples=["host-1"])] = None,
    ) -> Page[models.Volume]:
        """All volumes, in order of their ids; as their nodes say now or, where one does not answer, as it said last."""
        after("volumes", cursor)
        known = await self._queries.known_volumes(node)
        shown, following = page_of("volumes", known, lambda pair: pair[1].volume_id, cursor, limit)
        return Page[models.Volume](items=await self._queries.volumes(shown), next_cursor=following)

    async def volume(self, node_id: NodeId, name: VolumeName) -> models.Volume:
        """A volume as its node says now or, where it does not answer, as it said last."""
        return await self._queries.volume(node_id, name)

    async def volume_check(self, node_id: NodeId, name: VolumeName) -> VolumeCheck:
        """As its node says now. It is in that process's memory: a node that was started again knows of no check."""
        return await self._checks.look(node_id, name)

    # ---- namespaces ----
    async def namespaces(self, limit: Limit = USUAL, cursor: Cursor = None) -> Page[models.Namespace]:
        """All that were registered, with their specs and how lookups fared."""
        behind = after("namespaces", cursor)
        found = await self._rpc.namespaces(id_from_hex(behind) if behind is not None else b"", limit)
        following = cursor_for("namespaces", found.namespaces[-1].namespace_id.hex()) if found.more else None
        return Page[models.Namespace](items=[serializers.namespace(one) for one in found.namespaces], next_cursor=following)

    async def namespace(self, namespace_id: NamespaceId) -> models.Namespace:
        """Its spec, and how lookups in it fared."""
        return serializers.namespace(await self._rpc.namespace(id_from_hex(namespace_id)))

    async def usage(self, namespace_id: NamespaceId) -> models.Usage:
        """By tier and volume, counted by every node now: each looks at all of its blocks, so not for every second."""
        return await self._queries.usage(id_from_hex(namespace_id))

    # ---- blocks ----
    async def block(self, key: Key) -> models.Block:
        """What the index says of a block. Whoever holds it is asked only when it is read: the index is a hint."""
        return await self._queries.block(key)

    async def look_up(self, chain: models.LookUp) -> models.LookedUp:
        """What a lookup of this chain would answer now, run by run, and why the rest misses. It counts as no lookup."""
        return await self._queries.look_up(chain)

    # ---- planning and loads ----
    async def plans(self, limit: Limit = USUAL, cursor: Cursor = None) -> Page[models.LivePlan]:
        """By plan id. Of several metadata workers, one answers: each plans for itself."""
        behind = after("plans", cursor)
        if behind is not None and not (behind.isascii() and behind.isdecimal() and len(behind) < 20):
            raise InvalidArgument("this is no cursor of this list: begin without one", field="cursor")
        found = await self._rpc.planning(live=limit, after_plan=int(behind or 0))
        following = cursor_for("plans", str(found.live[-1].plan_id)) if found.more else None
        return Page[models.LivePlan](items=[serializers.live_plan(plan) for plan in found.live], next_cursor=following)

    async def decisions(
        self,
        limit: Annotated[int, Query(ge=1, le=MOST_DECISIONS, description="so many of the last ones")] = 50,
    ) -> models.Decisions:
        """Which policy decided what, on which figures. Of several metadata workers, one answers."""
        return await self._queries.decisions(limit)

    async def queues(self, limit: Limit = USUAL, cursor: Cursor = None) -> Page[models.ReadQueue]:
        """Of every node that the planner knows, in order of their ids."""
        after("queues", cursor)
        found: Sequence[pb.ReadQueue] = (await self._rpc.planning()).queues
        shown, following = page_of("queues", found, lambda queue: queue.node_id, cursor, limit)
        return Page[models.ReadQueue](items=[serializers.read_queue(queue) for queue in shown], next_cursor=following)

    async def slow_loads(
        self, limit: Annotated[int, Query(ge=1, le=MOST_LOADS, description="so many of the slowest")] = 20
    ) -> models.SlowLoads:
        """What each waited for, as the nodes that served them say."""
        return await self._queries.slow_loads(limit)
