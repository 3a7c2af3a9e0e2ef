"""A request that waits because the engine is full has its prefix read ahead: it is loaded from DRAM, with the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_bed import BLOCK, SingleEngine, VllmDriver, VllmEngine, text, tiny

from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.testing.connector.driver import StoreAddress
from support.node_stats import empty_dram, node_counter
from support.wait import wait_until

MIB = 1 << 20
WAITING = text(2, 700)
ANSWER = 64
"""Tokens of the answer to a request that is computed while the other one waits."""

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


def answer(engine: VllmEngine, cluster: LocalCluster, other: int) -> tuple[int, ...]:
    """The answer to ``WAITING``, whose prefix is on NVMe only, while an ``other`` request, not stored, fills the engine."""
    engine.forget()
    empty_dram(cluster, "n")
    engine.one_by_one([text(9, 8)])  # the first step after a reset checks the weights
    return engine.tokens([text(other, 96), WAITING], ANSWER)[1]


def test_waiting_request_is_loaded_from_dram(opened: Open, cluster: LocalCluster) -> None:
    engine = opened()
    (computed,) = engine.tokens([WAITING], ANSWER)
    assert answer(engine, cluster, 3) == computed
    found = engine.counters()
    assert found["reads_ahead"] == found["loads"] == 1
    assert found["load_tokens"] == len(WAITING) // BLOCK * BLOCK
    assert found["load_bytes"] == found["load_dram_bytes"] == counter(cluster, "bytes")
    assert counter(cluster, "unused_bytes") == 0


def test_waiting_request_that_is_aborted_holds_nothing(opened: Open, cluster: LocalCluster) -> None:
    from vllm import SamplingParams

    engine = opened()
    engine.tokens([WAITING], 1)
    engine.forget()
    empty_dram(cluster, "n")
    engine.one_by_one([text(9, 8)])
    core = engine.llm.llm_engine
    for name, prompt in (("long", text(4, 96)), ("waiting", WAITING)):
        params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
        core.add_request(name, {"prompt_token_ids": prompt}, params)
    while not (read := counter(cluster, "bytes")):
        core.step()
        assert core.has_unfinished_requests(), "nothing was read ahead while the request waited"
    core.abort_request(["waiting"])
    while core.has_unfinished_requests():
        core.step()
    wait_until(lambda: counter(cluster, "unused_bytes") >= read)


def test_read_ahead_switched_off(opened: Open, cluster: LocalCluster) -> None:
    engine = opened(read_ahead_requests=0)
    (computed,) = engine.tokens([WAITING], ANSWER)
    assert answer(engine, cluster, 5) == computed
    assert "reads_ahead" not in engine.counters()
    assert counter(cluster, "bytes") == 0
