"""Arrays that describe the copies between an arena and a device: pure, and the same for all copy strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
ChunkOf = Callable[[Numbers, int], tuple[Numbers, npt.NDArray[np.bool_]]]
"""``chunk_of(starts, nbytes)``: the pinned chunk that contains each start, and whether all bytes of the range are pinned."""

MOST_GROUPS = 32
"""Most groups of layers of one copy: each costs a call of the driver or a launch."""
PIECE_BYTES = 256 << 10
"""Pieces of this length use the whole bandwidth of a copy engine."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows at a constant pitch in host memory, contiguous on the device.

    Attributes:
        first: number of the first row.
        count: number of rows.
        shift: offset within the row; not 0 only after the border of a chunk.
        width: bytes of each.
    """

    first: int
    count: int
    shift: int
    width: int


def layer_groups(layers: int, per_layer: int, enough: int) -> list[range]:
    """Divide layers into groups that are copied together, so that a group is worth the cost of its call.

    Args:
        layers: number of layers.
        per_layer: work per layer, in any unit.
        enough: work that is worth a call.

    Returns:
        At most ``MOST_GROUPS`` groups of consecutive layers, in order.
    """
    size = max(-(-enough // max(1, per_layer)), -(-layers // MOST_GROUPS), 1)
    return [range(first, min(first + size, layers)) for first in range(0, layers, size)]


def staging_plan(
    blocks: int, layers: int, row_bytes: int, space: int, piece_bytes: int = PIECE_BYTES
) -> Iterator[tuple[range, range]]:
    """Divide a copy into steps that fit into a staging buffer: groups of layers in order, and blocks within.

    If everything fits, there is one step. Otherwise a group has so many layers that its rows, which are contiguous in a block,
    are long pieces for a copy engine, and as many as fit for all blocks.

    Args:
        blocks: number of blocks.
        layers: number of layers.
        row_bytes: bytes of a row in the buffer.
        space: bytes of the buffer; at least a row.
        piece_bytes: least length of a piece, if the buffer is large enough.

    Yields:
        Layers and blocks of each step.
    """
    if not blocks or not layers:
        return
    fitting = space // (blocks * row_bytes)
    group = max(1, min(layers, space // row_bytes, max(-(-piece_bytes // row_bytes), fitting)))
    step = max(1, space // (group * row_bytes))
    for first in range(0, layers, group):
        some = range(first, min(first + group, layers))
        for begin in range(0, blocks, step):
            yield some, range(begin, min(begin + step, blocks))


def rows_of(starts: Numbers, width: int, pitch: int, chunk_of: ChunkOf, chunk_end: Callable[[int], int]) -> Iterator[RowSpan]:
    """Divide rows into copies: neighbours at one pitch together, and no copy across the border of two pinned chunks.

    Args:
        starts: address of each row.
        width: bytes of a row.
        pitch: distance between rows of one copy; at least ``width``.
        chunk_of: see ``ChunkOf``.
        chunk_end: address after a chunk, by its number.
    """
    if not len(starts):
        return
    first, _ = chunk_of(starts, width)
    last, _ = chunk_of(starts + (width - 1), 1)
    split = first != last
    fresh = np.empty(len(starts), bool)
    fresh[0] = True
    fresh[1:] = (np.diff(starts) != pitch) | (first[1:] != first[:-1]) | split[1:] | split[:-1]
    heads = np.flatnonzero(fresh)
    for head, end in zip(heads.tolist(), [*heads[1:].tolist(), len(starts)], strict=True):
        if split[head]:
            shift, chunk = 0, int(first[head])
            while shift < width:
                stop = min(width, chunk_end(chunk) - int(starts[head]))
                yield RowSpan(head, 1, shift, stop - shift)
                shift, chunk = stop, chunk + 1
        else:
            yield RowSpan(head, end - head, 0, width)


def cut_batch(targets: Numbers, sources: Numbers, sizes: Numbers, host: Numbers, border: int, base: int) -> tuple[Numbers, ...]:
    """Divide copies that cross borders of pinned chunks.

    Args:
        targets: addresses.
        sources: addresses.
        sizes: bytes of each.
        host: those of the two that are host addresses.
        border: bytes of a chunk.
        base: address of the first chunk.

    Returns:
        Targets, sources and sizes.
    """
    done: list[tuple[Numbers, Numbers, Numbers]] = []
    while True:
        before = border - (host - base) % border  # bytes up to the next border
        split = sizes > before
        done.append((targets, sources, np.minimum(sizes, before)))
        if not split.any():
            break
        before = before[split]
        targets, sources, host = targets[split] + before, sources[split] + before, host[split] + before
        sizes = sizes[split] - before
    if len(done) == 1:
        return done[0]
    return tuple(np.concatenate(arrays) for arrays in zip(*done, strict=True))
