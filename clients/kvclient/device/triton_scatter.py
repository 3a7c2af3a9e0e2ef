"""Copies between rows and pages with one Triton kernel: one launch for any number of layers, any layout and either direction.

Rows may be in a staging buffer (with pitches), in a pool of device memory, or in pinned host memory, over the bus (with a table
of offsets). The kernel only moves words, so it works for every dtype. If all sizes and addresses are multiples of 16, each thread
moves 16 bytes at a time.

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

PIECE_WORDS = 4096
"""Most words per step of a program: 32 KiB of the longest words."""
PROGRAMS = 512
"""Programs per launch within device memory: enough to use its full bandwidth."""
HOST_PROGRAMS = 12
"""Programs per launch that reads or writes host memory: enough bytes in flight for the bus."""
_SCALARS = ("rows_at", "pitch", "layer_pitch", "pages", "layers", "first_layer")


@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=("table", "layers_at", "page_ids"))  # else: many variants
def move_layers(  # type: ignore[no-untyped-def]  # noqa: ANN201
    rows_at,  # noqa: ANN001  # address of the first row
    table,  # noqa: ANN001  # pointer: int64 offset of each block from there, in bytes; only read with TABLE
    pitch,  # noqa: ANN001  # bytes from block to block; only used without TABLE
    layer_pitch,  # noqa: ANN001  # bytes from layer to layer within a block
    layers_at,  # noqa: ANN001  # pointer: int64 address, page stride and part stride of each layer of the cache, in bytes
    page_ids,  # noqa: ANN001  # pointer: int64
    pages,  # noqa: ANN001  # how many page ids
    layers,  # noqa: ANN001  # how many layers
    first_layer,  # noqa: ANN001
    WORD: tl.constexpr,  # noqa: N803  # dtype of a word
    WORD_BYTES: tl.constexpr,  # noqa: N803
    ALIGNMENT: tl.constexpr,  # noqa: N803  # divides all addresses, in bytes
    TABLE: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    PART_WORDS: tl.constexpr,  # noqa: N803
    PAGES_PER_BLOCK: tl.constexpr,  # noqa: N803
    TO_PAGES: tl.constexpr,  # noqa: N803
    PIECE: tl.constexpr,  # noqa: N803
):
    """Copy some layers of blocks between rows and pages."""
    pieces: tl.constexpr = (PART_WORDS + PIECE - 1) // PIECE
    per_layer = pages * (PARTS * pieces)
    for unit in range(tl.program_id(0), layers * per_layer, tl.num_programs(0)):
        layer = unit // per_layer
        rest = unit % per_layer
        piece = rest % pieces
        part = (rest // pieces) % PARTS
        number = rest // (pieces * PARTS)
        block = (number // PAGES_PER_BLOCK).to(tl.int64)
        row_at = rows_at + (tl.load(table + block) if TABLE else block * pitch) + layer.to(tl.int64) * layer_pitch
        row_at += ((number % PAGES_PER_BLOCK) * PARTS + part) * (PART_WORDS * WORD_BYTES)
        layer_at = layers_at + (first_layer + layer) * 3
        page_at = tl.load(layer_at) + tl.load(page_ids + number) * tl.load(layer_at + 1) + part * tl.load(layer_at + 2)
        within = piece * PIECE + tl.arange(0, PIECE)
        row_words = tl.max_contiguous(tl.multiple_of(row_at.to(tl.pointer_type(WORD)) + within, ALIGNMENT), PIECE)
        page_words = tl.max_contiguous(tl.multiple_of(page_at.to(tl.pointer_type(WORD)) + within, ALIGNMENT), PIECE)
        if PART_WORDS % PIECE == 0:
            if TO_PAGES:
                tl.store(page_words, tl.load(row_words))
            else:
                tl.store(row_words, tl.load(page_words))
        else:
            mask = within < PART_WORDS
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
        self._layers = cache.layer_table()

    def to_pages(self, first_layer: int, rows: torch.Tensor, page_ids: torch.Tensor) -> None:
        self._move_rows(first_layer, rows, page_ids, to_pages=True)

    def to_rows(self, first_layer: int, page_ids: torch.Tensor, rows: torch.Tensor) -> None:
        self._move_rows(first_layer, rows, page_ids, to_pages=False)

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
        self.by_table(first_layer, layers, memory.data_ptr(), slots, common, page_ids, to_pages=to_pages, host=False)

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
        """Copy between pages and blocks at any offsets.

        Args:
            first_layer: of the cache.
            layers: number of layers, which follow each other without gaps within a block.
            address: origin of the offsets.
            offsets: int64 ``[blocks]`` on the device: offset of the first layer of each block from ``address``, in bytes.
            common: a common divisor of all offsets.
            page_ids: as in ``PageScatter``.
            to_pages: the direction.
            host: whether blocks are in host memory.
        """
        alignment = math.gcd(self._cache.alignment, common, address)
        programs = HOST_PROGRAMS if host else PROGRAMS
        self._launch(
            first_layer, layers, address, offsets, 0, self._cache.row_bytes, page_ids, alignment, programs, to_pages=to_pages
        )

    def _move_rows(self, first_layer: int, rows: torch.Tensor, page_ids: torch.Tensor, *, to_pages: bool) -> None:
        pitch = rows.stride(0) if len(rows) > 1 else 0
        layer_pitch = rows.stride(1) if rows.shape[1] > 1 else 0
        address = rows.data_ptr()
        alignment = math.gcd(self._cache.alignment, address, pitch, layer_pitch)
        self._launch(
            first_layer, rows.shape[1], address, None, pitch, layer_pitch, page_ids, alignment, PROGRAMS, to_pages=to_pages
        )

    def _launch(
        self,
        first_layer: int,
        layers: int,
        rows_at: int,
        table: torch.Tensor | None,
        pitch: int,
        layer_pitch: int,
        page_ids: torch.Tensor,
        alignment: int,
        programs: int,
        *,
        to_pages: bool,
    ) -> None:
        if not len(page_ids) or not layers:
            return
        cache = self._cache
        word = min(alignment, 8)
        part_words = cache.page.part_bytes // word
        piece = min(PIECE_WORDS, triton.next_power_of_2(part_words))
        units = layers * len(page_ids) * cache.page.parts * -(-part_words // piece)
        move_layers[(min(units, programs),)](
            rows_at,
            page_ids if table is None else table,
            pitch,
            layer_pitch,
            self._layers,
            page_ids,
            len(page_ids),
            layers,
            first_layer,
            WORD=_TYPES[word],
            WORD_BYTES=word,
            ALIGNMENT=alignment,
            TABLE=table is not None,
            PARTS=cache.page.parts,
            PART_WORDS=part_words,
            PAGES_PER_BLOCK=cache.pages_per_block,
            TO_PAGES=to_pages,
            PIECE=piece,
            num_warps=8 if piece == PIECE_WORDS else 4,
        )


assert set(_TYPES) == set(WORDS)
