"""Views of a caller's memory as blocks: the ``BlockBuffer`` protocol.

Accepted: any bytes-like object, a numpy array, a torch CPU tensor, a list of per-block buffers, or a ``BlockBuffer``. No
bytes are copied: the result is a view, which lives as long as the call that needs it. This module does not import torch: a torch
tensor exists only if torch was imported already.
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
from kvstore.native import address_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


def as_block_buffer(
    obj: object, shape: BlockShape, count: int, *, writable: bool = True, spec: CacheSpec | None = None
) -> BlockBuffer:
    """Return a view of a caller's memory as ``count`` blocks of ``shape``.

        buffer = as_block_buffer(np.zeros((8, spec.block_bytes), np.uint8), spec.shape, 8)

    Args:
        obj: one of

            * bytes-like (bytearray, memoryview, mmap, …): ``count * block_bytes`` contiguous bytes;
            * numpy array or torch CPU tensor of any dtype: C-contiguous with that many bytes, or with the leading axes
              ``[blocks]`` or ``[blocks, layers]`` of any stride and contiguous axes after them (a layer-major cache
              is the transposed view ``cache.transpose(0, 1)``);
            * list or tuple of ``count`` contiguous buffers of ``block_bytes`` each;
            * a ``BlockBuffer``.
        shape: the size of each block.
        count: exact number of blocks.
        writable: whether bytes will be written into it.
        spec: the namespace of the blocks, for the check of a device's pages; None: no check.

    Raises:
        InvalidArgument: the memory has another size, is not contiguous as required, is to be written but read-only or overlaps
            itself, has an unknown type, or consists of pages of another namespace.
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
    """Return a dense buffer over an array: over its bytes if it is contiguous, else over its two leading axes."""
    array = np.asarray(array)  # subclasses have reshapes and views of their own
    if array.dtype.hasobject:
        raise InvalidArgument("an array of Python objects cannot hold blocks", dtype=array.dtype)
    if writable and not array.flags.writeable:
        raise InvalidArgument("the buffer is read-only, but blocks must be written into it")
    if array.nbytes != count * shape.block_bytes:
        raise InvalidArgument(
            "the buffer does not have the size of the requested blocks",
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
    """Return a uint8 view ``[blocks, layers, layer_block_bytes]`` of an array whose one or two leading axes have any stride."""
    blocks, layers, layer_bytes = wanted
    if array.shape[0] == blocks and array[0].flags.c_contiguous:
        return np.lib.stride_tricks.as_strided(_as_bytes(array), wanted, (array.strides[0], layer_bytes, 1))
    if array.ndim < 3 or array.shape[:2] != (blocks, layers) or not array[0, 0].flags.c_contiguous:
        raise InvalidArgument(
            "a strided buffer must have axes [blocks, …] or [blocks, layers, …], with contiguous axes after them",
            shape=array.shape,
            strides=array.strides,
            blocks=blocks,
            layers=layers,
        )
    return np.lib.stride_tricks.as_strided(_as_bytes(array), wanted, (*array.strides[:2], 1))


def check_apart(shape: Sequence[int], strides: Sequence[int]) -> None:
    """Check that no two blocks of an array ``[blocks, layers, layer_block_bytes]`` share a byte.

    Args:
        shape: its axes.
        strides: of the axes, in bytes.

    Raises:
        InvalidArgument: two blocks overlap.
    """
    extent = 1
    axes = [(abs(stride), length) for stride, length in zip(strides, shape, strict=True) if length > 1]
    for stride, length in sorted(axes):
        if stride < extent:
            break
        extent += stride * (length - 1)
    else:
        return  # nested strides, which is nearly always the case
    blocks, layers, size = shape
    starts = np.add.outer(np.arange(blocks) * strides[0], np.arange(layers) * strides[1]).reshape(-1)
    _check_pieces_apart(starts, np.full(len(starts), size))


def _check_pieces_apart(starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> None:
    """Check that no two pieces of memory share a byte.

    Raises:
        InvalidArgument: two pieces overlap.
    """
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    if (starts[1:] < starts[:-1] + sizes[order][:-1]).any():
        raise InvalidArgument("blocks of the buffer overlap in memory, but different bytes must be written into them")


def _as_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return an array of bytes that begins at the same address, as a base for ``as_strided``."""
    first: npt.NDArray[np.uint8] = np.lib.stride_tricks.as_strided(array, (1,), (array.itemsize,)).view(np.uint8)
    return first


def _from_list(pieces: Sequence[object], shape: BlockShape, count: int, writable: bool) -> ScatteredBlocks:
    """Return a scattered buffer over one piece of memory per block."""
    if len(pieces) != count:
        raise InvalidArgument("one buffer per block is required", buffers=len(pieces), blocks=count)
    size = shape.block_bytes
    views = []
    for position, piece in enumerate(pieces):
        view = _flat_view(piece)
        if view.nbytes != size:
            raise InvalidArgument(
                "a block's buffer does not have the size of a block", position=position, nbytes=view.nbytes, expected=size
            )
        if writable and view.readonly:
            raise InvalidArgument("a block's buffer is read-only, but blocks must be written into it", position=position)
        views.append(view)
    if writable:
        _check_views_apart(views)
    return ScatteredBlocks(views, shape)


def _check_views_apart(views: Sequence[memoryview]) -> None:
    """Check that no two views share a byte; see ``_check_pieces_apart``."""
    starts = np.fromiter(map(address_of, views), np.int64, len(views))
    _check_pieces_apart(starts, np.fromiter((view.nbytes for view in views), np.int64, len(views)))


def _flat_view(piece: object) -> memoryview:
    """Return one contiguous piece of memory as bytes."""
    if _is_tensor(piece):
        piece = _tensor_bytes(piece)
    if isinstance(piece, np.ndarray):
        if not piece.flags.c_contiguous or piece.dtype.hasobject:
            raise InvalidArgument("a block's buffer is not contiguous", shape=piece.shape, strides=piece.strides)
        return memoryview(cast("Buffer", piece.reshape(-1).view(np.uint8)))
    return memoryview(cast("Buffer", _bytes_of(piece)))


def _bytes_of(obj: object) -> npt.NDArray[np.uint8]:
    """Return a bytes-like object as a flat uint8 array, read-only if the object is."""
    try:
        view = memoryview(obj)  # type: ignore[arg-type]  # an object without a buffer raises TypeError
    except TypeError as error:
        raise InvalidArgument(
            "a buffer must be bytes-like, a numpy array, a torch CPU tensor, a list of those, or a BlockBuffer",
            got=type(obj).__name__,
        ) from error
    if not view.c_contiguous:
        raise InvalidArgument("the buffer is not contiguous", shape=view.shape, strides=view.strides)
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(view.cast("B"), np.uint8)


def _checked(buffer: BlockBuffer, shape: BlockShape, count: int, writable: bool) -> BlockBuffer:
    """Check a block buffer of the caller."""
    _check_fits(buffer, shape, count)
    if not writable:
        return buffer
    if isinstance(buffer, DenseBlocks):  # one array: one check
        if count and not buffer.array.flags.writeable:
            raise InvalidArgument("the block buffer is read-only, but blocks must be written into it")
        check_apart(buffer.array.shape, buffer.array.strides)
        return buffer
    pieces = [piece for block in range(count) for piece in buffer.segments(block, 0, shape.layers)]
    if any(piece.readonly for piece in pieces):
        raise InvalidArgument("the block buffer is read-only, but blocks must be written into it")
    _check_views_apart(pieces)
    return buffer


def _check_fits(buffer: BlockBuffer, shape: BlockShape, count: int) -> None:
    if buffer.shape != shape or buffer.count != count:
        raise InvalidArgument(
            "the block buffer does not fit the requested blocks",
            buffer_shape=buffer.shape,
            expected_shape=shape,
            buffer_blocks=buffer.count,
            expected_blocks=count,
        )


def _is_tensor(obj: object) -> bool:
    """Whether an object is a torch tensor. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


def _tensor_bytes(tensor: Any) -> npt.NDArray[np.uint8]:  # noqa: ANN401  # torch is not imported, not even for its types
    """Return a torch CPU tensor as a uint8 array over the same memory: numpy knows neither bf16 nor fp8."""
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise InvalidArgument("a tensor must be a dense CPU tensor", device=tensor.device, layout=tensor.layout)
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        raise InvalidArgument("the bytes of the tensor are not its values; resolve the view or dequantize it", dtype=tensor.dtype)
    tensor = tensor.detach()
    if tensor.is_contiguous():
        tensor = tensor.reshape(-1)
    elif tensor.stride(-1) != 1:
        raise InvalidArgument("the last axis of the tensor is not contiguous", shape=tuple(tensor.shape), strides=tensor.stride())
    try:
        array: npt.NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    except (RuntimeError, TypeError) as error:  # torch has no such view of this tensor
        raise InvalidArgument("the tensor cannot be viewed as bytes", shape=tuple(tensor.shape), dtype=tensor.dtype) from error
    return array


class PickedBlocks:
    """Some blocks of a buffer as a buffer, in the given order. No bytes are copied."""

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
    """Return some blocks of a buffer as a view: a dense one if possible, because dense memory is copied faster.

    Args:
        buffer: the memory.
        blocks: ascending positions in it.
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
    """Some layers of each block of a buffer, as blocks. No bytes are copied."""

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
