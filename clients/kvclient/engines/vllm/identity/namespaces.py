"""Which namespaces an engine's pages belong to: one per part of a KV cache group (``kv_groups``) and shard.

Two engines share a namespace exactly if a page of one is a page of the other: same model, weights epoch and numbers in the page,
same attention backend and kernel layout, same minor version of vLLM, same layers, same shard. A namespace too many costs a miss;
one too few would cost wrong tokens; so whatever might make bytes differ is in the name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvclient import CacheSpec
from kvclient.engines.options import HookOptions

_DIGEST_CHARS = 16
_FAMILY = "vllm"
LAYOUT_VERSION = 1
"""Version of this package's block layout: layers of a group in model order, each a whole page."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Facts of one part of a KV cache group in one worker.

    Attributes:
        model: the engine's name of the model.
        model_digest: of the model's configuration: what the same name may hide (another revision, overrides, quantization).
        dtype: dtype of the pages.
        block_tokens: tokens per page.
        layers: names of the layers, in order.
        page_bytes: bytes of a page of one layer in the store.
        page_shape: axes of a page.
        page_order: order of these axes in memory, outermost first; empty: the same.
        codec: name of the encoding of stored blocks, which begins with its dtype (``int8-…``); empty: the pages' own bytes.
        kind: kind of attention, e.g. ``full`` or ``sliding:512``.
        backend: attention backend.
        isa: which of the backend's kernels: on CPUs it decides the order of bytes in a page.
        engine: the engine's minor version, e.g. ``0.32``.
        shard_rank: index of the part of the heads.
        shard_count: number of parts. Ranks that hold the same bytes have the same shard.
    """

    model: str
    model_digest: str
    dtype: str
    block_tokens: int
    layers: tuple[str, ...]
    page_bytes: int
    page_shape: tuple[int, ...]
    kind: str
    backend: str
    isa: str
    engine: str
    shard_rank: int = 0
    shard_count: int = 1
    page_order: tuple[int, ...] = ()
    codec: str = ""

    @property
    def layout(self) -> str:
        """Readable layout of the namespace, different whenever page bytes may differ."""
        return ";".join(
            (
                f"{_FAMILY}={self.engine}",
                f"attention={self.backend}",
                f"isa={self.isa}",
                f"page={'x'.join(map(str, self.page_shape))}",
                f"kind={self.kind}",
                f"layers={len(self.layers)}:{digest(self.layers)}",
                f"config={self.model_digest}",
                *((f"order={'.'.join(map(str, self.page_order))}",) if self.page_order else ()),
                *((f"stored={self.codec}",) if self.codec else ()),
            )
        )


def group_spec(options: HookOptions, facts: GroupFacts) -> CacheSpec:
    """Return the namespace of one group and shard.

    Raises:
        InvalidArgument: invalid fields.
    """
    return options.spec(
        facts.model,
        block_tokens=facts.block_tokens,
        layers=len(facts.layers),
        layer_block_bytes=facts.page_bytes,
        dtype=facts.codec.partition("-")[0] or facts.dtype,
        layout=facts.layout,
        layout_version=LAYOUT_VERSION,
        shard_rank=facts.shard_rank,
        shard_count=facts.shard_count,
    )


def chain_spec(groups: Sequence[CacheSpec]) -> CacheSpec:
    """Return the namespace whose chain makes the keys of a request for all groups and shards.

    It is the first shard of the first group with the smallest pages; see ``GroupBlocks``.
    """
    return replace(min(groups, key=lambda spec: spec.block_tokens), shard_rank=0)


def digest(value: Mapping[str, Any] | Sequence[str]) -> str:
    """Return a short digest of plain values, equal in every process."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]
