"""Every volume passes the conformance suite: the arena, the slab with and without O_DIRECT, and both below a fault wrapper."""

from __future__ import annotations

from pathlib import Path

from kvstore.core.types import VolumeId
from kvstore.testing.volume_suite import DurableVolumeSuite, MappedVolumeSuite
from kvstore.tiers.arena import DramArena
from kvstore.tiers.contract import DurableVolume, MappedVolume
from kvstore.tiers.nvme.slab import NvmeSlab


class TestDramArena(MappedVolumeSuite):
    def open_volume(self, folder: Path, capacity_bytes: int) -> MappedVolume:
        return DramArena(VolumeId("arena"), capacity_bytes, prefault=True)


class TestNvmeSlab(DurableVolumeSuite):
    def open_raw(self, folder: Path, capacity_bytes: int) -> DurableVolume:
        return NvmeSlab.open(folder / "volume", volume_id=VolumeId("slab"), capacity_bytes=capacity_bytes)


class TestBufferedNvmeSlab(DurableVolumeSuite):
    def open_raw(self, folder: Path, capacity_bytes: int) -> DurableVolume:
        return NvmeSlab.open(
            folder / "volume",
            volume_id=VolumeId("slab"),
            capacity_bytes=capacity_bytes,
            direct=False,
            verify_headers=True,
            io_threads=2,
        )
