"""What is known of a prompt before it is placed: its length, and how much of it is at hand for which engine.

Two sources, both guesses: this router's own memory of which engine saw which text lately (its HBM), and the store's index, which
knows what lies in the DRAM of an engine's host. The latter goes by tokens: an engine is asked for them, within a short time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvstore.router.body import ParsedBody
from kvstore.router.config import Role
from kvstore.router.parts import Parts
from kvstore.router.prefix_memory import MAX_TEXT_BYTES, PIECE_BYTES, text_chain

_FIRST_GUESS: Final = 4.0
"""Bytes of text a token, until engines have counted some."""
_MOST: Final = 0.75
"""Of a prompt: what lies in DRAM counts at three quarters at best."""
_WEIGHT: Final = 0.1
"""Of the newest count in the running mean."""


@dataclass(frozen=True, slots=True)
class StoreHits:
    """What the store has of a prompt.

    Attributes:
        hit_tokens: at whatever place.
        near_tokens: by store node: of them in its DRAM.
    """

    hit_tokens: int = 0
    near_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """A prompt as far as it is known.

    Attributes:
        prompt_tokens: counted or guessed; at least 1.
        chain: of pieces of its text.
        tokens_a_piece: of that chain.
        hits: what the store has.
    """

    prompt_tokens: int
    chain: list[bytes]
    tokens_a_piece: float
    hits: StoreHits

    @property
    def hit_tokens(self) -> int:
        """Tokens in the store."""
        return min(self.hits.hit_tokens, self.prompt_tokens)


class StoreIndex(Protocol):
    """Looks prompts up in the store. Never raises; what it cannot find out in time is no hit."""

    async def look_up(self, body: ParsedBody, headers: Mapping[str, str]) -> tuple[int | None, StoreHits]:
        """Counts a prompt's tokens, where it can, and looks them up."""
        ...


class PromptReader:
    """Reads prompts for one router.

    Args:
        parts: of the router.
        index: of the store; None: not asked.
    """

    def __init__(self, parts: Parts, index: StoreIndex | None) -> None:
        self._parts = parts
        self._index = index
        self._bytes_a_token = _FIRST_GUESS

    async def read(self, body: ParsedBody, headers: Mapping[str, str]) -> PromptFacts:
        """What is known of a request's prompt."""
        text = body.text()
        chain = text_chain(body.seed(), text)
        size = len(text) if body.length <= MAX_TEXT_BYTES else body.length  # the text is the head alone
        tokens = None if body.token_prompt is None else len(body.token_prompt)
        hits = StoreHits()
        if self._index is not None and not self._known(chain):
            counted, hits = await self._index.look_up(body, headers)
            if counted:
                tokens = counted
                self._bytes_a_token += _WEIGHT * (max(1.0, size / counted) - self._bytes_a_token)
        tokens = max(1, tokens or int(size / self._bytes_a_token))
        return PromptFacts(tokens, chain, PIECE_BYTES * tokens / max(1, size), hits)

    def _known(self, chain: Sequence[bytes]) -> bool:
        """Has an engine that is in seen most of it lately? Then the store can tell nothing better, and need not be asked."""
        memory, engines = self._parts.memory, self._parts.pool.engines
        most = max((memory.held(name, chain) for name, health in engines.items() if health.up), default=0)
        return most > len(chain) * _MOST

    def near(self, facts: PromptFacts) -> dict[str, int]:
        """By engine: how many tokens of a prompt are likely to be at hand there."""
        memory, near = self._parts.memory, {}
        for name, health in self._parts.pool.engines.items():
            if health.config.role is Role.DECODE:
                continue
            own = min(int(memory.held(name, facts.chain) * facts.tokens_a_piece), facts.prompt_tokens)
            host = min(facts.hits.near_tokens.get(health.config.node, 0), facts.prompt_tokens) if health.config.node else 0
            best = max(own, own + (host - own) * 3 // 4)  # from DRAM it must be copied still
            if best:
                near[name] = best
        return near
