"""Measure copies between an arena and a caller's memory, without a store, against one ``memcpy`` of the same bytes.

Blocks are in random order in shared memory, as in an arena after some use, and are copied one by one into one buffer. One large
``memcpy`` is a demanding peer: the C library bypasses the caches only for copies that are long compared with the last-level
cache, so a thread that copies 1 MiB at a time moves a third more bytes over the memory bus. The default is therefore two threads;
one thread is measured as well. The limit is a bare loop: numpy copies the same blocks in the same order, with as many threads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

import harness
from harness import Figure, Options, Reference, Target
from kvclient.memory.arena import copy_from_arena, copy_to_arena
from kvstore.core.buffers import DenseBlocks
from kvstore.core.types import BlockShape
from peers.memory import ArenaMemory, SharedCopy


def copy_rows(pool: ThreadPoolExecutor, source: np.ndarray, target: np.ndarray, order: np.ndarray, threads: int) -> None:
    """Copy row ``order[i]`` of the source to row ``i`` of the target."""
    shares = zip(np.array_split(order, threads), np.array_split(target, threads), strict=True)
    for share in [pool.submit(np.take, source, rows, 0, out, "clip") for rows, out in shares]:
        share.result()


def measure(options: Options, shape: BlockShape, count: int) -> None:
    """Measure one block size."""
    total = count * shape.block_bytes
    arena = ArenaMemory(total)
    view = arena.view
    buffer = np.full(total, 1, np.uint8)  # no page is missing when it counts
    blocks = DenseBlocks(buffer.reshape(count, shape.layers, shape.layer_block_bytes))
    order = np.random.default_rng(options.seed).permutation(count)
    offsets = order * shape.block_bytes
    sums = np.zeros((count, shape.layers), np.uint64)
    rows = arena.bytes.reshape(count, shape.block_bytes), buffer.reshape(count, shape.block_bytes)
    with SharedCopy(total) as memory, ThreadPoolExecutor(2) as pool:
        contestants = {
            "load, 2 threads": partial(copy_from_arena, view, offsets, blocks, threads=2),
            "memcpy": partial(memory.copy_into, buffer),
            "load, 1 thread": partial(copy_from_arena, view, offsets, blocks, threads=1),
            "store, 2 threads": partial(copy_to_arena, blocks, view, offsets, threads=2),
            "load with checksums, 2 threads": partial(copy_from_arena, view, offsets, blocks, threads=2, checksums=sums),
        }
        bare = {
            f"bare, {name}": partial(copy_rows, pool, *rows, order, threads)
            for name, threads in (("1 thread", 1), ("2 threads", 2))
        }
        meters = {name: harness.CpuMeter() for name in contestants | bare}
        samples = harness.interleave(
            {name: partial(meters[name].gigabytes_per_second, total, work) for name, work in (contestants | bare).items()},
            options.repetitions,
        )
    targets = {"load, 2 threads": Target("peer", 0.85)} if shape.block_bytes >= 1 << 20 else {}
    if shape.block_bytes == 4 << 10:
        targets["load with checksums, 2 threads"] = Target("peer", 0.8)
    for name in contestants:
        if name == "memcpy":
            continue
        target = targets.get(name)
        threads = "1 thread" if name == "load, 1 thread" else "2 threads"
        parameters: dict[str, str | int | float | bool] = {"block_bytes": shape.block_bytes, "layers": shape.layers}
        parameters |= {"blocks": count, "what": name}
        options.keep(
            Figure("dram_copy", "Copies between arena and buffer", parameters, "GB/s"),
            samples[name],
            peer=Reference("one memcpy", samples["memcpy"]),
            limit=Reference(f"rows copied by numpy, {threads}", samples[f"bare, {threads}"]),
            target=target,
            transport="shared memory",
            verified="checksums" in name,
            notes=f"all copies between the buffer and {arena.pages}",
            cpu=meters[name].cost(),
        )


def main() -> None:
    """Measure all block sizes."""
    options = harness.options("dram_copy", __doc__)
    sizes = {
        "4K": (BlockShape(1, 4 << 10), 16_384),
        "64K": (BlockShape(4, 16 << 10), 4_096),
        "1M": (BlockShape(32, 32 << 10), 512),
        "4M": (BlockShape(32, 128 << 10), options.pick(full=128, quick=128, smoke=4)),
    }
    for name in options.pick(full=("4K", "64K", "1M", "4M"), quick=("1M",), smoke=("4K", "4M")):
        measure(options, *sizes[name])


if __name__ == "__main__":
    main()
