"""A whole store on one machine, as real processes: for ``kvstore up``, the demo, replays, tests and benchmarks.

Each daemon is a child process started with ``python -m kvstore.cli`` and killed with its parent (``PR_SET_PDEATHSIG``), even if
the parent is killed. Daemons publish their addresses in ready files. They listen on loopback by default. With a ``Launcher``
and an address they run elsewhere, for example on the hosts of a ``NetLab``.

Several metadata servers share the index: a folder of this machine, or a Valkey Cluster whose servers are child processes too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvstore.core.errors import DeadlineExceeded, Internal, InvalidArgument, NotFound, Unsupported, install_command
from kvstore.embedded.children import DaemonLaunchers, Launcher
from kvstore.embedded.ports import LOOPBACK, port_after
from kvstore.embedded.temp_dirs import TempDir
from kvstore.process.atomic_file import open_private
from kvstore.process.graceful_shutdown import OVERTIME_S
from kvstore.process.node_id import check_node_id
from kvstore.rpc.address import stays_on_host

if TYPE_CHECKING:
    from kvstore.embedded.valkey import ValkeyServers

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0
_GRPC_LINE = re.compile(r"[IWEF]\d{4} |WARNING: All log messages before absl::")
"""Log lines of gRPC's core: file names and line numbers of C++."""
_EVERY_HOST = ("0.0.0.0", "[::]")  # noqa: S104  # addresses that a client cannot connect to
_ERROR_MARK = "Error: "
_SHOWN_LINES = 10
_METADATA = "metadata"
_ADMIN = "admin"
_ONE_EACH = ("listen", "metrics_listen", "index_path", "advertise")
"""Settings that two metadata servers of one machine cannot share: only the first one has them."""


@dataclass(frozen=True, slots=True)
class DaemonHost:
    """Host of a daemon.

    Attributes:
        host: address that it listens on, at any port; without TLS unless settings enable it.
        launcher: starts the daemon; None: ``DaemonLaunchers.launcher``.
    """

    host: str = LOOPBACK
    launcher: Launcher | None = None

    def insecure(self, section: str) -> list[str]:
        """The ``--set`` argument that allows it to listen there without TLS."""
        return [] if stays_on_host(f"{self.host}:0") else [f"{section}.allow_insecure_remote=true"]


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node of a local cluster.

    Raises:
        InvalidArgument: ``node_id`` is not a valid node id.
    """

    node_id: str
    roles: tuple[str, ...] = ("prefill",)
    dram_bytes: int = 256 << 20
    nvme_bytes: int = 0
    """0: no NVMe volume."""
    write_back_to: str | None = None
    policy: str = "reuse-distance"
    settings: tuple[tuple[str, str], ...] = ()
    """Further ``--set node.<name>=<value>``."""
    place: DaemonHost = DaemonHost()

    def __post_init__(self) -> None:
        check_node_id(self.node_id)


@dataclass(slots=True)
class Daemon:
    """A child process and the contents of its ready file."""

    name: str
    process: subprocess.Popen[bytes]
    ready: dict[str, str]
    log_path: Path
    log_start: int = 0
    """Log bytes of earlier runs."""

    @property
    def address(self) -> str:
        """GRPC address, ``host:port``."""
        return self.ready["address"]

    @property
    def local_socket(self) -> str:
        """GRPC over the unix socket (nodes only)."""
        return self.ready["local_socket"]

    @property
    def metrics_address(self) -> str:
        """Address of ``/metrics``, ``host:port``; empty: not served."""
        return self.ready.get("metrics_address", "")

    def log_tail(self, lines: int = 30) -> str:
        """The end of this run's log."""
        return "\n".join(self._log_lines()[-lines:])

    def why(self) -> str:
        """Why it ended, from its log: the last error, then the end of the log."""
        lines = self._log_lines()
        if not lines:
            return "it logged nothing"
        reason = next((line for line in reversed(lines) if line.startswith(_ERROR_MARK)), lines[-1])
        rest = [line for line in lines if line is not reason]
        return "\n".join([reason.removeprefix(_ERROR_MARK), *rest[-_SHOWN_LINES:]])

    def ending(self) -> str:
        """How it ended, as a predicate, and why if its log says it. The process must have ended."""
        code = self.process.returncode
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with code {code}: {self.why().splitlines()[0]}"

    def _log_lines(self) -> list[str]:
        """Log lines of this run. gRPC's own lines are dropped if there are others."""
        with self.log_path.open("rb") as log:
            log.seek(self.log_start)
            lines = log.read().decode(errors="replace").splitlines()
        return [line for line in lines if not _GRPC_LINE.match(line)] or lines


