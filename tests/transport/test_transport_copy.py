"""Copies between an arena and a caller's memory match a byte-by-byte model, on every code path."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient.memory import arena as arena_module
from kvclient.memory.arena import copy_from_arena, copy_to_arena
from kvstore.core.buffers import BlockBuffer
from kvstore.core.checksum import block_checksums
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockShape
from kvstore.native import CopyBatch, run
from kvstore.testing.transport_suite import BUFFERS, SENTINEL, content, dense
from kvstore.transport.nixl import address_table

Make = Callable[[int, BlockShape], BlockBuffer]


@pytest.fixture(autouse=True, scope="module")
def batches_of_disjoint_targets() -> Iterator[None]:
    """Every batch of this file's copies: no target shares a byte with another target or with any source.

    The kernel does not check that, because it would have to sort all pieces.
    """

    def run_checked(batch: CopyBatch, sums: npt.NDArray[np.uint64] | None = None) -> None:
        assert batch.targets is not None
        sizes = np.full(len(batch.sources), batch.parts * batch.size) if batch.lengths is None else batch.lengths.astype(np.int64)
        targets, sources = batch.targets.astype(np.int64), batch.sources.astype(np.int64)
        order = np.argsort(targets)
        first, end = targets[order], (targets + sizes)[order]
        assert (end[:-1] <= first[1:]).all()
        assert not any(((first < source + size) & (source < end)).any() for source, size in zip(sources, sizes, strict=True))
        run(batch, sums)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena_module, "run", run_checked)
        yield


def random_arena(size: int, seed: int = 0) -> bytearray:
    return bytearray(np.random.default_rng(seed).bytes(size))


def offsets_in(size: int, count: int, shape: BlockShape, step: int, seed: int) -> list[int]:
    """Return offsets of blocks that do not overlap, at multiples of ``step``, in random order."""
    space = -(-shape.block_bytes // step) * step
    places = np.random.default_rng(seed).permutation((size - shape.block_bytes) // space + 1)[:count]
    return [int(place) * space for place in places]


@pytest.mark.parametrize("make", BUFFERS, ids=lambda make: make.__name__)
@given(
    shape=st.builds(BlockShape, st.integers(1, 5), st.sampled_from([1, 7, 64, 512, 3000])),
    count=st.integers(0, 40),
    step=st.sampled_from([1, 64, 4096]),
    seed=st.integers(0, 1000),
    hashed=st.booleans(),
    data=st.data(),
)
def test_copy_matches_bytewise_model(
    make: Make, shape: BlockShape, count: int, step: int, seed: int, hashed: bool, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, shape.layers - 1))
    layers = data.draw(st.integers(1, shape.layers - first))
    size = (count + 3) * (shape.block_bytes + step)
    offsets = offsets_in(size, count, shape, step, seed)
    blocks = [int(block) for block in np.random.default_rng(seed + 1).permutation(count + 2)[:count]]
    low, high = first * shape.layer_block_bytes, (first + layers) * shape.layer_block_bytes
    arena = random_arena(size, seed)
    before = bytes(arena)
    sums = np.zeros((count, layers), np.uint64) if hashed else None

    buffer = make(count + 2, shape)
    copy_from_arena(
        memoryview(arena), offsets, buffer, blocks, first_layer=first, layer_count=layers, threads=2, checksums=sums
    )  # fmt: skip
    assert arena == before
    model = {block: bytearray([SENTINEL]) * shape.block_bytes for block in range(count + 2)}
    for offset, block in zip(offsets, blocks, strict=True):
        model[block][low:high] = before[offset + low : offset + high]
    assert {block: content(buffer, block) for block in model} == model
    if sums is not None:
        assert np.array_equal(sums, block_checksums(buffer, blocks)[:, first : first + layers])

    found, target = sums, bytearray(size)
    if sums is not None:
        sums = np.zeros_like(sums)
    copy_to_arena(
        buffer, memoryview(target), offsets, blocks, first_layer=first, layer_count=layers, threads=2, checksums=sums
    )  # fmt: skip
    expected = bytearray(size)
    for offset in offsets:
        expected[offset + low : offset + high] = before[offset + low : offset + high]
    assert target == expected
    assert sums is None or np.array_equal(sums, found)


@pytest.mark.parametrize("make", BUFFERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("scattered_offsets", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_copy_large_with_threads_is_exact(make: Make, scattered_offsets: bool, threads: int) -> None:
    shape, count = BlockShape(2, 600_000), 16
    offsets = np.arange(count) * shape.block_bytes
    if scattered_offsets:
        offsets = offsets[::-1]
    arena = random_arena(count * shape.block_bytes)
    buffer = make(count, shape)
    sums = np.zeros((count, 2), np.uint64)
    copy_from_arena(memoryview(arena), offsets, buffer, threads=threads, checksums=sums if threads == 2 else None)
    for block, offset in enumerate(offsets):
        assert content(buffer, block) == arena[offset : offset + shape.block_bytes]
    if threads == 2:
        assert np.array_equal(sums, block_checksums(buffer, range(count)))
    back = bytearray(len(arena))
    copy_to_arena(buffer, memoryview(back), offsets, threads=threads)
    assert back == arena


@pytest.mark.parametrize("size", [256, 4096, 16_384])
def test_copy_many_small_blocks_is_exact(size: int) -> None:
    """Block sizes below, at and above the limits of the gather path."""
    shape, count = BlockShape(1, size), 2_000
    arena = random_arena(count * size)
    offsets = np.random.default_rng(1).permutation(count) * size
    buffer = dense(count, shape)
    copy_from_arena(memoryview(arena), offsets, buffer)
    assert np.array_equal(buffer.array[:, 0], np.frombuffer(arena, np.uint8).reshape(count, size)[offsets // size])
    back = bytearray(len(arena))
    copy_to_arena(buffer, memoryview(back), offsets)
    assert back == arena


def test_copy_offset_outside_arena_is_refused() -> None:
    shape = BlockShape(2, 50)
    arena = memoryview(bytearray(1000))
    for offsets in ([-1], [901], [0, 1 << 62], [[0]]):
        with pytest.raises(InvalidArgument):
            copy_from_arena(arena, offsets, dense(4, shape))
        with pytest.raises(InvalidArgument):
            copy_to_arena(dense(4, shape), arena, offsets)
    assert not any(arena)


def test_copy_invalid_arguments_are_refused() -> None:
    shape = BlockShape(2, 50)
    arena = memoryview(bytearray(1000))
    with pytest.raises(InvalidArgument):
        copy_from_arena(arena, [0, 100], dense(1, shape))
    with pytest.raises(InvalidArgument):
        copy_from_arena(arena, [0], dense(4, shape), [4])
    with pytest.raises(InvalidArgument):
        copy_from_arena(arena, [0], dense(4, shape), first_layer=1, layer_count=2)
    with pytest.raises(InvalidArgument):
        copy_from_arena(arena, [0], dense(4, shape), checksums=np.zeros((1, 1), np.uint64))
    with pytest.raises(InvalidArgument):
        copy_to_arena(dense(4, shape), memoryview(bytes(1000)), [0])


def test_copy_of_descriptors_is_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def noted(batch: CopyBatch) -> None:
        calls.append(len(batch.sources))
        run(batch)

    monkeypatch.setattr(address_table, "run", noted)
    memory = np.frombuffer(random_arena(10_000), np.uint8)
    target = np.zeros_like(memory)
    spans = [(700, 50), (0, 700), (5_000, 1), (9_999, 1)]
    ours, theirs = (
        np.array([(array.ctypes.data + start, length, 0) for start, length in spans], np.uint64) for array in (target, memory)
    )
    address_table.copy_rows(ours, theirs)
    address_table.copy_rows(ours[:0], theirs[:0])
    assert calls == [4]
    copied = np.concatenate([np.arange(start, start + length) for start, length in spans])
    assert np.array_equal(target[copied], memory[copied])
    target[copied] = 0
    assert not target.any()
