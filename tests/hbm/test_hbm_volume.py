"""The pool's volume passes the volume suite of arenas and slabs; on a GPU too, if there is one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvclient.hbm import memory
from kvclient.hbm.volume import HbmVolume
from kvstore.core.buffers import DenseBlocks, ScatteredBlocks
from kvstore.core.errors import CapacityExceeded, InvalidArgument, Unavailable
from kvstore.core.types import BlockShape, VolumeId
from kvstore.testing.volume_suite import VolumeSuite
from kvstore.tiers.contract import Volume

CPU = torch.device("cpu")
SHAPE = BlockShape(3, 1000)


class TestHbmVolumeOnCpu(VolumeSuite):
    def open_volume(self, folder: Path, capacity_bytes: int) -> Volume:
        return HbmVolume(VolumeId("pool"), CPU, capacity_bytes)


@pytest.mark.gpu
class TestHbmVolumeOnGpu(VolumeSuite):
    def open_volume(self, folder: Path, capacity_bytes: int) -> Volume:
        return HbmVolume(VolumeId("pool"), memory.find_device("cuda"), capacity_bytes)


def devices() -> list[object]:
    return ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", devices())
def test_volume_copies_blocks_at_any_slots(device: str) -> None:
    volume = HbmVolume(VolumeId("pool"), memory.find_device(device), 8 << 20)
    slots = volume.allocate(SHAPE, 64) or []
    volume.free(slots[::3])
    slots = [*slots[1::3], *(volume.allocate(SHAPE, 21) or []), *slots[2::3]]
    data = np.frombuffer(np.random.default_rng(1).bytes(len(slots) * SHAPE.block_bytes), np.uint8)
    blocks = data.reshape(len(slots), SHAPE.layers, SHAPE.layer_block_bytes)
    offsets = np.array([slot.offset for slot in slots])
    sums = np.zeros((len(slots), SHAPE.layers), np.uint64)
    volume.copy_in(offsets, DenseBlocks(blocks), sums)
    out = [bytearray(SHAPE.block_bytes) for _ in range(len(slots) + 2)]
    volume.copy_out(offsets, ScatteredBlocks([memoryview(one) for one in out], SHAPE), 1)
    assert [bytes(one) for one in out[1:-1]] == [block.tobytes() for block in blocks]
    assert not any(out[0])
    assert not any(out[-1])
    assert sums.all()
    with pytest.raises(InvalidArgument):
        volume.copy_out(np.array([volume.usage().capacity_bytes - 1]), DenseBlocks(blocks[:1].copy()), 0)
    volume.close()


@pytest.mark.parametrize("device", devices())
def test_volume_resize_requires_free_slots(device: str) -> None:
    volume = HbmVolume(VolumeId("pool"), memory.find_device(device), 1 << 20)
    slots = volume.allocate(SHAPE, 2) or []
    assert not volume.resize(1 << 16)
    volume.free(slots)
    assert volume.resize(1 << 16)
    assert volume.usage().capacity_bytes == len(volume.memory) == 1 << 16
    again = volume.allocate(SHAPE, 1) or []
    assert again[0].generation > slots[-1].generation
    volume.free(again)
    with pytest.raises(CapacityExceeded):
        volume.resize(1 << 62)
    assert volume.usage().capacity_bytes == 4096
    assert volume.resize(1 << 20)
    volume.close()


@pytest.mark.parametrize("name", ["tpu:0", "cuda:x", "cpu:1", "meta", "", "cuda:-1"])
def test_invalid_device_name_is_rejected(name: str) -> None:
    with pytest.raises(InvalidArgument):
        memory.find_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_error_names_the_cause() -> None:
    with pytest.raises(Unavailable, match="no CUDA device"):
        memory.find_device("cuda:0")


@pytest.mark.gpu
def test_gpu_index_out_of_range_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="no such CUDA device"):
        memory.find_device(f"cuda:{torch.cuda.device_count()}")


@pytest.mark.parametrize(
    ("capacity_bytes", "share", "error"),
    [
        (None, None, InvalidArgument),
        (1 << 20, 0.5, InvalidArgument),
        (4095, None, InvalidArgument),
        (True, None, InvalidArgument),
        (-1, None, InvalidArgument),
        (1.5, None, InvalidArgument),
        (None, 0.0, InvalidArgument),
        (None, 1.1, InvalidArgument),
        (None, float("nan"), InvalidArgument),
        (None, True, InvalidArgument),
        (1 << 60, None, CapacityExceeded),
    ],
)
def test_invalid_sizes_are_rejected_before_allocation(
    capacity_bytes: int | None, share: float | None, error: type[Exception]
) -> None:
    with pytest.raises(error):
        memory.pool_bytes(CPU, capacity_bytes, share)


def test_share_is_of_free_memory() -> None:
    assert 0.2 < memory.pool_bytes(CPU, None, 0.25) / memory.free_bytes(CPU) < 0.3
    assert memory.pool_bytes(CPU, 10_000, None) == 8192


def test_out_of_memory_error_names_the_size() -> None:
    with pytest.raises(CapacityExceeded, match="lower its size"):
        memory.take(CPU, 1 << 62)
