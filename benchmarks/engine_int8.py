"""Measure the error of int8 blocks on a trained model: attention outputs, logits and greedy tokens.

Requires the environment of the engines (``make install-engines``) and a model: ``--model`` names a folder with the packages of
``rig/trained_model.py``, or a checkpoint of a model of the Llama family. Without one, the error says how to get it.

The text is this repository's documentation. The model, in float32, computes the KV of a context. It then continues over three
copies of it: as computed, rounded to bfloat16 (what a store of 16-bit blocks returns), and stored and loaded as int8 blocks
with the project's own copier. int8 is compared with bfloat16. The peer is bfloat16 compared with float32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, kl_div, scaled_dot_product_attention

import harness
from harness import REPOSITORY, Figure, Options, Reference, Target
from kvclient.device.copier import DeviceCopier
from kvclient.device.int8 import ScaleGroups
from kvclient.device.layouts import PagedCache
from rig.trained_model import checkpoint

CONTINUED, GREEDY = 128, 64
"""Tokens after the context that are given, and that the model chooses."""
Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer: ``[1, heads, tokens, dim]``."""


@dataclass
class Errors:
    """Differences between two copies of a context's KV, one entry per text.

    Attributes:
        layers: per text, the error of attention outputs of each layer, as a part of their norm.
        divergence: mean KL divergence of the next token's distribution, in nats.
        perplexity: perplexity of the continuation, as a multiple of the reference's.
        same_choice: share of positions of the given continuation whose most likely token is the same.
        same_greedy: share of a greedy continuation before the first different token.
    """

    layers: list[list[float]] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    perplexity: list[float] = field(default_factory=list)
    same_choice: list[float] = field(default_factory=list)
    same_greedy: list[float] = field(default_factory=list)


