"""Calls of nodes by the admin server: changes do not delay queries, and one deadline covers a whole command."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvproto.v1 import admin_pb2 as pb
from kvproto.v1.common_pb2 import NodeInfo
from kvproto.v1.metadata_pb2 import NodeStatus
from kvstore.control_api.commands import Commands
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
