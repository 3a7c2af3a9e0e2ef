"""Error bound of the quantisation to 8-bit floats."""

from __future__ import annotations

import torch

from kvclient.device.fp8 import LARGEST


def error_bound(values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Bound of the decoding error of finite values: half a step of a float8 with three mantissa bits.

    Args:
        values: float32.
        largest: the largest finite magnitude in each value's group, broadcastable.
    """
    scale = torch.clamp(2 * largest / LARGEST, min=torch.finfo(torch.float32).tiny)  # at most twice the exact scale
    return torch.maximum(values.abs() * 2.0**-4, scale * 2.0**-10)
