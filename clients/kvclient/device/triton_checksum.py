"""Checksums of layer blocks on the device: xxh3-64 (seed 0) of pages, or of blocks at any offsets of device memory.

Written after the published description of XXH3, like the native kernel of hosts. A program hashes one layer block. It has eight
accumulators and takes steps of 1 KiB, one after the other. The 16 stripes of a step are added at once, since addition commutes.
Thousands of layer blocks are hashed at the same time. XXH3 has other rules for inputs of up to 240 bytes: the host hashes these.

This module imports Triton. It is imported only if there is a CUDA device (or Triton's interpreter).
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803, PIE808
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
import xxhash

from kvclient.device.copy_strategies import uploaded
from kvclient.device.layouts import PagedCache, PageShape
from kvclient.device.page_scatter import TorchScatter
from kvclient.device.streams import Device, Event
from kvstore.core.errors import Internal

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee035"
    "90e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04b"
    "cdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad0"
    "31ce45cb3a8f95160428afd7fbcabb4b407e"
)
_START = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip
_P32_1 = tl.constexpr(0x9E3779B1)
_P64_1 = tl.constexpr(0x9E3779B185EBCA87)
_MIX_3 = tl.constexpr(0x165667919E3779F9)
LEAST_BYTES = 241
"""Shortest input of the kernel."""

# words of the table: the secret in order, then its unaligned words, then the accumulators of the start
_LAST = tl.constexpr(24)
_MERGE = tl.constexpr(32)
_FIRST = tl.constexpr(40)


def _table() -> list[int]:
    offsets = [8 * word for word in range(24)]
    offsets += [121 + 8 * word for word in range(8)]
    offsets += [11 + 8 * word for word in range(8)]
    words = [struct.unpack_from("<Q", _SECRET, offset)[0] for offset in offsets]
    return [word - (1 << 64) if word >> 63 else word for word in (*words, *_START)]


@triton.jit
def _read64(
    offset,
    at,
    block,
    page_ids,
    page_stride,
    part_stride,
    PART_BYTES: tl.constexpr,
    PARTS: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Eight bytes of a layer block, little-endian. WIDE: they are aligned, and in one part of a page."""
    value = (offset * 0).to(tl.uint64)
    for byte in tl.static_range(0, 1 if WIDE else 8):
        number = (offset + byte) // PART_BYTES
        page = tl.load(page_ids + block * PAGES_PER_BLOCK + number // PARTS)
        place = at + page * page_stride + (number % PARTS) * part_stride + (offset + byte) % PART_BYTES
        if WIDE:
            value = tl.load(place.to(tl.pointer_type(tl.int64))).to(tl.uint64, bitcast=True)
        else:
            value |= tl.load(place.to(tl.pointer_type(tl.uint8))).to(tl.uint64) << (8 * byte)
    return value


@triton.jit
def _key(table, number):
    return tl.load(table + number).to(tl.uint64, bitcast=True)


@triton.jit
def _folded(a, b):
    return (a * b) ^ tl.umulhi(a, b)


@triton.jit
def _avalanche(h):
    h = (h ^ (h >> 37)) * _MIX_3
    return h ^ (h >> 32)


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _swapped(lanes):
    even, odd = tl.split(tl.reshape(lanes, (4, 2)))
    return tl.reshape(tl.join(odd, even), (8,))


@triton.jit(
    do_not_specialize=["first_layer", "layers"],
    do_not_specialize_on_alignment=["layers_at", "page_ids", "table", "out"],
)
def hash_rows(
    layers_at,  # pointer: int64 address, page stride and part stride of each layer, in bytes
    page_ids,  # pointer: int64
    first_layer,
    layers,  # how many layers
    table,  # pointer: int64 words of the secret; see the module
    out,  # pointer: int64 [blocks, layers]
    LENGTH: tl.constexpr,  # bytes of a layer block
    PART_BYTES: tl.constexpr,
    PARTS: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Hash one layer block per program."""
    block = (tl.program_id(0) // layers).to(tl.int64)
    layer_at = layers_at + (first_layer + tl.program_id(0) % layers) * 3
    at = tl.load(layer_at)
    page_stride = tl.load(layer_at + 1)
    part_stride = tl.load(layer_at + 2)
    steps: tl.constexpr = (LENGTH - 1) // 1024
    rest: tl.constexpr = (LENGTH - 1 - steps * 1024) // 64
    lane = tl.arange(0, 8)
    stripe = tl.arange(0, 16)
    within = stripe[:, None] * 64 + lane[None, :] * 8
    keys = _key(table, stripe[:, None] + lane[None, :])
    last_keys = _key(table, 16 + lane)
    lanes = _key(table, _FIRST + lane)
    for step in range(0, steps):
        offset = within + step * 1024
        data = _read64(offset, at, block, page_ids, page_stride, part_stride, PART_BYTES, PARTS, PAGES_PER_BLOCK, WIDE)
        mixed = data ^ keys
        lanes += _swapped(tl.reduce(data, 0, _plus)) + tl.reduce((mixed & 0xFFFFFFFF) * (mixed >> 32), 0, _plus)
        lanes = ((lanes ^ (lanes >> 47)) ^ last_keys) * _P32_1
    if rest > 0:
        there = stripe[:, None] < rest
        offset = steps * 1024 + tl.where(there, within, 0)
        data = _read64(offset, at, block, page_ids, page_stride, part_stride, PART_BYTES, PARTS, PAGES_PER_BLOCK, WIDE)
        data = tl.where(there, data, 0)
        mixed = tl.where(there, data ^ keys, 0)
        lanes += _swapped(tl.reduce(data, 0, _plus)) + tl.reduce((mixed & 0xFFFFFFFF) * (mixed >> 32), 0, _plus)
    offset = LENGTH - 64 + lane * 8
    data = _read64(offset, at, block, page_ids, page_stride, part_stride, PART_BYTES, PARTS, PAGES_PER_BLOCK, WIDE)
    mixed = data ^ _key(table, _LAST + lane)
    lanes += _swapped(data) + (mixed & 0xFFFFFFFF) * (mixed >> 32)
    even, odd = tl.split(tl.reshape(lanes ^ _key(table, _MERGE + lane), (4, 2)))
    h = _avalanche(tl.reduce(_folded(even, odd), 0, _plus) + (LENGTH * _P64_1) % 0x10000000000000000)
    tl.store(out + tl.program_id(0), h.to(tl.int64, bitcast=True))


class TritonChecksums:
    """Checksums of layer blocks, computed on the device of a cache. Only enqueues, on the current stream.

    Args:
        cache: the pages.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._layers = cache.layer_table()
        self._table = torch.tensor(_table(), dtype=torch.int64, device=cache.device)

    def of_pages(self, first_layer: int, layers: int, page_ids: torch.Tensor) -> torch.Tensor:
        """Hash layer blocks in pages.

        Args:
            first_layer: of the cache.
            layers: number of layers.
            page_ids: int64 ``[blocks * pages_per_block]``, on the device.

        Returns:
            int64 ``[blocks, layers]``, on the device: the bits of the checksums.
        """
        cache = self._cache
        return self._launch(self._layers, first_layer, layers, page_ids, cache.page, cache.pages_per_block, wide=cache.word == 8)

    def of_memory(self, memory: torch.Tensor, offsets: torch.Tensor, layers: int, length: int, *, wide: bool) -> torch.Tensor:
        """Hash contiguous blocks in device memory.

        Args:
            memory: uint8 ``[bytes]``.
            offsets: int64 ``[blocks]`` on the device: offset of each block, in bytes.
            layers: layers of a block.
            length: bytes of a layer block.
            wide: whether all offsets, ``length`` and the address of the memory are multiples of 8.

        Returns:
            int64 ``[blocks, layers]``, on the device: the bits of the checksums.
        """
        # each offset is the id of a page of one part, with a page stride of one byte
        places = [(memory.data_ptr() + layer * length, 1, 0) for layer in range(layers)]
        table = uploaded(torch.tensor(places, dtype=torch.int64).view(-1, 3), self._cache.device)
        return self._launch(table, 0, layers, offsets, PageShape(1, length), 1, wide=wide)

    def _launch(
        self,
        layers_at: torch.Tensor,
        first_layer: int,
        layers: int,
        page_ids: torch.Tensor,
        page: PageShape,
        pages_per_block: int,
        *,
        wide: bool,
    ) -> torch.Tensor:
        length = page.nbytes * pages_per_block
        assert length >= LEAST_BYTES, "the host hashes short layer blocks"
        out = torch.empty((len(page_ids) // pages_per_block, layers), dtype=torch.int64, device=page_ids.device)
        if out.numel():
            hash_rows[(out.numel(),)](
                layers_at, page_ids, first_layer, layers, self._table, out,
                LENGTH=length, PART_BYTES=page.part_bytes, PARTS=page.parts, PAGES_PER_BLOCK=pages_per_block, WIDE=wide,
                num_warps=1,
            )  # fmt: skip
        return out


class PageHasher:
    """Checksums of pages on their own stream. Only enqueues. Not thread-safe.

    Args:
        device: device of the cache.
        cache: the pages, with layer blocks of at least ``LEAST_BYTES``.

    Raises:
        Internal: Triton or the device failed, or the kernel returns another checksum than this host.
    """

    def __init__(self, device: Device, cache: PagedCache) -> None:
        self._cache = cache
        self._kernel = TritonChecksums(cache)
        self._stream = device.stream()
        device.run(self._try_out)

    def _try_out(self) -> None:
        """Compare the checksums of the first block, in its pages and in other memory. Any content will do."""
        cache, length = self._cache, self._cache.row_bytes
        ids = torch.arange(cache.pages_per_block, device=cache.device)
        row = torch.empty((1, 1, length), dtype=torch.uint8, device=cache.device)
        TorchScatter(cache).to_rows(0, ids, row)
        first = torch.zeros(1, dtype=torch.int64, device=cache.device)
        sums = [self._kernel.of_pages(0, 1, ids), self._kernel.of_memory(row.view(-1), first, 1, length, wide=not length % 8)]
        expected = xxhash.xxh3_64_intdigest(row.cpu().numpy().tobytes())
        if any(int(found.cpu().numpy().view(np.uint64)[0, 0]) != expected for found in sums):
            raise Internal("the kernel returns wrong checksums", device=cache.device)

    def begin(
        self, page_ids: torch.Tensor, first_layer: int, layers: int, after: Sequence[Event], wait: Callable[[Event], None]
    ) -> PendingChecksums:
        """Begin to hash layer blocks in pages.

        Args:
            page_ids: int64, on the host.
            first_layer: of the cache.
            layers: number of layers.
            after: events after which the pages have their content.
            wait: waits for an event, for a bounded time.

        Raises:
            Internal: the device failed.
        """
        return self._begin(
            lambda: self._kernel.of_pages(first_layer, layers, uploaded(page_ids, self._cache.device)), after, wait
        )

    def begin_memory(
        self, memory: torch.Tensor, offsets: npt.NDArray[np.int64], layers: int, wait: Callable[[Event], None]
    ) -> PendingChecksums:
        """Begin to hash the layer blocks of contiguous blocks in device memory. Their bytes must be there already.

        Args:
            memory: uint8 ``[bytes]``.
            offsets: offset of each block, in bytes.
            layers: layers of a block.
            wait: as for ``begin``.

        Raises:
            Internal: the device failed.
        """
        length = self._cache.row_bytes
        wide = not (memory.data_ptr() | length | int(np.bitwise_or.reduce(offsets))) % 8

        def work() -> torch.Tensor:
            there = uploaded(torch.from_numpy(offsets), self._cache.device)
            return self._kernel.of_memory(memory, there, layers, length, wide=wide)

        return self._begin(work, (), wait)

    def _begin(
        self, hash_blocks: Callable[[], torch.Tensor], after: Sequence[Event], wait: Callable[[Event], None]
    ) -> PendingChecksums:
        found: list[torch.Tensor] = []
        cuda = self._cache.device.type == "cuda"

        def work() -> None:
            sums = hash_blocks()
            host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=cuda)
            found.extend((host.copy_(sums, non_blocking=True), sums))

        for event in after:
            self._stream.wait(event)
        self._stream.run(work)
        return PendingChecksums(found, self._stream.record(), wait)

    def record(self) -> list[Event]:
        """Events after all enqueued work."""
        return [self._stream.record()]


class PendingChecksums:
    """Checksums that the device computes; see ``kvclient.memory.device_buffer.DeviceChecksums``.

    Args:
        found: holds the checksums on the host once the event is done; keeps the memory of the device until then.
        event: after the computation.
        wait: waits for the event.
    """

    def __init__(self, found: list[torch.Tensor], event: Event, wait: Callable[[Event], None]) -> None:
        self._found = found
        self.event = event
        self._wait = wait

    def result(self) -> npt.NDArray[np.uint64]:
        """Wait for the checksums, ``[blocks, layers]``.

        Raises:
            Internal: the device failed or hung.
        """
        try:
            self._wait(self.event)
        except Internal:
            _hung.append(self._found)  # the device may still write to this memory
            raise
        return self._found[0].numpy().view(np.uint64)


_hung: list[list[torch.Tensor]] = []
