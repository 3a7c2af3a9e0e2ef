"""Child processes of tests, demo and lab: started without a fork of the parent's threads, and ended with the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.embedded import children

WAIT_S = 30.0
PARENT = """
import os, sys, time
from kvstore.embedded import children
forks = []
os.register_at_fork(before=lambda: forks.append("before"))
child = children.start(["sleep", "600"])
print(child.pid, len(forks), flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def test_child_runs_no_fork_handler_and_ends_with_parent() -> None:
    """Registered fork handlers run like gRPC's: when a process with threads forks."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pid, forks = map(int, parent.stdout.readline().split())
            assert forks == 0
            assert not gone(pid)
        finally:
            parent.send_signal(signal.SIGKILL)
    end_s = time.monotonic() + WAIT_S
    while not gone(pid):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_child_is_the_named_program() -> None:
    script = "import os, sys; sys.stdout.write(f'{os.getpid()} {os.environ} {os.getcwd()} {os.getsid(0)} {sys.argv}')"
    environment = {"PATH": os.environ["PATH"], "GIVEN": "here"}
    with children.start(
        [sys.executable, "-c", script, "a b"], stdout=subprocess.PIPE, env=environment, cwd=Path("/"), new_session=True
    ) as child:
        assert child.stdout is not None
        said = child.stdout.read().decode()
        assert child.wait(WAIT_S) == 0
    assert said.startswith(f"{child.pid} ")
    assert "'GIVEN': 'here'" in said
    assert said.endswith(f" / {child.pid} ['-c', 'a b']")


def test_child_is_the_program_once_started() -> None:
    for _ in range(10):
        with children.start(["sleep", "600"]) as child:
            assert Path(f"/proc/{child.pid}/cmdline").read_bytes() == b"sleep\x00600\x00"
            child.kill()


def test_child_has_default_signal_handlers() -> None:
    with children.start(["sh", "-c", "kill -s PIPE $$; echo ignored"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.read() == b""
        assert child.wait(WAIT_S) == -signal.SIGPIPE


def test_child_missing_program_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing-of-that-name"):
        children.start(["nothing-of-that-name"])
    broken = tmp_path / "broken"
    broken.write_text("no program")
    broken.chmod(0o755)
    with pytest.raises(OSError, match="failed to start"):
        children.start([str(broken)])