class LocalCluster:
    """Metadata servers and nodes as child processes. A context manager; data is below ``base_dir`` and survives restarts.

    Args:
        nodes: the nodes to start.
        base_dir: folder for volumes, index, sockets and logs; None: a temporary one, removed at the end.
        metadata_settings: further ``--set metadata.<name>=<value>``.
        metadata_host: host of the metadata server.
        arguments: further arguments of every daemon, such as ``--config FILE``; settings of a single node or server win.
        socket_dir: parent folder of the folder for unix sockets; a short path.
        servers: number of metadata servers; they share the index. Their names are ``metadata``, ``metadata-2``, ...
        shards: primaries of the Valkey Cluster that holds the index; 0: the index is in a folder.
        replicas: Valkey servers beside each primary.

    Attributes:
        valkey: the servers of the Valkey Cluster; None: there are none.

    Raises:
        InvalidArgument: there are volumes, and the path of ``base_dir`` contains a comma.
        Unsupported: on entry, ``shards`` are wanted, and the Valkey server or its client library is missing.
    """

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        base_dir: Path | None = None,
        metadata_settings: Sequence[tuple[str, str]] = (),
        metadata_host: DaemonHost = DaemonHost(),
        arguments: Sequence[str] = (),
        socket_dir: Path = Path("/tmp"),  # noqa: S108  # a private folder is created in it
        *,
        servers: int = 1,
        shards: int = 0,
        replicas: int = 1,
    ) -> None:
        if base_dir is not None and "," in str(base_dir) and any(spec.nvme_bytes for spec in nodes):
            raise InvalidArgument(
                "base_dir must not contain a comma if there are volumes: commas separate volumes", folder=base_dir
            )
        self._specs = {spec.node_id: spec for spec in nodes}
        self._data: TempDir | None = None
        if base_dir is None:
            self._data = TempDir("kvstore-")
            base_dir = self._data.path
        self.base_dir = base_dir
        # unix socket paths are limited to 107 bytes: keep them out of deep folders
        socket_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._run = TempDir("kvs-", socket_dir)
        self._run_dir = self._run.path
        self._metadata_settings = tuple(metadata_settings)
        self._metadata_host = metadata_host
        self._arguments = tuple(arguments)
        self._daemons: dict[str, Daemon] = {}
        self._shards = shards
        self._replicas = replicas
        self.valkey: ValkeyServers | None = None
        names = [_METADATA, *(f"{_METADATA}-{number}" for number in range(2, servers + 1))]
        self._metadata_addresses = dict.fromkeys(names, f"{metadata_host.host}:0")
        self._first_listen: str | None = None
        """Address at which the first metadata server listens, with the port of its first start."""
        self._admin: tuple[tuple[tuple[str, str], ...], tuple[str, ...]] = (), ()
        """Settings and arguments of the admin server, with the address of its last start."""

    # ---- lifecycle ----
    def __enter__(self) -> Self:
        try:
            if self._shards:
                self.valkey = self._start_valkey()
            for name in self._metadata_addresses:
                self.start_metadata(name)
            for node_id in self._specs:
                self.start_node(node_id)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop all daemons and remove temporary folders."""
        for daemon in reversed(list(self._daemons.values())):
            daemon.process.terminate()
        for name in list(self._daemons):
            self._reap(name)
        if self.valkey is not None:
            self.valkey.close()
        self._run.close()
        if self._data is not None:
            self._data.close()

    def start_metadata(self, name: str = _METADATA) -> Daemon:
        """Start a metadata server; a restart uses its old port.

        If the settings name the port of the first server, each further one gets the next free port.
        """
        if name not in self._metadata_addresses:
            raise NotFound("unknown metadata server of this cluster", name=name)
        if name != _METADATA and self._metadata_addresses[name].endswith(":0"):
            self._metadata_addresses[name] = f"{self._metadata_host.host}:{self._port_beside_first()}"
        own_settings = {key: value for key, value in self._metadata_settings if name == _METADATA or key not in _ONE_EACH}
        if "listen" in own_settings and self._first_listen is not None:
            own_settings["listen"] = self._first_listen
        settings = [
            f"metadata.listen={self._metadata_addresses[name]}",
            f"metadata.index_path={self._index_path_of(name)}",
            f"metadata.metrics_listen={LOOPBACK}:0",
            *([] if self.valkey is None else [f"metadata.engine={self.valkey.url}"]),
            *self._metadata_host.insecure("metadata"),
            *(f"metadata.{key}={value}" for key, value in own_settings.items()),
        ]
        daemon = self._start(name, "metadata", settings, self._metadata_host)
        if name == _METADATA:
            self._first_listen = daemon.address
        host, _, port = daemon.address.rpartition(":")
        if host in _EVERY_HOST:
            host = self._metadata_host.host
        self._metadata_addresses[name] = f"{host}:{port}"  # `metadata.listen` of the settings may name another host
        return daemon

    def start_node(self, node_id: str) -> Daemon:
        """Start a node; a restart recovers its volumes."""
        spec = self._specs.get(node_id)
        if spec is None:
            raise NotFound("unknown node of this cluster", node_id=node_id)
        settings = [
            f"node.node_id={spec.node_id}",
            f"node.roles={','.join(spec.roles)}",
            f"node.run_dir={self._run_dir}",
            f"node.metadata={self.metadata_address}",
            f"node.dram={spec.dram_bytes}",
            f"node.policy={spec.policy}",
            f"node.listen={spec.place.host}:0",
            f"node.data_listen={spec.place.host}:0",
            f"node.metrics_listen={LOOPBACK}:0",
            *spec.place.insecure("node"),
        ]
        if spec.nvme_bytes:
            settings.append(f"node.nvme={self.volume_path(node_id)}:{spec.nvme_bytes}")
        if spec.write_back_to:
            settings.append(f"node.write_back_to={spec.write_back_to}")
        settings += [f"node.{name}={value}" for name, value in spec.settings]
        return self._start(node_id, "node", settings, spec.place)

    def start_admin(self, *settings: tuple[str, str], arguments: Sequence[str] = ()) -> Daemon:
        """Start an admin server on any free port.

        Args:
            settings: further ``--set admin.<name>=<value>``, which may set another address.
            arguments: further arguments of the admin server, after those of every daemon.
        """
        given = [f"admin.metadata={self.metadata_address}", f"admin.listen={LOOPBACK}:0"]
        given += [f"admin.{name}={value}" for name, value in settings]
        daemon = self._start(_ADMIN, "admin", given, DaemonHost(), arguments)
        self._admin = tuple({**dict(settings), "listen": daemon.address}.items()), tuple(arguments)
        return daemon

    def restart(self, name: str) -> Daemon:
        """Start an ended daemon again, with the settings of its last start. Metadata and admin servers keep their ports.

        Raises:
            KVStoreError: it did not start.
            OSError: its process cannot be made.
        """
        if name in self._metadata_addresses:
            return self.start_metadata(name)
        if name in self._specs:
            return self.start_node(name)
        settings, arguments = self._admin
        return self.start_admin(*settings, arguments=arguments)

    def stop(self, name: str) -> None:
        """Stop one daemon (``"metadata"``, ``"metadata-2"``, ``"admin"`` or a node id) by SIGTERM."""
        self._daemons[name].process.terminate()
        self._reap(name)

    def kill(self, name: str) -> None:
        """Kill one daemon with SIGKILL."""
        self._daemons[name].process.kill()
        self._reap(name)

    # ---- addresses and folders ----
    @property
    def metadata_address(self) -> str:
        """Addresses of the metadata servers, as nodes and clients accept them: separated by commas."""
        return ",".join(self._metadata_addresses.values())

    @property
    def metadata_addresses(self) -> dict[str, str]:
        """Address of each metadata server, by name."""
        return dict(self._metadata_addresses)

    @property
    def running(self) -> set[str]:
        """Names of the daemons that were started and not stopped or killed."""
        return set(self._daemons)

    def node(self, node_id: str) -> Daemon:
        """Return a running daemon."""
        return self._daemons[node_id]

    def volume_path(self, node_id: str) -> Path:
        """Folder of a node's NVMe volume."""
        return self.base_dir / f"{node_id}-nvme"

    @property
    def index_path(self) -> Path:
        """Folder of the first metadata server's index. All servers share it if there is no Valkey Cluster."""
        return self.base_dir / "index"

    # ---- internals ----
    def _port_beside_first(self) -> int:
        """Port of a further metadata server: 0, any, if the settings choose none for the first one."""
        chosen = dict(self._metadata_settings).get("listen", "").rpartition(":")[2]
        return port_after(int(chosen), self._metadata_host.host) if chosen.isdecimal() and chosen != "0" else 0

    def _index_path_of(self, name: str) -> Path:
        return self.index_path if name == _METADATA or not self._shards else self.base_dir / name / "index"

    def _start_valkey(self) -> ValkeyServers:
        try:
            from kvstore.embedded.valkey import ValkeyServers
        except ImportError as error:
            raise Unsupported(f"an index in Valkey requires the package hiredis: {install_command('valkey')}") from error
        return ValkeyServers(self._run_dir / "valkey", shards=self._shards, replicas=self._replicas)

    def _start(self, name: str, command: str, settings: Sequence[str], place: DaemonHost, more: Sequence[str] = ()) -> Daemon:
        ready_file = self._run_dir / f"{name}.ready"
        ready_file.unlink(missing_ok=True)
        self.base_dir.mkdir(parents=True, exist_ok=True)
        log_path = self.base_dir / f"{name}.log"
        arguments = [sys.executable, "-m", "kvstore.cli", command, *self._arguments, *more]
        for setting in (*settings, f"{command}.ready_file={ready_file}"):
            arguments += ["--set", setting]
        with open(log_path, "ab", opener=open_private) as log:  # logs name tenants and requests
            log_start = log.seek(0, os.SEEK_END)
            process = (place.launcher or DaemonLaunchers.launcher)(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        daemon = Daemon(name, process, {}, log_path, log_start)
        self._daemons[name] = daemon
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not ready_file.exists():
            if process.poll() is not None:
                raise Internal(f"{name} ended at start with code {process.returncode}: {daemon.why()}")
            if time.monotonic() > deadline_s:
                process.kill()
                with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, for example at a dead disk
                    process.wait(STOP_TIMEOUT_S)
                raise DeadlineExceeded(f"{name} was not ready after {START_TIMEOUT_S:.0f} s: {daemon.why()}")
            time.sleep(0.01)
        daemon.ready = json.loads(ready_file.read_text())
        return daemon

    def _reap(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        own_s = float(daemon.ready.get("stop_grace_s", 0)) + 2 * OVERTIME_S  # a node writes back until then, and ends by itself
        try:
            daemon.process.wait(max(STOP_TIMEOUT_S, own_s))
        except subprocess.TimeoutExpired:
            daemon.process.kill()
            daemon.process.wait(STOP_TIMEOUT_S)
