"""Several metadata servers on one host that share an index, as processes: each may be killed, stopped and started again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from kvstore.embedded.cluster import Daemon, LocalCluster, NodeSpec
from support.index_writes import writes_held
from support.ports import free_ports
from support.wait import wait_until


class ServerPair(LocalCluster):
    """A local cluster with two metadata servers, ``metadata`` and ``metadata-2``.

    Args:
        nodes: the nodes.
        base_dir: folder of all processes.
        engine: the setting ``metadata.engine`` of both servers.
    """

    NAMES = ("metadata", "metadata-2")

    def __init__(self, nodes: Sequence[NodeSpec], base_dir: Path, engine: str = "lmdb") -> None:
        settings = {"node_ttl": "2500ms", "heartbeat_interval": "200ms", "metrics_listen": "none", "engine": engine}
        super().__init__(nodes, base_dir, metadata_settings=tuple(settings.items()), servers=len(self.NAMES))
        ports = dict(zip(self.NAMES, free_ports(len(self.NAMES)), strict=True))  # no other process may take them meanwhile
        self._is_in_valkey = engine != "lmdb"
        self._metadata_addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}

    @property
    def addresses(self) -> dict[str, str]:
        """Address of each server, by name."""
        return self.metadata_addresses

    @property
    def setting(self) -> str:
        """The setting that names both servers."""
        return self.metadata_address

    def start_server(self, name: str) -> Daemon:
        """Start a server, or restart it on its port."""
        return self.start_metadata(name)

    def name_of(self, address: str) -> str:
        """Name of the server at an address."""
        return next(name for name, known in self.addresses.items() if known == address)

    def pause(self, name: str) -> None:
        """Stop a server without closing its connections, and not inside a write of LMDB, which would block the other one."""
        process = self.node(name).process.pid
        with nullcontext() if self._is_in_valkey else writes_held(self.index_path):
            os.kill(process, signal.SIGSTOP)
            wait_until(lambda: _is_stopped(process))

    def resume(self, name: str) -> None:
        """Let a stopped server continue."""
        os.kill(self.node(name).process.pid, signal.SIGCONT)


@contextmanager
def server_pair(base_dir: Path, *nodes: NodeSpec, engine: str = "lmdb") -> Iterator[ServerPair]:
    """Two running metadata servers and nodes."""
    with ServerPair(nodes, base_dir, engine) as pair:
        yield pair


def _is_stopped(process: int) -> bool:
    """Whether all threads of a process are stopped: one that still runs could begin a write."""
    try:
        states = [
            (thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in Path(f"/proc/{process}/task").iterdir()
        ]
    except (FileNotFoundError, ProcessLookupError):  # a thread has just ended
        return False
    return set(states) == {"T"}
