"""Work of each engine for the requests that this router knows: pure.

While a prompt is computed, the request costs its engine the tokens that must be loaded or computed there. While the request only
decodes, it costs an eighth of its prompt: it needs memory and a share of each step, but delays new requests far less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

DECODING_SHARE: Final = 8
_MIN_TOKENS: Final = 1


@dataclass(slots=True)
class InflightEntry:
    """One request on one engine.

    Attributes:
        engine: the engine.
        prompt_tokens: length of the prompt.
        cached_tokens: prompt tokens in the engine's cache or close to it.
        kv_tokens: tokens of KV that decoding needs on the engine.
        decoding: the prompt is computed.
    """

    engine: str
    prompt_tokens: int
    cached_tokens: int = 0
    kv_tokens: int = 0
    decoding: bool = False

    @property
    def cost(self) -> int:
        """Current cost for the engine in tokens."""
        if self.decoding:
            return max(_MIN_TOKENS, self.prompt_tokens // DECODING_SHARE)
        return max(_MIN_TOKENS, self.prompt_tokens - self.cached_tokens)


@dataclass(slots=True)
class EngineWork:
    """Sums over the requests of one engine: requests, cost in tokens, and tokens of KV."""

    sequences: int = 0
    tokens: int = 0
    kv_tokens: int = 0


class InflightTokens:
    """Requests in flight, by attempt and engine. One attempt may be on two engines: prefill and decode."""

    def __init__(self, engines: Iterable[str]) -> None:
        self._work = {engine: EngineWork() for engine in engines}
        self._entries: dict[tuple[str, str], InflightEntry] = {}

    def work(self, engine: str) -> EngineWork:
        """Return the work of an engine."""
        return self._work[engine]

    def begin(self, attempt_id: str, entry: InflightEntry) -> None:
        """Add an attempt to an engine; replaces an earlier entry of the same attempt and engine."""
        self.end(attempt_id, entry.engine)
        self._entries[attempt_id, entry.engine] = entry
        self._add(entry, 1)

    def start_decoding(self, attempt_id: str, engine: str) -> None:
        """Record that the prompt is computed. No effect on an unknown attempt."""
        entry = self._entries.get((attempt_id, engine))
        if entry is not None and not entry.decoding:
            self._add(entry, -1)
            entry.decoding = True
            self._add(entry, 1)

    def end(self, attempt_id: str, engine: str) -> None:
        """Remove an attempt from an engine. No effect on an unknown attempt."""
        entry = self._entries.pop((attempt_id, engine), None)
        if entry is not None:
            self._add(entry, -1)

    def _add(self, entry: InflightEntry, sign: int) -> None:
        work = self._work[entry.engine]
        work.sequences += sign
        work.tokens += sign * entry.cost
        work.kv_tokens += sign * entry.kv_tokens
