"""Error of the quantisation to int8: of elements and of attention outputs."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvclient.device.int8 import LEAST


def error_bound(values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Bound of the decoding error of finite values: half a step of the group, and the rounding of the decoded value.

    Args:
        values: as they were, in the cache's dtype.
        largest: the largest magnitude in each value's group, broadcastable.
    """
    digits, least = (2.0**-8, LEAST) if values.dtype == torch.bfloat16 else (2.0**-11, 2.0**-25)
    step = largest.float() / 127
    return 1.001 * (step / 2 + (values.float().abs() + step / 2) * digits) + least


def attention_error(before: torch.Tensor, after: torch.Tensor, query: torch.Tensor) -> float:
    """Difference of attention outputs over two caches, in float32, as a part of the norm.

    Args:
        before: ``[2, blocks, tokens, heads, dim]``.
        after: the same tokens after they were stored and loaded.
        query: ``[1, heads * n, queries, dim]``.
    """
    exact, ours = (_attend(query, kv) for kv in (before, after))
    return float((ours - exact).norm() / exact.norm())


def _attend(query: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    repeat = query.shape[1] // kv.shape[3]
    keys, values = kv.float().flatten(1, 2).permute(0, 2, 1, 3).repeat_interleave(repeat, 1).unsqueeze(1)
    return scaled_dot_product_attention(query, keys, values)
