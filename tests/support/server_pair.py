"""Several metadata servers on one host that share an index, as processes: each may be killed, stopped and started again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstore.embedded.cluster import Daemon, DaemonHost, LocalCluster, NodeSpec
from support.ports import free_ports


class ServerPair(LocalCluster):
    """A local cluster whose nodes know two metadata servers, ``metadata`` and ``metadata-2``.

    Args:
        nodes: the nodes.
        base_dir: folder of all processes.
        engine: the setting ``metadata.engine`` of both servers.
    """

    NAMES = ("metadata", "metadata-2")

    def __init__(self, nodes: Sequence[NodeSpec], base_dir: Path, engine: str = "lmdb") -> None:
        super().__init__(nodes, base_dir, metadata_settings=(("node_ttl", "2500ms"), ("heartbeat_interval", "200ms")))
        self.engine = engine
        self.ports = dict(zip(self.NAMES, free_ports(len(self.NAMES)), strict=True))

    @property
    def addresses(self) -> dict[str, str]:
        """Address of each server, by name."""
        return {name: f"127.0.0.1:{port}" for name, port in self.ports.items()}

    @property
    def setting(self) -> str:
        """The setting that names both servers."""
        return ",".join(self.addresses.values())

    @property
    def metadata_address(self) -> str:
        """Both addresses, for nodes and clients."""
        return self.setting

    def start_metadata(self) -> Daemon:
        """Start both servers."""
        for name in self.NAMES:
            self.start_server(name)
        return self.node(self.NAMES[0])

    def start_server(self, name: str) -> Daemon:
        """Start a server, or restart it on its port."""
        settings = [
            f"metadata.listen={self.addresses[name]}",
            f"metadata.engine={self.engine}",
            f"metadata.index_path={self.base_dir / 'index'}",
            "metadata.metrics_listen=none",
            "metadata.node_ttl=2500ms",
            "metadata.heartbeat_interval=200ms",
        ]
        return self._start(name, "metadata", settings, DaemonHost())

    def name_of(self, address: str) -> str:
        """Name of the server at an address."""
        return next(name for name, known in self.addresses.items() if known == address)

    def pause(self, name: str) -> None:
        """Stop a server without closing its connections."""
        os.kill(self.node(name).process.pid, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a stopped server continue."""
        os.kill(self.node(name).process.pid, signal.SIGCONT)


@contextmanager
def server_pair(base_dir: Path, *nodes: NodeSpec, engine: str = "lmdb") -> Iterator[ServerPair]:
    """Two running metadata servers and nodes."""
    with ServerPair(nodes, base_dir, engine) as pair:
        yield pair
