"""Measure copies between an arena and a caller's memory, without a store, against one ``memcpy`` of the same bytes.

Blocks are in random order in shared memory, as in an arena after some use, and are copied one by one into one buffer. One large
``memcpy`` is a demanding peer: the C library bypasses the caches only for copies that are long compared with the last-level
cache, so a thread that copies 1 MiB at a time moves a third more bytes over the memory bus. The default is therefore two threads;
one thread is measured as well.
"""

from __future__ import annotations

import mmap
from functools import partial

import numpy as np

import harness
from harness import Figure, Options, Reference, Target
from kvclient.memory.arena import copy_from_arena, copy_to_arena
from kvstore.core.buffers import DenseBlocks
from kvstore.core.types import BlockShape
from peers.memory import SharedCopy


def measure(options: Options, shape: BlockShape, count: int) -> None:
    """Measure one block size."""
    total = count * shape.block_bytes
    arena = mmap.mmap(-1, total)
    np.frombuffer(arena, np.uint8)[:] = 1
    view = memoryview(arena)
    buffer = np.zeros(total, np.uint8)
    blocks = DenseBlocks(buffer.reshape(count, shape.layers, shape.layer_block_bytes))
    offsets = np.random.default_rng(options.seed).permutation(count) * shape.block_bytes
    sums = np.zeros((count, shape.layers), np.uint64)
    with SharedCopy(total) as memory:
        contestants = {
            "load, 2 threads": partial(copy_from_arena, view, offsets, blocks, threads=2),
            "memcpy": partial(memory.copy_into, buffer),
            "load, 1 thread": partial(copy_from_arena, view, offsets, blocks, threads=1),
            "store, 2 threads": partial(copy_to_arena, blocks, view, offsets, threads=2),
            "load with checksums, 2 threads": partial(copy_from_arena, view, offsets, blocks, threads=2, checksums=sums),
        }

        def rate(work: partial[None]) -> float:
            return harness.gigabytes_per_second(total, work)

        samples = harness.interleave({name: partial(rate, work) for name, work in contestants.items()}, options.repetitions)
    targets = {"load, 2 threads": Target("peer", 0.85)} if shape.block_bytes >= 1 << 20 else {}
    if shape.block_bytes == 4 << 10:
        targets["load with checksums, 2 threads"] = Target("peer", 0.8)
    for name in contestants:
        if name == "memcpy":
            continue
        target = targets.get(name)
        parameters: dict[str, str | int | float | bool] = {"block_bytes": shape.block_bytes, "layers": shape.layers}
        parameters |= {"blocks": count, "what": name}
        options.keep(
            Figure("dram_copy", "Copies between arena and buffer", parameters, "GB/s"),
            samples[name],
            peer=Reference("one memcpy", samples["memcpy"]),
            target=target,
            transport="shared memory",
            verified="checksums" in name,
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
