"""Direct reads of the node's disks into a pool: by any method of this host, and by kvikio with a stub driver."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_bed import VOLUME, Disk, disk_of, gpu_target
from hbm_chains import SPEC as SMALL
from hbm_chains import Below, allocate, in_time

from kvclient import CacheSpec, ClientOptions, InvalidArgument, KVClient, LoadResult, Tier
from kvclient.call.execution import CallScope
from kvclient.gds.volume_reader import GdsReader
from kvclient.hbm import HbmPool
from kvclient.memory.engine_pool import DiskLocations, StoredVolume
from kvclient.results import PATH_HBM, PATH_LOCAL
from kvproto.v1 import node_pb2
from kvstore.core.buffers import DenseBlocks
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import Unavailable, Unsupported
from kvstore.core.types import BlockKey, Outcome, VolumeId
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.node.loads.mounts import Mount
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.rpc.client import call
from kvstore.tiers.io_engines.probe_process import PROBE_BYTES
from kvstore.tiers.nvme.mounted import MountedSlab
from kvstore.tiers.nvme.superblock import DATA_START
from support.client_parts import context_of, session_of
from support.node_stats import evict, node_counter, node_stats
from support.stub_cases import run_stub_cases
from support.wait import wait_until

HERE = Path(__file__).parent
MIB = 1 << 20
SPEC = CacheSpec(model="disks", block_tokens=16, layers=4, layer_block_bytes=8192)
BLOCKS = 40


@pytest.fixture(autouse=True)
def soon_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close waits for the demoter's next poll, which these tests do not need."""
    monkeypatch.setattr("kvclient.hbm.demotion.IDLE_WAIT_S", 0.02)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


# ---- a volume and a pool alone ----
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_gds_read_returns_stored_bytes(tmp_path: Path, seed: int, device: str) -> None:
    """Damaged headers and payloads, slots of other blocks and of other generations: a miss, and no block is kept."""
    rng = random.Random(seed)
    with disk_of(tmp_path, seed=seed, device=device) as disk:
        slots = list(disk.slots)
        faults = sorted(rng.sample(range(12), rng.randrange(4)))
        for at in faults:
            kind = rng.choice(["header", "payload", "other block", "generation", "outside"])
            if kind in ("header", "payload"):
                disk.damage(at, 12 if kind == "header" else 4096 + rng.randrange(SMALL.block_bytes))
            elif kind == "other block":
                slots[at] = disk.slots[at - 1]
            elif kind == "generation":
                slots[at] = slots[at]._replace(generation=slots[at].generation + 1)
            else:
                slots[at] = slots[at]._replace(offset=1 << 40)
        good = faults[0] if faults else 12
        out = allocate(12)
        assert disk.fetch(out, slots) == good
        assert np.array_equal(out.array[:good], disk.data.array[:good])
        stats = disk.pool.stats()
        assert (stats["hbm_located_blocks_total"], stats["hbm_disk_blocks_total"]) == (12, good)
        assert stats["hbm_disk_failed_blocks_total"] == 12 - good
        assert disk.pool.usage().blocks == good, "a slot was lost, or keeps what is no block"
        again = allocate(12)
        assert disk.near.fetch(disk.keys, again, in_time(), verify=True) == good  # they came with their checksums
        assert np.array_equal(again.array[:good], disk.data.array[:good])


def test_gds_chain_larger_than_pool_fills_the_pool(tmp_path: Path) -> None:
    """A chain's tail does not evict its head; the tail stays on the node."""
    with disk_of(tmp_path, blocks=30, space_for=8, space_wait_s=0.0) as disk:
        out = allocate(30)
        assert disk.fetch(out, verify=True) == 8
        assert np.array_equal(out.array[:8], disk.data.array[:8])
        assert disk.pool.usage().blocks == 8


def test_gds_skips_blocks_already_in_pool(tmp_path: Path) -> None:
    with disk_of(tmp_path) as disk:
        assert disk.near.insert(disk.keys[:5], None, 0, DenseBlocks(disk.data.array[:5]), None, checksums=True) == 5
        assert disk.fetch(out := allocate(12)) == 12
        assert np.array_equal(out.array, disk.data.array)
        assert disk.pool.stats()["hbm_disk_blocks_total"] == 7


