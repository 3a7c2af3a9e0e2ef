"""What is copied between an arena and a device, as arrays: pure, and the same for all ways of copying."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
ChunkOf = Callable[[Numbers, int], tuple[Numbers, npt.NDArray[np.bool_]]]
"""``chunk_of(starts, nbytes)``: which pinned chunk each stretch begins in, and whether all of it is pinned."""

MIN_LAUNCHES = 256
"""So many copies of a load are few, whatever its size."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows at one distance from each other on the host's side, and following each other on the device's.

    Attributes:
        first: number of the first row.
        count: how many.
        shift: where within the row this begins: not 0 only behind the border of a chunk.
        width: bytes of each.
    """

    first: int
    count: int
    shift: int
    width: int


def runs_of(starts: Numbers, pitch: int) -> int:
    """How many stretches of blocks that follow each other some blocks lie in.

    Args:
        starts: where each block begins.
        pitch: bytes of a block.
    """
    return int(np.count_nonzero(np.diff(starts) != pitch)) + 1 if len(starts) else 0


def layers_at_once(layers: int, blocks: int, runs: int) -> int:
    """How many layers are copied together so that few copies do: at most one a block, or ``MIN_LAUNCHES``.

    One layer at a time where blocks lie together; the more scattered they are, the more layers, up to whole blocks, which are
    contiguous.

    Args:
        layers: of the whole copy.
        blocks: of it.
        runs: stretches that the blocks lie in.
    """
    allowed = max(blocks, MIN_LAUNCHES)
    steps = max(1, min(layers, allowed // max(1, runs)))
    return -(-layers // steps)


def rows_of(starts: Numbers, width: int, pitch: int, chunk_of: ChunkOf, chunk_end: Callable[[int], int]) -> Iterator[RowSpan]:
    """Cuts rows into copies: neighbours at one pitch together, none across the border of two pinned chunks.

    Args:
        starts: address of each row.
        width: bytes of it.
        pitch: distance at which rows belong together; at least ``width``.
        chunk_of: see there.
        chunk_end: address behind a chunk, by its number.
    """
    if not len(starts):
        return
    first, _ = chunk_of(starts, width)
    last, _ = chunk_of(starts + (width - 1), 1)
    torn = first != last
    fresh = np.empty(len(starts), bool)
    fresh[0] = True
    fresh[1:] = (np.diff(starts) != pitch) | (first[1:] != first[:-1]) | torn[1:] | torn[:-1]
    heads = np.flatnonzero(fresh)
    for head, end in zip(heads.tolist(), [*heads[1:].tolist(), len(starts)], strict=True):
        if torn[head]:
            before = chunk_end(int(first[head])) - int(starts[head])
            yield RowSpan(head, 1, 0, before)
            yield RowSpan(head, 1, before, width - before)
        else:
            yield RowSpan(head, end - head, 0, width)


def cut_batch(targets: Numbers, sources: Numbers, sizes: Numbers, host: Numbers, border: int, base: int) -> tuple[Numbers, ...]:
    """Copies with none across the border of two pinned chunks.

    Args:
        targets: addresses.
        sources: addresses.
        sizes: bytes of each, at most a chunk.
        host: which of the two is the host's.
        border: bytes of a chunk.
        base: address of the first chunk.

    Returns:
        Targets, sources and sizes.
    """
    begin = (host - base) // border
    torn = begin != (host + sizes - 1 - base) // border
    if not torn.any():
        return targets, sources, sizes
    before = (begin[torn] + 1) * border + base - host[torn]
    heads = sizes.copy()
    heads[torn] = before
    return (
        np.concatenate([targets, targets[torn] + before]),
        np.concatenate([sources, sources[torn] + before]),
        np.concatenate([heads, sizes[torn] - before]),
    )
