"""Copies blocks between an arena and a caller's memory, and computes checksums on the way: one call of the native kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import BlockBuffer, Layout, Positions, positions
from kvstore.core.errors import InvalidArgument
from kvstore.native import CopyBatch, bounds_of, run
from kvstore.transport.contract import Checksums
from kvstore.transport.layer_hasher import LayerHasher

Offsets = npt.NDArray[np.uint64] | npt.NDArray[np.int64] | Sequence[int]


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
        offsets: byte offset of each full block in the arena.
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
        self._arena_bounds = bounds_of(arena)
        self._starts = starts + (self._arena_bounds[0] + first_layer * shape.layer_block_bytes)
        self._layout = Layout(buffer, writable=into_buffer)
        self._into_buffer = into_buffer

    def run(self, threads: int, checksums: Checksums | None) -> None:
        """Copy with at most ``threads`` threads."""
        if checksums is not None and checksums.shape != (len(self._starts), self._layer_count):
            raise InvalidArgument("one checksum per layer block is required", shape=checksums.shape, blocks=len(self._starts))
        if not len(self._starts) or not self._shape.layer_block_bytes:
            return
        ours, lengths = self._layout.addresses(self._blocks, self._first_layer, self._layer_count)
        block_bytes = self._layer_count * self._shape.layer_block_bytes
        if len(ours) == len(self._starts):
            theirs = self._starts
        else:
            # offset of each piece if all blocks were consecutive; it gives the block and the offset inside the block
            before = np.cumsum(lengths) - lengths
            theirs = self._starts[before // block_bytes] + before % block_bytes
        length = int(lengths[0])
        parts, rest = divmod(length, self._shape.layer_block_bytes)
        if checksums is None or rest or (lengths != length).any():
            self._copy(ours, theirs, lengths, threads)
            if checksums is not None:
                # hash the buffer, not the arena: on a load, the bytes in the buffer are what counts
                hasher = LayerHasher(self._shape.layer_block_bytes, checksums.size)
                hasher.update(self._layout.pieces(self._blocks, self._first_layer, self._layer_count))
                checksums[:] = hasher.digests().reshape(checksums.shape)
            return
        sums = np.empty(checksums.size, np.uint64)
        self._copy(ours, theirs, None, threads, parts, sums)
        checksums[:] = sums.reshape(checksums.shape)

    def _copy(
        self,
        ours: Positions,
        theirs: Positions,
        lengths: Positions | None,
        threads: int,
        parts: int = 1,
        sums: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        """Copy pieces between the buffer (``ours``) and the arena (``theirs``)."""
        region = self._layout.region
        if region is not None:
            bounds = region[0], region[0] + region[1]
        else:  # several regions, whose pieces the layout has checked
            sizes = parts * self._shape.layer_block_bytes if lengths is None else lengths
            bounds = int(ours.min()), int((ours + sizes).max())
        sides = (theirs, ours) if self._into_buffer else (ours, theirs)
        limits = (self._arena_bounds, bounds) if self._into_buffer else (bounds, self._arena_bounds)
        sources, targets = (np.ascontiguousarray(side).view(np.uint64) for side in sides)
        run(
            CopyBatch(
                sources,
                targets,
                *limits,
                size=self._shape.layer_block_bytes if sums is not None else 0,
                parts=parts,
                lengths=None if lengths is None else np.ascontiguousarray(lengths).view(np.uint64),
                threads=threads,
            ),
            sums,
        )
