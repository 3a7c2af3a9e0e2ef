"""Caches of several groups as vLLM configures them, without an engine."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("default")  # of engines, as everywhere in this folder; modules are imported before that is set
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
    from vllm.v1.kv_cache_layout import KVCacheLayout

BLOCKS = 9


def engine(layout: str = "LBNHC", **parallel: int) -> Any:
    """The parts of vLLM's configuration that groups and allocation depend on."""
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=None),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False, async_scheduling=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        parallel_config=SimpleNamespace(**parallel),
        speculative_config=None,
        kv_transfer_config=None,
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
        ),
    )


def full(**fields: Any) -> Any:
    given = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32, **fields}
    return interface.FullAttentionSpec(**given)


def latents(size: int = 576, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Any:
    return interface.MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=size, dtype=dtype, **fields)


def sparse(layers: int = 3) -> dict[str, Any]:
    """DeepSeek V3.2 and GLM-5: latents of 576 numbers, and an indexer of 132 bytes a token, in each layer."""
    indexer = latents(132, torch.uint8, cache_role=interface.SparseCacheRole.INDEXER)
    return {f"{at}.{name}": spec for at in range(layers) for name, spec in (("attn", latents()), ("indexer", indexer))}


def cache_of(config: Any, specs: Mapping[str, Any]) -> Any:
    return get_kv_cache_config_from_groups(config, get_kv_cache_groups(config, dict(specs)), 64 << 20)
