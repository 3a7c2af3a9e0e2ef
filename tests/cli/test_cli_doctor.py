"""``kvstore doctor`` as people run it: on this host, piped and on a terminal, with and without a node that runs."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.types import VolumeId
from kvstore.testing.cluster import LocalCluster, NodeSpec
from kvstore.testing.stub_cuda import build_stub, with_stub
from kvstore.tiers.slab import NvmeSlab

NOBODY = ("--metadata", "127.0.0.1:1")
COMMAND = [sys.executable, "-m", "kvstore.cli", "doctor"]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=90, check=False, cwd=folder)


def test_on_this_host_it_says_what_there_is_and_exits_well(tmp_path: Path) -> None:
    done = run(tmp_path, *NOBODY, "--dram", "16MiB")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "info", "warning"}
    for area in ("software", "GPU", "GPUDirect Storage", "storage", "memory", "limits", "network", "RDMA", "network lab", "node"):
        assert any(line[9:].startswith(f"{area}: ") for line in lines), area
    assert "\x1b" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_what_is_required_and_missing_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    """More memory than any host has: that this is not there is sure."""
    done = run(tmp_path, *NOBODY, "--dram", "900TiB", "--json")
    assert done.returncode == 1
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["ok"] is False
    (missing,) = [finding for finding in said["findings"] if finding["level"] == "missing"]
    assert missing["area"] == "memory"
    assert missing["mend"].startswith("--set node.dram=")
    assert said["facts"]["memory"]["total_bytes"] > 0
    assert "something is missing that the configuration requires" in done.stderr


def test_a_running_node_says_what_it_really_uses(tmp_path: Path) -> None:
    with LocalCluster([NodeSpec("a", dram_bytes=16 << 20, nvme_bytes=32 << 20)], tmp_path / "store") as store:
        volume = f"{store.volume_path('a')}:32MiB"
        known = run(tmp_path, "--metadata", store.metadata_address, "--nvme", volume, "--dram", "16MiB", "--json")
        named = run(tmp_path, "--node", store.node("a").address, "--json", "--dram", "16MiB")
    for done in (known, named):
        assert done.returncode == 0, done.stdout + done.stderr
        (node,) = json.loads(done.stdout)["nodes"]
        assert node["node_id"] == "a"
        assert node["error"] is None
        assert any(line.startswith("a/nvme0: posix") for line in node["io_engines"])
        assert any(line.startswith("GPUDirect Storage of a/nvme0: ") for line in node["io_engines"])
    assert any("a volume, " in finding["what"] for finding in json.loads(known.stdout)["findings"])
    gone = run(tmp_path, "--node", "127.0.0.1:1", "--dram", "16MiB")
    assert gone.returncode == 0
    assert "warning  node: 127.0.0.1:1: no answer" in gone.stdout


def test_gds_that_is_only_pretended_is_told_and_refused_where_required(tmp_path: Path) -> None:
    """A driver with an imagined device: kvikio, where it is installed, reads into its memory, rightly, through host memory."""
    stub = build_stub(tmp_path, with_device=True)
    if stub is None:
        pytest.skip("NOT TESTED WITH A DRIVER: there is no C compiler for the stand-in of libcuda.so.1")
    slab = NvmeSlab.open(tmp_path / "volume", volume_id=VolumeId("v"), capacity_bytes=32 << 20)
    assert list(slab.recover()) == []
    slab.close()
    command = [*COMMAND, *NOBODY, "--dram", "16MiB", "--nvme", f"{tmp_path / 'volume'}:32MiB", "--json"]
    for mode, code, level in (("required", 1, "missing"), ("auto", 0, "warning")):
        done = subprocess.run(
            [*command, "--set", f"node.gds={mode}"], capture_output=True, text=True, timeout=90, check=False, env=with_stub(stub)
        )
        assert done.returncode == code, done.stdout + done.stderr
        said = json.loads(done.stdout)
        assert said["facts"]["gpu"]["devices"] == [{"name": "imagined device", "bytes": 1 << 30}]
        (gds,) = [finding for finding in said["findings"] if finding["area"] == "GPUDirect Storage"]
        assert gds["level"] == level
        if importlib.util.find_spec("kvikio") is None:
            assert "none (kvikio is not installed" in gds["what"]
            assert gds["mend"].startswith("pip install 'kvstore-dualpath[gds-cu12]'")
        else:
            assert "kvikio reads through host memory" in gds["what"]
            assert "nvidia-fs" in gds["mend"]


def test_on_a_terminal_it_is_a_table(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    command = [*COMMAND, *NOBODY, "--dram", "16MiB"]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path) as child:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # how a terminal says that the other end is closed
                break
            if not piece:
                break
            shown += piece
    os.close(ours)
    assert child.returncode == 0, shown
    assert "finding" in shown.decode()
    assert "│" in shown.decode()
