"""Benchmarks of engines run with tiny sizes. Their figures are not checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import harness
import report

pytest.importorskip("vllm")

BENCHMARKS = harness.REPOSITORY / "benchmarks"
RUNS_ALWAYS = {"engine_lmcache"}
"""The others start several engines each."""
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("engine_*.py"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "script", [script if script in RUNS_ALWAYS else pytest.param(script, marks=pytest.mark.thorough) for script in SCRIPTS]
)
def test_engine_benchmark_tiny_run_keeps_records(script: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    path = [BENCHMARKS, harness.REPOSITORY, harness.REPOSITORY / "clients", harness.REPOSITORY / "proto"]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{script}.py", "--smoke", "--results", results, "--scratch", tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8_000:] + done.stderr[-8_000:]
    records = report.read_records(results)
    assert records
    assert all(record.mode == "smoke" and record.samples for record in records)
