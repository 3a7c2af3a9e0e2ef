"""Copies of one engine in any order of completion bring no wrong byte, and each wait between streams is needed for that."""

from __future__ import annotations

import ast
import ctypes
import inspect
import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

pytest.importorskip("triton", reason="Triton is not installed: waits between streams are NOT tested here")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled on this machine", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported

from deferred import ComputingDevice, DeferredEvent, DeferredStream
from landing_bed import QuickChecksums, QuickScatter

import kvclient.device
from kvclient.device import copy_strategies
from kvclient.device.blocks import DeviceBlocks
from kvclient.device.copier import DeviceCopier
from kvclient.device.copy_strategies import CopyRequest, HostMemory, StagedCopy
from kvclient.device.layouts import PagedCache
from kvclient.device.page_scatter import TorchScatter
from kvclient.memory.device_buffer import DeviceChecksums, PoolMemory
from kvstore.core.errors import Internal
from kvstore.native import address_of
from samples import sample

LAYERS, PAGES, ROW, SLOTS = 3, 8, 256, 12
SIZE = LAYERS * ROW
ORDERS, PARTS = 10_000, 10
WAYS = ("staged", "batched", "batched_ahead", "direct")
FOLDER = Path(kvclient.device.__file__).parent
MODULES = ("copy_strategies", "pool_copy", "triton_checksum")

Site = tuple[str, int]
"""A call in the code: file and line."""


def waits() -> dict[str, Site]:
    """All calls that let a stream wait, by module and source."""
    found: dict[str, Site] = {}
    for module in MODULES:
        file = FOLDER / f"{module}.py"
        for owner in ast.walk(ast.parse(file.read_text())):
            if not isinstance(owner, ast.FunctionDef):
                continue
            for node in ast.walk(owner):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "wait":
                    found[f"{module}.{owner.name}: {ast.unparse(node)} at {node.lineno}"] = (str(file), node.lineno)
    return found


