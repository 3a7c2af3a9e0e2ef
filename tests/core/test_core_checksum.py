"""Checksums do not depend on the layout of the bytes in memory, and change with every bit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core import checksum
from kvstore.core.buffers import DenseBlocks, ScatteredBlocks
from kvstore.core.checksum import LayerHasher, block_checksums, layer_checksums, piece_checksums, verify
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockShape
from kvstore.native import CopyBatch, run

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / "checksums.json").read_text())["vectors"]

shapes = st.builds(BlockShape, st.integers(1, 5), st.integers(1, 300))


class Torn:
    """A buffer whose layer blocks consist of pieces of three bytes."""

    def __init__(self, blocks: list[bytes], shape: BlockShape) -> None:
        self._blocks = blocks
        self.shape = shape

    @property
    def count(self) -> int:
        return len(self._blocks)

    def segments(self, block: int, first_layer: int, layer_count: int) -> Sequence[memoryview]:
        size = self.shape.layer_block_bytes
        piece = memoryview(self._blocks[block])[first_layer * size : (first_layer + layer_count) * size]
        return [piece[at : at + 3] for at in range(0, len(piece), 3)]


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_golden_checksums(vector: dict[str, Any]) -> None:
    shape = BlockShape(vector["layers"], vector["layer_block_bytes"])
    block = bytes((at * 31 + at // 256) % 256 for at in range(shape.block_bytes))
    assert layer_checksums(memoryview(block), shape).hex() == vector["checksums"]
    assert verify(memoryview(block), shape, bytes.fromhex(vector["checksums"]))


@given(shapes, st.integers(1, 4), st.randoms(use_true_random=False))
def test_every_layout_gives_the_same_checksums(shape: BlockShape, count: int, random: Any) -> None:
    blocks = [random.randbytes(shape.block_bytes) for _ in range(count)]
    size = shape.layer_block_bytes
    expected = [[xxhash.xxh3_64(block[at : at + size]).intdigest() for at in range(0, len(block), size)] for block in blocks]
    dense = np.frombuffer(b"".join(blocks), np.uint8).reshape(count, shape.layers, size)
    layer_major = np.ascontiguousarray(dense.transpose(1, 0, 2)).transpose(1, 0, 2)
    spaced = np.zeros((count * 2, shape.layers, size), np.uint8)
    spaced[::2] = dense
    buffers = [
        DenseBlocks(dense),
        DenseBlocks(layer_major),
        DenseBlocks(spaced[::2]),
        ScatteredBlocks([memoryview(block) for block in blocks], shape),
        Torn(blocks, shape),
    ]
    for buffer in buffers:
        found = block_checksums(buffer, range(count))
        assert found.shape == (count, shape.layers)
        assert found.dtype == np.uint64
        assert found.tolist() == expected
        assert block_checksums(buffer, list(range(count))[::-1]).tolist() == expected[::-1]
    for block, row in zip(blocks, expected, strict=True):
        assert layer_checksums(memoryview(block), shape) == np.array(row, "<u8").tobytes()


@pytest.mark.parametrize("size", [5, 300, 70_000])
@given(cuts=st.lists(st.integers(0, 20)), whole=st.booleans(), seed=st.integers(0, 100))
def test_pieces_cut_anywhere_give_the_same_checksums(size: int, cuts: list[int], whole: bool, seed: int) -> None:
    """``whole``: cuts are between layer blocks."""
    data = np.random.default_rng(seed).bytes(20 * size)
    places = sorted({0, 20, *cuts}) if whole else sorted({0, 20 * size, *(cut * size // 3 for cut in cuts)})
    ends = [place * size for place in places] if whole else places
    pieces = [memoryview(data)[start:end] for start, end in itertools.pairwise(ends)]
    expected = [xxhash.xxh3_64_intdigest(data[at : at + size]) for at in range(0, len(data), size)]
    hasher = LayerHasher(size, 20)
    hasher.update(pieces)
    assert hasher.digests().tolist() == piece_checksums(pieces, size).tolist() == expected


@pytest.mark.parametrize(("parts", "hashers"), [(15, ["xxhash"] * 15), (16, ["kernel"])])
def test_stream_of_many_layer_blocks_uses_the_kernel(parts: int, hashers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (used.append(name), work(*given))[1]

    monkeypatch.setattr(checksum, "hash_parts", noted("kernel", checksum.hash_parts))
    monkeypatch.setattr(checksum, "_digest", noted("xxhash", xxhash.xxh3_64_intdigest))
    hasher = LayerHasher(100, parts)
    hasher.update([memoryview(bytes(parts * 100))])
    assert used == hashers


def test_pieces_in_memory_are_one_call_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of up to 64 KiB would be hashed by xxhash with the interpreter lock held."""
    calls: list[int] = []

    def noted(batch: CopyBatch, sums: npt.NDArray[np.uint64]) -> None:
        calls.append(len(batch.sources))
        run(batch, sums)

    monkeypatch.setattr(checksum, "run", noted)
    memory = np.random.default_rng(1).integers(0, 256, 12 << 16, np.uint8).data
    pieces = [memory[5 << 16 :], memory[: 5 << 16]]
    expected = [xxhash.xxh3_64_intdigest(piece[at : at + (1 << 16)]) for piece in pieces for at in range(0, len(piece), 1 << 16)]
    assert piece_checksums(pieces, 1 << 16).tolist() == expected
    assert calls == [12]


@given(shapes, st.data())
def test_a_flipped_bit_is_found(shape: BlockShape, data: st.DataObject) -> None:
    block = bytearray(range(256)) * (shape.block_bytes // 256 + 1)
    block = block[: shape.block_bytes]
    view = memoryview(block)
    checksums = layer_checksums(view, shape)
    bit = data.draw(st.integers(0, shape.block_bytes * 8 - 1))
    block[bit // 8] ^= 1 << bit % 8
    assert not verify(view, shape, checksums)
    assert verify(view, shape, layer_checksums(view, shape))


def test_other_numbers_of_checksums_never_match() -> None:
    shape = BlockShape(2, 4)
    view = memoryview(b"12345678")
    good = layer_checksums(view, shape)
    assert not verify(view, shape, good[:8])
    assert not verify(view, shape, good + good)
    assert not verify(view, shape, b"")


def test_views_of_another_item_size() -> None:
    array = np.arange(8, dtype=np.uint32).reshape(2, 4)
    shape = BlockShape(4, 8)
    assert layer_checksums(memoryview(array), shape) == layer_checksums(memoryview(array.tobytes()), shape)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        layer_checksums(memoryview(b"1234567"), BlockShape(2, 4))
    with pytest.raises(InvalidArgument):
        verify(memoryview(b"123456789"), BlockShape(2, 4), b"")
    with pytest.raises(InvalidArgument):
        block_checksums(DenseBlocks(np.zeros((1, 2, 4), np.uint8)), [1])
