"""The engine ``gds`` with a failing kvikio: all bytes are read, no memory is written late, and failures are counted.

kvikio is a stand-in that reads with ``preadv`` in threads and fails on request.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from mounted_reads import read_into, stored

from kvstore.core.errors import InvalidArgument, Unsupported
from kvstore.core.types import BlockShape, Outcome, VolumeId
from kvstore.observe.counters import Counters
from kvstore.testing.io_engine_suite import FILE_BYTES, PAGE, HostDeviceMemory, IoEngineSuite, page_memory
from kvstore.testing.volume_suite import block_payload, items_for
from kvstore.tiers.io_engines import gds
from kvstore.tiers.io_engines.contract import IoEngine
from kvstore.tiers.io_engines.gds import GIVE_UP_AFTER, PAUSE_S, STALLED_S, GdsFile
from kvstore.tiers.io_engines.kvikio_library import Kvikio
from kvstore.tiers.io_engines.posix import PosixFile
from kvstore.tiers.nvme.mounted import MountedSlab
from kvstore.tiers.nvme.slab import NvmeSlab

SHAPE = BlockShape(3, 40_960)

Fault = Callable[[int], None]


class StandIn:
    """The part of kvikio that the engine uses."""

    version = "stand-in"

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(4)
        self.at_start: Fault = lambda _size: None
        self.in_flight: Fault = lambda _size: None
        self.short = 0
        self.scribble = False
        self.started = 0
        self.ended = 0
        self.lock = threading.Lock()
        self.refuse_open = False

    def open(self, path: Path) -> StandIn:
        if self.refuse_open:
            raise RuntimeError("KvikIO failure: no")
        self.fd = os.open(path, os.O_RDONLY)
        return self

    def close(self) -> None:
        os.close(self.fd)

    def pread(self, buffer: Any, size: int, file_offset: int, task_size: int) -> Future[int]:
        assert task_size >= size  # else kvikio would split it, and return before all parts are complete
        self.at_start(size)
        with self.lock:
            self.started += 1
        view = buffer.memory if isinstance(buffer, HostDeviceMemory) else buffer
        future: Future[int] = self.threads.submit(self._read, view[:size], file_offset)
        future.get = lambda: self._get(future, size)  # type: ignore[attr-defined]
        return future

    def _read(self, view: memoryview, offset: int) -> int:
        done = os.preadv(self.fd, [view], offset)
        if self.scribble:
            np.frombuffer(view, np.uint8)[:] = 0xAA
        return done

    def _get(self, future: Future[int], size: int) -> int:
        done = future.result()
        with self.lock:
            self.ended += 1
        self.in_flight(size)
        if done < size:
            raise RuntimeError("POSIX error on pread: EOF")
        return done - self.short


def fails(_size: int) -> None:
    raise RuntimeError("KvikIO failure at: somewhere\nand a page of C++")


@pytest.fixture
def kvikio() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.threads.shutdown()
    assert stand_in.started == stand_in.ended  # each future was waited for


@pytest.fixture
def counters() -> Counters:
    return Counters()


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(tmp_path: Path, kvikio: StandIn, counters: Counters, clock: Clock) -> Iterator[GdsFile]:
    (tmp_path / "file").write_bytes(np.random.default_rng(3).bytes(FILE_BYTES))
    posix = PosixFile(tmp_path / "file", direct=True, writable=False, counters=counters)
    engine = GdsFile(posix, cast("Kvikio", kvikio), in_flight=4, host_reads=True, counters=counters, now_s=clock)
    yield engine
    engine.close()
    posix.close()


def reads(engine: GdsFile, tmp_path: Path) -> bool:
    """A read of several pieces returns the bytes of the file."""
    pieces = [page_memory(PAGE), page_memory(700 * PAGE)]
    assert engine.read(pieces, 3 * PAGE) == 701 * PAGE
    return b"".join(map(bytes, pieces)) == (tmp_path / "file").read_bytes()[3 * PAGE : 704 * PAGE]


class TestGdsWithAStandIn(IoEngineSuite):
    def open_engine(self, path: Path, counters: Counters) -> IoEngine:
        posix = PosixFile(path, direct=True, writable=False, counters=counters)
        return GdsFile(posix, cast("Kvikio", StandIn()), in_flight=4, host_reads=True, counters=counters)


@pytest.mark.parametrize("where", ["at_start", "in_flight", "short"])
def test_kvikio_failure_is_counted_and_read_by_posix(
    engine: GdsFile, kvikio: StandIn, counters: Counters, tmp_path: Path, where: str
) -> None:
    setattr(kvikio, where, 4096 if where == "short" else fails)
    assert reads(engine, tmp_path)
    assert counters.snapshot() == {"gds_read_failures_total": 1}
    setattr(kvikio, where, 0 if where == "short" else lambda _size: None)
    assert reads(engine, tmp_path)
    assert counters.snapshot() == {"gds_read_failures_total": 1}


def test_kvikio_partial_failure_waits_for_running_reads(engine: GdsFile, kvikio: StandIn, tmp_path: Path) -> None:
    """The third request cannot start; the engine waits for the two that write into the caller's memory."""

    def third(_size: int) -> None:
        if kvikio.started == 2:
            fails(0)

    kvikio.at_start = third
    assert reads(engine, tmp_path)
    assert (kvikio.started, kvikio.ended) == (2, 2)


