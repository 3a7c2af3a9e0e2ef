"""Namespaces of SGLang's pages: all configuration and host pool properties that change bytes and are not in page hashes.

A page hash identifies the preceding tokens, adapter and salt, but not the model or its KV layout. Engines with equal namespaces
may exchange pages. The data-parallel rank is not part of the namespace: equal tokens have equal KV on all such ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvclient import CacheSpec, InvalidArgument
from kvclient.engines.options import HookOptions
from kvclient.engines.sglang.host_pages import HostPages

KV = "kv"
"""SGLang's name of the pool that holds (or represents) the attention layers' KV."""
_SHARDED_STATE = ("mamba",)
"""Pools that tensor-parallel ranks shard even if the ranks hold the same KV (MLA)."""
_OPAQUE = ("uint8",)
"""A dtype that does not identify the number format: SGLang stores every kind of fp8 as bytes."""
_FIELDS = ("start_layer", "end_layer", "layer_num", "head_num", "head_dim", "v_head_dim", "kv_cache_dim")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the model's KV that a rank holds.

    Attributes:
        tp_rank: one of ``tp_size`` tensor-parallel ranks.
        pp_rank: one of ``pp_size`` pipeline stages.
        cp_rank: one of ``cp_size`` context-parallel attention ranks, each with a slice of every page.
        dcp_rank: one of ``dcp_size`` ranks that share a page's positions while decoding.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dcp_rank: int
    dcp_size: int

    @classmethod
    def of(cls, config: Any, *, replicated: bool) -> Shard:  # noqa: ANN401  # SGLang's HiCacheStorageConfig
        """Return the part for a pool, whose KV is either equal on all tensor-parallel ranks or sharded."""
        return cls(
            tp_rank=0 if replicated else int(config.tp_rank),
            tp_size=1 if replicated else int(config.tp_size),
            pp_rank=int(config.pp_rank),
            pp_size=int(config.pp_size),
            cp_rank=int(config.attn_cp_rank),
            cp_size=int(config.attn_cp_size),
            dcp_rank=int(getattr(config, "dcp_rank", 0)),
            dcp_size=int(getattr(config, "dcp_size", 1)),
        )

    @property
    def count(self) -> int:
        """Number of parts."""
        return self.tp_size * self.pp_size * self.cp_size * self.dcp_size

    @property
    def rank(self) -> int:
        """Index of this part."""
        return ((self.pp_rank * self.cp_size + self.cp_rank) * self.dcp_size + self.dcp_rank) * self.tp_size + self.tp_rank

    @property
    def text(self) -> str:
        """Text for the layout: two ways of splitting a model into equally many parts are different layouts."""
        return f"tp{self.tp_size}.pp{self.pp_size}.cp{self.cp_size}.dcp{self.dcp_size}"


def amd_device() -> str:
    """Return the architecture of this process's AMD devices, e.g. ``gfx942``; empty: no such device.

    SGLang's fp8 depends on it, whatever dtype is configured, and so does the order of bytes in pages of equal size.
    """
    if torch.version.hip is None or not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(0).gcnArchName).partition(":")[0]


def page_spec(
    options: HookOptions,
    config: Any,  # noqa: ANN401  # SGLang's HiCacheStorageConfig
    pool: Any,  # noqa: ANN401  # SGLang's pools have no common type to import
    pages: HostPages,
    *,
    name: str,
    chained: bool,
    cache_dtype: str,
    key_tokens: int,
    model_text: str = "",
) -> CacheSpec:
    """Return the namespace of one pool's pages.

    Args:
        options: the user's options.
        config: SGLang's configuration.
        pool: the host pool.
        pages: the pool's pages as bytes.
        name: SGLang's name of the pool.
        chained: whether pages are stored as chains; a page's depth differs between the two ways.
        cache_dtype: the configured dtype of the cache, for pools of opaque bytes; empty: unknown.
        key_tokens: tokens between two page hashes.
        model_text: digest of the model beyond its name; empty: unknown.

    Raises:
        InvalidArgument: the model name is missing, or sizes are out of bounds.
    """
    if not (options.model or config.model_name):
        raise InvalidArgument("SGLang names no model: name it in the backend's configuration", option="model")
    shard = Shard.of(config, replicated=bool(config.is_mla_model) and not is_sharded(name, pool))
    dtype = str(getattr(pool, "dtype", "opaque")).removeprefix("torch.")
    if dtype in _OPAQUE and cache_dtype:
        dtype = f"{dtype}:{cache_dtype}"
    fields = ",".join(f"{field}={getattr(pool, field)}" for field in _FIELDS if isinstance(getattr(pool, field, None), int))
    layout = (
        f"sglang/{name}/{type(pool).__name__}/{getattr(pool, 'layout', '')}/{'pieces' if pages.in_place else 'flat'}"
        f"/{'chain' if chained else 'page'}{key_tokens}/{fields}/{shard.text}/{getattr(pool, 'storage_format_tag', None) or ''}"
    )
    order = getattr(getattr(pool, "device_pool", None), "kv_cache_layout", "nhd")
    if order != "nhd":
        layout = f"{layout}/order={order}"
    if device := amd_device():
        layout = f"{layout}/device={device}"
    if model_text:
        layout = f"{layout}/model={model_text}"
    return options.spec(
        config.model_name or "",
        block_tokens=max(1, pages.page_tokens),
        layers=pages.shape.layers,
        layer_block_bytes=pages.shape.layer_block_bytes,
        dtype=dtype,
        layout=layout,
        shard_rank=shard.rank,
        shard_count=shard.count,
    )


def holds_draft(name: str, pool: Any) -> bool:  # noqa: ANN401  # see page_spec
    """Check whether a pool may hold KV of a draft model: a pool beside the KV, or layers behind those of the model."""
    layers = getattr(pool, "layer_num", 0)
    return name != KV or getattr(pool, "target_layer_num", layers) != layers


def is_sharded(name: str, pool: Any) -> bool:  # noqa: ANN401  # see page_spec
    """Check whether ranks hold different parts although all hold the model's whole KV: state, or a draft model with heads."""
    return name in _SHARDED_STATE or isinstance(getattr(pool, "head_num", None), int)
