"""KV cache groups of a vLLM engine: which layers share a block table, and how a request is divided into pages.

vLLM allocates pages per group. All layers of a group have the same block table, and usually pages of one format (bytes and
dtype). If a group has pages of several formats (sparse attention with an indexer), each format is a *part* with the group's block
table. Every other group is one part. Lookups, loads and stores work on parts. The parts of one group have pages of equally many
tokens; those of different groups may differ.

A model whose state is not all in pages that are addressed by tokens (recurrent state, encoder attention) is refused: a hook that
restored a part of it would be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvclient import BlockKey, InvalidArgument

INSTEAD = "use KVStoreOffloadingConnector (kvclient.engines.vllm.tier) instead"
_NO_CONNECTOR = "run the engine without a connector"
"""For what vLLM's offloading does not support either."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """One part of a KV cache group: layers that share a block table and a page size.

    Attributes:
        layers: names of the layers, in order.
        block_tokens: tokens of a page.
        kind: kind of attention: ``full``, ``mla``, ``sliding:96`` (a window of 96 tokens), ``chunked:96`` (within chunks of 96
            tokens), or a window or chunk for which vLLM keeps all pages (``full:96``); several kinds are joined by ``+``.
        dtype: numbers in the pages.
        table: index of vLLM's group, which has the block table.
    """

    layers: tuple[str, ...]
    block_tokens: int
    kind: str
    dtype: str
    table: int = 0

    def first_needed(self, position: int) -> int:
        """Return the position of the first token that the attention of the token at ``position`` sees."""
        return min(_first_needed(one, position) for one in self.kind.split("+"))


def _first_needed(kind: str, position: int) -> int:
    """See ``GroupView.first_needed``. For ``full:96``, a window is assumed, which begins no later than a chunk."""
    name, _, size = kind.partition(":")
    if not size:
        return 0
    return position // int(size) * int(size) if name == "chunked" else max(0, position + 1 - int(size))


class GroupBlocks:
    """Divides a request into pages, if the pages of different parts may have different numbers of tokens.

    A request has one chain of keys, one key per ``key_tokens``: the tokens of the smallest page. The key of a page is that of its
    last tokens, so a larger page needs no hash of its own. The connector counts in *blocks* of ``block_tokens``: at the end of a
    block, every part has a whole page. If all pages have equally many tokens, key, page and block are the same.

    Args:
        page_tokens: tokens of a page, per part.
        tables: index of the block table, per part; None: each part has its own.

    Raises:
        InvalidArgument: the smallest page does not divide the others.
    """

    def __init__(self, page_tokens: Sequence[int], tables: Sequence[int] | None = None) -> None:
        self.tables: Sequence[int] = tuple(tables) if tables is not None else range(len(page_tokens))
        self.page_tokens = tuple(page_tokens)
        self.key_tokens = min(page_tokens)
        self.block_tokens = math.lcm(*page_tokens)
        if any(size % self.key_tokens for size in page_tokens):
            raise InvalidArgument(
                f"page sizes that are not multiples of the smallest one are not supported: {INSTEAD}",
                block_sizes=sorted(set(page_tokens)),
            )

    @property
    def has_equal_pages(self) -> bool:
        """Whether all pages have the same number of tokens."""
        return self.key_tokens == self.block_tokens

    @property
    def keys_per_block(self) -> int:
        """Number of keys of a block."""
        return self.block_tokens // self.key_tokens

    def pages_per_block(self, part: int) -> int:
        """Return the number of a part's pages in a block."""
        return self.block_tokens // self.page_tokens[part]

    def page_keys(self, part: int, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Return the keys of a part's pages. ``keys`` are keys of the chain that begin at a block."""
        each = self.page_tokens[part] // self.key_tokens
        return keys if each == 1 else keys[each - 1 :: each]

    def pages(self, part: int, table_pages: Sequence[Sequence[int]], first: int, stop: int | None) -> list[int]:
        """Return the page ids of blocks ``[first, stop)`` of a part; None: of all later ones.

        Args:
            part: index of the part.
            table_pages: page ids of a request, per block table.
            first: position of the first block.
            stop: position after the last block.
        """
        each = self.pages_per_block(part)
        return list(table_pages[self.tables[part]][first * each : None if stop is None else stop * each])


def read_groups(vllm_config: Any, kv_cache_config: Any) -> list[GroupView]:  # noqa: ANN401  # vLLM's types
    """Return the parts of an engine's KV cache groups.

    Raises:
        InvalidArgument: the connector cannot serve this model or this way of running it.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise InvalidArgument(
                "context parallelism is not supported, since it spreads the tokens of a page over ranks: use tensor parallelism",
                option=name,
            )
    check_causal(kv_cache_config)
    groups = [part for table, group in enumerate(kv_cache_config.kv_cache_groups) for part in _parts(table, group)]
    if not groups:
        raise InvalidArgument("models without a KV cache are not supported: run the engine without a connector")
    group_blocks(groups)
    return groups


def check_causal(kv_cache_config: Any) -> None:  # noqa: ANN401
    """Check that the KV of a block depends on no later tokens, as its key does not.

    Raises:
        InvalidArgument: it does, in some layer.
    """
    from vllm.v1 import kv_cache_interface as interface

    for group in kv_cache_config.kv_cache_groups:
        for spec in _layer_specs(group).values():
            if getattr(spec, "non_causal", False):
                raise InvalidArgument(
                    f"attention to later tokens of a prompt (prefix LM) is not supported: {_NO_CONNECTOR}",
                    kind=type(spec).__name__,
                )
            if isinstance(spec, interface.RSWASpec):
                raise InvalidArgument(
                    f"windows over the answer alone (R-SWA) are not supported: {_NO_CONNECTOR}", kind=type(spec).__name__
                )


def group_blocks(groups: Sequence[GroupView]) -> GroupBlocks:
    """Return how the pages of these parts divide a request.

    Raises:
        InvalidArgument: the smallest page does not divide the others.
    """
    return GroupBlocks([group.block_tokens for group in groups], [group.table for group in groups])


def check_handoffs(groups: Sequence[GroupView]) -> None:
    """Check that a prefill engine can hand prompts of this model over.

    Raises:
        InvalidArgument: pages with different numbers of tokens, or of several formats in one group.
    """
    sizes = sorted({group.block_tokens for group in groups})
    if len(sizes) > 1:
        raise InvalidArgument(
            "handoffs of models whose pages have different numbers of tokens are not supported: use KVStoreConnector instead",
            block_sizes=sizes,
        )
    if len({group.table for group in groups}) < len(groups):
        raise InvalidArgument(
            "handoffs of KV cache groups with pages of several formats are not supported: use KVStoreConnector instead",
            parts=len(groups),
        )


def check_stages(tables: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the block table of each part, given those of all workers, which must be the same.

    Raises:
        InvalidArgument: a worker has no layer of some part.
    """
    if any(one != tables[0] for one in tables):
        raise InvalidArgument(
            "pipeline stages without a layer of some KV cache group are not supported: lower pipeline_parallel_size, or use"
            " tensor parallelism instead",
            parts_by_worker=list(tables),
        )
    return tables[0]


def _parts(table: int, group: Any) -> Iterator[GroupView]:  # noqa: ANN401
    """Yield the parts of a group: its layers by the shape and dtype of a page."""
    layers: dict[Any, dict[str, Any]] = {}
    for name, spec in _layer_specs(group).items():
        layers.setdefault(_page_format(spec), {})[name] = spec
    for (_, dtype), specs in layers.items():
        kinds = "+".join(sorted({_kind(spec) for spec in specs.values()}))
        yield GroupView(tuple(specs), group.kv_cache_spec.block_size, kinds, dtype, table)


def _layer_specs(group: Any) -> Mapping[str, Any]:  # noqa: ANN401
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs  # heavy, and there is none in most processes

    spec = group.kv_cache_spec
    specs = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else dict.fromkeys(group.layer_names, spec)
    return {name: specs[name] for name in group.layer_names}


def _page_format(spec: Any) -> tuple[Any, str]:  # noqa: ANN401
    """Return the shape of a page, None if vLLM's description has none, and its dtype."""
    from vllm.v1.kv_cache_interface import AttentionSpec, compute_layer_kv_cache_shape_bytes

    shape = compute_layer_kv_cache_shape_bytes(spec, 1) if isinstance(spec, AttentionSpec) else None
    return shape, str(getattr(spec, "dtype", "")).removeprefix("torch.")


def _kind(spec: Any) -> str:  # noqa: ANN401
    """Return the kind of attention of a layer."""
    from vllm.v1 import kv_cache_interface as interface

    mode = getattr(spec, "kv_quant_mode", interface.KVQuantMode.NONE)
    in_pages = mode in {interface.KVQuantMode.NONE, interface.KVQuantMode.FP8_PER_TENSOR} or mode.is_per_token_head
    if not in_pages:
        raise InvalidArgument(
            "this quantization of the KV cache is not supported: use another kv_cache_dtype, such as fp8", mode=mode.name.lower()
        )
    plain = (interface.FullAttentionSpec, interface.MLAAttentionSpec)
    if type(spec) in plain:
        window = spec.sliding_window or spec.attention_chunk_size or 0
        return f"{'mla' if isinstance(spec, interface.MLAAttentionSpec) else 'full'}{f':{window}' if window else ''}"
    if type(spec) is interface.SlidingWindowSpec:
        return f"sliding:{spec.sliding_window}"
    if type(spec) is interface.ChunkedLocalAttentionSpec:
        return f"chunked:{spec.attention_chunk_size}"
    feature = _FEATURES.get(interface.get_kv_cache_spec_kind(spec).value, type(spec).__name__)
    instead = _NO_CONNECTOR if isinstance(spec, interface.EncoderOnlyAttentionSpec | interface.CrossAttentionSpec) else INSTEAD
    raise InvalidArgument(f"{feature} is not supported: {instead}", kind=type(spec).__name__)


_FEATURES = {
    "mamba": "recurrent state (Mamba, linear attention, short convolutions)",
    "sliding_window_mla": "latent attention with sliding windows",
    "sink_full_attention": "full attention with sink pages",
    "encoder_only_attention": "encoder attention",
    "cross_attention": "cross attention",
}
