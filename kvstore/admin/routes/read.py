"""Routes of queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Response

from kvproto.v1 import admin_pb2 as pb
from kvstore.admin.etags import tag_of
from kvstore.admin.pagination import USUAL, Cursor, Limit, Page, after, cursor_for, page_of
from kvstore.admin.tokenizer import PromptTokenizer
from kvstore.config.admin import AdminConfig
from kvstore.control_api import serializers
from kvstore.control_api.history import HistoryQueries
from kvstore.control_api.queries import Queries, describe, id_from_hex
from kvstore.control_api.schemas import configuration
from kvstore.control_api.schemas import store as models
from kvstore.control_api.schemas.cluster import Cluster
from kvstore.control_api.schemas.health import ClusterEventEntry, ClusterHealth
from kvstore.control_api.schemas.history import HistoryOfLastHour
from kvstore.control_api.schemas.shards import Shards
from kvstore.control_api.schemas.store import HEX_ID
from kvstore.control_api.store_rpc import StoreRpc
from kvstore.control_api.volume_checks import RunningChecks, VolumeCheck
from kvstore.core.errors import InvalidArgument
from kvstore.observe.history import INTERVAL_S, POINTS

NodeId = Annotated[str, Path(min_length=1, max_length=512, description="node id", examples=["host-1"])]
VolumeName = Annotated[
    str, Path(min_length=1, max_length=512, description="volume name: its id without the node id", examples=["nvme0"])
]
NamespaceId = Annotated[str, Path(pattern=HEX_ID, description="namespace id", examples=["8c2f0d6e1b7a4c93a5d1e0f97b346c21"])]
Key = Annotated[str, Path(pattern=HEX_ID, description="block key", examples=["03b1f2c4d5968778695a4b3c2d1e0f10"])]
Responses = dict[int | str, dict[str, Any]]
MISSING: Final[Responses] = {404: {"description": "not found"}}
NODE: Final[Responses] = {**MISSING, 501: {"description": "the node is an engine pool of device memory"}}
TAGGED: Final[Responses] = {
    200: {
        "description": "current state",
        "headers": {"ETag": {"description": "for If-Match", "required": True, "schema": {"type": "string"}}},
    }
}
MOST_LOADS: Final = 50
_ID_DIGITS: Final = 19
MOST_DECISIONS: Final = 256


def _id_after(which: str, cursor: str | None) -> int:
    """Number of the entry after which the page begins; 0: first page.

    Raises:
        InvalidArgument: the cursor is invalid for this list.
    """
    behind = after(which, cursor)
    if behind is None:
        return 0
    if not (behind.isascii() and behind.isdecimal() and len(behind) <= _ID_DIGITS):
        raise InvalidArgument("invalid cursor for this list; start without a cursor", field="cursor")
    return int(behind)


class Routes(APIRouter):
    """Routes of several resources."""

    def add(
        self,
        method: str,
        path: str,
        handler: Callable[..., Any],
        tag: str,
        summary: str,
        responses: Responses | None = None,
        *,
        status_code: int | None = None,
    ) -> None:
        """Add a route of one method and one tag."""
        self.add_api_route(
            path, handler, methods=[method], tags=[tag], summary=summary, responses=responses, status_code=status_code
        )


class Reads:
    """Handlers of queries."""

    def __init__(self, rpc: StoreRpc, config: AdminConfig) -> None:
        self._rpc = rpc
        self._queries = Queries(rpc)
        self._history = HistoryQueries(rpc)
        self._checks = RunningChecks(rpc)
        self._config = config
        self._tokenizer = PromptTokenizer(config.tokenizer)

    def routes(self) -> APIRouter:
        """The routes of these handlers."""
        router = Routes(prefix="/v1")
        add = router.add
        add("GET", "/cluster", self.cluster, "cluster", "Summary of the store")
        add("GET", "/health", self.health, "cluster", "Findings with codes and actions")
        add("GET", "/index", self.index, "cluster", "The prefix index", TAGGED)
        add("GET", "/index/shards", self.shards, "cluster", "Servers that hold the index, and metadata servers")
        add("GET", "/config", self.config, "cluster", "Effective configuration")
        add("GET", "/cluster-events", self.cluster_events, "cluster", "Events of the last 24 hours")
        add("GET", "/history", self.history, "cluster", "Figures of the last hour", MISSING)
        add("GET", "/nodes", self.nodes, "nodes", "Nodes")
        add("GET", "/nodes/{node_id}", self.node, "nodes", "A node", MISSING)
        add("GET", "/nodes/{node_id}/config", self.node_config, "nodes", "Effective configuration of a node", NODE)
        add("GET", "/overview", self.overview, "nodes", "Nodes with activity, volumes and slow loads")
        add("GET", "/activity", self.activity, "nodes", "Totals of traffic, loads and errors by node")
        add("GET", "/volumes", self.volumes, "volumes", "Volumes")
        add("GET", "/volumes/{node_id}/{name}", self.volume, "volumes", "A volume", MISSING)
        add("GET", "/volumes/{node_id}/{name}/check", self.volume_check, "volumes", "Progress or result of a volume check", NODE)
        add(
            "GET",
            "/namespaces",
            self.namespaces,
            "namespaces",
            "Namespaces",
            {404: {"description": "the cursor's namespace is not known any more"}},
        )
        add("GET", "/namespaces/{namespace_id}", self.namespace, "namespaces", "A namespace", MISSING)
        add("GET", "/namespaces/{namespace_id}/usage", self.usage, "namespaces", "Usage of a namespace", MISSING)
        add("GET", "/blocks/{key}", self.block, "blocks", "A block and its replicas")
        add(
            "POST",
            "/blocks/lookup",
            self.look_up,
            "blocks",
            "Explain which blocks of a chain hit, and why the others miss",
            {**MISSING, 501: {"description": "no tokenizer is configured or installed"}},
        )
        add("GET", "/tokenizer", self.tokenizer, "blocks", "Tokenizer of the prefix explorer")
        add("GET", "/plans", self.plans, "planning", "Planned loads in progress")
        add("GET", "/decisions", self.decisions, "planning", "Last load decisions")
        add("GET", "/queues", self.queues, "planning", "Read queues of the nodes")
        add("GET", "/loads/slow", self.slow_loads, "planning", "Slowest loads of the last minute")
        return router

    # ---- cluster ----
    async def health(self) -> ClusterHealth:
        """Findings, each with a code, the facts, their meaning and an action. Scripts may rely on the codes."""
        return await self._queries.health()

    async def cluster(self) -> Cluster:
        """Health, versions and counts. Health is derived from the nodes' heartbeats."""
        return await self._queries.cluster(self._config.metadata)

    async def index(self, response: Response) -> models.Index:
        """Epoch and size. The ETag is required by `POST /v1/index/rebuild`."""
        server = await self._rpc.server()
        epoch = server.index_epoch.hex()
        response.headers["etag"] = tag_of(epoch)
        return models.Index(epoch=epoch, blocks=server.blocks, bytes=server.index_bytes)

    async def shards(self) -> Shards:
        """Servers of the Valkey Cluster with roles, memory and settings, as a metadata server observed them some seconds ago.

        With an index that is a file of the metadata server's host, the list of servers is empty.
        """
        return await self._queries.shards()

    async def config(self) -> configuration.Configuration:
        """Every setting of the metadata server and of this server, with its source."""
        server = await self._rpc.server()
        mine = [
            pb.SettingInForce(key=one.key, value=one.value, source=one.source, detail=one.detail, description=one.description)
            for one in self._config.settings
        ]
        return configuration.Configuration(
            processes=[serializers.settings("metadata", server.settings), serializers.settings("admin", mine)]
        )

    async def cluster_events(
        self,
        since: Annotated[float, Query(ge=0, le=86_400, description="only the last so many seconds; 0: 24 hours")] = 0,
        cursor: Cursor = None,
        limit: Limit = USUAL,
    ) -> Page[ClusterEventEntry]:
        """Nodes, findings and operators' orders, oldest first. They survive a restart of the metadata server."""
        events, more = await self._queries.cluster_events(_id_after("cluster-events", cursor), since, limit)
        return Page(items=events, next_cursor=cursor_for("cluster-events", events[-1].id) if more and events else None)

    async def history(
        self,
        since: Annotated[float, Query(ge=0, le=1e11, description="only intervals that ended after this Unix time")] = 0,
        step: Annotated[
            int, Query(ge=INTERVAL_S, le=INTERVAL_S * POINTS, multiple_of=INTERVAL_S, description="seconds per interval")
        ] = INTERVAL_S,
        node: Annotated[str | None, Query(max_length=512, description="only this node", examples=["host-1"])] = None,
    ) -> HistoryOfLastHour:
        """Hit ratio, latencies, throughput, fill, evictions and faults per interval, added up over all nodes that answer.

        Each process records its own figures in memory; they are lost if it restarts.
        """
        return await self._history.last_hour(since, step, node)

    # ---- nodes and volumes ----
    async def nodes(self, limit: Limit = USUAL, cursor: Cursor = None) -> Page[models.Node]:
        """All known nodes by id, with their links as the planner sees them."""
        after("nodes", cursor)  # reject a bad cursor before any call
        shown, following = page_of("nodes", await self._queries.nodes(), lambda node: node.node_id, cursor, limit)
        return Page[models.Node](items=shown, next_cursor=following)

    async def node(self, node_id: NodeId) -> models.NodeDetail:
        """A node as the metadata server knows it, and the state that it reports."""
        return await self._queries.node(node_id)

    async def activity(self, limit: Limit = USUAL, cursor: Cursor = None) -> models.Activities:
        """Totals of links, data plane, loads and errors from each node, by node id."""
        after("activity", cursor)
        known = list((await self._rpc.nodes()).values())
        shown, following = page_of("activity", known, lambda status: status.node.node_id, cursor, limit)
        found = await self._queries.activities(shown)
        return models.Activities(items=found.items, unreached=found.unreached, next_cursor=following)

    async def overview(
        self,
        limit: Limit = USUAL,
        cursor: Cursor = None,
        loads: Annotated[int, Query(ge=1, le=MOST_LOADS, description="number of slow loads")] = 10,
    ) -> models.Overview:
        """Nodes by id with their activity, volumes and slowest loads. Each node is queried once."""
        after("overview", cursor)
        known = list((await self._rpc.nodes()).values())
        shown, following = page_of("overview", known, lambda status: status.node.node_id, cursor, limit)
        found = await self._queries.overview(shown, loads)
        return found.model_copy(update={"known_nodes": len(known), "next_cursor": following})

    async def node_config(self, node_id: NodeId) -> configuration.Settings:
        """Every setting of a node, with its source."""
        found = await self._rpc.ask_node(await self._rpc.node(node_id), describe)
        return serializers.settings(f"node {node_id}", found.settings)

    async def volumes(
        self,
        limit: Limit = USUAL,
        cursor: Cursor = None,
        node: Annotated[str | None, Query(max_length=512, description="only volumes of this node", examples=["host-1"])] = None,
    ) -> Page[models.Volume]:
        """All volumes by id. Values are current, or from the last heartbeat if the node does not answer."""
        after("volumes", cursor)
        known = await self._queries.known_volumes(node)
        shown, following = page_of("volumes", known, lambda pair: pair[1].volume_id, cursor, limit)
        return Page[models.Volume](items=await self._queries.volumes(shown), next_cursor=following)

    async def volume(self, node_id: NodeId, name: VolumeName) -> models.Volume:
        """A volume. Values are current, or from the last heartbeat if the node does not answer."""
        return await self._queries.volume(node_id, name)

    async def volume_check(self, node_id: NodeId, name: VolumeName) -> VolumeCheck:
        """The state of the check. It is kept in the node's memory and lost if the node restarts."""
        return await self._checks.status(node_id, name)

    # ---- namespaces ----
    async def namespaces(self, limit: Limit = USUAL, cursor: Cursor = None) -> Page[models.Namespace]:
        """All registered namespaces in order of registration, with specs and lookup counts."""
        behind = after("namespaces", cursor)
        found = await self._rpc.namespaces(id_from_hex(behind) if behind is not None else b"", limit)
        following = cursor_for("namespaces", found.namespaces[-1].namespace_id.hex()) if found.more else None
        return Page[models.Namespace](items=[serializers.namespace(one) for one in found.namespaces], next_cursor=following)

    async def namespace(self, namespace_id: NamespaceId) -> models.Namespace:
        """Spec and lookup counts."""
        return serializers.namespace(await self._rpc.namespace(id_from_hex(namespace_id)))

    async def usage(self, namespace_id: NamespaceId) -> models.Usage:
        """Blocks and bytes by tier and volume. Every node scans its block table, so do not poll this."""
        return await self._queries.usage(id_from_hex(namespace_id))

    # ---- blocks ----
    async def block(self, key: Key) -> models.Block:
        """Index record of a block. The index is a hint; nodes are not asked."""
        return await self._queries.block(key)

    async def look_up(self, chain: models.LookupQuery) -> models.LookupAnswer:
        """The result of a lookup of this chain, with the reason of each miss. It is not counted as a lookup."""
        if chain.text is not None:
            if chain.keys is not None or chain.tokens is not None:
                raise InvalidArgument("give only one of keys, tokens and text", field="text")
            tokens = await self._tokenizer.encode(chain.text)
            chain = models.LookupQuery(namespace_id=chain.namespace_id, tokens=tokens)
        return await self._queries.look_up(chain)

    async def tokenizer(self) -> models.Tokenizer:
        """Whether this server has a tokenizer, so that a lookup can be asked for with the text of a prompt."""
        return models.Tokenizer(configured=self._tokenizer.configured)

    # ---- planning and loads ----
    async def plans(self, limit: Limit = USUAL, cursor: Cursor = None) -> Page[models.LivePlan]:
        """Plans by id."""
        found = await self._rpc.planning(live=limit, after_plan=_id_after("plans", cursor))
        following = cursor_for("plans", str(found.live[-1].plan_id)) if found.more else None
        return Page[models.LivePlan](items=[serializers.live_plan(plan) for plan in found.live], next_cursor=following)

    async def decisions(
        self,
        limit: Annotated[int, Query(ge=1, le=MOST_DECISIONS, description="number of decisions")] = 50,
    ) -> models.Decisions:
        """Decisions with policy and inputs, newest first."""
        return await self._queries.decisions(limit)

    async def queues(self, limit: Limit = USUAL, cursor: Cursor = None) -> Page[models.ReadQueue]:
        """Read queues of all nodes that the planner knows, by node id."""
        after("queues", cursor)
        found: Sequence[pb.ReadQueue] = (await self._rpc.planning()).queues
        shown, following = page_of("queues", found, lambda queue: queue.node_id, cursor, limit)
        return Page[models.ReadQueue](items=[serializers.read_queue(queue) for queue in shown], next_cursor=following)

    async def slow_loads(
        self, limit: Annotated[int, Query(ge=1, le=MOST_LOADS, description="number of loads")] = 20
    ) -> models.SlowLoads:
        """Slow loads with the cause of their duration, from the nodes that served them."""
        return await self._queries.slow_loads(limit)
