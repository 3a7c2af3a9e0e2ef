"""How much of a prompt several pools can restore together. Pure.

A model with sliding windows or recurrent layers keeps pools beside its KV whose pages exist at some points of a prompt only: a
prefix of n pages can be restored if each pool has what it needs *at n*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LeadingPages:
    """A pool that needs every page of the prefix."""

    held: int
    """Leading pages that it has."""


@dataclass(frozen=True, slots=True)
class TrailingPages:
    """A pool that needs the last pages of the prefix."""

    has: Callable[[int], bool]
    """Whether it has the page at a position; worth asking once only."""
    window: int
    """How many it needs."""


@dataclass(frozen=True, slots=True)
class Restorable:
    """What can be restored.

    Attributes:
        pages: the longest prefix.
        lengths: all lengths of prefixes, rising: ranks intersect theirs.
        by_pool: the longest prefix that each pool allows by itself; pools with none are left out.
    """

    pages: int = 0
    lengths: list[int] = field(default_factory=list)
    by_pool: dict[str, int] = field(default_factory=dict)


def restorable(kv_pages: int, pools: Sequence[tuple[str, LeadingPages | TrailingPages]]) -> Restorable:
    """What can be restored of ``kv_pages`` leading pages of KV, given the other pools by name."""
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
    """Lengths of prefixes for which a pool has what it needs."""
    if isinstance(pool, LeadingPages):
        return set(range(1, min(kv_pages, pool.held) + 1))
    allowed = set()
    for length in range(kv_pages, 0, -1):  # the longest first: it is the one most likely used, and time may be up
        if all(pool.has(page) for page in range(length - 1, max(0, length - pool.window) - 1, -1)):
            allowed.add(length)
    return allowed
