"""Arrays that describe the copies between an arena and a device: pure, and the same for all copy strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
ChunkOf = Callable[[Numbers, int], tuple[Numbers, npt.NDArray[np.bool_]]]
"""``chunk_of(starts, nbytes)``: the pinned chunk that contains each start, and whether all bytes of the range are pinned."""

MIN_LAUNCHES = 256
"""Up to this many copies per load are cheap, for loads of any size."""


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


def runs_of(starts: Numbers, pitch: int) -> int:
    """Count the contiguous runs of blocks.

    Args:
        starts: address of each block.
        pitch: bytes of a block.
    """
    return int(np.count_nonzero(np.diff(starts) != pitch)) + 1 if len(starts) else 0


def layers_at_once(layers: int, blocks: int, runs: int) -> int:
    """Choose the number of layers per copy so that the number of copies is at most one per block, or ``MIN_LAUNCHES``.

    Contiguous blocks are copied one layer at a time. The more runs there are, the more layers are copied together, up to whole
    blocks, which are contiguous.

    Args:
        layers: layers of the whole copy.
        blocks: number of blocks.
        runs: contiguous runs of blocks.
    """
    allowed = max(blocks, MIN_LAUNCHES)
    steps = max(1, min(layers, allowed // max(1, runs)))
    return -(-layers // steps)


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
