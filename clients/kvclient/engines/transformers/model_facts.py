"""Properties of a model's KV: its shapes, its dependencies besides the tokens, and whether it can be stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvclient import InvalidArgument
from kvclient.engines.torch_blocks import KVLayout

_IRRELEVANT = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Configuration fields that KV does not depend on. All other fields count, to be safe."""

_WHOLE_PROMPT_ROPES = frozenset({"dynamic", "longrope"})
"""Rotary embeddings whose angles depend on the total sequence length: the KV of a prefix differs for each length."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of a model that the hook needs.

    Attributes:
        layout: the layout of its blocks.
        sliding: per layer, whether it keeps only a sliding window.
        devices: the device of each layer's KV.
        config_digest: digest of the configuration fields that KV may depend on.
        pad_ids: token ids that ``generate`` may append to sequences that have ended.
    """

    layout: KVLayout
    sliding: tuple[bool, ...]
    devices: tuple[torch.device, ...]
    config_digest: str
    pad_ids: frozenset[int]


class _Probe(DynamicCache):
    """Detects inputs that were computed under autocast, as in a model that wraps its own forward pass in autocast."""

    autocast = False

    def update(self, key_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        self.autocast = self.autocast or torch.is_autocast_enabled(key_states.device.type)
        states: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, *args, **kwargs)
        return states


def study(model: Any, block_tokens: int) -> ModelFacts:  # noqa: ANN401  # transformers is not typed
    """Inspect a model's cache with one forward pass of a single token.

    Args:
        model: a decoder-only model of transformers.
        block_tokens: tokens per block.

    Raises:
        InvalidArgument: its KV depends on more than the weights and the preceding tokens, or its cache has other layers than
            attention.
    """
    refuse(model)
    config = model.config
    text = config.get_text_config(decoder=True)
    cache = _Probe(config=config)
    # disable the caller's autocast: only the model's own autocast matters here
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    for number, layer in enumerate(cache.layers):
        if type(layer) not in {DynamicLayer, DynamicSlidingWindowLayer} or layer.keys is None:
            raise InvalidArgument(
                "a layer of this model keeps something other than keys and values of tokens: not stored",
                layer=number,
                kind=type(layer).__name__,
            )
    if cache.autocast:
        raise InvalidArgument(
            "the model uses its own autocast, so its weights do not identify its KV; disable the autocast of the model"
        )
    layout = KVLayout.of([(layer.keys, layer.values) for layer in cache.layers], block_tokens)
    return ModelFacts(
        layout,
        tuple(isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers),
        tuple(layer.keys.device for layer in cache.layers),
        config_digest(text.to_dict()),
        frozenset(_pad_ids(getattr(model, "generation_config", None), text)),
    )


def refuse(model: Any) -> None:  # noqa: ANN401
    """Reject models whose stored KV could be wrong for another user.

    Raises:
        InvalidArgument: the model is not supported; the message gives the reason.
    """
    config = model.config
    if config.is_encoder_decoder:
        raise InvalidArgument("encoder-decoder models have KV that depends on the encoder's input: not stored")
    if (model_parts := getattr(model, "tp_size", None)) is not None and model_parts > 1:
        raise InvalidArgument("tensor-parallel models are not supported: each rank has other heads", tp_size=model_parts)
    if has_adapters(model):
        raise InvalidArgument("the model has adapters, which change its KV: merge them first (merge_and_unload)")
    ropes = sorted(set(_rope_types(config.get_text_config(decoder=True))) & _WHOLE_PROMPT_ROPES)
    if ropes:
        raise InvalidArgument("the KV of a prefix depends on the length of the whole prompt: not stored", rope_type=ropes[0])


def has_adapters(model: Any) -> bool:  # noqa: ANN401
    """Check whether adapters (PEFT) are attached, by transformers or by a wrapper."""
    return bool(getattr(model, "_hf_peft_config_loaded", False)) or hasattr(model, "peft_config")


def _rope_types(config: Any) -> Iterator[str]:  # noqa: ANN401
    """Return the kinds of rotary embedding of all kinds of layers."""
    given = getattr(config, "rope_parameters", None) or {}
    for parameters in (given, *(value for value in given.values() if isinstance(value, Mapping))):
        if isinstance(kind := parameters.get("rope_type"), str):
            yield kind


def _pad_ids(*configs: Any) -> Iterator[int]:  # noqa: ANN401
    """Return the token ids of padding and of the end of a sequence."""
    for config in configs:
        for name in ("pad_token_id", "eos_token_id"):
            value = getattr(config, name, None)
            yield from (number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int))


def config_digest(config: Mapping[str, Any]) -> str:
    """Return 16 hex digits that differ if KV may differ: a digest of everything except names, ids and printed options."""
    kept = {name: value for name, value in config.items() if name not in _IRRELEVANT}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]
