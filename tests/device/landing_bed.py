"""A volume with a chain of blocks, and an engine on a late device whose landing ring reads it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from caches import block_bytes, make_cache
from deferred import DeferredDevice

from kvclient.call.execution import CallScope
from kvclient.device.copier import DeviceCopier
from kvclient.device.layouts import PagedCache
from kvclient.device.page_scatter import TorchScatter
from kvclient.gds.landing_ring import LandingRing
from kvclient.memory.engine_pool import DiskLocations, StoredVolume
from kvstore.core import checksum
from kvstore.core.clock import MonotonicClock
from kvstore.core.keys import KeyChain
from kvstore.core.types import VolumeId
from kvstore.observe.counters import Counters
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.nvme.slab import NvmeSlab
from kvstore.tiers.nvme.superblock import DATA_START
from support.wait import wait_until

VOLUME = VolumeId("n/nvme0")
BLOCKS = 12
PAGES = 32
STRIDE = 4096
"""Bytes of a slot in the ring: a block is smaller."""


def cache_of(seed: int) -> PagedCache:
    return make_cache("flash_nhd", layers=3, pages=PAGES, tokens=4, heads=2, dim=8, seed=seed)


SPEC = DeviceCopier(cache_of(0)).spec("landing", 4)


class QuickScatter:
    """Torch's indexing under another name: a device with a kernel, which the interpreter would run too slowly."""

    def __init__(self, cache: PagedCache) -> None:
        self._rows = TorchScatter(cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)


class QuickChecksums:
    """xxhash in place of the kernel, at the same points of the same streams."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def of_memory(self, memory: torch.Tensor, offsets: torch.Tensor, layers: int, length: int, *, wide: bool) -> torch.Tensor:
        assert wide
        content = memory.numpy()
        return _sums([[content[at + layer * length :][:length] for layer in range(layers)] for at in offsets.tolist()], layers)

    def of_pages(self, first_layer: int, layers: int, page_ids: torch.Tensor) -> torch.Tensor:
        rows = torch.empty((len(page_ids), layers, self._cache.row_bytes), dtype=torch.uint8)
        TorchScatter(self._cache).to_rows(first_layer, page_ids, rows)
        return _sums(rows.numpy(), layers)


def _sums(blocks: Iterable[Iterable[np.ndarray]], layers: int) -> torch.Tensor:
    sums = [[xxhash.xxh3_64_intdigest(row) for row in block] for block in blocks]
    return torch.from_numpy(np.array(sums, np.uint64).reshape(-1, layers).view(np.int64))


def hash_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let xxhash and torch stand in for the kernels."""
    monkeypatch.setattr("kvclient.device.triton_checksum.TritonChecksums", QuickChecksums)
    monkeypatch.setattr("kvclient.device.triton_scatter.TritonScatter", QuickScatter)


class Volume:
    """A node's volume with one chain."""

    def __init__(self, folder: Path) -> None:
        tokens = np.random.default_rng(1).integers(0, 1 << 16, BLOCKS * 4, dtype=np.uint32)
        self.keys = KeyChain(SPEC).keys(tokens)
        source = cache_of(1)
        self.bytes = block_bytes(source, list(range(BLOCKS)))
        self.slab = NvmeSlab.open(folder, volume_id=VOLUME, capacity_bytes=1 << 20, counters=Counters())
        list(self.slab.recover())
        self.slots = self.slab.allocate(SPEC.shape, BLOCKS) or []
        items = []
        for at, slot in enumerate(self.slots):
            payload = memoryview(self.bytes[at].tobytes())
            sums = checksum.layer_checksums(payload, SPEC.shape)
            parent = self.keys[at - 1] if at else None
            items.append((slot, BlockRecord(SPEC.namespace, self.keys[at], parent, at, SPEC.shape, sums), payload))
        assert self.slab.write(items) == [None] * BLOCKS
        self.slab.commit([(slot, record) for slot, record, _ in items], [])
        self.stored = [StoredVolume(VOLUME, folder)]
        self.file = folder / "slab.kv"

    def flip(self, at: int, position: int) -> None:
        """Change one bit of a slot; a second call changes it back."""
        fd = os.open(self.file, os.O_RDWR)
        where = DATA_START + self.slots[at].offset + position
        os.pwrite(fd, bytes([os.pread(fd, 1, where)[0] ^ 4]), where)
        os.fsync(fd)
        os.close(fd)


class Engine:
    """Pages on a late device, and the ring that volumes are read into."""

    def __init__(self, volume: Volume, seed: int, *, slots: int = 4, gds: Any = "forced", **choices: Any) -> None:
        self.volume = volume
        self.device = DeferredDevice(seed)
        self.device.memory = torch.device("cuda", 0)
        self.cache = cache_of(seed + 2)
        self.copier = DeviceCopier(self.cache, device=self.device, pin=False, **choices)
        self.ring = LandingRing(self.copier, gds=gds, ring_bytes=slots * STRIDE)
        self.reader = self.ring.attach(SPEC)
        self.reader.prepare_disks(volume.stored)

    def wait_ready(self) -> None:
        wait_until(lambda: self.reader.reads_disks(self.volume.stored))

    def fetch(
        self, pages: Sequence[int], slots: Sequence[Slot] | None = None, *, seconds: float = 30.0, verify: bool = False
    ) -> int:
        """Read the chain into pages; check what is in them afterwards, and return the number of leading blocks."""
        slots = self.volume.slots if slots is None else slots
        before = block_bytes(self.cache, pages)
        places = DiskLocations(
            np.zeros(len(slots), np.uint8),
            np.array([slot.offset for slot in slots], np.uint64),
            np.array([slot.generation for slot in slots], np.uint64),
        )
        scope = CallScope.after(seconds, MonotonicClock())
        buffer = self.copier.blocks(pages)
        assert self.reader.accepts(buffer)
        keys = self.volume.keys
        good = self.reader.fetch_stored(keys, None, 0, self.volume.stored, places, buffer, 0, scope, verify=verify)
        after = block_bytes(self.cache, pages)
        assert np.array_equal(after[:good], self.volume.bytes[:good]), "a hit with other bytes"
        if not verify:
            assert np.array_equal(after[good:], before[good:]), "bytes that were not verified reached pages"
        return good

    def count(self, name: str) -> int:
        return self.copier.counters.snapshot().get(name, 0)

    def close(self) -> None:
        self.ring.close()
        self.device.paused = False
        self.device.run_all()
