"""A nursery: imports the modules of one kind, and forks a child for each process that a test asks for (see ``nursery.py``).

``nursery_process.py KIND FOLDER OWNER LISTENER READY SEEN``: OWNER is a process, LISTENER and READY are descriptors. A process
that wants a child connects to the listener and sends one message with descriptors: input, output, errors, and the namespace of
a lab host if there is one. The nursery responds with the number of the child, and with its exit code at its end. It kills a child
whose connection is closed, and ends with its owner.
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
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvstore.embedded.children import DaemonLaunchers, die_with_parent
from nursery import COMMAND, IMPORTED, MESSAGE_BYTES, READY, REFUSED, SCRIPT, SERVER, Launchers

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
OF_SERVING = ("encodings.idna", "grpc._channel")
"""Modules that are imported at the first channel or address."""
OF_COMMANDS = (
    "grpc.experimental",
    "grpc_health.v1.health_pb2_grpc",
    "kvclient",
    "kvproto.v1.admin_pb2_grpc",
    "kvproto.v1.metadata_pb2_grpc",
    "kvproto.v1.node_pb2_grpc",
    "kvstore.control_api.commands",
    "kvstore.control_api.queries",
    "kvstore.doctor.collect",
    "kvstore.embedded.restarts",
    "kvstore.observe.history",
    "kvstore.rpc.health_probe",
)
"""Modules that commands import when they run."""
OF_SCRIPTS = ("harness", "kvclient", "kvstore.embedded.cluster", "rig")
"""Modules that most benchmarks import."""
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
    "TZ",
)
"""Prefixes of variables that imports read. ``LD_`` is left out for daemons: vLLM sets it in the test process."""
OF_FILES = {"PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}
"""Variables about how Python writes files."""
REPOSITORY = Path(__file__).resolve().parent.parent
OWN_PATHS = {str(REPOSITORY / name) for name in (".", "clients", "proto")}


def seen_by_imports(kind: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that modules and their libraries may read while they are imported, if they change anything."""
    prefixes = SEEN_BY_IMPORTS if kind in IMPORTED else (*SEEN_BY_IMPORTS, "LD_")
    seen = {name: value for name, value in environment.items() if value and name.startswith(prefixes)}
    paths = {os.path.abspath(REPOSITORY / path) for path in seen.get("PYTHONPATH", "").split(os.pathsep)}
    if paths <= OWN_PATHS:  # a nursery imports the checkout's modules in any case
        seen.pop("PYTHONPATH", None)
    if seen.get("GRPC_VERBOSITY") == "NONE":  # like `main`, before gRPC is imported
        del seen["GRPC_VERBOSITY"]
    return {name: value for name, value in seen.items() if name not in OF_FILES}


def keep(kind: str, owner: int, listener: socket.socket, ready: int, seen: Mapping[str, str]) -> None:
    """Fork children until the owner has ended. Returns in each child, which then runs its program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process
    sys.path[0] = os.getcwd()  # not the tests' folder, whose files are not modules of the child
    _import(kind)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads cannot be forked"
    gc.collect()
    gc.freeze()
    os.write(ready, READY)
    os.close(ready)
    ended = os.pidfd_open(owner)
    children: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> pid, connection
    connections: dict[int, socket.socket] = {listener.fileno(): listener}
    poll = select.poll()
    for watched in (ended, listener.fileno()):
        poll.register(watched, select.POLLIN)
    while True:
        fd = poll.poll()[0][0]  # one at a time: descriptors are closed and used again
        if fd in children:
            pid, connection = children.pop(fd)
            poll.unregister(fd)
            os.close(fd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if connections.pop(connection.fileno(), None) is not None:
                poll.unregister(connection)
                with contextlib.suppress(OSError):  # its owner ended first
                    connection.send(str(code).encode())
            connection.close()
            continue
        if fd == ended:
            os._exit(0)
        if connections[fd] is listener:
            connection, _ = listener.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MESSAGE_BYTES)
            connections[connection.fileno()] = connection
            poll.register(connection, select.POLLIN)
            continue
        connection = connections[fd]
        try:
            message, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 4)
        except ConnectionError:
            message, fds = b"", []
        asked = json.loads(message) if message else {}
        if asked and asked.get("seen", seen_by_imports(kind, asked["environment"])) == seen:
            pid = os.fork()
            if pid == 0:
                die_with_parent()
                for pidfd in (ended, *children):
                    os.close(pidfd)
                for other in connections.values():
                    other.close()
                _become(asked, fds)
                return
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, connection
            poll.register(pidfd, select.POLLIN)
            with contextlib.suppress(OSError):  # the client has ended: its connection reads as closed next
                connection.send(str(pid).encode())
        else:
            poll.unregister(connection)
            del connections[fd]
            mine = [one for one in children.values() if one[1] is connection]
            if asked:
                with contextlib.suppress(OSError):  # likewise
                    connection.send(REFUSED)
            for pid, _ in mine:  # their owner ended
                os.kill(pid, signal.SIGKILL)
            if not mine:
                connection.close()
        for given in fds:
            os.close(given)


def _import(kind: str) -> None:
    if kind != SERVER:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # like `main`, before gRPC is imported
    if kind == SCRIPT:
        sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    if kind in IMPORTED:
        importlib.import_module("kvstore.cli.app").root.get_command(None, kind)
    elif kind == COMMAND:
        root = importlib.import_module("kvstore.cli.app").root
        for name in set(root.list_commands(None)) - IMPORTED.keys():  # daemons have nurseries of their own
            root.get_command(None, name)
    for module in (*{**IMPORTED, COMMAND: OF_COMMANDS, SCRIPT: OF_SCRIPTS, SERVER: SERVES}[kind], *OF_SERVING):
        importlib.import_module(module)


def _become(asked: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Apply the arguments, environment, folder and files of a plain start, and the lab host's namespace if there is one."""
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
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
    tempfile.tempdir = None  # found by TMPDIR
    sys.argv = ["kvstore", *asked["arguments"]]


def _fork_engine_core() -> None:
    """Let vLLM fork the process of its engine core. On CPUs vLLM spawns that process, which then imports vLLM again."""
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)  # type: ignore[assignment]
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # the event loop that it wakes is the server's


def main() -> NoReturn:
    kind, folder, owner, listener, ready, words = sys.argv[1:]
    seen = json.loads(words)
    keep(
        kind,
        int(owner),
        socket.socket(fileno=int(listener)),
        int(ready),
        seen_by_imports(kind, os.environ) if seen is None else seen,
    )
    DaemonLaunchers.launcher = Launchers(Path(folder))
    if kind == SCRIPT or (kind == SERVER and sys.argv[1].endswith(".py")):
        sys.argv = sys.argv[1:]
        sys.path[0] = str(Path(sys.argv[0]).parent)  # like a plain start
        runpy.run_path(sys.argv[0], run_name="__main__")
    elif kind == SERVER:
        _fork_engine_core()
        runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
    else:
        runpy.run_module("kvstore.cli", run_name="__main__", alter_sys=True)
    raise SystemExit(0)


if __name__ == "__main__":
    main()
