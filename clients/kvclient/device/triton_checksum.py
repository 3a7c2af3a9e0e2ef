"""Checksums of layer blocks on the device: xxh3-64 (seed 0) of pages, or of blocks at any offsets of device memory.

Written after the published description of XXH3, like the native kernel of hosts. A program hashes one layer block. Inputs of more
than 240 bytes have eight accumulators and take steps of 1 KiB, one after the other; the 16 stripes of a step are added at once, since
addition commutes. Thousands of layer blocks are hashed at the same time.

This module imports Triton. It is imported only if there is a CUDA device (or Triton's interpreter).
"""
# ruff: noqa: ANN001, ANN201, ANN202, E501, N803, PIE808
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
import xxhash

from kvclient.device.copy_strategies import uploaded
from kvclient.device.layouts import PagedCache
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
_P64_2 = tl.constexpr(0xC2B2AE3D27D4EB4F)
_P64_3 = tl.constexpr(0x165667B19E3779F9)
_MIX_3 = tl.constexpr(0x165667919E3779F9)
_MIX_8 = tl.constexpr(0x9FB21C651E98DF25)

# words of the table: the secret in order, then its unaligned words, then the accumulators of the start
_LAST = tl.constexpr(24)
_MERGE = tl.constexpr(32)
_MIDDLE = tl.constexpr(40)
_END = tl.constexpr(54)
_FIRST = tl.constexpr(56)


def _table() -> list[int]:
    offsets = [8 * word for word in range(24)]
    offsets += [121 + 8 * word for word in range(8)]
    offsets += [11 + 8 * word for word in range(8)]
    offsets += [3 + 8 * word for word in range(14)]
    offsets += [119, 127]
    words = [struct.unpack_from("<Q", _SECRET, offset)[0] for offset in offsets]
    return [word - (1 << 64) if word >> 63 else word for word in (*words, *_START)]