def test_kvikio_repeated_failures_pause_its_use(
    engine: GdsFile, kvikio: StandIn, counters: Counters, clock: Clock, tmp_path: Path
) -> None:
    kvikio.in_flight = fails
    for _ in range(GIVE_UP_AFTER):
        assert "not used" not in engine.name
        assert reads(engine, tmp_path)
    assert "gds not used after failures: KvikIO failure at: somewhere" in engine.name
    assert "C++" not in engine.name
    assert counters.snapshot() == {"gds_read_failures_total": GIVE_UP_AFTER, "gds_given_up_total": 1}
    started = kvikio.started
    assert reads(engine, tmp_path)
    assert kvikio.started == started
    clock.now_s += PAUSE_S + 1
    assert reads(engine, tmp_path)  # one failure is enough now
    assert counters.snapshot()["gds_given_up_total"] == 2
    clock.now_s += PAUSE_S + 1
    kvikio.in_flight = lambda _size: None
    assert reads(engine, tmp_path)
    assert engine.name == "gds (kvikio stand-in)"
    kvikio.in_flight = fails
    assert reads(engine, tmp_path)
    assert "not used" not in engine.name  # it went well in between


def test_end_of_file_is_not_a_kvikio_failure(engine: GdsFile, counters: Counters) -> None:
    for _ in range(2 * GIVE_UP_AFTER):
        assert engine.read([page_memory(2 * PAGE)], FILE_BYTES - PAGE) < 2 * PAGE
    assert "gds_given_up_total" not in counters.snapshot()


def test_host_memory_is_read_by_posix_by_default(tmp_path: Path, kvikio: StandIn, counters: Counters) -> None:
    (tmp_path / "file").write_bytes(bytes(FILE_BYTES))
    posix = PosixFile(tmp_path / "file", direct=True, writable=False, counters=counters)
    engine = GdsFile(posix, cast("Kvikio", kvikio), in_flight=4, counters=counters)
    assert engine.read([page_memory(PAGE)], 0) == PAGE
    assert kvikio.started == 0
    assert engine.name == f"{posix.name}, gds into device memory (kvikio stand-in)"
    assert engine.read_device(HostDeviceMemory(PAGE), 0)
    assert kvikio.started == 1
    engine.close()
    posix.close()


@pytest.fixture
def hung(engine: GdsFile, kvikio: StandIn) -> Iterator[Callable[[int], list[Future[bool]]]]:
    """Start reads that hang until the test ends and own their memory until then."""
    gate = threading.Event()
    threads = ThreadPoolExecutor(4)
    reads: list[Future[bool]] = []

    def hang(count: int) -> list[Future[bool]]:
        arrived = threading.Semaphore(0)

        def wait(_size: int) -> None:
            arrived.release()
            assert gate.wait(60.0)

        kvikio.in_flight = wait
        reads.extend(threads.submit(engine.read_device, HostDeviceMemory(PAGE), 0) for _ in range(count))
        for _ in range(count):
            assert arrived.acquire(timeout=60.0)
        kvikio.in_flight = lambda _size: None
        return reads

    yield hang
    assert not any(read.done() for read in reads)  # no caller was informed that its memory is free
    gate.set()
    assert [read.result(60.0) for read in reads] == [True] * len(reads)
    threads.shutdown()
    assert engine.read_device(HostDeviceMemory(PAGE), 0)
    assert "not used" not in engine.name


