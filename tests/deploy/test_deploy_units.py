"""systemd accepts the units and rates them as well confined, and they give daemons the resources that they need."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deployed import DAEMONS, SYSTEMD, systemd_daemon, unit

from kvstore.config.sources import load_config
from kvstore.config.values import parse_duration_ms

KILLED_AFTER_MS = {"metadata": 10_000, "node": 30_000, "router": 5_000, "admin": 5_000}
"""Added to the stop time of a daemon: a node closes its volumes."""
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
UNITS = sorted(path.name for path in SYSTEMD.glob("*.service"))
START_S = 120.0
STARTED = {
    "metadata": ("metadata.listen=127.0.0.1:0", "metadata.metrics_listen=none", "metadata.index_size=64MiB"),
    "node": ("node.metrics_listen=none", "node.nvme=", "node.listen=127.0.0.1:0", "node.data_listen=127.0.0.1:0"),
    "router": ("router.listen=127.0.0.1:0", "router.engines=http://127.0.0.1:9"),
    "admin": ("admin.listen=127.0.0.1:0",),
}
"""Settings of a small daemon on loopback."""


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units, with this Python in place of the installed program."""
    for name in UNITS:
        text = (SYSTEMD / name).read_text()
        assert "ExecStart=/opt/kvstore/bin/kvstore " in text
        (tmp_path / name).write_text(text.replace("/opt/kvstore/bin/kvstore", sys.executable))
    shutil.copytree(SYSTEMD / "kvstore-node.service.d", tmp_path / "kvstore-node.service.d")
    return tmp_path


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_the_unit(units: Path, name: str) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(units / name)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_systemd_unknown_key_is_found(units: Path) -> None:
    broken = units / UNITS[0]
    broken.write_text(broken.read_text().replace("NoNewPrivileges=", "NoNewPriviliges="))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(broken)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "NoNewPriviliges" in done.stderr


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_units_are_confined(units: Path, name: str) -> None:
    shutil.rmtree(units / "kvstore-node.service.d")
    command = ["systemd-analyze", "security", "--offline=true", str(units / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (level,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert float(level) <= 2.0


@pytest.mark.parametrize("name", DAEMONS)
def test_daemons_have_files_memory_and_time(name: str) -> None:
    settings = {key.removeprefix("Service."): values for key, values in unit(SYSTEMD / f"kvstore-{name}.service").items()}
    assert int(settings["LimitNOFILE"][0]) >= 1 << 20
    (stop,) = settings["TimeoutStopSec"]
    assert parse_duration_ms(stop) >= systemd_daemon(name).grace_ms + KILLED_AFTER_MS[name]
    if name == "node":
        assert settings["LimitMEMLOCK"] == ["infinity"]


@pytest.mark.parametrize("name", DAEMONS)
def test_units_show_daemons_their_files_in_proc(name: str, tmp_path: Path) -> None:
    """Start each daemon in a PID namespace with /proc mounted as its unit says, and a size that is a part of the memory."""
    settings = unit(SYSTEMD / f"kvstore-{name}.service")
    options = [f"subset={value}" for value in settings.get("Service.ProcSubset", []) if value != "all"]
    options += ["hidepid=2"] if settings.get("Service.ProtectProc") == ["invisible"] else []
    file, ready = tmp_path / "kvstore.toml", tmp_path / "ready"
    file.write_text('[node]\ndram = "1%"\n')
    values = (*STARTED[name], f"{name}.ready_file={ready}", f"data_dir={tmp_path}", f"node.run_dir={tmp_path / 'run'}")
    daemon = [sys.executable, "-m", "kvstore.cli", name, "--config", str(file), *(f"--set={one}" for one in values)]
    script = f'mount -t proc -o {",".join([*options, "nosuid"])} proc /proc || exit 77; exec "$@"'
    namespaces = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
    command = [*namespaces, "bash", "-c", script, "bash", *daemon]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        deadline_s = time.monotonic() + START_S
        while not ready.exists() and process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.1)
        code = process.poll()
        process.kill()
    said = (tmp_path / "log").read_text()
    if code == 77 or "unshare: " in said:
        pytest.skip(f"NOT TESTED IN A NAMESPACE: {said.strip()[:100]}")
    assert ready.exists(), said


@pytest.mark.parametrize(("name", "extra"), [("admin", set()), ("router", {"-/etc/kvstore/tokens"})])
def test_units_of_http_servers_hide_the_node(name: str, extra: set[str]) -> None:
    """All daemons have one user, so permissions of files do not keep an HTTP server from the node's memory and blocks."""
    node, settings = systemd_daemon("node").config, unit(SYSTEMD / f"kvstore-{name}.service")
    (hidden,) = settings["Service.InaccessiblePaths"]
    assert set(hidden.split()) == {f"-{node.node.run_dir}", f"-{node.data_dir}"} | extra
    named = systemd_daemon(name).environment.values()
    assert not any(value.startswith(path.removeprefix("-")) for value in named for path in hidden.split())
    assert "kvstore-node.service" in settings["Unit.After"][0].split(), "the folder exists when it is hidden"
    assert unit(SYSTEMD / "kvstore-node.service")["Service.RuntimeDirectoryPreserve"] == ["yes"], "and stays the same"


def test_host_commands_use_daemon_configuration() -> None:
    config, _ = load_config(SYSTEMD / "kvstore.toml")
    admin, node = systemd_daemon("admin").config, systemd_daemon("node").config
    assert config.client.tls == admin.client.tls
    assert config.client.metadata == admin.admin.metadata == node.node.metadata
    assert config.node.run_dir == node.node.run_dir
