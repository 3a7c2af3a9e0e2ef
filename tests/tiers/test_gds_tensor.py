"""Reads from a slab into tensors: host tensors, and GPU tensors by the available path if the host has a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mounted_reads import read_into, stored

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockShape, Outcome, VolumeId
from kvstore.observe.counters import Counters
from kvstore.testing.io_engine_suite import PAGE, IoEngineSuite
from kvstore.testing.volume_suite import block_payload
from kvstore.tiers.io_engines.contract import DeviceMemory, IoEngine
from kvstore.tiers.io_engines.posix import PosixFile
from kvstore.tiers.io_engines.probe import GdsPath, choose_gds
from kvstore.tiers.io_engines.tensor_memory import TensorMemory
from kvstore.tiers.nvme.mounted import MountedSlab
from kvstore.tiers.nvme.slab import NvmeSlab
from kvstore.tiers.nvme.superblock import DATA_START

SHAPE = BlockShape(4, 256 << 10)
BLOCKS = 16


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[NvmeSlab]:
    slab = NvmeSlab.open(tmp_path / "volume", volume_id=VolumeId("v"), capacity_bytes=64 << 20)
    list(slab.recover())
    yield slab
    slab.close()


@pytest.fixture
def mounted(slab: NvmeSlab, device: torch.device, counters: Counters) -> Iterator[MountedSlab]:
    """The volume as an engine opens it: with kvikio if GPUDirect Storage works on this host."""
    gds = choose_gds("auto", slab.path, threads=8, counters=counters)[0] if device.type == "cuda" else None
    mounted = MountedSlab(slab.path, VolumeId("v"), counters=counters, gds=gds)
    yield mounted
    mounted.close()


class TestPosixIntoTensors(IoEngineSuite):
    def open_engine(self, path: Path, counters: Counters) -> IoEngine:
        return PosixFile(path, direct=True, writable=False, counters=counters)

    def device_memory(self, nbytes: int) -> DeviceMemory:
        return TensorMemory(torch.empty(nbytes, dtype=torch.uint8))


def test_blocks_are_read_directly_into_pool_memory(
    slab: NvmeSlab, mounted: MountedSlab, device: torch.device, counters: Counters
) -> None:
    """Each block is read into its part of one large allocation. A flipped bit is a miss; adjacent parts do not change."""
    items = stored(slab, SHAPE, BLOCKS)
    fd = os.open(slab.path / "slab.kv", os.O_RDWR)
    os.pwrite(fd, b"\xff\xfe", DATA_START + items[5][0].offset + PAGE + 100_000)
    os.fsync(fd)
    os.close(fd)
    pool = torch.full(((BLOCKS + 1) * SHAPE.block_bytes,), 0xA5, dtype=torch.uint8, device=device)
    rows = pool.view(BLOCKS + 1, SHAPE.block_bytes)
    outcomes = read_into(mounted, items, [TensorMemory(row) for row in rows[:BLOCKS]])
    assert outcomes == [Outcome.MISS if at == 5 else Outcome.HIT for at in range(BLOCKS)]
    for at in set(range(BLOCKS)) - {5}:
        assert rows[at].cpu().numpy().tobytes() == block_payload(at, SHAPE)
    assert bool((rows[BLOCKS] == 0xA5).all())
    straight = "gds_device_reads_total" if ", gds " in mounted.io_engine else "device_reads_bounced_total"
    assert counters.get(straight) == BLOCKS


def test_engine_reads_volume_of_its_node(slab: NvmeSlab, device: torch.device, tmp_path: Path) -> None:
    """Through the slot manifest, while the node has the volume open."""
    items = stored(slab, SHAPE, BLOCKS)
    slab.commit([(slot, record) for slot, record, _ in items], [])
    counters = Counters()
    gds, found = choose_gds("auto" if device.type == "cuda" else "off", tmp_path / "volume", threads=8, counters=counters)
    mounted = MountedSlab(tmp_path / "volume", VolumeId("v"), counters=counters, gds=gds)
    places = [slot for slot in mounted.find([record.key for _, record, _ in items], SHAPE) if slot is not None]
    rows = torch.empty((BLOCKS, SHAPE.block_bytes), dtype=torch.uint8, device=device)
    wanted = [(item[1].key, slot, TensorMemory(row)) for item, slot, row in zip(items, places, rows, strict=True)]
    answers = mounted.read_device(items[0][1].namespace, SHAPE, wanted)
    assert [outcome for outcome, _ in answers] == [Outcome.HIT] * BLOCKS
    assert [row.cpu().numpy().tobytes() for row in rows] == [block_payload(at, SHAPE) for at in range(BLOCKS)]
    real = found.path is GdsPath.GDS
    assert counters.get("gds_device_reads_total" if real else "device_reads_bounced_total") == BLOCKS
    mounted.close()


def test_tensors_of_any_type_work_and_gaps_are_rejected(device: torch.device) -> None:
    tensor = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    memory = TensorMemory(tensor)
    assert memory.nbytes == 24
    found = memoryview(bytearray(24))
    memory.fetch(found)
    assert list(found.cast("i")) == [0, 1, 2, 3, 4, 5]
    memory.fill(memoryview(bytearray(24)))
    assert not tensor.any()
    assert memory.__cuda_array_interface__["data"] == (tensor.data_ptr(), False)
    with pytest.raises(InvalidArgument, match="contiguous"):
        TensorMemory(tensor.t())
    with pytest.raises(InvalidArgument, match="cuda or cpu"):
        TensorMemory(torch.empty(4, device="meta"))
