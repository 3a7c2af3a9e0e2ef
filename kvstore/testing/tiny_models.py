"""Tiny language models with random weights, created in a second in the format that engines read.

Their properties make tests meaningful:

* weights are large (``initializer_range``), or the output would hardly depend on the KV cache, and wrong bytes would not show;
* the tokenizer is byte by byte, and only printable ASCII is ever the greedy choice: the text of an answer converts to the same
  tokens, so a session's next turn has the blocks of this one, and no answer ends before its ``max_tokens``;
* the same family, sizes and seed give the same bytes in every process.

Requires transformers and torch; both are loaded when a model is created.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvstore.core.errors import InvalidArgument

PAD, BOS, EOS = 256, 257, 258
BYTE_TOKENS = 256
VOCABULARY = 264
"""Bytes, three special tokens, and space up to a multiple of 8 that no text reaches."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_PRINTABLE = (ord("\n"), *range(ord(" "), ord("~") + 1))
_DONE = "tiny.json"


class Family(StrEnum):
    """Kinds of attention that a cache must get right."""

    LLAMA = "llama"
    """Grouped queries."""
    QWEN3 = "qwen3"
    """Grouped queries, with norms of queries and keys."""
    GEMMA3 = "gemma3"
    """Sliding windows in five layers of six: several KV cache groups."""
    DEEPSEEK = "deepseek"
    """Latent attention (MLA): one head of latents a token, in bfloat16."""
    GEMMA4 = "gemma4"
    """Heads of two sizes, so that pages of sliding layers have twice the tokens of the others'."""
    LLAMA4 = "llama4"
    """Attention within chunks of the context in three layers of four, and experts."""
    LFM2 = "lfm2"
    """Short convolutions beside attention: a state per sequence, kept at block boundaries."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Parameters of a model.

    Attributes:
        family: kind of model.
        layers: number of layers; 0: the minimum that shows the family's properties.
        hidden: width.
        heads: query heads.
        kv_heads: heads of keys and values (always one latent for ``DEEPSEEK``).
        head_dim: of a head.
        window: tokens that sliding layers see.
        max_tokens: longest context.
        seed: seed of the weights.
        initializer_range: standard deviation of the weights.
    """

    family: Family = Family.LLAMA
    layers: int = 0
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int = 256
    max_tokens: int = 32_768
    seed: int = 0
    initializer_range: float = 0.15

    def __post_init__(self) -> None:
        if self.initializer_range < 0.1:
            raise InvalidArgument("weights this small make an output that does not depend on KV", range=self.initializer_range)

    @property
    def dtype(self) -> str:
        """Numbers of the weights: float32, in which CPUs repeat themselves exactly, where engines can serve it."""
        return "bfloat16" if self.family is Family.DEEPSEEK else "float32"


def make_model(folder: Path, model: TinyModel = TinyModel()) -> Path:
    """Create a model with its tokenizer, unless it exists.

    Args:
        folder: target folder; created if needed.
        model: parameters.

    Returns:
        ``folder``, for ``from_pretrained`` and ``vllm serve``.

    Raises:
        InvalidArgument: the folder contains another model.
    """
    said = json.dumps(asdict(model), sort_keys=True)
    done = folder / _DONE
    if done.exists():
        if done.read_text() != said:
            raise InvalidArgument("the folder contains another model; choose another folder", folder=folder)
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, lambda: _MAKERS[model.family](model), model.dtype, model.seed)
    done.write_text(said)
    return folder


