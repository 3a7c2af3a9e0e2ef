"""Hints of vLLM requests reach the node: the blocks of a session are protected, and dropped at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tier_bed import engine as tier_engine
from vllm_bed import BLOCK, SingleEngine, VllmDriver, VllmEngine, text, tiny

from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.testing.connector.driver import StoreAddress
from support.node_stats import node_counter
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
    return node_counter(cluster, "n", f"node_hinted_{result}_blocks_total")


def serve(core: Any, name: str, fields: dict[str, object] | None, *, ends: bool = False) -> None:
    """Serve ``PROMPT`` to its end.

    Args:
        core: vLLM's engine.
        name: of the request.
        fields: its hint in ``kv_transfer_params``; None: it has none.
        ends: whether vLLM's own ``kv_hints`` say that the session has ended.
    """
    from vllm import SamplingParams
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    extra = {} if fields is None else {"kv_transfer_params": {"kvstore_hint": fields}}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args=extra)
    actions = [KvHintAction("1", "kvstore.session", "1", {"session": "chat", "end": True})]
    hints = KvHintsEnvelope("1", "m", actions) if ends else None
    core.add_request(name, {"prompt_token_ids": PROMPT}, params, kv_hints=hints)
    while core.has_unfinished_requests():
        core.step()


def test_hints_of_requests_reach_the_node(engine: VllmEngine, cluster: LocalCluster) -> None:
    core = engine.llm.llm_engine
    serve(core, "turn", {"session": "chat", "keep_for_s": 60, "next_turn_s": 5})
    wait_until(lambda: hinted(cluster, "protected") == len(PROMPT) // BLOCK, step=core.step)
    serve(core, "last", None, ends=True)
    wait_until(lambda: hinted(cluster, "dropped") == len(PROMPT) // BLOCK, step=core.step)
    serve(core, "wrong", {"session": "chat", "kind": "fork"})
    wait_until(lambda: engine.counters().get("hints_refused", 0) == 1, step=core.step)


def test_tier_hints_of_requests_reach_the_node(folder: Path, cluster: LocalCluster) -> None:
    store = StoreAddress(cluster.metadata_address, cluster.node("n").local_socket)
    with tier_engine(tiny("llama", folder), store) as served:
        core = served.llm.llm_engine
        serve(core, "turn", {"session": "chat", "keep_for_s": 60})
        served.settle()
        wait_until(lambda: hinted(cluster, "protected") >= len(PROMPT) // BLOCK, step=core.step)
        serve(core, "last", None, ends=True)
        served.settle()
        wait_until(lambda: hinted(cluster, "dropped") >= len(PROMPT) // BLOCK, step=core.step)
        serve(core, "wrong", {"session": "chat", "kind": "fork"})
        served.settle()
        wait_until(lambda: served.tier.counters.totals()["hints_refused"] == 1, step=core.step)
        assert served.tier.counters.totals()["hints"] == 2
        served.tier.close_stores()
        serve(core, "nowhere", {"session": "chat"})
        served.settle()
        wait_until(lambda: served.tier.counters.totals()["hints_refused"] == 2, step=core.step)
        assert served.tier.counters.totals()["hints"] == 2, "no node has heard of it"
