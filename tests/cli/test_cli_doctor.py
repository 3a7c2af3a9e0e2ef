"""``kvstore doctor`` on this host: piped, on a terminal, with and without a running node."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from certificates import make_certificates
from kvstore import native
from kvstore.cli.commands.host.doctor import running_nodes
from kvstore.cli.support.folders import socket_folders
from kvstore.config.model import Config
from kvstore.core.types import VolumeId
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.lab.stub_cuda import build_stub, with_stub
from kvstore.tiers.nvme.slab import NvmeSlab
from nursery import cli


@pytest.fixture(autouse=True)
def socket_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Socket folder of this test, so that the doctor ignores other nodes of the host."""
    place = Path(tempfile.mkdtemp(prefix="kvd-", dir="/tmp"))  # socket paths must be short
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    yield place / "kvstore"
    shutil.rmtree(place, ignore_errors=True)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*cli(), "doctor", *arguments], capture_output=True, text=True, timeout=90, check=False, cwd=folder)


def finding(done: subprocess.CompletedProcess[str], area: str, words: str = "") -> dict[str, Any]:
    """Return the only finding of an area that contains the given words."""
    found = [one for one in json.loads(done.stdout)["findings"] if one["area"] == area and words in one["message"]]
    assert len(found) == 1, done.stdout
    return found[0]


def test_doctor_this_host_exits_0(tmp_path: Path) -> None:
    done = run(tmp_path, "--dram", "16MiB")
    assert done.returncode == 0, done.stdout + done.stderr
    text, _, end = done.stdout.partition("\n\n")
    lines = text.splitlines()
    warnings = sum(line.startswith("warning ") for line in lines)
    counted = f"READY, with {warnings} warning{'' if warnings == 1 else 's'}" if warnings else "READY; optional, see above: "
    said, *actions = end.splitlines()
    assert said == counted if warnings else said.startswith(counted)  # no node runs here, and a command starts one
    assert re.search(r"^ok +configuration: checks the settings of .*--dram", lines[0]), lines[0]
    assert [action.split()[0] for action in actions] == ["1.", "2.", "3."][: min(3, warnings)]
    assert {line.split()[0] for line in lines} <= {"ok", "info", "warning"}
    for area in (
        "software",
        "GPU",
        "GPUDirect Storage",
        "storage",
        "memory",
        "limits",
        "network",
        "RDMA",
        "network lab",
        "node",
        "metadata server",
        "defaults",
    ):
        assert any(line[9:].startswith(f"{area}: ") for line in lines), area
    assert "\x1b" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_doctor_asks_the_node_of_its_folder(socket_dir: Path) -> None:
    """The node of another store runs on the host."""
    listeners = []
    for name in ("mine", "other"):
        (socket_dir / name).mkdir(parents=True)
        listeners.append(grpc.server(ThreadPoolExecutor(1)))
        listeners[-1].add_insecure_port(f"unix:{socket_dir / name / name}.sock")
        listeners[-1].start()
    found = {}
    for name in ("mine", "host"):
        configured = Config.model_validate({"node": {"run_dir": str(socket_dir / name)}})
        nodes, _ = running_nodes(configured, [], socket_folders(configured))
        found[name] = [Path(node.address).stem for node in nodes]
    for listener in listeners:
        listener.stop(None).wait()
    assert found == {"mine": ["mine"], "host": ["mine", "other"]}


def test_doctor_missing_requirement_fails_with_fix(tmp_path: Path) -> None:
    """Request more memory than any host has."""
    done = run(tmp_path, "--dram", "900TiB", "-o", "json")
    assert done.returncode == 1
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["ok"] is False
    assert said["verdict"].startswith("NOT READY: 1 requirement of the configuration is missing, ")
    assert said["actions"][0].startswith("memory: ")
    (missing,) = [finding for finding in said["findings"] if finding["level"] == "missing"]
    assert missing["area"] == "memory"
    assert missing["fix"].startswith("--set node.dram=")
    assert said["facts"]["memory"]["total_bytes"] > 0
    assert "a requirement of the configuration is missing" in done.stderr


def test_doctor_running_node_reports_io_paths(tmp_path: Path) -> None:
    with LocalCluster([NodeSpec("a", dram_bytes=16 << 20, nvme_bytes=32 << 20)], tmp_path / "store") as store:
        volume = f"{store.volume_path('a')}:32MiB"
        known = run(tmp_path, "--metadata", store.metadata_address, "--nvme", volume, "--dram", "16MiB", "-o", "json")
        named = run(tmp_path, "--node", store.node("a").address, "-o", "json", "--dram", "16MiB")
    for done in (known, named):
        assert done.returncode == 0, done.stdout + done.stderr
        (node,) = json.loads(done.stdout)["nodes"]
        assert node["node_id"] == "a"
        assert node["error"] is None
        assert any(line.startswith("a/nvme0: posix") for line in node["io_engines"])
        assert any(line.startswith("GPUDirect Storage of a/nvme0: ") for line in node["io_engines"])
        assert native.describe() in node["io_engines"]
    assert any("a volume, " in finding["message"] for finding in json.loads(known.stdout)["findings"])
    gone = run(tmp_path, "--node", "127.0.0.1:1", "--dram", "16MiB")
    assert gone.returncode == 1
    assert "missing  node: 127.0.0.1:1: no answer" in gone.stdout


