"""``kvstore advise`` on small clusters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.cli.app import root

SMALL = ["advise", "--agents", "24", "--profile", "agentic-32k"]


def test_advise_recommends_from_file_as_json(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes: 3\nsnic: 0.5\npolicies: [prefill_only, split]\nmodel: ds-27b\n")
    shown = CliRunner().invoke(root, [*SMALL, "-f", str(file), "--decode-gpu", "h20", "--limit", "600", "-o", "json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["description"]["decode_gpu"] == "h20"
    assert {row["cluster"] for row in found["options"]} == {"1P2D", "2P1D"}
    assert found["recommended"]["policy"] == "split"
    assert found["left_out"] == 0
    assert found["reasons"]


def test_advise_table_names_recommendation() -> None:
    shown = CliRunner().invoke(root, [*SMALL, "--nodes", "2", "--limit", "600"])
    assert shown.exit_code == 0, shown.output
    assert "Recommended: 1P1D with" in shown.output
    said = " ".join(shown.stdout.split())
    assert said.startswith("Assumed: model ds-27b; 2 nodes with 8 h100 GPUs each; storage link 50 GB/s per node")
    assert "24 agents at once, agentic-32k, seed 1." in said
    assert "MBU: share of the HBM bandwidth of decode GPUs." in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes: 1", "nodes"),
        ("speed: 3", "cluster.yaml: unknown setting 'speed'; there are: model, nodes"),
        ("snic: .inf", "snic"),
        ("storage: .nan", "storage"),
        ("- 1", "one setting per line"),
        ("policies: [oracle]", "oracle"),
        ("gpu: x", "no GPU"),
    ],
)
def test_advise_bad_description_fails_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    shown = CliRunner().invoke(root, [*SMALL, "-f", str(file)])
    assert shown.exit_code == 1
    assert words in shown.output
    assert "Traceback" not in shown.output