def test_gds_late_read_keeps_slots_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung driver costs a part of the deadline; it may still write to the slots, so they stay reserved."""
    release, read = threading.Event(), MountedSlab.read_device

    def late(self: MountedSlab, *wanted: Any, **choices: Any) -> Any:
        assert release.wait(30.0)
        return read(self, *wanted, **choices)

    with disk_of(tmp_path) as disk:
        monkeypatch.setattr(MountedSlab, "read_device", late)
        assert disk.fetch(allocate(12), operation=CallScope.after(0.4, MonotonicClock())) == 0
        assert disk.pool.usage().blocks == 12, "slots that are still written to were given back"
        assert disk.pool.evict(demote=False) == 0
        assert not disk.near.reads_disks(disk.volumes)
        assert disk.pool.stats()["hbm_disk_late_blocks_total"] == 12
        assert not disk.pool.resize(8 * SMALL.block_bytes, timeout_s=0.05)
        release.set()
        wait_until(lambda: disk.pool.usage().blocks == 0)
        wait_until(lambda: disk.near.reads_disks(disk.volumes))
        assert disk.fetch(out := allocate(12)) == 12
        assert np.array_equal(out.array, disk.data.array)


def test_gds_failed_volume_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("gone")

    with disk_of(tmp_path) as disk:
        monkeypatch.setattr(MountedSlab, "read_device", fails)
        assert disk.fetch(allocate(12)) == 0
        assert not disk.near.reads_disks(disk.volumes)
        assert disk.pool.usage().blocks == 0
        assert disk.pool.stats()["mount_errors_total"] == 1
        assert any("gone" in line for line in disk.pool.io_engines())


def test_gds_reads_continue_after_resize(tmp_path: Path) -> None:
    with disk_of(tmp_path) as disk:
        assert disk.fetch(allocate(12)) == 12
        assert disk.pool.resize(20 * SMALL.block_bytes)
        assert disk.fetch(out := allocate(12)) == 12
        assert np.array_equal(out.array, disk.data.array)
        assert disk.pool.stats()["hbm_disk_blocks_total"] == 24


def test_gds_hung_volume_keeps_all_slots_of_the_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, read = threading.Event(), MountedSlab.read_device

    def late(self: MountedSlab, *wanted: Any, **choices: Any) -> Any:
        assert self.volume_id == VOLUME or release.wait(30.0)
        return read(self, *wanted, **choices)

    with disk_of(tmp_path / "a") as disk:
        other = Disk(tmp_path / "b", disk.pool, 12, 1, volume=VolumeId("n/nvme1"))  # the same chain again
        volumes = disk.volumes + other.volumes
        wait_until(lambda: disk.near.reads_disks(volumes))
        numbers = np.arange(12, dtype=np.uint8) % 2
        slots = [(disk, other)[number].slots[at] for at, number in enumerate(numbers)]

        def fetch(out: Any, seconds: float) -> int:
            places = DiskLocations(
                numbers,
                np.array([slot.offset for slot in slots], np.uint64),
                np.array([slot.generation for slot in slots], np.uint64),
            )
            operation = CallScope.after(seconds, MonotonicClock())
            return disk.near.fetch_stored(disk.keys, None, 0, volumes, places, out, 0, operation, verify=True)

        assert fetch(out := allocate(12), 30.0) == 12
        assert np.array_equal(out.array, disk.data.array)
        disk.pool.evict(demote=False)
        other.damage(5, 4096 + 100)
        assert fetch(out := allocate(12), 30.0) == 5
        assert np.array_equal(out.array[:5], disk.data.array[:5])
        disk.pool.evict(demote=False)
        monkeypatch.setattr(MountedSlab, "read_device", late)
        assert fetch(allocate(12), 0.4) == 0
        assert disk.pool.usage().blocks == 12, "slots that are still written to were given back"
        assert disk.near.reads_disks(disk.volumes)
        assert not disk.near.reads_disks(other.volumes)
        release.set()
        wait_until(lambda: disk.pool.usage().blocks == 0)
        other.slab.close()


def test_gds_read_behind_slow_reads_keeps_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of another load, with a later deadline, use all threads; this load's read never begins."""
    begun, release, read = threading.Event(), threading.Event(), Mount.read_device

    def slow(self: Mount, *wanted: Any, **choices: Any) -> Any:
        begun.set()
        assert release.wait(30.0)
        return read(self, *wanted, **choices)

    def fetch(first: int, last: int, operation: CallScope) -> int:
        slots = disk.slots[first:last]
        places = DiskLocations(
            np.arange(len(slots), dtype=np.uint8) % 2,
            np.array([slot.offset for slot in slots], np.uint64),
            np.array([slot.generation for slot in slots], np.uint64),
        )
        keys, parent = disk.keys[first:last], disk.keys[first - 1] if first else None
        out = allocate(len(keys))
        good = disk.near.fetch_stored(keys, parent, first, disk.volumes * 2, places, out, 0, operation, verify=False)
        assert np.array_equal(out.array[:good], disk.data.array[first : first + good])
        return good

    with disk_of(tmp_path) as disk, ThreadPoolExecutor(1) as others:
        monkeypatch.setattr(Mount, "read_device", slow)
        monkeypatch.setattr("kvclient.gds.volume_reader.READERS", 1)
        earlier = others.submit(fetch, 0, 6, in_time())
        assert begun.wait(30.0)
        assert fetch(6, 12, CallScope.after(0.2, MonotonicClock())) == 0
        assert not earlier.done()
        assert disk.pool.usage().blocks == 6, "slots of reads that did not begin stayed reserved"
        release.set()
        assert earlier.result() == 6
        assert fetch(6, 12, in_time()) == 6


