"""Copies blocks between an arena and a caller's memory in one pass, without the interpreter lock, in as few calls as possible.

Measured (see ``benchmarks/dram_copy.py``): one thread that copies scattered 1 MiB blocks reaches a little over half of one large
``memcpy``, because the C library stores past the caches only in very long copies. Two threads make up for it. So neighbouring
blocks are joined into one copy if they are adjacent on both sides, and large copies are shared by ``threads`` threads. Short
pieces are gathered by numpy in one call, because one call per piece would cost more than the bytes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import BlockBuffer
from kvstore.core.errors import InvalidArgument
from kvstore.transport.contract import Checksums
from kvstore.transport.layer_hasher import LayerHasher
from kvstore.transport.layout import Layout, Positions, address_of, positions

Offsets = npt.NDArray[np.uint64] | npt.NDArray[np.int64] | Sequence[int]

THREAD_BYTES = 4 << 20
"""Minimum share of a thread: starting a thread costs as much time as copying half a megabyte."""
_GATHER_BELOW_BYTES = 8_192
"""Pieces shorter than this are gathered directly into consecutive rows ..."""
_SCATTER_BELOW_BYTES = 2_048
"""... and pieces shorter than this through a second copy into scattered rows."""
_SHARED_FROM_BYTES = 32 << 10
"""Shorter blocks are copied by one thread: two threads would spend their time on passing the interpreter lock around."""
_GATHER_FROM = 16
_HASH_SEGMENT_BYTES = 512 << 10
"""Copied and then hashed at once, while the bytes are in the CPU cache."""

_memmove = ctypes.memmove


def copy_from_arena(
    arena: memoryview,
    offsets: Offsets,
    destination: BlockBuffer,
    blocks: Sequence[int] | Positions | None = None,
    *,
    first_layer: int = 0,
    layer_count: int | None = None,
    threads: int = 2,
    checksums: Checksums | None = None,
) -> None:
    """Copy layers of blocks from an arena into a buffer.

    Args:
        arena: the whole mapping.
        offsets: byte offset of each Full Block in the arena.
        destination: the buffer.
        blocks: blocks of the buffer, one per offset; None: the first ones.
        first_layer: layers ``[first_layer, first_layer + layer_count)`` are copied.
        layer_count: None: all layers from ``first_layer`` on.
        threads: maximum number of threads, including this one.
        checksums: ``[len(offsets), layer_count]``, filled with the checksums of the bytes in the buffer; None: not computed.

    Raises:
        InvalidArgument: a block or layer is outside the arena or the buffer, or the memory is read-only.
    """
    _Copy(arena, offsets, destination, blocks, first_layer, layer_count, into_buffer=True).run(threads, checksums)


def copy_to_arena(
    source: BlockBuffer,
    arena: memoryview,
    offsets: Offsets,
    blocks: Sequence[int] | Positions | None = None,
    *,
    first_layer: int = 0,
    layer_count: int | None = None,
    threads: int = 2,
    checksums: Checksums | None = None,
) -> None:
    """Copy layers of blocks from a buffer into an arena. Arguments and errors as in ``copy_from_arena``."""
    _Copy(arena, offsets, source, blocks, first_layer, layer_count, into_buffer=False).run(threads, checksums)


class _Copy:
    """One copy call: checked arguments and addresses."""

    def __init__(
        self,
        arena: memoryview,
        offsets: Offsets,
        buffer: BlockBuffer,
        blocks: Sequence[int] | Positions | None,
        first_layer: int,
        layer_count: int | None,
        *,
        into_buffer: bool,
    ) -> None:
        shape = buffer.shape
        self._first_layer = first_layer
        self._layer_count = shape.layers - first_layer if layer_count is None else layer_count
        if not (first_layer >= 0 and 0 < self._layer_count <= shape.layers - first_layer):
            raise InvalidArgument("layers outside the block shape", layers=shape.layers, first=first_layer, count=layer_count)
        starts = np.asarray(offsets, np.int64)
        self._blocks = positions(range(len(starts)) if blocks is None else blocks, buffer.count)
        if starts.ndim != 1 or len(self._blocks) != len(starts):
            raise InvalidArgument("one offset per block is required", offsets=starts.shape, blocks=len(self._blocks))
        if not into_buffer and arena.readonly:
            raise InvalidArgument("the arena is read-only")
        # after this check, all addresses are inside the arena
        if len(starts) and not 0 <= int(starts.min()) <= int(starts.max()) <= arena.nbytes - shape.block_bytes:
            raise InvalidArgument("block outside the arena", arena_bytes=arena.nbytes, block_bytes=shape.block_bytes)
        self._shape = shape
        self._arena = arena  # keeps the arena mapped
        self._starts = starts + (address_of(arena) + first_layer * shape.layer_block_bytes)
        self._layout = Layout(buffer, writable=into_buffer)
        self._into_buffer = into_buffer

    def run(self, threads: int, checksums: Checksums | None) -> None:
        """Copy with at most ``threads`` threads."""
        block_bytes = self._layer_count * self._shape.layer_block_bytes
        total = len(self._starts) * block_bytes
        if checksums is not None and checksums.shape != (len(self._starts), self._layer_count):
            raise InvalidArgument("one checksum per Layer Block is required", shape=checksums.shape, blocks=len(self._starts))
        if not total:
            return
        threads = max(1, min(threads, total // THREAD_BYTES if block_bytes >= _SHARED_FROM_BYTES else 1))
        if checksums is not None:
            segment_blocks = max(1, _HASH_SEGMENT_BYTES // block_bytes)
            segments = iter([slice(at, at + segment_blocks) for at in range(0, len(self._starts), segment_blocks)])
            _share(lambda: self._copy_and_hash(segments, checksums), threads)
            return
        self._copy(slice(None), threads)

    def _copy(self, which: slice, threads: int) -> None:
        """Copy some of the blocks."""
        ours, theirs, lengths = self._unjoined(which)
        total = int(lengths.sum())
        short = total < len(lengths) * _GATHER_BELOW_BYTES and len(lengths) >= _GATHER_FROM
        if short and self._gather(ours, theirs, lengths):
            return
        # a single thread does not split long pieces: the longer a copy, the faster it is
        ours, theirs, lengths = _joined(
            ours, theirs, lengths, total if threads == 1 else max(THREAD_BYTES, total // (8 * threads))
        )
        targets, sources = (ours, theirs) if self._into_buffer else (theirs, ours)
        # one iterator for all threads: a free thread takes the next piece
        pieces = iter(list(zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True)))
        _share(lambda: _move(pieces), threads)

    def _copy_and_hash(self, segments: Iterator[slice], checksums: Checksums) -> None:
        size = self._shape.layer_block_bytes
        for segment in segments:
            self._copy(segment, 1)
            blocks = self._blocks[segment]
            hasher = LayerHasher(size, len(blocks) * self._layer_count)
            # hash the buffer, not the arena: on a load, the bytes in the buffer are what counts
            hasher.update(self._layout.pieces(blocks, self._first_layer, self._layer_count))
            checksums[segment] = hasher.digests().reshape(len(blocks), self._layer_count)

    def _gather(self, ours: Positions, theirs: Positions, lengths: Positions) -> bool:
        """Copy many short pieces in one call. Return False if the pieces are not aligned to rows on both sides."""
        length = int(lengths[0])
        if (lengths != length).any():
            return False
        targets, sources = (ours, theirs) if self._into_buffer else (theirs, ours)
        into, out_of = targets - targets.min(), sources - sources.min()
        if (into % length).any() or (out_of % length).any():
            return False
        rows = out_of // length
        dense = bool((np.diff(into) == length).all())
        if not dense and length >= _SCATTER_BELOW_BYTES:
            return False
        if dense:
            np.take(_rows(sources, length), rows, axis=0, out=_rows(targets, length), mode="clip")
        else:
            _rows(targets, length)[into // length] = np.take(_rows(sources, length), rows, axis=0, mode="clip")
        return True

    def _unjoined(self, which: slice) -> tuple[Positions, Positions, Positions]:
        """Return addresses in the buffer, addresses in the arena, and lengths."""
        starts = self._starts[which]
        ours, lengths = self._layout.addresses(self._blocks[which], self._first_layer, self._layer_count)
        block_bytes = self._layer_count * self._shape.layer_block_bytes
        # offset of each piece if all blocks were consecutive; it gives the block and the offset inside the block
        before = np.cumsum(lengths) - lengths
        theirs = starts[before // block_bytes] + before % block_bytes
        return ours, theirs, lengths


def _joined(ours: Positions, theirs: Positions, lengths: Positions, longest: int) -> tuple[Positions, Positions, Positions]:
    """Join adjacent copies, then split copies longer than about ``longest``."""
    apart = (np.diff(ours) != lengths[:-1]) | (np.diff(theirs) != lengths[:-1])
    heads = np.concatenate(([0], np.flatnonzero(apart) + 1))
    ours, theirs, lengths = ours[heads], theirs[heads], np.add.reduceat(lengths, heads)
    return (ours, theirs, lengths) if int(lengths.max()) <= longest else _split(ours, theirs, lengths, longest)


def _split(ours: Positions, theirs: Positions, lengths: Positions, longest: int) -> tuple[Positions, Positions, Positions]:
    """Split copies longer than ``longest``, so that threads can share a long one."""
    counts = -(-lengths // longest)
    which = np.repeat(np.arange(len(lengths)), counts)
    inside = (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)) * longest
    return ours[which] + inside, theirs[which] + inside, np.minimum(longest, lengths[which] - inside)


def _move(pieces: Iterator[tuple[int, int, int]]) -> None:
    """Copy pieces. ctypes releases the interpreter lock during each call."""
    move = _memmove
    for target, source, length in pieces:
        move(target, source, length)


def _share(work: Callable[[], None], threads: int) -> None:
    """Run ``work`` in this thread and ``threads - 1`` others."""
    others = [threading.Thread(target=work, name="copy") for _ in range(threads - 1)]
    for other in others:
        other.start()
    try:
        work()
    finally:
        for other in others:  # they end by themselves when the shared iterator is exhausted
            other.join()


def _rows(addresses: Positions, length: int) -> npt.NDArray[np.uint8]:
    """Return the memory region of some pieces as rows of their length. Only rows that are pieces may be accessed."""
    base = int(addresses.min())
    extent = int(addresses.max()) - base + length
    memory = memoryview((ctypes.c_ubyte * extent).from_address(base)).cast("B")
    return np.frombuffer(memory, np.uint8).reshape(-1, length)
