"""Recipes of tiny models, one per architecture that people serve: the rows of the documentation's table of models.

Each has the features that matter for a KV cache (windows, chunks, latents, states, experts) at the smallest size. All have the
tokenizer and the large weights of ``tiny_models``. Requires transformers and torch; both are loaded when a model is created.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.testing.tiny_models import BOS, EOS, PAD, VOCABULARY, save_model

CONNECTOR, TIER = "KVStoreConnector", "KVStoreOffloadingConnector"
_DONE = "recipe.txt"

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "initializer_range": 0.15,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
_ATTENTION = {
    **_SIZES,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "num_hidden_layers": 4,
}
_HEADS = {**_ATTENTION, "head_dim": 32}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
_WINDOW = {"sliding_window": 96}
_TIED = {"tie_word_embeddings": True}
_MANY_HEADS = {"num_key_value_heads": 4}
_LATENTS = {
    **_ATTENTION,
    **_MANY_HEADS,
    **_EXPERTS,
    "num_hidden_layers": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_INDEXER = {"q_lora_rank": 64, "first_k_dense_replace": 3, "index_topk": 64, "index_head_dim": 128, "index_n_heads": 4}
_LINEAR = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_STATES = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_expand": 2}


def _small_embeddings(made: Any) -> None:  # noqa: ANN401  # a model of transformers
    """Otherwise a token would mostly predict itself, where embeddings are tied."""
    made.get_input_embeddings().weight.data.mul_(0.1)


def _large_queries(made: Any) -> None:  # noqa: ANN401
    """Queries are normalised: without a larger scale every token would see the mean of all values."""
    for layer in made.model.layers:
        layer.self_attn.q_norm.weight.data.fill_(4.0)


def _random_sinks(made: Any) -> None:  # noqa: ANN401
    for layer in made.model.layers:
        layer.self_attn.sinks.data.normal_(0, 0.5)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make and serve a tiny model of an architecture.

    Attributes:
        models: names that users know.
        architecture: class of transformers.
        config: class of its configuration.
        fields: of the configuration.
        served_by: the connector for these models.
        dtype: of the weights and of the engine: float32, in which CPUs repeat themselves exactly, if the engine can serve it.
        adjust: changes weights of the new model.
        cannot: why vLLM cannot run it on a CPU; empty: it can.
        fails_with: part of the error that vLLM then raises.
        whole_prompts: vLLM computes its prompts only as a whole on CPUs without AMX, so nothing is loaded there.
        patch: why vLLM runs it on a CPU only with a one-line patch; empty: it needs none. ``fails_with`` is its error without.
        torchvision: vLLM needs torchvision, at least to look at the model's class.
        images: prompts may have images, so the folder has an image processor.
    """

    models: str
    architecture: str
    config: str
    fields: Mapping[str, Any]
    served_by: str = CONNECTOR
    dtype: str = "float32"
    adjust: tuple[Callable[[Any], None], ...] = field(default=())
    cannot: str = ""
    fails_with: str = ""
    whole_prompts: bool = False
    patch: str = ""
    torchvision: bool = False
    images: bool = False

    @property
    def digest(self) -> str:
        """Digest of the model's class, configuration, adjustments, dtype and connector."""
        adjusts = [inspect.getsource(one) for one in self.adjust]
        said = repr((self.architecture, self.config, sorted(self.fields.items()), self.served_by, self.dtype, adjusts))
        return hashlib.sha256(said.encode()).hexdigest()[:12]


_PAIRS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
_GEMMA_4 = {
    **_HEADS,
    **_TIED,
    **_WINDOW,
    "num_hidden_layers": 6,
    "layer_types": _PAIRS,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCABULARY,
}
_NO_SPARSE = "vLLM has no sparse attention on CPUs"
_NO_SCAN = "vLLM's build for CPUs lacks the selective scan of Mamba 1"
_NO_EXPORT = "vLLM's build for CPUs lacks the kernel that keeps a state of Mamba 2 at a block's end, so prefixes cannot be cached"
_MAMBA_2 = {"served_by": TIER, "patch": _NO_EXPORT, "fails_with": "out of bounds for dimension"}
IMAGE_TOKENS = {"image_token_id": 259, "video_token_id": 260, "vision_start_token_id": 261, "vision_end_token_id": 262}
"""The tokens after those of ``tiny_models``. A prompt has start, image and end for each image."""
_IMAGE_TEXTS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_VISION = {
    "depth": 2,
    "embed_dim": 64,
    "hidden_size": 128,
    "num_heads": 2,
    "mlp_ratio": 2,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.15,
}

