"""Servers of a local store that ended are started again, and one that cannot start does not end the store."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.core.errors import Internal
from kvstore.embedded import restarts
from kvstore.embedded.cluster import LocalCluster
from kvstore.embedded.ports import port_after
from kvstore.embedded.restarts import MOST_ENDS, ClusterSupervisor, SoleDaemon


class Cluster:
    """A cluster with one ended Valkey server, whose restarts fail as often as a test says."""

    def __init__(self, failures: list[Exception]) -> None:
        self.failures = failures
        self.metadata_addresses = {"metadata": "127.0.0.1:1"}
        self.code: int | None = -9
        self.replaced = True
        process = SimpleNamespace(poll=lambda: self.code, pid=7)
        self.servers = [SimpleNamespace(address="127.0.0.1:2", process=process)]
        self.valkey = self

    def is_replaced(self, _server: object) -> bool:
        return self.replaced

    def restart(self, _server: object) -> None:
        if self.failures:
            raise self.failures.pop()
        self.code = None


def test_server_that_cannot_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "AWAY_S", 0.0)
    cluster: Any = Cluster([OSError("no memory"), OSError("port in use")])
    reports: list[str] = []
    redundant = ClusterSupervisor(cluster, reports.append)
    for _ in range(3):
        redundant.poll()
    assert reports == [
        "Valkey server 127.0.0.1:2 ended with code -9; it starts again",
        "Valkey server 127.0.0.1:2 did not start: port in use",
        "Valkey server 127.0.0.1:2 did not start: no memory",
        "Valkey server 127.0.0.1:2 runs again (pid 7)",
    ]
    assert not redundant.away


def test_ended_primary_starts_after_its_replica() -> None:
    cluster: Any = Cluster([])
    cluster.replaced = False
    reports: list[str] = []
    ClusterSupervisor(cluster, reports.append).poll()
    assert reports == ["Valkey server 127.0.0.1:2 ended with code -9; it starts again after its replica has replaced it"]


class EndingCluster:
    """A cluster whose daemons end whenever they are looked at, unless a test says otherwise."""

    def __init__(self) -> None:
        self.metadata_addresses = {"metadata": "127.0.0.1:1"}
        self.valkey = None
        self.code: int | None = -9
        self.failures: list[Exception] = []

    def node(self, _name: str) -> object:
        process = SimpleNamespace(poll=lambda: self.code, pid=7)
        return SimpleNamespace(process=process, log_path=Path("a.log"), ending=lambda: "was killed by SIGKILL")

    def restart(self, name: str) -> object:
        if self.failures:
            raise self.failures.pop()
        return self.node(name)


def test_sole_daemon_is_started_again_until_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "AWAY_S", 0.0)
    cluster: Any = EndingCluster()
    reports: list[str] = []
    supervisor = ClusterSupervisor(cluster, reports.append, [SoleDaemon("a", "blocks in DRAM are lost")])
    cluster.failures = [OSError("no memory")]
    for _ in range(2 * MOST_ENDS - 3):
        supervisor.poll()
    with pytest.raises(Internal, match=r"a was killed by SIGKILL; it ended 5 times within 5 minutes, so the store stops.*a\.log"):
        supervisor.poll()
    ended, began = "a was killed by SIGKILL; starting it again (blocks in DRAM are lost)", "a runs again (pid 7)"
    failed = "a did not start: no memory; starting it again (blocks in DRAM are lost)"
    assert reports == [ended, failed, began, ended, began, ended, began]


def test_daemon_that_is_not_vital_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "AWAY_S", 0.0)
    cluster: Any = EndingCluster()
    reports: list[str] = []
    supervisor = ClusterSupervisor(cluster, reports.append, [SoleDaemon("page", "no page", vital=False)])
    for _ in range(3 * MOST_ENDS):
        supervisor.poll()
    assert len(reports) == 2 * MOST_ENDS - 1
    assert reports[-1].endswith("and is not started again (no page). Log: a.log. To get it back, restart the store.")
    assert not supervisor.away


def test_sole_daemon_that_ends_rarely_is_started_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "AWAY_S", 0.0)
    monkeypatch.setattr(restarts, "ENDS_WITHIN_S", 0.0)
    reports: list[str] = []
    cluster: Any = EndingCluster()
    supervisor = ClusterSupervisor(cluster, reports.append, [SoleDaemon("a", "blocks in DRAM are lost")])
    for _ in range(4 * MOST_ENDS):
        supervisor.poll()
    assert len(reports) == 4 * MOST_ENDS


def test_port_after_skips_ports_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        found = port_after(port - 1)
        assert found != port
        assert port_after(65_535) == 0


def test_restarted_metadata_keeps_port_of_listen_zero(tmp_path: Path) -> None:
    """Nodes and clients know the port that the first start chose; ``kvstore up`` passes ``listen`` as a setting."""
    with LocalCluster([], tmp_path, metadata_settings=[("listen", "127.0.0.1:0")]) as cluster:
        known = cluster.metadata_address
        cluster.kill("metadata")
        assert cluster.restart("metadata").address == known
        assert cluster.metadata_address == known
