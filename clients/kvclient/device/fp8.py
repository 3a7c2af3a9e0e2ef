"""Quantisation of a 16-bit cache to 8-bit floats on its way into the store: half the bytes in every tier and on every wire.

Off unless asked for, for it changes what a model answers: an element by a sixteenth of it at worst (see ``error_bound``). A
Layer Block is then

    elements    float8 e4m3fn, in the order of the row
    scales      float32 little-endian, one a stretch (K and V of each page apart, where the layout tells them)
    padding     zeros, up to a multiple of 16 bytes

A stretch's scale is the least power of two at which its largest finite element rounds to 448, the largest float8, or below.
Powers of two cost no precision, since floats keep theirs at every size, and make decoding exact: what is loaded and stored again
does not change any more, neither the values nor the bytes in the store. NaN stays NaN, and an infinity becomes one, never a
number; there is one code of NaN, whatever its sign and bits were. A stretch of zeros has scale 1.
"""

from __future__ import annotations

import torch

from kvclient import InvalidArgument
from kvclient.device.layouts import PagedCache

CODED = torch.float8_e4m3fn
LARGEST = 448.0
ROUNDS_TO_LARGEST = 464.0
"""The largest number that is nearer to 448 than to the next step, which float8 does not have; or as near, and 448 is even."""
NAN = 0x7F
"""The code of every NaN. Converting keeps the sign, and what bits a NaN comes back with depends on the device."""
SOURCES = (torch.bfloat16, torch.float16)
_SCALE_BYTES = 4
_ALIGN = 16
_LEAST = 2.0**-126
"""The least normal float32: devices may take smaller ones for 0."""


class Fp8Codec:
    """See the module; ``ways.Codec``.

    Args:
        cache: whose rows are coded; bfloat16 or float16.

    Raises:
        InvalidArgument: a cache of another dtype.
    """

    name = "fp8-e4m3-pow2-2"
    dtype_name = "float8_e4m3fn"

    def __init__(self, cache: PagedCache) -> None:
        if cache.dtype not in SOURCES:
            raise InvalidArgument("only 16-bit floats are quantised to fp8", dtype=cache.dtype_name)
        self._dtype = cache.dtype
        self._stretches = cache.pages_per_block * cache.page.parts * cache.page.scales
        self._row_bytes = cache.row_bytes
        self._elements = cache.row_bytes // 2
        used = self._elements + self._stretches * _SCALE_BYTES
        self._coded_bytes = -(-used // _ALIGN) * _ALIGN

    def coded_bytes(self, row_bytes: int) -> int:
        """Bytes of a Layer Block."""
        assert row_bytes == self._row_bytes
        return self._coded_bytes

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows, uint8 ``[blocks, row_bytes]``, as Layer Blocks: uint8 ``[blocks, coded_bytes]``."""
        values = rows.view(self._dtype).view(len(rows), self._stretches, -1).to(torch.float32)
        largest = torch.where(torch.isfinite(values), values.abs(), 0.0).amax(2)
        # frexp is exact, which a logarithm is not: largest / 464 = mantissa * 2**exponent, mantissa in [1/2, 1). Held against 448
        # itself, what rounds down to it would have another scale when it is stored again
        mantissa, exponent = torch.frexp(largest / ROUNDS_TO_LARGEST)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)  # a power of two itself
        scales = torch.ldexp(torch.ones_like(largest), exponent).clamp_(min=_LEAST)
        scales = torch.where(largest > 0, scales, 1.0)
        scaled = (values / scales.unsqueeze(2)).clamp_(-LARGEST, LARGEST)
        elements = scaled.to(CODED).view(torch.uint8).masked_fill_(~torch.isfinite(values), NAN)
        coded = torch.zeros((len(rows), self._coded_bytes), dtype=torch.uint8, device=rows.device)
        coded[:, : self._elements] = elements.view(len(rows), -1)
        coded[:, self._elements : self._scales_end] = scales.contiguous().view(torch.uint8)
        return coded

    def decode(self, coded: torch.Tensor) -> torch.Tensor:
        """Layer Blocks as rows again."""
        elements = coded[:, : self._elements].contiguous().view(CODED).view(len(coded), self._stretches, -1)
        # cloned: of one block it would be taken as contiguous, where it lies, which need not be at a multiple of 4
        scales = coded[:, self._elements : self._scales_end].clone(memory_format=torch.contiguous_format).view(torch.float32)
        most = torch.finfo(self._dtype).max  # rounding up from there must not make an infinity
        values = (elements.to(torch.float32) * scales.unsqueeze(2)).clamp(-most, most)
        return values.to(self._dtype).view(len(coded), -1).view(torch.uint8)

    @property
    def _scales_end(self) -> int:
        return self._elements + self._stretches * _SCALE_BYTES


def error_bound(values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """The most that decoding may differ from finite values: half a step of a float8 with three bits behind the point.

    Args:
        values: float32.
        largest: the largest finite magnitude of each value's stretch, broadcastable.
    """
    scale = torch.clamp(2 * largest / LARGEST, min=_LEAST)  # never more than twice what would be needed
    return torch.maximum(values.abs() * 2.0**-4, scale * 2.0**-10)
