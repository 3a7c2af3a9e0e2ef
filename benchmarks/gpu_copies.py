"""Measure copies between a pinned arena and a paged KV cache on a GPU, against the bus and memory limits. Requires CUDA.

Each figure has a limit from the same run: one ``cudaMemcpyAsync`` of the same bytes, one copy within device memory, the matrix
products or steps alone, or a serial registration. Bytes are checked before anything is timed.

    python benchmarks/gpu_copies.py [--quick]

With ``--smoke --device cpu``, the parts that can do so run on the CPU. This only proves that the benchmark works.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from dataclasses import replace

import numpy as np
import torch

import harness
from harness import Figure, Reference, Target
from kvclient.device.copier import DeviceCopier
from kvclient.device.driver import CudaDriver
from kvclient.device.pins.pinned_range import PinnedRange, cpus_near
from kvclient.memory.device_buffer import PoolMemory
from kvstore.native import address_of
from kvstore.observe.counters import Counters
from rig.gpu_bed import LLAMA, QWEN, TINY, WAYS, Case, bed, free, host_memory, notes, timed
from rig.gpu_serving import serve

HEAD_START_S = 0.2
"""How long the device computes before the measured products: longer than enqueueing a load and these products."""
CASES = (
    *(Case(LLAMA, layout) for layout in ("split", "page", "block-major")),
    *(Case(LLAMA, "page", ranks=ranks) for ranks in (2, 4, 8)),
    Case(LLAMA, "page", tokens=64),
    Case(QWEN, "page"),
)
"""Pieces of 32 KiB, 64 KiB and 2 MiB, shards with 32, 16 and 8 KiB, and two larger ones."""


def copies(options: harness.Options) -> None:
    """Measure loads and stores against one plain copy."""
    for case in CASES:
        for way in (*WAYS, "auto"):
            _copies(options, replace(case, model=TINY) if options.mode == "smoke" else case, way)


def _copies(options: harness.Options, case: Case, way: str) -> None:
    blocks, device = options.pick(full=1000, quick=200, smoke=20), options.extra.device
    with bed(case, blocks, way, options.seed, device) as made:
        if made is None:
            return
        for direction, work in (("load", made.load), ("store", made.store)):
            plain = made.plain(to_device=direction == "load")
            size = made.nbytes / 1e9
            samples = harness.interleave(
                {"ours": lambda: size / timed(device, work), "plain": lambda: size / timed(device, plain)},  # noqa: B023
                options.repetitions,
            )
            parameters = {**case.parameters, "blocks": blocks, "way": way, "device": device.type}
            options.keep(
                Figure(f"gpu_{direction}", f"DRAM {direction}s a paged KV cache", parameters, "GB/s"),
                samples["ours"],
                limit=Reference("one pinned copy", samples["plain"]),
                target=Target("limit", 0.9),
                notes=notes(device) + (f"; auto chose {made.copier.strategy}" if way == "auto" else ""),
            )


def overlap(options: harness.Options) -> None:
    """Measure the matrix products of a prefill, alone and while at least one load runs at any time."""
    side, rounds = options.pick(full=8192, quick=8192, smoke=1024), options.pick(full=60, quick=20, smoke=2)
    blocks = options.pick(full=1000, quick=400, smoke=20)
    for way in WAYS:
        with bed(Case(LLAMA, "page"), blocks, way, options.seed, options.extra.device) as made:
            if made is None:
                continue
            left = torch.randn(side, side, dtype=torch.bfloat16, device="cuda")
            right, out = torch.randn_like(left), torch.empty_like(left)

            def products(count: int = rounds) -> None:
                for _ in range(count):
                    torch.mm(left, right, out=out)  # noqa: B023

            products()
            head_start = math.ceil(HEAD_START_S * rounds / timed(options.extra.device, products))

            # loads use a separate stream: on the products' stream they would wait for the products
            aside = torch.cuda.Stream()

            def window(*, loading: bool) -> float:
                """Measure the products by the device's clock; all are enqueued before the first one starts."""
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                products(head_start)  # noqa: B023
                begin.record()
                products()
                end.record()
                under_way = None
                while loading and not end.query():
                    with torch.cuda.stream(aside):  # noqa: B023
                        target = made.copier.blocks(made.pages)
                        target.read_arena(made.view, made.offsets, 0, 0, len(made.cache.layers))
                    if under_way is None:
                        assert not begin.query(), "the products started before a load did; increase the head start"
                    else:
                        under_way.drain()
                    under_way = target  # enqueue the next load while this one runs
                end.synchronize()
                if under_way is not None:
                    under_way.drain()
                return float(begin.elapsed_time(end)) / 1000

            samples = harness.interleave(
                {"beside": lambda: window(loading=True), "alone": lambda: window(loading=False)},
                options.repetitions,
            )
            options.keep(
                Figure("gpu_overlap", "matrix products beside loads", {"way": way, "side": side}, "s", lower_is_better=True),
                samples["beside"],
                limit=Reference("the same products alone", samples["alone"]),
                target=Target("limit", 1.03),
                notes=notes(options.extra.device),
            )


