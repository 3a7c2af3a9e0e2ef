"""A volume that several nodes mount, with real processes: read directly, with or without its owner, never a wrong byte."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Engine, Store
from kvstore.core.types import BlockKey, Tier
from kvstore.embedded.cluster import NodeSpec
from nursery import cli
from support.wait import wait_until

MIB = 1 << 20
MakeStore = Callable[..., Store]
VOLUME = "owner/nvme0"


def shared(
    make_store: MakeStore, tmp_path: Path, *, nvme_bytes: int = 64 * MIB, readers: int = 1, dram_bytes: int = 256 * MIB
) -> Store:
    """A storage node, and nodes that mount its volume and have read its slot manifest."""
    mounts = (("mounts", f"{VOLUME}={tmp_path / '0' / 'owner-nvme'}"),)
    owner = NodeSpec("owner", roles=("storage",), nvme_bytes=nvme_bytes, dram_bytes=64 * MIB)
    store = make_store(owner, *(NodeSpec(f"r{at}", dram_bytes=dram_bytes, settings=mounts) for at in range(readers)))
    for at in range(readers):
        wait_until(lambda at=at: any("O_DIRECT" in line for line in engines(store, f"r{at}")), "the volume is open")  # type: ignore[misc]
    return store


def engines(store: Store, node: str) -> list[str]:
    return [line for line in store.node_stats(node).io_engines if line.startswith(VOLUME)]


def counter(store: Store, node: str, name: str) -> int:
    return store.node_stats(node).counters[name]


def published(reader: Engine, chain: str, blocks: int) -> list[BlockKey]:
    """Wait until the index shows a chain in the volume. Returns its keys."""
    keys = reader.keys(chain, blocks)
    wait_until(
        lambda: [run.count for run in reader.client.lookup(keys).runs if run.volume_id == VOLUME] == [blocks],
        f"{chain} in the index",
    )
    return keys


def test_mount_is_read_without_asking_the_owner(make_store: MakeStore, tmp_path: Path) -> None:
    store = shared(make_store, tmp_path)
    assert store.engine("owner").store("c", 50, durable=True).durable
    store.empty_dram("owner")
    reader = store.engine("r0")
    published(reader, "c", 50)
    result = reader.load("c", 50)
    assert result.hit_blocks == 50
    assert result.bytes_by_tier == {Tier.NVME: 50 * reader.spec.block_bytes}
    assert result.bytes_by_node == {"r0": 50 * reader.spec.block_bytes}
    assert (counter(store, "r0", "mount_read_blocks_total"), counter(store, "r0", "peer_fetched_blocks_total")) == (50, 0)
    assert store.node_stats("owner").tiers[0].blocks == 0  # the owner was not asked: it promoted nothing
    assert reader.load("c", 50).bytes_by_tier == {Tier.DRAM: 50 * reader.spec.block_bytes}


def test_mount_follows_stores_and_evictions_of_the_owner(make_store: MakeStore, tmp_path: Path) -> None:
    store = shared(make_store, tmp_path)
    writer, reader = store.engine("owner"), store.engine("r0")
    for chain in ("a", "b"):
        assert writer.store(chain, 20, durable=True).durable
        published(reader, chain, 20)
        assert reader.load(chain, 20).hit_blocks == 20
    assert counter(store, "r0", "mount_read_blocks_total") == 40
    keys = reader.keys("a", 20)
    lookup = reader.client.lookup(keys)
    store.empty_dram("owner")
    store.evict("owner", Tier.NVME)
    store.empty_dram("r0")
    assert writer.store("later", 20, durable=True).durable
    published(reader, "later", 20)
    assert reader.load("later", 20).hit_blocks == 20  # the event also reports that the others were removed
    assert reader.client.load(lookup, reader.allocate(20)).hit_blocks == 0


@pytest.mark.parametrize("kill", [True, False])
def test_mount_stays_readable_after_owner_ends(make_store: MakeStore, tmp_path: Path, kill: bool) -> None:
    store = shared(make_store, tmp_path, readers=2)
    for chain in ("c0", "c1"):
        assert store.engine("owner").store(chain, 40, durable=True).durable
        published(store.engine("r0"), chain, 40)
    (store.cluster.kill if kill else store.cluster.stop)("owner")
    for node, chain in (("r0", "c0"), ("r1", "c1")):
        reader = store.engine(node)
        keys = reader.keys(chain, 40)
        wait_until(
            lambda reader=reader, keys=keys: {run.node_id for run in reader.client.lookup(keys).runs} <= {"r0", "r1"},  # type: ignore[misc]
            "the dead owner is no longer named",
        )
        assert reader.client.lookup(keys).hit_blocks == 40
        assert reader.load(chain, 40).bytes_by_tier == {Tier.NVME: 40 * reader.spec.block_bytes}
    remote = store.engine(None)  # without a local node: over the data plane, from a node that mounts the volume
    for node in ("r0", "r1"):
        store.empty_dram(node)
    assert remote.load("c0", 40).hit_blocks == 40
    store.cluster.start_node("owner")
    writer = store.engine("owner")
    assert writer.store("d", 10, durable=True).durable
    reader = store.engine("r0")
    published(reader, "d", 10)
    assert reader.load("d", 10).hit_blocks == 10
    assert counter(store, "r0", "mount_read_blocks_total") + counter(store, "r1", "mount_read_blocks_total") == 130


def test_mount_missing_or_wrong_owner_serves(make_store: MakeStore, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    store = make_store(
        NodeSpec("owner", nvme_bytes=64 * MIB),
        NodeSpec("r0", settings=(("mounts", f"{VOLUME}={wrong}"),)),
        NodeSpec("r1", settings=(("mounts", f"owner/nvme7={tmp_path / '0' / 'owner-nvme'}"),)),
    )
    assert store.engine("owner").store("c", 20, durable=True, wait_visible=True).durable
    for node in ("r0", "r1"):
        assert store.engine(node).load("c", 20).bytes_by_node == {"owner": 20 * 4 * 4096}
        assert counter(store, node, "mount_errors_total") >= 1
    found = subprocess.run(
        [*cli(), "status", "--metadata", store.cluster.metadata_address, "-o", "json"],
        check=True,
        capture_output=True,
        timeout=30,
    )
    assert [node["mounts"] for node in json.loads(found.stdout)["nodes"]] == [[], [VOLUME], ["owner/nvme7"]]


def test_mount_no_wrong_byte_while_owner_rewrites(make_store: MakeStore, tmp_path: Path) -> None:
    """The volume holds a third of the stored blocks, and readers with small arenas read it throughout."""
    store = shared(make_store, tmp_path, nvme_bytes=8 * MIB, readers=2, dram_bytes=8 * MIB)
    done = threading.Event()
    hits: dict[str, int] = {}
    failures: list[BaseException] = []

    def read(node: str) -> None:
        reader = store.engine(node)
        turn = 0
        try:
            while not done.is_set():
                turn += 1
                result = reader.load(f"c{turn % 60}", 20)  # checks every byte of every hit
                hits[node] = hits.get(node, 0) + result.hit_blocks
                store.evict(node)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=read, args=(node,)) for node in ("r0", "r1")]
    writer = store.engine("owner")
    for chain in range(20):
        writer.store(f"c{chain}", 20, durable=True)
    for thread in threads:
        thread.start()

    def read_directly() -> list[int]:
        return [counter(store, node, "mount_read_blocks_total") for node in ("r0", "r1")]

    chain, end_s = 20, time.monotonic() + 40
    while chain < 160 or (min(read_directly()) <= 100 and time.monotonic() < end_s):  # busy machines read less in this time
        writer.store(f"c{chain % 60}", 20, durable=True)
        chain += 1
    done.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert failures == []
    assert min(read_directly()) > 100, (read_directly(), hits)
