"""What callers may bring as memory for blocks, turned into the one protocol that movers speak (``BlockBuffer``).

Accepted: any bytes-like object, a numpy array, a torch CPU tensor, a list of per-block buffers, or a ``BlockBuffer``. No
bytes are copied: what is returned is a view, and it lives as long as the call that needs it. Torch is never imported here:
a torch tensor can only exist where somebody else has imported torch already.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from kvclient.memory.device_buffer import DeviceBuffer
from kvstore.core.buffers import BlockBuffer, DenseBlocks, ScatteredBlocks
from kvstore.core.errors import InvalidArgument
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockShape
from kvstore.transport.layout import address_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


def as_block_buffer(
    obj: object, shape: BlockShape, count: int, *, writable: bool = True, spec: CacheSpec | None = None
) -> BlockBuffer:
    """Views a caller's memory as ``count`` blocks of ``shape``.

    Args:
        obj: one of

            * bytes-like (bytearray, memoryview, mmap, …): ``count * block_bytes`` contiguous bytes;
            * numpy array or torch CPU tensor of any dtype: C-contiguous with that many bytes, or with the leading axes
              ``[blocks]`` or ``[blocks, layers]`` of any stride and everything behind them contiguous (a layer-major cache
              is the transposed view ``cache.transpose(0, 1)``);
            * list or tuple of ``count`` contiguous buffers of ``block_bytes`` each;
            * a ``BlockBuffer``.
        shape: the size of each block.
        count: how many blocks there must be room for, exactly.
        writable: whether bytes will be written into it.
        spec: the namespace of the blocks, which a device's pages must be of; None: they are not held against any.

    Raises:
        InvalidArgument: the memory has another size, is not contiguous where it must be, is read-only or overlaps itself although
            it is to be written, is of a kind that is not understood, or consists of pages of another namespace.
    """
    if isinstance(obj, np.ndarray):
        return _from_array(obj, shape, count, writable)
    if _is_tensor(obj):
        return _from_array(_tensor_bytes(obj), shape, count, writable)
    if isinstance(obj, DeviceBuffer):
        _check_fits(obj, shape, count)
        if spec is not None:
            obj.check(spec)
        return obj if writable else obj.source()
    if isinstance(obj, BlockBuffer):
        return _checked(obj, shape, count, writable)
    if isinstance(obj, list | tuple):
        return _from_list(obj, shape, count, writable)
    return _from_array(_bytes_of(obj), shape, count, writable)


def _from_array(array: npt.NDArray[Any], shape: BlockShape, count: int, writable: bool) -> DenseBlocks:
    """A dense buffer over an array: by its bytes where it is contiguous, else by its two leading axes."""
    array = np.asarray(array)  # subclasses have reshapes and views of their own
    if array.dtype.hasobject:
        raise InvalidArgument("an array of Python objects holds no blocks", dtype=array.dtype)
    if writable and not array.flags.writeable:
        raise InvalidArgument("the buffer is read-only, and blocks are to be written into it")
    if array.nbytes != count * shape.block_bytes:
        raise InvalidArgument(
            "the buffer has not the size of the blocks asked for",
            buffer_bytes=array.nbytes,
            expected_bytes=count * shape.block_bytes,
            blocks=count,
            block_bytes=shape.block_bytes,
        )
    wanted = (count, shape.layers, shape.layer_block_bytes)
    if array.size == 0:
        return DenseBlocks(np.empty(wanted, np.uint8))
    if array.flags.c_contiguous:
        return DenseBlocks(array.reshape(-1).view(np.uint8).reshape(wanted))
    strided = _strided(array, wanted)
    if writable:
        check_apart(strided.shape, strided.strides)
    return DenseBlocks(strided)


def _strided(array: npt.NDArray[Any], wanted: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """A uint8 view ``[blocks, layers, layer_block_bytes]`` of an array whose one or two leading axes have any stride."""
    blocks, layers, layer_bytes = wanted
    if array.shape[0] == blocks and array[0].flags.c_contiguous:
        return np.lib.stride_tricks.as_strided(_as_bytes(array), wanted, (array.strides[0], layer_bytes, 1))
    if array.ndim < 3 or array.shape[:2] != (blocks, layers) or not array[0, 0].flags.c_contiguous:
        raise InvalidArgument(
            "a buffer that is not contiguous needs axes [blocks, …] or [blocks, layers, …] with all behind them contiguous",
            shape=array.shape,
            strides=array.strides,
            blocks=blocks,
            layers=layers,
        )
    return np.lib.stride_tricks.as_strided(_as_bytes(array), wanted, (*array.strides[:2], 1))


def check_apart(shape: Sequence[int], strides: Sequence[int]) -> None:
    """No byte of an array ``[blocks, layers, layer_block_bytes]`` is reached in two ways: two blocks would share it.

    Args:
        shape: its axes.
        strides: of them, in bytes.

    Raises:
        InvalidArgument: one is.
    """
    extent = 1
    axes = [(abs(stride), length) for stride, length in zip(strides, shape, strict=True) if length > 1]
    for stride, length in sorted(axes):
        if stride < extent:
            break
        extent += stride * (length - 1)
    else:
        return  # nested, as memory nearly always is
    blocks, layers, size = shape
    starts = np.add.outer(np.arange(blocks) * strides[0], np.arange(layers) * strides[1]).reshape(-1)
    _check_pieces_apart(starts, np.full(len(starts), size))


def _check_pieces_apart(starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> None:
    """No two pieces of memory share a byte.

    Raises:
        InvalidArgument: two do.
    """
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    if (starts[1:] < starts[:-1] + sizes[order][:-1]).any():
        raise InvalidArgument("blocks of the buffer overlap in memory, and different bytes are to be written into them")


def _as_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """An array of bytes that begins where ``array`` does: something to lay strides over."""
    first: npt.NDArray[np.uint8] = np.lib.stride_tricks.as_strided(array, (1,), (array.itemsize,)).view(np.uint8)
    return first


def _from_list(pieces: Sequence[object], shape: BlockShape, count: int, writable: bool) -> ScatteredBlocks:
    """A scattered buffer over per-block memory."""
    if len(pieces) != count:
        raise InvalidArgument("one buffer a block is needed", buffers=len(pieces), blocks=count)
    size = shape.block_bytes
    views = []
    for position, piece in enumerate(pieces):
        view = _flat_view(piece)
        if view.nbytes != size:
            raise InvalidArgument(
                "a block's buffer has not the size of a block", position=position, nbytes=view.nbytes, expected=size
            )
        if writable and view.readonly:
            raise InvalidArgument("a block's buffer is read-only, and blocks are to be written into it", position=position)
        views.append(view)
    if writable:
        _check_views_apart(views)
    return ScatteredBlocks(views, shape)


def _check_views_apart(views: Sequence[memoryview]) -> None:
    """As ``_check_pieces_apart``, for pieces as views."""
    starts = np.fromiter(map(address_of, views), np.int64, len(views))
    _check_pieces_apart(starts, np.fromiter((view.nbytes for view in views), np.int64, len(views)))


def _flat_view(piece: object) -> memoryview:
    """One contiguous piece of memory as bytes."""
    if _is_tensor(piece):
        piece = _tensor_bytes(piece)
    if isinstance(piece, np.ndarray):
        if not piece.flags.c_contiguous or piece.dtype.hasobject:
            raise InvalidArgument("a block's buffer is not contiguous", shape=piece.shape, strides=piece.strides)
        return memoryview(cast("Buffer", piece.reshape(-1).view(np.uint8)))
    return memoryview(cast("Buffer", _bytes_of(piece)))


def _bytes_of(obj: object) -> npt.NDArray[np.uint8]:
    """A bytes-like object as a flat uint8 array (read-only where the object is)."""
    try:
        view = memoryview(obj)  # type: ignore[arg-type]  # whatever has no buffer raises TypeError
    except TypeError as error:
        raise InvalidArgument(
            "blocks live in bytes-like objects, numpy arrays, torch CPU tensors, lists of those, or a BlockBuffer",
            got=type(obj).__name__,
        ) from error
    if not view.c_contiguous:
        raise InvalidArgument("the buffer is not contiguous", shape=view.shape, strides=view.strides)
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(view.cast("B"), np.uint8)


def _checked(buffer: BlockBuffer, shape: BlockShape, count: int, writable: bool) -> BlockBuffer:
    """A block buffer of the caller's, held against what is asked for."""
    _check_fits(buffer, shape, count)
    if not writable:
        return buffer
    if isinstance(buffer, DenseBlocks):  # one array: one answer
        if count and not buffer.array.flags.writeable:
            raise InvalidArgument("the block buffer is read-only, and blocks are to be written into it")
        check_apart(buffer.array.shape, buffer.array.strides)
        return buffer
    pieces = [piece for block in range(count) for piece in buffer.segments(block, 0, shape.layers)]
    if any(piece.readonly for piece in pieces):
        raise InvalidArgument("the block buffer is read-only, and blocks are to be written into it")
    _check_views_apart(pieces)
    return buffer


