"""Calls of nodes by the admin server: changes do not delay queries, and one deadline covers a whole command."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from kvproto.v1 import admin_pb2 as pb
from kvproto.v1 import node_pb2
from kvproto.v1.admin_pb2_grpc import NodeAdminServicer, add_NodeAdminServicer_to_server
from kvproto.v1.common_pb2 import TIER_DRAM, NodeInfo, VolumeInfo
from kvproto.v1.metadata_pb2 import NodeStatus
from kvproto.v1.node_pb2_grpc import NodeServicer, add_NodeServicer_to_server
from kvstore.control_api.commands import Commands
from kvstore.control_api.queries import Queries
from kvstore.control_api.store_rpc import NODES_AT_ONCE, NodeRpc, StoreEndpoint, StoreRpc
from kvstore.core.errors import DeadlineExceeded
from kvstore.observe.counters import Counters


def status(node_id: str) -> NodeStatus:
    return NodeStatus(node=NodeInfo(node_id=node_id, control_address="127.0.0.1:1"), alive=True)


async def hang(node: NodeRpc) -> None:
    await asyncio.Event().wait()


async def answered(node: NodeRpc) -> str:
    return node.status.node.node_id


async def test_changes_on_silent_nodes_do_not_delay_queries() -> None:
    rpc = StoreRpc(StoreEndpoint(), Counters())
    changes = [asyncio.create_task(rpc.change_node(status(f"silent-{number}"), hang)) for number in range(NODES_AT_ONCE)]
    await asyncio.sleep(0)
    assert await rpc.ask_node(status("a"), answered) == "a"
    with pytest.raises(DeadlineExceeded, match="not asked before the timeout"):
        await rpc.ask_node(status("a"), answered, 0.05, changes=True)
    for change in changes:
        change.cancel()
    await asyncio.wait(changes)
    assert await rpc.change_node(status("a"), answered) == "a"
    await rpc.close()


class SilentNodeRpc(StoreRpc):
    """Calls to a store with one node that answers and one that does not."""

    def __init__(self) -> None:
        super().__init__(StoreEndpoint(change_timeout_s=0.2), Counters())
        self.asked: list[str] = []

    async def nodes(self) -> dict[str, NodeStatus]:
        return {node_id: status(node_id) for node_id in ("well", "silent")}

    async def namespace(self, namespace_id: bytes) -> pb.NamespaceDescription:
        return pb.NamespaceDescription()

    async def ask_node(
        self,
        status: NodeStatus,
        ask: Callable[[NodeRpc], Awaitable[Any]],
        timeout_s: float | None = None,
        *,
        changes: bool = False,
    ) -> Any:
        self.asked.append(status.node.node_id)
        if status.node.node_id == "well":
            return 5, 0
        await asyncio.sleep(timeout_s or 60.0)
        raise DeadlineExceeded("the node does not answer")


async def test_invalidate_silent_node_takes_one_timeout() -> None:
    rpc = SilentNodeRpc()
    done = await Commands(rpc).invalidate_namespace(bytes(16))
    assert rpc.asked == ["well", "silent"]
    assert not done.complete
    assert done.evicted_blocks == 5
    assert [node.node_id for node in done.unreached] == ["silent"]
    await rpc.close()


class FixedNode(NodeAdminServicer, NodeServicer):
    """A node whose loads took ``seconds``, and whose blocks are in ``tier``."""

    def __init__(self, seconds: float, tier: Any) -> None:
        self.seconds, self.tier = seconds, tier

    async def DescribeNode(self, request: object, context: object) -> pb.DescribeNodeResponse:  # noqa: N802
        loads = pb.LoadTimes(reach="dram", total_seconds=self.seconds, counts=[1])
        return pb.DescribeNodeResponse(loads=[loads])

    async def ListSlowLoads(self, request: object, context: object) -> pb.ListSlowLoadsResponse:  # noqa: N802
        return pb.ListSlowLoadsResponse(loads=[pb.SlowLoad(request_id="r", seconds=self.seconds)])

    async def DescribeUsage(self, request: object, context: object) -> pb.DescribeUsageResponse:  # noqa: N802
        return pb.DescribeUsageResponse(usages=[pb.NamespaceUsage(volume_id="v", tier=self.tier)])

    async def GetNodeStats(self, request: object, context: object) -> node_pb2.GetNodeStatsResponse:  # noqa: N802
        return node_pb2.GetNodeStatsResponse()


class FixedNodesRpc(StoreRpc):
    """Calls to a store whose metadata server knows the given nodes."""

    def __init__(self, known: dict[str, NodeStatus]) -> None:
        super().__init__(StoreEndpoint(), Counters())
        self.known = known

    async def nodes(self) -> dict[str, NodeStatus]:
        return self.known

    async def planning(self, **_wanted: object) -> pb.DescribePlanningResponse:
        return pb.DescribePlanningResponse()

    async def namespace(self, namespace_id: bytes) -> pb.NamespaceDescription:
        return pb.NamespaceDescription()


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
async def test_invalid_answer_leaves_out_only_its_node(seconds: float) -> None:
    servers, known = [], {}
    for node_id, node in {"wrong": FixedNode(seconds, 99), "well": FixedNode(2.0, TIER_DRAM)}.items():
        server = grpc.aio.server()
        add_NodeAdminServicer_to_server(node, server)
        add_NodeServicer_to_server(node, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
        volume = VolumeInfo(volume_id=f"{node_id}/dram", tier=TIER_DRAM)
        info = NodeInfo(node_id=node_id, boot_id=bytes(16), control_address=address, volumes=[volume])
        known[node_id] = NodeStatus(alive=True, node=info)
    rpc = FixedNodesRpc(known)
    queries, statuses = Queries(rpc), list(known.values())
    try:
        overview = await queries.overview(statuses, 10)
        assert [one.node_id for one in overview.activity] == ["well"]
        assert [one.volume_id for one in overview.volumes] == ["well/dram", "wrong/dram"]
        assert [one.node_id for one in overview.slow_loads] == ["well"]
        activities = await queries.activities(statuses)
        assert [one.node_id for one in activities.items] == ["well"]
        slow = await queries.slow_loads(10)
        assert [one.node_id for one in slow.items] == ["well"]
        usage = await queries.usage(bytes(16))
        assert [one.node_id for one in usage.volumes] == ["well"]
        for answer in (overview, activities, slow, usage):
            assert [(one.node_id, one.detail) for one in answer.unreached] == [("wrong", "the node sent an invalid answer")]
    finally:
        await rpc.close()
        for server in servers:
            await server.stop(None)
