"""Block keys of a request, computed from its token ids, adapter, images and salt as blocks fill.

Each request has one chain, that of ``namespaces.chain_spec``. A component that knows the tokens (a router) can compute the same
chain. A mask turns its keys into those of other groups and shards. So nothing is hashed twice and no key is in two namespaces.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from kvclient import BlockKey, KeyChain, encode_extra
from kvclient.engines.vllm.identity.adapters import AdapterWeights


class VllmRequest(Protocol):
    """The fields of vLLM's ``Request`` that this module uses."""

    request_id: str
    num_computed_tokens: int
    num_preemptions: int
    num_prompt_tokens: int
    num_tokens: int
    all_token_ids: Sequence[int]
    mm_features: Sequence[Any]
    lora_request: Any
    cache_salt: str | None
    prompt_embeds: Any
    resumable: bool
    skip_reading_prefix_cache: bool


def is_hashable(request: VllmRequest, adapter: AdapterWeights | None, *, media_named: bool = True) -> bool:
    """Check whether tokens and extras determine the KV of a request.

    They do not for embeddings in place of tokens, for an adapter with unknown weights, or for media without names.

    Args:
        request: vLLM's request.
        adapter: the weights of its adapter, if they are known.
        media_named: see ``engine_facts.are_media_named``.
    """
    if request.prompt_embeds is not None or (request.lora_request is not None and adapter is None):
        return False
    return media_named or not may_have_media(request)


def may_have_media(request: Any) -> bool:  # noqa: ANN401
    """Whether a request has media, or may still receive them: a streamed input."""
    return bool(request.mm_features or request.resumable)


def request_extras(request: VllmRequest, adapter: AdapterWeights | None, block_tokens: int) -> dict[int, bytes]:
    """Return all inputs of a request's blocks besides tokens, by position of the block; empty for most requests.

    The adapter (with its weights) and the salt enter the first block, and all later ones through the chain. An image enters each
    block that it overlaps, with its position there.

    Args:
        request: a request for which ``is_hashable`` is true.
        adapter: the weights of its adapter, if it has one.
        block_tokens: tokens per block.
    """
    parts: dict[int, list[tuple[str, bytes]]] = {}
    lora = request.lora_request
    if lora is not None:
        named = ("lora", lora.lora_name), ("lora-path", lora.lora_path), ("lora-weights", adapter.digest if adapter else "")
        parts.setdefault(0, []).extend((name, value.encode()) for name, value in named)
    if request.cache_salt:
        parts.setdefault(0, []).append(("salt", request.cache_salt.encode()))
    for feature in request.mm_features:
        offset, length = feature.mm_position.offset, feature.mm_position.length
        identity = str(feature.identifier).encode()
        for block in range(offset // block_tokens, -(-(offset + length) // block_tokens)):
            place = (offset - block * block_tokens).to_bytes(8, "little", signed=True)
            parts.setdefault(block, []).append(("mm", place + identity))
    return {block: encode_extra(pairs) for block, pairs in parts.items()}


class RequestKeys:
    """The keys of one request's full blocks, extended as tokens arrive. Thread-safe.

    vLLM does not wait for a lookup if a request reads no prefix. It then plans stores of a request while the lookup is still
    computing its keys.

    Args:
        chain: computes the keys.
        extras: see ``request_extras``.
    """

    def __init__(self, chain: KeyChain, extras: Mapping[int, bytes]) -> None:
        self._chain = chain
        self._extras = extras
        self._block_tokens = chain.spec.block_tokens
        self._lock = threading.Lock()
        self._keys: list[BlockKey] = []

    def renew_extras(self, extras: Mapping[int, bytes]) -> None:
        """Replace the extras: those of blocks whose keys are known are the same."""
        with self._lock:
            self._extras = extras

    def upto(self, tokens: Sequence[int], blocks: int) -> list[BlockKey]:
        """Return the first ``blocks`` keys of the chain, or as many as ``tokens`` has full blocks."""
        with self._lock:
            have = len(self._keys)
            blocks = min(blocks, len(tokens) // self._block_tokens)
            if blocks > have:
                new = np.asarray(tokens[have * self._block_tokens : blocks * self._block_tokens], np.int64)
                parent = self._keys[-1] if have else None
                self._keys += self._chain.keys(new, extras=self._extras, parent=parent, first_block=have)
            return self._keys[:blocks]

    def tail(self, tokens: Sequence[int]) -> BlockKey:
        """Return the key of the partial last block of a prompt; see ``KeyChain.tail``."""
        full = len(tokens) // self._block_tokens
        before = self.upto(tokens, full)
        rest = np.asarray(tokens[full * self._block_tokens :], np.int64)
        return self._chain.tail(rest, before[-1] if before else None, self._extras.get(full, b""))
