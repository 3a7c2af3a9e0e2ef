"""Copies between rows and pages with torch indexing: the reference, and the fallback without Triton.

A *row* is one contiguous layer of one block; a layer block is a row as the store keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch

from kvclient.device.layouts import WORDS, PagedCache


class PageScatter(Protocol):
    """Copies between rows in device-accessible memory and pages, one layer at a time. Enqueues on the current stream."""

    def to_pages(self, layer: int, rows: torch.Tensor, page_ids: torch.Tensor) -> None:
        """Copy rows into pages.

        Args:
            layer: number of the layer.
            rows: uint8 ``[blocks, row_bytes]``, last axis contiguous.
            page_ids: int64 ``[blocks * pages_per_block]``, on the device, without duplicates.
        """

    def to_rows(self, layer: int, page_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy pages into rows; arguments as ``to_pages``."""

    def unit(self, common: int) -> int:
        """Unit of offsets in a pool's memory, in bytes.

        Args:
            common: common divisor of all offsets and of the row size, in bytes.

        Returns:
            A divisor of ``common``.
        """

    def move_slots(
        self, layer: int, memory: torch.Tensor, slots: torch.Tensor, unit: int, page_ids: torch.Tensor, *, to_pages: bool
    ) -> None:
        """Copy between pages and rows at any offsets of a pool's memory.

        Args:
            layer: number of the layer.
            memory: uint8 ``[bytes]``, contiguous, 8-byte aligned, a whole number of units long.
            slots: int64 ``[blocks]`` on the device: offset of each row from the start of ``memory``, in units.
            unit: see ``unit``.
            page_ids: as for ``to_pages``.
            to_pages: the direction.
        """


PIECE_BYTES = 64 << 20
"""Bytes of rows copied between a pool and pages at a time, if that needs temporary memory."""


class TorchScatter:
    """Implementation with torch indexing. Works on any device.

    Args:
        cache: the pages.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def to_pages(self, layer: int, rows: torch.Tensor, page_ids: torch.Tensor) -> None:
        for pages, ids, part in self._parts(layer, rows, page_ids):
            pages.index_copy_(0, ids, part)

    def to_rows(self, layer: int, page_ids: torch.Tensor, rows: torch.Tensor) -> None:
        for pages, ids, part in self._parts(layer, rows, page_ids):
            part.copy_(pages.index_select(0, ids))

    def unit(self, common: int) -> int:
        return common  # rows are picked by index in units: larger units mean fewer indexes

    def move_slots(
        self, layer: int, memory: torch.Tensor, slots: torch.Tensor, unit: int, page_ids: torch.Tensor, *, to_pages: bool
    ) -> None:
        size, each = self._cache.row_bytes, self._cache.pages_per_block
        units = memory[: len(memory) // unit * unit].view(-1, unit)
        units = units.view(WORDS[common_word(math.gcd(unit, 8), units)])
        within = torch.arange(size // unit, device=slots.device)
        step = max(1, PIECE_BYTES // size)
        for begin in range(0, len(slots), step):
            some, ids = slots[begin : begin + step], page_ids[begin * each : (begin + step) * each]
            at = (some[:, None] + within).view(-1)
            if to_pages:
                self.to_pages(layer, units.index_select(0, at).view(torch.uint8).view(len(some), size), ids)
            else:
                rows = torch.empty((len(some), size), dtype=torch.uint8, device=memory.device)
                self.to_rows(layer, ids, rows)
                units.index_copy_(0, at, rows.view(-1, unit).view(units.dtype))

    def _parts(
        self, layer: int, rows: torch.Tensor, page_ids: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each page of a block: the layer's pages, the page ids, and the matching part of the rows, in the same words."""
        cache = self._cache
        word = common_word(cache.word, rows)
        pages = cache.layers[layer].words(word)
        shaped = rows.view(WORDS[word]).unflatten(1, (cache.pages_per_block, *pages.shape[1:]))
        ids = page_ids.view(-1, cache.pages_per_block)
        for number in range(cache.pages_per_block if len(rows) else 0):
            yield pages, ids[:, number], shaped[:, number]


def common_word(word: int, rows: torch.Tensor) -> int:
    """The largest word size that divides the alignment and sizes of rows."""
    stride = rows.stride(0) if len(rows) > 1 else 0
    while (rows.data_ptr() | stride | rows.shape[1] | int(rows.storage_offset())) % word:
        word //= 2
    return word
