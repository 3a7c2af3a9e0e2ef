"""LoRA adapters with random weights for tiny models, and the merge of an adapter into a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 8, 16
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."


def make_adapter(model: Path, folder: Path, seed: int) -> None:
    """An adapter of the attention with random weights."""
    config = json.loads((model / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    rows = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, out in rows.items():
            module = f"{_PREFIX}model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) * 0.3
            tensors[f"{module}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * 0.3
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / _WEIGHTS)
    kind = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(rows),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / _CONFIG).write_text(json.dumps(kind))


def merge_adapter(model: Any, folder: Path) -> None:
    """Adds an adapter's weights to those of a model of transformers."""
    tensors = load_file(folder / _WEIGHTS)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, first in tensors.items():
            if name.endswith(".lora_A.weight"):
                module = name.removesuffix(".lora_A.weight")
                weights[f"{module.removeprefix(_PREFIX)}.weight"] += ALPHA / RANK * tensors[f"{module}.lora_B.weight"] @ first
