"""Quantisation of a 16-bit cache to 8-bit floats in the store: half the bytes in every tier and on every network.

Off by default, because it changes the model's output: an element by at most a sixteenth of its value. A layer block then consists
of

    elements    float8 e4m3fn, in the order of the row
    scales      float32 little-endian, one per group (K and V of each page apart, if the layout distinguishes them)
    padding     zeros, up to a multiple of 16 bytes

The scale of a group is the smallest power of two for which its largest finite element rounds to at most 448, the largest
float8. Powers of two lose no precision, because floats have the same precision at every size, and they make decoding exact:
storing a loaded block again changes neither its values nor its bytes. NaN remains NaN, and an infinity becomes NaN; all NaNs
have one code. A group of zeros has scale 1.
"""

from __future__ import annotations

import torch

from kvclient import InvalidArgument
from kvclient.device.layouts import PagedCache

CODED = torch.float8_e4m3fn
LARGEST = 448.0
ROUNDS_TO_LARGEST = 464.0
"""Upper bound of the numbers that round to 448: halfway to the next step, which float8 does not have. 448 is even."""
NAN = 0x7F
"""The code of every NaN. The conversion keeps the sign, and the bits of the decoded NaN depend on the device."""
SOURCES = (torch.bfloat16, torch.float16)
_SCALE_BYTES = 4
_ALIGN = 16
_LEAST = 2.0**-126
"""The least normal float32: some devices flush smaller numbers to 0."""


class Fp8Codec:
    """fp8 encoding of rows; see the module. Implements ``copy_strategies.Codec``.

    Args:
        cache: the cache whose rows are encoded; bfloat16 or float16.

    Raises:
        InvalidArgument: a cache of another dtype.
    """

    name = "fp8-e4m3-pow2-2"
    dtype_name = "float8_e4m3fn"

    def __init__(self, cache: PagedCache) -> None:
        if cache.dtype not in SOURCES:
            raise InvalidArgument("fp8 requires a cache of 16-bit floats", dtype=cache.dtype_name)
        self._dtype = cache.dtype
        self._groups = cache.pages_per_block * cache.page.parts * cache.page.scales
        self._row_bytes = cache.row_bytes
        self._elements = cache.row_bytes // 2
        used = self._elements + self._groups * _SCALE_BYTES
        self._coded_bytes = -(-used // _ALIGN) * _ALIGN

    def coded_bytes(self, row_bytes: int) -> int:
        """Bytes of a layer block."""
        assert row_bytes == self._row_bytes
        return self._coded_bytes

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode rows, uint8 ``[blocks, row_bytes]``, as layer blocks: uint8 ``[blocks, coded_bytes]``."""
        values = rows.view(self._dtype).view(len(rows), self._groups, -1).to(torch.float32)
        largest = torch.where(torch.isfinite(values), values.abs(), 0.0).amax(2)
        # frexp is exact, a logarithm is not: largest / 464 = mantissa * 2**exponent, mantissa in [1/2, 1). Divided by 448,
        # a value that rounds down to 448 would have another scale when it is stored again
        mantissa, exponent = torch.frexp(largest / ROUNDS_TO_LARGEST)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)  # an exact power of two
        scales = torch.ldexp(torch.ones_like(largest), exponent).clamp_(min=_LEAST)
        scales = torch.where(largest > 0, scales, 1.0)
        scaled = (values / scales.unsqueeze(2)).clamp_(-LARGEST, LARGEST)
        elements = scaled.to(CODED).view(torch.uint8).masked_fill_(~torch.isfinite(values), NAN)
        coded = torch.zeros((len(rows), self._coded_bytes), dtype=torch.uint8, device=rows.device)
        coded[:, : self._elements] = elements.view(len(rows), -1)
        coded[:, self._elements : self._scales_end] = scales.contiguous().view(torch.uint8)
        return coded

    def decode(self, coded: torch.Tensor) -> torch.Tensor:
        """Decode layer blocks to rows."""
        elements = coded[:, : self._elements].contiguous().view(CODED).view(len(coded), self._groups, -1)
        # cloned: the scales of a single block count as contiguous, but their address need not be a multiple of 4
        scales = coded[:, self._elements : self._scales_end].clone(memory_format=torch.contiguous_format).view(torch.float32)
        most = torch.finfo(self._dtype).max  # rounding must not produce an infinity
        values = (elements.to(torch.float32) * scales.unsqueeze(2)).clamp(-most, most)
        return values.to(self._dtype).view(len(coded), -1).view(torch.uint8)

    @property
    def _scales_end(self) -> int:
        return self._elements + self._groups * _SCALE_BYTES
