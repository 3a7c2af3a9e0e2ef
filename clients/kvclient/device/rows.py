"""Rows and pages: the torch reference of the copies, which is also what runs where there is no Triton.

A *row* is one layer of one block, contiguous; a Layer Block is a row as the store keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from kvclient.device.layouts import WORDS, PagedCache


class RowMover(Protocol):
    """Copies between rows in memory that the device reaches and pages, a layer at a time. Enqueues on the current stream."""

    def to_pages(self, layer: int, rows: torch.Tensor, page_ids: torch.Tensor) -> None:
        """Copies rows into pages.

        Args:
            layer: which.
            rows: uint8 ``[blocks, row_bytes]``, last axis contiguous.
            page_ids: int64 ``[blocks * pages_per_block]``, on the device, each once.
        """

    def to_rows(self, layer: int, page_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Copies pages into rows; arguments as ``to_pages``."""


class TorchRows:
    """With torch's indexing. Works on any device.

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

    def _parts(
        self, layer: int, rows: torch.Tensor, page_ids: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each page of a block: the layer's pages, which of them, and where they lie in the rows, in the same words."""
        cache = self._cache
        word = common_word(cache.word, rows)
        pages = cache.layers[layer].words(word)
        shaped = rows.view(WORDS[word]).unflatten(1, (cache.pages_per_block, *pages.shape[1:]))
        ids = page_ids.view(-1, cache.pages_per_block)
        for number in range(cache.pages_per_block if len(rows) else 0):
            yield pages, ids[:, number], shaped[:, number]


def common_word(word: int, rows: torch.Tensor) -> int:
    """The largest word that also rows are made of."""
    stride = rows.stride(0) if len(rows) > 1 else 0
    while (rows.data_ptr() | stride | rows.shape[1] | int(rows.storage_offset())) % word:
        word //= 2
    return word