@pytest.mark.parametrize("groups", [1, 2])
def test_gds_interrupt_keeps_slots_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    """The thread that loads is interrupted while it waits; the reads go on."""
    begun, release, read = threading.Event(), threading.Event(), MountedSlab.read_device

    def late(self: MountedSlab, *wanted: Any, **choices: Any) -> Any:
        begun.set()
        assert release.wait(30.0)
        return read(self, *wanted, **choices)

    def interrupted(*_: object) -> None:
        assert begun.wait(30.0)
        raise KeyboardInterrupt

    with disk_of(tmp_path) as disk:
        monkeypatch.setattr(MountedSlab, "read_device", late)
        monkeypatch.setattr("kvclient.gds.volume_reader.INTERRUPT_S", 0.05)
        monkeypatch.setattr("kvclient.gds.volume_reader.READERS", 1)  # a second volume is not read before the first
        monkeypatch.setattr("kvclient.gds.volume_reader.wait", interrupted)
        disk.volumes = disk.volumes * groups
        numbers = np.arange(12, dtype=np.uint8) % groups
        offsets = np.array([slot.offset for slot in disk.slots], np.uint64)
        places = DiskLocations(numbers, offsets, np.array([slot.generation for slot in disk.slots], np.uint64))
        assert disk.near.fetch_stored(disk.keys, None, 0, disk.volumes, places, allocate(12), 0, in_time(), verify=False) == 0
        assert disk.pool.usage().blocks == 12
        release.set()
        wait_until(lambda: disk.pool.usage().blocks == 0)


@pytest.mark.parametrize("what", ["nothing", "a file"])
def test_gds_unreadable_folder_is_probed_once(tmp_path: Path, what: str) -> None:
    """For example an engine in a container without access to the node's folders."""
    folder = tmp_path / "not-here"
    if what == "a file":
        folder.write_bytes(b"?")
    volumes = [StoredVolume(VOLUME, folder)]
    with HbmPool("cpu", capacity_bytes=MIB, gds="forced") as pool:
        near = pool.attach(SMALL, Below())
        near.prepare_disks(volumes)
        wait_until(lambda: pool.stats().get("mount_errors_total") == 1)
        wait_until(lambda: "directory" in pool.io_engines()[1])
        assert not near.reads_disks(volumes)
        assert pool.usage().blocks == 0


# ---- when disks are read ----
@pytest.mark.parametrize(("mode", "says"), [("auto", "host memory"), ("off", "switched off")])
def test_gds_is_off_for_host_memory_pool(tmp_path: Path, mode: Any, says: str) -> None:
    with HbmPool("cpu", capacity_bytes=MIB, gds=mode) as pool:
        near = pool.attach(SMALL, Below())
        volumes = [StoredVolume(VOLUME, tmp_path)]
        near.prepare_disks(volumes)
        assert not near.reads_disks(volumes)
        assert any(says in line for line in pool.io_engines())


@pytest.mark.parametrize(
    "choices", [{"gds": "yes"}, {"gds": "required"}, {"gds_in_flight": 0}, {"gds_in_flight": True}, {"gds_in_flight": 257}]
)
def test_gds_invalid_options_are_rejected(choices: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="gds"):
        HbmPool("cpu", capacity_bytes=MIB, **choices)


