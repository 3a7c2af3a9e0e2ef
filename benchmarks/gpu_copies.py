"""Measure copies between a pinned arena and a paged KV cache on a GPU, against the bus and memory limits. Requires CUDA.

Each figure has a limit from the same run: one ``cudaMemcpyAsync`` of the same bytes from the same memory, one copy within device
memory, the matrix products alone, or a serial registration. Bytes are checked before anything is timed.

    python benchmarks/gpu_copies.py [--quick]
"""

from __future__ import annotations

import argparse
import gc
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

import harness
from harness import Figure, Reference, Target
from kvclient.device.copier import STRATEGIES, DeviceCopier
from kvclient.device.driver import CudaDriver
from kvclient.device.layouts import PagedCache
from kvclient.device.pins.pinned_range import PinnedRange, cpus_near
from kvclient.memory.device_buffer import PoolMemory
from kvstore.native import address_of
from kvstore.observe.counters import Counters

HEAD_START_S = 0.2
"""How long the device computes before the measured products: longer than enqueueing a load and these products."""
WAYS = tuple(way for way in STRATEGIES if way != "auto")
PARTS = ("copies", "overlap", "pool", "first-layer", "pinning")


@dataclass(frozen=True, slots=True)
class Model:
    """Shape of a model's KV cache, and its computing cost per token."""

    name: str
    layers: int
    heads: int
    dim: int
    parameters: float


LLAMA = Model("llama-3-8b", 32, 8, 128, 8.03e9)
QWEN = Model("qwen2.5-32b", 64, 8, 128, 32.8e9)


def timed(work: Callable[[], object]) -> float:
    """Measure the seconds of work on the device, synchronized before and after."""

    def whole() -> None:
        work()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return harness.seconds(whole)


@contextmanager
def mapped(nbytes: int) -> Iterator[memoryview]:
    """Map memory of the same kind as a node's arena."""
    fd = os.memfd_create("bench-gpu")
    os.ftruncate(fd, nbytes)
    memory = mmap.mmap(fd, nbytes)
    os.close(fd)
    view = memoryview(memory)
    try:
        yield view
    finally:
        view.release()
        memory.close()


