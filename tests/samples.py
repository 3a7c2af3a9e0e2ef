"""The part of a long search that an ordinary run makes. ``--thorough`` makes all of it."""

from __future__ import annotations

_thorough = False


def be_thorough() -> None:
    """Make all of every search. Call before tests are collected."""
    global _thorough
    _thorough = True


def sample(some: int, of: int) -> int:
    """Return the number of examples, seeds or turns to run."""
    return of if _thorough else some
