"""Random batches over two byte arrays, with the expected results."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import xxhash

from kvstore.native import CopyBatch, Rejected, bounds_of
from kvstore.native.batch import Kernel


@dataclass
class Case:
    """Pieces as offsets into a source and a target array."""

    source: np.ndarray
    target: np.ndarray
    from_offsets: list[int]
    to_offsets: list[int]
    parts: int
    size: int
    threads: int = 1
    stream_from: int = 4_096

    def batch(self, *, copy: bool = True) -> CopyBatch:
        """The batch of these pieces."""
        low, high = bounds_of(self.source.data), bounds_of(self.target.data)
        return CopyBatch(
            np.array(self.from_offsets, np.uint64) + np.uint64(low[0]),
            np.array(self.to_offsets, np.uint64) + np.uint64(high[0]) if copy else None,
            low,
            high if copy else (0, 0),
            size=self.size,
            parts=self.parts,
            threads=self.threads,
            stream_from=self.stream_from,
        )

    def expected(self) -> tuple[np.ndarray, list[int]]:
        """The target array after the copy, and the checksums, made with slices and xxhash."""
        after, sums = self.target.copy(), []
        length = self.parts * self.size
        for at, to in zip(self.from_offsets, self.to_offsets, strict=True):
            piece = self.source[at : at + length]
            after[to : to + length] = piece
            sums += [
                xxhash.xxh3_64_intdigest(piece[start : start + self.size].tobytes()) for start in range(0, length, self.size or 1)
            ]
        return after, sums if self.size else [xxhash.xxh3_64_intdigest(b"")] * (len(self.from_offsets) * self.parts)


def random_case(random: np.random.Generator, most_bytes: int = 5_000) -> Case:
    """A batch whose targets do not overlap, of any alignment."""
    parts = int(random.integers(1, 5))
    size = int(random.choice([0, 1, 3, 8, 16, 17, 128, 129, 240, 241, 1024, 1025, int(random.integers(0, most_bytes))]))
    pieces = int(random.integers(0, 6))
    length = parts * size
    source = random.integers(0, 256, length * 2 + 64, np.uint8)
    target = np.zeros(length * pieces + 64, np.uint8)
    shift = int(random.integers(0, 64))
    order = random.permutation(pieces)
    return Case(
        source,
        target,
        [int(at) for at in random.integers(0, len(source) - length + 1, pieces)],
        [int(place) * length + shift for place in order],
        parts,
        size,
        threads=int(random.integers(1, 4)),
    )


def reject_broken(kernel: Kernel, draw: np.random.Generator) -> None:
    """Break one piece of a random batch. The kernel must reject the batch before any byte moves."""
    while not (case := random_case(draw)).from_offsets or not case.parts * case.size:
        pass
    batch, length, at = case.batch(), case.parts * case.size, int(draw.integers(len(case.from_offsets)))
    assert batch.targets is not None
    source, before = case.source.copy(), case.target.copy()
    if draw.integers(3):
        table, (low, high) = [(batch.sources, batch.source_bounds), (batch.targets, batch.target_bounds)][int(draw.integers(2))]
        table[at] = draw.choice(np.array([0, low - 1, high - length + 1, high, high + 1, 2**64 - length, 2**64 - 1], np.uint64))
    else:
        both = (min(batch.source_bounds[0], batch.target_bounds[0]), max(batch.source_bounds[1], batch.target_bounds[1]))
        batch.source_bounds = batch.target_bounds = both
        batch.targets[at] = int(batch.sources[at]) + int(draw.integers(-length + 1, length))
    for sums in (None, np.zeros(len(case.from_offsets) * case.parts, np.uint64)):
        with pytest.raises(Rejected):
            kernel.run(batch, sums)
        assert sums is None or not sums.any()
    assert (case.source == source).all()
    assert (case.target == before).all()


class BatchPairs:
    """Random batches for two kernels over one source, with a target for each. Cheap, because bytes are drawn once.

    Args:
        seed: seed of bytes and batches.
    """

    SIZES = (0, 1, 3, 8, 9, 16, 17, 64, 128, 129, 240, 241, 300, 1023, 1024, 1025, 1088)
    MOST_PIECES = 5
    MOST_PARTS = 4

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._room = self.MOST_PARTS * max(self.SIZES)
        self._source = np.random.default_rng(seed).integers(0, 256, 4 * self._room, np.uint8)
        self._targets = [np.zeros(self.MOST_PIECES * self._room + 64, np.uint8) for _ in range(2)]
        self._bounds = bounds_of(self._source.data)
        self._target_bounds = [bounds_of(target.data) for target in self._targets]

    def run(self, kernels: tuple[Kernel, Kernel]) -> None:
        """Run the next batch with both kernels and compare the checksums."""
        draw = self._draw
        parts, size, pieces = draw.randint(1, self.MOST_PARTS), draw.choice(self.SIZES), draw.randint(0, self.MOST_PIECES)
        copies, hashes, shift = (*draw.choice(((True, True), (True, False), (False, True))), draw.randrange(64))
        length = parts * size
        lengths = None
        if not hashes and draw.random() < 0.5:
            parts, lengths = 1, np.array([draw.randint(0, length) for _ in range(pieces)], np.uint64)
        starts = np.array([draw.randint(0, len(self._source) - length) for _ in range(pieces)], np.uint64)
        places = np.array(draw.sample(range(self.MOST_PIECES), pieces), np.uint64) * np.uint64(self._room) + np.uint64(shift)
        threads, stream_from, sums = draw.randint(1, 3), draw.choice((1, 1 << 20)), []
        for kernel, (low, high) in zip(kernels, self._target_bounds, strict=True):
            found = np.zeros(pieces * parts, np.uint64) if hashes else None
            batch = CopyBatch(
                starts + np.uint64(self._bounds[0]),
                places + np.uint64(low) if copies else None,
                self._bounds,
                (low, high),
                size=size,
                parts=parts,
                lengths=lengths,
                threads=threads,
                stream_from=stream_from,
            )
            kernel.run(batch, found)
            sums.append(None if found is None else found.tobytes())
        assert sums[0] == sums[1], (parts, size, pieces)

    def compare_targets(self) -> None:
        """Compare every byte that both kernels have written, or left as it was."""
        assert (self._targets[0] == self._targets[1]).all()


def run_and_compare(kernel: Kernel, case: Case) -> None:
    """Run a case in all three ways and compare every byte and checksum."""
    after, expected = case.expected()
    sums = np.zeros(len(expected), np.uint64)
    kernel.run(case.batch(copy=False), sums)
    assert sums.tolist() == expected
    assert not case.target.any()
    kernel.run(case.batch(), None)
    assert (case.target == after).all()
    case.target[:] = 0
    sums[:] = 0
    kernel.run(case.batch(), sums)
    assert (case.target == after).all()
    assert sums.tolist() == expected
