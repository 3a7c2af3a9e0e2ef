"""A daemon from the nursery behaves like one that is started in the plain way, which other tests rely on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.embedded.children import Launcher, start
from nursery import Nurseries, Nursling, cli
from support.wait import wait_until

KVSTORE = [sys.executable, "-m", "kvstore.cli"]
WAIT_S = 30.0


@pytest.fixture(scope="module")
def nurseries() -> Iterator[Nurseries]:
    made = Nurseries()
    yield made
    made.close()


def started(launcher: Launcher, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        return launcher([*KVSTORE, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err)


def serving(launcher: Launcher, folder: Path) -> subprocess.Popen[bytes]:
    """A metadata server that serves."""
    ready = folder / "ready"
    ready.unlink(missing_ok=True)
    process = started(
        launcher, folder, "metadata", "--listen", "127.0.0.1:0", "--index", str(folder / "index"), "--ready-file", "ready"
    )
    end_s = time.monotonic() + WAIT_S
    while not ready.exists():
        assert process.poll() is None, (folder / "err").read_text()
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return process


@pytest.mark.parametrize(
    "arguments",
    [
        ("metadata", "--help"),
        ("metadata", "--nonsense"),
        ("metadata", "--set", "metadata.max_requests=none"),
        ("metadata", "--set", "metadata.max_requests=2"),
    ],
)
def test_nursery_outputs_match_plain_start(
    arguments: tuple[str, ...], nurseries: Nurseries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last is about a variable and the folder."""
    monkeypatch.setenv("KVSTORE_METADATA__LISTEN", "1.2.3.4:99999")
    monkeypatch.chdir(tmp_path)
    said = []
    for launcher in (start, nurseries):
        process = started(launcher, tmp_path, *arguments)
        said.append((process.wait(WAIT_S), (tmp_path / "out").read_text(), (tmp_path / "err").read_text()))
        assert isinstance(process, Nursling) == (launcher is nurseries)
    assert said[0] == said[1]
    assert said[0][1] or said[0][2]


def test_nursery_signals_reach_the_daemon(nurseries: Nurseries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    process = serving(nurseries, tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGSTOP)
    assert process.poll() is None
    process.send_signal(signal.SIGCONT)
    process.terminate()
    assert process.wait(WAIT_S) == 0
    process = serving(nurseries, tmp_path)
    process.kill()
    assert process.wait(WAIT_S) == -signal.SIGKILL
    process.kill()  # no engine waits for it


def test_nursery_changed_environment_starts_plain_child(
    nurseries: Nurseries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPC_TRACE", "api")
    process = started(nurseries, tmp_path, "metadata", "--help")
    assert not isinstance(process, Nursling)
    assert process.wait(WAIT_S) == 0


def test_nursery_loader_variables_allow_forks(nurseries: Nurseries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM sets them in the test process; each daemon after that was started the plain way."""
    monkeypatch.setenv("LD_PRELOAD", "/lib/libnone.so")
    process = started(nurseries, tmp_path, "metadata", "--help")
    assert isinstance(process, Nursling)
    assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    "arguments", [("config", "show"), ("nonsense",), ("status", "--metadata", "127.0.0.1:1"), ("volumes", "--help")]
)
def test_command_outputs_match_plain_start(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """In another folder, with a setting of the environment."""
    environment = {**os.environ, "KVSTORE_NODE__DRAM": "3GiB"}
    said = []
    for words in (KVSTORE, cli()):
        done = subprocess.run(
            [*words, *arguments], capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path, env=environment
        )
        said.append((done.returncode, done.stdout, done.stderr))
    assert said[0] == said[1]
    assert said[0][1] or said[0][2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_command_signals_end_its_child(number: signal.Signals, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    command = ["metadata", "--listen", "127.0.0.1:0", "--index", str(tmp_path / "index"), "--ready-file", str(ready)]
    process = subprocess.Popen([*cli("metadata"), *command], stderr=subprocess.DEVNULL)
    wait_until(ready.exists)
    child = json.loads(ready.read_text())["pid"]
    assert child != process.pid
    process.send_signal(number)
    assert process.wait(WAIT_S) == (0 if number == signal.SIGTERM else -number)
    wait_until(lambda: not Path(f"/proc/{child}").exists())


def test_script_runs_like_a_plain_start(nurseries: Nurseries, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:], __name__, sys.path[0], flush=True)\nsys.exit(len(sys.argv))\n")
    with (tmp_path / "out").open("wb") as out:
        process = nurseries.run_script([sys.executable, str(script), "a", "b"], out, out)
        assert process.wait(WAIT_S) == 3
    assert isinstance(process, Nursling)
    assert (tmp_path / "out").read_text() == f"['a', 'b'] __main__ {tmp_path}\n"


def test_nursery_daemons_end_with_their_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = Nurseries()
    process = serving(own, tmp_path)
    own.close()
    assert process.wait(WAIT_S) == -signal.SIGKILL
