"""SGLang's host pools as pages of bytes: in place if the pool exposes its memory, otherwise as copies.

A pool reports the memory pieces of each page (``get_page_buffer_meta``): K and V of all layers together, or of each layer. The
store reads and writes these pieces in place. If a pool does not expose its memory in its layout, flat copies of pages are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvclient import BlockBuffer, BlockShape, DenseBlocks, InvalidArgument
from kvclient.memory.buffers import as_block_buffer

Deliver = Callable[[Sequence[bool]], None]
"""Called with the pages of a buffer that are valid, to copy them to their destination."""


class PagePieces:
    """Blocks whose bytes are scattered pieces of memory; nothing is copied.

    Args:
        pointers: addresses ``[pages, pieces]``, readable and writable for the lifetime of this object.
        sizes: bytes of each piece of a page.
        shape: shape of a block: one layer per piece, or one layer.
    """

    def __init__(self, pointers: npt.NDArray[np.int64], sizes: Sequence[int], shape: BlockShape) -> None:
        self._shape = shape
        self._split = shape.layers > 1
        if not pointers.size:
            self._starts: list[list[int]] = []
            self._ends: list[list[int]] = []
            self._memory = memoryview(b"")
            return
        ends = pointers + np.asarray(sizes, np.int64)
        base = int(pointers.min())
        self._starts = (pointers - base).tolist()
        self._ends = (ends - base).tolist()
        # One view from the first piece to the end of the last. Each piece is a slice of it; the gaps are never accessed.
        self._memory = np.asarray(_Stretch(base, int(ends.max()) - base)).data

    @property
    def count(self) -> int:
        return len(self._starts)

    @property
    def shape(self) -> BlockShape:
        return self._shape

    def segments(self, block: int, first_layer: int, layer_count: int) -> Sequence[memoryview]:
        starts, ends, memory = self._starts[block], self._ends[block], self._memory
        if self._split:
            starts, ends = starts[first_layer : first_layer + layer_count], ends[first_layer : first_layer + layer_count]
        return [memory[start:end] for start, end in zip(starts, ends, strict=True)]


class _Stretch:
    """A range of memory, exposed to numpy by its address."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def _in_place(good: Sequence[bool]) -> None:
    """Do nothing: loaded pages are already in place."""


