"""Random batches over two byte arrays, with the expected results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash

from kvstore.native import CopyBatch, bounds_of
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
