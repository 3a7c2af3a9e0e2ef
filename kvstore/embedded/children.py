"""Child processes that end with the thread that started them. Safe in processes with threads of any kind.

``subprocess`` with a ``preexec_fn`` forks and runs Python in the child, where other threads may hold any lock. gRPC also
installs fork handlers: they stop its threads, and with an active poller they have failed or ended the parent.
``GRPC_ENABLE_FORK_SUPPORT=0`` would be too late in this process, because gRPC reads it at import, and it would not help with
the locks. So ``start`` requests nothing that runs code between fork and exec: CPython then uses ``vfork``, which runs no
handlers of Python or ``pthread_atfork``. The setup in the child is done by a separate program, this file, which then executes
the requested one.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, ClassVar, Protocol

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
_NO_NAMESPACE = "-"
_BEGIN_S = 30.0
"""How long a child may take to execute the requested program."""
_MOST_WORDS = 1_024
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """In a child: request SIGKILL when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def start(
    argv: Sequence[str],
    *,
    stdin: int | IO[bytes] | None = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    new_session: bool = False,
    netns: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program that is killed when the *thread* that started it ends. Returns after it executes.

    Args:
        argv: program and arguments.
        stdin: see ``subprocess.Popen``.
        stdout: see ``subprocess.Popen``.
        stderr: see ``subprocess.Popen``.
        env: environment; None: inherited.
        cwd: working folder; None: inherited.
        new_session: start a new session.
        netns: descriptor of its network namespace; None: inherited.

    Raises:
        OSError: the program does not exist, the kernel refused, or it did not start in time.
    """
    program = shutil.which(argv[0], path=(os.environ if env is None else env).get("PATH"))
    if program is None:
        raise FileNotFoundError(f"no such program: {argv[0]}")
    status_read, status_write = os.pipe()
    with open(status_read, "rb", buffering=0):
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid()), _word(netns), str(status_write), program, *argv],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=env,
                cwd=cwd,
                start_new_session=new_session,
                pass_fds=(status_write,) if netns is None else (status_write, netns),
            )
        finally:
            os.close(status_write)
        waiting = select.poll()
        waiting.register(status_read)
        why = (
            os.read(status_read, _MOST_WORDS).decode(errors="replace")
            if waiting.poll(_BEGIN_S * 1_000)
            else "it did not start in time"
        )
    if not why:
        return process
    with process:  # closes its pipes and waits for it
        process.kill()
    raise OSError(f"{argv[0]} failed to start: {why}")


def _word(netns: int | None) -> str:
    return _NO_NAMESPACE if netns is None else str(netns)


def _become(parent: str, netns: str, program: str, *argv: str) -> None:
    """Set up the child and execute the program. Uses only the standard library: no other package is importable here.

    Raises:
        OSError: the kernel refuses.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # the parent ended before the signal was set
        return
    if netns != _NO_NAMESPACE:
        if _libc.setns(int(netns), _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        os.close(int(netns))
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python and the executed program may have changed it
        signal.signal(ignored, signal.SIG_DFL)
    os.execv(program, argv)  # noqa: S606  # without a shell is what is meant


class Launcher(Protocol):
    """Starts a daemon's process, which must end with this one. ``Host.popen`` of a lab implements it."""

    def __call__(self, argv: Sequence[str], *, stdin: int, stdout: IO[bytes], stderr: IO[bytes]) -> subprocess.Popen[bytes]: ...


class DaemonLauncher(Protocol):
    """A ``Launcher`` for any host of a lab: ``netns`` as in ``start``."""

    def __call__(
        self, argv: Sequence[str], *, stdin: int, stdout: IO[bytes], stderr: IO[bytes], netns: int | None = None
    ) -> subprocess.Popen[bytes]: ...


class EngineLauncher(Protocol):
    """Starts a served engine's process, which must end with this one."""

    def __call__(
        self, argv: Sequence[str], *, stdout: IO[bytes], stderr: IO[bytes], env: Mapping[str, str], new_session: bool
    ) -> subprocess.Popen[bytes]: ...


class DaemonLaunchers:
    """Default launchers of daemons and served engines in this process.

    Attributes:
        launcher: starts daemons; tests replace it by a faster one.
        engines: starts served engines; also replaceable.
    """

    launcher: ClassVar[DaemonLauncher] = start
    engines: ClassVar[EngineLauncher] = start


if __name__ == "__main__":
    _status_pipe = int(sys.argv.pop(3))
    os.set_inheritable(_status_pipe, False)  # closed by exec, which ends the caller's wait
    try:
        _become(*sys.argv[1:])
    except OSError as failed:
        os.write(_status_pipe, str(failed).encode()[:_MOST_WORDS])
    sys.exit(1)
