"""kvikio with a stand-in for the CUDA driver: run by ``test_gds_conformance.py`` in a separate process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.types import BlockShape, Outcome, VolumeId
from kvstore.observe.counters import Counters
from kvstore.testing.io_engine_suite import HostDeviceMemory, IoEngineSuite
from kvstore.testing.volume_suite import DurableVolumeSuite, assert_reads_back, block_payload, emptied, items_for
from kvstore.tiers.contract import DurableVolume
from kvstore.tiers.io_engines.contract import IoEngine
from kvstore.tiers.io_engines.gds import GdsFile
from kvstore.tiers.io_engines.kvikio_library import Kvikio, load_kvikio
from kvstore.tiers.io_engines.posix import PosixFile
from kvstore.tiers.nvme.slab import NvmeSlab

SHAPE = BlockShape(3, 40_960)


def kvikio() -> Kvikio:
    return load_kvikio(threads=4)


class TestGdsFile(IoEngineSuite):
    def open_engine(self, path: Path, counters: Counters) -> IoEngine:
        posix = PosixFile(path, direct=True, writable=False, counters=counters)
        return GdsFile(posix, kvikio(), in_flight=4, host_reads=True, counters=counters)


class TestBufferedGdsFile(IoEngineSuite):
    def open_engine(self, path: Path, counters: Counters) -> IoEngine:
        posix = PosixFile(path, direct=False, writable=False, counters=counters)
        return GdsFile(posix, kvikio(), in_flight=4, host_reads=True, counters=counters)


class TestGdsSlab(DurableVolumeSuite):
    def open_raw(self, folder: Path, capacity_bytes: int) -> DurableVolume:
        return NvmeSlab.open(
            folder / "volume",
            volume_id=VolumeId("slab"),
            capacity_bytes=capacity_bytes,
            gds=kvikio(),
            gds_host_reads=True,
        )


class TestGdsForDevicesSlab(DurableVolumeSuite):
    """The slab with a node's settings: posix reads host memory."""

    def open_raw(self, folder: Path, capacity_bytes: int) -> DurableVolume:
        return NvmeSlab.open(folder / "volume", volume_id=VolumeId("slab"), capacity_bytes=capacity_bytes, gds=kvikio())


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def slab(tmp_path: Path, counters: Counters) -> Iterator[NvmeSlab]:
    slab = NvmeSlab.open(
        tmp_path / "volume",
        volume_id=VolumeId("v"),
        capacity_bytes=16 << 20,
        counters=counters,
        gds=kvikio(),
        gds_host_reads=True,
    )
    list(slab.recover())
    yield slab
    slab.close()


def test_reads_go_through_kvikio(slab: NvmeSlab, counters: Counters) -> None:
    assert slab.io_engine.startswith("gds (kvikio ")
    items = items_for(slab.allocate(SHAPE, 9) or [], range(9), SHAPE)
    assert slab.write(items) == [None] * 9
    with kvikio().carried() as carried:
        assert_reads_back(slab, items)
        backends = carried()
    assert backends is None or sum(backends.values()) >= 9 * SHAPE.block_bytes
    assert "gds_read_failures_total" not in counters.snapshot()


def test_direct_reads_are_on_and_compatibility_is_not_forced_off() -> None:
    import kvikio.defaults

    load_kvikio(threads=4)
    assert kvikio.defaults.get("auto_direct_io_read") is True
    assert kvikio.defaults.get("compat_mode") != kvikio.CompatMode.OFF
    assert kvikio.defaults.get("num_threads") >= 4


def test_reads_into_device_memory(slab: NvmeSlab, counters: Counters) -> None:
    items = items_for(slab.allocate(SHAPE, 6) or [], range(6), SHAPE)
    assert slab.write(items) == [None] * 6
    memories = [HostDeviceMemory(SHAPE.block_bytes) for _ in items]
    pairs = [(slot, record, memory) for (slot, record, _), memory in zip(items, memories, strict=True)]
    assert slab.read_device(pairs) == [Outcome.HIT] * 6
    assert [bytes(memory.memory) for memory in memories] == [block_payload(number, SHAPE) for number in range(6)]
    assert counters.snapshot()["gds_device_reads_total"] == 6
    assert slab.read(emptied(items)) == [Outcome.HIT] * 6


def test_unregistrable_memory_is_accepted() -> None:
    memory = HostDeviceMemory(1 << 20)
    assert kvikio().register(memory) in (True, False)  # depends on the version, because this is not device memory
    kvikio().deregister(memory)
