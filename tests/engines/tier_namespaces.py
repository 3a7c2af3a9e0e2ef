"""Namespaces of the tier for engines that are only described: vLLM's real configuration and pages, but no weights in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvclient import CacheSpec
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.identity.weights_check import combined_digest
from kvclient.engines.vllm.tier.canonical import canonical_chunk
from kvclient.engines.vllm.tier.facts import check_block_hash, chunk_specs, row_bytes, tier_groups, worker_facts

BLOCKS = 4
LAYERS = 2
HEADS = 4
HEAD_SIZE = 32


@dataclass(frozen=True)
class Described:
    """An engine.

    Attributes:
        weights: which weights it loaded; shards have digests of their own.
        named: whether ``weights_epoch`` names the weights.
        ranks: tensor-parallel ranks.
        canonical: whether chunks have the canonical layout.
        heads_first: order of heads and tokens in a page.
        window: tokens that half of the layers see; 0: all.
        hash_seed: of vLLM's block hashes.
        config: arguments of ``EngineArgs``.
        offloading: options of vLLM's offloading.
        hook: options of the store.
    """

    weights: str = "w0"
    named: bool = True
    ranks: int = 1
    canonical: bool = False
    heads_first: bool = True
    window: int = 0
    hash_seed: str = "0"
    config: tuple[tuple[str, Any], ...] = (("dtype", "float32"), ("block_size", 32))
    offloading: tuple[tuple[str, Any], ...] = ()
    hook: tuple[tuple[str, Any], ...] = ()

    def changed(self, **config: Any) -> Described:
        """The same engine with other arguments of ``EngineArgs``."""
        return replace(self, config=tuple(sorted({**dict(self.config), **config}.items())))

    @property
    def like(self) -> Described:
        """The same for all engines that may share KV."""
        return replace(self, ranks=1) if self.canonical and self.named else self

    def specs(self, model: Path) -> dict[int, CacheSpec]:
        """The namespaces of its groups, made as the connector makes them."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config

        extra = {"cpu_bytes_to_use": 1 << 20, "canonical_layout": self.canonical, **dict(self.offloading)}
        with _hash_seed(self.hash_seed):
            config = _config(str(model), self.ranks, self.config)
            config.kv_transfer_config = SimpleNamespace(engine_id="e", kv_connector_extra_config=extra)
            workers, sizes = [], 0
            for rank in range(self.ranks):
                config.parallel_config.rank = rank
                kv_cache_config, caches = self._pages(config)
                offloading = build_offloading_config(config, kv_cache_config)
                assert not self.canonical or offloading.parallel.is_parallelism_agnostic
                chunk = canonical_chunk(config, kv_cache_config, caches, offloading) if self.canonical else None
                workers.append(worker_facts(config, kv_cache_config, caches, self._weights(), chunk, named=self.named))
                sizes += offloading.worker_kv_bytes_per_block * offloading.cache.blocks_per_chunk
            hook = HookOptions(metadata="127.0.0.1:1", **dict(self.hook))
            groups, size = tier_groups(offloading, kv_cache_config), row_bytes(workers[0], sizes)
            specs = chunk_specs(hook, workers, groups, offloading, size, check_block_hash(config))
            epoch = self.weights if self.named else workers[0].weights
            return {number: replace(spec, weights_epoch=epoch) for number, spec in specs.items()}

    def _weights(self) -> str:
        held = [f"{self.weights} {rank} of {self.ranks}" for rank in range(self.ranks)]
        return combined_digest(held)

    def _pages(self, config: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        """Pages of one rank, as vLLM allocates them."""
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            KVCacheTensor,
            SlidingWindowSpec,
        )

        tokens, heads = int(config.cache_config.block_size), max(1, HEADS // self.ranks)
        fp8 = config.cache_config.cache_dtype == "fp8"
        dtype = torch.uint8 if fp8 else config.model_config.dtype
        shape = {"block_size": tokens, "num_kv_heads": heads, "head_size": HEAD_SIZE, "dtype": dtype}
        names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
        specs: list[Any] = [FullAttentionSpec(**shape)]
        if self.window:
            specs.append(SlidingWindowSpec(**shape, sliding_window=self.window))
        groups = [KVCacheGroupSpec(names[at :: len(specs)], spec) for at, spec in enumerate(specs)]
        order = (BLOCKS, heads, tokens, 2 * HEAD_SIZE) if self.heads_first else (BLOCKS, tokens, heads, 2 * HEAD_SIZE)
        memory = [torch.zeros(order, dtype=dtype) for _ in groups[0].layer_names]
        views = memory if self.heads_first else [one.transpose(1, 2) for one in memory]
        caches = {name: view for group in groups for name, view in zip(group.layer_names, views, strict=True)}
        page = specs[0].page_size_bytes
        tensors = [KVCacheTensor(BLOCKS * page * len(views), group.layer_names, BLOCKS * page, page) for group in groups]
        context = config.compilation_config.static_forward_context
        context.update(
            {name: SimpleNamespace(get_attn_backend=lambda: CPUAttentionBackend, head_size=HEAD_SIZE) for name in names}
        )
        return KVCacheConfig(BLOCKS, tensors, groups), caches


@cache
def _config(model: str, ranks: int, arguments: tuple[tuple[str, Any], ...]) -> Any:
    """vLLM's configuration, without an engine."""
    from vllm.engine.arg_utils import EngineArgs

    given = {name: json.loads(value) if name == "hf_overrides" else value for name, value in arguments}
    more = {"tensor_parallel_size": ranks, "max_model_len": 1024, "enforce_eager": True}
    config = EngineArgs(model=model, served_model_name="one-name", **more, **given).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


@contextmanager
def _hash_seed(seed: str) -> Iterator[None]:
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = seed
    try:
        yield
    finally:
        os.environ.pop("PYTHONHASHSEED")
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before