def _fill(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Generate random bits from a seed."""
    generator = torch.Generator(tensor.device).manual_seed(seed)
    tensor.view(torch.int16).random_(-(2**15), 2**15, generator=generator)
    return tensor


class Bed:
    """A cache of one model, an arena with scattered blocks, and a buffer for the plain copy."""

    def __init__(self, model: Model, block_tokens: int, blocks: int, view: memoryview, way: str, seed: int) -> None:
        self.blocks = blocks
        shape = (2, blocks + 8, block_tokens, model.heads, model.dim)
        self.layers = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(model.layers)]
        self.copier = DeviceCopier(PagedCache(self.layers, "split"), strategy=way, pin_chunk_bytes=1 << 50)  # type: ignore[arg-type]
        self.guard = self.copier.mapped(view)
        assert self.copier.wait_pinned(300)
        report = self.copier.pin_reports()[0]
        if report.refused:
            sys.exit(f"the arena cannot be pinned: {report.refused}")
        self.view = view
        random = np.random.default_rng(seed)
        self.offsets = random.permutation(blocks).astype(np.uint64) * np.uint64(self.copier.shape.block_bytes)
        self.pages = random.permutation(blocks + 8)[:blocks].tolist()
        self.nbytes = blocks * self.copier.shape.block_bytes
        driver = self.copier.device.pinning
        assert isinstance(driver, CudaDriver)
        self.driver = driver
        self._check()

    def _check(self) -> None:
        """Check before timing that random bytes survive a store and a load in all layers, and that other pages stay unchanged."""
        for number, layer in enumerate(self.layers):
            _fill(layer, number)
        self.store()
        for layer in self.layers:
            layer.zero_()
        self.load()
        others = sorted(set(range(self.layers[0].shape[1])) - set(self.pages))
        for number, layer in enumerate(self.layers):  # generated again one at a time: memory may not hold all of it twice
            expected = _fill(torch.empty_like(layer), number)
            expected[:, others] = 0
            assert torch.equal(layer.view(torch.int16), expected.view(torch.int16)), f"layer {number}"

    def load(self) -> None:
        """Load all layers of all blocks and wait for the end."""
        blocks = self.copier.blocks(self.pages)
        blocks.read_arena(self.view, self.offsets, 0, 0, len(self.layers))
        blocks.drain()

    def store(self) -> None:
        """Store all layers of all blocks and wait for the end."""
        blocks = self.copier.blocks(self.pages)
        blocks.write_arena(self.view, self.offsets)
        blocks.drain()

    def plain(self, *, to_device: bool) -> Callable[[], None]:
        """Copy the same number of bytes at once."""
        space = torch.empty(self.nbytes, dtype=torch.uint8, device="cuda")
        host, device = address_of(self.view), space.data_ptr()
        target, source = (device, host) if to_device else (host, device)
        stream = torch.cuda.Stream()

        def copy() -> None:
            assert len(space) == self.nbytes
            self.driver.copy_rows(target, self.nbytes, source, self.nbytes, self.nbytes, 1, stream.cuda_stream)

        return copy

    def close(self) -> None:
        """Unpin the arena."""
        assert self.guard.close()


@contextmanager
def bed(model: Model, block_tokens: int, blocks: int, way: str, seed: int) -> Iterator[Bed | None]:
    """Create a bed, or None if the driver or the installation does not support this copy method."""
    nbytes = blocks * model.layers * 2 * block_tokens * model.heads * model.dim * 2
    with mapped(nbytes) as view:
        try:
            made = Bed(model, block_tokens, blocks, view, way, seed)
        except harness_errors() as error:
            print(f"{way}: not measured: {error}", file=sys.stderr)
            yield None
            return
        try:
            yield made
        finally:
            made.close()
            del made
            gc.collect()
            torch.cuda.empty_cache()


def harness_errors() -> type[Exception]:
    """Exceptions of an unsupported copy method."""
    from kvclient import InvalidArgument

    return InvalidArgument


def notes() -> str:
    """Describe the device and its software."""
    driver = CudaDriver(torch.cuda.current_device())
    name = torch.cuda.get_device_name()
    return f"{name}; driver speaks CUDA {driver.version}; torch {torch.__version__}; random bytes, scattered slots and pages"


def copies(options: harness.Options) -> None:
    """Measure loads and stores against one plain copy."""
    blocks = options.pick(full=1000, quick=200, smoke=20)
    for model in (LLAMA, QWEN):
        for block_tokens in (16, 64):
            for way in WAYS:
                with bed(model, block_tokens, blocks, way, options.seed) as made:
                    if made is None:
                        continue
                    for direction, work in (("load", made.load), ("store", made.store)):
                        plain = made.plain(to_device=direction == "load")
                        size = made.nbytes / 1e9
                        samples = harness.interleave(
                            {"ours": lambda: size / timed(work), "plain": lambda: size / timed(plain)},  # noqa: B023
                            options.repetitions,
                        )
                        parameters = {"model": model.name, "block_tokens": block_tokens, "blocks": blocks, "way": way}
                        options.keep(
                            Figure(f"gpu_{direction}", f"DRAM {direction}s a paged KV cache", parameters, "GB/s"),
                            samples["ours"],
                            limit=Reference("one pinned cudaMemcpyAsync", samples["plain"]),
                            target=Target("limit", 0.9),
                            notes=notes(),
                        )


def overlap(options: harness.Options) -> None:
    """Measure the matrix products of a prefill, alone and while at least one load runs at any time."""
    side, rounds = options.pick(full=8192, quick=8192, smoke=1024), options.pick(full=60, quick=20, smoke=2)
    blocks = options.pick(full=1000, quick=400, smoke=20)
    for way in WAYS:
        with bed(LLAMA, 16, blocks, way, options.seed) as made:
            if made is None:
                continue
            left = torch.randn(side, side, dtype=torch.bfloat16, device="cuda")
            right, out = torch.randn_like(left), torch.empty_like(left)

            def products(count: int = rounds) -> None:
                for _ in range(count):
                    torch.mm(left, right, out=out)  # noqa: B023

            products()
            head_start = math.ceil(HEAD_START_S * rounds / timed(products))

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
                        target.read_arena(made.view, made.offsets, 0, 0, len(made.layers))
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
                notes=notes(),
            )


def pool(options: harness.Options) -> None:
    """Measure copies from a pool's device memory into pages, including the check of page ids and the wait for the end."""
    blocks = options.pick(full=1000, quick=400, smoke=20)
    for block_tokens in (16, 64):
        shape = (2, blocks + 8, block_tokens, LLAMA.heads, LLAMA.dim)
        cache = PagedCache([torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(LLAMA.layers)], "split")
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
            {"ours": lambda: size / 1e9 / timed(scatter), "plain": lambda: size / 1e9 / timed(lambda: target.copy_(source))},  # noqa: B023
            options.repetitions,
        )
        options.keep(
            Figure("gpu_pool_hit", "a hit in device memory into pages", {"block_tokens": block_tokens, "blocks": blocks}, "GB/s"),
            samples["ours"],
            limit=Reference("one copy within device memory", samples["plain"]),
            target=Target("limit", 0.8),
            notes=notes(),
        )
        torch.cuda.empty_cache()