def pool(options: harness.Options) -> None:
    """Measure copies from a pool's device memory into pages, including the check of page ids and the wait for the end."""
    blocks = options.pick(full=1000, quick=400, smoke=20)
    timed_here = functools.partial(timed, options.extra.device)
    for block_tokens in (16, 64):
        free(options.extra.device)
        cache = Case(LLAMA, "split", tokens=block_tokens).cache(blocks + 8, options.extra.device)
        size = blocks * LLAMA.layers * cache.row_bytes
        source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        random = np.random.default_rng(options.seed)
        pages = random.permutation(blocks + 8)[:blocks].tolist()
        offsets = random.permutation(blocks) * (LLAMA.layers * cache.row_bytes)
        copier = DeviceCopier(cache)
        memory = PoolMemory(str(source.device), source)

        def scatter() -> None:
            copier.blocks(pages).read_pool(memory, offsets, 0)  # noqa: B023

        for layer in cache.layers:
            layer.tensor.zero_()
        scatter()  # check the bytes before timing
        slots = torch.from_numpy(offsets // (LLAMA.layers * cache.row_bytes)).cuda()
        rows = source.view(torch.int16).view(blocks, LLAMA.layers, 2, -1)
        others = sorted(set(range(blocks + 8)) - set(pages))
        for number, layer in enumerate(cache.layers):
            got = layer.tensor.view(torch.int16).view(2, blocks + 8, -1)
            assert torch.equal(got[:, pages], rows[slots, number].transpose(0, 1)), f"layer {number}"
            assert not got[:, others].any(), f"a page outside the load changed in layer {number}"

        samples = harness.interleave(
            {
                "ours": lambda: size / 1e9 / timed_here(scatter),  # noqa: B023
                "plain": lambda: size / 1e9 / timed_here(lambda: target.copy_(source)),  # noqa: B023
            },
            options.repetitions,
        )
        options.keep(
            Figure("gpu_pool_hit", "a hit in device memory into pages", {"block_tokens": block_tokens, "blocks": blocks}, "GB/s"),
            samples["ours"],
            limit=Reference("one copy within device memory", samples["plain"]),
            target=Target("limit", 0.8),
            notes=notes(options.extra.device),
        )


def first_layer(options: harness.Options) -> None:
    """Measure the time until the first layer of 64k tokens of Llama-3-8B is loaded, against the time to compute them.

    The computing time covers only products with the weights, at the rate of a large matrix product on this device. It excludes
    attention, so the figure is a lower bound.
    """
    tokens, side = options.pick(full=65_536, quick=16_384, smoke=512), options.pick(full=8192, quick=8192, smoke=1024)
    left = torch.randn(side, side, dtype=torch.bfloat16, device="cuda")
    rate = 2 * side**3 * 10 / min(timed(options.extra.device, lambda: [left @ left for _ in range(10)]) for _ in range(3))
    compute_s = 2 * LLAMA.parameters * tokens / rate
    for way in WAYS:
        with bed(Case(LLAMA, "page"), tokens // 16, way, options.seed, options.extra.device) as made:
            if made is None:
                continue

            def until_first() -> float:
                blocks = made.copier.blocks(made.pages)
                first = torch.cuda.Event()

                def begin() -> None:
                    blocks.read_arena(made.view, made.offsets, 0, 0, len(made.cache.layers))
                    blocks.wait_on_stream(0)
                    first.record()
                    first.synchronize()

                seconds = harness.seconds(begin)
                blocks.drain()
                return compute_s / seconds

            samples = harness.interleave(
                {"ours": until_first, "all": lambda: compute_s / timed(options.extra.device, made.load)}, options.repetitions
            )
            options.keep(
                Figure("gpu_first_layer", "computing 64k tokens / loading layer 0", {"way": way, "tokens": tokens}, "times"),
                samples["ours"],
                peer=Reference("the same for all layers", samples["all"]),
                target=Target("value", 10),
                notes=f"{notes(options.extra.device)}; products at {rate / 1e12:.0f} TFLOP/s",
            )


def pinning(options: harness.Options) -> None:
    """Measure the start of a pinned arena in untouched memory, against one serial registration."""
    space = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = min(options.pick(full=64 << 30, quick=8 << 30, smoke=256 << 20), int(space * 0.8) >> 21 << 21)
    driver = CudaDriver(torch.cuda.current_device())

    def ours() -> float:
        with host_memory(size) as view:
            near = cpus_near(driver.bus_id)
            pins = PinnedRange(address_of(view), size, driver, Counters(), cpus=near)
            assert pins.wait(600)
            report = pins.report()
            assert report.bytes_pinned == size, report.refused
            assert pins.close()
            return report.seconds

    def serial() -> float:
        with host_memory(size) as view:
            address = address_of(view)
            seconds = harness.seconds(lambda: driver.pin(address, size))
            driver.unpin(address)
            return seconds

    samples = harness.interleave({"ours": ours, "serial": serial}, min(3, options.repetitions), warm_up=0)
    faster = [theirs / mine for mine, theirs in zip(samples["ours"], samples["serial"], strict=True)]
    options.keep(
        Figure("gpu_pin_start", "start of a pinned arena, faster than a serial register", {"bytes": size}, "times"),
        faster,
        target=Target("value", 3),
        notes=f"{notes(options.extra.device)}; seconds: ours {min(samples['ours']):.2f}, serial {min(samples['serial']):.2f}",
    )


RUNS = {
    "copies": copies,
    "client": serve,
    "overlap": overlap,
    "pool": pool,
    "first-layer": first_layer,
    "pinning": pinning,
}
ON_CPU = ("copies", "client")


def main() -> None:
    """Measure the selected parts."""

    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", choices=RUNS, action="append", help="part to measure; may be repeated (default: all)")
        parser.add_argument("--device", type=torch.device, default="cuda:0", help="cuda:N (default cuda:0), or cpu with --smoke")

    options = harness.options("gpu_copies", __doc__, arguments=arguments)
    device = options.extra.device
    if device.type == "cpu" and options.mode != "smoke":
        sys.exit("--device cpu requires --smoke: the CPU yields no figure of a GPU")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            sys.exit("no CUDA device can be reached here (or this torch is built without CUDA): nothing is measured")
        torch.cuda.set_device(device)
    for part in options.extra.only or RUNS:
        if device.type == "cpu" and part not in ON_CPU:
            print(f"{part}: needs a GPU")
            continue
        RUNS[part](options)


if __name__ == "__main__":
    main()
