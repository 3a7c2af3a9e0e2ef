"""The tier with two tensor-parallel ranks: another engine with two ranks loads what they stored, one with one rank does not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tier_ranks_bed import TOKENS
from vllm_bed import BLOCK

from kvstore.embedded.cluster import LocalCluster, NodeSpec

RANKS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}
ONE_RANK = {**RANKS, "VLLM_CPU_OMP_THREADS_BIND": "0"}
TIMEOUT_S = 280.0


def answer(cluster: LocalCluster, folder: Path, ranks: int) -> dict[str, Any]:
    """Run an engine in processes of its own and return what it says."""
    script = Path(__file__).with_name("tier_ranks_bed.py")
    argv = [sys.executable, str(script), cluster.metadata_address, cluster.node("n").local_socket, str(folder), str(ranks)]
    env = os.environ | (RANKS if ranks > 1 else ONE_RANK)
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the ranks, too
        process.wait()
    assert process.returncode == 0, errors[-4000:]
    said: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith('{"answer')))
    return said


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_tier_two_ranks_load_what_two_ranks_stored(tmp_path: Path) -> None:
    with LocalCluster([NodeSpec("n", dram_bytes=64 << 20)], tmp_path / "store") as cluster:
        stored, loaded, alone = (answer(cluster, tmp_path, ranks) for ranks in (2, 2, 1))
    assert [stored["cached"], loaded["cached"], alone["cached"]] == [0, (TOKENS - 1) // BLOCK * BLOCK, 0]
    assert stored["answer"] == loaded["answer"] == alone["answer"]
