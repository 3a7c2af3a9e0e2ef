"""vLLM with two tensor-parallel ranks: each stores and loads its own pages, and pages that both hold are stored once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_ranks_bed import TOKENS

from kvstore.embedded.cluster import LocalCluster, NodeSpec
from nursery import run_engine

RANKS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function of the bed is run in the ranks
}
"""Environment of the engine with two ranks. Engines in the tests' own process must not see it."""
NEEDS_AMX = pytest.mark.skipif(
    "amx_tile" not in Path("/proc/cpuinfo").read_text(),
    reason="without AMX vLLM computes prompts of latents only as a whole: nothing is loaded",
)
"""``test_vllm_same_tokens`` proves that an engine without AMX loads nothing; a second rank adds nothing to that."""
TIMEOUT_S = 280.0
"""Ranks spin while they wait for each other: on busy cores that takes its time."""


def answers(cluster: LocalCluster, folder: Path, family: str) -> dict[str, Any]:
    """Run an engine with two ranks in separate processes and return its output."""
    script = Path(__file__).with_name("vllm_ranks_bed.py")
    argv = [sys.executable, str(script), cluster.metadata_address, cluster.node("n").local_socket, str(folder), family]
    done = run_engine(argv, TIMEOUT_S, env=os.environ | RANKS, new_session=True)  # kills the ranks, too
    assert done.returncode == 0, done.stderr[-4000:]
    output_of_engine: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return output_of_engine


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek", marks=NEEDS_AMX)])
def test_two_ranks_load_what_they_stored(family: str, tmp_path: Path) -> None:
    with LocalCluster([NodeSpec("n", dram_bytes=64 << 20)], tmp_path / "store") as cluster:
        engine = answers(cluster, tmp_path, family)
    assert engine["processors"][0] == [1, len(os.sched_getaffinity(0))], "the store's copies run on another core than the rank"
    block = engine["block_tokens"]  # vLLM's choice: without AMX, pages of latents have 16 tokens
    hit_blocks, stored_blocks = TOKENS // block, (TOKENS + 12 - 1) // block
    assert engine["cached"] == [0, hit_blocks * block, hit_blocks * block], json.dumps(engine["counts"])
    assert engine["answers"][1] == engine["answers"][2]
    assert family == "deepseek" or engine["answers"][0] == engine["answers"][1]
    assert engine["counts"]["load_blocks"] == 2 * 2 * hit_blocks, "both ranks load"
    page = engine["counts"]["store_bytes"] / stored_blocks
    assert page == {"llama": 4 * 2 * block * 2 * 32 * 4, "deepseek": 3 * block * 576 * 2}[family], "each byte once"
