"""Facts of a vLLM engine besides its KV cache groups (``kv_groups``), read from vLLM's own objects in one place."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvclient import InvalidArgument
from kvclient.engines.model_files import ModelFiles
from kvclient.engines.vllm.identity.kv_groups import GroupView
from kvclient.engines.vllm.identity.namespaces import GroupFacts, digest
from kvclient.engines.vllm.memory.pages import Pages, page_order

_log = logging.getLogger(__name__)
_NOT_THE_MODEL = ("_name_or_path", "transformers_version")
_ROPE_OF_ANY_LENGTH = {"default", "linear", "llama3", "yarn", "deepseek_yarn", "mrope"}
"""Of these vLLM's positions do not depend on ``max_model_len``; of others they may (``longrope`` does)."""
_FP8 = "float8_e4m3fn"
"""The format of fp8 on most devices."""
_WHOLE_PROMPTS_ONLY = {"CPU_MLA"}
"""Backends that ignore the pages before a prompt's new tokens, so that they compute wrong tokens after a loaded prefix."""
_MEDIA_OPTIONS = (
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
"""Options of vLLM's multimodal configuration that change the KV of an image, and not its identifier."""


def check_steps(vllm_config: Any) -> None:  # noqa: ANN401
    """Whether it is known what became of a step's layer-wise loads before anything builds on the pages that they fill.

    Raises:
        InvalidArgument: it is not.
    """
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if getattr(scheduler, "async_scheduling", False) or getattr(parallel, "pipeline_parallel_size", 1) > 1:
        # the next step starts before the outcome of this one is known, and computes after its pages
        raise InvalidArgument(
            "layerwise loads with asynchronous scheduling or pipeline parallelism are not supported: use load_mode async, or "
            "--no-async-scheduling without pipeline parallelism"
        )
    if getattr(vllm_config, "speculative_config", None) is not None:
        # vLLM asks for failures before the step has ended, and would use pages of a failed load for drafts
        raise InvalidArgument("layerwise loads with speculative decoding are not supported: use load_mode async")


def are_media_named(vllm_config: Any) -> bool:  # noqa: ANN401
    """Whether vLLM names images by their content. If its prefix cache and its processor cache are off, it numbers them."""
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    named = media is None or media.mm_processor_cache_gb != 0 or bool(vllm_config.cache_config.enable_prefix_caching)
    if not named:
        _log.warning("requests with media are not shared: vLLM does not hash media without prefix caching and processor cache")
    return named


def keeps_drafts(vllm_config: Any) -> bool:  # noqa: ANN401
    """Whether a streamed input may go on after KV of other tokens.

    If an answer ends within accepted drafts, synchronous scheduling still counts the later ones as computed. The next part of the
    input then takes their places.
    """
    asynchronous = getattr(vllm_config.scheduler_config, "async_scheduling", False)
    return getattr(vllm_config, "speculative_config", None) is not None and not asynchronous


def check_launcher(parallel_config: Any) -> None:  # noqa: ANN401
    """Check that the scheduler receives the output of all workers.

    Raises:
        InvalidArgument: each worker has a scheduler of its own, which receives nothing of the others.
    """
    if parallel_config.distributed_executor_backend == "external_launcher" and parallel_config.world_size > 1:
        raise InvalidArgument(
            "several workers under an external launcher are not supported, since each has its own scheduler: use"
            " distributed_executor_backend mp or ray",
            workers=parallel_config.world_size,
        )


def group_facts(
    vllm_config: Any,  # noqa: ANN401
    kv_cache_config: Any,  # noqa: ANN401
    groups: Sequence[GroupView],
    pages: Sequence[Pages],
    kv_caches: Mapping[str, Any],
    *,
    named: bool,
) -> list[GroupFacts]:
    """Collect the facts that distinguish the pages of this worker, per part. Requires the KV cache.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's configuration of the KV cache.
        groups: from ``read_groups``.
        pages: by part: its memory.
        kv_caches: by layer: its tensor.
        named: the user names the weights (``weights_epoch``).

    Raises:
        OSError: files of the model cannot be read.
    """
    from vllm import __version__
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    model = vllm_config.model_config
    replicas = max(1, int(getattr(kv_cache_config, "kv_tp_replicas", 1)))
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    common = {
        "model": model_name(model),
        "model_digest": model_digest(model, vllm_config.cache_config, files_text(vllm_config, named=named)),
        "engine": ".".join(__version__.split(".")[:2]),
        "shard_rank": rank // replicas,
        "shard_count": max(1, ranks // replicas),
    }
    facts = []
    for group, memory in zip(groups, pages, strict=True):
        backend, isa = kernel_of(vllm_config, group)
        order = page_order(kv_caches[group.layers[0]])
        facts.append(
            GroupFacts(
                dtype=group.dtype or str(kv_caches[group.layers[0]].dtype).removeprefix("torch."),
                block_tokens=group.block_tokens,
                layers=group.layers,
                page_bytes=memory.shape.layer_block_bytes,
                page_shape=tuple(kv_caches[group.layers[0]].shape[1:]),
                codec=memory.codec_name,
                page_order=() if order == tuple(range(len(order))) else order,
                kind=group.kind,
                backend=backend,
                isa=isa,
                **common,
            )
        )
    return facts


def files_text(vllm_config: Any, *, named: bool) -> str:  # noqa: ANN401
    """Text of everything that KV depends on besides the configuration and the weights that the engine holds.

    Weights that the user names are loaded in the same way, from the same revision. Code that comes with a model computes in place
    of vLLM's, and lists beside the weights say how images are prepared: both are identified by the model's files.

    Raises:
        OSError: the files cannot be read.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    files = ModelFiles(
        str(model.model),
        str(load.load_format),
        str(load.model_loader_extra_config or ""),
        revision="" if Path(model.model).exists() else getattr(model.hf_config, "_commit_hash", None) or "",
        requested_revision=model.revision or "",
        elsewhere=str(getattr(model, "model_weights", "") or ""),
        cache=str(load.download_dir or ""),
    )
    lists = files.lists_digest(lambda: secrets.token_hex(8)) if model.trust_remote_code or model.is_multimodal_model else ""
    if named:
        return f"{files.load_options}:{getattr(model.hf_config, '_commit_hash', None) or model.revision}{lists and f':{lists}'}"
    return lists


def _rope_kinds(config: Any) -> set[str]:  # noqa: ANN401
    """All ways in which a model's configuration says that positions are turned."""
    if isinstance(config, Mapping):
        own = {str(config[name]) for name in ("rope_type", "type") if isinstance(config.get(name), str)}
        return own.union(
            *(_rope_kinds(value) for name, value in config.items() if "rope" in str(name) or isinstance(value, Mapping))
        )
    return set()


def model_name(model: Any) -> str:  # noqa: ANN401
    """Return the engine's name of a model, from vLLM's configuration of it."""
    return str(model.served_model_name if isinstance(model.served_model_name, str) else model.model)


def model_digest(model: Any, cache: Any, files: str) -> str:  # noqa: ANN401
    """Digest the model's configuration.

    Args:
        model: vLLM's configuration of the model: as it is in force, with overrides, quantization and revision.
        cache: vLLM's configuration of the cache.
        files: see ``files_text``.

    Raises:
        OSError: the file with the scales of the image encoder cannot be read.
    """
    media = getattr(model, "multimodal_config", None)
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in _NOT_THE_MODEL}
    return digest(
        {
            "config": config,
            "files": files,
            "quantization": [model.quantization, repr(getattr(model, "quantization_config", None))],
            "dtype": str(model.dtype),
            "cache": cache.cache_dtype,
            # some models turn all positions by other factors where longer contexts are allowed
            "max_model_len": 0 if _rope_kinds(config) <= _ROPE_OF_ANY_LENGTH else model.max_model_len,
            **({} if media is None else {"media": _media_facts(media)}),
        }
    )


def _media_facts(media: Any) -> list[str]:  # noqa: ANN401
    """Collect how vLLM prepares and encodes images: its identifiers of images do not cover it.

    Raises:
        OSError: the file with the scales of the encoder cannot be read.
    """
    scales = getattr(media, "mm_encoder_fp8_scale_path", None)
    content = hashlib.sha256(Path(scales).read_bytes()).hexdigest() if scales else ""
    return [*(f"{name}={getattr(media, name, None)!r}" for name in _MEDIA_OPTIONS), content]


def _layer(vllm_config: Any, group: GroupView) -> Any:  # noqa: ANN401
    return vllm_config.compilation_config.static_forward_context[group.layers[0]]


def _backend(vllm_config: Any, group: GroupView) -> str:  # noqa: ANN401
    return str(_layer(vllm_config, group).get_attn_backend().get_name())


def kernel_of(vllm_config: Any, group: GroupView) -> tuple[str, str]:  # noqa: ANN401
    """Names of the attention backend and of its kernel."""
    backend = _backend(vllm_config, group)
    if not backend.startswith("CPU"):
        from vllm.platforms import current_platform

        if (fp8 := str(current_platform.fp8_dtype()).removeprefix("torch.")) != _FP8:  # pages of fp8 are bytes to vLLM
            return backend, f"device:{fp8}"
        return backend, "device"
    layer = _layer(vllm_config, group)
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    head_size = int(getattr(layer, "head_size", 0)) or None
    isa = _get_attn_isa(vllm_config.model_config.dtype, group.block_tokens, head_size, vllm_config.cache_config.cache_dtype)
    return backend, str(isa)


def whole_prompts_only(vllm_config: Any, groups: Sequence[GroupView]) -> str:  # noqa: ANN401
    """The backend or kind of model that must compute prompts as a whole; empty: none. Requires the KV cache.

    These are attention backends that cannot continue after a prefix, and models without prefix caching: pooling over all tokens
    of a prompt (MEAN, CLS, STEP), which fails in the engine if some were not computed. A generative model without attention
    (Mamba 2) is none of them: vLLM calls its prefix caching unsupported only because it is experimental there.
    """
    model = vllm_config.model_config
    pooler = model.pooler_config
    if not model.is_prefix_caching_supported and (pooler is not None or model.attn_type != "attention_free"):
        pooling = [] if pooler is None else [pooler.seq_pooling_type, pooler.tok_pooling_type]
        return f"a model of kind {model.attn_type}, pooling {'/'.join(str(kind) for kind in pooling if kind) or 'none'},"
    names = (_backend(vllm_config, group) for group in groups)
    return next((f"attention backend {name}" for name in names if name in _WHOLE_PROMPTS_ONLY), "")


def has_replica_of_lower_rank(kv_cache_config: Any) -> bool:  # noqa: ANN401
    """Whether another rank before this one holds the same bytes, and stores them."""
    from vllm.distributed import get_tensor_model_parallel_rank

    replicas = max(1, int(getattr(kv_cache_config, "kv_tp_replicas", 1)))
    return bool(get_tensor_model_parallel_rank() % replicas)