class WaitingStream(DeferredStream):
    """Leaves out the waits of one call in the code."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__(device)
        self._left_out = device.left_out

    def wait(self, event: DeferredEvent) -> None:
        here = inspect.currentframe()
        caller = here.f_back if here is not None else None
        if caller is None or (caller.f_code.co_filename, caller.f_lineno) != self._left_out:
            super().wait(event)


class LateDevice(ComputingDevice):
    """A GPU that computes and copies late, as far as the code under test can see."""

    latest: LateDevice

    def __init__(self, seed: int, left_out: Site | None) -> None:
        self.left_out = left_out
        LateDevice.latest = self
        super().__init__(seed, random.Random(seed).choice(["compute", "copies", ""]))
        self.memory = torch.device("cuda", 0)

    def stream(self) -> DeferredStream:
        self.streams.append(WaitingStream(self))
        return self.streams[-1]


class KernelStandIn(QuickScatter):
    """The kernels, also the one that reads host memory."""

    def by_table(
        self,
        first_layer: int,
        layers: int,
        address: int,
        offsets: torch.Tensor,
        common: int,
        page_ids: torch.Tensor,
        *,
        to_pages: bool,
        host: bool,
    ) -> None:
        assert host
        rows = torch.empty((len(offsets), layers, ROW), dtype=torch.uint8)
        if not to_pages:
            self._rows.to_rows(first_layer, page_ids, rows)
        for row, offset in zip(rows, offsets.tolist(), strict=True):
            there, here = address + offset, row.data_ptr()
            ctypes.memmove(*((here, there) if to_pages else (there, here)), layers * ROW)
        if to_pages:
            self._rows.to_pages(first_layer, rows, page_ids)


def value(content: int, layer: int) -> int:
    """The bytes of one layer of a page."""
    return (content * LAYERS + layer) % 255 + 1


def block(content: int) -> bytes:
    return b"".join(bytes([value(content, layer)]) * ROW for layer in range(LAYERS))


def sums(content: int) -> list[int]:
    return [xxhash.xxh3_64_intdigest(bytes([value(content, layer)]) * ROW) for layer in range(LAYERS)]


@dataclass
class Begun:
    """A load or store whose copies may be under way."""

    buffer: DeviceBlocks
    pages: Sequence[int]
    slots: Sequence[int]
    contents: Sequence[int]
    hashes: DeviceChecksums | None


class EngineLife:
    """An engine that computes, stores, loads and attends without waiting, and what it should see.

    Args:
        seed: of the engine, its layout and its copy strategy.
        left_out: a wait that is left out.
    """

    def __init__(self, seed: int, left_out: Site | None = None, way: str = "") -> None:
        self.rng = random.Random(seed)
        self.device = LateDevice(seed, left_out)
        self.cache = self._make_cache()
        self.way = way or self.rng.choice(WAYS)
        strategy: Any = "auto" if self.way == "batched_ahead" else self.way
        staging = self.rng.choice([ROW, 3 * ROW, 1 << 20])
        self.copier = DeviceCopier(self.cache, strategy=strategy, staging_bytes=staging, device=self.device, pin=False)
        assert self.copier.hashes
        assert self.copier.choices["load"].strategy == self.way
        self.arena = np.zeros(SLOTS * SIZE, np.uint8)
        self.pool = torch.zeros(SLOTS * SIZE, dtype=torch.uint8)
        self.numbers = itertools.count()
        self.in_pages: dict[int, int] = {}
        self.in_arena: dict[int, int] = {}
        self.in_pool: dict[int, int] = {}
        self.begun: list[Begun] = []
        self.wrong: list[str] = []

    def _make_cache(self) -> PagedCache:
        layout = self.rng.choice(["split", "pages", "block-major"])
        if layout == "split":
            return PagedCache(list(torch.zeros((LAYERS, 2, PAGES, ROW // 2), dtype=torch.uint8)), "split")
        if layout == "pages":
            return PagedCache(list(torch.zeros((LAYERS, PAGES, ROW), dtype=torch.uint8)))
        return PagedCache(list(torch.zeros((PAGES, LAYERS, ROW), dtype=torch.uint8).unbind(1)))

    # ---- the engine ----
    def compute(self) -> None:
        free = [page for page in range(PAGES) if not any(page in one.pages for one in self.begun)]
        for page in self.rng.sample(free, min(len(free), 3)):
            content = self.in_pages[page] = next(self.numbers)
            self.device.run(lambda page=page, content=content: self._write(page, content))

    def _write(self, page: int, content: int) -> None:
        for number, layer in enumerate(self.cache.layers):
            layer.tensor[(slice(None), page) if self.cache.kind == "split" else page] = value(content, number)

    def attend(self, pages: Sequence[int], layer: int) -> None:
        expected = [(page, self.in_pages[page]) for page in pages]

        def work() -> None:
            tensor = self.cache.layers[layer].tensor
            for page, content in expected:
                row = tensor[:, page] if self.cache.kind == "split" else tensor[page]
                if not bool((row == value(content, layer)).all()):
                    self.wrong.append(f"attention: page {page}, layer {layer}")

        self.device.run(work)

    # ---- the store ----
    def store(self) -> None:
        pages = self._some([page for page in self.in_pages if not any(page in one.pages for one in self.begun)])
        slots = [slot for slot in range(SLOTS) if not any(slot in one.slots for one in self.begun)][: len(pages)]
        pages, contents = pages[: len(slots)], [self.in_pages[page] for page in pages[: len(slots)]]
        for slot in slots:
            self.in_arena.pop(slot, None)
        buffer = self.copier.blocks(pages)
        buffer.write_arena(memoryview(self.arena), np.array(slots, np.int64) * SIZE)
        self._begin(buffer, pages, slots, contents)

    def load(self) -> None:
        pages = self._some([page for page in range(PAGES) if not any(page in one.pages for one in self.begun)])
        slots = self._some(list(self.in_arena))[: len(pages)]
        pages = pages[: len(slots)]
        contents = [self.in_arena[slot] for slot in slots]
        buffer = self.copier.blocks(pages)
        buffer.read_arena(memoryview(self.arena), np.array(slots, np.int64) * SIZE, 0, 0, LAYERS)
        self.in_pages.update(zip(pages, contents, strict=True))
        for layer in range(LAYERS):
            buffer.wait_on_stream(layer)
            self.attend(pages, layer)
        self._begin(buffer, pages, slots, contents)

    def _begin(self, buffer: DeviceBlocks, pages: Sequence[int], slots: Sequence[int], contents: Sequence[int]) -> None:
        if pages:
            hashes = buffer.begin_checksums(0, len(pages), 0, LAYERS) if self.rng.random() < 0.3 else None
            self.begun.append(Begun(buffer, pages, slots, contents, hashes))

    def settle(self) -> None:
        """Wait for a load or store; its blocks count from now on."""
        if not self.begun:
            return
        one = self.begun.pop(self.rng.randrange(len(self.begun)))
        one.buffer.drain()
        for slot, content in zip(one.slots, one.contents, strict=True):
            self.in_arena[slot] = content
            if self.arena[slot * SIZE : (slot + 1) * SIZE].tobytes() != block(content):
                self.wrong.append(f"arena: slot {slot}")
        if one.hashes is not None and one.hashes.result().tolist() != [sums(content) for content in one.contents]:
            self.wrong.append(f"checksums: pages {one.pages}")

    def move(self) -> None:
        """Between pages and a pool of device memory, which waits for the end."""
        memory = PoolMemory(str(self.cache.device), self.pool)
        idle = [page for page in self.in_pages if not any(page in one.pages for one in self.begun)]
        pages = self._some(idle)
        slots = self.rng.sample(range(SLOTS), len(pages))
        self.copier.blocks(pages).write_pool(memory, np.array(slots, np.int64) * SIZE)
        self.in_pool.update((slot, self.in_pages[page]) for page, slot in zip(pages, slots, strict=True))
        slots = self._some(list(self.in_pool))[: len(pages)]
        for layer in range(LAYERS):
            self.attend(pages, layer)
        pages = pages[: len(slots)]
        self.copier.blocks(pages).read_pool(memory, np.array(slots, np.int64) * SIZE, 0)
        self.in_pages.update((page, self.in_pool[slot]) for page, slot in zip(pages, slots, strict=True))
        for slot, content in self.in_pool.items():
            if self.pool[slot * SIZE : (slot + 1) * SIZE].numpy().tobytes() != block(content):
                self.wrong.append(f"pool: slot {slot}")
        for layer in range(LAYERS):
            self.attend(pages, layer)

    def _some(self, numbers: list[int]) -> list[int]:
        return self.rng.sample(numbers, self.rng.randint(0, min(len(numbers), 4)))

    def run(self) -> list[str]:
        """Live for a few steps. Returns what was wrong."""
        steps = (self.compute, self.compute, self.store, self.store, self.load, self.load, self.settle, self.move)
        for step in self.rng.choices(steps, k=12):
            step()
        while self.begun:
            self.settle()
        self.device.run_all()
        return self.wrong


def refused_then_shared(seed: int, left_out: Site | None) -> list[str]:
    """A load that is refused after its first copy, and a store through the same staging buffers."""
    device = LateDevice(seed, left_out)
    cache = PagedCache(list(torch.zeros((LAYERS, PAGES, ROW), dtype=torch.uint8)))
    for number, layer in enumerate(cache.layers):
        layer.tensor[:] = value(1, number)
    device.has_batch = False
    staged = StagedCopy(device, cache, TorchScatter(cache), None, 4 * SIZE)
    arena = np.zeros(SLOTS * SIZE, np.uint8)
    base = address_of(memoryview(arena))

    def request(slots: Sequence[int]) -> CopyRequest:
        starts, pages = base + np.array(slots, np.int64) * SIZE, torch.arange(len(slots))
        return CopyRequest(HostMemory(base, None), starts, SIZE, pages, 0, LAYERS, 0, device.mark())

    staged.store(request([8, 10]))  # both buffers have been used
    device.work_after = 2  # ids, one of two copies
    with pytest.raises(Internal, match="rejects work"):
        staged.load(request([0, 2]), lambda *_: None)
    device.work_after = None
    staged.store(request([8, 10]))
    staged.store(request([4, 6]))
    device.run_all()
    whole = arena.reshape(SLOTS, SIZE)
    return [f"arena: slot {slot}" for slot in (4, 6, 8, 10) if whole[slot].tobytes() != block(1)]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the kernels, no pauses, and an engine that still uses the memory that staging buffers get."""
    monkeypatch.setattr("kvclient.device.triton_checksum.TritonChecksums", QuickChecksums)
    monkeypatch.setattr("kvclient.device.triton_scatter.TritonScatter", KernelStandIn)
    monkeypatch.setattr("kvclient.device.copier._NAP_S", 0.0)
    monkeypatch.setattr(
        "kvclient.device.calibration.copy_directions.by_rule",
        lambda direction, *_: "batched_ahead" if direction == "load" else "batched",
    )
    buffer = vars(copy_strategies)["_StagingBuffer"]

    def used_before(memory: torch.Tensor) -> Any:
        LateDevice.latest.run(lambda: memory.fill_(0))
        return buffer(memory)

    monkeypatch.setattr("kvclient.device.copy_strategies._StagingBuffer", used_before)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("part", range(PARTS))
def test_any_order_of_completion_no_wrong_byte(part: int) -> None:
    orders = sample(40, ORDERS)
    for seed in range(part * orders // PARTS, (part + 1) * orders // PARTS):
        assert EngineLife(seed).run() == [], seed
        assert refused_then_shared(seed, None) == [], seed


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("site", waits().values(), ids=waits())
def test_missing_wait_between_streams_is_detected(site: Site) -> None:
    assert any(EngineLife(seed, site).run() or refused_then_shared(seed, site) for seed in range(400))


@pytest.mark.usefixtures("quick")
def test_store_that_reads_ahead_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages may still be computed when a store begins, so only loads may declare their sources final."""
    copy_batch = DeferredStream.copy_batch

    def ahead(self: DeferredStream, *copies: Any, **how: Any) -> None:
        copy_batch(self, *copies, **{**how, "final_sources": True})

    monkeypatch.setattr(DeferredStream, "copy_batch", ahead)
    assert any(EngineLife(seed, way="batched").run() for seed in range(400))
