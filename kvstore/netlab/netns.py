"""Network namespaces, named after their owner, and the processes inside.

A *lab* is a group of namespaces with a common prefix ``kvlab-<pid>-<start>-<n>``: the process that created it, the start time
of that process (ticks since boot, to detect a reused pid) and a running number. The name alone shows whether the owner is
alive, so ``remove_stale`` needs no other record. A *guard* process removes a lab as soon as its owner ends, even if it was
killed.

Everything here requires root and ``iproute2``.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from kvstore.core.errors import DeadlineExceeded, Internal, Unsupported

NETNS_DIR = Path("/run/netns")
"""Where iproute2 keeps named namespaces."""
_CLONE_NEWNET = 0x40000000
_COMMAND_TIMEOUT_S = 30.0
_KILL_TIMEOUT_S = 10.0
_REMOVE_TIMEOUT_S = 5.0
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
"""Where ip and tc are, also when the caller's PATH is that of an ordinary user."""
_LAB = re.compile(r"(kvlab-(\d+)-(\d+)-\d+)-.+")
_FAILED_LINE = re.compile(r"Command failed -:(\d+)")

_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()
T = TypeVar("T")


class IprouteFailed(Internal):
    """An ``ip`` or ``tc`` command failed.

    Attributes:
        command: the command as in a shell; for a batch, the line that failed.
        stderr: its error output.
    """

    def __init__(self, command: str, stderr: str) -> None:
        super().__init__("the kernel or iproute2 refused a command", command=command, stderr=stderr)
        self.command = command
        self.stderr = stderr


def tool(name: str) -> str | None:
    """Path of ``ip`` or ``tc``; None: not installed."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_SBIN}")


def batch(name: str, lines: Sequence[str], namespace: str | None = None, *, go_on: bool = False) -> None:
    """Run many ``ip`` or ``tc`` commands in one process (about 3 ms in total).

    Args:
        name: ``"ip"`` or ``"tc"``.
        lines: commands without the leading name.
        namespace: network namespace; None: the caller's.
        go_on: run all commands even if some fail (and raise for the first afterwards).

    Raises:
        Unsupported: the tool is not installed.
        IprouteFailed: a command failed.
        DeadlineExceeded: no answer in time.
    """
    if not lines:
        return
    path = tool(name)
    if path is None:
        raise Unsupported(f"{name} is not installed: install iproute2")
    where = ["-n", namespace] if namespace else []
    arguments = [path, *where, *(["-force"] if go_on else []), "-batch", "-"]
    try:
        done = subprocess.run(
            arguments, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(f"{name} gave no answer", namespace=namespace, lines=len(lines)) from error
    if done.returncode:
        found = _FAILED_LINE.search(done.stderr)
        line = lines[int(found.group(1)) - 1] if found else f"-batch ({len(lines)} lines)"
        said = _FAILED_LINE.sub("", done.stderr).strip()
        raise IprouteFailed(" ".join([name, *where, line]), said or f"exit code {done.returncode}")


# ---------------------------------------------------------------- inside a namespace
def enter(fd: int) -> None:
    """Put the calling thread into the namespace behind ``fd`` (in a fresh child: the process).

    Raises:
        OSError: the kernel refuses.
    """
    if _libc.setns(fd, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def call_inside(fd: int, function: Callable[[], T]) -> T:
    """Call a function in a new thread inside a namespace; files and sockets that it opens stay bound to the namespace.

    Raises:
        OSError: raised by the function or by the kernel.
    """
    results: list[T] = []
    errors: list[OSError] = []

    def inside() -> None:
        try:
            enter(fd)
            results.append(function())
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=inside, name="netns-call")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def pids_inside(namespace: str) -> list[int]:
    """Processes whose main thread is in a named namespace (zombies are in none)."""
    try:
        wanted = (NETNS_DIR / namespace).stat().st_ino
    except FileNotFoundError:
        return []
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it ended, or is a zombie
                if os.stat(f"/proc/{entry}/ns/net").st_ino == wanted:
                    found.append(int(entry))
    return found


def kill_inside(namespace: str) -> int:
    """SIGKILL to every process in a namespace, until none is left there.

    Returns:
        How many were killed.

    Raises:
        DeadlineExceeded: some stay (uninterruptible sleep).
    """
    killed: set[int] = set()
    end_s = time.monotonic() + _KILL_TIMEOUT_S
    while pids := pids_inside(namespace):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        if time.monotonic() > end_s:
            raise DeadlineExceeded("processes outlive SIGKILL", namespace=namespace, pids=pids)
        time.sleep(0.001)
    return len(killed)


# ---------------------------------------------------------------- labs and their owners
def new_lab_name() -> str:
    """A name no other lab of this machine has."""
    pid = os.getpid()
    return f"kvlab-{pid}-{_start_ticks(pid)}-{next(_numbers)}"


def namespaces_of(lab: str) -> list[str]:
    """Named namespaces of one lab."""
    return [name for name in _all_namespaces() if name.startswith(f"{lab}-")]


def stale_labs() -> list[str]:
    """Labs whose owner is dead."""
    labs = {}
    for name in _all_namespaces():
        if found := _LAB.fullmatch(name):
            labs[found.group(1)] = (int(found.group(2)), int(found.group(3)))
    return sorted(lab for lab, (pid, start) in labs.items() if _start_ticks(pid) != start)


def remove_lab(lab: str) -> None:
    """Kill all processes of a lab and remove it. Links are removed with their namespaces.

    Raises:
        DeadlineExceeded: a process does not end.
        IprouteFailed: a namespace cannot be removed.
    """
    end_s = time.monotonic() + _REMOVE_TIMEOUT_S
    while names := namespaces_of(lab):
        for name in names:
            kill_inside(name)
        try:
            batch("ip", [f"netns del {name}" for name in names], go_on=True)
        except IprouteFailed:
            # the guard or a new lab may remove it at the same time
            if time.monotonic() > end_s:
                raise
            time.sleep(0.01)


def remove_stale() -> list[str]:
    """Remove the labs of dead owners. Return their names."""
    labs = stale_labs()
    for lab in labs:
        remove_lab(lab)
    return labs


def _all_namespaces() -> list[str]:
    try:
        return os.listdir(NETNS_DIR)
    except FileNotFoundError:
        return []


def _start_ticks(pid: int) -> int | None:
    """When a process started, in ticks since boot; None: no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else int(fields[18])


# ---------------------------------------------------------------- the guard
class LabReaper:
    """A process that removes a lab when this one ends, even by SIGKILL: it waits for the end of a pipe that only we hold open."""

    def __init__(self, lab: str) -> None:
        # a new session: a signal to the owner's group (Ctrl-C, timeout) must not reach the guard
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, lab], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def close(self) -> None:
        """End the guard process, after the lab is removed."""
        try:
            self._process.communicate(timeout=_COMMAND_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def _guard(lab: str) -> None:
    """Body of the guard: waits for the end of the owner and removes its lab."""
    sys.stdin.buffer.read()
    remove_lab(lab)


if __name__ == "__main__":
    _guard(sys.argv[1])
