"""Views of a caller's memory have block i and layer l at the same bytes as a plain array. Nothing is copied."""

from __future__ import annotations

import mmap
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient.memory.buffers import LayersOf, as_block_buffer, pick_blocks
from kvstore.core.buffers import BlockBuffer, DenseBlocks, ScatteredBlocks
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockShape

shapes = st.builds(BlockShape, st.integers(1, 4), st.sampled_from([1, 8, 24, 64]))


def content(buffer: BlockBuffer) -> np.ndarray[Any, Any]:
    """Return all bytes of a buffer as [blocks, layers, bytes], read through its segments."""
    shape = buffer.shape
    rows = [b"".join(buffer.segments(block, layer, 1)) for block in range(buffer.count) for layer in range(shape.layers)]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(buffer.count, shape.layers, shape.layer_block_bytes)


def pattern(count: int, shape: BlockShape) -> np.ndarray[Any, Any]:
    size = count * shape.block_bytes
    return (np.arange(size) * 31 % 251).astype(np.uint8).reshape(count, shape.layers, shape.layer_block_bytes)


def layer_major(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(data.transpose(1, 0, 2)).transpose(1, 0, 2)


def padded(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    space = np.zeros((data.shape[0], data.shape[1] + 2, data.shape[2]), np.uint8)
    space[:, 1:-1] = data
    return space[:, 1:-1]


def every_other(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    space = np.zeros((max(1, 2 * data.shape[0]), *data.shape[1:]), np.uint8)
    space[: 2 * data.shape[0] : 2] = data
    return space[: 2 * data.shape[0] : 2]


def wide_rows(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    space = np.zeros((data.shape[0], data.shape[1] * data.shape[2] + 5), np.uint8)
    space[:, 5:] = data.reshape(data.shape[0], data.shape[1] * data.shape[2])
    return space[:, 5:]


KINDS = {
    "wide rows": wide_rows,
    "bytearray": lambda data: bytearray(data.tobytes()),
    "memoryview": lambda data: memoryview(bytearray(data.tobytes())),
    "flat": lambda data: data.reshape(-1).copy(),
    "blocks": lambda data: data.copy(),
    "layer-major": layer_major,
    "padded": padded,
    "every other": every_other,
    "list of bytearrays": lambda data: [bytearray(one.tobytes()) for one in data],
    "tuple of arrays": lambda data: tuple(one.copy() for one in data),
    "dense": lambda data: DenseBlocks(data.copy()),
}


@given(shape=shapes, count=st.integers(0, 5), kind=st.sampled_from(sorted(KINDS)))
def test_block_buffer_kinds_read_alike(shape: BlockShape, count: int, kind: str) -> None:
    data = pattern(count, shape)
    buffer = as_block_buffer(KINDS[kind](data), shape, count)
    assert (buffer.count, buffer.shape) == (count, shape)
    assert np.array_equal(content(buffer), data)


@given(shape=shapes, count=st.integers(1, 5), kind=st.sampled_from(sorted(KINDS)), data=st.data())
def test_block_buffer_writes_to_callers_memory(shape: BlockShape, count: int, kind: str, data: st.DataObject) -> None:
    memory = KINDS[kind](np.zeros((count, shape.layers, shape.layer_block_bytes), np.uint8))
    block, layer = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, shape.layers - 1))
    for piece in as_block_buffer(memory, shape, count).segments(block, layer, 1):
        piece[:] = b"\x07" * piece.nbytes
    seen = content(as_block_buffer(memory, shape, count))
    assert (seen[block, layer] == 7).all()
    assert np.count_nonzero(seen) == shape.layer_block_bytes


@given(shape=shapes, count=st.integers(1, 8), kind=st.sampled_from(sorted(KINDS)), data=st.data())
def test_picked_blocks_and_layers_are_views(shape: BlockShape, count: int, kind: str, data: st.DataObject) -> None:
    whole = pattern(count, shape)
    buffer = as_block_buffer(KINDS[kind](whole), shape, count)
    chosen = sorted(data.draw(st.sets(st.integers(0, count - 1))))
    picked = pick_blocks(buffer, np.array(chosen, np.intp))
    assert np.array_equal(content(picked), whole[chosen])
    first = data.draw(st.integers(0, shape.layers - 1))
    number = data.draw(st.integers(1, shape.layers - first))
    assert np.array_equal(content(LayersOf(buffer, first, number)), whole[:, first : first + number])


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_arrays_of_any_dtype_and_axes_are_accepted(dtype: str) -> None:
    array = np.arange(2 * 3 * 4 * 8).astype(dtype).reshape(2, 3, 4, 8)
    shape = BlockShape(3, 32 * array.itemsize)
    plain = content(as_block_buffer(array, shape, 2))
    turned = np.ascontiguousarray(array.transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3)
    assert not turned.flags.c_contiguous
    assert np.array_equal(content(as_block_buffer(turned, shape, 2)), plain)
    assert plain.tobytes() == array.tobytes()


def test_memory_map_is_accepted() -> None:
    with mmap.mmap(-1, 4096) as memory:
        buffer = as_block_buffer(memory, BlockShape(2, 1024), 2)
        buffer.segments(1, 1, 1)[0][:] = b"x" * 1024
        assert memory[3072:] == b"x" * 1024
        del buffer


def test_torch_tensors_of_any_dtype_are_accepted() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8):
        tensor = torch.zeros((2, 3, 16), dtype=torch.float32).to(dtype)
        shape = BlockShape(3, 16 * tensor.element_size())
        as_block_buffer(tensor, shape, 2).segments(1, 2, 1)[0][:] = b"\x01" * shape.layer_block_bytes
        assert (tensor.view(torch.uint8)[1, 2] == 1).all()
        assert not tensor.view(torch.uint8)[0].any()
        turned = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        assert np.array_equal(content(as_block_buffer(turned, shape, 2)), content(as_block_buffer(tensor, shape, 2)))
        pages = [tensor[0], tensor[1]]
        assert np.array_equal(content(as_block_buffer(pages, shape, 2)), content(as_block_buffer(tensor, shape, 2)))
    with pytest.raises(InvalidArgument, match="CPU"):
        as_block_buffer(torch.zeros(96, dtype=torch.uint8, device="meta"), BlockShape(3, 16), 2)
    with pytest.raises(InvalidArgument, match="contiguous"):
        as_block_buffer(torch.zeros((32, 3), dtype=torch.uint8).T, BlockShape(3, 16), 2)
    weights = torch.zeros(96, requires_grad=True)
    assert as_block_buffer(weights, BlockShape(3, 64), 2).count == 2


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (bytearray(95), "size"),
        (bytearray(97), "size"),
        (bytes(96), "read-only"),
        (np.zeros((16, 3, 2), np.uint8).T, "strided buffer must have axes"),
        (np.zeros((2, 3, 32), np.uint8)[:, :, ::2], "contiguous"),
        (np.zeros(12, object), "objects"),
        ([bytearray(48)], "one buffer per block"),
        ([bytearray(48), bytearray(47)], "size of a block"),
        ([bytearray(48), bytes(48)], "read-only"),
        ([bytearray(48), 7], "bytes-like"),
        (memoryview(bytearray(192))[::2], "not contiguous"),
        ("text", "bytes-like"),
        (None, "bytes-like"),
        (np.lib.stride_tricks.as_strided(np.zeros((1, 3, 16), np.uint8), (2, 3, 16), (0, 16, 1)), "overlap"),
        (DenseBlocks(np.zeros((2, 3, 15), np.uint8)), "does not fit"),
        (DenseBlocks(np.zeros((1, 3, 16), np.uint8)), "does not fit"),
        (ScatteredBlocks([memoryview(bytearray(48)), memoryview(bytes(48))], BlockShape(3, 16)), "read-only"),
    ],
)
def test_unfit_memory_is_refused(memory: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        as_block_buffer(memory, BlockShape(3, 16), 2)


strided = np.lib.stride_tricks.as_strided
SAME = bytearray(96)


def entangled(layer_stride: int) -> np.ndarray[Any, Any]:
    """Five blocks of four layers, interleaved by layer."""
    return strided(np.zeros(1000, np.uint8), (5, 4, 10), (30, layer_stride, 1))


@pytest.mark.parametrize(
    ("memory", "shape", "count"),
    [
        (lambda: strided(np.zeros(40_000, np.uint8), (10, 4_000), (1_000, 1)), BlockShape(4, 1_000), 10),
        (lambda: strided(np.zeros(100, np.uint8), (2, 3, 16), (16, 16, 1)), BlockShape(3, 16), 2),
        (lambda: strided(np.zeros(100, np.uint8), (2, 3, 16), (48, 8, 1)), BlockShape(3, 16), 2),
        (lambda: strided(np.zeros(100, np.uint8), (2, 3, 16), (48, 0, 1)), BlockShape(3, 16), 2),
        (lambda: strided(np.zeros(100, np.uint8), (2, 3, 16), (0, 16, 1)), BlockShape(3, 16), 2),
        (lambda: strided(np.zeros(100, np.uint8)[50:], (2, 3, 16), (-16, 16, 1)), BlockShape(3, 16), 2),
        (lambda: entangled(95), BlockShape(4, 10), 5),
        (lambda: [SAME] * 2, BlockShape(3, 32), 2),
        (lambda: [memoryview(SAME)[:48], memoryview(SAME)[47:95]], BlockShape(3, 16), 2),
        (lambda: [memoryview(SAME)[47:95], bytearray(48), memoryview(SAME)[:48]], BlockShape(3, 16), 3),
        (lambda: ScatteredBlocks([memoryview(SAME)] * 2, BlockShape(3, 32)), BlockShape(3, 32), 2),
        (lambda: DenseBlocks(strided(np.zeros(100, np.uint8), (2, 3, 16), (16, 16, 1))), BlockShape(3, 16), 2),
        (lambda: pick_blocks(ScatteredBlocks([memoryview(SAME)] * 3, BlockShape(3, 32)), np.array([0, 2])), BlockShape(3, 32), 2),
    ],
)
def test_overlapping_memory_is_readable_but_not_writable(memory: Any, shape: BlockShape, count: int) -> None:
    with pytest.raises(InvalidArgument, match="overlap"):
        as_block_buffer(memory(), shape, count)
    assert content(as_block_buffer(memory(), shape, count, writable=False)).shape == (
        count,
        shape.layers,
        shape.layer_block_bytes,
    )


def test_interleaved_memory_is_writable() -> None:
    for memory, shape, count in (
        (entangled(100), BlockShape(4, 10), 5),
        (strided(np.zeros(1000, np.uint8), (5, 2, 10), (30, 105, 1)), BlockShape(2, 10), 5),
        (np.zeros((2, 3, 16), np.uint8)[::-1], BlockShape(3, 16), 2),
        ([memoryview(SAME)[48:], memoryview(SAME)[:48]], BlockShape(3, 16), 2),
        (np.ma.zeros((2, 48), np.uint8), BlockShape(3, 16), 2),
    ):
        assert as_block_buffer(memory, shape, count).count == count


@given(
    strides=st.tuples(st.integers(-40, 40), st.integers(-40, 40)),
    lengths=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9)),
)
def test_overlap_check_is_exact(strides: tuple[int, int], lengths: tuple[int, int, int]) -> None:
    array = strided(np.zeros(600, np.uint8)[300:], lengths, (*strides, 1))
    reached = [
        block * strides[0] + layer * strides[1] + at
        for block in range(lengths[0])
        for layer in range(lengths[1])
        for at in range(lengths[2])
    ]
    try:
        as_block_buffer(DenseBlocks(array), BlockShape(*lengths[1:]), lengths[0])
    except InvalidArgument:
        assert len(set(reached)) < len(reached)
    else:
        assert len(set(reached)) == len(reached)