def test_hanging_driver_does_not_block_other_reads(
    engine: GdsFile, kvikio: StandIn, counters: Counters, clock: Clock, tmp_path: Path, hung: Callable[[int], list[Future[bool]]]
) -> None:
    hung(1)
    assert engine.read_device(HostDeviceMemory(PAGE), 0)  # not long enough to tell
    clock.now_s += STALLED_S
    started = kvikio.started
    assert not engine.read_device(HostDeviceMemory(PAGE), 0)
    assert reads(engine, tmp_path)
    assert kvikio.started == started
    assert "is stalled" in engine.name
    assert counters.get("gds_stalled_total") == 2


def test_hanging_calls_do_not_block_later_reads(
    engine: GdsFile,
    counters: Counters,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hung: Callable[[int], list[Future[bool]]],
) -> None:
    """kvikio has the maximum number of calls; the next one waits briefly and then falls back."""
    hung(4)
    monkeypatch.setattr(gds, "STALLED_S", 0.01)
    assert reads(engine, tmp_path)
    assert counters.get("gds_stalled_total") == 1
    monkeypatch.undo()


def test_unexpected_error_waits_for_running_reads(engine: GdsFile, kvikio: StandIn) -> None:
    class Odd(Exception):
        pass

    def odd(_size: int) -> None:
        if kvikio.started == 2:
            raise Odd

    kvikio.at_start = odd
    with pytest.raises(Odd):
        engine.read([page_memory(PAGE), page_memory(PAGE), page_memory(PAGE)], 0)
    kvikio.at_start, kvikio.in_flight = fails, lambda _size: None  # the fixture sees that both were waited for


# ---- a slab above it ----


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[NvmeSlab]:
    slab = NvmeSlab.open(tmp_path / "volume", volume_id=VolumeId("v"), capacity_bytes=16 << 20)
    list(slab.recover())
    yield slab
    slab.close()


@pytest.fixture
def mounted(slab: NvmeSlab, kvikio: StandIn, counters: Counters) -> Iterator[MountedSlab]:
    mounted = MountedSlab(slab.path, VolumeId("v"), counters=counters, gds=cast("Kvikio", kvikio))
    yield mounted
    mounted.close()


def test_kvikio_random_failures_lose_no_block(slab: NvmeSlab, mounted: MountedSlab, kvikio: StandIn) -> None:
    draw = np.random.default_rng(1)

    def sometimes(_size: int) -> None:
        if draw.random() < 0.3:
            fails(0)

    items = stored(slab, SHAPE, 30)
    kvikio.in_flight = kvikio.at_start = sometimes
    for _ in range(10):
        memories = [HostDeviceMemory(SHAPE.block_bytes) for _ in items]
        assert read_into(mounted, items, memories) == [Outcome.HIT] * len(items)
        assert [bytes(memory.memory) for memory in memories] == [block_payload(at, SHAPE) for at in range(len(items))]


def test_kvikio_wrong_bytes_are_never_a_hit(slab: NvmeSlab, mounted: MountedSlab, kvikio: StandIn, counters: Counters) -> None:
    items = stored(slab, SHAPE, 9)
    kvikio.scribble = True
    memories = [HostDeviceMemory(SHAPE.block_bytes) for _ in items]
    assert read_into(mounted, items, memories) == [Outcome.MISS] * len(items)
    assert counters.get("gds_device_reads_total") == len(items)


@pytest.mark.parametrize("failing", [False, True])
def test_device_memory_is_filled_on_either_path(
    slab: NvmeSlab, mounted: MountedSlab, kvikio: StandIn, counters: Counters, failing: bool
) -> None:
    items = stored(slab, SHAPE, 9)
    if failing:
        kvikio.in_flight = fails
    memories = [HostDeviceMemory(SHAPE.block_bytes) for _ in items]
    assert read_into(mounted, items, memories) == [Outcome.HIT] * len(items)
    assert [bytes(memory.memory) for memory in memories] == [block_payload(at, SHAPE) for at in range(len(items))]
    assert counters.get("device_reads_bounced_total" if failing else "gds_device_reads_total") == len(items)