@triton.jit
def _address(
    offset,
    at,
    block,
    page_ids,
    page_stride,
    part_stride,
    PAGED: tl.constexpr,
    PART_BYTES: tl.constexpr,
    PARTS: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
):
    """Address of a byte of a layer block."""
    if PAGED:
        number = offset // PART_BYTES
        page = tl.load(page_ids + block * PAGES_PER_BLOCK + number // PARTS)
        return at + page * page_stride + (number % PARTS) * part_stride + offset % PART_BYTES
    return at + offset


@triton.jit
def _read64(
    offset,
    at,
    block,
    page_ids,
    page_stride,
    part_stride,
    PAGED: tl.constexpr,
    PART_BYTES: tl.constexpr,
    PARTS: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Eight bytes of a layer block, little-endian. WIDE: they are aligned, and in one part of a page."""
    if WIDE:
        place = _address(offset, at, block, page_ids, page_stride, part_stride, PAGED, PART_BYTES, PARTS, PAGES_PER_BLOCK)
        return tl.load(place.to(tl.pointer_type(tl.int64))).to(tl.uint64, bitcast=True)
    place = _address(offset, at, block, page_ids, page_stride, part_stride, PAGED, PART_BYTES, PARTS, PAGES_PER_BLOCK)
    value = tl.load(place.to(tl.pointer_type(tl.uint8))).to(tl.uint64)
    for byte in tl.static_range(1, 8):
        place = _address(offset + byte, at, block, page_ids, page_stride, part_stride, PAGED, PART_BYTES, PARTS, PAGES_PER_BLOCK)
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
def _avalanche_short(h):
    h = (h ^ (h >> 33)) * _P64_2
    h = (h ^ (h >> 29)) * _P64_3
    return h ^ (h >> 32)


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _swapped(lanes):
    even, odd = tl.split(tl.reshape(lanes, (4, 2)))
    return tl.reshape(tl.join(odd, even), (8,))


@triton.jit(
    do_not_specialize=["rows_at", "first_layer", "layers", "row_bytes"],
    do_not_specialize_on_alignment=["offsets", "page_ids", "layers_at", "table", "out"],
)
def hash_rows(
    rows_at,  # without PAGED: origin of the offsets
    offsets,  # pointer, without PAGED: int64 offset of the first layer of each block, in bytes
    row_bytes,  # without PAGED: bytes from layer to layer
    layers_at,  # pointer, with PAGED: int64 address, page stride and part stride of each layer, in bytes
    page_ids,  # pointer, with PAGED: int64
    first_layer,
    layers,  # how many layers
    table,  # pointer: int64 words of the secret; see the module
    out,  # pointer: int64 [blocks, layers]
    LENGTH: tl.constexpr,  # bytes of a layer block
    PAGED: tl.constexpr,
    PART_BYTES: tl.constexpr,
    PARTS: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Hash one layer block per program."""
    block = (tl.program_id(0) // layers).to(tl.int64)
    layer = tl.program_id(0) % layers
    if PAGED:
        layer_at = layers_at + (first_layer + layer) * 3
        at = tl.load(layer_at)
        page_stride = tl.load(layer_at + 1)
        part_stride = tl.load(layer_at + 2)
    else:
        at = rows_at + tl.load(offsets + block) + layer.to(tl.int64) * row_bytes
        page_stride = at
        part_stride = at
    zero = block * 0
    if LENGTH == 0:
        h = _avalanche_short(_key(table, 7) ^ _key(table, 8))
    elif LENGTH <= 3:
        first = tl.load(
            _address(zero, at, block, page_ids, page_stride, part_stride, PAGED, PART_BYTES, PARTS, PAGES_PER_BLOCK).to(
                tl.pointer_type(tl.uint8)
            )
        ).to(tl.uint64)
        middle = tl.load(
            _address(
                zero + LENGTH // 2, at, block, page_ids, page_stride, part_stride, PAGED, PART_BYTES, PARTS, PAGES_PER_BLOCK
            ).to(tl.pointer_type(tl.uint8))
        ).to(tl.uint64)
        last = tl.load(
            _address(
                zero + LENGTH - 1, at, block, page_ids, page_stride, part_stride, PAGED, PART_BYTES, PARTS, PAGES_PER_BLOCK
            ).to(tl.pointer_type(tl.uint8))
        ).to(tl.uint64)
        key = _key(table, 0)
        h = _avalanche_short(((first << 16) | (middle << 24) | last | (LENGTH << 8)) ^ ((key & 0xFFFFFFFF) ^ (key >> 32)))
    elif LENGTH <= 8:
        low = zero.to(tl.uint64)
        high = zero.to(tl.uint64)
        for byte in tl.static_range(4):
            low |= tl.load(
                _address(
                    zero + byte, at, block, page_ids, page_stride, part_stride, PAGED, PART_BYTES, PARTS, PAGES_PER_BLOCK
                ).to(tl.pointer_type(tl.uint8))
            ).to(tl.uint64) << (8 * byte)
            high |= tl.load(
                _address(
                    zero + (LENGTH - 4 + byte),
                    at,
                    block,
                    page_ids,
                    page_stride,
                    part_stride,
                    PAGED,
                    PART_BYTES,
                    PARTS,
                    PAGES_PER_BLOCK,
                ).to(tl.pointer_type(tl.uint8))
            ).to(tl.uint64) << (8 * byte)
        h = (high + (low << 32)) ^ (_key(table, 1) ^ _key(table, 2))
        h ^= ((h << 49) | (h >> 15)) ^ ((h << 24) | (h >> 40))
        h *= _MIX_8
        h ^= (h >> 35) + LENGTH
        h *= _MIX_8
        h = h ^ (h >> 28)
    elif LENGTH <= 16:
        low = _read64(zero, at, block, page_ids, page_stride, part_stride, PAGED, PART_BYTES, PARTS, PAGES_PER_BLOCK, WIDE) ^ (
            _key(table, 3) ^ _key(table, 4)
        )
        high = _read64(
            zero + (LENGTH - 8), at, block, page_ids, page_stride, part_stride, PAGED, PART_BYTES, PARTS, PAGES_PER_BLOCK, WIDE
        ) ^ (_key(table, 5) ^ _key(table, 6))
        turned = zero.to(tl.uint64)
        for byte in tl.static_range(8):
            turned |= ((low >> (8 * byte)) & 0xFF) << (56 - 8 * byte)
        h = _avalanche(turned + high + _folded(low, high) + LENGTH)
    elif LENGTH <= 240:
        h = zero.to(tl.uint64) + (LENGTH * _P64_1) % 0x10000000000000000
        rounds: tl.constexpr = ((LENGTH - 1) // 32 + 1) * 2 if LENGTH <= 128 else LENGTH // 16
        for number in tl.static_range(rounds):
            if LENGTH <= 128:  # from both ends
                offset = 16 * (number // 2) if number % 2 == 0 else LENGTH - 16 * (number // 2 + 1)
                key = 2 * number
            else:
                offset = 16 * number
                key = 2 * number if number < 8 else _MIDDLE + 2 * (number - 8)
            one = _read64(
                zero + offset, at, block, page_ids, page_stride, part_stride, PAGED, PART_BYTES, PARTS, PAGES_PER_BLOCK, WIDE
            )
            other = _read64(
                zero + (offset + 8),
                at,
                block,
                page_ids,
                page_stride,
                part_stride,
                PAGED,
                PART_BYTES,
                PARTS,
                PAGES_PER_BLOCK,
                WIDE,
            )
            h += _folded(one ^ _key(table, key), other ^ _key(table, key + 1))
            if LENGTH > 128 and number == 7:
                h = _avalanche(h)
        if LENGTH > 128:
            one = _read64(
                zero + (LENGTH - 16),
                at,
                block,
                page_ids,
                page_stride,
                part_stride,
                PAGED,
                PART_BYTES,
                PARTS,
                PAGES_PER_BLOCK,
                WIDE,
            )
            other = _read64(
                zero + (LENGTH - 8),
                at,
                block,
                page_ids,
                page_stride,
                part_stride,
                PAGED,
                PART_BYTES,
                PARTS,
                PAGES_PER_BLOCK,
                WIDE,
            )
            h += _folded(one ^ _key(table, _END), other ^ _key(table, _END + 1))
        h = _avalanche(h)
    else:
        steps: tl.constexpr = (LENGTH - 1) // 1024
        rest: tl.constexpr = (LENGTH - 1 - steps * 1024) // 64
        lane = tl.arange(0, 8)
        stripe = tl.arange(0, 16)
        within = stripe[:, None] * 64 + lane[None, :] * 8
        keys = _key(table, stripe[:, None] + lane[None, :])
        last_keys = _key(table, 16 + lane)
        lanes = _key(table, _FIRST + lane)
        for step in range(0, steps):
            data = _read64(
                within + step * 1024,
                at,
                block,
                page_ids,
                page_stride,
                part_stride,
                PAGED,
                PART_BYTES,
                PARTS,
                PAGES_PER_BLOCK,
                WIDE,
            )
            mixed = data ^ keys
            lanes += _swapped(tl.reduce(data, 0, _plus)) + tl.reduce((mixed & 0xFFFFFFFF) * (mixed >> 32), 0, _plus)
            lanes = ((lanes ^ (lanes >> 47)) ^ last_keys) * _P32_1
        if rest > 0:
            there = stripe[:, None] < rest
            offset = steps * 1024 + tl.where(there, within, 0)
            data = _read64(offset, at, block, page_ids, page_stride, part_stride, PAGED, PART_BYTES, PARTS, PAGES_PER_BLOCK, WIDE)
            data = tl.where(there, data, 0)
            mixed = tl.where(there, data ^ keys, 0)
            lanes += _swapped(tl.reduce(data, 0, _plus)) + tl.reduce((mixed & 0xFFFFFFFF) * (mixed >> 32), 0, _plus)
        data = _read64(
            LENGTH - 64 + lane * 8, at, block, page_ids, page_stride, part_stride, PAGED, PART_BYTES, PARTS, PAGES_PER_BLOCK, WIDE
        )
        mixed = data ^ _key(table, _LAST + lane)
        lanes += _swapped(data) + (mixed & 0xFFFFFFFF) * (mixed >> 32)
        even, odd = tl.split(tl.reshape(lanes ^ _key(table, _MERGE + lane), (4, 2)))
        h = _avalanche(tl.reduce(_folded(even, odd), 0, _plus) + (LENGTH * _P64_1) % 0x10000000000000000)
    tl.store(out + tl.program_id(0), h.to(tl.int64, bitcast=True))


class TritonChecksums:
    """Checksums of the layer blocks of a cache, computed on its device. Only enqueues, on the current stream.

    Args:
        cache: the pages.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        places = [(layer.address, layer.page_stride, layer.part_stride) for layer in cache.layers]
        self._layers = torch.tensor(places, dtype=torch.int64, device=cache.device)
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
        cache, page = self._cache, self._cache.page
        blocks = len(page_ids) // cache.pages_per_block
        out = torch.empty((blocks, layers), dtype=torch.int64, device=page_ids.device)
        if out.numel():
            hash_rows[(out.numel(),)](
                0, page_ids, 0, self._layers, page_ids, first_layer, layers, self._table, out,
                LENGTH=cache.row_bytes, PAGED=True, PART_BYTES=page.part_bytes, PARTS=page.parts,
                PAGES_PER_BLOCK=cache.pages_per_block, WIDE=cache.word == 8, num_warps=1,
            )  # fmt: skip
        return out

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
        out = torch.empty((len(offsets), layers), dtype=torch.int64, device=offsets.device)
        if out.numel():
            hash_rows[(out.numel(),)](
                memory.data_ptr(), offsets, length, self._layers, offsets, 0, layers, self._table, out,
                LENGTH=length, PAGED=False, PART_BYTES=1, PARTS=1, PAGES_PER_BLOCK=1, WIDE=wide, num_warps=1,
            )  # fmt: skip
        return out


class PageHasher:
    """Checksums of pages on their own stream. Thread-safe.

    Args:
        device: device of the cache.
        cache: the pages.

    Raises:
        Internal: Triton or the device failed, or the kernel returns another checksum than this host.
    """

    def __init__(self, device: Device, cache: PagedCache) -> None:
        self._cache = cache
        self._kernel = TritonChecksums(cache)
        self._stream = device.stream()
        self._lock = threading.Lock()
        device.run(self._try_out)

    def _try_out(self) -> None:
        """Compare the checksum of the first block's pages, whatever they contain."""
        cache = self._cache
        ids = torch.arange(cache.pages_per_block, device=cache.device)
        row = torch.empty((1, 1, cache.row_bytes), dtype=torch.uint8, device=cache.device)
        TorchScatter(cache).to_rows(0, ids, row)
        found = int(self._kernel.of_pages(0, 1, ids).cpu().numpy().view(np.uint64)[0, 0])
        if found != xxhash.xxh3_64_intdigest(row.cpu().numpy().tobytes()):
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

        with self._lock:
            for event in after:
                self._stream.wait(event)
            self._stream.run(work)
            return PendingChecksums(found, self._stream.record(), wait)


class PendingChecksums:
    """Checksums that the device computes; see ``kvclient.memory.device_buffer.Checksums``.

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
