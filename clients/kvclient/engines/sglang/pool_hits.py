"""Computes how much of a prompt several pools can restore together. No I/O.

Beside its KV, a model with sliding windows or recurrent layers has pools whose pages exist only at some positions of a prompt. A
prefix of n pages can be restored if each pool has the pages that it requires *at n*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LeadingPages:
    """A pool that requires every page of the prefix."""

    held: int
    """Leading pages that the pool has."""


@dataclass(frozen=True, slots=True)
class TrailingPages:
    """A pool that requires the last pages of the prefix."""

    held: Sequence[bool]
    """Whether the pool has the page at each position."""
    window: int
    """Number of last pages that the pool requires."""


@dataclass(frozen=True, slots=True)
class Restorable:
    """Restorable prefixes.

    Attributes:
        pages: length of the longest prefix.
        lengths: all restorable prefix lengths, ascending; ranks intersect their lists.
        by_pool: the longest prefix that each pool allows by itself; pools with none are left out.
    """

    pages: int = 0
    lengths: list[int] = field(default_factory=list)
    by_pool: dict[str, int] = field(default_factory=dict)


def restorable(kv_pages: int, pools: Sequence[tuple[str, LeadingPages | TrailingPages]]) -> Restorable:
    """Return what can be restored of ``kv_pages`` leading pages of KV, given the other pools by name."""
    lengths = set(range(1, kv_pages + 1))
    by_pool: dict[str, int] = {}
    for name, pool in pools:
        allowed = _allowed(kv_pages, pool)
        if allowed:
            by_pool[name] = max(allowed)
        lengths &= allowed
    ordered = sorted(lengths)
    return Restorable(ordered[-1] if ordered else 0, ordered, by_pool)


def _allowed(kv_pages: int, pool: LeadingPages | TrailingPages) -> set[int]:
    """Return the prefix lengths at which a pool has the pages that it requires."""
    if isinstance(pool, LeadingPages):
        return set(range(1, min(kv_pages, pool.held) + 1))
    allowed, in_a_row = set(), 0
    for length, held in enumerate(pool.held[:kv_pages], 1):
        in_a_row = in_a_row + 1 if held else 0
        if in_a_row >= min(length, pool.window):
            allowed.add(length)
    return allowed
