"""kvikio with a stand-in for the CUDA driver: run by ``test_gds_conformance.py`` in a separate process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from mounted_reads import read_into, stored

from kvstore.core.types import BlockShape, Outcome, VolumeId
from kvstore.observe.counters import Counters
from kvstore.testing.io_engine_suite import HostDeviceMemory, IoEngineSuite
from kvstore.testing.volume_suite import block_payload
from kvstore.tiers.io_engines.contract import IoEngine
from kvstore.tiers.io_engines.gds import GdsFile
from kvstore.tiers.io_engines.kvikio_library import Kvikio, load_kvikio
from kvstore.tiers.io_engines.posix import PosixFile
from kvstore.tiers.nvme.mounted import MountedSlab
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


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[NvmeSlab]:
    slab = NvmeSlab.open(tmp_path / "volume", volume_id=VolumeId("v"), capacity_bytes=16 << 20)
    list(slab.recover())
    yield slab
    slab.close()


@pytest.fixture
def mounted(slab: NvmeSlab, counters: Counters) -> Iterator[MountedSlab]:
    mounted = MountedSlab(slab.path, VolumeId("v"), counters=counters, gds=kvikio())
    yield mounted
    mounted.close()


def test_direct_reads_are_on_and_compatibility_is_not_forced_off() -> None:
    import kvikio.defaults

    load_kvikio(threads=4)
    assert kvikio.defaults.get("auto_direct_io_read") is True
    assert kvikio.defaults.get("compat_mode") != kvikio.CompatMode.OFF
    assert kvikio.defaults.get("num_threads") >= 4


def test_reads_into_device_memory_go_through_kvikio(slab: NvmeSlab, mounted: MountedSlab, counters: Counters) -> None:
    assert ", gds into device memory (kvikio " in mounted.io_engine
    items = stored(slab, SHAPE, 6)
    memories = [HostDeviceMemory(SHAPE.block_bytes) for _ in items]
    with kvikio().carried() as carried:
        assert read_into(mounted, items, memories) == [Outcome.HIT] * 6
        backends = carried()
    assert backends is None or sum(backends.values()) >= 6 * SHAPE.block_bytes
    assert [bytes(memory.memory) for memory in memories] == [block_payload(number, SHAPE) for number in range(6)]
    assert counters.snapshot() == {"gds_device_reads_total": 6}


def test_unregistrable_memory_is_accepted() -> None:
    memory = HostDeviceMemory(1 << 20)
    assert kvikio().register(memory) in (True, False)  # depends on the version, because this is not device memory
    kvikio().deregister(memory)
