"""Facts that make the bytes of two engines' chunks differ, read from vLLM's objects in each worker.

A chunk is a row of vLLM's host memory: the pages of one KV cache group, of all workers. vLLM's key of a chunk covers tokens,
images and adapters' names, and nothing of the model. Everything else is in the namespace. Chunks in the canonical layout do not
depend on tensor parallelism, so their namespace does not either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvclient import CacheSpec, InvalidArgument
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.identity.engine_facts import (
    files_text,
    kernel_of,
    model_digest,
    model_name,
    whole_prompts_only,
)
from kvclient.engines.vllm.identity.kv_groups import GroupView, check_causal
from kvclient.engines.vllm.identity.namespaces import digest
from kvclient.engines.vllm.tier.canonical import CanonicalChunk

_ALIGNMENT = 4096
_KINDS = {True: "chain", False: "heads"}
_SEEDED_HASHES = ("xxhash", "xxhash_cbor")
"""Hashes of vLLM that begin with a random seed per process, unless PYTHONHASHSEED is set, and are not safe against collisions."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Facts of one worker.

    Attributes:
        model: the engine's name of the model.
        model_digest: of the model's configuration.
        engine: vLLM's minor version, e.g. ``0.32``.
        weights: digest of the tensors of all workers.
        pages: digest of shape, order and dtype of all layers' pages, and of the kernels that read them.
        whole_prompts_only: the backend or model that cannot continue after a prefix, if any.
        canonical_bytes: bytes of a chunk in vLLM's canonical layout; 0: ranks have separate places in a chunk.
    """

    model: str
    model_digest: str
    engine: str
    weights: str
    pages: str
    whole_prompts_only: str
    canonical_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TierGroup:
    """One KV cache group as the tier stores it.

    Attributes:
        group_id: vLLM's index.
        chunk_tokens: tokens of a chunk.
        hashes: vLLM's block hashes per chunk.
        chained: whether every chunk of a prefix is needed. The chunks of other groups (windows, states) are heads of chains.
        pages: vLLM's pages per chunk. The last hash of each page is in vLLM's events.
        kind: vLLM's kind of the group.
    """

    group_id: int
    chunk_tokens: int
    hashes: int
    chained: bool
    pages: int = 1
    kind: str = ""


def worker_facts(
    vllm_config: Any,  # noqa: ANN401
    kv_cache_config: Any,  # noqa: ANN401
    kv_caches: Mapping[str, Any],
    weights: str,
    canonical: CanonicalChunk | None = None,
    *,
    named: bool,
) -> WorkerFacts:
    """Collect the facts of this worker. Requires the KV cache.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's configuration of the KV cache.
        kv_caches: by layer: its tensor, or the tensors of its state.
        weights: digest of the weights.
        canonical: contents of a chunk; None: ranks have separate places in a chunk.
        named: the user names the weights.

    Raises:
        OSError: files of the model cannot be read.
    """
    from vllm import __version__

    views = [
        GroupView(tuple(group.layer_names), group.kv_cache_spec.block_size, _kind(group.kv_cache_spec, canonical), "")
        for group in kv_cache_config.kv_cache_groups
    ]
    model = vllm_config.model_config
    pages = [
        [name, *(f"{tuple(one.shape[1:])} {one.stride()[1:]} {one.dtype}" for one in _tensors(kv_caches[name]))]
        for view in views
        for name in view.layers
        if name in kv_caches
    ]
    if canonical is not None:  # as on any number of ranks
        pages = [list(layer) for layer in canonical.layers]
    kernels = [[view.kind, *kernel_of(vllm_config, view)] for view in views]
    return WorkerFacts(
        model=model_name(model),
        model_digest=model_digest(model, vllm_config.cache_config, files_text(vllm_config, named=named)),
        engine=".".join(__version__.split(".")[:2]),
        weights=weights,
        pages=digest({"pages": pages, "kernels": kernels}),
        whole_prompts_only=whole_prompts_only(vllm_config, views),
        canonical_bytes=0 if canonical is None else canonical.nbytes,
    )


def _kind(spec: Any, canonical: CanonicalChunk | None) -> str:  # noqa: ANN401
    """Return what identifies a group. In the canonical layout, ``CanonicalChunk.layers`` has the rest, for all ranks together."""
    return type(spec).__name__ if canonical is not None else digest([repr(spec)])


def _tensors(cache: Any) -> Sequence[Any]:  # noqa: ANN401
    return cache if isinstance(cache, list | tuple) else (cache,)


def tier_groups(config: Any, kv_cache_config: Any) -> list[TierGroup]:  # noqa: ANN401
    """The groups that vLLM offloads.

    Args:
        config: vLLM's ``OffloadingConfig``.
        kv_cache_config: vLLM's configuration of the KV cache.

    Raises:
        InvalidArgument: the key of a chunk does not determine its KV.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_cache_spec_kind

    check_causal(kv_cache_config)
    groups = []
    for group in config.groups:
        spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        plain = type(spec) in {FullAttentionSpec, MLAAttentionSpec} and not (spec.sliding_window or spec.attention_chunk_size)
        chunk_tokens = group.tokens_per_block * config.cache.blocks_per_chunk
        hashes, pages = chunk_tokens // config.cache.tokens_per_hash, config.cache.blocks_per_chunk
        groups.append(TierGroup(group.group_id, chunk_tokens, hashes, plain, pages, str(get_kv_cache_spec_kind(spec).value)))
    return groups