def test_gds_volumes_beyond_the_limit_are_left_to_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvclient.gds.volume_reader.MOST_VOLUMES", 1)
    with disk_of(tmp_path) as disk:
        more = [*disk.volumes, StoredVolume(VolumeId("n/nvme1"), tmp_path)]
        for _ in range(3):
            assert not disk.near.reads_disks(more)
        assert disk.near.reads_disks(disk.volumes)
        assert disk.pool.stats()["gds_not_usable_total"] == 1
    assert len([record for record in caplog.records if "too many volumes for direct reads" in record.getMessage()]) == 1


def test_gds_reads_without_a_thread_are_left_to_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise Unavailable("no thread for the work")

    with disk_of(tmp_path) as disk:
        monkeypatch.setattr("kvclient.gds.volume_reader.submit", refuse)
        monkeypatch.setattr("kvclient.gds.volume_reader._limited", LimitedLog(logging.getLogger("kvclient.gds.volume_reader")))
        for _ in range(3):
            assert disk.fetch(allocate(12)) == 0
        assert disk.pool.stats()["hbm_disk_failed_blocks_total"] == 36
        assert disk.pool.usage().blocks == 0
    assert len([record for record in caplog.records if "no thread for direct reads" in record.getMessage()]) == 1


def test_gds_probe_without_a_thread_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with HbmPool("cpu", capacity_bytes=40 * SMALL.block_bytes, gds="forced") as pool:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            disk = Disk(tmp_path, pool, 12, 1)
            assert not disk.near.reads_disks(disk.volumes)
        wait_until(lambda: disk.near.reads_disks(disk.volumes))
        assert disk.fetch(allocate(12)) == 12
        disk.slab.close()


def test_gds_without_driver_reads_nothing(tmp_path: Path) -> None:
    """The decision of a pool on a CUDA device; only the driver sees that the host has none."""
    if _has_driver():
        pytest.skip("this host has a CUDA driver")
    volumes = [StoredVolume(VOLUME, tmp_path)]
    disks = GdsReader(gpu_target(Counters()), "auto", 8)
    disks.prepare(volumes)
    wait_until(lambda: "no CUDA driver" in disks.describe()[0])
    assert not disks.ready(volumes)
    disks = GdsReader(gpu_target(Counters()), "required", 8)
    for _ in range(2):  # each client that connects is refused
        with pytest.raises(Unsupported, match=r"HbmPool\(gds=\.\.\.\) = required"):
            disks.prepare(volumes)


@pytest.mark.gpu
def test_gds_pool_on_gpu_reads_disks(tmp_path: Path) -> None:
    with HbmPool("cuda", capacity_bytes=40 * SMALL.block_bytes) as pool:
        disk = Disk(tmp_path, pool, 12, 1, 2 * PROBE_BYTES)
        wait_until(lambda: "probe is running" not in pool.io_engines()[1], timeout_s=60.0)
        real = "GPUDirect Storage is real" in pool.io_engines()[1]
        wait_until(lambda: disk.near.reads_disks(disk.volumes) == real)
        out = allocate(12)
        if real:
            assert disk.fetch(out) == 12
            assert np.array_equal(out.array, disk.data.array)
            assert pool.stats()["gds_device_reads_total"] == 12
            assert "device_reads_bounced_total" not in pool.stats()
        disk.slab.close()


def _has_driver() -> bool:
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_gds_kvikio_without_gpu(tmp_path: Path) -> None:
    """kvikio's device path in compatibility mode, with a stub driver: used in mode ``forced``, otherwise the probe detects it."""
    run_stub_cases(HERE / "disks_stub_cases.py", tmp_path)


# ---- with a real node ----
@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    node = NodeSpec("n", dram_bytes=32 * MIB, nvme_bytes=64 * MIB)
    with LocalCluster([node]) as cluster:
        yield cluster


