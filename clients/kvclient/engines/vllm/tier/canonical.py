"""vLLM's canonical layout of chunks: all heads of a page in one order, for any tensor parallelism.

vLLM derives the places of each rank's bytes in a canonical page, and refuses layouts that it does not know. A
page of a CPU is divided by heads first. The attention kernel orders only the bytes within a head, so heads may be moved, and the
kernel's name stays in the namespace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvclient import InvalidArgument

_Offsets = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class CanonicalChunk:
    """Content of a chunk in the canonical layout, equal for all ranks and for any tensor parallelism.

    Attributes:
        nbytes: of a chunk.
        layers: by layer of all offloaded groups: name, memory that it shares, kind, order of heads and tokens, and bytes.
    """

    nbytes: int
    layers: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class PageCopy:
    """How the pages of one layer are copied to and from chunks.

    Attributes:
        tensor: index of the tensor that holds the pages.
        pieces: offsets in a page, offsets in a chunk's block, and bytes of each piece.
        writers: ranks that hold these bytes and take turns to store them.
        writer: index of this rank among them.
    """

    tensor: int
    pieces: Sequence[tuple[_Offsets, _Offsets, int]]
    writers: int = 1
    writer: int = 0

    @classmethod
    def of(cls, ref: Any, *, canonical: bool) -> PageCopy:  # noqa: ANN401
        """Return the copy of one of vLLM's ``CanonicalKVCacheRef``."""
        if not canonical:
            start = np.zeros(1, np.uint64)
            return cls(int(ref.tensor_idx), [(start, start, int(ref.page_size_bytes))])
        pieces = []
        for run in ref.mapping.runs:
            steps = np.arange(run.num_fragments, dtype=np.uint64)
            pages = np.uint64(run.local_offset) + steps * np.uint64(run.local_stride)
            chunks = np.uint64(run.canonical_offset) + steps * np.uint64(run.canonical_stride)
            pieces.append((pages, chunks, int(run.fragment_size)))
        return cls(int(ref.tensor_idx), pieces, int(ref.mapping.num_writers), int(ref.mapping.writer_index))


def canonical_chunk(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any], config: Any) -> CanonicalChunk:  # noqa: ANN401
    """Describe a chunk in the canonical layout.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's configuration of the KV cache.
        kv_caches: by layer: its tensor.
        config: vLLM's ``OffloadingConfig``.

    Raises:
        InvalidArgument: vLLM cannot map the pages of a layer.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import derive_canonical_mappings

    mappings = derive_canonical_mappings(vllm_config, kv_cache_config, kv_caches)
    heads = vllm_config.model_config.get_total_num_kv_heads()
    sizes: dict[int, int] = {}
    layers = []
    for group in config.groups:
        spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        for name in group.layer_names:
            own, cache = getattr(spec, "kv_cache_specs", {}).get(name, spec), kv_caches[name]
            if name not in mappings:
                raise InvalidArgument(
                    "pages of this layout cannot be canonical: remove canonical_layout, or set VLLM_KV_CACHE_LAYOUT to LBNHC",
                    layer=name,
                )
            size = mappings[name].canonical_page_size_bytes
            sizes[cache.data_ptr()] = max(size, sizes.get(cache.data_ptr(), 0))
            shared = str(list(sizes).index(cache.data_ptr()))
            layers.append((name, shared, repr(_whole(own, heads)), _order(cache), str(cache.dtype), str(size)))
    return CanonicalChunk(sum(sizes.values()) * config.cache.blocks_per_chunk, layers)


def _whole(spec: Any, heads: int) -> Any:  # noqa: ANN401
    """Return a layer's specification without tensor parallelism. Padding of pages is not in chunks."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    changes = {"page_size_padded": None, "num_kv_heads": heads}
    if isinstance(spec, MLAAttentionSpec):  # each rank holds all of a latent
        del changes["num_kv_heads"]
    known = {field.name for field in fields(spec) if field.init}
    return replace(spec, **{name: value for name, value in changes.items() if name in known})


def _order(cache: Any) -> str:  # noqa: ANN401
    """Return whether tokens or heads are outermost in a page, by the rule of vLLM's mapping."""
    shape, strides = cache.shape, cache.stride()
    if len(shape) == 4:  # page, head, token, K and V
        return "tokens" if strides[1] <= strides[2] else "heads"
    if len(shape) == 5:  # page, K or V, token, head, element
        return "halves tokens" if strides[3] <= strides[2] else "halves heads"
    return "latents"


def block_bytes(refs_by_group: Sequence[Sequence[Any]], tensors: int) -> list[int]:
    """Return by tensor: bytes of a canonical page. ``refs_by_group``: vLLM's ``CanonicalKVCacheRef`` of each group."""
    sizes = [0] * tensors
    for refs in refs_by_group:
        for ref in refs:
            sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], int(ref.mapping.canonical_page_size_bytes))
    return sizes
