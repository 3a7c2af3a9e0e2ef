"""A node's volume beside a pool that reads it directly."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hbm_chains import SPEC as SMALL
from hbm_chains import Below, chain, in_time

from kvclient.call.execution import CallScope
from kvclient.gds.volume_reader import ReadTarget
from kvclient.hbm import HbmPool
from kvclient.memory.engine_pool import DiskLocations, StoredVolume
from kvstore.core import checksum
from kvstore.core.clock import MonotonicClock
from kvstore.core.types import VolumeId
from kvstore.observe.counters import Counters
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.nvme.slab import NvmeSlab
from kvstore.tiers.nvme.superblock import DATA_START
from support.wait import wait_until

MIB = 1 << 20
VOLUME = VolumeId("n/nvme0")


class Disk:
    """A node's volume with a chain of blocks, and a pool that reads it."""

    def __init__(
        self, folder: Path, pool: HbmPool, blocks: int, seed: int, capacity_bytes: int = 4 * MIB, volume: VolumeId = VOLUME
    ) -> None:
        self.pool = pool
        self.near = pool.attach(SMALL, Below())
        self.keys, self.data = chain(blocks, seed)
        self.slab = NvmeSlab.open(folder, volume_id=volume, capacity_bytes=capacity_bytes, counters=Counters())
        list(self.slab.recover())
        self.slots = self.slab.allocate(SMALL.shape, blocks) or []
        items = []
        for at, slot in enumerate(self.slots):
            payload = memoryview(self.data.array[at].tobytes())
            sums = checksum.layer_checksums(payload, SMALL.shape)
            record = BlockRecord(SMALL.namespace, self.keys[at], self.keys[at - 1] if at else None, at, SMALL.shape, sums)
            items.append((slot, record, payload))
        assert self.slab.write(items) == [None] * blocks
        self.slab.commit([(slot, record) for slot, record, _ in items], [])
        self.volumes = [StoredVolume(volume, folder)]
        self.file = folder / "slab.kv"
        self.near.prepare_disks(self.volumes)

    def fetch(
        self, out: Any, slots: Sequence[Slot] | None = None, operation: CallScope | None = None, *, verify: bool = False
    ) -> int:
        slots = self.slots if slots is None else slots
        places = DiskLocations(
            np.zeros(len(slots), np.uint8),
            np.array([slot.offset for slot in slots], np.uint64),
            np.array([slot.generation for slot in slots], np.uint64),
        )
        return self.near.fetch_stored(self.keys, None, 0, self.volumes, places, out, 0, operation or in_time(), verify=verify)

    def damage(self, at: int, position: int) -> None:
        fd = os.open(self.file, os.O_RDWR)
        where = DATA_START + self.slots[at].offset + position
        os.pwrite(fd, bytes([os.pread(fd, 1, where)[0] ^ 4]), where)
        os.fsync(fd)
        os.close(fd)


@contextmanager
def disk_of(
    folder: Path, blocks: int = 12, seed: int = 1, space_for: int = 40, device: str = "cpu", space_wait_s: float = 5.0
) -> Iterator[Disk]:
    with HbmPool(device, capacity_bytes=space_for * SMALL.block_bytes, gds="forced", space_wait_s=space_wait_s) as pool:
        disk = Disk(folder, pool, blocks, seed)
        wait_until(lambda: disk.near.reads_disks(disk.volumes))
        yield disk
        disk.slab.close()
        pool.state.table.validate()


def gpu_target(counters: Counters) -> ReadTarget:
    """Memory on a GPU, as far as the decision to read goes."""
    return ReadTarget(
        name="pool/hbm",
        setting="HbmPool(gds=...)",
        device=torch.device("cuda", 0),
        counters=counters,
        clock=MonotonicClock(),
        memory=lambda: None,
        closed=lambda: False,
        release=lambda _: None,
    )
