"""Copies between pages and a pool in memory of the same device: one launch per copy, without host memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from kvclient.device.copy_plan import Numbers
from kvclient.device.copy_strategies import uploaded
from kvclient.device.layouts import PagedCache
from kvclient.device.page_scatter import PageScatter
from kvclient.device.streams import Device, Event


@dataclass(frozen=True, slots=True)
class PoolCopyRequest:
    """Blocks and pages of one copy.

    Attributes:
        memory: memory of the pool: uint8 ``[bytes]``, on the device of the cache, 8-byte aligned.
        starts: offset of the first layer of each block, in bytes.
        page_ids: int64 ``[blocks * pages_per_block]``, on the host.
        first_layer: of the cache: layers ``[first_layer, first_layer + layers)`` are copied.
        layers: number of layers.
        after: the pages may be accessed after this event.
    """

    memory: torch.Tensor
    starts: Numbers
    page_ids: torch.Tensor
    first_layer: int
    layers: int
    after: Event


class PoolCopy:
    """Copies in one direction, on their own stream. Only enqueues. Not thread-safe.

    Args:
        device: device of cache and pool.
        cache: the pages.
        mover: moves rows between slots and pages.
    """

    def __init__(self, device: Device, cache: PagedCache, mover: PageScatter) -> None:
        self._cache = cache
        self._mover = mover
        self._moves = device.stream()

    def move(self, slots: PoolCopyRequest, *, to_pages: bool) -> None:
        """Enqueue the copies.

        Raises:
            Internal: the device refused; copies that have begun are before the events of ``record``.
        """
        cache = self._cache
        common = math.gcd(cache.row_bytes, int(np.gcd.reduce(slots.starts)))
        numbers: list[torch.Tensor] = []  # filled in stream order: only the moves read it
        parts = (torch.from_numpy(slots.starts), slots.page_ids)
        self._moves.run(lambda: numbers.extend(uploaded(part, cache.device) for part in parts))
        self._moves.wait(slots.after)
        self._moves.run(
            lambda: self._mover.move_slots(
                slots.first_layer, slots.layers, slots.memory, numbers[0], common, numbers[1], to_pages=to_pages
            )
        )

    def record(self) -> list[Event]:
        """Events after all enqueued work."""
        return [self._moves.record()]