class Bed:
    """An engine with a pool that reads the node's disk, and one without."""

    def __init__(self, cluster: LocalCluster, stack: ExitStack) -> None:
        self.cluster = cluster
        self.pool = stack.enter_context(
            HbmPool("cpu", capacity_bytes=16 * MIB, metadata=cluster.metadata_address, gds="forced", demote=False)
        )
        self.engine = stack.enter_context(self.connect(self.pool))
        self.writer = stack.enter_context(self.connect(None))
        session = session_of(self.engine)
        self.volumes = session.volumes
        near = context_of(self.engine).pool
        assert near is not None
        wait_until(lambda: near.reads_disks(self.volumes))

    def connect(self, pool: HbmPool | None) -> KVClient:
        address = self.cluster.node("n").local_socket
        options = ClientOptions(default_deadline_s=20.0)
        return KVClient.connect(self.cluster.metadata_address, SPEC, node=address, options=options, hbm=pool)

    def evict(self, tier: Tier) -> int:
        return evict(self.cluster, "n", tier)

    def counter(self, name: str) -> int:
        return node_counter(self.cluster, "n", name)

    def in_dram(self) -> int:
        return sum(int(tier.blocks) for tier in node_stats(self.cluster, "n").tiers if tier.tier == Tier.DRAM)

    def on_disk(self, seed: int) -> tuple[list[BlockKey], np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
        """A chain only on the node's disk, according to the index."""
        random_ = np.random.default_rng(seed)
        keys = self.writer.keys(random_.integers(0, 1 << 17, BLOCKS * SPEC.block_tokens, dtype=np.uint32))
        data = np.frombuffer(random_.bytes(BLOCKS * SPEC.block_bytes), np.uint8).reshape(BLOCKS, SPEC.layers, -1)
        assert self.writer.store(keys, data, durable=True).durable
        self.evict(Tier.DRAM)
        wait_until(lambda: {run.tier for run in self.writer.lookup(keys).runs} == {Tier.NVME})
        return keys, data

    def load(self, keys: Sequence[BlockKey], data: Any, **choices: Any) -> LoadResult:
        out = np.zeros_like(data)
        result = self.engine.load(self.engine.lookup(keys), out, **choices)
        good = result.outcomes == Outcome.HIT
        assert np.array_equal(out[good], data[good])
        return result


@pytest.fixture
def bed(cluster: LocalCluster) -> Iterator[Bed]:
    with ExitStack() as stack:
        yield Bed(cluster, stack)


@pytest.mark.parametrize("verify", ["auto", "always"])
def test_gds_load_bypasses_the_node(bed: Bed, verify: str) -> None:
    keys, data = bed.on_disk(1 if verify == "auto" else 2)
    located = bed.counter("located_blocks_total")
    result = bed.load(keys, data, verify=verify)
    assert (result.hit_blocks, result.error) == (BLOCKS, None)
    assert result.bytes_by_tier == {Tier.NVME: data.nbytes}
    assert result.bytes_by_path == {PATH_LOCAL: data.nbytes}
    assert result.bytes_by_node == {"n": data.nbytes}
    assert bed.counter("located_blocks_total") - located == BLOCKS
    assert bed.in_dram() == 0, "blocks went through the node's arena"
    assert bed.pool.stats()["hbm_disk_blocks_total"] == BLOCKS
    again = bed.load(keys, data, verify=verify)
    assert again.bytes_by_path == {PATH_HBM: data.nbytes}
    assert any("n/nvme0 into" in line and "O_DIRECT" in line for line in bed.pool.io_engines())


def test_load_reads_dram_head_and_disk_tail_directly(bed: Bed) -> None:
    keys, data = bed.on_disk(3)
    out = np.zeros_like(data[:12])
    assert bed.writer.load(keys[:12], out).hit_blocks == 12  # brings them into the node's DRAM
    wait_until(lambda: any(run.tier is Tier.DRAM and run.count == 12 for run in bed.writer.lookup(keys).runs))
    out = np.zeros_like(data)
    handle = bed.engine.start_load(bed.engine.lookup(keys), out, layerwise=True)
    for layer in range(SPEC.layers):
        assert handle.wait_layer(layer)
        assert handle.promised_blocks == BLOCKS
        assert np.array_equal(out[:, layer], data[:, layer])
    result = handle.result()
    assert result.bytes_by_tier == {Tier.DRAM: 12 * SPEC.block_bytes, Tier.NVME: 28 * SPEC.block_bytes}
    assert bed.pool.stats()["hbm_disk_blocks_total"] == 28
    assert bed.pool.usage().blocks == BLOCKS


def test_load_without_index_locates_blocks_at_node(bed: Bed) -> None:
    keys, data = bed.on_disk(4)
    address = bed.cluster.node("n").local_socket
    with KVClient.connect(None, SPEC, node=address, hbm=bed.pool) as client:
        out = np.zeros_like(data)
        result = client.load(keys, out)
        assert result.bytes_by_tier == {Tier.NVME: data.nbytes}
        assert np.array_equal(out, data)
        assert client.load(client.keys(np.arange(160, dtype=np.uint32)), np.zeros_like(data[:10])).hit_blocks == 0
    assert bed.pool.stats()["hbm_disk_blocks_total"] == BLOCKS


def test_damaged_block_is_a_miss_and_others_hit(bed: Bed) -> None:
    keys, data = bed.on_disk(5)
    session = session_of(bed.engine)
    answer = call(session.stub.Locate, node_pb2.LocateRequest(session_id=session.session_id, keys=b"".join(keys)), 10.0)
    offset = int(np.frombuffer(answer.runs[0].offsets, "<u8")[17])
    fd = os.open(bed.volumes[0].path / "slab.kv", os.O_RDWR)
    os.pwrite(fd, b"\xa5\x5a\xa5", DATA_START + offset + 4096 + 20_000)
    os.fsync(fd)
    os.close(fd)
    result = bed.load(keys, data)
    assert [at for at in range(BLOCKS) if result.outcome(at) is not Outcome.HIT] == [17]
    stats = bed.pool.stats()
    assert (stats["hbm_disk_blocks_total"], stats["hbm_disk_failed_blocks_total"]) == (BLOCKS - 1, BLOCKS - 17)
    assert result.count(Outcome.HIT) == BLOCKS - 1


def test_gds_failed_read_falls_back_to_node(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("the driver has gone")

    keys, data = bed.on_disk(6)
    monkeypatch.setattr(MountedSlab, "read_device", fails)
    result = bed.load(keys, data)
    assert result.bytes_by_tier == {Tier.NVME: data.nbytes}
    assert bed.in_dram() == BLOCKS
    assert bed.pool.stats()["hbm_disk_failed_blocks_total"] == BLOCKS


def test_gds_hung_read_falls_back_to_node(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    release, read = threading.Event(), MountedSlab.read_device

    def late(self: MountedSlab, *wanted: Any, **choices: Any) -> Any:
        assert release.wait(30.0)
        return read(self, *wanted, **choices)

    keys, data = bed.on_disk(7)
    monkeypatch.setattr(MountedSlab, "read_device", late)
    result = bed.load(keys, data, deadline_s=2.0)
    assert result.bytes_by_tier == {Tier.NVME: data.nbytes}
    assert bed.pool.usage().blocks >= BLOCKS  # the slots that rest
    release.set()
    wait_until(lambda: bed.pool.evict(demote=False) >= 0 and bed.pool.usage().blocks == 0)


def test_located_blocks_are_kept_until_lease_ends(bed: Bed) -> None:
    keys, _ = bed.on_disk(8)
    session = session_of(bed.engine)
    request = node_pb2.LocateRequest(session_id=session.session_id, keys=b"".join(keys[10:20]))
    leases = []
    for _ in range(2):
        answer = call(session.stub.Locate, request, 10.0)
        assert [(run.start, run.count) for run in answer.runs] == [(0, 10)]
        leases.append(answer.lease_id)
        bed.evict(Tier.NVME)
    call(session.stub.Release, node_pb2.ReleaseRequest(session_id=session.session_id, lease_ids=leases), 10.0)
    assert bed.evict(Tier.NVME) >= 10
    assert not call(session.stub.Locate, request, 10.0).runs


def test_locate_over_network_is_rejected(bed: Bed) -> None:
    keys, data = bed.on_disk(9)
    options = ClientOptions(default_deadline_s=20.0)
    with KVClient.connect(None, SPEC, node=bed.cluster.node("n").address, options=options, hbm=bed.pool) as client:
        session = session_of(client)
        assert session.volumes == ()
        with pytest.raises(InvalidArgument, match="unix socket"):
            call(session.stub.Locate, node_pb2.LocateRequest(session_id=session.session_id, keys=b"".join(keys)), 10.0)
        out = np.zeros_like(data)
        assert client.load(keys, out).hit_blocks == BLOCKS
        assert np.array_equal(out, data)
    assert "hbm_disk_blocks_total" not in bed.pool.stats()


def test_gds_reads_continue_after_node_restart(bed: Bed) -> None:
    keys, data = bed.on_disk(10)
    bed.cluster.kill("n")
    bed.cluster.start_node("n")
    wait_until(lambda: bed.writer.lookup(keys).hit_blocks == BLOCKS)

    def came_from_disk() -> bool:
        """Direct reads resume when the engine has a session again; earlier loads may use another path."""
        before = bed.pool.stats().get("hbm_disk_blocks_total", 0)
        bed.pool.evict(demote=False)
        bed.evict(Tier.DRAM)
        return bed.load(keys, data).hit_blocks == BLOCKS and bed.pool.stats().get("hbm_disk_blocks_total") == before + BLOCKS

    wait_until(came_from_disk)
