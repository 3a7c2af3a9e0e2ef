"""Each finding about a shared index, from a description that has exactly one thing wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.core.index_backend import IndexBackend, IndexServer
from kvstore.health.findings import MAX_FINDINGS, HealthFinding, overall
from kvstore.health.shards import MOST_ALIKE, shard_findings

WELL = IndexServer(
    address="h:1", primary=True, shard=0, slots=16_384, replicas=1, version="valkey 9.1.2", compare_and_set=True, keys=1,
    used_bytes=100, limit_bytes=1_000, eviction_policy="noeviction", snapshots=False, append_only=False, node_timeout_ms=1_000,
)  # fmt: skip
REPLICA = replace(WELL, address="h:2", primary=False, slots=0, replicas=0, lag_bytes=0)


def found_in(*servers: IndexServer, unserved_slots: int = 0, metadata_servers: int = 2) -> list[HealthFinding]:
    return list(shard_findings(IndexBackend(servers, unserved_slots), metadata_servers))


def test_healthy_cluster_and_index_in_a_file_have_no_findings() -> None:
    assert found_in(WELL, REPLICA) == []
    assert found_in(metadata_servers=1) == []


@pytest.mark.parametrize(
    ("code", "subject", "server", "words"),
    [
        ("SHARD_AWAY", "shard 0", replace(WELL, away_s=4.0, replicas=0), "has served no command for 4 s; no replica answers"),
        ("SHARD_WITHOUT_REPLICA", "shard 0", replace(WELL, replicas=0), "The primary h:1 of shard 0 has no replica"),
        ("SHARD_MEMORY_NEARLY_FULL", "h:1", replace(WELL, used_bytes=901), "901 B of 1000 B (maxmemory)"),
        ("SHARD_EVICTS_RECORDS", "h:1", replace(WELL, eviction_policy="volatile-lru"), "maxmemory-policy volatile-lru"),
        ("SHARD_PERSISTS", "h:1", replace(WELL, snapshots=True, append_only=True), "snapshots and an append-only file"),
        ("SHARD_WITHOUT_COMPARE_AND_SET", "", replace(WELL, compare_and_set=False), "1 of 2 servers"),
        ("SHARD_VERSIONS_DIFFER", "", replace(WELL, version="valkey 8.1.0"), "valkey 8.1.0, valkey 9.1.2"),
    ],
)
def test_server_with_one_fault_gives_its_code(code: str, subject: str, server: IndexServer, words: str) -> None:
    (found,) = found_in(server, REPLICA)
    assert (found.code.name, found.subject) == (code, subject)
    assert words in found.facts


def test_unknown_values_give_no_findings() -> None:
    unknown = IndexServer(address="h:1", primary=True, shard=0, slots=16_384, replicas=1)
    assert found_in(unknown, REPLICA) == []
    away = replace(REPLICA, away_s=9.0, version="valkey 8.1.0", compare_and_set=False, snapshots=True, used_bytes=999)
    assert found_in(WELL, away) == []


def test_slots_without_server_are_an_error() -> None:
    (found,) = found_in(WELL, REPLICA, unserved_slots=100)
    assert (found.code.name, "100 of 16,384" in found.facts) == ("SLOTS_WITHOUT_SERVER", True)
    assert overall([found]) == "error"


def test_cluster_without_replicas_is_an_information() -> None:
    (found,) = found_in(replace(WELL, replicas=0))
    assert found.code.name == "INDEX_WITHOUT_REPLICAS"
    assert overall([found]) == "ok"


def test_only_metadata_server_is_an_information() -> None:
    (found,) = found_in(WELL, REPLICA, metadata_servers=1)
    assert found.code.name == "ONE_METADATA_SERVER"
    assert overall([found]) == "ok"


def test_large_cluster_gives_a_few_findings_of_each_code() -> None:
    servers = [replace(WELL, address=f"h:{number}", shard=number, replicas=0, snapshots=True) for number in range(60)]
    found = found_in(*servers, REPLICA)
    assert len(found) == 2 * MOST_ALIKE < MAX_FINDINGS
    assert found[MOST_ALIKE - 1].facts.endswith(f"{60 - MOST_ALIKE} others have this finding.")
