"""``kvstore up`` and ``demo`` with several metadata servers and an index in Valkey, also without the required programs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.cli.app import root
from kvstore.embedded import valkey
from kvstore.embedded.ports import TRIED_PORTS, free_port
from kvstore.embedded.valkey import find_server
from nursery import cli
from support.wait import wait_until

needs_server = pytest.mark.skipif(find_server() is None, reason="no valkey-server or redis-server on this machine")
SMALL = ["--dram", "64MiB", "--nvme", "64MiB"]
LOCAL = [f"{name}=127.0.0.1:0" for name in ("metadata.listen", "metadata.metrics_listen", "node.metrics_listen", "admin.listen")]


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[Path]:
    """``kvstore up`` on this machine. Yields the file of its output; it is ended by Ctrl-C."""
    said = folder / "said"
    command = [*cli("metadata", "node", "admin"), "up", "--data-dir", str(folder / "data"), *SMALL]
    with said.open("wb") as out:
        process = subprocess.Popen([*command, *(f"--set={one}" for one in LOCAL), *arguments], stdout=out, stderr=out)
    try:
        wait_until(lambda: "Metadata servers:" in said.read_text() or process.poll() is not None, timeout_s=90)
        yield said
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, said.read_text()
    finally:
        process.kill()
        process.wait()


def hit_health(metadata: str) -> list[str]:
    """States of the metadata servers."""
    done = CliRunner().invoke(root, ["status", "--metadata", metadata, "-o", "json"])
    return sorted(server["state"] for server in json.loads(done.stdout)["metadata_servers"])


@needs_server
def test_up_names_servers_and_starts_ended_ones_again(tmp_path: Path) -> None:
    with running(tmp_path, "--servers", "2", "--shards", "3") as said:
        text = said.read_text()
        assert "starting 2 metadata servers, 3 Valkey shards of 2 servers each, a node and an admin server" in text
        metadata = text.split("The store is up.  metadata ", 1)[1].split()[0]
        wait_until(lambda: len(re.findall(r"shard \d +primary \S+ pid \d+ +replica \S+ pid \d+", said.read_text())) == 3)
        pids = {name: int(pid) for name, pid in re.findall(r"(metadata\S*) +\S+ +pid (\d+)", said.read_text())}
        assert set(pids) == {"metadata", "metadata-2"}
        assert hit_health(metadata) == ["usable", "usable"]
        os.kill(pids["metadata-2"], signal.SIGKILL)
        (primary,) = re.findall(r"shard 1 +primary \S+ pid (\d+)", said.read_text())
        os.kill(int(primary), signal.SIGKILL)
        wait_until(lambda: "metadata-2 runs again (pid " in said.read_text())
        wait_until(lambda: re.search(r"Valkey server \S+ runs again \(pid ", said.read_text()))
        assert "metadata ended" not in said.read_text()
        wait_until(lambda: hit_health(metadata) == ["usable", "usable"])
    assert "Traceback" not in said.read_text()


def test_up_servers_without_shards_share_the_index_file(tmp_path: Path) -> None:
    first = free_port()
    with running(tmp_path, "--servers", "2", "--set", f"metadata.listen=127.0.0.1:{first}") as said:
        metadata = said.read_text().split("The store is up.  metadata ", 1)[1].split()[0]
        second = int(metadata.rpartition(":")[2])
        assert metadata == f"127.0.0.1:{first},127.0.0.1:{second}"
        assert first < second <= first + TRIED_PORTS
        assert hit_health(metadata) == ["usable", "usable"]
        assert "Valkey" not in said.read_text()
    assert (tmp_path / "data" / "index").is_dir()
    assert not (tmp_path / "data" / "metadata-2").exists()


def test_up_starts_ended_node_and_page_again(tmp_path: Path) -> None:
    with running(tmp_path, "--servers", "2", "--set", "node.node_id=here") as said:
        (node,) = re.findall(r"here +\S+ +pid (\d+)", said.read_text())
        os.kill(int(node), signal.SIGKILL)
        wait_until(lambda: "here runs again (pid " in said.read_text(), timeout_s=60)
        why = "blocks that were only in DRAM are lost"
        assert f"here was killed by SIGKILL; starting it again ({why})" in said.read_text()
        page = re.findall(r"http://[0-9.:]+/", said.read_text())[0]
        urllib.request.urlopen(f"{page}v1/cluster", timeout=60).close()


@pytest.mark.parametrize("command", [["up", "--nvme", "0"], ["demo"]])
def test_command_without_valkey_server_names_packages(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey, "find_server", lambda: None)
    refused = CliRunner().invoke(root, [*command, "--data-dir", str(tmp_path), "--shards", "3"])
    assert refused.exit_code == 1
    assert "no valkey-server or redis-server on PATH: install the package valkey-server or redis-server" in refused.output


def test_demo_without_hiredis_names_extra(tmp_path: Path) -> None:
    (tmp_path / "hiredis.py").write_text("raise ImportError('not here')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    for command in (
        ["demo", "--shards", "3"],
        ["metadata", "--set", "metadata.engine=valkey://127.0.0.1:1", "--listen", "127.0.0.1:0"],
    ):
        done = subprocess.run(
            [*cli(), *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        assert "requires the package hiredis" in done.stderr
        assert "pip install 'kvstore-dualpath[valkey]'" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--dual-path", "--shards", "3"], "--servers and --shards have no effect with --dual-path"),
        (["up", "--shards", "3", "--set", "metadata.engine=valkey://a:1"], "--set metadata.engine has no effect here"),
        (["up", "--servers", "0"], "1<=x<=16"),
        (["demo", "--shards", "-1"], "0<=x<=16"),
        (["demo", "--shards", "2"], "2 shards cannot lose a server: use 3 or more, or 0"),
    ],
)
def test_command_invalid_scale_is_a_usage_error(arguments: list[str], said: str) -> None:
    refused = CliRunner().invoke(root, arguments)
    assert refused.exit_code == 2
    assert said in refused.output
