"""How much an ordinary run makes of a long search: a sample. ``--thorough`` makes all of it."""

from __future__ import annotations

_thorough = False


def be_thorough() -> None:
    """From here on all is made; before tests are collected."""
    global _thorough
    _thorough = True


def sample(some: int, of: int) -> int:
    """How many of the examples, seeds or turns of a search are made."""
    return of if _thorough else some
