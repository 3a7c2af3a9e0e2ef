"""The examples for three hosts with 1 TB of DRAM and eight NVMe volumes: compose, systemd and chart describe the same node."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deployed import (
    COMPOSE,
    HELM,
    SYSTEMD,
    Daemon,
    chart_daemon,
    compose,
    compose_daemons,
    environment_file,
    image,
    pods,
    problems,
    rendered,
    unit,
)

from kvstore.process.memory.memory_sizing import block_table_memory

HOST_FILE = COMPOSE.with_name("host.yaml")
LARGE = SYSTEMD / "large"
DROP_IN = LARGE / "large-host.conf"
HOST_BYTES = 10**12
KINDS = ("compose", "systemd", pytest.param("chart", marks=pytest.mark.skipif(not HELM.exists(), reason="no helm")))


def large_node(kind: str) -> Daemon:
    """The node of one example."""
    if kind == "compose":
        return compose_daemons(file=HOST_FILE)["node"]
    if kind == "chart":
        (workload,) = (one for one in pods(rendered("large")) if one["kind"] == "DaemonSet")
        return chart_daemon(workload)
    live, _ = environment_file(LARGE / "node.env")
    return Daemon("node", ("node",), live, ("health", "node"))


@pytest.mark.parametrize("kind", KINDS)
def test_large_node_starts_and_fits_host(kind: str) -> None:
    daemon = large_node(kind)
    assert problems(daemon) == []
    node = daemon.config.node
    assert (node.dram_bytes, node.huge_pages, len(node.nvme)) == (768 << 30, True, 8)
    assert {volume.capacity_bytes for volume in node.nvme} == {6 << 40}
    assert node.dram_bytes + block_table_memory(node.dram_bytes, 48 << 40) < HOST_BYTES
    assert node.tls.require_client_cert
    assert not node.allow_insecure_remote


@pytest.mark.parametrize("kind", ["compose", "systemd"])
def test_large_node_uses_storage_link(kind: str) -> None:
    node = large_node(kind).config.node
    assert node.storage_listen is not None
    assert node.storage_listen.rpartition(":")[0] != node.data_listen.rpartition(":")[0]


@pytest.mark.parametrize("name", ["metadata", "admin"])
def test_large_compose_servers_start(name: str) -> None:
    daemon = compose_daemons(file=HOST_FILE)[name]
    assert problems(daemon) == []
    assert daemon.config.client.tls.ca is not None


def test_large_compose_file_is_valid() -> None:
    compose_spec = pytest.importorskip("compose_spec", reason="requirements-deploy.txt is not installed")
    document = compose(file=HOST_FILE)
    compose_spec.PyCompose.from_json(json.dumps(document))
    for name, service in document["services"].items():
        assert (service["cap_drop"], service["read_only"], service["network_mode"]) == (["ALL"], True, "host"), name
    node = compose_daemons(file=HOST_FILE)["node"]
    assert document["services"]["node"]["stop_grace_period"] == "3m"
    assert node.grace_ms == 120_000


def test_large_compose_folders_are_made_on_the_host() -> None:
    """Docker would create a missing folder for root, and the node's user could not write to it. /run is empty after each boot."""
    text, services = HOST_FILE.read_text(), compose(file=HOST_FILE)["services"]
    volumes = [volume for service in services.values() for volume in service["volumes"] if not str(volume).startswith("index:")]
    assert all(volume["bind"] == {"create_host_path": False} for volume in volumes)
    _, last = image()
    user, group = last.last("USER").split(":")
    lines = HOST_FILE.with_name("kvstore.tmpfiles.conf").read_text().splitlines()
    made = [line.split() for line in lines if not line.startswith("#")]
    assert made == [["d", "/run/kvstore", "0700", user, group]]
    assert "kvstore.tmpfiles.conf" in text
    in_run = {volume["source"] for volume in volumes if volume["source"].startswith("/run")}
    assert in_run == {str(large_node("compose").config.node.run_dir)} == {"/run/kvstore"}


def test_large_compose_queries_carry_a_read_token() -> None:
    """Nodes register their addresses, so a query must not carry an operator's token."""
    for name, daemon in compose_daemons(file=HOST_FILE).items():
        client = daemon.config.client
        assert client.read_token_file == Path("/etc/kvstore/grafana.token"), name
        assert (client.token_file == client.read_token_file) == (name != "admin"), name


def test_large_systemd_files_name_every_volume() -> None:
    node, drop_in = large_node("systemd").config.node, unit(DROP_IN)
    writable = {path for line in drop_in["Service.ReadWritePaths"] for path in line.split()}
    assert writable == {str(volume.path) for volume in node.nvme}
    assert drop_in["Unit.RequiresMountsFor"][0].split() == [str(volume.path.parent) for volume in node.nvme]
    assert (drop_in["Service.NUMAPolicy"], drop_in["Service.NUMAMask"]) == (["interleave"], ["all"])
    (pages,) = re.findall(r"^vm\.nr_hugepages = (\d+)$", (LARGE / "kvstore.sysctl.conf").read_text(), re.MULTILINE)
    assert int(pages) * (2 << 20) == node.dram_bytes


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
def test_large_systemd_drop_in_is_accepted(tmp_path: Path) -> None:
    service = tmp_path / "kvstore-node.service"
    service.write_text((SYSTEMD / service.name).read_text().replace("/opt/kvstore/bin/kvstore", sys.executable))
    (tmp_path / f"{service.name}.d").mkdir()
    shutil.copy(DROP_IN, tmp_path / f"{service.name}.d")
    command = ["systemd-analyze", "verify", "--man=no", str(service)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
