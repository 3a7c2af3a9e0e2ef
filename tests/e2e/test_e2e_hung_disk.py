"""A node with a disk that really hangs: the kernel completes no I/O of it until the test lifts its throttle."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import WAIT_S, Engine, Store
from kvstore.embedded.cluster import NodeSpec
from support.wait import wait_until

MIB = 1 << 20
BLOCKS = 8
STALL_S = 1.0
"""The default of ``node.volume_stall``."""
LONGER_S = 6.0
"""Bound for what a hung disk adds to a request. On an idle machine it adds 1.5 s; the deadline of a request is ``WAIT_S``."""
THROTTLE = Path("/sys/fs/cgroup/blkio")
NOT_TESTED = "a disk that hangs was NOT tested"


class HungDisk:
    """An ext4 on a loop device. To hang it, the I/O throttle of the kernel limits the device to one byte per second."""

    def __init__(self, place: Path) -> None:
        self.place = place
        found = subprocess.run(["findmnt", "-no", "SOURCE", str(place)], capture_output=True, text=True, check=True)
        self._device = Path(f"/sys/block/{os.path.basename(found.stdout.strip())}/dev").read_text().strip()

    def hang(self) -> None:
        """Stop completing I/O."""
        self._throttle(1)

    def go_on(self) -> None:
        """Complete I/O again, also what was outstanding."""
        self._throttle(0)

    def _throttle(self, bytes_per_s: int) -> None:
        for way in ("read", "write"):
            (THROTTLE / f"blkio.throttle.{way}_bps_device").write_text(f"{self._device} {bytes_per_s}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[HungDisk]:
    """A disk for the volume of node ``a`` of the first store."""
    if os.geteuid() or not (THROTTLE / "blkio.throttle.read_bps_device").exists():
        pytest.skip(f"an I/O throttle requires root and the controller blkio of cgroup v1: {NOT_TESTED}")
    image, place = tmp_path / "image", tmp_path / "0" / "a-nvme"
    place.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(96 * MIB)
    for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{command[0]} failed: {NOT_TESTED} ({done.stderr.strip()})")
    made = HungDisk(place)
    yield made
    made.go_on()
    subprocess.run(["umount", "-l", str(place)], check=True)


def timed(work: Callable[[], object]) -> float:
    began_s = time.monotonic()
    work()
    return time.monotonic() - began_s


def stalled(store: Store, volume: str) -> bool:
    """Whether the node's metrics show a volume as stalled."""
    with urllib.request.urlopen(f"http://{store.cluster.node('a').metrics_address}/metrics") as page:
        lines = page.read().decode().splitlines()
    return any(line.startswith("kvstore_node_volume_stalled") and volume in line and line.endswith(" 1.0") for line in lines)


@pytest.mark.timeout(180)
def test_e2e_disk_hung_other_loads_continue(make_store: Callable[..., Store], disk: HungDisk, tmp_path: Path) -> None:
    """Blocks of the hung volume are misses, all others are hits, none is late. All are hits after the disk answers again."""
    second = tmp_path / "second"
    node = NodeSpec("a", dram_bytes=16 * MIB, settings=(("nvme", f"{disk.place / 'v'}:16MiB,{second}:16MiB"),))
    store = make_store(node)
    engine = store.engine("a")
    chains = place_chains(store, engine)
    store.empty_dram("a")
    assert engine.load(chains["a/nvme1"], BLOCKS).hit_blocks == BLOCKS  # so it is in DRAM
    before_s = max(timed(lambda: engine.load(chains["a/nvme1"], BLOCKS)) for _ in range(5))
    disk.hang()
    with ThreadPoolExecutor(12) as engines:  # more than the node's load threads
        hung = [engines.submit(timed, lambda: engine.load(chains["a/nvme0"], BLOCKS, deadline_s=WAIT_S)) for _ in range(8)]
        while not all(one.done() for one in hung):
            assert engine.load(chains["a/nvme1"], BLOCKS).hit_blocks == BLOCKS
            waited_s = timed(lambda: engine.load(chains["a/nvme1"], BLOCKS, deadline_s=WAIT_S))
            assert waited_s < before_s + LONGER_S
    assert max(one.result() for one in hung) < STALL_S + LONGER_S
    wait_until(lambda: stalled(store, "a/nvme0"), "metrics tell")
    result = engine.load(chains["a/nvme0"], BLOCKS, deadline_s=WAIT_S)
    assert result.hit_blocks == 0
    assert max(timed(lambda: engine.load(chains["a/nvme0"], BLOCKS, deadline_s=WAIT_S)) for _ in range(5)) < LONGER_S
    stored = engine.store("new", BLOCKS, durable=True, deadline_s=WAIT_S)
    assert stored.durable, "on the other volume"
    disk.go_on()
    wait_until(lambda: not stalled(store, "a/nvme0"), "metrics tell")
    wait_until(lambda: engine.load(chains["a/nvme0"], BLOCKS).hit_blocks == BLOCKS, "it is read again")
    log = store.cluster.node("a").log_tail(200)
    assert "volume stalled: a/nvme0" in log
    assert "volume answers again: a/nvme0" in log


