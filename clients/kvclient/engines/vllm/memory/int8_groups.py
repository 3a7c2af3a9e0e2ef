"""Which elements of a page share a scale if blocks are stored as int8, by attention kernel.

A group must hold one channel of the keys over several tokens. The order of channels and tokens in a page is known for the kernels
below; others are refused. The values share scales as the keys of the same kernel do: any neighbours suit them.

| kernel | in the memory of a page | a group |
|---|---|---|
| FlashAttention, FlashInfer, Triton | tokens are the axis that vLLM names | one place of 16 tokens |
| CPU, ``vec`` and ``vec16`` | keys: the tokens of a channel side by side; values: the channels of a token | 16 neighbours |
| CPU, ``amx`` | pairs of channels for 16 tokens, or of tokens for 16 channels | every second of 32 neighbours |

The order on CPUs was found by writing with vLLM's own operation (``tests/engines/test_vllm_int8.py``), the others by reading the
source of vLLM 0.32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvclient import InvalidArgument
from kvclient.device.int8 import MOST_GROUP, ScaleGroups
from kvclient.engines.vllm.memory.pages import page_order

if TYPE_CHECKING:
    import torch

_BY_AXES = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"}
_TOKEN_AXIS = 1
"""Axes of a page: heads, tokens, content of a token."""


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
    if backend in _BY_AXES:
        return ScaleGroups.along(axes, page_order(tensor), _TOKEN_AXIS)
    tokens, content = axes[_TOKEN_AXIS:]
    if backend == "CPU_ATTN" and isa in {"vec", "vec16"}:
        return ScaleGroups(math.gcd(tokens, content // 2, MOST_GROUP), 1)
    if backend == "CPU_ATTN" and isa == "amx":
        return ScaleGroups(math.gcd(tokens, content // 2, MOST_GROUP), 2)
    raise InvalidArgument(
        "stored_dtype int8 is not supported with this attention backend: use engine", backend=backend, kernel=isa
    )
