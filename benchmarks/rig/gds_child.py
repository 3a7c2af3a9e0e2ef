"""Reading process of ``gds_read.py``, separate because a stub of the CUDA driver affects its whole process.

It reads one JSON line ``{folder, block_bytes, total_bytes, seed, device, kvikio}``, opens a volume per I/O engine and answers
with the engines' names. Then it runs one load per engine name received and answers with GB/s. Checks of the bytes are not timed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
from kvstore.core.types import Outcome
from kvstore.observe.counters import Counters
from kvstore.tiers.io_engines.kvikio_library import Kvikio, load_kvikio
from kvstore.tiers.io_engines.probe import choose_gds
from nvme import IO_THREADS, Slabs


def device_load(slabs: Slabs, device: str) -> Callable[[], float]:
    """Load like ``Slabs.load``, into GPU memory."""
    import numpy as np
    import torch

    from kvstore.tiers.io_engines.tensor_memory import TensorMemory

    rows = torch.empty(slabs.source.shape, dtype=torch.uint8, device=device)

    def load() -> float:
        rows.zero_()
        torch.cuda.synchronize()
        items = [(slot, record, TensorMemory(row)) for (slot, record, _), row in zip(slabs.loaded, rows, strict=True)]
        outcomes: list[Outcome] = []
        rate = harness.gigabytes_per_second(slabs.nbytes, lambda: outcomes.extend(slabs.slab.read_device(items)))
        if outcomes != [Outcome.HIT] * slabs.blocks or not np.array_equal(slabs.source, rows.cpu().numpy()):
            raise SystemExit("a load returned wrong bytes")
        return rate

    return load


def main() -> None:
    """Answer requests until stdin closes."""
    asked: dict[str, Any] = json.loads(sys.stdin.readline())
    folder, device = Path(asked["folder"]), str(asked["device"])
    counters = Counters()

    def open_volume(name: str, kvikio: Kvikio | None) -> Slabs:
        (folder / name).mkdir()
        return Slabs(
            folder / name, asked["block_bytes"], asked["total_bytes"] // asked["block_bytes"], asked["seed"], kvikio, counters
        )

    path = "none"
    kvikio: Kvikio | None = None
    if asked["kvikio"] and device == "host":
        path, kvikio = "compat", load_kvikio(threads=IO_THREADS)
    elif asked["kvikio"]:
        kvikio, found = choose_gds("auto", folder, threads=IO_THREADS, counters=counters)
        path = found.path.value
        if kvikio is None and path == "compat":
            kvikio = load_kvikio(threads=IO_THREADS)  # a node would not use kvikio here; this measures what it would cost
    volumes = {"posix": open_volume("posix", None)} | ({"kvikio": open_volume("kvikio", kvikio)} if kvikio else {})
    loads = {name: volume.load if device == "host" else device_load(volume, device) for name, volume in volumes.items()}
    names = {name: volume.slab.io_engine for name, volume in volumes.items()}
    print(json.dumps({"engines": names, "path": path}), flush=True)
    for line in sys.stdin:
        print(json.dumps(loads[line.strip()]()), flush=True)
        if counters.get("gds_read_failures_total"):
            raise SystemExit("kvikio failed and reads fell back to posix; the figure would not measure kvikio")
    for volume in volumes.values():
        volume.slab.close()


if __name__ == "__main__":
    main()
