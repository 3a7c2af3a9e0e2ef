"""The client's memory of the nodes of a chain, to which hints about its session go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient import InvalidArgument
from kvclient.nodes.lookup_memory import MAX_CHAINS, ChainNodes
from kvclient.options import ClientOptions
from kvclient.results import NodeRef, Run
from kvstore.core.types import BlockKey, NodeId, Tier, VolumeId


def keys(count: int, branch: int = 0) -> list[BlockKey]:
    return [BlockKey(branch.to_bytes(8, "big") + number.to_bytes(8, "big")) for number in range(count)]


def run(node: str, count: int, tier: Tier = Tier.NVME) -> Run:
    return Run(0, count, NodeRef(NodeId(node), f"{node}:1", f"{node}:2"), tier, VolumeId(f"{node}/v"))


def names(memory: ChainNodes, session: str, chain: list[BlockKey]) -> list[str]:
    return [str(node.node_id) for node in memory.of(session, chain)]


def test_nodes_with_durable_blocks_come_first() -> None:
    memory = ChainNodes()
    runs = [run("dram", 9, Tier.DRAM), run("own", 9), run("few", 2), run("most", 9), run("pool", 9, Tier.HBM)]
    memory.record(keys(9), 9, runs, "own", 2)
    assert names(memory, "s", keys(20)) == ["most", "few"], "a longer chain of the same session"
    assert names(memory, "s", []) == ["most", "few"], "by the name of the session"
    assert names(memory, "other", keys(20, branch=1)) == []
    memory.forget("s")
    assert names(memory, "s", []) == []


def test_chain_found_on_no_other_node_has_none() -> None:
    memory = ChainNodes()
    memory.record(keys(9), 9, [run("far", 9)], "own", 4)
    memory.record(keys(9), 9, [run("own", 9)], "own", 4)
    memory.record(keys(3), 0, [run("far", 9)], "own", 4)
    assert names(memory, "s", keys(9)) == []


def test_memory_of_zero_nodes_records_nothing() -> None:
    memory = ChainNodes()
    memory.record(keys(9), 9, [run("far", 9)], "own", 0)
    assert names(memory, "s", keys(9)) == []


@pytest.mark.parametrize("wrong", [-1, 17, True, 1.0])
def test_option_hint_nodes_out_of_range_raises(wrong: object) -> None:
    with pytest.raises(InvalidArgument):
        ClientOptions(hint_nodes=wrong)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_longest_known_beginning_decides(found: list[int]) -> None:
    memory = ChainNodes()
    for hit in found:
        memory.record(keys(6), hit, [run(f"n{hit}", hit)], "", 1)
    assert names(memory, "s", keys(8)) == [f"n{max(found)}"]


def test_memory_drops_the_oldest_chain() -> None:
    memory = ChainNodes()
    for branch in range(MAX_CHAINS + 1):
        memory.record(keys(1, branch), 1, [run("far", 1)], "", 1)
    assert names(memory, "s", keys(1, 0)) == []
    assert names(memory, "s", keys(1, 1)) == ["far"]
