"""Pages of a device whose copies happen when they are waited for, or at random before that."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvclient.memory.device_buffer import CopyEvent, DeviceBuffer, Offsets, PoolMemory
from kvstore.core.buffers import BlockBuffer
from kvstore.core.errors import Internal
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockShape


class LateCopy:
    """One copy that has begun, from or to these offsets of the arena."""

    def __init__(self, offsets: Sequence[int], work: Callable[[], None]) -> None:
        self.offsets = offsets
        self._work: Callable[[], None] | None = work

    def done(self) -> bool:
        return self._work is None

    def run(self) -> None:
        if self._work is not None:
            self._work()
            self._work = None


class LateDevice:
    """Its copies, in any order. ``fail_at``: number of the wait that fails; ``before_copy`` is called as each copy begins."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.under_way: list[LateCopy] = []
        self.most_under_way = 0
        self.begun = 0
        self.used: set[int] = set()
        """Offsets of all copies."""
        self.waits = 0
        self.fail_at: int | None = None
        self.before_copy: Callable[[], None] = lambda: None

    def begin(self, offsets: Sequence[int], work: Callable[[], None]) -> None:
        self.before_copy()
        self.begun += 1
        self.used.update(offsets)
        self.under_way.append(LateCopy(offsets, work))
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        if self.random.random() < 0.3:
            self.random.choice(self.under_way).run()

    def wait(self, copies: Sequence[CopyEvent]) -> None:
        self.waits += 1
        for copy in self.random.sample(self.under_way, len(self.under_way)):
            if any(copy is one for one in copies) or self.random.random() < 0.3:
                copy.run()
        self.under_way = [copy for copy in self.under_way if not any(copy is one for one in copies)]
        if self.waits == self.fail_at:
            raise Internal("the device failed")


class LatePages(DeviceBuffer):
    """Blocks ``[blocks, layers, bytes]`` on such a device."""

    def __init__(self, device: LateDevice, pages: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.device = device
        self.pages = pages

    @property
    def count(self) -> int:
        return len(self.pages)

    @property
    def shape(self) -> BlockShape:
        return BlockShape(self.pages.shape[1], self.pages.shape[2])

    def check(self, spec: CacheSpec) -> None: ...

    def segments(self, block: int, first_layer: int, layer_count: int) -> Sequence[memoryview]:
        return (self.pages[block, first_layer : first_layer + layer_count].reshape(-1).data,)

    def read_arena(self, arena: memoryview, offsets: Offsets, first: int, first_layer: int, layer_count: int) -> None:
        target = self.pages[first : first + len(offsets), first_layer : first_layer + layer_count]
        layers = slice(first_layer, first_layer + layer_count)
        self.device.begin(offsets.tolist(), lambda: np.copyto(target, self._slots(arena, offsets)[:, layers]))

    def write_arena(self, arena: memoryview, offsets: Offsets) -> None:
        def work() -> None:
            rows = self.pages.reshape(self.count, -1)
            for row, at in zip(rows, offsets.tolist(), strict=True):
                arena[at : at + row.nbytes] = row.tobytes()

        self.device.begin(offsets.tolist(), work)

    def _slots(self, arena: memoryview, offsets: Offsets) -> np.ndarray[Any, np.dtype[np.uint8]]:
        size = self.shape.block_bytes
        rows = b"".join(bytes(arena[at : at + size]) for at in offsets.tolist())
        return np.frombuffer(rows, np.uint8).reshape(len(offsets), *self.pages.shape[1:])

    def pool_gap(self, memory: PoolMemory) -> str:
        return "no pool"

    def read_pool(self, memory: PoolMemory, offsets: Offsets, first: int) -> None:
        raise NotImplementedError

    def write_pool(self, memory: PoolMemory, offsets: Offsets) -> None:
        raise NotImplementedError

    def host_copy_ready(self, positions: np.ndarray[Any, np.dtype[np.intp]], first_layer: int, layer_count: int) -> None: ...

    def begun(self) -> Sequence[CopyEvent]:
        return list(self.device.under_way)

    def drain(self, begun: Sequence[CopyEvent] | None = None) -> None:
        self.device.wait(self.begun() if begun is None else begun)

    def wait_on_stream(self, layer: int) -> None: ...

    def pick(self, blocks: Sequence[int]) -> LatePages:
        first = blocks[0]
        assert list(blocks) == list(range(first, first + len(blocks))), "views of consecutive blocks are enough here"
        return LatePages(self.device, self.pages[first : first + len(blocks)])

    def source(self) -> BlockBuffer:
        return self
