"""Daemons, commands and benchmarks for tests, forked from a process that has already imported their modules.

A daemon needs a second of a core to import its modules, a command half a second, a served vLLM ten, and the tests start
thousands. So a test run keeps one *nursery* per kind: a single-threaded Python that has imported only the modules of that
kind, and forks a child for each start (``nursery_process.py``). The child is an ordinary process: arguments, environment, folder,
outputs and exit code are those of a plain start, and it runs the same ``main``. Only nodes of test processes have one variable
more (``QUICK_NODE``). If environment variables could have changed the imports, the process is started the plain way; with
``--plain-daemons`` all are.

A nursery serves all test processes of a run. It ends when the run does, and its children end with it. A child also ends with the
process that asked for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, ClassVar

from kvstore.embedded.children import start
from kvstore.embedded.temp_dirs import TempDir

IMPORTED = {
    "metadata": ("kvstore.cli.commands.daemons.servers", "kvstore.metadata.main", "kvstore.observe.http"),
    "node": (
        "kvstore.cli.commands.daemons.servers",
        "kvstore.node.main",
        "kvstore.observe.http",
        "grpc._channel",
        "encodings.idna",
    ),
    "router": ("kvstore.cli.commands.daemons.router", "kvstore.router.main"),
    "admin": ("kvstore.cli.commands.daemons.admin", "kvstore.admin.main"),
}
"""Modules that each daemon imports before it serves; the first is the module of its command."""
COMMAND = "command"
"""The kind of all other commands."""
SCRIPT = "script"
"""The kind of the benchmarks."""
SERVER = "vllm.entrypoints.openai.api_server"
"""The kind of a served vLLM."""
QUICK_NODE = {"KVSTORE_NODE__PREFAULT": "false"}
"""A node needs a tenth of a second of a core to touch 64 MiB in advance. Nodes that commands start do so."""
MESSAGE_BYTES = 1 << 18
PLAIN = [sys.executable, "-m", "kvstore.cli"]
SERVED = [sys.executable, "-m", SERVER]
TASKSET = ["taskset", "--cpu-list"]
READY = b"ready"
REFUSED = b"refused"
OF_ONE_ENGINE = {
    "TOKENIZERS_PARALLELISM",
    "VLLM_ALLOW_INSECURE_SERIALIZATION",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_CPU_NUM_OF_RESERVED_CPU",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_SERVER_DEV_MODE",
}
"""Variables that engines read when they start, not when they are imported."""


class Nursling(subprocess.Popen[bytes]):
    """A child of a nursery, with the interface of ``Popen`` as far as tests use it: signals, ``poll`` and ``wait``."""

    def __init__(self, argv: Sequence[str], pid: int, connection: socket.socket) -> None:
        self.args = list(argv)
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = False  # the nursery reaps the child, not Popen
        self._ended = connection.detach()
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


class Launchers:
    """Starts daemons from the nurseries whose sockets are in a folder, and in the plain way without one. Thread-safe.

    Args:
        folder: of the sockets.
        of_nodes: variables of nodes, if this process does not set them.
    """

    def __init__(self, folder: Path, of_nodes: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._of_nodes = of_nodes or {}

    def __call__(
        self, argv: Sequence[str], *, stdin: int, stdout: IO[bytes], stderr: IO[bytes], netns: int | None = None
    ) -> subprocess.Popen[bytes]:
        """A ``Launcher``."""
        if list(argv[: len(PLAIN)]) == PLAIN:
            assert stdin == subprocess.DEVNULL
            kind = argv[len(PLAIN)] if argv[len(PLAIN)] in IMPORTED else COMMAND
            environment = {**(self._of_nodes if kind == "node" else {}), **os.environ}
            process = self._from(kind, argv, argv[len(PLAIN) :], environment, stdout, stderr, netns)
            if process is not None:
                return process
        return start(argv, stdin=stdin, stdout=stdout, stderr=stderr, netns=netns)

    def serve(
        self, argv: Sequence[str], *, stdout: IO[bytes], stderr: IO[bytes], env: Mapping[str, str], new_session: bool
    ) -> subprocess.Popen[bytes]:
        """An ``EngineLauncher``."""
        cores, words = ([int(argv[2])], argv[3:]) if list(argv[:2]) == TASKSET else (None, argv)
        if list(words[: len(SERVED)]) == SERVED:
            process = self._engine(argv, words[len(SERVED) :], env, stdout, stderr, session=new_session, cores=cores)
            if process is not None:
                return process
        return start(argv, stdout=stdout, stderr=stderr, env=env, new_session=new_session)

    def run_engine(
        self, argv: Sequence[str], *, stdout: IO[bytes], stderr: IO[bytes], env: Mapping[str, str], new_session: bool
    ) -> subprocess.Popen[bytes]:
        """Start ``[sys.executable, SCRIPT, ARGUMENTS...]``, a script that imports vLLM."""
        process = self._engine(argv, argv[1:], env, stdout, stderr, session=new_session)
        return process or start(argv, stdout=stdout, stderr=stderr, env=env, new_session=new_session)

    def run_script(self, argv: Sequence[str], stdout: IO[bytes], stderr: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start ``[sys.executable, SCRIPT, ARGUMENTS...]``."""
        assert argv[0] == sys.executable
        process = self._from(SCRIPT, argv, argv[1:], os.environ, stdout, stderr)
        return process or start(argv, stdout=stdout, stderr=stderr)

    def begin(self, kind: str, seen: Mapping[str, str] | None = None) -> None:
        """Start the nursery of a kind if there is none and this process may."""

    def _engine(
        self,
        argv: Sequence[str],
        arguments: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[bytes],
        stderr: IO[bytes],
        **more: Any,
    ) -> Nursling | None:
        # What differs from this process: vLLM and its libraries, once imported here, change this process's environment, too.
        own = {name: value for name, value in env.items() if os.environ.get(name) != value}
        seen = {name: value for name, value in own.items() if name not in OF_ONE_ENGINE}
        return self._from(SERVER, argv, arguments, env, stdout, stderr, seen=seen, **more)

    def _from(
        self,
        kind: str,
        argv: Sequence[str],
        arguments: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[bytes],
        stderr: IO[bytes],
        netns: int | None = None,
        **more: Any,
    ) -> Nursling | None:
        """Fork a child from a kind's nursery. Returns None if there is none, or imports could differ in this environment."""
        self.begin(kind, more.get("seen"))
        asked = {"arguments": list(arguments), "environment": dict(env), "folder": os.getcwd(), **more}
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
            connection.connect(str(self.folder / kind))
            with open(os.devnull, "rb") as nothing:
                given = [nothing.fileno(), stdout.fileno(), stderr.fileno(), *([] if netns is None else [netns])]
                socket.send_fds(connection, [json.dumps(asked).encode()], given)
            said = connection.recv(16)
        except (FileNotFoundError, ConnectionError):
            said = REFUSED
        assert said, f"the nursery of {kind} has ended: see its error above"
        if said == REFUSED:
            connection.close()
            return None
        return Nursling(argv, int(said), connection)


