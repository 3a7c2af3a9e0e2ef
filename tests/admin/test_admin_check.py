"""Checks of a volume while its node serves: the REST API and the command find real damage in a real slab."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from admin_client import AdminHttp
from click.testing import CliRunner

from kvclient import CacheSpec, KVClient
from kvstore.cli.app import root
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from support.wait import wait_until

WAIT_S = 30.0
SPEC = CacheSpec(model="checked", block_tokens=16, layers=4, layer_block_bytes=16384)
BLOCKS = 32
CHECK = "/v1/volumes/a/nvme0/check"


@dataclass
class Store:
    cluster: LocalCluster
    http: AdminHttp
    engine: KVClient

    def fill(self, seed: int) -> tuple[list[bytes], np.ndarray[Any, np.dtype[np.uint8]]]:
        """Store a separate chain, durable and in DRAM."""
        draw = np.random.default_rng(seed)
        keys = list(self.engine.keys(draw.integers(0, 1 << 32, BLOCKS * SPEC.block_tokens, np.uint32)))
        data = draw.integers(0, 256, (BLOCKS, SPEC.block_bytes), np.uint8)
        assert self.engine.store(keys, data, wait_visible=True, durable=True).durable
        return keys, data

    def damage(self, block: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Flip a bit of a block in the slab."""
        slab = self.cluster.volume_path("a") / "slab.kv"
        at = slab.read_bytes().index(block.tobytes()) + 5_000
        with slab.open("r+b") as file:
            file.seek(at)
            file.write(bytes([block[5_000] ^ 0x10]))
            file.flush()
            os.fsync(file.fileno())

    def ended(self) -> Any:
        wait_until(lambda: self.http.get(CHECK)["state"] not in ("waiting", "running"), "the check ends")
        return self.http.get(CHECK)

    def command(self, *arguments: str, code: int = 0) -> str:
        """Return the output of ``kvstore volumes check``."""
        given = ["volumes", "check", "a/nvme0", *arguments, "--metadata", self.cluster.metadata_address]
        done = CliRunner().invoke(root, given)
        assert done.exit_code == code, (arguments, done.output, done.exception)
        return done.stdout


@contextmanager
def started(folder: Path) -> Iterator[Store]:
    node = NodeSpec("a", dram_bytes=16 << 20, nvme_bytes=32 << 20)
    with LocalCluster([node], folder) as cluster:
        http = AdminHttp(cluster.start_admin().address)
        with KVClient.connect(cluster.metadata_address, SPEC, node=cluster.node("a").local_socket) as engine:
            yield Store(cluster, http, engine)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with started(tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[Store]:
    """A store for one test, which may break it."""
    with started(tmp_path) as made:
        yield made


def test_check_bad_requests_are_rejected(store: Store) -> None:
    store.http.post("/v1/volumes/a/dram/check", {}, 400)
    store.http.post("/v1/volumes/a/nvme7/check", {}, 404)
    store.http.get("/v1/volumes/b/nvme0/check", 404)
    store.http.post(CHECK, {"bytes_per_s": 0}, 400)
    store.command("--status", "--cancel", code=2)


def test_check_removes_damage_and_rewrites_from_dram(store: Store) -> None:
    warm, warm_data = store.fill(1)
    cold, cold_data = store.fill(2)
    store.damage(cold_data[7])
    store.http.post("/v1/volumes/a/dram/evict", {"to_percent": 0})
    buffer = np.zeros_like(warm_data)
    assert store.engine.load(store.engine.lookup(warm), buffer).hit_blocks == BLOCKS, "back in DRAM"
    store.damage(warm_data[3])
    begun = store.http.ask("POST", CHECK, {}, x_request_id="check-1")
    assert begun.status == 202
    found = store.ended()
    assert (found["state"], found["blocks"], found["checked_blocks"]) == ("done", 2 * BLOCKS, 2 * BLOCKS)
    assert (found["good_blocks"], found["bad_blocks"], found["rewritten_blocks"]) == (2 * BLOCKS - 2, 2, 1)
    assert found["checked_bytes"] == 2 * BLOCKS * SPEC.block_bytes
    assert store.http.get("/v1/volumes/a/nvme0")["quarantined_blocks"] == 2
    wait_until(
        lambda: store.http.get("/v1/nodes/a")["process"]["write_back_waiting_blocks"] == 0,
        "the block in DRAM is written back again",
    )
    store.http.post(CHECK, {}, 202)
    again = store.ended()
    assert (again["blocks"], again["good_blocks"], again["bad_blocks"]) == (2 * BLOCKS - 1, 2 * BLOCKS - 1, 0)
    store.http.post("/v1/volumes/a/dram/evict", {"to_percent": 0})
    for keys, data, hits in ((warm, warm_data, BLOCKS), (cold, cold_data, 7)):
        buffer[:] = 0
        assert store.engine.load(store.engine.lookup(keys), buffer).hit_blocks == hits
        assert np.array_equal(buffer[:hits], data[:hits]), "and no byte is wrong"
    log = store.cluster.node("admin").log_path.read_text()
    lines = [line for line in log.splitlines() if '"action": "volume.check"' in line and '"outcome": "done"' in line]
    assert "request_id=check-1" in lines[0]
    assert '"target": "a/nvme0"' in lines[0]
    assert "bad=2, rewritten=" in store.cluster.node("a").log_path.read_text()


def test_check_command_exit_code_reports_damage(store: Store) -> None:
    _, data = store.fill(3)
    assert "bad" not in store.command("--wait")
    store.damage(data[5])
    found = json.loads(store.command("--wait", "-o", "json", code=1))
    assert (found["state"], found["bad_blocks"]) == ("done", 1)
    assert "1 corrupt and removed" in store.command("--status", code=1)


def test_check_with_rate_limit_is_slow_and_cancellable(store: Store) -> None:
    store.command("--rate", "1")
    wait_until(lambda: store.http.get(CHECK)["checked_blocks"] > 0, "it has read once")
    assert store.http.get(CHECK)["state"] == "running"
    store.http.post(CHECK, {}, 409)
    store.command("--wait", code=3)
    assert store.http.ask("DELETE", CHECK).status == 200
    assert store.ended()["state"] == "cancelled"
    store.command("--status", code=4)
    assert "cancelled" in store.command("--cancel")


def test_check_state_is_lost_when_node_restarts(own_store: Store) -> None:
    assert own_store.http.get(CHECK)["state"] == "none"
    assert "no check since the node started" in own_store.command("--status")
    assert own_store.http.ask("DELETE", CHECK).json["state"] == "none"
    own_store.http.post(CHECK, {}, 202)
    assert own_store.ended()["state"] == "done"
    own_store.cluster.stop("a")
    own_store.cluster.start_node("a")
    wait_until(
        lambda: own_store.http.ask("GET", CHECK).status == 200 and own_store.http.get(CHECK)["state"] == "none",
        "the node is back",
    )
    assert "no check since the node started" in own_store.command("--status")