def check_block_hash(vllm_config: Any) -> str:  # noqa: ANN401
    """Return the algorithm and seed of vLLM's block hashes. Engines that differ in either share no blocks.

    Raises:
        InvalidArgument: blocks of different tokens may have one hash.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm in _SEEDED_HASHES:
        raise InvalidArgument(
            "blocks of different tokens may have one hash: use --prefix-caching-hash-algo sha256 or sha256_cbor",
            prefix_caching_hash_algo=algorithm,
        )
    return f"{algorithm} {resolve_none_hash_seed(get_hash_fn_by_name(algorithm))!r}"


def row_bytes(worker: WorkerFacts, most: int) -> int:
    """Return the bytes of a row of host memory that are stored; ``most``: its size, which depends on the ranks.

    Raises:
        InvalidArgument: a canonical chunk is larger than a row.
    """
    if worker.canonical_bytes > most:
        raise InvalidArgument("a canonical chunk does not fit a row of host memory", bytes=worker.canonical_bytes, row=most)
    used = -(-worker.canonical_bytes // _ALIGNMENT) * _ALIGNMENT
    return min(used, most) if used else most


def chunk_specs(
    hook: HookOptions,
    workers: Sequence[WorkerFacts],
    groups: Sequence[TierGroup],
    config: Any,  # noqa: ANN401
    chunk_bytes: int,
    block_hash: str,
) -> dict[int, CacheSpec]:
    """Return the namespace of each group. ``hook`` names the weights epoch.

    Args:
        hook: the options.
        workers: facts of all workers, by rank.
        groups: from ``tier_groups``.
        config: vLLM's ``OffloadingConfig``.
        chunk_bytes: bytes of a chunk.
        block_hash: from ``check_block_hash``.

    Raises:
        InvalidArgument: invalid fields, or workers that do not agree about the canonical layout.
    """
    first = workers[0]
    parallel = config.parallel
    known: dict[str, Any] = {
        "workers": [{**asdict(one), "weights": ""} for one in workers],
        "groups": [[group.group_id, group.tokens_per_block, *group.layer_names] for group in config.groups],
        "cache": asdict(config.cache),
        "parallel": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "layout": [config.kv_cache_layout, config.canonical_layout, config.replicated_layout],
        "hash": block_hash,
    }
    form = ""
    if config.canonical_layout:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id

        if any(replace(one, weights=first.weights) != first for one in workers) or not first.canonical_bytes:
            raise InvalidArgument("the workers have different pages: remove canonical_layout from kv_connector_extra_config")
        form = f"canonical={canonical_format_id(config.kv_cache_layout)};"
        known |= {"workers": known["workers"][:1], "parallel": [], "layout": [form]}
    facts = digest(known)
    return {
        group.group_id: hook.spec(
            first.model,
            block_tokens=group.chunk_tokens,
            layers=1,
            layer_block_bytes=chunk_bytes,
            dtype=config.model.dtype,
            layout=f"vllm-offload={first.engine};{form}group={group.group_id};{_KINDS[group.chained]};facts={facts}",
        )
        for group in groups
    }