class HostPages:
    """The pages of one host pool.

    Args:
        pool: SGLang's pool; kept referenced, because it owns the memory.
        zero_copy: whether to move pages without a copy, if the pool exposes their layout.

    Raises:
        InvalidArgument: the sizes do not form a block.
    """

    def __init__(self, pool: Any, *, zero_copy: bool) -> None:  # noqa: ANN401  # SGLang's pools have no common type to import
        self._pool = pool
        self.page_tokens = int(getattr(pool, "logical_page_size", pool.page_size))
        """Positions of the host pool per page."""
        pages = int(getattr(pool, "size", 0)) // int(pool.page_size)
        self._positions = pages * self.page_tokens if pages else 1 << 62
        self._sizes = _piece_sizes(pool, self.page_tokens) if zero_copy else None
        sizes = self._sizes or (_flat_bytes(pool),)
        self._interleaved = getattr(pool, "layout", "") == "layer_first" and len(sizes) == 2 * getattr(pool, "layer_num", 0)
        even = len(set(sizes)) == 1
        self.shape = BlockShape(len(sizes), sizes[0]) if even else BlockShape(1, sum(sizes))
        """Shape of a page as a block: one layer per piece if all pieces are equal."""

    @property
    def in_place(self) -> bool:
        """Whether pages move without a copy."""
        return self._sizes is not None

    def source(self, indices: torch.Tensor, count: int) -> BlockBuffer:
        """Return the pages to read from.

        Args:
            indices: positions in the pool, ``page_tokens`` per page.
            count: number of pages.

        Raises:
            InvalidArgument: wrong number of positions, or pages of another size than the pool reported.
        """
        self._check(indices, count)
        if self._sizes is not None:
            return self._pieces(indices, count)
        pages = [self._pool.get_data_page(index, flat=True).contiguous() for index in self._heads(indices)]
        return as_block_buffer(pages, self.shape, count, writable=False)

    def target(self, indices: torch.Tensor, count: int) -> tuple[BlockBuffer, Deliver]:
        """Return the pages to write to and the function to call afterwards. Arguments and errors as for ``source``."""
        self._check(indices, count)
        if self._sizes is not None:
            return self._pieces(indices, count), _in_place
        pages = [self._pool.get_dummy_flat_data_page() for _ in range(count)]

        def deliver(good: Sequence[bool]) -> None:
            for index, page, arrived in zip(self._heads(indices), pages, good, strict=True):
                if arrived:
                    self._pool.set_from_flat_data_page(index, page)

        return as_block_buffer(pages, self.shape, count), deliver

    def flat(self, pages: Sequence[object], *, writable: bool) -> BlockBuffer:
        """Present the caller's flat pages (tensors of one page each) as blocks.

        Raises:
            InvalidArgument: wrong page size, or the pool stores its pages as pieces, whose order differs.
        """
        if self._sizes is not None:
            raise InvalidArgument(
                "flat pages are not supported: pages of this pool are stored in the layout of host memory; use interface_v1"
            )
        return as_block_buffer(list(pages), self.shape, len(pages), writable=writable)

    def _check(self, indices: torch.Tensor, count: int) -> None:
        if indices is None or indices.numel() != count * self.page_tokens:
            got = None if indices is None else indices.numel()
            raise InvalidArgument(
                "one page of host memory per key is required", positions=got, pages=count, page_tokens=self.page_tokens
            )
        if count and (int(indices.min()) < 0 or int(indices.max()) >= self._positions):
            raise InvalidArgument("positions in host memory are out of range", first=int(indices.min()), last=int(indices.max()))

    def _heads(self, indices: torch.Tensor) -> list[int]:
        heads: list[int] = indices[:: self.page_tokens].tolist()
        return heads

    def _pieces(self, indices: torch.Tensor, count: int) -> BlockBuffer:
        sizes = self._sizes
        assert sizes is not None
        pointers, lengths = self._pool.get_page_buffer_meta(indices)
        if list(lengths) != list(sizes) * count or len(pointers) != len(lengths):
            raise InvalidArgument("the sizes of the pages differ from those of the host pool", pieces=len(pointers), pages=count)
        table = np.asarray(pointers, np.int64).reshape(count, len(sizes))
        if self._interleaved:  # K and V of each layer in turn: all K first, in memory order
            table = np.concatenate([table[:, 0::2], table[:, 1::2]], axis=1)
        return _regular(table, self.shape) or PagePieces(table, sizes, self.shape)


def _regular(table: npt.NDArray[np.int64], shape: BlockShape) -> DenseBlocks | None:
    """Return adjacent pages as one array, which is faster to move. SGLang allocates adjacent pages while memory is fresh.

    Args:
        table: addresses ``[pages, pieces]``.
        shape: shape of a page, one layer per piece.
    """
    pages, pieces = table.shape
    if not table.size or pieces != shape.layers:
        return None
    base = int(table[0, 0])
    page_step = int(table[1, 0]) - base if pages > 1 else shape.block_bytes
    piece_step = int(table[0, 1]) - base if pieces > 1 else shape.layer_block_bytes
    if page_step <= 0 or piece_step <= 0:
        return None
    if (table != base + np.arange(pages)[:, None] * page_step + np.arange(pieces) * piece_step).any():
        return None
    extent = (pages - 1) * page_step + (pieces - 1) * piece_step + shape.layer_block_bytes
    memory = np.asarray(_Stretch(base, extent))
    wanted = (pages, pieces, shape.layer_block_bytes)
    return DenseBlocks(np.lib.stride_tricks.as_strided(memory, wanted, (page_step, piece_step, 1)))


def _piece_sizes(pool: Any, page_tokens: int) -> tuple[int, ...] | None:  # noqa: ANN401  # see HostPages
    """Return the bytes of each piece of a page; None if the pool does not report them in its layout."""
    try:
        meta = pool.get_page_buffer_meta(torch.arange(page_tokens))
    except (AttributeError, NotImplementedError, ValueError):  # how pools report that they do not support it
        return None
    return tuple(int(size) for size in meta[1]) or None if meta else None


def _flat_bytes(pool: Any) -> int:  # noqa: ANN401  # see HostPages
    page = pool.get_dummy_flat_data_page()
    return int(page.numel() * page.element_size())