class Bench:
    """A model that records its queries, and the texts."""

    def __init__(self, folder: Path | None) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(1)  # two would wait for each other if other programs run
        torch.manual_seed(0)
        self.queries: dict[int, torch.Tensor] = {}
        AttentionInterface.register("recorded", self._attend)
        if folder is None:  # smoke: any model
            config = LlamaConfig(
                vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=32, initializer_range=0.1, attn_implementation="recorded",
            )  # fmt: skip
            self.model: Any = LlamaForCausalLM(config).eval()
            self.name, self._ids = "random", torch.randint(0, 512, (1, 4096))
            return
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="recorded").eval()
        files = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
        self._ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
        config = self.model.config
        self.name = f"{config.num_hidden_layers} layers, {config.num_key_value_heads} KV heads x {config.head_dim}"

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: object,
        scaling: float,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Compute causal attention as transformers' ``AttentionInterface`` asks for it, and keep the queries."""
        self.queries[int(module.layer_idx)] = query  # type: ignore[arg-type]
        tokens, known = query.shape[2], key.shape[2]
        mask = None if tokens in {1, known} else torch.ones(tokens, known, dtype=torch.bool).tril(known - tokens)
        key, value = (some.repeat_interleave(query.shape[1] // some.shape[1], 1) for some in (key, value))
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=tokens == known > 1, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    def text(self, number: int, texts: int, tokens: int) -> torch.Tensor:
        """Return one of several parts of the documentation, ``[1, tokens]``."""
        start = (self._ids.shape[1] - tokens) * number // texts
        return self._ids[:, start : start + tokens]

    def prefill(self, ids: torch.Tensor) -> Layers:
        """Compute the KV of a context."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        self.model(ids, past_key_values=cache, logits_to_keep=1)
        return [(layer.keys, layer.values) for layer in cache.layers]

    def continued(self, copies: Layers, ids: torch.Tensor, greedy: int) -> tuple[torch.Tensor, list[list[int]]]:
        """Continue over copies of a context's KV, which are a batch.

        Args:
            copies: KV of the copies.
            ids: the given continuation, ``[1, tokens]``; its queries are kept.
            greedy: tokens that the model chooses after the first of these.

        Returns:
            The logits of the given continuation, ``[copies, tokens, vocabulary]``, and the chosen tokens of each copy.
        """
        from transformers import DynamicCache

        count = len(copies[0][0])
        cache, step, chosen = DynamicCache(list(copies)), ids[:, :1].expand(count, 1), []
        for _ in range(greedy):
            step = self.model(step, past_key_values=cache).logits.argmax(-1)
            chosen.append(step)
        logits: torch.Tensor = self.model(ids.expand(count, -1), past_key_values=DynamicCache(list(copies))).logits
        return logits, torch.cat(chosen, 1).tolist()


def compare(
    into: Errors, reference: int, other: int, copies: Layers, queries: dict[int, torch.Tensor], ids: torch.Tensor,
    continued: tuple[torch.Tensor, list[list[int]]],
) -> None:  # fmt: skip
    """Compare one copy of a context's KV with another.

    Args:
        into: receives the differences.
        reference: number of the copy that is compared with.
        other: number of the compared copy.
        copies: KV of all copies.
        queries: of each layer, for each copy.
        ids: the given continuation.
        continued: what the model made of it.
    """
    layers = []
    for layer, (keys, values) in enumerate(copies):
        query = queries[layer][reference : reference + 1]
        exact, ours = (attend(query, keys[at : at + 1], values[at : at + 1]) for at in (reference, other))
        layers.append(float((ours - exact).norm() / exact.norm()))
    into.layers.append(layers)
    logits, chosen = continued
    was, now = logits[reference], logits[other]
    losses = [float(cross_entropy(some[:-1], ids[0, 1:])) for some in (was, now)]
    into.perplexity.append(float(np.exp(losses[1] - losses[0])))
    into.divergence.append(float(kl_div(now.log_softmax(-1), was.log_softmax(-1), log_target=True, reduction="batchmean")))
    into.same_choice.append(float((was.argmax(-1) == now.argmax(-1)).float().mean()))
    equal = [one == two for one, two in zip(chosen[reference], chosen[other], strict=True)]
    into.same_greedy.append((equal.index(False) if False in equal else len(equal)) / len(equal))


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Compute the attention of queries over a whole context."""
    return scaled_dot_product_attention(query, keys, values, enable_gqa=True)


def rounded(context: Layers) -> Layers:
    """KV after a store of bfloat16 blocks."""
    return [(keys.bfloat16().float(), values.bfloat16().float()) for keys, values in context]


def stored(context: Layers, page_tokens: int) -> tuple[Layers, float]:
    """Return KV after a store of int8 blocks, and the bytes of a block as a part of those of a bfloat16 block."""
    layers = [torch.stack(kv)[:, 0].transpose(1, 2).bfloat16().unflatten(1, (-1, page_tokens)) for kv in context]
    cache = PagedCache([layer.contiguous() for layer in layers], "split")
    groups = ScaleGroups.along(cache.layers[0].tensor.shape[2:], cache.layers[0].order, 0)
    copier = DeviceCopier(cache, int8=groups)
    pages = copier.blocks(range(cache.pages))
    blocks = pages.gather()
    for layer in cache.layers:
        layer.tensor.zero_()
    pages.read_arena(blocks.reshape(-1).data, np.arange(cache.pages) * blocks.shape[1], 0, 0, len(layers))
    both = [layer.tensor.flatten(1, 2).transpose(1, 2).unsqueeze(1).float() for layer in cache.layers]
    return [(kv[0], kv[1]) for kv in both], copier.shape.block_bytes / (len(layers) * cache.row_bytes)


def measure(options: Options, bench: Bench, context: int, page_tokens: int) -> None:
    """Measure one length of the context."""
    ours, rounding, share = Errors(), Errors(), 0.0
    greedy = options.pick(full=GREEDY, quick=GREEDY, smoke=4)
    for number in range(options.repetitions):
        ids = bench.text(number, options.repetitions, context + CONTINUED)
        computed = bench.prefill(ids[:, :context])
        loaded, share = stored(computed, page_tokens)
        of_layer = zip(computed, rounded(computed), loaded, strict=True)
        copies = [(torch.cat(keys), torch.cat(values)) for keys, values in (zip(*kvs, strict=True) for kvs in of_layer)]
        continued = bench.continued(copies, ids[:, context:], greedy)
        compare(rounding, 0, 1, copies, bench.queries, ids[:, context:], continued)
        compare(ours, 1, 2, copies, bench.queries, ids[:, context:], continued)
    sizes: dict[str, harness.Parameter] = {"model": bench.name, "context": context, "page_tokens": page_tokens}
    by_layer = [statistics.median(layer) for layer in zip(*ours.layers, strict=True)]
    attention = (
        f"a sample per text; int8 blocks are {share:.3f} of the bytes; attention of {CONTINUED} continued tokens over the "
        f"context alone; medians of the layers: {', '.join(f'{error:.4f}' for error in by_layer)}"
    )
    for layer, pick in (("worst", max), ("mean", statistics.fmean)):
        options.keep(
            Figure(
                "int8_model_attention", "int8 blocks of a trained model: error of attention outputs",
                {**sizes, "layer": layer}, "of the norm", lower_is_better=True,
            ),
            [pick(layers) for layers in ours.layers],
            peer=Reference("rounding to bfloat16", [pick(layers) for layers in rounding.layers]),
            target=Target("value", 0.02),
            notes=attention,
        )  # fmt: skip
    given, chosen = f"{CONTINUED} given tokens after the context", f"{greedy} tokens chosen after the context"
    for name, title, unit, lower, notes in (
        ("divergence", "KL divergence of the next token", "nats", True, given),
        ("perplexity", "perplexity of the continuation", "× bfloat16's", True, given),
        ("same_choice", "most likely token is the same", "of the tokens", False, given),
        ("same_greedy", "greedy tokens before the first different one", "of the tokens", False, chosen),
    ):
        options.keep(
            Figure(f"int8_model_{name}", f"int8 blocks of a trained model: {title}", sizes, unit, lower_is_better=lower),
            getattr(ours, name),
            peer=Reference("rounding to bfloat16", getattr(rounding, name)),
            notes=f"{notes}; a sample per text",
        )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this script."""
    parser.add_argument(
        "--model", type=Path, default=REPOSITORY / ".trained-model", help="folder of the model (default .trained-model)"
    )
    parser.add_argument("--contexts", type=int, nargs="+", help="lengths of the context in tokens (default 1024 4096)")
    parser.add_argument("--page-tokens", type=int, default=16, help="tokens of a page (default 16)")


@torch.inference_mode()
def main() -> None:
    """Measure all lengths."""
    options = harness.options("engine_int8", __doc__, arguments=arguments)
    if find_spec("transformers") is None:
        sys.exit("transformers is not installed: this benchmark runs in the environment of the engines (make install-engines)")
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        folder: Path | None = options.extra.model
        if options.mode == "smoke":
            folder = None
        elif not (options.extra.model / "config.json").is_file():
            try:
                folder = checkpoint(options.extra.model, Path(scratch))
            except FileNotFoundError as error:
                sys.exit(str(error))
        bench = Bench(folder)
        for context in options.extra.contexts or options.pick(full=[1024, 4096], quick=[1024], smoke=[64]):
            measure(options, bench, context, options.extra.page_tokens)


if __name__ == "__main__":
    main()