RECIPES: dict[str, Recipe] = {
    "llama": Recipe("Llama 2 and 3", "LlamaForCausalLM", "LlamaConfig", _HEADS),
    "qwen3": Recipe("Qwen 3", "Qwen3ForCausalLM", "Qwen3Config", _HEADS, adjust=(_large_queries,)),
    "qwen3moe": Recipe(
        "Qwen 3 MoE",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_HEADS, **_EXPERTS, "num_hidden_layers": 3, "num_experts": 4},
        adjust=(_large_queries,),
    ),
    "mixtral": Recipe(
        "Mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_ATTENTION, "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "glm4moe": Recipe(
        "GLM 4.5",
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {
            **_HEADS,
            **_EXPERTS,
            "num_hidden_layers": 3,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "mistral": Recipe("Mistral", "MistralForCausalLM", "MistralConfig", {**_HEADS, **_WINDOW}),
    "phi3": Recipe("Phi 3", "Phi3ForCausalLM", "Phi3Config", {**_ATTENTION, **_WINDOW}),
    "gemma2": Recipe(
        "Gemma 2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_HEADS, **_TIED, **_WINDOW, "query_pre_attn_scalar": 1},
        adjust=(_small_embeddings,),
    ),
    "gemma3": Recipe(
        "Gemma 3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_HEADS, **_TIED, **_WINDOW, "num_hidden_layers": 6, "query_pre_attn_scalar": 1},
        adjust=(_small_embeddings,),
    ),
    "gemma4": Recipe(
        "Gemma 4", "Gemma4ForCausalLM", "Gemma4TextConfig", {**_GEMMA_4, "global_head_dim": 64}, adjust=(_small_embeddings,)
    ),
    "gemma4share": Recipe(
        "Gemma 4 with shared KV",
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {**_GEMMA_4, "global_head_dim": 32, "num_kv_shared_layers": 3},
        adjust=(_small_embeddings,),
    ),
    "gptoss": Recipe(
        "gpt-oss",
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_HEADS, **_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
        adjust=(_random_sinks,),
    ),
    "olmo3": Recipe("OLMo 3", "Olmo3ForCausalLM", "Olmo3Config", {**_ATTENTION, **_WINDOW}),
    "cohere2": Recipe("Command R7B and A", "Cohere2ForCausalLM", "Cohere2Config", {**_ATTENTION, **_TIED, **_WINDOW}),
    "llama4": Recipe(
        "Llama 4",
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **_HEADS,
            "intermediate_size_mlp": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 256,
            "attn_temperature_tuning": False,
        },
    ),
    "deepseek2": Recipe(
        "DeepSeek V2",
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {**_LATENTS, "q_lora_rank": None, "first_k_dense_replace": 3},
        dtype="bfloat16",
        whole_prompts=True,
    ),
    "deepseek3": Recipe(
        "DeepSeek V3 and R1, Kimi K2",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**_LATENTS, "q_lora_rank": 64, "first_k_dense_replace": 3},
        dtype="bfloat16",
        whole_prompts=True,
    ),
    "glm47lite": Recipe(
        "GLM 4.7 Flash",
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteConfig",
        {**_LATENTS, "q_lora_rank": 64, "first_k_dense_replace": 1},
        dtype="bfloat16",
        whole_prompts=True,
    ),
    "deepseek32": Recipe(
        "DeepSeek V3.2",
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        {**_LATENTS, **_INDEXER},
        dtype="bfloat16",
        cannot=_NO_SPARSE,
        fails_with="Sparse Attention is not supported",
    ),
    "glm5": Recipe(
        "GLM 5",
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaConfig",
        {**_LATENTS, **_INDEXER},
        dtype="bfloat16",
        cannot=_NO_SPARSE,
        fails_with="Sparse Attention is not supported",
    ),
    "qwen3next": Recipe(
        "Qwen 3 Next",
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**_ATTENTION, **_MANY_HEADS, **_LINEAR, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64},
        served_by=TIER,
        dtype="bfloat16",
    ),
    "qwen35": Recipe(
        "Qwen 3.5",
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {**_ATTENTION, **_MANY_HEADS, **_LINEAR},
        served_by=TIER,
        dtype="bfloat16",
        torchvision=True,
    ),
    "qwen2vl": Recipe(
        "Qwen2-VL",
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "text_config": {
                **_ATTENTION,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
            },
            "vision_config": _VISION,
            **IMAGE_TOKENS,
            "tie_word_embeddings": False,
        },
        torchvision=True,
        images=True,
    ),
    "lfm2": Recipe(
        "LFM 2",
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {
            **_ATTENTION,
            "layer_types": ["conv", "full_attention"] * 2,
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 128,
            "block_dim": 128,
        },
        served_by=TIER,
    ),
    "mamba2": Recipe(
        "Mamba 2",
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {**_SIZES, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 32, "state_size": 32, "n_groups": 1},
        **_MAMBA_2,  # type: ignore[arg-type]
    ),
    "nemotronh": Recipe(
        "Nemotron-H, Nemotron 3",
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **{name: value for name, value in _HEADS.items() if name not in {"num_hidden_layers", "tie_word_embeddings"}},
            "layers_block_type": ["mamba", "mlp", "attention"] * 2,
            "ssm_state_size": 32,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 2,
        },
        **_MAMBA_2,  # type: ignore[arg-type]
    ),
    "falconh1": Recipe(
        "Falcon-H1",
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {**_HEADS, **_STATES, "num_hidden_layers": 3, "mamba_d_ssm": 256},
        **_MAMBA_2,  # type: ignore[arg-type]
    ),
    "granite4": Recipe(
        "Granite 4 hybrid",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **_ATTENTION,
            **_STATES,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 256,
            "position_embedding_type": None,
        },
        **_MAMBA_2,  # type: ignore[arg-type]
    ),
    "mamba1": Recipe(
        "Mamba",
        "MambaForCausalLM",
        "MambaConfig",
        {**_SIZES, "num_hidden_layers": 3, "state_size": 16},
        served_by=TIER,
        cannot=_NO_SCAN,
        fails_with="selective_scan_fwd",
    ),
    "jamba": Recipe(
        "Jamba",
        "JambaForCausalLM",
        "JambaConfig",
        {
            **_ATTENTION,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "use_mamba_kernels": False,
        },
        served_by=TIER,
        cannot=_NO_SCAN,
        fails_with="selective_scan_fwd",
    ),
}
"""By a short name."""


