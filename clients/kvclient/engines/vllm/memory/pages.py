"""An engine's KV cache tensors as memory of blocks.

The unit of transfer is a whole page of every layer; nothing here copies it.

A page is ``tensor[block_id]``. Its inner layout belongs to the attention kernel (on CPUs K is transposed or tiled), so no smaller
part is addressed. Hosts whose kernels differ have separate namespaces.

``GroupPages`` are in host memory, where computed KV is available at once. ``device_pages`` are in device memory, where computed
KV is available after a mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvclient import BlockBuffer, BlockShape, CacheSpec, InvalidArgument
from kvstore.core.errors import Unsupported

if TYPE_CHECKING:
    from kvclient.memory.device_buffer import ArenaPinner
    from kvclient.memory.engine_pool import DiskReaderFactory

LAYOUTS = "LBNHC, LBHNC, BLNHC, BLHNC"
"""vLLM's layouts (``VLLM_KV_CACHE_LAYOUT``) whose pages are contiguous."""
OTHER_LAYOUT = "set VLLM_KV_CACHE_LAYOUT to LBNHC"

Mark = object
"""A position in the engine's computation; None: host memory, where all requested computation has already finished."""


class CopyRate(NamedTuple):
    """Speed of one copy strategy, as measured by trial copies at start.

    Attributes:
        direction: ``load`` or ``store``.
        strategy: its name.
        in_use: whether copies of this direction use it.
        bytes_per_second: 0: not measured.
    """

    direction: str
    strategy: str
    in_use: bool
    bytes_per_second: float


class Pages(Protocol):
    """The pages of one part of a KV cache group. All pages of one engine share a device: a mark of one is valid for all."""

    num_blocks: int
    shape: BlockShape
    codec_name: str
    """Name of the encoding of stored blocks, which is part of the namespace; empty: the pages' own bytes."""

    def mark(self) -> Mark:
        """Mark the end of all work that the calling thread, which must be the engine's, has submitted to the device so far."""

    def buffer(self, block_ids: Sequence[int], after: Mark = None) -> BlockBuffer:
        """Return some pages as a block buffer that may be accessed only after a mark.

        Raises:
            InvalidArgument: a page does not exist.
        """

    def layer_buffer(self, layer: int, block_ids: Sequence[int], after: Mark = None) -> BlockBuffer:
        """Return one layer of some pages, as a buffer of blocks of one layer."""

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero some pages before any later work of the calling thread, which must be the engine's, on the device.

        A failed load must not leave data in a page. The page's next owner fills only a part of it, and kernels multiply the rest
        by zero, which turns a NaN into a NaN.
        """

    def watcher(self, spec: CacheSpec) -> ArenaPinner | None:
        """Return the copier between these pages and arenas, for a client of a namespace; None: the client copies itself.

        Raises:
            InvalidArgument: the namespace does not match these pages.
        """

    def disk_reader(self) -> DiskReaderFactory | None:
        """Return what reads the node's volumes directly into memory of the pages' device; None: nothing does."""

    def close(self) -> None:
        """End direct reads, after the clients are closed."""

    def wait_pinned(self, timeout_s: float) -> bool:
        """Wait until the memory mapped for these copies is pinned, or will not be pinned. False: timeout.

        Call it at the end of the engine's start. Later pins are made with pauses.
        """

    def suspend(self, timeout_s: float) -> None:
        """Let no copy begin, and wait until none is under way: the engine unmaps the memory. Idempotent.

        Raises:
            Internal: copies did not end in time; the memory must stay mapped.
            Unsupported: pages in host memory.
        """

    def resume(self) -> None:
        """Let copies begin again: the memory is mapped at the same addresses. Idempotent."""

    def counts(self) -> Mapping[str, int]:
        """Return totals of these copies by counter name."""

    def copy_rates(self) -> Sequence[CopyRate]:
        """Return the copy strategies of each direction; empty for pages in host memory."""


class GroupPages:
    """The pages of one KV cache group in host memory; see ``Pages``.

    Args:
        tensors: one per layer, in layer order: dense CPU tensors ``[blocks, …]``, or ``[blocks * n, …]`` if kernels use smaller
            pages
            than the engine's block manager.
        num_blocks: number of blocks of the block manager.

    Raises:
        InvalidArgument: a page is not contiguous, pages of layers differ in size, or the tensors are not in host memory.
    """

    def __init__(self, tensors: Sequence[Any], num_blocks: int) -> None:
        views = [_page_bytes(tensor, num_blocks) for tensor in tensors]
        sizes = {view.page_bytes for view in views}
        if len(sizes) != 1:
            raise InvalidArgument("pages of the layers of one part of a group differ in size", sizes=sorted(sizes))
        self._layers = views
        self.codec_name = ""
        self.num_blocks = num_blocks
        self.shape = BlockShape(len(views), sizes.pop())

    def mark(self) -> Mark:
        return None

    def buffer(self, block_ids: Sequence[int], after: Mark = None) -> PageBuffer:  # noqa: ARG002
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            raise InvalidArgument("no such page", least=min(block_ids), most=max(block_ids), pages=self.num_blocks)
        return PageBuffer(self._layers, block_ids, self.shape)

    def layer_buffer(self, layer: int, block_ids: Sequence[int], after: Mark = None) -> PageBuffer:  # noqa: ARG002
        return PageBuffer(self._layers[layer : layer + 1], block_ids, BlockShape(1, self.shape.layer_block_bytes))

    def clear(self, block_ids: Sequence[int]) -> None:
        empty = bytes(self.shape.layer_block_bytes)
        pages = self.buffer(block_ids)
        for block in range(pages.count):
            for piece in pages.segments(block, 0, self.shape.layers):
                piece[:] = empty

    def watcher(self, spec: CacheSpec) -> None:  # noqa: ARG002
        return None

    def disk_reader(self) -> None:
        return None

    def close(self) -> None:
        """Do nothing: pages on a CPU have no direct reads."""

    def wait_pinned(self, timeout_s: float) -> bool:  # noqa: ARG002
        return True

    def suspend(self, timeout_s: float) -> None:  # noqa: ARG002
        raise Unsupported("an engine on a CPU cannot sleep: its pages are not unmapped")

    def resume(self) -> None:
        """Do nothing: pages on a CPU are never suspended."""

    def counts(self) -> Mapping[str, int]:
        return {}

    def copy_rates(self) -> Sequence[CopyRate]:
        return ()


class PageBuffer:
    """A block buffer over pages; see ``kvclient.BlockBuffer``."""

    def __init__(self, layers: Sequence[LayerPages], block_ids: Sequence[int], shape: BlockShape) -> None:
        self._layers = layers
        self._block_ids = block_ids
        self._shape = shape

    @property
    def count(self) -> int:
        """Number of pages."""
        return len(self._block_ids)

    @property
    def shape(self) -> BlockShape:
        """Number of layers, and bytes per page."""
        return self._shape

    def segments(self, block: int, first_layer: int, layer_count: int) -> Sequence[memoryview]:
        """One piece per layer."""
        page, size = self._block_ids[block], self._shape.layer_block_bytes
        pieces = []
        for layer in self._layers[first_layer : first_layer + layer_count]:
            at = page * layer.stride
            pieces.append(layer.memory[at : at + size])
        return pieces


class LayerPages:
    """Location of one layer's pages: page ``b`` is ``memory[b * stride : b * stride + page_bytes]``."""

    __slots__ = ("memory", "page_bytes", "stride")

    def __init__(self, memory: memoryview, stride: int, page_bytes: int) -> None:
        self.memory = memory
        self.stride = stride
        self.page_bytes = page_bytes