def first_layer(options: harness.Options) -> None:
    """Measure the time until the first layer of 64k tokens of Llama-3-8B is loaded, against the time to compute them.

    The computing time covers only products with the weights, at the rate of a large matrix product on this device. It excludes
    attention, so the figure is a lower bound.
    """
    tokens, side = options.pick(full=65_536, quick=16_384, smoke=512), options.pick(full=8192, quick=8192, smoke=1024)
    left = torch.randn(side, side, dtype=torch.bfloat16, device="cuda")
    rate = 2 * side**3 * 10 / min(timed(lambda: [left @ left for _ in range(10)]) for _ in range(3))
    compute_s = 2 * LLAMA.parameters * tokens / rate
    for way in WAYS:
        with bed(LLAMA, 16, tokens // 16, way, options.seed) as made:
            if made is None:
                continue

            def until_first() -> float:
                blocks = made.copier.blocks(made.pages)
                first = torch.cuda.Event()

                def begin() -> None:
                    blocks.read_arena(made.view, made.offsets, 0, 0, len(made.layers))
                    blocks.wait_on_stream(0)
                    first.record()
                    first.synchronize()

                seconds = harness.seconds(begin)
                blocks.drain()
                return compute_s / seconds

            samples = harness.interleave({"ours": until_first, "all": lambda: compute_s / timed(made.load)}, options.repetitions)
            options.keep(
                Figure("gpu_first_layer", "computing 64k tokens / loading layer 0", {"way": way, "tokens": tokens}, "times"),
                samples["ours"],
                peer=Reference("the same for all layers", samples["all"]),
                target=Target("value", 10),
                notes=f"{notes()}; products at {rate / 1e12:.0f} TFLOP/s",
            )


def pinning(options: harness.Options) -> None:
    """Measure the start of a pinned arena in untouched memory, against one serial registration."""
    space = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = min(options.pick(full=64 << 30, quick=8 << 30, smoke=256 << 20), int(space * 0.8) >> 21 << 21)
    driver = CudaDriver(torch.cuda.current_device())

    def ours() -> float:
        with mapped(size) as view:
            near = cpus_near(driver.bus_id)
            pins = PinnedRange(address_of(view), size, driver, Counters(), cpus=near)
            assert pins.wait(600)
            report = pins.report()
            assert report.bytes_pinned == size, report.refused
            assert pins.close()
            return report.seconds

    def serial() -> float:
        with mapped(size) as view:
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
        notes=f"{notes()}; seconds: ours {min(samples['ours']):.2f}, serial {min(samples['serial']):.2f}",
    )


RUNS = {"copies": copies, "overlap": overlap, "pool": pool, "first-layer": first_layer, "pinning": pinning}


def main() -> None:
    """Measure the selected parts."""

    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", choices=PARTS, action="append", help="part to measure; may be repeated (default: all)")

    options = harness.options("gpu_copies", __doc__, arguments=arguments)
    if not torch.cuda.is_available():
        sys.exit("no CUDA device can be reached here (or this torch is built without CUDA): nothing is measured")
    for part in options.extra.only or PARTS:
        RUNS[part](options)


if __name__ == "__main__":
    main()
