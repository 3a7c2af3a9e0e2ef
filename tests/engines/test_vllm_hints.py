"""Hints of vLLM requests reach the node: the blocks of a session are protected, and dropped at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

pytest.importorskip("vllm")

from tier_bed import engine as tier_engine
from vllm_bed import BLOCK, SingleEngine, VllmDriver, VllmEngine, text, tiny

from kvproto.v1 import node_pb2, node_pb2_grpc
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.testing.connector.driver import StoreAddress
from support.wait import wait_until

PROMPT = text(2, 700)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster([NodeSpec("n", dram_bytes=64 << 20)], tmp_path / "store") as made:
        yield made


@pytest.fixture
def engine(folder: Path, cluster: LocalCluster) -> Iterator[VllmEngine]:
    single = SingleEngine()
    yield single.open(
        VllmDriver(tiny("llama", folder)), StoreAddress(cluster.metadata_address, cluster.node("n").local_socket), {}
    )
    single.close()


def hinted(cluster: LocalCluster, result: str) -> int:
    with grpc.insecure_channel(cluster.node("n").address) as channel:
        stats = node_pb2_grpc.NodeStub(channel).GetNodeStats(node_pb2.GetNodeStatsRequest(), timeout=5)
    return int(stats.counters.get(f"node_hinted_{result}_blocks_total", 0))


def test_hints_of_requests_reach_the_node(engine: VllmEngine, cluster: LocalCluster) -> None:
    from vllm import SamplingParams
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    core = engine.llm.llm_engine

    def serve(name: str, fields: dict[str, object] | None, envelope: KvHintsEnvelope | None = None) -> None:
        extra = {} if fields is None else {"kv_transfer_params": {"kvstore_hint": fields}}
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args=extra)
        core.add_request(name, {"prompt_token_ids": PROMPT}, params, kv_hints=envelope)
        while core.has_unfinished_requests():
            core.step()
        wait_until(lambda: engine.counters().get("hints", 0) + engine.counters().get("hints_refused", 0) >= 1, step=core.step)

    serve("turn", {"session": "chat", "keep_for_s": 60, "next_turn_s": 5})
    wait_until(lambda: hinted(cluster, "protected") == len(PROMPT) // BLOCK, step=core.step)
    actions = [KvHintAction("1", "kvstore.session", "1", {"session": "chat", "end": True})]
    serve("last", None, KvHintsEnvelope("1", "m", actions))
    wait_until(lambda: hinted(cluster, "dropped") == len(PROMPT) // BLOCK, step=core.step)
    serve("wrong", {"session": "chat", "kind": "fork"})
    assert engine.counters()["hints_refused"] == 1


def test_tier_hints_of_requests_reach_the_node(folder: Path, cluster: LocalCluster) -> None:
    from vllm import SamplingParams
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    store = StoreAddress(cluster.metadata_address, cluster.node("n").local_socket)
    with tier_engine(tiny("llama", folder), store) as served:
        core = served.llm.llm_engine

        def serve(name: str, fields: dict[str, object] | None, envelope: KvHintsEnvelope | None = None) -> None:
            extra = {} if fields is None else {"kv_transfer_params": {"kvstore_hint": fields}}
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args=extra)
            core.add_request(name, {"prompt_token_ids": PROMPT}, params, kv_hints=envelope)
            while core.has_unfinished_requests():
                core.step()
            served.settle()

        serve("turn", {"session": "chat", "keep_for_s": 60})
        wait_until(lambda: hinted(cluster, "protected") >= len(PROMPT) // BLOCK, step=core.step)
        actions = [KvHintAction("1", "kvstore.session", "1", {"session": "chat", "end": True})]
        serve("last", None, KvHintsEnvelope("1", "m", actions))
        wait_until(lambda: hinted(cluster, "dropped") >= len(PROMPT) // BLOCK, step=core.step)
        serve("wrong", {"session": "chat", "kind": "fork"})
        wait_until(lambda: served.tier.counters.totals()["hints_refused"] == 1, step=core.step)
        assert served.tier.counters.totals()["hints"] == 2
        served.tier.close_stores()
        serve("nowhere", {"session": "chat"})
        wait_until(lambda: served.tier.counters.totals()["hints_refused"] == 2, step=core.step)
        assert served.tier.counters.totals()["hints"] == 2, "no node has heard of it"
