"""All kernels give the same bytes and checksums as slices and the xxhash library, and move nothing if a batch is wrong."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash
from batches import BatchPairs, Case, random_case, reject_broken, run_and_compare

from kvstore.native import CopyBatch, Rejected, bounds_of
from kvstore.native.batch import THREAD_BYTES, Kernel
from kvstore.native.c_kernel import CKernel
from kvstore.native.python_kernel import PythonKernel

BYTES = np.random.default_rng(7).integers(0, 256, 12 << 20, np.uint8)


def test_kernel_hashes_every_short_length(kernel: Kernel) -> None:
    for length in itertools.chain(range(1400), (4096, 65_535, 65_537)):
        sums = np.zeros(1, np.uint64)
        low, high = bounds_of(BYTES.data)
        kernel.run(CopyBatch(np.array([low + 5], np.uint64), None, (low, high), size=length), sums)
        assert int(sums[0]) == xxhash.xxh3_64_intdigest(BYTES[5 : 5 + length].tobytes()), length


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("size", [1, 16, 240, 241, 4_096, 65_537])
def test_kernel_hash_of_parts_matches_xxhash(kernel: Kernel, size: int, readonly: bool) -> None:
    for parts in (1, 2, 7):
        view = memoryview(bytearray(BYTES[3 : 3 + parts * size].tobytes()))
        expected = [xxhash.xxh3_64_intdigest(view[at : at + size]) for at in range(0, parts * size, size)]
        assert kernel.hash(view.toreadonly() if readonly else view, size).tolist() == expected


@pytest.mark.parametrize("count", [500, pytest.param(100_000, marks=pytest.mark.thorough)])
def test_kernel_random_batches_match_xxhash(kernel: Kernel, count: int) -> None:
    random = np.random.default_rng(count)
    for _ in range(count):
        run_and_compare(kernel, random_case(random))


def test_kernel_rejects_broken_random_batches(kernel: Kernel) -> None:
    draw = np.random.default_rng(5)
    for _ in range(500):
        reject_broken(kernel, draw)


def test_native_and_python_agree_on_random_batches(library: Path) -> None:
    """The kernel that this processor would use, against the fallback."""
    pairs, kernels = BatchPairs(11), (CKernel(library), PythonKernel())
    for _ in range(1_000):
        for _ in range(100):
            pairs.run(kernels)
        pairs.compare_targets()


@pytest.mark.parametrize("shift", [0, 16, 5])
@pytest.mark.parametrize("size", [2_048, 2_049, 65_536, 65_600])
def test_kernel_large_batch_of_any_alignment(kernel: Kernel, shift: int, size: int) -> None:
    """Copies this large are shared by threads and stored past the caches."""
    parts = 8
    pieces = (2 * THREAD_BYTES) // (parts * size) + 1
    space = np.zeros(pieces * parts * size + 128, np.uint8)
    start = -bounds_of(space.data)[0] % 64 + shift
    order = np.random.default_rng(1).permutation(pieces)
    case = Case(
        BYTES,
        space[start:][: pieces * parts * size],
        [int(at) for at in np.linspace(0, len(BYTES) - parts * size, pieces)],
        [int(place) * parts * size for place in order],
        parts,
        size,
        threads=3,
    )
    run_and_compare(kernel, case)


def test_kernel_copies_pieces_of_different_lengths(kernel: Kernel) -> None:
    target = np.zeros(4096, np.uint8)
    (low, high), (to, end) = bounds_of(BYTES.data), bounds_of(target.data)
    lengths = np.array([0, 1, 700, 65, 64], np.uint64)
    offsets = np.array([0, 10, 100, 1000, 2000], np.uint64)
    kernel.run(CopyBatch(offsets + np.uint64(low), offsets + np.uint64(to), (low, high), (to, end), lengths=lengths), None)
    expected = np.zeros(4096, np.uint8)
    for at, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        expected[at : at + length] = BYTES[at : at + length]
    assert (target == expected).all()


@pytest.mark.parametrize(("from_offset", "to_offset"), [(-1, 0), (101, 0), (0, -1), (0, 101), (2**63, 0), (0, 2**63)], ids=str)
def test_kernel_rejects_pieces_out_of_range(kernel: Kernel, from_offset: int, to_offset: int) -> None:
    """The first piece is right, and is not copied either."""
    source, target = BYTES[:200], np.zeros(200, np.uint8)
    (low, high), (to, end) = bounds_of(source.data), bounds_of(target.data)
    batch = CopyBatch(
        np.array([low, (low + from_offset) % 2**64], np.uint64),
        np.array([to, (to + to_offset) % 2**64], np.uint64),
        (low, high),
        (to, end),
        size=100,
    )
    for sums in (None, np.zeros(2, np.uint64)):
        with pytest.raises(Rejected, match="outside its bounds"):
            kernel.run(batch, sums)
    assert not target.any()


@pytest.mark.parametrize("distance", [-99, -1, 0, 1, 99])
def test_kernel_rejects_overlapping_copy(kernel: Kernel, distance: int) -> None:
    memory = BYTES[:400].copy()
    before = memory.copy()
    low, high = bounds_of(memory.data)
    batch = CopyBatch(
        np.array([low + 150], np.uint64), np.array([low + 150 + distance], np.uint64), (low, high), (low, high), size=100
    )
    with pytest.raises(Rejected, match="overlaps"):
        kernel.run(batch, None)
    assert (memory == before).all()


def test_kernel_rejects_tables_of_wrong_shape(kernel: Kernel) -> None:
    low, high = bounds_of(BYTES.data)
    one = np.array([low], np.uint64)
    target = np.zeros(64, np.uint8)
    to = np.array([bounds_of(target.data)[0]], np.uint64)
    inside = ((low, high), bounds_of(target.data))
    wrong = [
        (lambda: CopyBatch(one, np.array([low, low], np.uint64), *inside, size=8), None),
        (lambda: CopyBatch(one.astype(np.int64), None, (low, high), size=8), np.zeros(1, np.uint64)),  # type: ignore[arg-type]
        (lambda: CopyBatch(one, None, (low, high), size=8, parts=0), np.zeros(0, np.uint64)),
        (lambda: CopyBatch(one, None, (low, high), size=1 << 62, parts=4), np.zeros(4, np.uint64)),
        (lambda: CopyBatch(one, None, (low, high), size=8), None),
        (lambda: CopyBatch(one, None, (low, high), size=8), np.zeros(2, np.uint64)),
        (lambda: CopyBatch(one, None, (low, high), size=8), np.zeros(1, np.int64)),
        (lambda: CopyBatch(one, to, *inside, lengths=np.array([8], np.uint64)), np.zeros(1, np.uint64)),
    ]
    for make, sums in wrong:
        with pytest.raises(Rejected):
            kernel.run(make(), sums)
    assert not target.any()


def test_kernel_finds_every_flipped_bit(kernel: Kernel) -> None:
    memory = BYTES[:1_300].copy()
    low, high = bounds_of(memory.data)
    batch = CopyBatch(np.array([low], np.uint64), None, (low, high), size=len(memory))
    right, found = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    kernel.run(batch, right)
    for bit in range(0, 8 * len(memory), 7):
        memory[bit // 8] ^= 1 << bit % 8
        kernel.run(batch, found)
        assert found != right
        memory[bit // 8] ^= 1 << bit % 8


def test_kernel_source_changes_during_copy(kernel: Kernel) -> None:
    """The checksum is that of the bytes in the target, even while another thread writes to the source."""
    source, target = BYTES[: 4 << 20].copy(), np.zeros(4 << 20, np.uint8)
    (low, high), (to, end) = bounds_of(source.data), bounds_of(target.data)
    batch = CopyBatch(np.array([low], np.uint64), np.array([to], np.uint64), (low, high), (to, end), size=len(source))
    stop, sums = threading.Event(), np.zeros(1, np.uint64)

    def scribble() -> None:
        for value in itertools.cycle(range(256)):
            source[::4096] = value
            if stop.is_set():
                return

    writer = threading.Thread(target=scribble)
    writer.start()
    try:
        for _ in range(20):
            kernel.run(batch, sums)
            assert int(sums[0]) == xxhash.xxh3_64_intdigest(target.data)
    finally:
        stop.set()
        writer.join()
