"""A disk with the index and a volume fills up while the store runs: every view reports it until there is space again."""

from __future__ import annotations

import itertools
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Store
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from nursery import cli
from support.small_disk import fill_up, mounted
from support.wait import wait_until

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    place = tmp_path / "disk"
    with mounted(place, "24m") as is_mounted:
        if not is_mounted:
            pytest.skip("a separate file system requires root and mounts: a disk that fills up was NOT tested")
        yield place


@pytest.fixture
def store(tmp_path: Path, small_disk: Path) -> Iterator[Store]:
    """One node, whose volume shares the disk with the index; logs are on another disk."""
    node = NodeSpec("a", dram_bytes=32 * MIB, settings=(("nvme", f"{small_disk / 'volume'}:8MiB"),))
    made = Store(LocalCluster([node], tmp_path / "0", metadata_settings=[("index_path", str(small_disk / "index"))]).__enter__())
    yield made
    made.close()


def get(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
        return bytes(answer.read()).decode()


def gauge(address: str, name: str) -> float:
    """The largest value of a metric."""
    found = [line for line in get(address, "/metrics").splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return max(float(line.rpartition(" ")[2]) for line in found)


def shown(store: Store) -> dict[str, Any]:
    """Run ``kvstore status``."""
    command = [*cli(), "status", "-o", "json", "--metadata", store.cluster.metadata_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return dict(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_disk_full_is_reported_until_there_is_space(store: Store, small_disk: Path) -> None:
    rest = store.cluster.start_admin().address
    engine = store.engine("a", layers=1, layer_bytes=512)
    metadata, node = store.cluster.node("metadata"), store.cluster.node("a")
    held = engine.store("kept", 500, durable=True, wait_visible=True)
    assert held.durable

    def findings() -> list[str]:
        found = json.loads(get(rest, "/v1/cluster"))
        assert (found["health"] == "ok") == (not found["findings"])
        return [f"{one['code']}: {one['facts']}" for one in found["findings"]]

    wait_until(lambda: not findings(), "all is well")
    filler = fill_up(small_disk / "filler")
    number = itertools.count()

    def told() -> bool:
        engine.store(f"more{next(number)}", 2000)
        said = "\n".join(findings())
        return all(part in said for part in ("INDEX_READ_ONLY", "VOLUME_WRITE_FAILS: Writes to volume a/nvme0 fail", "No space"))

    wait_until(told, "the index and the volume are said to fail", 90.0)
    wait_until(lambda: any(one.startswith("PUBLISH_FAILS") for one in findings()), "so is publishing")
    assert gauge(metadata.metrics_address, "kvstore_index_changes_failing_seconds") > 0
    assert gauge(node.metrics_address, "kvstore_node_publish_failing_seconds") > 0
    assert gauge(node.metrics_address, "kvstore_volume_read_only") == 1
    assert "index change failed" in metadata.log_tail(200)
    status = shown(store)
    (nvme,) = (volume for volume in status["nodes"][0]["volumes"] if volume["tier"] == "nvme")
    assert nvme["blocks"] >= 500
    assert nvme["read_only"]
    assert "INDEX_READ_ONLY" in {one["code"] for one in status["findings"]}

    filler.unlink()

    def well() -> bool:
        engine.store(f"late{next(number)}", 1, durable=True)
        return not findings()

    wait_until(well, "it is well again by itself", 60.0)
    assert engine.store("last", 20, wait_visible=True).held_blocks == 20
    assert engine.client.lookup(engine.keys("last", 20)).hit_blocks == 20
    assert gauge(metadata.metrics_address, "kvstore_index_changes_failing_seconds") == 0
    assert shown(store)["findings"] == []


def test_unreadable_orders_are_reported(make_store: Any) -> None:  # a factory
    store = make_store(NodeSpec("a", dram_bytes=8 * MIB))
    rest = store.cluster.start_admin().address
    orders = store.cluster.index_path.with_name("index.orders.json")
    orders.write_text("{")
    assert json.loads(get(rest, "/v1/health"))["findings"][0]["code"] == "SETTINGS_FILE_UNREADABLE"
    orders.unlink()
    assert json.loads(get(rest, "/v1/cluster"))["health"] == "ok"