def _check_fits(buffer: BlockBuffer, shape: BlockShape, count: int) -> None:
    if buffer.shape != shape or buffer.count != count:
        raise InvalidArgument(
            "the block buffer does not fit the blocks asked for",
            buffer_shape=buffer.shape,
            expected_shape=shape,
            buffer_blocks=buffer.count,
            expected_blocks=count,
        )


def _is_tensor(obj: object) -> bool:
    """Whether it is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


def _tensor_bytes(tensor: Any) -> npt.NDArray[np.uint8]:  # noqa: ANN401  # torch is not imported, not even for its types
    """A torch CPU tensor as a uint8 array over the same memory (numpy knows neither bf16 nor fp8, so bytes it is)."""
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise InvalidArgument("only dense CPU tensors hold blocks here", device=tensor.device, layout=tensor.layout)
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        raise InvalidArgument(
            "the bytes of the tensor are not its values: resolve the view, or dequantize it", dtype=tensor.dtype
        )
    tensor = tensor.detach()
    if tensor.is_contiguous():
        tensor = tensor.reshape(-1)
    elif tensor.stride(-1) != 1:
        raise InvalidArgument("the last axis of the tensor is not contiguous", shape=tuple(tensor.shape), strides=tensor.stride())
    try:
        array: npt.NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    except (RuntimeError, TypeError) as error:  # how torch says that there is no such view of this tensor
        raise InvalidArgument("the tensor cannot be viewed as bytes", shape=tuple(tensor.shape), dtype=tensor.dtype) from error
    return array


class PickedBlocks:
    """Some blocks of a buffer as a buffer of their own, in the order given. No bytes are copied."""

    def __init__(self, buffer: BlockBuffer, blocks: Sequence[int]) -> None:
        self._buffer = buffer
        self._blocks = blocks

    @property
    def count(self) -> int:
        return len(self._blocks)

    @property
    def shape(self) -> BlockShape:
        return self._buffer.shape

    def segments(self, block: int, first_layer: int, layer_count: int) -> Sequence[memoryview]:
        return self._buffer.segments(self._blocks[block], first_layer, layer_count)


def pick_blocks(buffer: BlockBuffer, blocks: npt.NDArray[np.intp]) -> BlockBuffer:
    """Some blocks of a buffer, as a view; as plain as possible, because plain memory moves faster.

    Args:
        buffer: the memory.
        blocks: rising positions in it.
    """
    count = len(blocks)
    if count == buffer.count:
        return buffer
    if isinstance(buffer, DeviceBuffer):
        return buffer.pick(blocks.tolist())
    if isinstance(buffer, DenseBlocks) and count and int(blocks[-1]) - int(blocks[0]) == count - 1:
        return DenseBlocks(buffer.array[int(blocks[0]) : int(blocks[-1]) + 1])
    return PickedBlocks(buffer, blocks.tolist())


class LayersOf:
    """Some layers of each block of a buffer, as blocks of their own. No bytes are copied."""

    def __init__(self, buffer: BlockBuffer, first_layer: int, layer_count: int) -> None:
        self._buffer = buffer
        self._first_layer = first_layer
        self._shape = BlockShape(layer_count, buffer.shape.layer_block_bytes)

    @property
    def count(self) -> int:
        return self._buffer.count

    @property
    def shape(self) -> BlockShape:
        return self._shape

    def segments(self, block: int, first_layer: int, layer_count: int) -> Sequence[memoryview]:
        return self._buffer.segments(block, self._first_layer + first_layer, layer_count)