def make_recipe(folder: Path, name: str) -> Path:
    """Create the model of a recipe, unless it exists.

    Args:
        folder: for models; created if needed.
        name: key of ``RECIPES``.

    Returns:
        The folder of the model.
    """
    import transformers

    recipe, model = RECIPES[name], folder / f"recipe-{name}-{RECIPES[name].digest}"
    if (model / _DONE).exists():
        return model
    model.mkdir(parents=True, exist_ok=True)

    def make() -> Any:  # noqa: ANN401
        made = getattr(transformers, recipe.architecture)(getattr(transformers, recipe.config)(**recipe.fields))
        for adjust in recipe.adjust:
            adjust(made)
        return made

    save_model(model, make, recipe.dtype)
    if recipe.images:
        _save_image_processor(model)
    (model / _DONE).write_text(name)
    return model


def _save_image_processor(folder: Path) -> None:
    """Add what Qwen2-VL's processor reads: tokens of images, and the configuration of the processors of images and videos."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_IMAGE_TEXTS)})
    tokenizer.save_pretrained(folder)
    side = _VISION["patch_size"] * _VISION["spatial_merge_size"]
    processor = {
        "processor_class": "Qwen2VLProcessor",
        "size": {"shortest_edge": 4 * side**2, "longest_edge": 16 * side**2},
        "patch_size": _VISION["patch_size"],
        "temporal_patch_size": _VISION["temporal_patch_size"],
        "merge_size": _VISION["spatial_merge_size"],
    }
    for name, kind in (("preprocessor", "image_processor_type"), ("video_preprocessor", "video_processor_type")):
        processor_class = f"Qwen2VL{kind.partition('_')[0].capitalize()}Processor"
        (folder / f"{name}_config.json").write_text(json.dumps({**processor, kind: processor_class}))
