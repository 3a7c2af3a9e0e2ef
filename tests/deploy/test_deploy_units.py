"""systemd accepts the units and rates them as well confined, and they give daemons the resources that they need."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deployed import DAEMONS, SYSTEMD, systemd_daemon, unit

from kvstore.config.sources import load_config
from kvstore.config.values import parse_duration_ms

KILLED_AFTER_MS = {"metadata": 10_000, "node": 30_000, "router": 5_000, "admin": 5_000}
"""Added to the stop time of a daemon: a node closes its volumes."""
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
UNITS = sorted(path.name for path in SYSTEMD.glob("*.service"))


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


def test_host_commands_use_daemon_configuration() -> None:
    config, _ = load_config(SYSTEMD / "kvstore.toml")
    admin, node = systemd_daemon("admin").config, systemd_daemon("node").config
    assert config.client.tls == admin.client.tls
    assert config.client.metadata == admin.admin.metadata == node.node.metadata
    assert config.node.run_dir == node.node.run_dir
