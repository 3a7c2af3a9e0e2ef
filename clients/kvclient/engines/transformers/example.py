"""Attention with a KV cache as in the textbook, and a store that keeps the cache between processes. Only torch is needed.

    kvstore up &                                             # a store on this machine
    python -m kvclient.engines.transformers.example          # prefill, decode, store
    python -m kvclient.engines.transformers.example          # another process: most of the prefill is loaded

The model fits on a page: token embeddings, a few layers of causal self-attention and an output head. Its random weights have a
fixed seed, so they are equal in every process. The steps are those of any decoder: *prefill* computes keys and values of the
whole prompt at once; each *decode* step computes them for one token, appends them to the cache and attends to all of it. Keys and
values of a token never change once computed, so those of a prompt seen before can be loaded instead.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.functional import softmax

from kvclient import KVClient
from kvclient.engines.torch_blocks import KV, KVLayout, LayerShape, export_blocks, import_blocks


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of the model."""

    vocab: int = 256
    layers: int = 4
    heads: int = 4
    head_dim: int = 32
    positions: int = 8192

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim


class CausalAttention(nn.Module):
    """Causal self-attention that keeps the keys and values of all previous tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor, past: KV | None) -> tuple[torch.Tensor, KV]:
        """Compute the attention of new tokens to all tokens.

        Args:
            x: new tokens, ``[batch, new, width]``.
            past: keys and values of the previous tokens, ``[batch, heads, past, head_dim]`` each.

        Returns:
            The new tokens' output ``[batch, new, width]``, and keys and values of all, ``[batch, heads, past + new, head_dim]``.
        """
        queries, keys, values = (self._split(project(x)) for project in (self.query, self.key, self.value))
        if past is not None:
            keys, values = torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)
        new, total = queries.shape[2], keys.shape[2]
        scores = queries @ keys.transpose(2, 3) / math.sqrt(self.shape.head_dim)  # [batch, heads, new, total]
        future = torch.ones(new, total, dtype=torch.bool).triu(total - new + 1)  # token i attends to itself and to earlier tokens
        mixed = softmax(scores.masked_fill(future, -math.inf), -1) @ values
        output: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output, (keys, values)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape ``[batch, new, width]`` to ``[batch, heads, new, head_dim]``."""
        return x.view(*x.shape[:2], self.shape.heads, self.shape.head_dim).transpose(1, 2)


class Decoder(nn.Module):
    """A stack of attention layers over token and position embeddings."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(shape.positions, shape.width)
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(shape.layers))
        self.attentions = nn.ModuleList(CausalAttention(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    @torch.no_grad()
    def forward(self, ids: torch.Tensor, cache: list[KV]) -> tuple[torch.Tensor, list[KV]]:
        """Feed new tokens.

        Args:
            ids: ``[1, new]``.
            cache: keys and values of each layer so far; empty at the start.

        Returns:
            Logits of the next token, ``[vocab]``, and the extended cache.
        """
        past = cache[0][0].shape[2] if cache else 0
        x = self.tokens(ids) + self.positions(torch.arange(past, past + ids.shape[1]))
        grown = []
        for number, (norm, attention) in enumerate(zip(self.norms, self.attentions, strict=True)):
            output, kv = attention(norm(x), cache[number] if cache else None)
            x = x + output
            grown.append(kv)
        return self.head(x[0, -1]), grown


def answer(model: Decoder, client: KVClient, layout: KVLayout, prompt: torch.Tensor, steps: int) -> torch.Tensor:
    """Decode greedily after a prompt ``[1, tokens]``, print progress and return the new tokens ``[steps]``."""
    # Look up and load all full blocks before the last token, whose logits are required.
    keys = client.keys(prompt[0, :-1].numpy().astype(np.uint32))
    lookup = client.lookup(keys)
    memory = layout.allocate(lookup.hit_blocks)
    hit = client.load(lookup, memory).hit_blocks
    cache = import_blocks(memory[:hit], layout) if hit else []
    print(f"store:   {hit} of {len(keys)} blocks loaded, {hit * layout.block_tokens} of {prompt.shape[1]} tokens")

    # Prefill: compute the tokens that the store did not have, in one pass.
    begin_s = time.perf_counter()
    logits, cache = model(prompt[:, hit * layout.block_tokens :], cache)
    print(
        f"prefill: {prompt.shape[1] - hit * layout.block_tokens} tokens in {(time.perf_counter() - begin_s) * 1e3:.1f} ms; "
        f"keys and values of each layer {list(cache[0][0].shape)}"
    )

    # Decode: one token per step, appended to the cache.
    tokens = []
    for step in range(steps):
        token = logits.argmax().view(1, 1)
        tokens.append(token)
        logits, cache = model(token, cache)
        if step < 3 or step == steps - 1:
            print(f"decode:  step {step}: token {token.item()}, cache {list(cache[0][0].shape)}")

    # Store the new full blocks of prompt and answer.
    fed = torch.cat([prompt, *tokens], 1)[0].numpy().astype(np.uint32)
    keys = client.keys(fed)
    blocks = export_blocks(cache, layout, first_token=hit * layout.block_tokens)
    stored = client.store(keys[hit:], blocks, parent=keys[hit - 1] if hit else None, depth=hit)
    print(f"store:   {stored.held_blocks} blocks of {layout.block_bytes} bytes stored")
    return torch.cat(tokens, 1)[0]


def main() -> None:
    """Run the example once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--metadata", default="127.0.0.1:7400", help="address of the metadata server")
    parser.add_argument("--node", default="auto", help="this host's node: unix:/path, host:port, auto or none")
    parser.add_argument("--tokens", type=int, default=2000, help="length of the prompt")
    parser.add_argument("--steps", type=int, default=20, help="tokens to decode")
    given = parser.parse_args()
    shape = Shape()
    model = Decoder(shape).eval()
    layout = KVLayout(32, torch.float32, (LayerShape(shape.heads, shape.head_dim, shape.heads, shape.head_dim),) * shape.layers)
    prompt = torch.randint(0, shape.vocab, (1, given.tokens), generator=torch.Generator().manual_seed(1))
    node = None if given.node == "none" else given.node
    with KVClient.connect(given.metadata, layout.spec("textbook decoder, seed 0"), node=node) as client:
        tokens = answer(model, client, layout, prompt, given.steps)
        client.flush()
    print("answer: ", " ".join(map(str, tokens.tolist())))


if __name__ == "__main__":
    main()