def test_doctor_names_the_kernel_of_each_node(tmp_path: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node copies in Python, this process need not."""
    monkeypatch.setenv("KVSTORE_NATIVE", "python")
    with LocalCluster([NodeSpec("a", dram_bytes=16 << 20)], tmp_path / "store", socket_dir=socket_dir) as store:
        monkeypatch.delenv("KVSTORE_NATIVE")
        done = run(tmp_path, "--metadata", store.metadata_address, "--dram", "16MiB", "-o", "json")
    assert finding(done, "node a", "copies and checksums: in Python")["level"] == "warning"


def test_doctor_without_metadata_finds_nodes_by_socket(tmp_path: Path, socket_dir: Path) -> None:
    nodes = [NodeSpec(name, dram_bytes=16 << 20, nvme_bytes=32 << 20) for name in ("a", "b")]
    with LocalCluster(nodes, tmp_path / "store", socket_dir=socket_dir) as store:
        address = store.metadata_address
        store.kill("metadata")
        store.kill("b")  # a killed node leaves its socket
        done = run(tmp_path, "--metadata", address, "--dram", "16MiB", "-o", "json")
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert [node["node_id"] for node in said["nodes"]] == ["a"]
    assert said["nodes"][0]["open_files"] > 0
    assert finding(done, "metadata server", "does not answer")["level"] == "missing"
    assert said["missing"] == 1
    words = "the configuration of this command names no NVMe volume; nodes that run here have a/nvme0"
    assert finding(done, "storage", "names no NVMe volume")["message"] == words
    assert "no NVMe volume is configured" not in done.stdout


def test_doctor_node_token_rejected_is_reported(tmp_path: Path, socket_dir: Path) -> None:
    tokens, good, bad = (tmp_path / name for name in ("tokens", "good", "bad"))
    for path, text in ((tokens, "operator alice 0123456789abcdef0\n"), (good, "0123456789abcdef0"), (bad, "fedcba98765432100")):
        path.write_text(text)
        path.chmod(0o600)
    node = NodeSpec("a", dram_bytes=16 << 20, settings=(("tokens_file", str(tokens)), ("metadata", "127.0.0.1:1")))
    with LocalCluster([node], tmp_path / "store", socket_dir=socket_dir):
        answers = {
            name: run(tmp_path, "--dram", "16MiB", "-o", "json", *arguments)
            for name, arguments in (
                ("none", ()),
                ("bad", ("--set", f"client.token_file={bad}")),
                ("good", ("--set", f"client.token_file={good}")),
            )
        }
    assert [done.returncode for done in answers.values()] == [0, 0, 0]
    missing = finding(answers["none"], "node")
    assert missing["level"] == "warning"
    assert "it runs" in missing["message"]
    assert "a token is required (client.token_file is not set)" in missing["message"]
    assert f"the token in {bad} is not known" in finding(answers["bad"], "node")["message"]
    assert finding(answers["good"], "node a", "no errors since it started")["level"] == "ok"


def test_metadata_server_of_the_node_is_asked(tmp_path: Path) -> None:
    done = run(tmp_path, "--set", "node.metadata=127.0.0.1:1", "--dram", "16MiB", "-o", "json")
    assert done.returncode == 1
    assert "127.0.0.1:1 (node.metadata) does not answer" in finding(done, "metadata server")["message"]


def test_volumes_together_larger_than_their_disk_are_missing(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    size = space.f_bavail * space.f_frsize * 2 // 3
    volumes = ",".join(f"{tmp_path / name}:{size}" for name in ("a", "b"))
    done = run(tmp_path, "--nvme", volumes, "--dram", "16MiB", "--set", "node.gds=off", "-o", "json")
    assert done.returncode == 1
    assert finding(done, "storage", "2 volumes share the file system")["level"] == "missing"
    assert finding(done, "storage", "2 volumes share one disk")["level"] == "warning"


def test_certificate_of_another_key_is_missing(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    made, other = make_certificates(tmp_path), make_certificates(tmp_path / "other")
    files = {"ca": made.ca, "cert": made.cert, "key": other.key}
    settings = [part for name, path in files.items() for part in ("--set", f"node.tls.{name}={path}")]
    done = run(tmp_path, "--dram", "16MiB", "-o", "json", *settings)
    assert done.returncode == 1
    assert "KEY_VALUES_MISMATCH" in finding(done, "TLS", "[node.tls]")["message"]


def test_doctor_gds_compatibility_mode_is_reported(tmp_path: Path) -> None:
    """On a fake CUDA device, kvikio (if installed) reads correct data, but through host memory."""
    stub = build_stub(tmp_path, with_device=True)
    if stub is None:
        pytest.skip("NOT TESTED WITH A DRIVER: there is no C compiler for the stand-in of libcuda.so.1")
    slab = NvmeSlab.open(tmp_path / "volume", volume_id=VolumeId("v"), capacity_bytes=32 << 20)
    assert list(slab.recover()) == []
    slab.close()
    command = [*cli(), "doctor", "--dram", "16MiB", "--nvme", f"{tmp_path / 'volume'}:32MiB", "-o", "json"]
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
            assert "none (kvikio is not installed" in gds["message"]
            assert "-m pip install 'kvstore-dualpath[gds-cu12]'" in gds["fix"]
        else:
            assert "kvikio reads through host memory" in gds["message"]
            assert "nvidia-fs" in gds["fix"]


def test_doctor_on_terminal_prints_table(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    command = [*cli(), "doctor", "--dram", "16MiB"]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path) as child:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # error of a terminal whose other end is closed
                break
            if not piece:
                break
            shown += piece
    os.close(ours)
    assert child.returncode == 0, shown
    assert "finding" in shown.decode()
    assert "│" in shown.decode()
