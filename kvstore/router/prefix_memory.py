"""What engines have seen lately, as the router remembers it: which prefixes are likely to lie in whose own cache. Pure.

An engine does not tell what its HBM holds; but it holds what was sent there last, up to its size. The memory is a guess: a wrong
one costs a load or a computation, never a wrong answer. It goes by text, not by tokens, so that it needs no tokenizer: a chain of
hashes over pieces of the prompt, made so that prompts which begin alike have chains that begin alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import xxhash

PIECE_BYTES: Final = 256
"""Text in one link of the chain: some 64 tokens."""
MAX_TEXT_BYTES: Final = 2 << 20
"""Of a prompt's text, some 500,000 tokens: what comes behind decides nothing, and hashing it would hold up all other requests."""


def text_chain(seed: bytes, text: bytes) -> list[bytes]:
    """Hashes of all whole pieces of a text's head, each chained to those before it.

    Args:
        seed: what else must be equal, such as the model.
        text: of the prompt.
    """
    digest = xxhash.xxh3_64_digest
    previous = digest(seed)
    chain = []
    for at in range(0, min(len(text), MAX_TEXT_BYTES) - PIECE_BYTES + 1, PIECE_BYTES):
        previous = digest(previous + text[at : at + PIECE_BYTES])
        chain.append(previous)
    return chain


class PrefixMemory:
    """The last pieces of each engine, up to a bound.

    Args:
        engines: who they are.
        pieces: remembered of each.
    """

    def __init__(self, engines: Iterable[str], pieces: int) -> None:
        self._pieces = pieces
        self._seen: dict[str, OrderedDict[bytes, None]] = {engine: OrderedDict() for engine in engines}

    def saw(self, engine: str, chain: Sequence[bytes]) -> None:
        """A prompt was sent to an engine. Its head counts as used last: what is forgotten first are ends of chains."""
        seen = self._seen[engine]
        for piece in reversed(chain):
            seen[piece] = None
            seen.move_to_end(piece)
        while len(seen) > self._pieces:
            seen.popitem(last=False)

    def held(self, engine: str, chain: Sequence[bytes]) -> int:
        """How many leading pieces of a chain an engine is likely to hold. They are held without gaps, hence the bisection."""
        seen = self._seen[engine]
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in seen:
                low = middle
            else:
                high = middle - 1
        return low

    def forget(self, engine: str) -> None:
        """The engine was restarted: it holds nothing."""
        self._seen[engine].clear()
