"""Measure device copies on a CPU: pages in host memory against memcpy, and the error of attention over an int8 cache.

python benchmarks/device_copies.py [--quick]
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

import harness
from harness import Figure, Reference, Target
from kvclient.device.copier import DeviceCopier
from kvclient.device.int8 import ScaleGroups
from kvclient.device.layouts import PagedCache

LAYERS, TOKENS, HEADS, DIM = 8, 16, 8, 128
"""A quarter of the layers of Llama-3-8B, in blocks of 16 tokens."""


def cpu_copies(options: harness.Options) -> None:
    """Measure loads and stores of a cache in host memory, as in an engine on a CPU."""
    blocks = options.pick(full=1000, quick=300, smoke=20)
    shape = (2, blocks + 8, TOKENS, HEADS, DIM)
    cache = PagedCache([torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)], "split")
    random = np.random.default_rng(options.seed)
    pages = random.permutation(blocks + 8)[:blocks].tolist()
    cache_bytes = blocks * LAYERS * cache.row_bytes
    source, space = random.integers(0, 256, cache_bytes, np.uint8), np.zeros(cache_bytes, np.uint8)
    ways = {
        "batched": DeviceCopier(cache, strategy="batched"),
        "staged": DeviceCopier(cache, strategy="staged"),
        "int8": DeviceCopier(cache, int8=_groups(cache)),
    }
    for way, copier in ways.items():
        size = copier.shape.block_bytes
        arena = random.integers(0, 256, blocks * size, np.uint8)
        view = arena.data
        offsets = random.permutation(blocks).astype(np.uint64) * np.uint64(size)

        def load() -> None:
            buffer = copier.blocks(pages)  # noqa: B023
            buffer.read_arena(view, offsets, 0, 0, LAYERS)  # noqa: B023
            buffer.drain()

        def store() -> None:
            buffer = copier.blocks(pages)  # noqa: B023
            buffer.write_arena(view, offsets)  # noqa: B023
            buffer.drain()

        def plain() -> None:
            ctypes.memmove(space.ctypes.data, source.ctypes.data, cache_bytes)

        if way == "int8":  # random bytes are not numbers that it encodes
            for layer in cache.layers:
                layer.tensor.normal_()
            store()
        load()
        before = arena.copy()
        arena[:] = 0
        store()
        assert np.array_equal(arena, before)
        for direction, work in (("load", load), ("store", store)):
            samples = harness.interleave(
                {
                    "ours": lambda: harness.gigabytes_per_second(cache_bytes, work),  # noqa: B023
                    "memcpy": lambda: harness.gigabytes_per_second(cache_bytes, plain),
                },
                options.repetitions,
            )
            options.keep(
                Figure(f"cpu_pages_{direction}", f"{direction} of pages on the CPU", {"way": way, "blocks": blocks}, "GB/s"),
                samples["ours"],
                limit=Reference("one memcpy, one thread", samples["memcpy"]),
                notes="bytes of pages; K and V apart: pieces of 32 KiB, scattered slots and pages, one thread"
                + (f"; encoded or decoded, {size / (LAYERS * cache.row_bytes):.4f} of the bytes in the store" * (way == "int8")),
            )


def int8_error(options: harness.Options) -> None:
    """Compare attention over a cache that was quantised and restored with attention over the original, both in float32."""
    for heads, kv_heads, dim, context, outliers in (
        (32, 8, 128, 2048, False),
        (32, 8, 128, 2048, True),
        (16, 16, 64, 1024, True),
        (40, 8, 128, 4096, True),
    ):
        errors = []
        for seed in range(options.seed, options.seed + options.pick(full=5, quick=3, smoke=1)):
            generator = torch.Generator().manual_seed(seed)
            blocks = context // TOKENS
            tensor = torch.randn((2, blocks, TOKENS, kv_heads, dim), generator=generator)
            if outliers:  # like keys of trained models: a few channels are many times larger
                channels = torch.randperm(dim, generator=generator)[: dim // 32]
                tensor[0, ..., channels] *= 20
            cache = PagedCache([tensor.to(torch.bfloat16)], "split")
            copier = DeviceCopier(cache, int8=_groups(cache))
            arena = memoryview(bytearray(blocks * copier.shape.block_bytes))
            offsets = np.arange(blocks, dtype=np.uint64) * np.uint64(copier.shape.block_bytes)
            was = cache.layers[0].tensor.clone()
            copier.blocks(range(blocks)).write_arena(arena, offsets)
            copier.blocks(range(blocks)).read_arena(arena, offsets, 0, 0, 1)
            query = torch.randn((1, heads, 8, dim), generator=generator)
            exact, ours = (_attend(query, kv, heads // kv_heads) for kv in (was, cache.layers[0].tensor))
            errors.append(float((ours - exact).norm() / exact.norm()))
        sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "context": context, "outliers": outliers}
        options.keep(
            Figure("int8_attention_error", "int8 blocks: error of attention outputs", sizes, "of the norm", lower_is_better=True),
            errors,
            target=Target("value", 0.02 if outliers else 0.01),
            notes="normal keys, values and queries; a sample per seed",
        )


def _groups(cache: PagedCache) -> ScaleGroups:
    """Groups of a page ``[tokens, heads, dim]``: keys by channel, values by token."""
    return ScaleGroups.along(cache.layers[0].tensor.shape[2:], cache.layers[0].order, 0)


def _attend(query: torch.Tensor, kv: torch.Tensor, repeat: int) -> torch.Tensor:
    """Compute the attention of queries over all tokens of a cache ``[2, blocks, tokens, heads, dim]``, in float32."""
    keys, values = kv.float().flatten(1, 2).permute(0, 2, 1, 3).repeat_interleave(repeat, 1).unsqueeze(1)
    return scaled_dot_product_attention(query, keys, values)


def main() -> None:
    """Measure copies and attention."""
    options = harness.options("device_copies", __doc__)
    cpu_copies(options)
    int8_error(options)


if __name__ == "__main__":
    main()
