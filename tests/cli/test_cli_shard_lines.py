"""Lines of ``kvstore status --detail`` and ``kvstore top`` about a shared index, and the commands at a real one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvproto.v1 import admin_pb2 as pb
from kvstore.cli.app import root
from kvstore.cli.commands.store import status
from kvstore.cli.commands.store.shard_lines import shard_lines, shard_summary
from kvstore.control_api import serializers
from kvstore.embedded.valkey import ValkeyServers, find_server
from nursery import cli
from support.wait import wait_until


def test_index_in_a_file_has_no_lines() -> None:
    assert list(shard_lines(serializers.shards(pb.DescribeShardsResponse()))) == []


def test_lines_name_roles_states_and_settings() -> None:
    primary = pb.IndexServer(
        address="h:1", primary=True, shard=0, slots=16_384, replicas=1, version="valkey 9.1.2", keys=5, used_bytes=1 << 20,
        limit_bytes=1 << 30, eviction_policy="noeviction", snapshots=False, append_only=False,
    )  # fmt: skip
    replica = pb.IndexServer(address="h:2", shard=0, away_ms=3_000, lag_bytes=2_048, snapshots=True)
    unknown = pb.IndexServer(address="h:3")
    servers = [
        pb.MetadataServerInfo(address="m:1", version="1", answers_here=True, roles=["plan"]),
        pb.MetadataServerInfo(address="m:2"),
    ]
    found = serializers.shards(
        pb.DescribeShardsResponse(
            servers=[primary, replica, unknown], unserved_slots=7, metadata_servers=servers, lost_ranges=2_048, suspect_ranges=3
        )
    )
    summary = (
        "shards 1  replicas 1  memory 1.0MiB/1.0GiB  keys 5  slots without server 7  lost key ranges 2,048"
        "  suspect key ranges 3  metadata servers 2"
    )
    assert shard_summary(found) == summary
    lines = list(shard_lines(found))
    assert lines[0] == f"index in Valkey: {summary}"
    assert "no persistence" in lines[1]
    assert "away for" in lines[2]
    assert "2.0KiB behind" in lines[2]
    assert "snapshots" in lines[2]
    assert "no shard" in lines[3]
    assert lines[4] == "metadata servers of this index"
    assert "roles plan" in lines[5]
    assert "answered this command" in lines[5]


def test_status_says_that_inventories_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart of the metadata server with an empty index, 0 blocks must not look like a loss."""
    volume = {"id": "a/dram", "tier": "dram", "capacity_bytes": 1 << 30, "used_bytes": 0, "blocks": 0, "read_only": None}
    node = {"id": "a", "alive": True, "stopped": False, "refused": None, "drain": None, "control_address": "", "mounts": []}
    found = {
        "health": "ok",
        "findings": [],
        "metadata": "m:1",
        "blocks": 0,
        "index_bytes": 0,
        "metadata_servers": [],
        "namespaces": [],
    }
    shards = serializers.shards(pb.DescribeShardsResponse())

    def shown(*, arriving: bool) -> list[str]:
        document = {**found, "nodes": [{**node, "volumes": [{**volume, "arriving": arriving}]}]}
        monkeypatch.setattr(status, "ask", lambda _config, _work: (document, shards))
        lines = CliRunner().invoke(root, ["status", "--metadata", "m:1"]).output.splitlines()
        assert max(map(len, lines)) <= 80
        return lines

    assert shown(arriving=True)[1] == "metadata server m:1: 0 blocks so far, index 0 B"
    assert shown(arriving=True)[-1] == "    inventory arriving: these figures are not complete yet"
    assert shown(arriving=False)[1] == "metadata server m:1: 0 blocks, index 0 B"
    assert "arriving" not in shown(arriving=False)[-1]


def kvstore(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*cli(), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(find_server() is None, reason="NO VALKEY HERE: THE COMMANDS ARE NOT TESTED WITH A CLUSTER")
def test_status_and_top_show_a_real_cluster(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    with ValkeyServers(tmp_path / "valkey", shards=1) as valkey:
        settings = {
            "metadata.listen": "127.0.0.1:0", "metadata.metrics_listen": "none", "metadata.ready_file": ready,
            "metadata.engine": f"valkey://{valkey.seeds[0]}", "data_dir": tmp_path / "data",
        }  # fmt: skip
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        process = subprocess.Popen([*cli("metadata"), "metadata", *words], stderr=subprocess.DEVNULL)
        try:
            wait_until(ready.exists, "the metadata server is ready")
            at = ("--metadata", json.loads(ready.read_text())["address"])
            wait_until(lambda: "valkey 9" in kvstore("status", "--detail", *at).stdout, "the server is observed", poll_s=0.5)
            shown = kvstore("status", "--detail", *at).stdout
            assert valkey.seeds[0] in shown
            assert "INDEX_WITHOUT_REPLICAS" in shown
            assert "index in Valkey" not in kvstore("status", *at).stdout
            document = json.loads(kvstore("status", *at, "-o", "json").stdout)
            assert [one["address"] for one in document["index"]["servers"]] == list(valkey.seeds)
            assert "index    shards 1  replicas 0" in kvstore("top", "--once", "--interval", "500ms", *at).stdout
        finally:
            process.terminate()
            process.wait(30)
