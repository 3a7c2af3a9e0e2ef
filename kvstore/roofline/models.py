"""Models by their cost: FLOP per token, FLOP per pair of query and context token, KV bytes per token."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from kvstore.core.errors import NotFound
from kvstore.recompute.prefill_estimate import pairs


@dataclass(frozen=True, slots=True)
class Attention:
    """Cost of one query token in one layer, and the bytes that the layer keeps per token.

    Attributes:
        pair_flops: FLOP per attended context token.
        kv_bytes: bytes kept per token (keys and values, or the latent).
        top_tokens: maximum number of attended context tokens (chosen by the indexer); None: all.
        index_flops: FLOP of the indexer per context token, attended or not.
        index_bytes: bytes kept per token for the indexer.
    """

    pair_flops: float
    kv_bytes: int
    top_tokens: int | None = None
    index_flops: float = 0.0
    index_bytes: int = 0

    def flops(self, cached: int, new: int) -> float:
        """Return the FLOP of ``new`` query tokens after ``cached`` context tokens, with causal attention among the new ones."""
        compared = pairs(cached, new)
        attended = compared if self.top_tokens is None else min(compared, float(new) * self.top_tokens)
        return self.pair_flops * attended + self.index_flops * compared

    def read_bytes(self, context: int) -> float:
        """Return the bytes that decoding one token after ``context`` tokens reads."""
        attended = context if self.top_tokens is None else min(context, self.top_tokens)
        return self.kv_bytes * attended + self.index_bytes * context


def grouped(heads: int, kv_heads: int, head_size: int, element_bytes: int) -> Attention:
    """Grouped-query attention: products with keys and with values, 2 FLOP per element each."""
    return Attention(pair_flops=4 * heads * head_size, kv_bytes=2 * kv_heads * head_size * element_bytes)


def latent(heads: int, index_heads: int, index_size: int, top_tokens: int, element_bytes: int = 1) -> Attention:
    """DeepSeek's latent attention: 512 + 64 elements a token, absorbed, made sparse by an indexer (a one-byte key a token)."""
    return Attention(
        pair_flops=heads * (2 * (512 + 64) + 2 * 512),
        kv_bytes=(512 + 64) * element_bytes,
        top_tokens=top_tokens,
        index_flops=2 * index_heads * index_size,
        index_bytes=index_size,
    )


@dataclass(frozen=True, slots=True)
class Model:
    """One model.

    Attributes:
        name: as named on the command line.
        layers: transformer layers, all taken to be alike.
        active_parameters: that each token is multiplied with.
        parameters: all.
        shared_parameters: of a mixture of experts, those that every GPU holds (all but the routed experts).
        weight_bytes: bytes a parameter; one: products run in FP8.
        attention: of each layer.
        experts, experts_active: routed experts of a layer, and how many of them a token uses; 0 for dense models.
        hidden: width of a token's state between layers, which experts exchange; 0 for dense models.
        tensor_parallel: GPUs an engine, by default.
        prefill_nodes, decode_nodes: the default cluster.
        stage_bytes: host memory a node for staging, as in the published evaluation.
    """

    name: str
    layers: int
    active_parameters: float
    parameters: float
    attention: Attention
    weight_bytes: float = 2.0
    shared_parameters: float = 0.0
    experts: int = 0
    experts_active: int = 0
    hidden: int = 0
    tensor_parallel: int = 1
    prefill_nodes: int = 1
    decode_nodes: int = 1
    stage_bytes: float = 80e9

    @property
    def expert_parallel(self) -> bool:
        """Whether experts are spread over the GPUs of a group, which then compute in step."""
        return self.experts > 0

    @property
    def layer_token_bytes(self) -> int:
        """KV bytes per token and layer."""
        return self.attention.kv_bytes + self.attention.index_bytes

    @property
    def token_bytes(self) -> int:
        """KV bytes per token."""
        return self.layers * self.layer_token_bytes

    def linear_flops(self, tokens: float) -> float:
        """Return the FLOP of the products with weights."""
        return 2 * self.active_parameters * tokens

    def routed_flops(self, tokens: float) -> float:
        """Return the FLOP of the routed experts, which run on any GPU of the group; 0 for dense models."""
        return 2 * (self.active_parameters - self.shared_parameters) * tokens if self.expert_parallel else 0.0

    def own_flops(self, cached: int, new: int) -> float:
        """Return the FLOP of prefill that run on the engine of the request: all but the routed experts."""
        return self.prefill_flops(cached, new) - self.routed_flops(new)

    def attention_flops(self, cached: int, new: int) -> float:
        """Return the FLOP of attention over all layers."""
        return self.layers * self.attention.flops(cached, new)

    def prefill_flops(self, cached: int, new: int) -> float:
        """Return the FLOP to compute ``new`` tokens after ``cached`` ones."""
        return self.linear_flops(new) + self.attention_flops(cached, new)

    def exchange_bytes(self, tokens: float, copies: float) -> float:
        """Return the bytes that leave a host to dispatch ``tokens`` to experts on other hosts and to combine the results.

        A dispatched element is one byte and a returned one two, as in DeepEP.

        Args:
            tokens: of this host.
            copies: of each token that leave the host, per layer.
        """
        return 3.0 * self.hidden * self.layers * copies * tokens

    def context_bytes(self, cached: int, new: int) -> float:
        """Return the KV bytes that attention over all layers reads at least, for ``new`` tokens after ``cached`` ones."""
        top = self.attention.top_tokens
        attended = cached if top is None else min(cached, top * new)
        return self.layers * (self.attention.kv_bytes * attended + self.attention.index_bytes * cached)

    def bytes_per_pflop(self, cached: int, new: int) -> float:
        """KV bytes to load for each 1e15 FLOP of prefill: how much storage bandwidth this model asks for."""
        return self.token_bytes * cached / (self.prefill_flops(cached, new) / 1e15)


