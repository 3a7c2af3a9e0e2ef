"""Between pages and a pool in memory of the same device: one launch a layer, nothing passes through host memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvclient.device.copy_plan import Numbers
from kvclient.device.copy_strategies import uploaded
from kvclient.device.layouts import PagedCache
from kvclient.device.page_scatter import PageScatter
from kvclient.device.streams import Device, Event


@dataclass(frozen=True, slots=True)
class PoolCopyRequest:
    """What is copied.

    Attributes:
        memory: the pool's: uint8 ``[bytes]``, where the cache lies, from an address on that 8 divides.
        starts: where in it the first layer of each block begins, in bytes.
        page_ids: int64 ``[blocks * pages_per_block]``, on the host.
        first_layer: of the cache: layers ``[first_layer, first_layer + layers)`` are copied.
        layers: how many.
        after: the pages may be touched behind this event.
    """

    memory: torch.Tensor
    starts: Numbers
    page_ids: torch.Tensor
    first_layer: int
    layers: int
    after: Event


class PoolCopy:
    """Copies in one direction, on a stream of their own. Everything is enqueued, nothing is waited for. Not thread-safe.

    Args:
        device: where cache and pool lie.
        cache: the pages.
        mover: between slots and pages.
    """

    def __init__(self, device: Device, cache: PagedCache, mover: PageScatter) -> None:
        self._cache = cache
        self._mover = mover
        self._moves = device.stream()

    def move(self, slots: PoolCopyRequest, *, to_pages: bool) -> None:
        """Enqueues the copies.

        Raises:
            Internal: the device refused; some copies may have begun: they are behind the events of ``record``.
        """
        cache = self._cache
        unit = self._mover.unit(math.gcd(cache.row_bytes, int(np.gcd.reduce(slots.starts))))
        numbers: list[torch.Tensor] = []  # filled in the order of the moves: only they look into it
        parts = (torch.from_numpy(slots.starts // unit), slots.page_ids)
        self._moves.run(lambda: numbers.extend(uploaded(part, cache.device) for part in parts))
        self._moves.wait(slots.after)

        def layer(number: int) -> None:
            memory = slots.memory[number * cache.row_bytes :]
            self._mover.move_slots(slots.first_layer + number, memory, numbers[0], unit, numbers[1], to_pages=to_pages)

        for number in range(slots.layers):
            self._moves.run(partial(layer, number))

    def record(self) -> list[Event]:
        """Events behind all that has been enqueued."""
        return [self._moves.record()]
