"""Which elements of a page are quantised together if blocks are stored as int8, by attention kernel.

A group must hold one channel of the keys over several tokens, or channels of one token of the values. The order of channels and
tokens in a page is known for the kernels below; others are refused.

| kernel | in the memory of a page | group of keys | group of values |
|---|---|---|---|
| FlashAttention, FlashInfer, Triton | keys, then values, of each token and head | one place of 16 tokens | 32 neighbours |
| CPU, ``vec`` and ``vec16`` | keys of a head by channel, then its values by token | 16 neighbours | 32 neighbours |
| CPU, ``amx`` | the same, in pairs of channels for 16 tokens, or of tokens for 16 channels | every second of 32 | the same |

The order on CPUs was found by writing with vLLM's own operation (``tests/engines/test_vllm_int8.py``), the others by reading the
source of vLLM 0.32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvclient import InvalidArgument
from kvclient.device.int8 import MOST_KEYS, MOST_VALUES, ScaleGroups
from kvclient.engines.vllm.memory.pages import page_order

if TYPE_CHECKING:
    import torch

_BY_AXES = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"}
_TOKEN_AXIS, _CONTENT_AXIS = 1, 2
"""Axes of a page: heads, tokens, content of a token."""
_AMX_CHANNELS = 16


def int8_groups(tensor: torch.Tensor, kind: str, backend: str, isa: str) -> ScaleGroups:
    """Return the elements that share a scale.

    Args:
        tensor: a layer's cache.
        kind: kind of attention; see ``GroupView``.
        backend: attention backend.
        isa: which of its kernels.

    Raises:
        InvalidArgument: the pages cannot be stored as int8, or that was not tried.
    """
    axes = tuple(tensor.shape[1:])
    if "mla" in kind or len(axes) != 3:
        raise InvalidArgument("stored_dtype int8 is not supported for latent attention: use engine", kind=kind, page=axes)
    heads, tokens, content = axes
    dim, order = content // 2, page_order(tensor)
    if backend in _BY_AXES and order[-1] == _CONTENT_AXIS:
        return ScaleGroups.along((heads, tokens, dim), order, _TOKEN_AXIS, run=dim)
    if backend == "CPU_ATTN" and isa in {"vec", "vec16"}:
        return ScaleGroups(tokens * dim, (math.gcd(tokens, MOST_KEYS), 1), (math.gcd(dim, MOST_VALUES), 1))
    if backend == "CPU_ATTN" and isa == "amx":
        return ScaleGroups(tokens * dim, (math.gcd(tokens, MOST_KEYS), 2), (math.gcd(dim, _AMX_CHANNELS), 2))
    raise InvalidArgument(
        "stored_dtype int8 is not supported with this attention backend: use engine", backend=backend, kernel=isa
    )
