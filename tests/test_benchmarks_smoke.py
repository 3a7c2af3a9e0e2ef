"""Every benchmark runs with tiny sizes. Its figures are not checked.

They run in this process: its imports are those of all scripts, and the tests' nursery starts their daemons.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import report
import run_all
from kvstore.netlab.lab import available


@pytest.mark.parametrize("script", run_all.SCRIPTS)
def test_benchmark_tiny_run_keeps_records(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if script.startswith("netlab") and (reason := available()) is not None:
        pytest.skip(f"network lab cannot run: {reason}")
    results, program = tmp_path / "results", str(run_all.HERE / f"{script}.py")
    monkeypatch.setattr("sys.argv", [program, "--smoke", "--results", str(results), "--scratch", str(tmp_path)])
    runpy.run_path(program, run_name="__main__")
    records = report.read_records(results)
    assert records
    for record in records:
        assert record.mode == "smoke"
        assert record.samples
        assert record.commit
    assert report.table(records)
