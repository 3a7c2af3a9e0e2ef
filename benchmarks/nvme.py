"""Measure one NVMe slab alone: cold loads against fio's reads, committed writes against fio's writes and fsync.

Loads read every second slot, so that requests do not merge; fio also reads single blocks at random. A store writes a run of
slots, like a prefix, into slots that were written before, as on a full volume. It ends with the commit: slab synced, catalog
synced. Every load verifies the checksums of all layers; comparing all bytes is not timed. fio uses a file on the same filesystem
with one request in flight per thread of the volume. Caches below O_DIRECT (of the disk or hypervisor) serve both sides equally.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np

import harness
from harness import Figure, Options, Reference, Target
from kvstore.core.checksum import layer_checksums
from kvstore.core.types import BlockKey, BlockShape, NamespaceId, Outcome, VolumeId
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.nvme.slab import NvmeSlab
from peers import PeerMissingError
from peers.fio import NOTE, Fio
from peers.memory import ArenaMemory

LAYERS = 32
IO_THREADS = 4
NAMESPACE = NamespaceId(b"benchmark-nvme-1")


class Slabs:
    """A volume with ``2 * blocks`` slots, half of which are stored and removed in each round."""

    def __init__(
        self,
        folder: Path,
        block_bytes: int,
        blocks: int,
        seed: int,
    ) -> None:
        self.shape = BlockShape(LAYERS, block_bytes // LAYERS)
        self.blocks = blocks
        self.meter = harness.CpuMeter()
        self.nbytes = blocks * block_bytes
        self.slab = NvmeSlab.open(
            folder / "volume",
            volume_id=VolumeId("bench"),
            capacity_bytes=int(2.3 * blocks * (block_bytes + 4096)) + (8 << 20),
            io_threads=IO_THREADS,
        )
        list(self.slab.recover())
        source = ArenaMemory(self.nbytes).bytes.reshape(blocks, block_bytes)
        source[:] = np.random.default_rng(seed).integers(0, 256, source.shape, np.uint8)
        self.source = source
        self.target = ArenaMemory(self.nbytes).bytes.reshape(blocks, block_bytes)
        self.records = [
            BlockRecord(NAMESPACE, BlockKey(at.to_bytes(16, "big")), None, at, self.shape, layer_checksums(row.data, self.shape))
            for at, row in enumerate(source)
        ]
        # blocks to load occupy every second slot; the slots between them stay empty
        slots = self._allocate(2 * blocks)
        self.loaded = list(zip(slots[::2], self.records, (row.data for row in source), strict=True))
        if any(self.slab.write(self.loaded)):
            raise SystemExit("the volume could not be filled")
        self.slab.free(slots[1::2])

    def _allocate(self, count: int) -> list[Slot]:
        slots = self.slab.allocate(self.shape, count)
        if slots is None:
            raise SystemExit("the volume is too small")
        return slots

    def load(self) -> float:
        """Measure the GB/s of one cold load of all blocks."""
        self.target.fill(0)
        items = [(slot, record, row.data) for (slot, record, _), row in zip(self.loaded, self.target, strict=True)]
        outcomes: list[Outcome] = []
        rate = self.meter.gigabytes_per_second(self.nbytes, lambda: outcomes.extend(self.slab.read(items)))
        if outcomes != [Outcome.HIT] * self.blocks or not np.array_equal(self.source, self.target):
            raise SystemExit("a load returned wrong bytes")
        return rate


class Stores:
    """A volume whose slots have all been written before: each round stores a run of blocks and removes it again."""

    def __init__(self, source: Slabs, folder: Path) -> None:
        self._source = source
        self.meter = harness.CpuMeter()
        self.slab = NvmeSlab.open(
            folder / "stores",
            volume_id=VolumeId("bench"),
            capacity_bytes=int(1.15 * source.blocks * (source.source.shape[1] + 4096)) + (8 << 20),
            io_threads=IO_THREADS,
        )
        list(self.slab.recover())

    def store(self) -> float:
        """Measure the GB/s of one durable store."""
        source = self._source
        rows = [row.data for row in source.source]

        def work() -> list[Slot]:
            slots = self.slab.allocate(source.shape, source.blocks)
            if slots is None or any(self.slab.write(list(zip(slots, source.records, rows, strict=True)))):
                raise SystemExit("a store failed")
            self.slab.commit(list(zip(slots, source.records, strict=True)), [])
            return slots

        slots: list[Slot] = []
        rate = self.meter.gigabytes_per_second(source.nbytes, lambda: slots.extend(work()))
        self.slab.commit([], [record.key for record in source.records])
        self.slab.free(slots)
        return rate


def measure(options: Options, folder: Path, block_bytes: int, total: int) -> None:
    """Measure one block size."""
    loads = Slabs(folder, block_bytes, total // block_bytes, options.seed)
    stores = Stores(loads, folder)
    fio = Fio(folder / "fio", total)
    contestants = {"load": loads.load, "store": stores.store}
    missing = ""
    try:
        fio.prepare()
        contestants |= {
            "fio read": lambda: fio.read(total, block_bytes, IO_THREADS, options.seed),
            "fio write": lambda: fio.write_durable(total, block_bytes, IO_THREADS),
        }
    except PeerMissingError as error:
        missing = str(error)
    contestants = {name: contestants[name] for name in ("load", "fio read", "store", "fio write") if name in contestants}
    rounds = harness.interleave(contestants, options.repetitions)
    engine = loads.slab.io_engine
    loads.slab.close()
    stores.slab.close()
    parameters = {"block_bytes": block_bytes, "total_bytes": total, "layers": LAYERS, "depth": IO_THREADS}
    for ours, meter, peer, name, title, bound in (
        ("load", loads.meter, "fio read", "nvme_volume_load", "NVMe load, cold, the volume alone", 0.9),
        ("store", stores.meter, "fio write", "nvme_volume_store_durable", "NVMe store made durable, the volume alone", 0.8),
    ):
        options.keep(
            Figure(name, title, parameters, "GB/s"),
            rounds[ours],
            peer=None if missing else Reference("fio io_uring", rounds[peer]),
            target=Target("peer", bound),
            storage=harness.storage(folder, direct=engine == "posix O_DIRECT", cache="cold in this system"),
            io_engine=engine,
            verified=True,
            notes=missing or NOTE,
            cpu=meter.cost(),
        )


def main() -> None:
    """Measure all block sizes."""
    options = harness.options("nvme", __doc__)
    for block_bytes in options.pick(full=(1 << 20, 4 << 20), quick=(1 << 20,), smoke=(1 << 20,)):
        folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=options.scratch))
        try:
            measure(options, folder, block_bytes, options.pick(full=256 << 20, quick=128 << 20, smoke=8 << 20))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