def save_model(folder: Path, make: Callable[[], Any], dtype: str, seed: int = 0) -> None:
    """Save a model of this vocabulary, and the tokenizer. Only printable ASCII is ever the greedy choice.

    Args:
        folder: an existing folder.
        make: creates the model, with random weights.
        dtype: of the weights, e.g. ``float32``.
        seed: of the weights.
    """
    import torch

    _save_tokenizer(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = make()
        with torch.no_grad():
            unsaid = [token for token in range(VOCABULARY) if token not in _PRINTABLE]
            made.get_output_embeddings().weight[unsaid] = 0.0  # their score is 0, and the best of the others is above
    made.to(getattr(torch, dtype)).save_pretrained(folder)


def _save_tokenizer(folder: Path) -> None:
    """Token ``i`` is byte ``i``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    special = {"<pad>": PAD, "<s>": BOS, "</s>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, **special}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    roles = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **roles)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _byte_characters() -> list[str]:
    """The printable characters by which byte-level tokenizers write the 256 bytes."""
    itself = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in itself else next(others)) for byte in range(BYTE_TOKENS)]


def _common(model: TinyModel, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": model.hidden,
        "intermediate_size": 2 * model.hidden,
        "num_hidden_layers": model.layers or layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.max_tokens,
        "initializer_range": model.initializer_range,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
    }


def _llama(model: TinyModel) -> Any:  # noqa: ANN401  # a model of transformers
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_common(model, 4), head_dim=model.head_dim))


def _qwen3(model: TinyModel) -> Any:  # noqa: ANN401
    """Queries and keys are normalised: without a larger scale every token would see the mean of all values."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    made = Qwen3ForCausalLM(Qwen3Config(**_common(model, 4), head_dim=model.head_dim))
    for layer in made.model.layers:
        layer.self_attn.q_norm.weight.data.fill_(_QWEN_QUERIES)
    return made


def _gemma3(model: TinyModel) -> Any:  # noqa: ANN401
    """Embeddings are tied in all models of this family: made small, or a token would mostly predict itself.

    The scale of queries is for the same reason as in Qwen3.
    """
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **{**_common(model, 6), "tie_word_embeddings": True},
        head_dim=model.head_dim,
        sliding_window=model.window,
        query_pre_attn_scalar=1,
    )
    made = Gemma3ForCausalLM(config)
    with torch.no_grad():
        made.get_input_embeddings().weight *= _GEMMA_EMBEDDINGS
    return made


def _deepseek(model: TinyModel) -> Any:  # noqa: ANN401
    """Dense layers only; the sizes of the latent are those of the real models, for which alone engines have kernels."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **{**_common(model, 3), "num_key_value_heads": model.heads},
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=model.head_dim,
            v_head_dim=model.head_dim,
            first_k_dense_replace=model.layers or 3,
            moe_intermediate_size=64,
            n_routed_experts=2,
            num_experts_per_tok=1,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
        )
    )


def _gemma4(model: TinyModel) -> Any:  # noqa: ANN401
    """Embeddings as in Gemma 3."""
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    layers = model.layers or 6
    config = Gemma4TextConfig(
        **{**_common(model, layers), "tie_word_embeddings": True},
        head_dim=model.head_dim,
        global_head_dim=2 * model.head_dim,
        sliding_window=model.window,
        layer_types=["full_attention" if at % 3 == 2 else "sliding_attention" for at in range(layers)],
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCABULARY,
    )
    made = Gemma4ForCausalLM(config)
    with torch.no_grad():
        made.get_input_embeddings().weight *= _GEMMA_EMBEDDINGS
    return made


def _llama4(model: TinyModel) -> Any:  # noqa: ANN401
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    return Llama4ForCausalLM(
        Llama4TextConfig(
            **_common(model, 4),
            head_dim=model.head_dim,
            intermediate_size_mlp=2 * model.hidden,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            attention_chunk_size=model.window,
            attn_temperature_tuning=False,
        )
    )


def _lfm2(model: TinyModel) -> Any:  # noqa: ANN401
    from transformers import Lfm2Config, Lfm2ForCausalLM

    layers = model.layers or 4
    return Lfm2ForCausalLM(
        Lfm2Config(
            **_common(model, layers),
            layer_types=["full_attention" if at % 2 else "conv" for at in range(layers)],
            block_auto_adjust_ff_dim=False,
            conv_dim=model.hidden,
            block_dim=model.hidden,
        )
    )


_GEMMA_EMBEDDINGS = 0.1
_QWEN_QUERIES = 4.0
_MAKERS = {
    Family.LLAMA: _llama,
    Family.QWEN3: _qwen3,
    Family.GEMMA3: _gemma3,
    Family.DEEPSEEK: _deepseek,
    Family.GEMMA4: _gemma4,
    Family.LLAMA4: _llama4,
    Family.LFM2: _lfm2,
}


def main() -> None:
    """``python -m kvstore.testing.tiny_models FOLDER``: create a model and print its folder."""
    parser = argparse.ArgumentParser(
        prog="python -m kvstore.testing.tiny_models", description="Makes a tiny model of random weights."
    )
    parser.add_argument("folder", type=Path, help="where to; kept if it holds this very model already")
    parser.add_argument("--family", type=Family, choices=list(Family), default=Family.LLAMA, help="default: llama")
    chosen = parser.parse_args()
    print(make_model(chosen.folder, TinyModel(family=chosen.family)))


if __name__ == "__main__":
    main()
