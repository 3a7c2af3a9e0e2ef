"""KV caches of several layouts, and a simple oracle for the bytes of their blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvclient.device.int8 import ScaleGroups
from kvclient.device.layouts import PagedCache

LAYOUTS = ("flash_nhd", "flash_hnd", "block_first_nhd", "vllm_bhnc", "vllm_permuted", "mla", "padded_pages")


def make_layers(
    layout: str,
    layers: int,
    pages: int,
    tokens: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[list[torch.Tensor], str]:
    """Random KV tensors, one per layer, and the kind of their cache."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    kind, made = "pages", []
    for _ in range(layers):
        if layout == "flash_nhd":
            kind, tensor = "split", drawn(2, pages, tokens, heads, dim)
        elif layout == "flash_hnd":
            kind, tensor = "split", drawn(2, pages, heads, tokens, dim)
        elif layout == "block_first_nhd":
            tensor = drawn(pages, 2, tokens, heads, dim)
        elif layout == "vllm_bhnc":
            tensor = drawn(pages, heads, tokens, 2 * dim)
        elif layout == "vllm_permuted":  # axes [pages, heads, tokens, dim], in memory [pages, tokens, heads, dim]
            tensor = drawn(pages, tokens, heads, 2 * dim).transpose(1, 2)
        elif layout == "mla":
            tensor = drawn(pages, tokens, dim)
        else:  # padded_pages: other bytes between pages
            tensor = drawn(pages, 2 * tokens, heads, dim)[:, :tokens]
        made.append(tensor)
    return made, kind


def make_cache(
    layout: str,
    *,
    layers: int = 3,
    pages: int = 12,
    tokens: int = 4,
    heads: int = 2,
    dim: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    pages_per_block: int = 1,
    device: str = "cpu",
    seed: int = 0,
) -> PagedCache:
    tensors, kind = make_layers(layout, layers, pages, tokens, heads, dim, dtype, device, seed)
    return PagedCache(tensors, kind, pages_per_block=pages_per_block)  # type: ignore[arg-type]


def layer_bytes(cache: PagedCache, layer: int, page_ids: Sequence[int]) -> bytes:
    """One layer of some pages: page after page, K before V if they are separate, each in the order of memory."""
    tensor = cache.layers[layer].tensor.cpu() if cache.device.type != "cpu" else cache.layers[layer].tensor
    lead = 2 if cache.kind == "split" else 1
    strides = cache.layers[layer].tensor.stride()[lead:]
    order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
    out = b""
    for page in page_ids:
        for part in [tensor[0, page], tensor[1, page]] if cache.kind == "split" else [tensor[page]]:
            out += part.permute(*order).contiguous().view(torch.uint8).numpy().tobytes()
    return out


def block_bytes(cache: PagedCache, page_ids: Sequence[int]) -> np.ndarray:
    """Full blocks of some pages: uint8 ``[blocks, layers * row_bytes]``."""
    each = cache.pages_per_block
    blocks = [
        b"".join(layer_bytes(cache, layer, page_ids[at : at + each]) for layer in range(len(cache.layers)))
        for at in range(0, len(page_ids), each)
    ]
    return np.frombuffer(b"".join(blocks), np.uint8).reshape(len(blocks), len(cache.layers) * cache.row_bytes)


def snapshot(cache: PagedCache) -> list[torch.Tensor]:
    return [layer.tensor.clone() for layer in cache.layers]


INT8_SHARE = (1 + (4 / 16 + 2 / 32) / 2) / 2
"""Bytes of an encoded row with groups of 16 keys and 32 values, as a part of the row."""
ANY_GROUPS = ScaleGroups(8, (8, 1), (8, 1))
"""Groups for caches of any layout whose pages have a multiple of 16 elements."""


def token_groups(layout: str, cache: PagedCache) -> ScaleGroups:
    """Groups of int8 scales: the same place of all tokens of a page, and neighbours in a token's values.

    Caches without keys and values count as if the two were the halves of their last axis.
    """
    tokens = 0 if layout in {"flash_nhd", "block_first_nhd", "mla", "padded_pages"} else 1
    shape, order = list(cache.layers[0].tensor.shape[2 if cache.kind == "split" else 1 :]), list(cache.layers[0].order)
    if layout == "block_first_nhd":
        return ScaleGroups.along(shape[1:], [axis - 1 for axis in order[1:]], tokens)
    if cache.kind == "split":
        return ScaleGroups.along(shape, order, tokens)
    shape[-1] //= 2
    return ScaleGroups.along(shape, order, tokens, run=shape[-1])
