"""The tier with two tensor-parallel ranks: in the canonical layout one rank loads what two stored, and the other way around."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tier_ranks_bed import TOKENS
from vllm_bed import BLOCK, tiny

from kvstore.embedded.cluster import LocalCluster, NodeSpec
from nursery import run_engine

RANKS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}
ONE_RANK = {**RANKS, "VLLM_CPU_OMP_THREADS_BIND": "0"}
TIMEOUT_S = 280.0
HIT = (TOKENS - 1) // BLOCK * BLOCK
NEEDS_TWO_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")


def answer(cluster: LocalCluster, model: Path, ranks: int, *more: str) -> dict[str, Any]:
    """Run an engine in separate processes and return its output."""
    script = Path(__file__).with_name("tier_ranks_bed.py")
    argv = [sys.executable, str(script), cluster.metadata_address, cluster.node("n").local_socket, str(model), str(ranks), *more]
    env = os.environ | (RANKS if ranks > 1 else ONE_RANK)
    done = run_engine(argv, TIMEOUT_S, env=env, new_session=True)  # kills the ranks, too
    assert done.returncode == 0, done.stderr[-4000:]
    said: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"answer')))
    return said


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(300)
@NEEDS_TWO_CORES
def test_tier_two_ranks_load_what_two_ranks_stored(tmp_path: Path) -> None:
    model = tiny("llama", tmp_path)
    with LocalCluster([NodeSpec("n", dram_bytes=64 << 20)], tmp_path / "store") as cluster:
        stored, loaded, alone = (answer(cluster, model, ranks) for ranks in (2, 2, 1))
    assert [stored["cached"], loaded["cached"], alone["cached"]] == [[0], [HIT], [0]]
    assert stored["answers"] == loaded["answers"] == alone["answers"]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(300)
@NEEDS_TWO_CORES
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tier_canonical_chunks_fit_any_number_of_ranks(family: str, model_folder: Path, tmp_path: Path) -> None:
    """A prompt that two ranks only prefilled is decoded by one rank."""
    model, named = tiny(family, model_folder), ("--canonical", "--epoch", "e1")
    with LocalCluster([NodeSpec("n", dram_bytes=64 << 20)], tmp_path / "store") as cluster:
        two = answer(cluster, model, 2, *named, "--prefill", "3")
        one = answer(cluster, model, 1, *named, "--prompts", "1", "2", "3")
        again = answer(cluster, model, 2, *named, "--prompts", "1", "2")
    assert [two["cached"], one["cached"], again["cached"]] == [[0], [HIT, 0, HIT], [HIT, HIT]]
    assert again["answers"] == one["answers"][:2]
    assert two["first_tokens"] == one["answers"][2][:1]
    assert one["answers"][:1] == two["answers"]
