"""Commands: help with examples, errors in one line, and daemons as real processes."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from kvstore.cli.app import root
from kvstore.cli.commands.workloads.demo import dual_table
from kvstore.cli.support.logs import ConsoleFormatter, JsonFormatter, StderrHandler, first_lines, set_up_logs
from kvstore.config.model import LogSection
from kvstore.core.types import VolumeId
from kvstore.replay.dual_demo import DualDemoPlan, PolicyResult
from kvstore.tiers.nvme.slab import NvmeSlab
from nursery import cli


def commands(group: click.Group, *above: str) -> Iterator[list[str]]:
    """All commands below a group, as words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield [*above, name]
        if isinstance(command, click.Group):
            yield from commands(command, *above, name)


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    """Restore the logging of the process, which commands change."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def run(*arguments: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*cli("metadata", "node"), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **environment},
    )


def test_root_help_names_every_command() -> None:
    shown = CliRunner().invoke(root, ["--help"])
    assert shown.exit_code == 0
    for name in root.list_commands(click.Context(root)):
        assert f"\n  {name} " in shown.stdout


@pytest.mark.parametrize("command", list(commands(root)), ids=" ".join)
def test_command_help_has_examples(command: list[str]) -> None:
    shown = CliRunner().invoke(root, [*command, "--help"])
    assert shown.exit_code == 0
    assert re.search(rf"^ {{4,}}(\S+=\S+ |.*\| )?kvstore {' '.join(command)}\b", shown.stdout, re.MULTILINE), shown.stdout


def test_root_import_loads_no_heavy_modules() -> None:
    code = "import sys, kvstore.cli.app; print([m for m in ('grpc', 'rich', 'pydantic', 'numpy', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nonsense"], 2, "No such command"),
        (["node", "--set", "node.dramm=1"], 2, "did you mean 'node.dram'"),
        (["node", "--set", "dram"], 2, "must look like"),
        (["node", "--dram", "lots"], 2, "a size looks like"),
        (["config", "show", "--config", "/none.toml"], 2, "No such file"),
        (["replay"], 2, "Missing argument"),
        (["replay", "/none.jsonl"], 1, "No such file"),
        (["replay", "x", "--capacity", "hbm=1GiB"], 2, "a capacity must look like"),
        (["replay", "x", "--capacity", "nvme=1GiB"], 2, "needs some DRAM"),
        (["replay", "x", "--block-bytes", "many"], 2, "a size looks like"),
        (["volumes", "check", "--offline", "/nowhere"], 1, "/nowhere"),
        (["replay", "x", "--policy", "foo"], 2, "'s3-fifo'"),
        (["replay", "x", "--json", "x.json"], 2, "No such option"),
        (["simulate", "--plot", "/nonexistent/x.png"], 2, "the folder /nonexistent does not exist"),
        (["demo", "-o", "xml"], 2, "'yaml'"),
        (["node", "--policy", "foo"], 2, "'s3-fifo'"),
        (["node", "--id", "../../evil"], 2, "invalid node id"),
        (["node", "--set", "node.lease=20ms"], 2, "250ms or more"),
        (["up", "--dram", "0"], 2, "more than 0"),
        (["up", "--nvme", "1"], 2, "'--nvme': 1 bytes hold no blocks: give a size with its unit of at least 16MiB"),
        (["up", "--data-dir", "a,b"], 1, "contain a comma"),
        (["status", "--metadata", "foo"], 1, 'a metadata server must be "host:port", with its port (default: 7400)'),
        (["node", "--listen", "foo"], 1, 'an address must be "host:port", with its port'),
        (["status", "--metadata", "127.0.0.1:1", "--set", "client.deadline=300ms"], 1, "connection refused"),
    ],
)
def test_command_error_one_line_and_exit_code(arguments: list[str], code: int, words: str) -> None:
    done = run(*arguments)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ")


def test_replay_invalid_trace_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "letters.jsonl"
    path.write_text("dear sir\n")
    shown = CliRunner().invoke(root, ["replay", str(path)])
    assert shown.exit_code == 1
    assert "not a trace" in shown.stderr
    assert "line=1" in shown.stderr


def test_logs_set_up_twice_print_once(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs(LogSection(level="info"))
    set_up_logs(LogSection(level="warning", format="json"))
    assert sum(isinstance(handler, StderrHandler) for handler in logging.getLogger().handlers) == 1
    logging.getLogger("kvstore.x").info("quiet")
    logging.getLogger("kvstore.x").warning("two\nlines: %d", 7)
    entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(entry["level"], entry["message"], entry["logger"]) for entry in entries] == [
        ("warning", "two\nlines: 7", "kvstore.x")
    ]


def test_log_limit_suppresses_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs(LogSection(level="warning"))
    logger = logging.getLogger("kvstore.x")
    with first_lines(3):
        for number in range(50):
            logger.warning("slot %d", number)
    logger.warning("after")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert "47 further lines" in lines[3]
    assert lines[4].endswith("after")


def test_json_logs_include_errors() -> None:
    try:
        int("broken")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "it %s", ("failed",), sys.exc_info())
    entry = json.loads(JsonFormatter().format(record))
    assert entry["message"] == "it failed"
    assert "ValueError: invalid literal" in entry["error"]


def test_logs_remote_input_forges_no_record(capsys: pytest.CaptureFixture[str]) -> None:
    """Remote input in a message must not look like another record or contain control sequences."""

    def bug(words: str) -> None:
        raise ValueError(words)

    forged = "x\n21:00:00 INFO    kvstore.metadata.nodes: node storage-9 is alive\r\x1b[31m\x9b2J\u2028\u202ered"
    logger = logging.getLogger("kvstore.x")
    for kind in ("console", "json"):
        set_up_logs(LogSection(level="info", format=kind))
        logger.warning("failed: %s", forged)
        try:
            bug(forged)
        except ValueError:
            logger.exception("a bug")
        said = capsys.readouterr().err
        assert not {"\r", "\x1b", "\x9b", "\u2028"}.intersection(said)
        lines = said.splitlines()
        if kind == "json":
            entries = [json.loads(line) for line in lines]
            assert entries[0]["message"] == f"failed: {forged}"
            assert entries[1]["error"].endswith(f"ValueError: {forged}")
            continue
        assert [line[9:] for line in lines if not line.startswith("  ")] == [
            r"WARNING kvstore.x: failed: x\n21:00:00 INFO    kvstore.metadata.nodes: node storage-9 is alive\r\x1b[31m\x9b2J"
            r"\u2028\u202ered",
            "ERROR   kvstore.x: a bug",
        ]
        assert lines[2] == "  Traceback (most recent call last):"  # the formatter still prints the traceback
        assert len(lines) > 5


def test_logs_stack_is_indented() -> None:
    record = logging.LogRecord("a", logging.INFO, "f", 1, "here", (), None, sinfo="Stack:\n  File x")
    assert ConsoleFormatter().format(record).splitlines()[1:] == ["  Stack:", "    File x"]


def test_up_ctrl_c_stops_store(tmp_path: Path) -> None:
    command = [*cli("metadata", "node", "admin"), "up", "--data-dir", str(tmp_path), "--dram", "64MiB", "--nvme", "64MiB"]
    settings = ["--set", "metadata.listen=127.0.0.1:0", "--set", "node.node_id=here", "--set", "admin.listen=127.0.0.1:0"]
    process = subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert "metadata 127.0.0.1:" in first, process.stderr.read() if process.stderr else ""
        address = first.split("metadata ", 1)[1].split()[0]
        shown = first
        while "/v1/openapi.json" not in shown:
            shown = process.stdout.readline()
            assert shown, "the banner names the admin server"
        url = shown.split("REST:", 1)[1].split()[0]
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert "/v1/cluster" in json.loads(answer.read())["paths"]
        page = url.removesuffix("v1/openapi.json")
        with urllib.request.urlopen(f"{page}v1/cluster", timeout=60) as answer:
            assert json.loads(answer.read())["nodes_alive"] == 1
        with urllib.request.urlopen(page, timeout=60) as answer:
            assert answer.read().startswith(b"<!doctype html>"), "and the page"
        status = run("status", "--metadata", address, "-o", "json")
        assert status.returncode == 0, status.stderr
        found = json.loads(status.stdout)
        assert [(node["id"], node["alive"], node["roles"]) for node in found["nodes"]] == [
            ("here", True, ["prefill", "decode", "storage"])
        ]
        assert {volume["tier"] for volume in found["nodes"][0]["volumes"]} == {"dram", "nvme"}
        table = run("status", "--metadata", address)
        assert table.returncode == 0
        assert "node here: alive, at 127.0.0.1:" in table.stdout
        assert max(map(len, table.stdout.splitlines())) <= 80
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=40)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "stopping" in out
    assert "Traceback" not in err

    checked = run("volumes", "check", "--offline", str(tmp_path / "here-nvme"), "-o", "json")
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["ok"] is True
    assert "0 blocks" in run("volumes", "check", "--offline", str(tmp_path / "here-nvme")).stdout
    parent = run("volumes", "check", "--offline", str(tmp_path))
    assert parent.returncode == 1
    assert f"check one with kvstore volumes check --offline {tmp_path / 'here-nvme'}" in parent.stderr


def test_volume_check_open_volume_names_node(tmp_path: Path) -> None:
    slab = NvmeSlab.open(tmp_path / "volume", volume_id=VolumeId("here/nvme0"), capacity_bytes=32 << 20)
    done = run("volumes", "check", "--offline", str(tmp_path / "volume"))
    slab.close()
    assert done.returncode == 1
    assert f"in use by node here (process {os.getpid()}): " in done.stderr
    assert "`kvstore volumes check here/nvme0`, or stop the node first" in done.stderr


def test_daemon_start_failure_one_line(tmp_path: Path) -> None:
    done = run("metadata", "--listen", "0.0.0.0:0", "--index", str(tmp_path / "index"))
    assert done.returncode == 1
    assert "requires TLS" in done.stderr
    assert "Traceback" not in done.stderr


def test_up_address_in_use_names_address(tmp_path: Path) -> None:
    (tmp_path / "metadata.log").write_text("Error: of an earlier run\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("up", "--data-dir", str(tmp_path), "--nvme", "0", "--set", f"metadata.listen={address}")
    assert done.returncode == 1
    port = int(address.rpartition(":")[2])
    started, first = done.stderr.splitlines()[:2]
    assert started.startswith("starting a metadata server")
    assert first.startswith("Error: metadata ended at start with code 1: ")
    assert f"port {port} of 127.0.0.1 is in use; `kvstore status` shows whether another store runs here" in first
    assert "--set metadata.listen=127.0.0.1:" in first
    assert "earlier run" not in done.stderr
    assert ".cc:" not in done.stderr


@pytest.mark.parametrize("command", [["up", "--nvme", "0"], ["node"]])
def test_linked_folder_of_sockets_is_refused(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "elsewhere").mkdir()
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # `up` uses a folder in /tmp instead of a long path
        link = Path(short, "kvstore")
        link.symlink_to(tmp_path / "elsewhere")
        done = run(*command, "--set", f"data_dir={tmp_path}", XDG_RUNTIME_DIR=short, timeout=30)
    assert done.returncode == 1
    assert f"{link} is a link or belongs to another user" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_up_settings_reach_daemons(tmp_path: Path) -> None:
    """Settings of daemons that ``up`` does not use itself are passed on too."""
    command = ("up", "--data-dir", str(tmp_path / "data"), "--set", "metadata.listen=127.0.0.1:0")
    required = run(*command, "--nvme", "0", "--set", "node.gds=required")
    assert required.returncode == 1
    assert "node.gds = required needs an NVMe volume" in required.stderr
    file = tmp_path / "kvstore.toml"
    file.write_text('[node]\ngds = "required"\n')
    assert "node.gds = required needs an NVMe volume" in run(*command, "--nvme", "0", "--config", str(file)).stderr
    for setting, hint in (("node.nvme=/tmp/x:1GiB", "--nvme SIZE"), ("node.roles=storage", "kvstore node")):
        refused = run(*command, "--set", setting)
        assert refused.returncode == 2
        assert hint in refused.stderr


def test_up_under_nohup_ignores_hangup(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore.cli", "up", "--data-dir", str(tmp_path), "--dram", "64MiB", "--nvme", "0"]
        + [f"--set={name}=127.0.0.1:0" for name in ("metadata.listen", "metadata.metrics_listen", "node.metrics_listen")]
        + ["--set=node.node_id=here", "--set=admin.listen=none"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("The store is up.")
        said = Path(f"/proc/{process.pid}/status").read_text()
        ignored = int(said.split("SigIgn:", 1)[1].split()[0], 16)
        assert ignored & 1 << signal.SIGHUP - 1
        process.terminate()
        assert "stopping" in process.communicate(timeout=40)[0]
    finally:
        process.kill()
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_demo_signalled_removes_its_files(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore.cli", "demo", "--sessions", "100"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # under nohup, the signal would be ignored
    )
    try:
        sockets = socket_folder_of_children(process.pid)
        process.send_signal(number)
        _, err = process.communicate(timeout=40)
    finally:
        process.kill()
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    assert not sockets.exists()


def socket_folder_of_children(pid: int) -> Path:
    """Folder of the ready file of the first daemon that ``pid`` starts."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found = re.search(rb"ready_file=([^\0]+)/", Path(f"/proc/{child}/cmdline").read_bytes())
            if found:
                return Path(os.fsdecode(found[1]))
        time.sleep(0.01)
    raise AssertionError("it started no daemon")


@pytest.mark.parametrize("command", [["replay", "trace.jsonl"], ["demo"]])
def test_settings_without_effect_are_rejected(command: list[str]) -> None:
    refused = CliRunner().invoke(root, [*command, "--set", "log.level=error", "--set", "node.dram=1"])
    assert refused.exit_code == 2
    assert "--set node.dram has no effect here" in refused.output


def test_dual_path_demo_table_fits_terminal() -> None:
    """A pipe has 80 columns, and no figure may be cut."""
    links = {"prefill-0": [1.0], "decode-0": [1.0]}
    results = [
        PolicyResult(policy, (seconds,) * 3, rate, {"prefill": 1, "decode": 3}, wrong, links)
        for policy, seconds, rate, wrong in (("prefill_only", 123.45, 1e9, 0), ("shorter_queue", 10.0, 1.72e9, 67_108_864))
    ]
    out = io.StringIO()
    Console(file=out, width=80).print(dual_table(DualDemoPlan(), results))
    assert "…" not in out.getvalue()
    for figure in ("shorter_queue", "123.45 s", "12.35 ×", "1000 MB/s", "1720 MB/s", "1.72 ×", "75%", "67108864"):
        assert figure in out.getvalue()