def _page_bytes(tensor: Any, num_blocks: int) -> LayerPages:  # noqa: ANN401  # torch is not imported here, not even for types
    """Return the pages of one layer's tensor."""
    import torch  # already imported by the engine

    if tensor.device.type != "cpu":
        raise InvalidArgument("a KV cache on this device is not supported: use a CPU or a CUDA device", device=str(tensor.device))
    per_block = pages_per_block(tensor, num_blocks)
    natural = tensor.detach().permute(0, *(axis + 1 for axis in page_order(tensor)))
    if per_block > 1 and natural.stride(0) != natural[0].numel():
        raise InvalidArgument(
            f"several kernel blocks per page in this layout of the KV cache are not supported: {OTHER_LAYOUT}",
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
        )
    if not natural[:per_block].is_contiguous():
        raise InvalidArgument(
            f"pages of the KV cache that are not contiguous are not supported: {OTHER_LAYOUT}",
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
        )
    array: npt.NDArray[np.uint8] = natural.view(torch.uint8).numpy()
    stride, size = array.strides[0] * per_block, array[:per_block].nbytes
    memory = np.lib.stride_tricks.as_strided(array, ((num_blocks - 1) * stride + size,), (1,))
    return LayerPages(memory.data, stride, size)


def pages_per_block(tensor: Any, num_blocks: int) -> int:  # noqa: ANN401
    """Return the number of kernel pages per block of the block manager.

    Raises:
        InvalidArgument: the first axis of the tensor is not that of the blocks.
    """
    if num_blocks <= 0 or not tensor.ndim or not tensor.shape[0] or tensor.shape[0] % num_blocks:
        raise InvalidArgument(
            "the first axis of the KV cache must be a multiple of the announced blocks",
            shape=tuple(tensor.shape),
            blocks=num_blocks,
        )
    count: int = tensor.shape[0] // num_blocks
    return count


def page_order(tensor: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return the axes of a page in memory order, outermost first; ``(0, 1, 2)`` if memory order equals axis order."""
    strides, sizes = tensor.stride()[1:], tensor.shape[1:]
    wide = [axis for axis in range(len(sizes)) if sizes[axis] > 1]  # the stride of an axis of length one has no meaning
    if sorted(wide, key=lambda axis: -strides[axis]) == wide:
        return tuple(range(len(sizes)))
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))
