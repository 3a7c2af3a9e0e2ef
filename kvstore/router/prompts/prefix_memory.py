"""Memory of the prefixes that each engine saw recently: pure.

The HBM cache of an engine holds the prompts that were sent last, up to its size. Engines with the store's hook publish its
contents; for them, the memory bridges the moments until a prompt is published. For all others it is the only estimate, and a
wrong one costs a load or a computation, never a wrong response. It uses text instead of tokens, so it needs no
tokenizer. A prompt becomes a chain of hashes over its pieces; prompts with a common beginning share the beginning of their
chains.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import xxhash

PIECE_BYTES: Final = 256
"""Text per link of the chain: about 64 tokens."""
MAX_TEXT_BYTES: Final = 2 << 20
"""Longest hashed text, about 500,000 tokens. Hashing more would delay all other requests."""


def text_chain(seed: bytes, text: bytes) -> list[bytes]:
    """Return hashes of all whole pieces of a text, each chained to those before it.

    Args:
        seed: everything else that must be equal, such as the model.
        text: text of the prompt; only the first ``MAX_TEXT_BYTES`` are used.
    """
    digest = xxhash.xxh3_64_digest
    previous = digest(seed)
    chain = []
    for at in range(0, min(len(text), MAX_TEXT_BYTES) - PIECE_BYTES + 1, PIECE_BYTES):
        previous = digest(previous + text[at : at + PIECE_BYTES])
        chain.append(previous)
    return chain


class PrefixMemory:
    """Most recent pieces of each engine's prompts.

    Args:
        engines: names of the engines.
        max_pieces: pieces remembered per engine.
    """

    def __init__(self, engines: Iterable[str], max_pieces: int) -> None:
        self._max_pieces = max_pieces
        self._pieces: dict[str, OrderedDict[bytes, float]] = {engine: OrderedDict() for engine in engines}

    def insert(self, engine: str, chain: Sequence[bytes], now_s: float = 0.0) -> None:
        """Record a prompt that is sent to an engine. Its beginning counts as used last, so ends of chains are evicted first."""
        pieces = self._pieces[engine]
        for piece in reversed(chain):
            pieces[piece] = now_s
            pieces.move_to_end(piece)
        while len(pieces) > self._max_pieces:
            pieces.popitem(last=False)

    def match(self, engine: str, chain: Sequence[bytes], since_s: float = -math.inf) -> int:
        """Return how many leading pieces of a chain an engine probably holds.

        Pieces before ``since_s`` do not count. A prompt renews all pieces of its chain. So the others are contiguous, and
        bisection finds their end.
        """
        pieces = self._pieces[engine]
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            seen_s = pieces.get(chain[middle - 1])
            if seen_s is not None and seen_s >= since_s:
                low = middle
            else:
                high = middle - 1
        return low

    def forget(self, engine: str) -> None:
        """Clear an engine's memory after its restart."""
        self._pieces[engine].clear()
