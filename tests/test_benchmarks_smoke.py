"""Benchmarks run with tiny sizes: those that take seconds, and with ``--thorough`` all. Their figures are not checked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import hints
import report
import run_all
from kvstore.embedded import children
from kvstore.netlab.lab import available
from kvstore.workload.generator import PROFILES, AgentWorkload
from nursery import Nurseries


def write_trace(file: Path) -> None:
    """Write a generated trace in place of a recorded one, which is not part of the repository."""
    workload = AgentWorkload(PROFILES["agentic-32k"], sessions=8, max_turns=4)
    rows: list[object] = [{"meta": {"name": "generated", "block_size": workload.block_tokens}}]
    for request in workload:
        blocks = [[block, 1] for block in request.block_ids.tolist()]
        turn = {"s": request.session, "i": request.turn, "ts": request.timestamp_ms}
        rows.append({**turn, "in": request.input_tokens, "out": request.output_tokens, "h": blocks})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


THOROUGH = {
    "audit_cost", "device_copies", "device_pipeline", "dram_copy", "forwarding", "gds_read", "hbm_pool", "large_index",
    "load_choice", "lookup_growth", "netlab_engines", "netlab_traffic_class", "nixl_transport", "node_memory", "nvme",
    "observe_cost", "planner", "rest_cost", "scheduling", "server_rest", "server_scaling", "shard_loss", "sharded_index",
    "simulate_lab", "simulate_paper", "simulate_split", "small_loads", "verified_cpu",
}  # fmt: skip
"""Scripts that take long even with tiny sizes. The checks of types read them in every run."""


def marked(script: str) -> Any:
    return pytest.param(script, marks=pytest.mark.thorough) if script in THOROUGH else script


@pytest.mark.parametrize("script", [marked(script) for script in run_all.SCRIPTS])
def test_benchmark_tiny_run_keeps_records(script: str, tmp_path: Path) -> None:
    if script.startswith("netlab") and (reason := available()) is not None:
        pytest.skip(f"network lab cannot run: {reason}")
    results = tmp_path / "results"
    command = [
        sys.executable,
        str(run_all.HERE / f"{script}.py"),
        "--smoke",
        "--results",
        str(results),
        "--scratch",
        str(tmp_path),
    ]
    if script == "hints":
        write_trace(tmp_path / hints.TRACE)
        command += ["--traces", str(tmp_path)]
    said = tmp_path / "said"
    with said.open("wb") as out:
        nurseries = Nurseries.current
        start = children.start if nurseries is None else nurseries.run_script
        process = start(command, stdout=out, stderr=out)
    try:
        assert process.wait(100) == 0, said.read_text()
    finally:
        process.kill()
    records = report.read_records(results)
    assert records
    for record in records:
        assert record.mode == "smoke"
        assert record.samples
        assert record.commit
    assert report.table(records)
