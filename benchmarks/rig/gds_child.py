"""Reading process of ``gds_read.py``, separate because a stub of the CUDA driver affects its whole process.

It reads one JSON line ``{folder, block_bytes, total_bytes, seed, device, kvikio}``, opens a volume per I/O engine and answers
with the engines' names. Then it runs one load per engine name received and answers with GB/s. Checks of the bytes are not timed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness
from kvstore.core.types import Outcome
from kvstore.observe.counters import Counters
from kvstore.testing.io_engine_suite import HostDeviceMemory
from kvstore.tiers.contract import BlockRecord
from kvstore.tiers.io_engines.contract import DeviceMemory
from kvstore.tiers.io_engines.kvikio_library import Kvikio, load_kvikio
from kvstore.tiers.io_engines.probe import choose_gds
from kvstore.tiers.nvme.mounted import MountedSlab
from nvme import IO_THREADS, NAMESPACE, Slabs


class Volume:
    """A node's volume, and an engine's reader of it."""

    def __init__(self, folder: Path, asked: dict[str, Any], kvikio: Kvikio | None, counters: Counters) -> None:
        folder.mkdir()
        self.slabs = Slabs(folder, asked["block_bytes"], asked["total_bytes"] // asked["block_bytes"], asked["seed"])
        slab = self.slabs.slab
        self.mounted = MountedSlab(slab.path, slab.volume_id, io_threads=IO_THREADS, counters=counters, gds=kvikio)

    def load(self, memories: Sequence[DeviceMemory], prepare: Callable[[], None]) -> float:
        """Measure the GB/s of one cold load of all blocks, each into its memory."""
        prepare()
        slabs = self.slabs
        wanted = [(record.key, slot, memory) for (slot, record, _), memory in zip(slabs.loaded, memories, strict=True)]
        answers: list[tuple[Outcome, BlockRecord]] = []
        rate = harness.gigabytes_per_second(
            slabs.nbytes, lambda: answers.extend(self.mounted.read_device(NAMESPACE, slabs.shape, wanted))
        )
        found = memoryview(bytearray(slabs.shape.block_bytes))
        for (outcome, _), memory, row in zip(answers, memories, slabs.source, strict=True):
            memory.fetch(found)
            if outcome is not Outcome.HIT or found != row.data:
                raise SystemExit("a load returned wrong bytes")
        return rate

    def close(self) -> None:
        """Close both."""
        self.mounted.close()
        self.slabs.slab.close()


def loader(volume: Volume, device: str) -> Callable[[], float]:
    """Return what loads all blocks into host memory or GPU memory."""
    blocks, block_bytes = volume.slabs.source.shape
    memories: Sequence[DeviceMemory]
    if device == "host":
        memories = [HostDeviceMemory(block_bytes) for _ in range(blocks)]

        def clear() -> None:
            for memory in memories:
                memory.fill(memoryview(bytes(block_bytes)))

        return partial(volume.load, memories, clear)
    import torch

    from kvstore.tiers.io_engines.tensor_memory import TensorMemory

    rows = torch.empty((blocks, block_bytes), dtype=torch.uint8, device=device)

    def zero() -> None:
        rows.zero_()
        torch.cuda.synchronize()

    return partial(volume.load, [TensorMemory(row) for row in rows], zero)


def main() -> None:
    """Answer requests until stdin closes."""
    asked: dict[str, Any] = json.loads(sys.stdin.readline())
    folder, device = Path(asked["folder"]), str(asked["device"])
    counters = Counters()

    path = "none"
    kvikio: Kvikio | None = None
    if asked["kvikio"] and device == "host":
        path, kvikio = "compat", load_kvikio(threads=IO_THREADS)
    elif asked["kvikio"]:
        kvikio, found = choose_gds("auto", folder, threads=IO_THREADS, counters=counters)
        path = found.path.value
        if kvikio is None and path == "compat":
            kvikio = load_kvikio(threads=IO_THREADS)  # a node would not use kvikio here; this measures what it would cost
    volumes = {"posix": Volume(folder / "posix", asked, None, counters)}
    if kvikio is not None:
        volumes["kvikio"] = Volume(folder / "kvikio", asked, kvikio, counters)
    loads = {name: loader(volume, device) for name, volume in volumes.items()}
    names = {name: volume.mounted.io_engine for name, volume in volumes.items()}
    print(json.dumps({"engines": names, "path": path}), flush=True)
    for line in sys.stdin:
        print(json.dumps(loads[line.strip()]()), flush=True)
        if counters.get("gds_read_failures_total"):
            raise SystemExit("kvikio failed and reads fell back to posix; the figure would not measure kvikio")
    for volume in volumes.values():
        volume.close()


if __name__ == "__main__":
    main()
