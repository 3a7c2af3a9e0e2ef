"""The conformance command over real engines: it finds wrong tokens of a connector without checksums, and none of the tier."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

COMMAND = [sys.executable, "-m", "kvstore.testing.conformance"]


@pytest.mark.thorough
def test_conformance_finds_wrong_tokens_of_unchecked_files(tmp_path: Path) -> None:
    output = tmp_path / "runs.json"
    arguments = ["--target", "vllm-fs", "--target", "kvstore-tier", "--fault", "sectors_swapped", "--output", str(output)]
    ran = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=280)
    assert ran.returncode == 1, ran.stderr
    assert "| sectors on disk exchanged | wrong tokens | right |" in ran.stdout
    unchecked, checked = json.loads(output.read_text())
    assert (unchecked["target"], unchecked["verdict"]) == ("vllm-fs", "wrong tokens")
    assert (checked["target"], checked["verdict"]) == ("kvstore-tier", "right")
    assert unchecked["loaded_tokens"] > 0
    assert "instead of" in unchecked["detail"]


def test_conformance_unknown_target_is_refused() -> None:
    ran = subprocess.run([*COMMAND, "--target", "nobody"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "kvstore-connector" in ran.stderr
