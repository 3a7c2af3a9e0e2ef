"""Choice of an engine without the metadata server: pure. Least loaded (the scheduler's rule), or round robin (the baseline)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvstore.router.placement.inflight import EngineWork


class RotationOrder:
    """Round robin over a changing set of candidates."""

    def __init__(self) -> None:
        self._last = ""

    def next(self, candidates: Sequence[str]) -> str:
        """Return the candidate after the last chosen one, in the order of names. Requires at least one candidate."""
        ordered = sorted(candidates)
        chosen = next((name for name in ordered if name > self._last), ordered[0])
        self._last = chosen
        return chosen


def least_loaded(
    candidates: Sequence[str], work: Callable[[str], EngineWork], cached_tokens: Mapping[str, int], rotation: RotationOrder
) -> str:
    """Return the engine that would finish the prompt first: least work, minus its cached part of the prompt.

    Args:
        candidates: engines to choose from; not empty.
        work: returns an engine's work.
        cached_tokens: by engine: prompt tokens in its cache or close to it.
        rotation: decides between equal engines, so that idle engines share the load.
    """

    def delay(name: str) -> tuple[int, int]:
        return work(name).tokens - cached_tokens.get(name, 0), work(name).sequences

    least = min(delay(name) for name in candidates)
    return rotation.next([name for name in candidates if delay(name) == least])
