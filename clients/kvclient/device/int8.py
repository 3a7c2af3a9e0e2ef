"""Quantisation of a 16-bit cache to 8-bit integers in the store: 58 % of the bytes in every tier and on every network.

Off by default, because it changes the model's output. A layer block then consists of

    key codes     uint8, 0 to 255, in the order of the keys in the row
    value codes   int8, -127 to 127, in the order of the values in the row
    lows, highs   of each group of keys: its smallest elements, then its largest, in the cache's dtype
    scales        of each group of values: its largest magnitude, in the cache's dtype
    padding       zeros, up to a multiple of 16 bytes

A key is ``low + code / 255 * (high - low)`` of its group, and a value ``code / 127 * scale``. So the extreme elements, which
decide what a query attends to, are stored exactly. A group of keys should hold one channel over several tokens: channels differ
in size by orders of magnitude, and many stay far from zero, where the difference of two tokens is small. A group of values
should hold channels of one token: models attend strongly to a first token whose values are small.

Encoding decoded pages again yields the same bytes: the extreme elements have not changed, and rounding to 16 bits moves no other
element by half a step. A NaN or an infinity makes its whole group NaN. A group whose elements are all below ``LEAST`` becomes
zeros, because some devices flush numbers of this size to zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import hardshrink

from kvclient import InvalidArgument
from kvclient.device.layouts import PagedCache

LEAST = 2.0**-100
"""A group below it is stored as zeros. The steps of other groups are normal float32 numbers."""
_LEAST_EDGE = 2.0**-120
"""The smallest or largest key of a group is stored as zero below it: half of it would not be a normal float32 number."""
_LEAST_RANGE = 2.0**-115
"""Below half the range of any group of different keys."""
SOURCES = (torch.bfloat16, torch.float16)
LEAST_GROUP = 8
"""Fewest elements of a group. Keys in groups of 8, for small pages, take 64 % of the bytes."""
MOST_KEYS = 16
"""Most elements of a group of keys: tokens of a page."""
MOST_VALUES = 32
"""Most elements of a group of values: channels of a token. Groups of 16 would take 59 % of the bytes."""
_LAST_CODE = 255.0
_LARGEST = 127.0
_MAGNITUDE = 0x7FFF
"""The bits of a 16-bit float without its sign: as integers they are in the order of the magnitudes, infinity and NaN last."""
_ITEM_BYTES = 2
_ALIGN = 16


@dataclass(frozen=True, slots=True)
class ScaleGroups:
    """Elements of a page that are quantised together. A page alternates between runs of keys and runs of values.

    Attributes:
        run: elements of each run.
        keys: elements of a group of keys, and the distance between two of them, in elements of the keys alone.
        values: the same of the values.

    Raises:
        InvalidArgument: a group of fewer than ``LEAST_GROUP`` elements, or an impossible distance or run.
    """

    run: int
    keys: tuple[int, int]
    values: tuple[int, int]

    def __post_init__(self) -> None:
        for size, stride in (self.keys, self.values):
            if size < LEAST_GROUP or stride < 1 or self.run < 1:
                raise InvalidArgument(
                    f"int8 requires at least {LEAST_GROUP} elements per scale: use larger pages",
                    size=size, stride=stride, run=self.run,
                )  # fmt: skip

    @classmethod
    def along(cls, shape: Sequence[int], order: Sequence[int], tokens: int, *, run: int = 0) -> ScaleGroups:
        """Return groups along the tokens of the keys, and along the channels of the values.

        Args:
            shape: axes of the keys of a page, the last of which has the channels. The values have the same.
            order: these axes by their order in memory, outermost first.
            tokens: the axis of the tokens.
            run: see the class; 0: all keys of a page precede its values.

        Raises:
            InvalidArgument: the page has too few tokens or channels, or their number is not a multiple of ``LEAST_GROUP``.
        """
        channels = len(shape) - 1
        stride_of = {axis: math.prod(shape[other] for other in order[at + 1 :]) for at, axis in enumerate(order)}
        return cls(
            run or math.prod(shape),
            (math.gcd(shape[tokens], MOST_KEYS), stride_of[tokens]),
            (math.gcd(shape[channels], MOST_VALUES), stride_of[channels]),
        )


class Int8Codec:
    """int8 encoding of rows; see the module. Implements ``copy_strategies.Codec``.

    Args:
        cache: the cache whose rows are encoded; bfloat16 or float16.
        groups: elements that are quantised together.

    Raises:
        InvalidArgument: a cache of another dtype, or groups that do not divide its pages.
    """

    dtype_name = "int8"

    def __init__(self, cache: PagedCache, groups: ScaleGroups) -> None:
        if cache.dtype not in SOURCES:
            raise InvalidArgument("int8 requires a cache of 16-bit floats", dtype=cache.dtype_name)
        halves, rest = divmod(cache.page.nbytes // _ITEM_BYTES, 2)
        if rest or any(halves % count for count in (groups.run, math.prod(groups.keys), math.prod(groups.values))):
            raise InvalidArgument("the groups of int8 scales do not divide a page", groups=groups, page=cache.name)
        of_keys, of_values = ("x".join(map(str, group)) for group in (groups.keys, groups.values))
        self.name = f"int8-{cache.dtype_name}-{groups.run}-{of_keys}-{of_values}"
        self._dtype = cache.dtype
        least, self._infinity, self._nan = (
            int(torch.tensor(number, dtype=cache.dtype).view(torch.int16)) for number in (LEAST, torch.inf, torch.nan)
        )
        """As bits. NaN is the scale of a group that holds a NaN or an infinity."""
        self._least = max(1, least)
        self._row = (-1, 2, groups.run)
        self._keys, self._values = (-1, *groups.keys), (-1, *groups.values)
        self._row_bytes = cache.row_bytes
        half = cache.row_bytes // _ITEM_BYTES // 2
        extremes, scales = half // groups.keys[0] * _ITEM_BYTES, half // groups.values[0] * _ITEM_BYTES
        ends = [half, 2 * half, 2 * half + extremes, 2 * half + 2 * extremes, 2 * half + 2 * extremes + scales]
        self._parts = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        """Key codes, value codes, lows, highs and scales in a layer block."""
        self._coded_bytes = -(-ends[-1] // _ALIGN) * _ALIGN

    def coded_bytes(self, row_bytes: int) -> int:
        """Bytes of a layer block."""
        assert row_bytes == self._row_bytes
        return self._coded_bytes

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode rows, uint8 ``[blocks, row_bytes]``, as layer blocks: uint8 ``[blocks, coded_bytes]``."""
        runs = rows.view(self._dtype).view(len(rows), *self._row)
        key_codes, lows, highs = self._encode_keys(runs[:, :, 0].reshape(len(rows), *self._keys))
        value_codes, scales = self._encode_values(runs[:, :, 1].reshape(len(rows), *self._values))
        coded = torch.zeros((len(rows), self._coded_bytes), dtype=torch.uint8, device=rows.device)
        for part, content in zip(self._parts, (key_codes, value_codes, lows, highs, scales), strict=True):
            coded[:, part] = content.view(len(rows), -1).view(torch.uint8)
        return coded

    def decode(self, coded: torch.Tensor) -> torch.Tensor:
        """Decode layer blocks to rows."""
        # cloned: parts of a single block count as contiguous, but their address need not be a multiple of 2
        parts = [coded[:, part].clone(memory_format=torch.contiguous_format) for part in self._parts]
        key_codes, value_codes, lows, highs, scales = parts
        rows = torch.empty((len(coded), self._row_bytes), dtype=torch.uint8, device=coded.device)
        runs = rows.view(self._dtype).view(len(coded), *self._row)
        keys, values = runs[:, :, 0], runs[:, :, 1]
        keys.copy_(self._decode_keys(key_codes, lows.view(self._dtype), highs.view(self._dtype)).view(keys.shape))
        values.copy_(self._decode_values(value_codes.view(torch.int8), scales.view(self._dtype)).view(values.shape))
        return rows

    # Devices must compute the same bytes. So sums and products are separate operations, which no compiler fuses, and numbers to
    # divide by are tensors: a device may divide by a number by multiplying with its rounded reciprocal. Halves do not overflow.
    # On CPUs, ``where`` and ``masked_fill`` take longer than arithmetic.

    def _encode_keys(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Encode keys ``[blocks, groups, size, stride]`` as codes, lows and highs."""
        numbers = keys.to(torch.float32)
        low, high = torch.amin(numbers, 2), torch.amax(numbers, 2)
        kept = (torch.maximum(high, -low) >= LEAST).to(torch.float32)
        low, high = (hardshrink(edge.mul_(kept), _LEAST_EDGE) for edge in (low, high))  # no negative zeros, too
        half_low = low * 0.5
        half_range = high * 0.5 - half_low
        infinite = ~(half_range < torch.inf)
        factors = torch.full_like(low, _LAST_CODE).div_(half_range.clamp_min_(_LEAST_RANGE)).mul_(kept)
        codes = numbers.mul_(0.5).sub_(half_low.unsqueeze(2)).mul_(factors.unsqueeze(2)).round_().nan_to_num_(0.0)
        lows, highs = (edge.to(self._dtype).view(torch.int16).masked_fill_(infinite, self._nan) for edge in (low, high))
        return codes.to(torch.uint8), lows, highs

    def _decode_keys(self, codes: torch.Tensor, lows: torch.Tensor, highs: torch.Tensor) -> torch.Tensor:
        """Decode keys to ``[blocks, groups, size, stride]``, in float32."""
        low, high = (edges.to(torch.float32).view(len(codes), -1, 1, self._keys[2]) for edges in (lows, highs))
        parts = codes.to(torch.float32).view(len(codes), *self._keys).mul_(1 / _LAST_CODE)  # exactly 1 for the last code
        above = high * parts
        return parts.neg_().add_(1.0).mul_(low).add_(above)

    def _encode_values(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode values ``[blocks, groups, size, stride]`` as codes and scales."""
        bits = (values.view(torch.int16) & _MAGNITUDE).amax(2)
        small, infinite = bits < self._least, bits >= self._infinity
        largest = bits.view(self._dtype).to(torch.float32)
        factors = torch.full_like(largest, _LARGEST).div_(largest).masked_fill_(small | infinite, 0.0)
        codes = values.to(torch.float32).mul_(factors.unsqueeze(2)).round_().nan_to_num_(0.0)
        return codes.to(torch.int8), bits.masked_fill_(small, 0).masked_fill_(infinite, self._nan)

    def _decode_values(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Decode values to ``[blocks, groups, size, stride]``, in float32."""
        steps = scales.to(torch.float32).mul_(1 / _LARGEST).view(len(codes), -1, 1, self._values[2])
        return codes.to(torch.float32).view(len(codes), *self._values).mul_(steps)
