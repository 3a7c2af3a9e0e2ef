"""The server process of a connector, which runs kill, stop and start again."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvstore.core.errors import Unavailable
from kvstore.embedded.children import start
from kvstore.embedded.ports import LOOPBACK, free_port

STALL_S: Final = 3.0
"""How long a stopped process stays so."""
START_S: Final = 120.0
_END_S: Final = 20.0
_POLL_S: Final = 0.1
PORTS: Final = ("port", "port2")
"""Names of the ports in a command. The server must listen on those that its command names."""
SPARE_PORT: Final = "spare_port"
"""Name of a port that is free, for a server that may listen on it."""


class ServerProcess:
    """A server; ``start`` and ``end`` any number of times, on the same ports.

    Args:
        command: program and arguments, in which ``{host}`` and the ports are replaced; empty: no server is needed.
        log: receives what it prints.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        ports = {name: str(free_port()) for name in (*PORTS, SPARE_PORT)}
        self.values: dict[str, str] = {"host": LOOPBACK, **ports} if command else {}
        """Values of the names in the command and in the connector's configuration."""
        self._command, self._log = command, log
        self._ports = [int(self.values[name]) for name in PORTS if any(f"{{{name}}}" in part for part in command)]
        self._process: subprocess.Popen[bytes] | None = None
        self._stalls: list[threading.Timer] = []

    def start(self, values: Mapping[str, str]) -> None:
        """Start the server unless it runs, and wait until it listens.

        Args:
            values: further names in its command.

        Raises:
            Unavailable: it did not start.
        """
        self.end_stalls()
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        if self._process is not None or not self._command:
            return
        command = [fill(part, {**values, **self.values}) for part in self._command]
        with self._log.open("ab") as log:
            self._process = start(command, stdout=log, stderr=log, new_session=True)
        end_s = time.monotonic() + START_S
        while not all(map(_listens, self._ports)):
            if self._process.poll() is not None or time.monotonic() > end_s:
                self.kill()
                raise Unavailable("the server of this connector did not start", command=shlex.join(command), log=self._log)
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Check that the server runs.

        Raises:
            Unavailable: it has exited.
        """
        if self._process is not None and (status := self._process.poll()) is not None:
            raise Unavailable("the server of this connector has exited", status=status, log=self._log)

    def end(self) -> None:
        """Stop the server gracefully. Kill it if it does not end in time."""
        self.end_stalls()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGINT)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def kill(self) -> None:
        """Kill the server."""
        if self._process is not None:
            self.end_stalls()
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stall(self) -> None:
        """Stop the server for a while."""
        if self._process is not None:
            self._stalls.append(stop_for_a_while(self._process.pid))

    def end_stalls(self) -> None:
        """Wait until the server continues."""
        for timer in self._stalls:
            timer.join()
        self._stalls.clear()


def stop_for_a_while(pid: int) -> threading.Timer:
    """Stop a process, and let it continue after ``STALL_S``. Join the timer before the process is ended."""
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(STALL_S, os.kill, (pid, signal.SIGCONT))
    timer.start()
    return timer


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace ``{name}`` by its value."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _listens(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=_POLL_S).close()
    except OSError:
        return False
    return True
