"""Every benchmark runs with tiny sizes. Its figures are not checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import report
import run_all
from kvstore.netlab.lab import available


@pytest.mark.parametrize("script", run_all.SCRIPTS)
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
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    records = report.read_records(results)
    assert records
    for record in records:
        assert record.mode == "smoke"
        assert record.samples
        assert record.commit
    assert report.table(records)
