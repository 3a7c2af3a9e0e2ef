"""Daemons for tests, forked from a process that has already imported their modules, in a tenth of the processor time.

A daemon needs a second of a core to import its modules, a served vLLM ten, and the tests start more than a thousand daemons. So a
test process keeps one *nursery* per kind: a single-threaded Python that has imported only the modules of that kind, and forks a
child for each start. The child is an ordinary process: arguments, environment, folder, outputs and exit code are those of a plain
start, and it runs the same ``main``. If environment variables could have changed the imports, a daemon is started the plain way;
with ``--plain-daemons`` all are.

A nursery ends when its test process does, and its children end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NoReturn

from kvstore.embedded.children import die_with_parent, start

IMPORTED = {
    "metadata": ("kvstore.cli.commands.daemons.servers", "kvstore.metadata.main", "kvstore.observe.http"),
    "node": ("kvstore.cli.commands.daemons.servers", "kvstore.node.main", "kvstore.observe.http"),
    "router": ("kvstore.cli.commands.daemons.router", "kvstore.router.main"),
    "admin": ("kvstore.cli.commands.daemons.admin", "kvstore.admin.main"),
}
"""Modules that each daemon imports before it serves; the first is the module of its command."""
SERVER = "vllm.entrypoints.openai.api_server"
SERVES = (
    SERVER,
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "kvclient.engines.vllm.pd_connector",
)
"""Modules that a served engine imports before it serves."""
MESSAGE_BYTES = 1 << 18
PLAIN = [sys.executable, "-m", "kvstore.cli"]
SERVED = [sys.executable, "-m", SERVER]
TASKSET = ["taskset", "--cpu-list"]
READY = b"ready"
CLONE_NEWNET = 0x40000000
SEEN_BY_IMPORTS = (
    "GRPC_",
    "KVSTORE_NATIVE",
    "LC_",
    "LANG",
    "NPY_",
    "OTEL_",
    "PROMETHEUS_",
    "PROTOCOL_BUFFERS_",
    "PYDANTIC_",
    "PYTHON",
)
"""Prefixes of variables that imports read. Not ``LD_``: the loader reads it at an exec, and vLLM sets it in the test process."""
OF_ONE_ENGINE = {"VLLM_CPU_OMP_THREADS_BIND", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"}
"""Variables that engines read when they start, not when they are imported."""


class Nursling(subprocess.Popen[bytes]):
    """A child of a nursery, with the interface of ``Popen`` as far as tests use it: signals, ``poll`` and ``wait``."""

    def __init__(self, argv: Sequence[str], pid: int, ended: int) -> None:
        self.args = list(argv)
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = False  # the nursery reaps the child, not Popen
        self._ended = ended
        self._reading = threading.Lock()

    def __del__(self) -> None:
        os.close(self._ended)  # not earlier: another thread may wait for it

    def poll(self) -> int | None:
        self._await_end(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._await_end(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def _await_end(self, timeout_s: float | None) -> None:
        """Read the exit code. A killed nursery sends none: its children were killed with it."""
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._ended, select.POLLIN)
            if poll.poll(None if timeout_s is None else 1e3 * timeout_s):
                with self._reading:
                    if self.returncode is None:
                        said = os.read(self._ended, 16)
                        self.returncode = int(said) if said else -signal.SIGKILL


@dataclass(frozen=True)
class _Nursery:
    """The nursery of one kind: its process, its socket, and the environment variables that its imports may have read."""

    process: subprocess.Popen[bytes]
    asked: socket.socket
    seen: dict[str, str]


class Nurseries:
    """The nurseries of one test process, each started on first use. A ``Launcher``; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[str, _Nursery] = {}

    def __call__(
        self, argv: Sequence[str], *, stdin: int, stdout: IO[bytes], stderr: IO[bytes], netns: int | None = None
    ) -> subprocess.Popen[bytes]:
        command = argv[len(PLAIN)] if list(argv[: len(PLAIN)]) == PLAIN else ""
        if command in IMPORTED:
            assert stdin == subprocess.DEVNULL
            asked = {"arguments": list(argv[len(PLAIN) :]), "environment": dict(os.environ)}
            process = self._from(command, _seen_by_imports(), asked, argv, stdout, stderr, netns)
            if process is not None:
                return process
        return start(argv, stdin=stdin, stdout=stdout, stderr=stderr, netns=netns)

    def serve(
        self, argv: Sequence[str], *, stdout: IO[bytes], stderr: IO[bytes], env: Mapping[str, str], new_session: bool
    ) -> subprocess.Popen[bytes]:
        """An ``EngineLauncher``."""
        cores, words = ([int(argv[2])], argv[3:]) if list(argv[:2]) == TASKSET else (None, argv)
        if list(words[: len(SERVED)]) == SERVED:
            asked = {"arguments": list(words[len(SERVED) :]), "environment": dict(env), "session": new_session, "cores": cores}
            # What differs from this process: vLLM and its libraries, once imported here, change this process's environment, too.
            own = {name: value for name, value in env.items() if os.environ.get(name) != value}
            seen = {name: value for name, value in own.items() if name not in OF_ONE_ENGINE}
            process = self._from(SERVER, seen, asked, argv, stdout, stderr)
            if process is not None:
                return process
        return start(argv, stdout=stdout, stderr=stderr, env=env, new_session=new_session)

    def _from(
        self,
        kind: str,
        seen: dict[str, str],
        asked: dict[str, Any],
        argv: Sequence[str],
        stdout: IO[bytes],
        stderr: IO[bytes],
        netns: int | None = None,
    ) -> Nursling | None:
        """Fork a child from a kind's nursery. Returns None if imports could differ in this environment."""
        with self._lock:
            nursery = self._begun.get(kind)
            if nursery is None:
                nursery = self._begun[kind] = _begin(kind, seen)
            if nursery.seen != seen:
                return None
            given = [stdout.fileno(), stderr.fileno(), *([] if netns is None else [netns])]
            return _fork(nursery, argv, asked, given)

    def close(self) -> None:
        """End all nurseries."""
        for nursery in self._begun.values():
            nursery.asked.close()
        for nursery in self._begun.values():
            nursery.process.wait(10)
        self._begun.clear()


