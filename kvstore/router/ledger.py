"""What each engine has to do for the requests that this router knows of: pure book-keeping.

A request costs an engine, while its prompt is computed, the tokens that must be loaded from elsewhere or computed there; while it
only decodes, an eighth of its prompt: it takes room and a share of each step, but delays those that come far less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

DECODING_SHARE: Final = 8
_LEAST_TOKENS: Final = 1


@dataclass(slots=True)
class Entry:
    """A request on an engine.

    Attributes:
        engine: where.
        prompt_tokens: length of its prompt.
        near_tokens: of them at hand for that engine.
        room_tokens: of KV that it needs there while it is decoded.
        decoding: its prompt is done.
    """

    engine: str
    prompt_tokens: int
    near_tokens: int = 0
    room_tokens: int = 0
    decoding: bool = False

    @property
    def cost(self) -> int:
        """What it costs its engine now, in tokens."""
        if self.decoding:
            return max(_LEAST_TOKENS, self.prompt_tokens // DECODING_SHARE)
        return max(_LEAST_TOKENS, self.prompt_tokens - self.near_tokens)


@dataclass(slots=True)
class EngineLoad:
    """Sums of an engine."""

    sequences: int = 0
    tokens: int = 0
    room_tokens: int = 0


class Ledger:
    """Requests by name of the attempt. An attempt may be on two engines: one that prefills, one that decodes."""

    def __init__(self, engines: Iterable[str]) -> None:
        self._loads = {engine: EngineLoad() for engine in engines}
        self._entries: dict[tuple[str, str], Entry] = {}

    def load(self, engine: str) -> EngineLoad:
        """What an engine has to do."""
        return self._loads[engine]

    def begin(self, attempt: str, entry: Entry) -> None:
        """An attempt is on an engine from now on; told again of the same, the later word counts."""
        self.end(attempt, entry.engine)
        self._entries[attempt, entry.engine] = entry
        self._add(entry, 1)

    def decodes(self, attempt: str, engine: str) -> None:
        """Its prompt is done there. No effect where the engine does not have it."""
        entry = self._entries.get((attempt, engine))
        if entry is not None and not entry.decoding:
            self._add(entry, -1)
            entry.decoding = True
            self._add(entry, 1)

    def rename(self, attempt: str, engine: str, name: str) -> None:
        """An engine goes on with it by another name, after the attempt has ended. No effect where it does not have it."""
        entry = self._entries.pop((attempt, engine), None)
        if entry is not None:
            self._entries[name, engine] = entry

    def end(self, attempt: str, engine: str) -> None:
        """The engine is done with it. No effect where it does not have it."""
        entry = self._entries.pop((attempt, engine), None)
        if entry is not None:
            self._add(entry, -1)

    def _add(self, entry: Entry, sign: int) -> None:
        load = self._loads[entry.engine]
        load.sequences += sign
        load.tokens += sign * entry.cost
        load.room_tokens += sign * entry.room_tokens
