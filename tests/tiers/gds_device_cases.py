"""kvikio with a stand-in driver that has a device: run by ``test_gds_conformance.py`` in a separate process.

The device's memory is this process's, but kvikio treats it as GPU memory: its device path runs, in compatibility mode.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from mounted_reads import read_into, stored

from kvstore.core.errors import Unsupported
from kvstore.core.types import BlockShape, Outcome, VolumeId
from kvstore.observe.counters import Counters
from kvstore.testing.io_engine_suite import IoEngineSuite
from kvstore.testing.volume_suite import block_payload
from kvstore.tiers.io_engines.contract import DeviceMemory, IoEngine
from kvstore.tiers.io_engines.gds import GdsFile
from kvstore.tiers.io_engines.kvikio_library import load_kvikio
from kvstore.tiers.io_engines.posix import PosixFile
from kvstore.tiers.io_engines.probe import GdsPath, choose_gds, probe_gds
from kvstore.tiers.nvme.mounted import MountedSlab
from kvstore.tiers.nvme.slab import NvmeSlab
from kvstore.tiers.nvme.superblock import DATA_START

SHAPE = BlockShape(4, 50_000)
CUDA = ctypes.CDLL("libcuda.so.1")


class ImaginedMemory:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._address = ctypes.c_size_t()
        assert CUDA.cuMemAlloc_v2(ctypes.byref(self._address), ctypes.c_size_t(nbytes)) == 0

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        data = (self._address.value, False)
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": data, "strides": None, "version": 3}

    def fill(self, source: memoryview) -> None:
        assert CUDA.cuMemcpyHtoD_v2(self._address, bytes(source), ctypes.c_size_t(self.nbytes)) == 0

    def fetch(self, target: memoryview) -> None:
        to = (ctypes.c_char * self.nbytes).from_buffer(target)
        assert CUDA.cuMemcpyDtoH_v2(to, self._address, ctypes.c_size_t(self.nbytes)) == 0

    def __del__(self) -> None:
        CUDA.cuMemFree_v2(self._address)


class TestGdsFileOnADevice(IoEngineSuite):
    def open_engine(self, path: Path, counters: Counters) -> IoEngine:
        posix = PosixFile(path, direct=True, writable=False, counters=counters)
        return GdsFile(posix, load_kvikio(threads=4), in_flight=4, counters=counters)

    def device_memory(self, nbytes: int) -> DeviceMemory:
        return ImaginedMemory(nbytes)


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[NvmeSlab]:
    slab = NvmeSlab.open(tmp_path / "volume", volume_id=VolumeId("v"), capacity_bytes=16 << 20)
    list(slab.recover())
    yield slab
    slab.close()


@pytest.fixture(params=["gds", "posix"])
def mounted(request: pytest.FixtureRequest, slab: NvmeSlab, counters: Counters) -> Iterator[MountedSlab]:
    gds = load_kvikio(threads=4) if request.param == "gds" else None
    mounted = MountedSlab(slab.path, VolumeId("v"), counters=counters, gds=gds)
    yield mounted
    mounted.close()


@pytest.mark.parametrize("verify", [True, False])
def test_read_blocks_into_device_memory(slab: NvmeSlab, mounted: MountedSlab, counters: Counters, verify: bool) -> None:
    """Directly or through host memory: the same bytes; with verification a flipped bit is never a hit."""
    items = stored(slab, SHAPE, 8)
    fd = os.open(slab.path / "slab.kv", os.O_RDWR)
    os.pwrite(fd, b"\xff\xfe", DATA_START + items[2][0].offset + 8)  # header
    os.pwrite(fd, b"\xff\xfe", DATA_START + items[5][0].offset + 4096 + 100_000)  # payload
    os.fsync(fd)
    os.close(fd)
    memories = [ImaginedMemory(SHAPE.block_bytes) for _ in items]
    outcomes = read_into(mounted, items, memories, verify=verify)
    bad = {2, 5} if verify else {2}
    assert {at for at, outcome in enumerate(outcomes) if outcome is Outcome.MISS} == bad
    for at in set(range(8)) - {2, 5}:
        assert outcomes[at] is Outcome.HIT
        found = memoryview(bytearray(SHAPE.block_bytes))
        memories[at].fetch(found)
        assert bytes(found) == block_payload(at, SHAPE)
    way = "gds_device_reads_total" if "gds" in mounted.io_engine else "device_reads_bounced_total"
    assert counters.snapshot()[way] == 8


def test_registered_memory_is_read_into(tmp_path: Path, counters: Counters) -> None:
    (tmp_path / "file").write_bytes(os.urandom(1 << 20))
    kvikio = load_kvikio(threads=4)
    memory = ImaginedMemory(1 << 20)
    assert kvikio.register(memory)
    posix = PosixFile(tmp_path / "file", direct=True, writable=False, counters=counters)
    engine = GdsFile(posix, kvikio, in_flight=4, counters=counters)
    assert engine.read_device(memory, 0)
    kvikio.deregister(memory)
    engine.close()
    posix.close()


def test_probe_detects_pretended_path(tmp_path: Path, counters: Counters) -> None:
    """kvikio reads correctly into device memory, but not with GPUDirect Storage."""
    found = probe_gds(tmp_path)
    assert found.path is GdsPath.COMPAT, found
    assert found.facts["same"] is True
    assert "through host memory" in found.why
    kvikio, _ = choose_gds("auto", tmp_path, threads=4, counters=counters)
    assert kvikio is None
    assert counters.snapshot() == {"gds_pretended_total": 1}
    with pytest.raises(Unsupported, match=r"through host memory.*nvidia-fs.*node\.gds = auto"):
        choose_gds("required", tmp_path, threads=4, counters=counters)
    assert list(tmp_path.iterdir()) == []  # the probe's file was removed