def _seen_by_imports() -> dict[str, str]:
    """Return the variables that a daemon's modules and their libraries may read while they are imported."""
    return {name: value for name, value in os.environ.items() if name.startswith(SEEN_BY_IMPORTS)}


def _begin(kind: str, seen: dict[str, str]) -> _Nursery:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, kind, str(theirs.fileno())],
            env={**os.environ, **seen, "OPENBLAS_NUM_THREADS": "1"},  # it would start threads on import
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    assert ours.recv(16) == READY, f"the nursery of {kind} did not start: see its error above"
    return _Nursery(process, ours, seen)


def _fork(nursery: _Nursery, argv: Sequence[str], asked: dict[str, Any], given: Sequence[int]) -> Nursling:
    ended, says = os.pipe()
    try:
        message = json.dumps({**asked, "folder": os.getcwd()}).encode()
        socket.send_fds(nursery.asked, [message], [says, *given])
        pid = int(nursery.asked.recv(16))
    finally:
        os.close(says)
    return Nursling(argv, pid, ended)


# ---------------------------------------------------------------- in the nursery
def keep(kind: str, asked: socket.socket) -> None:
    """Fork children until the test process has ended. Returns in each child, which then runs its daemon."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process
    sys.path[0] = os.getcwd()  # not the tests' folder, whose files are not modules of the daemon
    if kind in IMPORTED:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # like `main`, before gRPC is imported
        importlib.import_module("kvstore.cli.app").root.get_command(None, kind)
    for module in IMPORTED.get(kind, SERVES):
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads cannot be forked"
    gc.collect()
    gc.freeze()
    asked.send(READY)
    says_of: dict[int, tuple[int, int]] = {}  # pidfd -> pid, pipe
    poll = select.poll()
    poll.register(asked.fileno(), select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != asked.fileno():
                pid, says = says_of.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                with contextlib.suppress(BrokenPipeError):  # no test waits for it
                    os.write(says, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(says)
                continue
            message, fds, _, _ = socket.recv_fds(asked, MESSAGE_BYTES, 4)
            if not message:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                die_with_parent()
                for pidfd, (_, pipe) in says_of.items():
                    os.close(pidfd)
                    os.close(pipe)
                asked.close()
                _become(json.loads(message), fds)
                return
            for given in fds[1:]:
                os.close(given)
            pidfd = os.pidfd_open(pid)
            says_of[pidfd] = pid, fds[0]
            poll.register(pidfd, select.POLLIN)
            asked.send(str(pid).encode())


def _become(asked: dict[str, Any], fds: Sequence[int]) -> None:
    """Apply the arguments, environment, folder and outputs of a plain start, and the lab host's namespace if there is one."""
    for number, fd in zip((1, 2), fds[1:3], strict=True):
        os.dup2(fd, number)
    for netns in fds[3:]:
        if ctypes.CDLL(None, use_errno=True).setns(netns, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "the host's namespace cannot be entered")
    for fd in fds:
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked.get("session"):
        os.setsid()
    if asked.get("cores"):
        os.sched_setaffinity(0, asked["cores"])
    os.chdir(asked["folder"])
    for name in set(os.environ) - set(asked["environment"]):
        del os.environ[name]
    os.environ.update(asked["environment"])
    sys.path[0] = asked["folder"]  # like `-m`
    sys.argv = ["kvstore", *asked["arguments"]]


def _fork_engine_core() -> None:
    """Let vLLM fork the process of its engine core. On CPUs vLLM spawns that process, which then imports vLLM again."""
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)  # type: ignore[assignment]
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # the event loop that it wakes is the server's


def main() -> NoReturn:
    """``nursery.py KIND FD``."""
    kind, asked = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    keep(kind, asked)
    if kind == SERVER:
        _fork_engine_core()
        runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
    else:
        importlib.import_module("kvstore.cli.app").main()
    raise SystemExit(0)


if __name__ == "__main__":
    main()
