"""A paged KV cache on a device, as engines lay it out, and an arena of host memory beside it, for ``gpu_copies.py``.

The device is a GPU. The host's memory takes its place for a run with ``--smoke``, which proves that the benchmark works.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

import harness
from kvclient import InvalidArgument
from kvclient.device.copier import STRATEGIES, DeviceCopier
from kvclient.device.driver import CudaDriver
from kvclient.device.layouts import PagedCache
from kvstore.native import address_of

WAYS = tuple(way for way in STRATEGIES if way != "auto")
PIN_S = 300.0
Layout = Literal["split", "page", "block-major"]


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
TINY = Model("tiny", 3, 8, 16, 1e6)
"""For ``--smoke``."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model's KV cache in one engine.

    Attributes:
        model: its shape.
        layout: ``split``: K and V apart, ``page``: K and V in one page per layer (vLLM), ``block-major``: all layers of a page
            together (vLLM with ``kv_layout=block_major``).
        tokens: tokens per page and block.
        ranks: tensor-parallel ranks; this is one of them, with its share of the heads.
    """

    model: Model
    layout: Layout
    tokens: int = 16
    ranks: int = 1

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of this rank, 16 bits per value."""
        return self.model.layers * 2 * self.tokens * self.model.heads // self.ranks * self.model.dim * 2

    @property
    def piece_bytes(self) -> int:
        """Bytes that are contiguous in the cache and in the arena."""
        return self.block_bytes // {"split": 2 * self.model.layers, "page": self.model.layers, "block-major": 1}[self.layout]

    @property
    def parameters(self) -> dict[str, harness.Parameter]:
        """Parameters of a figure."""
        return {
            "model": self.model.name,
            "layout": self.layout,
            "block_tokens": self.tokens,
            "ranks": self.ranks,
            "piece_bytes": self.piece_bytes,
        }

    def cache(self, pages: int, device: torch.device) -> PagedCache:
        """Allocate the cache; its values are arbitrary."""
        heads, tokens, dim, layers = self.model.heads // self.ranks, self.tokens, self.model.dim, self.model.layers
        if self.layout == "split":
            shape: tuple[int, ...] = (2, pages, tokens, heads, dim)
            return PagedCache([torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(layers)], "split")
        shape = (pages, heads, tokens, 2 * dim)
        if self.layout == "page":
            return PagedCache([torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(layers)])
        whole = torch.empty((pages, layers, *shape[1:]), dtype=torch.bfloat16, device=device)
        return PagedCache(list(whole.unbind(1)))


def synchronize(device: torch.device) -> None:
    """Wait for all work of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Return memory of the device that nobody holds any more."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Measure the seconds of work on the device, synchronized before and after."""

    def whole() -> None:
        work()
        synchronize(device)

    synchronize(device)
    return harness.seconds(whole)


def filled(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a contiguous tensor of random bits from a seed."""
    generator = torch.Generator(like.device).manual_seed(seed)
    made = torch.empty(like.shape, dtype=torch.int16, device=like.device)
    return made.random_(-(2**15), 2**15, generator=generator).view(like.dtype)


def notes(device: torch.device) -> str:
    """Describe the device and its software."""
    bytes_are = "random bytes, scattered slots and pages"
    if device.type == "cpu":
        return f"ON THE CPU, no figure of a GPU; torch {torch.__version__}; {bytes_are}"
    driver = CudaDriver(device.index or 0)
    return f"{torch.cuda.get_device_name(device)}; driver speaks CUDA {driver.version}; torch {torch.__version__}; {bytes_are}"


@contextmanager
def host_memory(nbytes: int) -> Iterator[memoryview]:
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


class Bed:
    """A cache, an arena with scattered blocks, and a buffer for the plain copy."""

    def __init__(self, case: Case, blocks: int, view: memoryview, way: str, seed: int, device: torch.device) -> None:
        self.blocks = blocks
        self.device = device
        self.cache = case.cache(blocks + 8, device)
        self.copier = DeviceCopier(self.cache, strategy=way)  # type: ignore[arg-type]
        self.copier.calibrate()  # only auto
        self.guard = self.copier.mapped(view)
        assert self.copier.wait_pinned(PIN_S)
        for report in self.copier.pin_reports():
            if report.refused:
                sys.exit(f"the arena cannot be pinned: {report.refused}")
        self.view = view
        random = np.random.default_rng(seed)
        self.offsets = random.permutation(blocks).astype(np.uint64) * np.uint64(case.block_bytes)
        self.pages = random.permutation(blocks + 8)[:blocks].tolist()
        self.nbytes = blocks * case.block_bytes
        self._check()

    def _check(self) -> None:
        """Check before timing that random bytes survive a store and a load in all layers, and that other pages stay unchanged."""
        tensors = [layer.tensor for layer in self.cache.layers]
        for number, tensor in enumerate(tensors):
            tensor.copy_(filled(tensor, number))
        self.store()
        for tensor in tensors:
            tensor.zero_()
        self.load()
        lead = (slice(None),) if self.cache.kind == "split" else ()
        others = sorted(set(range(self.blocks + 8)) - set(self.pages))
        for number, tensor in enumerate(tensors):  # generated again one at a time: memory may not hold all of it twice
            expected = filled(tensor, number)
            expected[(*lead, others)] = 0
            assert torch.equal(tensor.contiguous().view(torch.int16), expected.view(torch.int16)), f"layer {number}"

    def load(self) -> None:
        """Load all layers of all blocks and wait for the end."""
        blocks = self.copier.blocks(self.pages)
        blocks.read_arena(self.view, self.offsets, 0, 0, len(self.cache.layers))
        blocks.drain()

    def store(self) -> None:
        """Store all layers of all blocks and wait for the end."""
        blocks = self.copier.blocks(self.pages)
        blocks.write_arena(self.view, self.offsets)
        blocks.drain()

    def plain(self, *, to_device: bool) -> Callable[[], None]:
        """Copy the same number of bytes at once, from or to the same host memory."""
        space = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        host, device = address_of(self.view), space.data_ptr()
        target, source = (device, host) if to_device else (host, device)
        driver = self.copier.device.pinning
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

        def copy() -> None:
            assert len(space) == self.nbytes  # alive
            if stream is None:
                ctypes.memmove(target, source, self.nbytes)
                return
            assert isinstance(driver, CudaDriver)
            driver.copy_rows(target, self.nbytes, source, self.nbytes, self.nbytes, 1, stream.cuda_stream)

        return copy

    def close(self) -> None:
        """Unpin the arena."""
        assert self.guard.close()


@contextmanager
def bed(case: Case, blocks: int, way: str, seed: int, device: torch.device) -> Iterator[Bed | None]:
    """Create a bed, or None if the driver or the installation does not support this copy method."""
    free(device)
    with host_memory(blocks * case.block_bytes) as view:
        try:
            made = Bed(case, blocks, view, way, seed, device)
        except InvalidArgument as error:
            print(f"{way}: not measured: {error}", file=sys.stderr)
            yield None
            return
        try:
            yield made
        finally:
            made.close()
