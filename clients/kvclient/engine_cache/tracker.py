"""Which blocks an engine holds, derived from its steps: pure. Events in (offers, checks, a reset), changes out.

A block is held if the engine's pool holds it in all KV cache groups. The pool reports nothing, so each step checks some of the
known blocks in turn. The more time has passed since the last step, the more blocks it checks: a round takes about ``ROUND_S``.
A step checks at most ``MOST_CHECKS`` of them, so one after a pause stays short. An engine without steps allocates no pages, so
its cache does not change.

Blocks are plain tuples of bytes, which the garbage collector skips: objects would lengthen its pauses in the engine's process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.core.types import BlockKey, NamespaceId

ROUND_S: Final = 2.0
"""Time in which all blocks are checked once, unless that takes more than ``MOST_CHECKS`` per step."""
LEAST_CHECKS: Final = 32
MOST_CHECKS: Final = 1_024
MOST_OFFERS: Final = 512
"""New blocks that one step takes up. The others are left to the next steps."""
MOST_SCANNED: Final = 8_192
"""Offered blocks that one step looks at: at high hit ratios, nearly all are known already."""

KnownBlock = tuple[bytes, ...]
"""Key of a block in the store, then the engine's names of its pages, one per KV cache group."""
Place = tuple[BlockKey | None, int]
"""Parent and depth of a block in its chain."""
Missing = Callable[[Sequence[KnownBlock]], Sequence[KnownBlock]]
"""Returns those of some blocks that the engine's pool does not hold."""


@dataclass(frozen=True, slots=True)
class CacheSpace:
    """The namespace of a cache.

    Attributes:
        chain: namespace of the store, whose chain makes the keys.
        namespace: namespace of the published blocks.
    """

    chain: NamespaceId
    namespace: NamespaceId


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Changes between two calls of ``take_changes``.

    Attributes:
        space: namespace of the added blocks.
        blocks: by key in the store: the place of a block that is held now; None: it is no longer held.
    """

    space: CacheSpace
    blocks: Mapping[BlockKey, Place | None]


@dataclass(slots=True)
class CacheOffer:
    """Consecutive blocks of one chain that the engine has computed, or uses.

    Attributes:
        first: position of the first block in its chain.
        parent: key of the block before it.
        keys: their keys in the store.
        hashes: the engine's hashes of them.
        taken: number of leading blocks that were taken up.
    """

    first: int
    parent: BlockKey | None
    keys: Sequence[BlockKey]
    hashes: Sequence[bytes]
    taken: int = 0

    def place(self, at: int) -> Place:
        """Return the place of one of the blocks."""
        return self.keys[at - 1] if at else self.parent, self.first + at


class CacheTracker:
    """The blocks of one engine. The scheduler calls all methods but ``take_changes``, which another thread may call.

    Args:
        space: namespace of the blocks.
        most: maximum number of blocks. A new block then displaces the one whose check is next, so recent prompts are published.
        pages_of: returns the engine's names of the pages of a block, given its hash.
        ignored: called with the number of blocks that were displaced, or not taken up, because of ``most``.
    """

    def __init__(
        self,
        space: CacheSpace,
        most: int,
        pages_of: Callable[[bytes], tuple[bytes, ...]],
        ignored: Callable[[int], None] = lambda _count: None,
    ) -> None:
        self._space = space
        self._most = most
        self._pages_of = pages_of
        self._ignored = ignored
        self._held: set[BlockKey] = set()
        self._turn: deque[KnownBlock] = deque()
        """The held blocks, in the order of the next checks."""
        self._offers: deque[CacheOffer] = deque()
        self._offered = 0
        self._changes: dict[BlockKey, Place | None] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def offer(self, offer: CacheOffer) -> None:
        """Receive blocks that the engine may hold from now on.

        At most ``most`` blocks wait, or one longer offer. The oldest offers are ignored.
        """
        self._offers.append(offer)
        self._offered += len(offer.keys)
        while self._offered > self._most and len(self._offers) > 1:
            oldest = self._offers.popleft()
            self._offered -= len(oldest.keys) - oldest.taken
            self._ignored(len(oldest.keys) - oldest.taken)

    def step(self, missing: Missing, elapsed_s: float) -> None:
        """Check blocks whose turn it is, and take up offered blocks.

        Args:
            missing: asks the engine's pool.
            elapsed_s: time since the last step.
        """
        changes: dict[BlockKey, Place | None] = {}
        wanted = int(len(self._turn) * min(1.0, elapsed_s / ROUND_S))
        checks = min(len(self._turn), max(LEAST_CHECKS, min(MOST_CHECKS, wanted)))
        part = [self._turn.popleft() for _ in range(checks)]
        gone = missing(part)
        if gone:
            self._held.difference_update(block[0] for block in gone)
            changes = {BlockKey(block[0]): None for block in gone}
            part = [block for block in part if block[0] in self._held]
        self._turn.extend(part)
        if self._offers:
            self._take_offers(missing, changes)
        if changes:
            with self._lock:
                self._changes |= changes

    def _take_offers(self, missing: Missing, changes: dict[BlockKey, Place | None]) -> None:
        """Take up the next offered blocks that are not known yet and that the pool holds."""
        places: dict[BlockKey, Place] = {}
        new: list[KnownBlock] = []
        left = MOST_SCANNED
        while self._offers and left and len(new) < MOST_OFFERS:
            offer = self._offers[0]
            first = at = offer.taken
            stop = min(len(offer.keys), first + left)
            while at < stop and len(new) < MOST_OFFERS:
                key = offer.keys[at]
                if key not in self._held and key not in places:
                    places[key] = offer.place(at)
                    new.append((key, *self._pages_of(offer.hashes[at])))
                at += 1
            left -= at - first
            self._offered -= at - first
            offer.taken = at
            if at == len(offer.keys):
                self._offers.popleft()
        for block in missing(new):
            del places[BlockKey(block[0])]
        self._held.update(places)
        self._turn.extend(block for block in new if block[0] in places)
        changes |= places
        self._make_room(changes)

    def _make_room(self, changes: dict[BlockKey, Place | None]) -> None:
        """Unpublish the blocks that are too many."""
        excess = len(self._held) - self._most
        if excess <= 0:
            return
        for _ in range(excess):
            key = BlockKey(self._turn.popleft()[0])
            self._held.discard(key)
            changes[key] = None
        self._ignored(excess)

    def clear(self, space: CacheSpace | None = None) -> None:
        """Forget all blocks: the engine's cache was cleared.

        Args:
            space: namespace of later blocks; None: the same.
        """
        self._offers.clear()
        self._offered = 0
        self._turn.clear()
        gone, self._held = self._held, set()
        with self._lock:
            self._space = space or self._space
            self._changes |= dict.fromkeys(gone)

    def take_changes(self) -> CacheChanges:
        """Return the changes since the last call."""
        with self._lock:
            taken, self._changes = self._changes, {}
            return CacheChanges(self._space, taken)