def test_tensors_without_byte_view_are_refused() -> None:
    torch = pytest.importorskip("torch")
    tensors = {
        "conjugated": torch.zeros(12, dtype=torch.complex64).conj(),
        "negative": torch.zeros(12, dtype=torch.complex128).conj().imag,
        "sparse": torch.zeros(96, dtype=torch.uint8).to_sparse(),
        "meta": torch.zeros(96, dtype=torch.uint8, device="meta"),
        "expanded": torch.zeros(1, dtype=torch.uint8).expand(96),
    }
    for tensor in tensors.values():
        for memory in (tensor, [tensor, tensor]):
            with pytest.raises(InvalidArgument):
                as_block_buffer(memory, BlockShape(3, 16), 2)
    with pytest.raises(InvalidArgument, match="overlap"):
        as_block_buffer(torch.zeros((1, 48), dtype=torch.uint8).expand(2, 48), BlockShape(3, 16), 2)


def test_read_only_memory_can_be_stored() -> None:
    buffer = as_block_buffer(bytes(range(96)), BlockShape(3, 16), 2, writable=False)
    assert content(buffer).tobytes() == bytes(range(96))


def test_import_of_client_loads_nothing_heavy() -> None:
    """``import kvclient`` loads no engine, and no heavy module before the first name is used."""
    program = (
        "import sys, kvclient; print([m for m in ('torch', 'pydantic', 'vllm', 'sglang', 'numpy', 'grpc') if m in sys.modules]);"
        "kvclient.KVClient, kvclient.AsyncKVClient, kvclient.as_block_buffer;"
        "print([m for m in ('torch', 'pydantic', 'vllm', 'sglang', 'lmdb', 'kvstore.node') if m in sys.modules]);"
        "assert all(getattr(kvclient, name) for name in kvclient.__all__); assert set(kvclient.__all__) <= set(dir(kvclient))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["[]", "[]"]
