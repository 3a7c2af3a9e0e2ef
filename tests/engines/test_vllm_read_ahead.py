"""A request that waits because the engine is full has its prefix read ahead: it is loaded from DRAM, with the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_bed import BLOCK, MOST_TOKENS, SingleEngine, VllmDriver, VllmEngine, text, tiny

from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.testing.connector.driver import StoreAddress
from support.node_stats import empty_dram, flush, node_counter, node_stats
from support.wait import wait_until

MIB = 1 << 20
WAITING = text(2, 700)
ANSWER = 64
"""Tokens of the answer to the waiting request."""

Open = Callable[..., VllmEngine]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster([NodeSpec("n", dram_bytes=64 * MIB, nvme_bytes=128 * MIB)], tmp_path / "store") as made:
        yield made


@pytest.fixture
def opened(folder: Path, cluster: LocalCluster) -> Iterator[Open]:
    single, address = SingleEngine(), StoreAddress(cluster.metadata_address, cluster.node("n").local_socket)

    def open_engine(**options: Any) -> VllmEngine:
        return single.open(VllmDriver(tiny("llama", folder)), address, options, max_num_seqs=1)

    yield open_engine
    single.close()


def counter(cluster: LocalCluster, name: str) -> int:
    return node_counter(cluster, "n", f"node_read_ahead_{name}_total")


def full_engine(engine: VllmEngine, cluster: LocalCluster, other: int) -> Any:
    """Fill the engine with another request, and queue ``WAITING``, whose prefix is on NVMe only. Returns vLLM's engine."""
    from vllm import SamplingParams

    engine.forget()
    assert flush(cluster, "n")
    empty_dram(cluster, "n")
    engine.one_by_one([text(9, 8)])  # the first step after a reset checks the weights
    core = engine.llm.llm_engine
    for name, prompt, most in (("other", text(other, 96), MOST_TOKENS - 96), ("waiting", WAITING, ANSWER)):
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        core.add_request(name, {"prompt_token_ids": prompt}, params)
    return core


def step_until(core: Any, condition: Callable[[], bool]) -> None:
    while not condition():
        core.step()
        assert core.has_unfinished_requests(), "the request no longer waits"


def answer(core: Any) -> tuple[int, ...]:
    """The answer to ``WAITING`` after the other request has made room for it."""
    core.abort_request(["other"])
    tokens: tuple[int, ...] = ()
    while core.has_unfinished_requests():
        for one in core.step():
            if one.request_id == "waiting":
                tokens = tuple(one.outputs[0].token_ids)
    return tokens


def test_waiting_request_is_loaded_from_dram(opened: Open, cluster: LocalCluster) -> None:
    engine = opened()
    (computed,) = engine.tokens([WAITING], ANSWER)
    core = full_engine(engine, cluster, 3)
    step_until(core, lambda: node_stats(cluster, "n").tiers[0].blocks >= len(WAITING) // BLOCK)
    assert answer(core) == computed
    found = engine.counters()
    assert found["reads_ahead"] == found["loads"] == 1
    assert found["load_tokens"] == len(WAITING) // BLOCK * BLOCK
    assert found["load_bytes"] == found["load_dram_bytes"] == counter(cluster, "bytes")
    assert counter(cluster, "unused_bytes") == 0


def test_waiting_request_that_is_aborted_holds_nothing(opened: Open, cluster: LocalCluster) -> None:
    engine = opened()
    engine.tokens([WAITING], 1)
    core = full_engine(engine, cluster, 4)
    step_until(core, lambda: counter(cluster, "bytes") > 0)
    read = counter(cluster, "bytes")
    core.abort_request(["other", "waiting"])
    while engine.connector.has_pending_push_work():  # vLLM's loop steps by it too
        core.step()
    wait_until(lambda: counter(cluster, "unused_bytes") >= read)


def test_read_ahead_switched_off(opened: Open, cluster: LocalCluster) -> None:
    engine = opened(read_ahead_requests=0)
    (computed,) = engine.tokens([WAITING], ANSWER)
    assert answer(full_engine(engine, cluster, 5)) == computed
    assert "reads_ahead" not in engine.counters()
    assert counter(cluster, "bytes") == 0
