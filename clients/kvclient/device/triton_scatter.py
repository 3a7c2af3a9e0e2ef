"""Copies between rows and pages with one Triton kernel: one launch per layer, for any layout and either direction.

Rows may be in a staging buffer (with a pitch), in a pool of device memory, or in pinned host memory, over the bus (with a table
of offsets). The kernel only moves words, so it works for every dtype.

A few programs do all the work: reads over the bus need many bytes in flight but few multiprocessors, and the prefill should
keep the others.

This module imports Triton. It is imported only if there is a CUDA device (or Triton's interpreter).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kvclient.device.layouts import WORDS, PagedCache
from kvclient.device.page_scatter import common_word

PIECE_WORDS = 1024
"""Words per step of a program."""
PROGRAMS = 256
"""Programs per launch within device memory: enough to use its full bandwidth."""
HOST_PROGRAMS = 48
"""Programs per launch that reads or writes host memory."""


@triton.jit(do_not_specialize=["pages", "pitch", "part_stride"])  # else Triton compiles the kernel again for each number of pages
def _move(  # type: ignore[no-untyped-def]  # noqa: ANN202
    rows_at,  # noqa: ANN001  # address of the first row
    table,  # noqa: ANN001  # pointer: offset of each row from there, in words; only read with TABLE
    pitch,  # noqa: ANN001  # words from row to row; only used without TABLE
    pages_at,  # noqa: ANN001  # address of page 0
    page_ids,  # noqa: ANN001  # pointer: int64
    page_stride,  # noqa: ANN001  # words
    part_stride,  # noqa: ANN001  # words
    part_words,  # noqa: ANN001
    pages,  # noqa: ANN001  # how many page ids
    WORD: tl.constexpr,  # noqa: N803  # dtype of a word
    TABLE: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    PAGES_PER_BLOCK: tl.constexpr,  # noqa: N803
    TO_PAGES: tl.constexpr,  # noqa: N803
    PIECE: tl.constexpr,  # noqa: N803
):
    rows = rows_at.to(tl.pointer_type(WORD))
    cache = pages_at.to(tl.pointer_type(WORD))
    pieces = (part_words + PIECE - 1) // PIECE
    for unit in range(tl.program_id(0), pages * PARTS * pieces, tl.num_programs(0)):
        piece = unit % pieces
        part = (unit // pieces) % PARTS
        number = unit // (pieces * PARTS)
        block = (number // PAGES_PER_BLOCK).to(tl.int64)
        row = tl.load(table + block) if TABLE else block * pitch
        within = piece * PIECE + tl.arange(0, PIECE)
        mask = within < part_words
        row_words = rows + row + ((number % PAGES_PER_BLOCK) * PARTS + part) * part_words + within
        page_words = cache + tl.load(page_ids + number) * page_stride + part * part_stride + within
        if TO_PAGES:
            tl.store(page_words, tl.load(row_words, mask=mask), mask=mask)
        else:
            tl.store(row_words, tl.load(page_words, mask=mask), mask=mask)


_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}


class TritonScatter:
    """``PageScatter`` with the kernel.

    Args:
        cache: the pages.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def to_pages(self, layer: int, rows: torch.Tensor, page_ids: torch.Tensor) -> None:
        word = common_word(self._cache.word, rows)
        pitch = (rows.stride(0) if len(rows) > 1 else rows.shape[1]) // word
        self._launch(layer, rows.data_ptr(), None, pitch, page_ids, word, PROGRAMS, to_pages=True)

    def to_rows(self, layer: int, page_ids: torch.Tensor, rows: torch.Tensor) -> None:
        word = common_word(self._cache.word, rows)
        pitch = (rows.stride(0) if len(rows) > 1 else rows.shape[1]) // word
        self._launch(layer, rows.data_ptr(), None, pitch, page_ids, word, PROGRAMS, to_pages=False)

    def unit(self, common: int) -> int:
        return math.gcd(self._cache.word, common)

    def move_slots(
        self, layer: int, memory: torch.Tensor, slots: torch.Tensor, unit: int, page_ids: torch.Tensor, *, to_pages: bool
    ) -> None:
        self.by_table(layer, memory.data_ptr(), slots, page_ids, word=unit, to_pages=to_pages, host=False)

    def by_table(
        self, layer: int, address: int, offsets: torch.Tensor, page_ids: torch.Tensor, *, word: int, to_pages: bool, host: bool
    ) -> None:
        """Copy between pages and rows at any offsets.

        Args:
            layer: number of the layer.
            address: origin of the offsets; a multiple of ``word``.
            offsets: int64 ``[blocks]`` on the device: offset of each row from ``address``, in words.
            page_ids: as in ``PageScatter``.
            word: bytes of a word, a divisor of the cache's ``word``.
            to_pages: the direction.
            host: whether rows are in host memory.
        """
        self._launch(layer, address, offsets, 0, page_ids, word, HOST_PROGRAMS if host else PROGRAMS, to_pages=to_pages)

    def _launch(
        self,
        layer: int,
        rows_at: int,
        table: torch.Tensor | None,
        pitch: int,
        page_ids: torch.Tensor,
        word: int,
        programs: int,
        *,
        to_pages: bool,
    ) -> None:
        if not len(page_ids):
            return
        cache = self._cache
        pages = cache.layers[layer]
        part_words = cache.page.part_bytes // word
        units = len(page_ids) * cache.page.parts * -(-part_words // PIECE_WORDS)
        _move[(min(units, programs),)](
            rows_at,
            page_ids if table is None else table,
            pitch,
            pages.address,
            page_ids,
            pages.page_stride // word,
            pages.part_stride // word,
            part_words,
            len(page_ids),
            WORD=_TYPES[word],
            TABLE=table is not None,
            PARTS=cache.page.parts,
            PAGES_PER_BLOCK=cache.pages_per_block,
            TO_PAGES=to_pages,
            PIECE=PIECE_WORDS,
        )


assert set(_TYPES) == set(WORDS)