def place_chains(store: Store, engine: Engine) -> dict[str, str]:
    """Store chains until each volume holds one. Returns the name of a chain for each volume."""
    found: dict[str, str] = {}
    for number in range(8):
        before = {tier.volume_id: tier.blocks for tier in store.node_stats("a").tiers}
        assert engine.store(f"chain{number}", BLOCKS, durable=True).durable
        for tier in store.node_stats("a").tiers[1:]:
            if tier.blocks == before[tier.volume_id] + BLOCKS:
                found.setdefault(tier.volume_id, f"chain{number}")
        if len(found) == 2:
            return found
    raise AssertionError("a volume holds no chain")


@pytest.mark.timeout(180)
def test_e2e_only_disk_hung_stores_are_not_durable_soon(make_store: Callable[..., Store], disk: HungDisk) -> None:
    node = NodeSpec("a", dram_bytes=16 * MIB, settings=(("nvme", f"{disk.place / 'v'}:16MiB"), ("stop_grace", "4s")))
    store = make_store(node)
    engine = store.engine("a")
    assert engine.store("kept", BLOCKS, durable=True).durable
    store.empty_dram("a")
    disk.hang()
    began_s = time.monotonic()
    result = engine.store("new", BLOCKS, durable=True, deadline_s=WAIT_S)
    assert time.monotonic() - began_s < STALL_S * 2.5 + LONGER_S
    assert not result.durable
    assert "a/nvme0 has not answered I/O for" in str(result.error)
    assert engine.load("new", BLOCKS).hit_blocks == BLOCKS, "from DRAM"
    assert timed(lambda: store.flush("a")) < LONGER_S
    assert engine.load("kept", BLOCKS, deadline_s=WAIT_S).hit_blocks == 0
    disk.go_on()
    wait_until(lambda: engine.load("kept", BLOCKS).hit_blocks == BLOCKS, "it is read again")
    wait_until(lambda: store.flush("a"), "what was stored meanwhile becomes durable by itself")


@pytest.mark.timeout(180)
def test_e2e_node_stops_while_its_disk_hangs(make_store: Callable[..., Store], disk: HungDisk) -> None:
    """The node stops in order, within its grace. Only the kernel may keep the process until the disk answers."""
    node = NodeSpec("a", dram_bytes=16 * MIB, settings=(("nvme", f"{disk.place / 'v'}:16MiB"), ("stop_grace", "4s")))
    store = make_store(node)
    engine = store.engine("a")
    assert engine.store("kept", BLOCKS, durable=True).durable
    store.empty_dram("a")
    disk.hang()
    assert engine.load("kept", BLOCKS, deadline_s=WAIT_S).hit_blocks == 0
    daemon = store.cluster.node("a")
    daemon.process.terminate()
    wait_until(lambda: "volume not closed: a/nvme0" in daemon.log_tail(200), "it ends all the same", 4.0 + 6.0)
    disk.go_on()
    assert daemon.process.wait(WAIT_S) == 0
    store.cluster.start_node("a")
    assert store.engine("a").load("kept", BLOCKS).hit_blocks == BLOCKS
