"""Child processes that end with whoever started them, started from processes that have threads of any kind.

``subprocess`` with a ``preexec_fn`` forks and runs Python in the child, where every lock is as some other thread left it; and
gRPC's own handlers run at each fork: they stop its threads, and with a poller at work that has failed or ended the parent
itself (fork with epoll). ``GRPC_ENABLE_FORK_SUPPORT=0`` in this process would come too late, as gRPC reads it when it is
imported, and would leave the locks. So ``start`` asks for nothing that takes code between fork and exec: CPython then uses
``vfork``, at which no handler runs, neither Python's nor ``pthread_atfork``'s. What must be done in the child does a program of
its own, this file, which then becomes the one that was meant.
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
"""How long a child may take until it is the program that was meant."""
_MOST_WORDS = 1_024
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """In a child: SIGKILL when the thread that started it ends."""
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
    """Starts a program that is killed when the *thread* that started it ends; returns once it runs.

    Args:
        argv: program and arguments.
        stdin: as of ``subprocess.Popen``.
        stdout: as of ``subprocess.Popen``.
        stderr: as of ``subprocess.Popen``.
        env: environment; None: ours.
        cwd: working folder; None: ours.
        new_session: it leads a session of its own.
        netns: descriptor of the network namespace that it runs in; None: ours.

    Raises:
        OSError: no such program, the kernel refuses, or it did not begin in time.
    """
    program = shutil.which(argv[0], path=(os.environ if env is None else env).get("PATH"))
    if program is None:
        raise FileNotFoundError(f"no such program: {argv[0]}")
    heard, told = os.pipe()
    with open(heard, "rb", buffering=0):
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid()), _word(netns), str(told), program, *argv],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=env,
                cwd=cwd,
                start_new_session=new_session,
                pass_fds=(told,) if netns is None else (told, netns),
            )
        finally:
            os.close(told)
        waiting = select.poll()
        waiting.register(heard)
        why = os.read(heard, _MOST_WORDS).decode(errors="replace") if waiting.poll(_BEGIN_S * 1_000) else "it takes too long"
    if not why:
        return process
    with process:  # its pipes are closed, and it is waited for
        process.kill()
    raise OSError(f"{argv[0]} cannot be started: {why}")


def _word(netns: int | None) -> str:
    return _NO_NAMESPACE if netns is None else str(netns)


def _become(parent: str, netns: str, program: str, *argv: str) -> None:
    """In the child. Only what the standard library has: neither the store nor packages beside it are to be found here.

    Raises:
        OSError: the kernel refuses.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before it could be told that we follow
        return
    if netns != _NO_NAMESPACE:
        if _libc.setns(int(netns), _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        os.close(int(netns))
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python as it starts, and by what it becomes unless told otherwise
        signal.signal(ignored, signal.SIG_DFL)
    os.execv(program, argv)  # noqa: S606  # without a shell is what is meant


class Launcher(Protocol):
    """Starts a daemon's process, which must end with this one. ``Host.popen`` of a lab is one."""

    def __call__(self, argv: Sequence[str], *, stdin: int, stdout: IO[bytes], stderr: IO[bytes]) -> subprocess.Popen[bytes]: ...


class DaemonLauncher(Protocol):
    """A ``Launcher`` on any host of a lab: ``netns`` is as of ``start``."""

    def __call__(
        self, argv: Sequence[str], *, stdin: int, stdout: IO[bytes], stderr: IO[bytes], netns: int | None = None
    ) -> subprocess.Popen[bytes]: ...


class EngineLauncher(Protocol):
    """Starts a served engine's process, which must end with this one."""

    def __call__(
        self, argv: Sequence[str], *, stdout: IO[bytes], stderr: IO[bytes], env: Mapping[str, str], new_session: bool
    ) -> subprocess.Popen[bytes]: ...


class Children:
    """How daemons and served engines that are given no launcher are started in this process.

    Attributes:
        launcher: starts daemons; whoever starts very many may have a quicker one.
        engines: starts engines, likewise.
    """

    launcher: ClassVar[DaemonLauncher] = start
    engines: ClassVar[EngineLauncher] = start


if __name__ == "__main__":
    _told = int(sys.argv.pop(3))
    os.set_inheritable(_told, False)  # whoever waits sees it closed when the program begins
    try:
        _become(*sys.argv[1:])
    except OSError as failed:
        os.write(_told, str(failed).encode()[:_MOST_WORDS])
    sys.exit(1)
