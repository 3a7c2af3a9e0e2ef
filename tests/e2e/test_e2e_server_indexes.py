"""Two metadata servers of one list with an index each: nodes, ``status`` and ``doctor`` notice."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from kvstore.embedded.cluster import LocalCluster, NodeSpec
from nursery import cli
from support.wait import wait_until

CODE = "METADATA_SERVERS_DIFFER"


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [*cli(), *arguments, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(done.stdout)


def codes(metadata: str) -> set[str]:
    return {one["code"] for one in run("status", "--metadata", metadata)[1]["findings"]}


def test_servers_with_different_indexes_are_noticed(tmp_path: Path) -> None:
    with LocalCluster([], tmp_path / "first") as first, LocalCluster([], tmp_path / "second") as second:
        both = f"{first.metadata_address},{second.metadata_address}"
        node = NodeSpec("a", dram_bytes=16 << 20, settings=(("metadata", both), ("anti_entropy_interval", "500ms")))
        assert CODE in codes(both), "status compares them"
        code, found = run("doctor", "--dram", "16MiB", "--metadata", both)
        assert code == 1
        assert any(one["level"] == "missing" and "different indexes" in one["message"] for one in found["findings"])
        with LocalCluster([node], tmp_path / "third"):
            asked = first.metadata_address, second.metadata_address
            wait_until(lambda: any(CODE in codes(address) for address in asked), "the node reports it", poll_s=0.5)


def test_servers_with_one_index_are_not_reported(tmp_path: Path) -> None:
    with LocalCluster([], tmp_path, servers=2) as cluster:
        assert CODE not in codes(cluster.metadata_address)
