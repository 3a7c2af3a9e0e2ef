"""Costs of each strategy: launches, calls of the driver, pieces and bytes for 1,000 blocks of Llama-3-8B of 16 tokens.

The device counts and does nothing, so the memory is never touched.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from deferred import DeferredEvent, FakePinning

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is first imported

from kvclient.device.copier import DeviceCopier
from kvclient.device.driver import Addresses
from kvclient.device.layouts import PagedCache
from kvclient.memory.device_buffer import PoolMemory

BLOCKS, LAYERS, ROW = 1000, 32, 64 << 10
TOTAL = BLOCKS * LAYERS * ROW


@dataclass
class Costs:
    """Counts of one copy."""

    launches: int = 0
    calls: int = 0
    pieces: int = 0
    nbytes: int = 0
    shortest: int = 1 << 60


class CountingDevice:
    """Counts work and drops it. Its events are reached at once."""

    memory = torch.device("cpu")
    bus_id = ""
    has_batch = True
    reads_host = True

    def __init__(self) -> None:
        self.pinning = FakePinning()
        self.costs = Costs()

    def stream(self) -> CountingDevice:
        return self

    def mark(self) -> DeferredEvent:
        event = DeferredEvent(self)  # type: ignore[arg-type]
        event.reached = True
        return event

    record = mark

    def wait(self, event: object) -> None:
        pass

    wait_event = wait

    def run(self, _: Callable[[], None]) -> None:
        self.costs.launches += 1

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        self._count([width] * rows)

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, *, final_sources: bool = False) -> None:
        self._count(sizes.tolist())

    def _count(self, sizes: list[int]) -> None:
        self.costs.calls += 1
        self.costs.pieces += len(sizes)
        self.costs.nbytes += sum(sizes)
        self.costs.shortest = min(self.costs.shortest, *sizes)


@pytest.fixture(scope="module")
def arena() -> Iterator[memoryview]:
    with mmap.mmap(-1, TOTAL) as memory:
        view = memoryview(memory)
        yield view
        view.release()


def cache_of(layout: str) -> PagedCache:
    """A cache of ``BLOCKS`` pages that is never touched."""
    if layout == "split":
        return PagedCache([torch.empty((2, BLOCKS, ROW // 2), dtype=torch.uint8) for _ in range(LAYERS)], "split")
    if layout == "pages":
        return PagedCache([torch.empty((BLOCKS, ROW), dtype=torch.uint8) for _ in range(LAYERS)])
    whole = torch.empty((BLOCKS, LAYERS, ROW), dtype=torch.uint8)  # block-major
    return PagedCache(list(whole.unbind(1)))


def cost_of(way: str, layout: str, slots: str, direction: str, arena: memoryview) -> Costs:
    device = CountingDevice()
    copier = DeviceCopier(cache_of(layout), strategy=way, pin=False, device=device)  # type: ignore[arg-type]
    copier.device.pinning = None  # type: ignore[misc]  # nothing is pinned here, and all of it counts as pinned
    offsets = np.arange(BLOCKS) * (LAYERS * ROW)
    if slots == "scattered":
        offsets = np.random.default_rng(1).permutation(offsets)
    blocks = copier.blocks(range(BLOCKS))
    device.costs = Costs()
    if direction == "load":
        blocks.read_arena(arena, offsets, 0, 0, LAYERS)
    else:
        blocks.write_arena(arena, offsets)
    return device.costs


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("slots", ["scattered", "in a row"])
@pytest.mark.parametrize("layout", ["split", "pages", "block-major"])
@pytest.mark.parametrize("way", ["staged", "batched", "direct"])
def test_copy_of_1000_blocks_costs_few_calls(way: str, layout: str, slots: str, direction: str, arena: memoryview) -> None:
    costs = cost_of(way, layout, slots, direction, arena)
    uploads = 0 if way == "batched" else 1  # of page ids
    assert costs.launches - uploads <= (0 if way == "batched" else 32)
    assert costs.calls <= (0 if way == "direct" else 32)
    if way != "direct":
        assert costs.nbytes == TOTAL, "each byte crosses the bus once"
    if way == "staged":
        assert costs.launches - uploads <= -(-TOTAL // (64 << 20)) + 1, "one launch per staging buffer"
        assert costs.shortest >= (256 << 10)
    if way == "batched":
        expected = {"split": 2 * BLOCKS * LAYERS, "pages": BLOCKS * LAYERS, "block-major": BLOCKS * 4}
        assert costs.pieces == expected[layout]
    if way == "direct" and direction == "store":
        assert costs.launches == 2


def test_copy_from_a_pool_costs_one_launch() -> None:
    device = CountingDevice()
    copier = DeviceCopier(cache_of("split"), pin=False, device=device)
    memory = torch.empty(TOTAL, dtype=torch.uint8)
    blocks = copier.blocks(range(BLOCKS))
    device.costs = Costs()
    blocks.read_pool(PoolMemory("cpu", memory), np.arange(BLOCKS)[::-1] * (LAYERS * ROW), 0)
    assert (device.costs.launches, device.costs.calls) == (2, 0), "an upload of numbers, and one launch"


def test_small_copy_costs_one_call() -> None:
    """One block: not a call per layer."""
    with mmap.mmap(-1, 2 * LAYERS * ROW) as memory:
        for way, most in (("staged", 3), ("batched", 1), ("direct", 2)):
            device = CountingDevice()
            copier = DeviceCopier(cache_of("pages"), strategy=way, pin=False, device=device)  # type: ignore[arg-type]
            copier.device.pinning = None  # type: ignore[misc]
            view = memoryview(memory)
            blocks = copier.blocks([7])
            device.costs = Costs()
            blocks.read_arena(view, np.zeros(1, np.int64), 0, 0, LAYERS)
            assert device.costs.launches + device.costs.calls <= most
            view.release()