class Nurseries(Launchers):
    """The nurseries of a test run, each started on first use.

    Args:
        folder: of the sockets; None: of a new run, which ``close`` ends.
        owner: process whose end ends the nurseries; None: this one.

    Attributes:
        current: those of this test process, if it has any.
    """

    current: ClassVar[Nurseries | None] = None

    def __init__(self, folder: Path | None = None, owner: int | None = None) -> None:
        self._sockets = TempDir("kvs-", Path("/tmp")) if folder is None else None
        super().__init__(folder if self._sockets is None else self._sockets.path, QUICK_NODE)  # type: ignore[arg-type]
        self.owner = os.getpid() if owner is None else owner
        self._lock = threading.Lock()
        self._begun: dict[str, subprocess.Popen[bytes] | None] = {}

    def begin(self, kind: str, seen: Mapping[str, str] | None = None) -> None:
        """Start the nursery of a kind if there is none. ``seen``: variables that its imports read; None: the daemons'."""
        with self._lock:
            if kind not in self._begun:
                with (self.folder / f"{kind}.lock").open("w") as one_of_the_run:
                    fcntl.flock(one_of_the_run, fcntl.LOCK_EX)
                    self._begun[kind] = None if (self.folder / kind).exists() else self._start(kind, seen)

    def _start(self, kind: str, seen: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
        began, begins = os.pipe()
        with os.fdopen(began, "rb") as said, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self.folder / kind))
            listener.listen(64)
            program = Path(__file__).with_name("nursery_process.py")
            words = [kind, str(self.folder), str(self.owner), str(listener.fileno()), str(begins), json.dumps(seen)]
            process = subprocess.Popen(
                [sys.executable, str(program), *words],
                env={**os.environ, **(seen or {}), "OPENBLAS_NUM_THREADS": "1"},  # it would start threads on import
                pass_fds=[listener.fileno(), begins],
                stdin=subprocess.DEVNULL,
            )
            os.close(begins)
            assert said.read() == READY, f"the nursery of {kind} did not start: see its error above"
        return process

    def close(self) -> None:
        """End the run's nurseries, if this process began the run."""
        if self._sockets is None:
            return
        for process in filter(None, self._begun.values()):
            process.kill()
            process.wait(10)
        self._begun.clear()
        self._sockets.close()


def cli(*daemons: str) -> list[str]:
    """The words that run ``kvstore``, to be followed by its arguments: forked from the nursery of commands, if there is one.

    Args:
        daemons: kinds of daemons that the command starts, which are then forked, too.
    """
    nurseries = Nurseries.current
    if nurseries is None:
        return PLAIN
    for kind in (COMMAND, *daemons):
        nurseries.begin(kind)
    program = Path(__file__).with_name("nursery_command.py")
    return [sys.executable, "-I", "-S", str(program), str(nurseries.folder)]


def run_engine(
    argv: Sequence[str], timeout_s: float, *, env: Mapping[str, str] = os.environ, new_session: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``[sys.executable, SCRIPT, ARGUMENTS...]``, a script that imports vLLM, and all processes of its session if it is new.

    Raises:
        subprocess.TimeoutExpired: it did not end in time.
    """
    begin = start if Nurseries.current is None or find_spec("vllm") is None else Nurseries.current.run_engine
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = begin(argv, stdout=out, stderr=errors, env=env, new_session=new_session)
        try:
            code = process.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if new_session else os.kill)(process.pid, signal.SIGKILL)
            process.wait()
        said = [os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace") for file in (out, errors)]
    return subprocess.CompletedProcess(argv, code, *said)
