"""Estimates about a prompt before it is placed: its length, and how much of it each engine has in cache.

There are two sources. The router remembers which engine saw which text recently (the engine's HBM). The store's index knows the
blocks in the DRAM of an engine's host, and those in the HBM of engines that publish their cache; it works on tokens, so an engine
is asked for them, within a short timeout. What an engine publishes replaces the memory of older prompts: the engine may have
evicted them, or may hold prompts that another router sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvstore.router.context import RouterContext
from kvstore.router.engines import Role
from kvstore.router.prompts.prefix_memory import MAX_TEXT_BYTES, PIECE_BYTES, text_chain
from kvstore.router.prompts.request_body import RequestBody

_INITIAL_BYTES_PER_TOKEN: Final = 4.0
_LOOKUP_BELOW: Final = 0.75
"""The store is asked only if no engine saw more than this share of a prompt: blocks in DRAM count three quarters at best."""
_RECENT_S: Final = 30.0
"""Age up to which a prompt that was sent to an engine counts, although the engine's published cache may lack it."""
_WEIGHT: Final = 0.1
"""Weight of the newest count in the running mean of bytes per token."""


@dataclass(frozen=True, slots=True)
class StoreHits:
    """Parts of a prompt that the store holds.

    Attributes:
        hit_tokens: tokens on any node.
        dram_tokens: leading tokens in DRAM, by node.
        cache_tokens: leading tokens in the published caches of engines, by name of the cache; None: not looked up.
    """

    hit_tokens: int = 0
    dram_tokens: Mapping[str, int] = field(default_factory=dict)
    cache_tokens: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """Estimates about one prompt.

    Attributes:
        prompt_tokens: length, at least 1; an estimate unless an engine counted it.
        chain: hashes of the pieces of its text.
        tokens_per_piece: tokens per hash of that chain.
        hits: parts that the store holds.
    """

    prompt_tokens: int
    chain: list[bytes]
    tokens_per_piece: float
    hits: StoreHits

    @property
    def hit_tokens(self) -> int:
        """Tokens that the store holds."""
        return min(self.hits.hit_tokens, self.prompt_tokens)


class PrefixLookup(Protocol):
    """Looks prompts up in the store. It never raises; a failed or late lookup returns no hits."""

    async def look_up(self, body: RequestBody, headers: Mapping[str, str]) -> tuple[int | None, StoreHits]:
        """Count a prompt's tokens and look them up.

        Args:
            body: the request.
            headers: headers for the engine that counts tokens.

        Returns:
            The number of tokens, or None if no engine counted them; and the hits.
        """
        ...


class PromptReader:
    """Estimates the facts of prompts for one router.

    Args:
        context: the router's state.
        lookup: lookup in the store; None: only the router's memory is used.
    """

    def __init__(self, context: RouterContext, lookup: PrefixLookup | None) -> None:
        self._context = context
        self._lookup = lookup
        self._bytes_per_token = _INITIAL_BYTES_PER_TOKEN

    async def read(self, body: RequestBody, headers: Mapping[str, str]) -> PromptFacts:
        """Return the facts of a request's prompt."""
        text = body.text()
        chain = text_chain(body.seed(), text)
        size = len(text) if body.length <= MAX_TEXT_BYTES else body.length  # the text is cut off
        tokens = None if body.token_prompt is None else len(body.token_prompt)
        hits = StoreHits()
        if self._lookup is not None and not self._is_remembered(chain):
            counted, hits = await self._lookup.look_up(body, headers)
            if counted:
                tokens = counted
                self._bytes_per_token += _WEIGHT * (max(1.0, size / counted) - self._bytes_per_token)
        tokens = max(1, tokens or int(size / self._bytes_per_token))
        return PromptFacts(tokens, chain, PIECE_BYTES * tokens / max(1, size), hits)

    def _is_remembered(self, chain: Sequence[bytes]) -> bool:
        """Whether a healthy engine saw most of the prompt recently. A lookup in the store could not improve on that."""
        engines = self._context.health.engines
        longest = max((self._seen(name, chain) for name, engine in engines.items() if engine.healthy), default=0)
        return longest > len(chain) * _LOOKUP_BELOW

    def _seen(self, engine: str, chain: Sequence[bytes]) -> int:
        """Return how many leading pieces an engine saw; only lately, if its cache is published."""
        since_s = self._context.now_s() - _RECENT_S if self._context.caches(engine) else -math.inf
        return self._context.memory.match(engine, chain, since_s)

    def cached_tokens(self, facts: PromptFacts) -> dict[str, int]:
        """Return by engine how many tokens of a prompt are probably in its cache or close to it."""
        memory, cached, published = self._context.memory, {}, facts.hits.cache_tokens
        for name, engine in self._context.health.engines.items():
            if engine.config.role is Role.DECODE:
                continue
            caches = self._context.caches(name) if published is not None else ()
            pieces = self._seen(name, facts.chain) if caches else memory.match(name, facts.chain)
            held = max((published.get(cache, 0) for cache in caches), default=0) if published is not None else 0
            own = min(max(int(pieces * facts.tokens_per_piece), held), facts.prompt_tokens)
            node = engine.config.node
            host = min(facts.hits.dram_tokens.get(node, 0), facts.prompt_tokens) if node else 0
            best = max(own, own + (host - own) * 3 // 4)  # blocks in DRAM must still be copied
            if best:
                cached[name] = best
        return cached
