"""Copies between rows and pages with torch indexing: the reference, and the fallback without Triton.

A *row* is one contiguous layer of one block; a layer block is a row as the store keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from kvclient.device.layouts import WORDS, PagedCache
from kvstore.core.errors import Internal


class PageScatter(Protocol):
    """Copies between rows in device-accessible memory and pages, for any number of layers. Enqueues on the current stream."""

    def to_pages(self, first_layer: int, rows: torch.Tensor, page_ids: torch.Tensor) -> None:
        """Copy rows into pages.

        Args:
            first_layer: of the cache.
            rows: uint8 ``[blocks, layers, row_bytes]``, last axis contiguous.
            page_ids: int64 ``[blocks * pages_per_block]``, on the device, without duplicates.
        """

    def to_rows(self, first_layer: int, page_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy pages into rows; arguments as ``to_pages``."""

    def move_slots(
        self,
        first_layer: int,
        layers: int,
        memory: torch.Tensor,
        slots: torch.Tensor,
        common: int,
        page_ids: torch.Tensor,
        *,
        to_pages: bool,
    ) -> None:
        """Copy between pages and blocks at any offsets of a pool's memory.

        Args:
            first_layer: of the cache.
            layers: number of layers, which follow each other without gaps within a block.
            memory: uint8 ``[bytes]``, contiguous, 8-byte aligned.
            slots: int64 ``[blocks]`` on the device: offset of the first layer of each block in ``memory``, in bytes.
            common: a common divisor of all offsets and of the row size.
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

    def to_pages(self, first_layer: int, rows: torch.Tensor, page_ids: torch.Tensor) -> None:
        for pages, ids, part in self._parts(first_layer, rows, page_ids):
            pages.index_copy_(0, ids, part)

    def to_rows(self, first_layer: int, page_ids: torch.Tensor, rows: torch.Tensor) -> None:
        for pages, ids, part in self._parts(first_layer, rows, page_ids):
            part.copy_(pages.index_select(0, ids))

    def move_slots(
        self,
        first_layer: int,
        layers: int,
        memory: torch.Tensor,
        slots: torch.Tensor,
        common: int,
        page_ids: torch.Tensor,
        *,
        to_pages: bool,
    ) -> None:
        size, each = layers * self._cache.row_bytes, self._cache.pages_per_block
        units = memory[: len(memory) // common * common].view(-1, common)
        units = units.view(WORDS[common_word(math.gcd(common, 8), units)])
        within = torch.arange(size // common, device=slots.device)
        step = max(1, PIECE_BYTES // size)
        for begin in range(0, len(slots), step):
            some, ids = slots[begin : begin + step], page_ids[begin * each : (begin + step) * each]
            at = (some[:, None] // common + within).view(-1)
            shape = (len(some), layers, self._cache.row_bytes)
            if to_pages:
                self.to_pages(first_layer, units.index_select(0, at).view(torch.uint8).view(shape), ids)
            else:
                rows = torch.empty(shape, dtype=torch.uint8, device=memory.device)
                self.to_rows(first_layer, ids, rows)
                units.index_copy_(0, at, rows.view(-1, common).view(units.dtype))

    def _parts(
        self, first_layer: int, rows: torch.Tensor, page_ids: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each layer and page of a block: the pages, the page ids, and the matching part of the rows, in the same words."""
        cache = self._cache
        ids = page_ids.view(-1, cache.pages_per_block)
        for number in range(rows.shape[1] if len(rows) else 0):
            row = rows[:, number]
            word = common_word(cache.word, row)
            pages = cache.layers[first_layer + number].words(word)
            shaped = row.view(WORDS[word]).unflatten(1, (cache.pages_per_block, *pages.shape[1:]))
            for page in range(cache.pages_per_block):
                yield pages, ids[:, page], shaped[:, page]


def common_word(word: int, rows: torch.Tensor) -> int:
    """The largest word size that divides the alignment and sizes of rows."""
    stride = rows.stride(0) if len(rows) > 1 else 0
    while (rows.data_ptr() | stride | rows.shape[1] | int(rows.storage_offset())) % word:
        word //= 2
    return word


def try_out(scatter: Callable[[PagedCache], PageScatter], cache: PagedCache) -> None:
    """Move one block in every way, to and from spare memory, and compare the bytes. Changes no page of the cache.

    Compiler and launch errors appear here, not during the first copies.

    Args:
        scatter: creates the implementation for a cache.
        cache: the pages.

    Raises:
        Internal: wrong bytes.
    """
    page, each, device = cache.page, cache.pages_per_block, cache.device
    shape = (each, page.part_bytes) if cache.kind == "pages" else (page.parts, each, page.part_bytes)
    spare = torch.zeros(shape, dtype=torch.uint8, device=device)
    pages = PagedCache([spare], cache.kind, pages_per_block=each)
    ids, first = torch.arange(each, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    content = (torch.arange(cache.row_bytes, device=device) % 251).to(torch.uint8).view(1, 1, -1)
    mover, reference, row = scatter(pages), TorchScatter(pages), torch.empty_like(content)

    def move(rows: torch.Tensor, *, table: bool, to_pages: bool) -> None:
        if table:
            mover.move_slots(0, 1, rows.view(-1), first, cache.alignment, ids, to_pages=to_pages)
        elif to_pages:
            mover.to_pages(0, rows, ids)
        else:
            mover.to_rows(0, ids, rows)

    for table in (False, True):
        move(content, table=table, to_pages=True)
        reference.to_rows(0, ids, row)
        good = torch.equal(row, content)
        move(row.zero_(), table=table, to_pages=False)
        if not good or not torch.equal(row, content):
            raise Internal("the kernel moves wrong bytes", device=device)
        spare.zero_()
    # the cache itself: its strides and alignment
    scatter(cache).to_rows(0, ids, row)
    TorchScatter(cache).to_rows(0, ids, content)
    if not torch.equal(row, content):
        raise Internal("the kernel moves wrong bytes", device=device)
