"""Quantisation of a 16-bit cache to 8-bit integers in the store: 56 % of the bytes in every tier and on every network.

Off by default, because it changes the model's output. A layer block then consists of

    codes       int8, in the order of the row: -127 to 127
    scales      one per group of elements, in the cache's dtype: the largest magnitude in the group
    padding     zeros, up to a multiple of 16 bytes

An element is ``code / 127`` of its group's largest element. So the largest elements, which decide what a query attends to,
are stored exactly. A group should hold one channel of the keys over several tokens (``ScaleGroups``), since channels differ in
size by orders of magnitude and tokens do not.

Encoding decoded pages again yields the same bytes: the largest element has not changed, and rounding to 16 bits moves no other
element by half a step (at most 127 / 256 of it). A NaN or an infinity makes its whole group NaN. A group whose elements are all
below ``LEAST`` becomes zeros, because some devices flush numbers of this size to zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvclient import InvalidArgument
from kvclient.device.layouts import PagedCache

LEAST = 2.0**-119
"""A group below it is stored as zeros. The steps of other groups are normal float32 numbers."""
SOURCES = (torch.bfloat16, torch.float16)
LEAST_GROUP = 8
"""Fewest elements of a group. Groups of 8, for small pages, take 63 % of the bytes."""
MOST_GROUP = 16
"""Most elements of a group. Groups of 32 would save 3 % of the bytes and increase errors by a tenth to a third."""
_LARGEST = 127.0
_MAGNITUDE = 0x7FFF
"""The bits of a 16-bit float without its sign: as integers they are in the order of the magnitudes, infinity and NaN last."""
_SCALE_BYTES = 2
_ALIGN = 16


@dataclass(frozen=True, slots=True)
class ScaleGroups:
    """Groups of elements that share a scale: ``size`` elements of a page, in memory ``stride`` elements apart.

    Attributes:
        size: elements of a group.
        stride: distance between two of them, in elements.

    Raises:
        InvalidArgument: a group of fewer than ``LEAST_GROUP`` elements.
    """

    size: int
    stride: int

    def __post_init__(self) -> None:
        if self.size < LEAST_GROUP or self.stride < 1:
            raise InvalidArgument(
                f"int8 requires at least {LEAST_GROUP} elements per scale: use larger pages", size=self.size, stride=self.stride
            )

    @classmethod
    def along(cls, shape: Sequence[int], order: Sequence[int], axis: int) -> ScaleGroups:
        """Return groups along one axis of a page, such as its tokens.

        Args:
            shape: axes of a page.
            order: these axes by their order in memory, outermost first.
            axis: the axis.

        Raises:
            InvalidArgument: the length of the axis is not a multiple of ``LEAST_GROUP``.
        """
        inner = order[list(order).index(axis) + 1 :]
        return cls(math.gcd(shape[axis], MOST_GROUP), math.prod(shape[other] for other in inner))


class Int8Codec:
    """int8 encoding of rows; see the module. Implements ``copy_strategies.Codec``.

    Args:
        cache: the cache whose rows are encoded; bfloat16 or float16.
        groups: elements that share a scale.

    Raises:
        InvalidArgument: a cache of another dtype, or groups that do not divide its pages.
    """

    dtype_name = "int8"

    def __init__(self, cache: PagedCache, groups: ScaleGroups) -> None:
        if cache.dtype not in SOURCES:
            raise InvalidArgument("int8 requires a cache of 16-bit floats", dtype=cache.dtype_name)
        if cache.page.part_bytes // 2 % (groups.size * groups.stride):
            raise InvalidArgument(
                "the groups of int8 scales do not divide a page", size=groups.size, stride=groups.stride, page=cache.name
            )
        self.name = f"int8-{cache.dtype_name}-{groups.size}x{groups.stride}"
        self._dtype = cache.dtype
        least, self._infinity, self._nan = (
            int(torch.tensor(number, dtype=cache.dtype).view(torch.int16)) for number in (LEAST, torch.inf, torch.nan)
        )
        """As bits. NaN is the scale of a group that holds a NaN or an infinity."""
        self._least = max(1, least)
        self._shape = (-1, groups.size, groups.stride)
        self._row_bytes = cache.row_bytes
        self._elements = cache.row_bytes // 2
        self._scales_end = self._elements + self._elements // groups.size * _SCALE_BYTES
        self._coded_bytes = -(-self._scales_end // _ALIGN) * _ALIGN

    def coded_bytes(self, row_bytes: int) -> int:
        """Bytes of a layer block."""
        assert row_bytes == self._row_bytes
        return self._coded_bytes

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode rows, uint8 ``[blocks, row_bytes]``, as layer blocks: uint8 ``[blocks, coded_bytes]``."""
        values = rows.view(self._dtype).view(len(rows), *self._shape)
        bits = (values.view(torch.int16) & _MAGNITUDE).amax(2)
        small, infinite = bits < self._least, bits >= self._infinity
        largest = bits.view(self._dtype).to(torch.float32)
        # with tensors, as a device may divide by a number by multiplying with its rounded reciprocal
        factors = torch.full_like(largest, _LARGEST).div_(largest).masked_fill_(small | infinite, 0.0)
        codes = values.to(torch.float32).mul_(factors.unsqueeze(2)).round_().nan_to_num_(0.0)
        bits.masked_fill_(small, 0).masked_fill_(infinite, self._nan)
        coded = torch.zeros((len(rows), self._coded_bytes), dtype=torch.uint8, device=rows.device)
        coded[:, : self._elements] = codes.to(torch.int8).view(len(rows), -1).view(torch.uint8)
        coded[:, self._elements : self._scales_end] = bits.view(len(rows), -1).view(torch.uint8)
        return coded

    def decode(self, coded: torch.Tensor) -> torch.Tensor:
        """Decode layer blocks to rows."""
        codes = coded[:, : self._elements].view(torch.int8).to(torch.float32, memory_format=torch.contiguous_format)
        # cloned: the scales of a single block count as contiguous, but their address need not be a multiple of 2
        scales = coded[:, self._elements : self._scales_end].clone(memory_format=torch.contiguous_format).view(self._dtype)
        steps = scales.to(torch.float32).mul_(1 / _LARGEST).view(len(coded), -1, 1, self._shape[2])
        values = codes.view(len(coded), *self._shape).mul_(steps)
        return values.to(self._dtype).view(len(coded), -1).view(torch.uint8)
