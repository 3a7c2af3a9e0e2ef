"""Choosing an engine without the metadata server: pure. The same rule as the scheduler's, and round robin as the baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvstore.router.ledger import EngineLoad


class Turn:
    """Round robin over whoever is there."""

    def __init__(self) -> None:
        self._last = ""

    def next(self, candidates: Sequence[str]) -> str:
        """The candidate behind the one that was taken last, in the order of their names; candidates are not empty."""
        ordered = sorted(candidates)
        chosen = next((name for name in ordered if name > self._last), ordered[0])
        self._last = chosen
        return chosen


def least_loaded(candidates: Sequence[str], load: Callable[[str], EngineLoad], near: Mapping[str, int], turn: Turn) -> str:
    """The engine that would be done with the prompt first: least tokens to do, its head start deducted.

    Args:
        candidates: not empty.
        load: what an engine has to do.
        near: tokens of the prompt that are at hand for an engine.
        turn: decides among equals, so that idle engines share.
    """

    def delay(name: str) -> tuple[int, int]:
        return load(name).tokens - near.get(name, 0), load(name).sequences

    least = min(delay(name) for name in candidates)
    return turn.next([name for name in candidates if delay(name) == least])
