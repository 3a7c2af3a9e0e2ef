"""``kvstore simulate`` on small runs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.cli.app import root
from kvstore.core.errors import Unsupported
from kvstore.simulate.reports import plot
from nursery import cli

SMALL = ["simulate", "--model", "ds-27b", "--profile", "agentic-32k", "--agents", "24", "--every", "24"]


def test_simulate_compares_policies_as_json() -> None:
    shown = CliRunner().invoke(root, [*SMALL, "--sweep-pd", "1:1,1:2", "-o", "json"])
    assert shown.exit_code == 0, shown.output
    written = json.loads(shown.stdout)
    assert written["bound"].startswith("1P1D: P/D = 1.00 lies within")
    assert [result["variant"] for result in written["results"]] == ["prefill_only", "shorter_queue", "split", "oracle"]
    assert set(written["sweep"]) == {"1P1D", "1P2D"}
    assert all(result["finished"] == result["requests"] > 0 for result in written["results"])


def test_simulate_slow_storage_is_named_as_bound() -> None:
    def told(*more: str) -> str:
        shown = CliRunner().invoke(
            root, [*SMALL, "--prefill", "1", "--decode", "1", "--snic", "6.25", "--policies", "split", *more]
        )
        assert shown.exit_code == 0, shown.output
        return " ".join(shown.output.split())

    assert "all storage links can be full, loads up to 2.00 times" in told("--storage", "12.5")
    slower = told("--storage", "3")
    assert "can be full" not in slower
    assert "1P1D: the storage servers send at most 3 GB/s, less than the 12.5 GB/s of all storage links" in slower
    assert "loads can be at most 1.00 times as fast" in slower
    assert "loads can be at most 1.60 times as fast" in told("--storage", "10")
    both = told("--storage", "10", "--cnic", "1")
    assert "1.60 times" in both
    assert "CNIC write would need" in both or "CNIC read would need" in both  # the compute links limit it equally


def test_simulate_json_to_stdout_prints_only_json() -> None:
    shown = subprocess.run(
        [*cli(), *SMALL, "--policies", "ladder", "-o", "json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    ladder = [result["variant"] for result in json.loads(shown.stdout)["results"]]
    assert ladder == ["basic", "+layerwise", "+both paths", "+scheduler", "+split"]


def test_simulate_recorded_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": i, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2]} for i in range(20)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = CliRunner().invoke(root, ["simulate", "--model", "llama-3-8b", "--trace", str(trace), "--policies", "split"])
    assert shown.exit_code == 0, shown.output
    assert "20 sessions, 20 requests" in shown.output


def test_simulate_online_shows_capacity() -> None:
    shown = CliRunner().invoke(root, [*SMALL, "--online", "--policies", "prefill_only", "--snic", "2"])
    assert shown.exit_code == 0, shown.output
    assert "agents/s within mean TTFT" in shown.stdout


def test_simulate_lists_models() -> None:
    shown = CliRunner().invoke(root, ["simulate", "--list-models"])
    assert shown.exit_code == 0
    assert "ds-660b" in shown.output
    listed = CliRunner().invoke(root, ["simulate", "--list-models", "-o", "json"])
    assert "ds-660b" in {model["model"] for model in json.loads(listed.stdout)["items"]}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--policies", "fastest"], 2, "none of"),
        (["--sweep-pd", "1-1"], 2, "clusters look like"),
        (["--model", "gpt"], 1, "no model 'gpt'"),
        (["--profile", "x"], 2, "no profile"),
        (["--snic", "inf"], 1, "must be above zero and finite"),
        (["--cnic", "inf"], 1, "must be above zero and finite"),
        (["--snic", "1e308"], 1, "must be above zero and finite"),
        (["--cnic", "nan"], 1, "must be above zero and finite"),
        (["--gpus", "6", "--model", "llama-2-70b"], 1, "multiple of the GPUs per engine"),
    ],
)
def test_simulate_error_one_line(arguments: list[str], code: int, words: str) -> None:
    shown = CliRunner().invoke(root, [*SMALL, *arguments])
    assert shown.exit_code == code
    assert words in shown.output


def test_simulate_plot_writes_png_or_names_extra(tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    shown = CliRunner().invoke(root, [*SMALL, "--sweep-pd", "1:1,1:2", "--plot", str(out)])
    if importlib.util.find_spec("matplotlib") is None:
        assert shown.exit_code == 1
        assert "kvstore-dualpath[plots]" in shown.output
    else:
        assert shown.exit_code == 0, shown.output
        assert out.read_bytes().startswith(b"\x89PNG")


def test_simulate_plot_without_matplotlib_fails_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unsupported, match="plots"):
        plot.require_matplotlib()