def test_device_failure_loses_only_its_block(slab: NvmeSlab, mounted: MountedSlab, kvikio: StandIn, counters: Counters) -> None:
    class Broken(HostDeviceMemory):
        def fill(self, source: memoryview) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        fetch = fill

    items = stored(slab, SHAPE, 4)
    memories = [kind(SHAPE.block_bytes) for kind in (HostDeviceMemory, Broken, HostDeviceMemory, Broken)]
    wanted = [Outcome.HIT, Outcome.UNAVAILABLE] * 2
    assert read_into(mounted, items, memories) == wanted
    kvikio.at_start = fails
    assert read_into(mounted, items, memories) == wanted
    assert counters.get("nvme_read_errors_total") == 4


def test_device_memory_of_wrong_size_is_rejected(slab: NvmeSlab, mounted: MountedSlab) -> None:
    items = stored(slab, SHAPE, 1)
    for nbytes in (SHAPE.block_bytes - 1, SHAPE.block_bytes + 1, 4096):
        with pytest.raises(InvalidArgument, match="one full block"):
            read_into(mounted, items, [HostDeviceMemory(nbytes)])


def test_volume_unopenable_by_kvikio_is_read_by_posix(slab: NvmeSlab, kvikio: StandIn, counters: Counters) -> None:
    kvikio.refuse_open = True
    mounted = MountedSlab(slab.path, VolumeId("v"), counters=counters, gds=cast("Kvikio", kvikio))
    assert mounted.io_engine.startswith("posix")
    assert "gds" not in mounted.io_engine
    assert counters.snapshot()["gds_refused_total"] == 1
    memory = HostDeviceMemory(SHAPE.block_bytes)
    assert read_into(mounted, stored(slab, SHAPE, 1), [memory]) == [Outcome.HIT]
    assert bytes(memory.memory) == block_payload(0, SHAPE)
    mounted.close()
    posix = PosixFile(slab.path / "slab.kv", direct=True, writable=False, counters=counters)
    with pytest.raises(Unsupported, match="kvikio cannot open the slab"):
        GdsFile(posix, cast("Kvikio", kvikio), in_flight=4, counters=counters)
    posix.close()


def test_volume_unopenable_with_gds_required_is_rejected(slab: NvmeSlab, kvikio: StandIn) -> None:
    kvikio.refuse_open = True
    with pytest.raises(Unsupported, match="kvikio cannot open the slab"):
        MountedSlab(slab.path, VolumeId("v"), gds=cast("Kvikio", kvikio), gds_required=True)


@pytest.mark.parametrize("way", ["straight", "failing", "posix"])
def test_mounted_volume_reads_into_device_memory(slab: NvmeSlab, kvikio: StandIn, tmp_path: Path, way: str) -> None:
    """As an engine reads its node's volume; a block that the owner has overwritten is a miss."""
    items = stored(slab, SHAPE, 4)
    slab.commit([(slot, record) for slot, record, _ in items], [])
    counters = Counters()
    mounted = MountedSlab(
        tmp_path / "volume", VolumeId("v"), counters=counters, gds=None if way == "posix" else cast("Kvikio", kvikio)
    )
    keys = [record.key for _, record, _ in items]
    places = [slot for slot in mounted.find(keys, SHAPE) if slot is not None]
    namespace = items[0][1].namespace
    rewritten = items_for([items[1][0]], [77], SHAPE)
    assert slab.write(rewritten) == [None]
    if way == "failing":
        kvikio.in_flight = fails
    memories = [HostDeviceMemory(SHAPE.block_bytes) for _ in items]
    answers = mounted.read_device(namespace, SHAPE, list(zip(keys, places, memories, strict=True)))
    assert [outcome for outcome, _ in answers] == [Outcome.HIT, Outcome.MISS, Outcome.HIT, Outcome.HIT]
    for at in (0, 2, 3):
        assert bytes(memories[at].memory) == block_payload(at, SHAPE)
        assert answers[at][1] == items[at][1]
    assert mounted.find(keys, SHAPE)[1] is None
    assert counters.get("gds_device_reads_total" if way == "straight" else "device_reads_bounced_total") == 4
    with pytest.raises(InvalidArgument, match="one full block"):
        mounted.read_device(namespace, SHAPE, [(keys[0], places[0], HostDeviceMemory(4096))])
    mounted.close()
