"""Copies between the pool and other memory of the same device, in few launches.

Slots that were reserved together are mostly contiguous: a contiguous run is one strided copy. If there are many runs, the copy
gathers or scatters rows of a page each by index.
"""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from kvclient.hbm.memory import PAGE_BYTES
from kvclient.memory.buffers import check_apart
from kvclient.memory.device_buffer import DeviceHung
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockShape
from kvstore.tiers.allocator import round_up

STRETCHES = 4
"""With more runs than this, rows are copied by index."""
PIECE_BYTES = 64 << 20
"""Bytes copied by one index: the temporary memory of a copy of scattered rows."""
COMPUTE_S = 300.0
"""Longer than any engine step. Copies that begin after the engine's kernels are assumed to hang after this time."""
_NAP_S = 50e-6
WORD = torch.int64
WORDS = PAGE_BYTES // 8


def tensor_blocks(tensor: object, shape: BlockShape, count: int, device: torch.device, *, writable: bool) -> torch.Tensor:
    """View a tensor as blocks: uint8 ``[count, layers, layer_block_bytes]``. No bytes are copied.

    Args:
        tensor: ``count`` full blocks, contiguous, or with leading axes ``[blocks]`` or ``[blocks, layers]`` of any stride, and
            all later axes contiguous.
        shape: shape of each block.
        count: the exact number of blocks.
        device: the required device.
        writable: whether bytes will be written to it.

    Raises:
        InvalidArgument: an unsupported tensor, or a writable one that overlaps itself.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.device != device or tensor.layout is not torch.strided:
        got = tensor.device if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise InvalidArgument("expected a dense tensor on the pool's device", device=device, got=got)
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        raise InvalidArgument("the bytes of the tensor are not its values: resolve or dequantize it", dtype=tensor.dtype)
    wanted = (count, shape.layers, shape.layer_block_bytes)
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes != count * shape.block_bytes:
        raise InvalidArgument(
            "the tensor does not have the size of the requested blocks",
            nbytes=nbytes,
            expected=count * shape.block_bytes,
            blocks=count,
        )
    tensor = tensor.detach()
    if not count:
        return tensor.new_empty(wanted, dtype=torch.uint8)
    if tensor.is_contiguous():
        return tensor.reshape(-1).view(torch.uint8).view(wanted)
    lead = 1 if tensor.shape[0] == count and tensor[0].is_contiguous() else 2
    try:  # what is no such view raises here
        rows = tensor.view(*tensor.shape[:lead], -1).view(torch.uint8).view(wanted)
    except RuntimeError:
        rows = None
    if rows is None or (wanted[2] > 1 and rows.stride(2) != 1):
        raise InvalidArgument(
            "a tensor that is not contiguous needs axes [blocks, …] or [blocks, layers, …] and contiguous later axes",
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
        )
    if writable:
        check_apart(wanted, rows.stride())
    return rows


def gather(memory: torch.Tensor, offsets: npt.NDArray[np.int64], rows: torch.Tensor) -> None:
    """Copy blocks out of the pool's memory, on the current stream.

    Args:
        memory: uint8 ``[bytes]``.
        offsets: offset of each block, a multiple of a page; whole slots within the memory.
        rows: uint8 ``[blocks, layers, layer_block_bytes]`` on the same device; the first ``len(offsets)`` are filled.
    """
    if not _by_pages(rows, offsets):
        for first, last, blocks in _stretches(memory, offsets, rows.shape):
            rows[first:last].copy_(blocks, non_blocking=True)
        return
    source = memory.view(WORD).view(-1, WORDS)
    for first, last, pages in _pieces(rows, offsets):
        target = rows[first:last]
        if target.is_contiguous() and target.data_ptr() % 8 == 0 and target.storage_offset() % 8 == 0:
            torch.index_select(source, 0, pages, out=target.view(-1, PAGE_BYTES).view(WORD))
        else:
            target.copy_(source.index_select(0, pages).view(torch.uint8).view(target.shape), non_blocking=True)


def scatter(rows: torch.Tensor, memory: torch.Tensor, offsets: npt.NDArray[np.int64]) -> None:
    """Copy blocks into the pool's memory, on the current stream; arguments as for ``gather``."""
    if not _by_pages(rows, offsets):
        for first, last, blocks in _stretches(memory, offsets, rows.shape):
            blocks.copy_(rows[first:last], non_blocking=True)
        return
    target = memory.view(WORD).view(-1, WORDS)
    for first, last, pages in _pieces(rows, offsets):
        packed = rows[first:last].contiguous().view(-1, PAGE_BYTES)
        if packed.data_ptr() % 8 or packed.storage_offset() % 8:
            packed = packed.clone()
        target.index_copy_(0, pages, packed.view(WORD))


def until_done(device: torch.device, timeout_s: float = COMPUTE_S) -> None:
    """Wait for the current stream, for a bounded time.

    Args:
        device: device of the stream.
        timeout_s: bound of the wait.

    Raises:
        DeviceHung: the stream did not end in time. Its copies may still access their memory.
    """
    if device.type != "cuda":
        return
    until_s = time.monotonic() + timeout_s
    with torch.cuda.device(device):  # in a new thread, GPU 0 is current, and a query would create a context there
        end = torch.cuda.Event()
        end.record(torch.cuda.current_stream(device))
        while not end.query():
            if time.monotonic() >= until_s:
                raise DeviceHung("copies of the pool did not end in time", device=device, seconds=timeout_s)
            time.sleep(_NAP_S)  # torch lacks a bounded wait for an event


def stretches(offsets: npt.NDArray[np.int64], slot_bytes: int) -> list[tuple[int, int]]:
    """Runs of contiguous slots, as (first, end) positions."""
    cuts = [0, *(np.flatnonzero(np.diff(offsets) != slot_bytes) + 1).tolist(), len(offsets)]
    return [(first, last) for first, last in pairwise(cuts) if last > first]


def _stretches(memory: torch.Tensor, offsets: npt.NDArray[np.int64], shape: torch.Size) -> list[tuple[int, int, torch.Tensor]]:
    """Each run as (first, end, its blocks in the pool's memory)."""
    _, layers, size = shape
    slot = round_up(layers * size)
    return [
        (first, last, memory.as_strided((last - first, layers, size), (slot, size, 1), int(offsets[first])))
        for first, last in stretches(offsets, slot)
    ]


def _by_pages(rows: torch.Tensor, offsets: npt.NDArray[np.int64]) -> bool:
    """Whether blocks are whole pages and copying by index needs fewer launches than copying runs."""
    size = rows.shape[1] * rows.shape[2]
    return size % PAGE_BYTES == 0 and len(stretches(offsets, size)) > STRETCHES


def _pieces(rows: torch.Tensor, offsets: npt.NDArray[np.int64]) -> list[tuple[int, int, torch.Tensor]]:
    """Blocks ``[first, last)`` with the page numbers of all their pages, in pieces of bounded size."""
    size = rows.shape[1] * rows.shape[2]
    step = max(1, PIECE_BYTES // size)
    pieces = []
    for first in range(0, len(offsets), step):
        last = min(len(offsets), first + step)
        pages = np.add.outer(offsets[first:last] // PAGE_BYTES, np.arange(size // PAGE_BYTES)).reshape(-1)
        pieces.append((first, last, torch.from_numpy(pages).to(rows.device)))
    return pieces
