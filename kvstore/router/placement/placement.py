"""Contract of placement: a request that needs engines, the engines that it gets, and the protocol that chooses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """One attempt that needs engines.

    Attributes:
        attempt_id: unique id of the attempt.
        model: required model; empty if any will do.
        prompt_tokens: length of the prompt, at least 1; an estimate unless an engine counted it.
        cached_tokens: by engine: prompt tokens in its cache or close to it.
        hit_tokens: prompt tokens that the store holds on any node.
        output_tokens: estimated length of the output.
        avoid: engines that failed this request before.
    """

    attempt_id: str
    model: str
    prompt_tokens: int
    cached_tokens: Mapping[str, int]
    hit_tokens: int
    output_tokens: int
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """The engines of one attempt.

    Attributes:
        attempt_id: id of the attempt.
        engine: engine that answers: a plain or a decode engine.
        prefill: engine that computes the prompt; None if the answering engine does.
    """

    attempt_id: str
    engine: str
    prefill: str | None = None


class Placement(Protocol):
    """Chooses engines. Every placed request is released once."""

    async def place(self, request: PlacementRequest) -> PlacedRequest:
        """Choose engines; may wait for capacity.

        Raises:
            Unavailable: no engine is a candidate.
            CapacityExceeded: no engine had capacity in time.
        """
        ...

    def prefilled(self, placed: PlacedRequest) -> None:
        """Record that the prompt is computed."""
        ...

    def release(self, placed: PlacedRequest) -> None:
        """Record that the attempt ended, with or without a response."""
        ...