MODELS = MappingProxyType(
    {
        model.name: model
        for model in (
            Model("llama-3-8b", 32, 7.5e9, 8.0e9, grouped(32, 8, 128, 2)),
            Model("llama-2-70b", 80, 68.7e9, 69.0e9, grouped(64, 8, 128, 2), tensor_parallel=4),
            Model(
                "qwen2.5-32b",
                64,
                32.0e9,  # 31.0e9 without embeddings, and the head
                32.5e9,
                grouped(40, 8, 128, 2),
                tensor_parallel=2,  # 80 GB hold the weights of one, and no request beside them
                decode_nodes=2,
                stage_bytes=320e9,
            ),
            Model("qwen3-235b", 94, 22e9, 235e9, grouped(64, 4, 128, 1), 1.0, 8e9, 128, 8, 4096, prefill_nodes=1, decode_nodes=2),
            # latent attention that reads everything: the same model as ds-660b before it had an indexer
            Model(
                "ds-v3",
                61,
                37e9,
                671e9,
                Attention(pair_flops=128 * (2 * 576 + 2 * 512), kv_bytes=656),
                1.0,
                17e9,
                256,
                8,
                7168,
                prefill_nodes=2,
                decode_nodes=4,
            ),
            Model(
                "ds-660b", 61, 37e9, 671e9, latent(128, 64, 128, 2048), 1.0, 17e9, 256, 8, 7168, prefill_nodes=2, decode_nodes=4
            ),
            # Parameters counted from the published shape: hidden 2560, 30 layers of latent attention (37e6, no query latent),
            # 72 routed experts of 3 * 2560 * 1536 of which 6 are used, 2 shared ones, and one dense layer of the size of 8.
            Model("ds-27b", 30, 4.1e9, 27e9, latent(32, 32, 64, 1024), 1.0, 2.4e9, 72, 6, 2560),
            Model(
                "ds-660b-bf16",
                61,
                37e9,
                671e9,
                latent(128, 64, 128, 2048, 2),
                1.0,
                17e9,
                256,
                8,
                7168,
                prefill_nodes=2,
                decode_nodes=4,
            ),
            Model("ds-27b-bf16", 30, 4.1e9, 27e9, latent(32, 32, 64, 1024, 2), 1.0, 2.4e9, 72, 6, 2560),
        )
    }
)


def model_named(name: str) -> Model:
    """Return a model of the catalog.

    Raises:
        NotFound: there is none of that name.
    """
    if name not in MODELS:
        raise NotFound(f"no model '{name}'; there are: {', '.join(MODELS)}")
    return MODELS[name]
