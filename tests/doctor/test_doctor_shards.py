"""Findings on the Valkey Cluster of ``metadata.engine``: from described clusters, and from real servers."""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.index_backend import IndexBackend, IndexServer
from kvstore.doctor.contract import Level
from kvstore.doctor.servers.shard_findings import RunningIndex, SeedAnswer, SeedProblem, index_findings
from kvstore.embedded.ports import free_port
from kvstore.embedded.valkey import ValkeyServers, find_server
from kvstore.health import codes
from nursery import cli

WELL = IndexServer(
    address="h:1", primary=True, shard=0, slots=16_384, replicas=1, version="valkey 9.1.2", compare_and_set=True, keys=1,
    used_bytes=100, limit_bytes=1_000, eviction_policy="noeviction", snapshots=False, append_only=False, node_timeout_ms=1_000,
)  # fmt: skip


REPLICA = replace(WELL, address="h:2", primary=False, slots=0, replicas=0)


def judged(*servers: IndexServer, unserved_slots: int = 0) -> list[tuple[Level, str]]:
    index = RunningIndex([SeedAnswer("h:1")], IndexBackend(servers, unserved_slots))
    return [(one.level, one.message) for one in index_findings(index) if one.level is not Level.OK]


def test_index_in_a_file_gives_no_findings() -> None:
    assert list(index_findings(RunningIndex())) == []


def test_healthy_cluster_gives_only_ok() -> None:
    assert judged(WELL, REPLICA) == []


@pytest.mark.parametrize(
    ("server", "level", "words"),
    [
        (replace(WELL, node_timeout_ms=15_000), Level.WARNING, "cluster-node-timeout above 2000 ms"),
        (replace(WELL, limit_bytes=0), Level.INFO, "no server has a maxmemory"),
        (replace(WELL, snapshots=None), Level.INFO, "may not run CONFIG GET"),
    ],
)
def test_cluster_with_one_fault_gives_one_finding(server: IndexServer, level: Level, words: str) -> None:
    found = judged(server, replace(server, address="h:2", primary=False, replicas=0))
    assert [one for one, _ in found] == [level]
    assert words in found[0][1]


def test_cluster_findings_are_those_of_health_codes() -> None:
    found = judged(replace(WELL, append_only=True), replace(REPLICA, compare_and_set=False), unserved_slots=3)
    assert [level for level, _ in found] == [Level.MISSING, Level.WARNING, Level.INFO]
    assert found[0][1] == f"3 of 16,384 hash slots of the index have no server. {codes.SLOTS_WITHOUT_SERVER.action}"
    assert found[1][1].endswith(codes.SHARD_PERSISTS.action)
    assert found[2][1].endswith(codes.SHARD_WITHOUT_COMPARE_AND_SET.action)


@pytest.mark.parametrize("problem", SeedProblem)
def test_seed_problem_beside_usable_seeds_is_a_warning(problem: SeedProblem) -> None:
    bad = SeedAnswer("h:1", problem, "why")
    assert [one.level for one in index_findings(RunningIndex([bad]))] == [Level.MISSING]
    assert [one.level for one in index_findings(RunningIndex([bad, SeedAnswer("h:2")]))] == [Level.WARNING, Level.OK]


# ---- real servers ----
def doctor(folder: Path, *settings: str) -> list[dict[str, Any]]:
    """Findings of the command about the index."""
    arguments = [word for setting in settings for word in ("--set", setting)]
    command = [*cli(), "doctor", "--dram", "16MiB", "-o", "json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, cwd=folder)
    return [one for one in json.loads(done.stdout)["findings"] if one["area"] == "index"]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if find_server() is None:
        pytest.skip("NO VALKEY HERE: THE DOCTOR IS NOT TESTED WITH A CLUSTER")
    with ValkeyServers(tmp_path_factory.mktemp("valkey"), shards=1, replicas=1) as made:
        yield made


def test_doctor_reports_a_real_cluster(servers: ValkeyServers, tmp_path: Path) -> None:
    silent = f"127.0.0.1:{free_port()}"
    found = doctor(tmp_path, f"metadata.engine=valkey://{servers.seeds[0]},{silent}")
    levels = {one["message"]: one["level"] for one in found}
    assert levels[f"{servers.seeds[0]} (metadata.engine) answers"] == "ok"
    refused = f"{silent} (metadata.engine) does not answer: connection refused; the other servers of the setting are used"
    assert levels[refused] == "warning"
    assert any(message.startswith("shards: 1, replicas that answer: 1, ") and level == "ok" for message, level in levels.items())


def test_doctor_reports_a_rejected_password(servers: ValkeyServers, tmp_path: Path) -> None:
    server = servers.servers[0]
    server.call("ACL", "SETUSER", "limited", "on", ">right", "+ping")
    for password, words in (("wrong", "rejects the user or the password"), ("right", "does not permit its commands")):
        (tmp_path / "password").write_text(password)
        (found,) = doctor(
            tmp_path,
            f"metadata.engine=valkey://{server.address}",
            "metadata.valkey_user=limited",
            f"metadata.valkey_password_file={tmp_path / 'password'}",
        )
        assert found["level"] == "missing"
        assert words in found["message"]


def test_doctor_reports_a_server_without_tls(servers: ValkeyServers, tmp_path: Path) -> None:
    (found,) = doctor(tmp_path, f"metadata.engine=valkeys://{servers.seeds[0]}")
    assert (found["level"], "does not speak TLS" in found["message"]) == ("missing", True), found


async def test_doctor_reports_a_server_that_closes_connections(tmp_path: Path) -> None:
    """A TLS port closes a connection that does not begin with a handshake."""
    listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        (found,) = await asyncio.to_thread(doctor, tmp_path, f"metadata.engine=valkey://127.0.0.1:{port}")
    assert "may require TLS" in found["message"]


async def test_doctor_reports_a_server_that_is_too_old(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = b"redis_version:6.2.14\r\ncluster_enabled:1"
        while words := await reader.read(1 << 12):
            writer.write(b"+PONG\r\n" if b"PING" in words else b"$%d\r\n%s\r\n*0\r\n" % (len(info), info))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        (found,) = await asyncio.to_thread(doctor, tmp_path, f"metadata.engine=valkey://127.0.0.1:{port}")
    assert (found["level"], "is too old: Redis 6.2" in found["message"]) == ("missing", True), found
