"""A node whose disk is full or turns read-only: it starts, serves what it holds, and writes again once it can."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import Engine, Store
from kvclient import KVClient
from kvstore.core.errors import Unavailable
from kvstore.embedded.cluster import NodeSpec
from nursery import cli
from support.small_disk import fill_up
from support.wait import wait_until

MIB = 1 << 20
MakeStore = Callable[..., Store]
NODE = NodeSpec("a", dram_bytes=8 * MIB, nvme_bytes=16 * MIB)


def mounted(*command: str, place: Path) -> Iterator[Path]:
    done = subprocess.run(["mount", *command, str(place)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a separate file system requires root and mounts; bad disks were NOT tested ({done.stderr.strip()})")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB for the volume of the first store's node."""
    place = tmp_path / "0" / "a-nvme"
    place.mkdir(parents=True)
    yield from mounted("-t", "tmpfs", "-o", "size=32m", "tmpfs", place=place)


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 64 MiB for that volume, which turns read-only on the first error."""
    image, place = tmp_path / "image", tmp_path / "0" / "a-nvme"
    place.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    made = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("mkfs.ext4 is missing: a disk that turns read-only was NOT tested")
    yield from mounted("-o", "loop,errors=remount-ro", str(image), place=place)


def volume_status(store: Store) -> dict[str, object]:
    """The node's NVMe volume in ``kvstore status``."""
    command = [*cli(), "status", "-o", "json", "--metadata", store.cluster.metadata_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    volumes = json.loads(done.stdout)["nodes"][0]["volumes"]
    return next(volume for volume in volumes if volume["tier"] == "nvme")


def hits_from_disk(store: Store, engine: Engine, chain: str) -> int:
    store.empty_dram("a")
    return engine.load(chain, 8).hit_blocks


def use_up_the_catalog(store: Store) -> None:
    """Store durably until a store is refused: the catalog has then used up its free pages."""
    engine = store.engine("a", layers=512, layer_bytes=8)
    for number in range(400):
        if not engine.store(f"small{number}", 4, durable=True).durable:
            return
    raise AssertionError("the disk was not full")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_node_starts_on_full_disk_and_writes_later(make_store: MakeStore, small_disk: Path) -> None:
    store = make_store(NODE)
    engine = store.engine("a")
    assert engine.store("kept", 8, durable=True).durable
    filler = fill_up(small_disk / "filler")
    use_up_the_catalog(store)
    store.cluster.kill("a")
    store.cluster.start_node("a")
    for _ in range(20):  # a few free pages may be left, which each start uses
        if "read-only" in store.node_stats("a").io_engines[1]:
            break
        store.cluster.kill("a")
        store.cluster.start_node("a")
    assert store.node_stats("a").counters["nvme_opened_read_only_total"] == 1
    wait_until(lambda: "No space" in str(volume_status(store)["read_only"]), "kvstore status shows it")
    engine = store.engine("a")
    assert engine.load("kept", 8).hit_blocks == 8
    result = engine.store("more", 8, durable=True)
    assert not result.durable
    assert engine.load("more", 8).hit_blocks == 8, "from DRAM"
    assert store.node_stats("a").counters["write_back_dropped_blocks_total"] >= 8

    filler.unlink()
    wait_until(lambda: store.node_stats("a").counters["nvme_resumed_total"] == 1, "it writes again by itself")
    assert engine.store("late", 8, durable=True).durable
    assert hits_from_disk(store, engine, "late") == 8
    wait_until(lambda: volume_status(store)["read_only"] is None, "kvstore status shows that too")
    store.cluster.kill("a")
    store.cluster.start_node("a")
    engine = store.engine("a")
    assert engine.load("kept", 8).hit_blocks == 8
    assert engine.load("late", 8).hit_blocks == 8


def turn_read_only(place: Path) -> None:
    """Turn the file system read-only: files that are open for writing stay open, and writes to them fail."""
    device = os.path.basename(
        subprocess.run(["findmnt", "-no", "SOURCE", str(place)], capture_output=True, text=True, check=True).stdout.strip()
    )
    trigger = Path(f"/sys/fs/ext4/{device}/trigger_fs_error")
    try:
        trigger.write_text("told to fail")
    except OSError as error:
        pytest.skip(f"this kernel cannot trigger an ext4 error: read-only while running was NOT tested ({error})")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_node_disk_turns_read_only_reads_continue(make_store: MakeStore, failing_disk: Path) -> None:
    store = make_store(NODE)
    engine = store.engine("a")
    assert engine.store("kept", 8, durable=True).durable
    turn_read_only(failing_disk)
    result = engine.store("more", 8, durable=True)
    assert not result.durable
    assert engine.load("more", 8).hit_blocks == 8, "stores continue into DRAM"
    assert hits_from_disk(store, engine, "kept") == 8, "loads from NVMe continue"
    counted = store.node_stats("a").counters
    assert counted["write_back_errors_total"] >= 1
    assert counted["write_back_dropped_blocks_total"] >= 8

    store.cluster.kill("a")
    store.cluster.start_node("a")  # and on a file system that is read-only from the start
    assert "read-only" in store.node_stats("a").io_engines[1]
    engine = store.engine("a")
    assert engine.load("kept", 8).hit_blocks == 8
    assert not engine.store("again", 8, durable=True).durable

    store.cluster.kill("a")
    image = failing_disk.parent.parent / "image"
    subprocess.run(["umount", str(failing_disk)], check=True)
    subprocess.run(["fsck.ext4", "-fy", str(image)], capture_output=True, check=False)
    subprocess.run(["mount", "-o", "loop,errors=remount-ro", str(image), str(failing_disk)], check=True)
    store.cluster.start_node("a")
    engine = store.engine("a")
    assert engine.load("kept", 8).hit_blocks == 8
    assert engine.store("late", 8, durable=True).durable
    assert hits_from_disk(store, engine, "late") == 8


@pytest.mark.timeout(120)
def test_volume_folder_removed_nothing_is_durable(make_store: MakeStore) -> None:
    store = make_store(NODE)
    engine = store.engine("a")
    assert engine.store("kept", 8, durable=True).durable
    shutil.rmtree(store.cluster.volume_path("a"))
    for chain in ("more", "kept"):
        result = engine.store(chain, 8, durable=True)
        assert result.held_blocks == 8
        assert not result.durable
        assert isinstance(result.error, Unavailable)
    with KVClient.connect(store.cluster.metadata_address, engine.spec, node=None) as far:
        keys = engine.keys("kept", 8)
        assert not far.store(keys, engine.allocate(8), durable=True).durable
    assert engine.load("more", 8).hit_blocks == 8, "stores continue into DRAM"
    assert store.node_stats("a").counters["nvme_files_gone_total"] == 1
    wait_until(lambda: "no longer in" in str(volume_status(store)["read_only"]), "kvstore status shows it")
    store.empty_dram("a")
    assert engine.load("kept", 8).hit_blocks == 8, "blocks in the open file are read"
