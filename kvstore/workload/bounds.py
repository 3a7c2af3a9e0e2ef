"""Hits that a cache can reach on a workload: with unlimited capacity, with the best possible choice, and with a given policy.

All three count like the store: a request hits its longest run of leading blocks that are cached on arrival; then all its blocks
may be stored. Blocks are chain ids (``chains.ChainTable``): equal id = equal prefix up to and including the block.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockKey
from kvstore.tiers.contract import EvictionPolicy

ChainIds = npt.NDArray[np.int64]

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class HitCount:
    """Hits of a workload under one rule."""

    blocks: int
    hit_blocks: int

    @property
    def ratio(self) -> float:
        """Share of blocks that hit; 0 for an empty workload."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0


@dataclass(frozen=True, slots=True)
class PolicyCount:
    """Result of an eviction policy."""

    hits: HitCount
    evicted_blocks: int
    skipped_blocks: int
    """Blocks not stored, because only the request's own blocks could have been evicted."""


def unbounded_hits(requests: Iterable[ChainIds]) -> HitCount:
    """Hits with unlimited capacity: leading blocks of earlier requests."""
    seen: set[int] = set()
    blocks = hits = 0
    for chain in requests:
        ids = chain.tolist()
        blocks += len(ids)
        held = 0
        # the cache is closed under prefixes, so bisection finds the first new block, which ends the hit
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if ids[middle] in seen:
                low = middle + 1
            else:
                high = middle
        held = low
        hits += held
        seen.update(ids[held:])
    return HitCount(blocks, hits)


def best_hits(requests: Sequence[ChainIds], capacity_blocks: int) -> HitCount:
    """Hits of the best possible cache: Belady's MIN, which knows the future and may decline to store.

    After each request the cache keeps the blocks with the earliest next use. A parent is used whenever its child is, and before
    it, so this choice never keeps a child without its parent: the bound also holds for prefix caches.

    About 1 µs per access, and 8 bytes of memory per access and per hit.
    """
    if capacity_blocks < 0:
        raise InvalidArgument("capacity_blocks must not be negative", capacity_blocks=capacity_blocks)
    accesses = np.concatenate(requests) if requests else np.empty(0, dtype=np.int64)
    if capacity_blocks == 0 or not len(accesses):
        return HitCount(len(accesses), 0)
    next_use = _next_uses(accesses)
    # Position of the next use of each block held, 0: not held. Positions are unique, so a position names its block.
    held = [0] * (int(accesses.max()) + 1)
    space = capacity_blocks
    hits = at = 0
    coming: list[int] = []  # negated next uses of blocks held, furthest first; entries of uses that have passed stay below
    for request in requests:
        ids = request.tolist()
        upcoming = next_use[at : at + len(ids)].tolist()
        for block, use in zip(ids, upcoming, strict=True):
            if held[block]:
                hits += 1
                if use == _NEVER:
                    held[block] = 0
                    space += 1
                else:
                    held[block] = use
                    heapq.heappush(coming, -use)
            elif use == _NEVER:
                continue
            elif space:
                space -= 1
                held[block] = use
                heapq.heappush(coming, -use)
            elif use < -coming[0]:
                furthest = -heapq.heapreplace(coming, -use)
                held[int(accesses[furthest])] = 0
                held[block] = use
        at += len(ids)
    return HitCount(len(accesses), hits)


def _next_uses(accesses: ChainIds) -> ChainIds:
    """For each access the position of the next access to the same block, or ``_NEVER``."""
    order = np.argsort(accesses, kind="stable")
    by_block = accesses[order]
    out = np.full(len(accesses), _NEVER, dtype=np.int64)
    again = by_block[1:] == by_block[:-1]
    out[order[:-1][again]] = order[1:][again]
    return out


def simulate(requests: Iterable[ChainIds], policy: EvictionPolicy, capacity_blocks: int) -> PolicyCount:
    """Hits of a real eviction policy over one volume of ``capacity_blocks`` blocks.

    The request's own blocks are pinned while it is served, like blocks that the node loads and stores.
    """
    if capacity_blocks < 0:
        raise InvalidArgument("capacity_blocks must not be negative", capacity_blocks=capacity_blocks)
    held: set[BlockKey] = set()
    blocks = hits = evicted = skipped = 0
    for chain in requests:
        keys = [BlockKey(block.to_bytes(16, "big")) for block in chain.tolist()]
        blocks += len(keys)
        hit = next((position for position, key in enumerate(keys) if key not in held), len(keys))
        hits += hit
        policy.touch(keys[:hit])
        own = frozenset(keys)
        new = keys[hit:]
        short = len(held) + len(new) - capacity_blocks
        if short > 0:
            leaving = list(itertools.islice(policy.coldest(lambda key, own=own: key not in own), short))  # type: ignore[misc]
            for key in leaving:
                policy.remove(key)
                held.discard(key)
            evicted += len(leaving)
        kept = new[: capacity_blocks - len(held)]
        skipped += len(new) - len(kept)
        for position, key in enumerate(kept, start=hit):
            policy.insert(key, keys[position - 1] if position else None)
        held.update(kept)
    return PolicyCount(HitCount(blocks, hits), evicted, skipped)
