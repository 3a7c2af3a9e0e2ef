"""Placement by this router alone: ``round_robin``, or ``least_loaded``, which also applies while the scheduler is down."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvstore.core.errors import Unavailable
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import router as router_metrics
from kvstore.router.context import RouterContext
from kvstore.router.engines import Role
from kvstore.router.placement.balancer import RotationOrder, least_loaded
from kvstore.router.placement.inflight import InflightEntry
from kvstore.router.placement.placement import PlacedRequest, PlacementRequest

_log = LimitedLog(logging.getLogger(__name__))


class LocalPlacement:
    """Chooses at once among the candidate engines.

    Args:
        context: the router's state.
        round_robin: choose in turn; otherwise the least loaded engine.
    """

    def __init__(self, context: RouterContext, *, round_robin: bool) -> None:
        self._context = context
        self._round_robin = round_robin
        self._rotations = {role: RotationOrder() for role in Role}

    async def place(self, request: PlacementRequest) -> PlacedRequest:
        return self.place_now(request)

    def place_now(self, request: PlacementRequest) -> PlacedRequest:
        """Choose engines without waiting.

        Raises:
            Unavailable: no engine is a candidate.
        """
        attempt_id = request.attempt_id
        if not self._context.config.pairs:
            return self.register(PlacedRequest(attempt_id, self._choose(Role.PLAIN, request, request.cached_tokens)), request)
        decode = self._choose(Role.DECODE, request, {})
        prefills = [name for name in self._candidates(Role.PREFILL, request) if name not in request.avoid]
        if not prefills:
            self._context.counters.add(router_metrics.WITHOUT_PREFILL)
            _log.warning("request placed without a prefill engine: %s computes the prompt", decode)
            return self.register(PlacedRequest(attempt_id, decode), request)
        prefill = self._pick(Role.PREFILL, prefills, request.cached_tokens)
        return self.register(PlacedRequest(attempt_id, decode, prefill), request)

    def register(self, placed: PlacedRequest, request: PlacementRequest) -> PlacedRequest:
        """Add a placed request to the engines' work in flight."""
        inflight, cached = self._context.inflight, request.cached_tokens
        space, prompt = request.prompt_tokens + request.output_tokens, request.prompt_tokens
        if placed.prefill is None:
            inflight.begin(placed.attempt_id, InflightEntry(placed.engine, prompt, cached.get(placed.engine, 0), space))
        else:
            inflight.begin(placed.attempt_id, InflightEntry(placed.prefill, prompt, cached.get(placed.prefill, 0)))
            inflight.begin(placed.attempt_id, InflightEntry(placed.engine, prompt, 0, space, decoding=True))
        return placed

    def prefilled(self, placed: PlacedRequest) -> None:
        if placed.prefill is None:
            self._context.inflight.start_decoding(placed.attempt_id, placed.engine)
        else:
            self._context.inflight.end(placed.attempt_id, placed.prefill)

    def release(self, placed: PlacedRequest) -> None:
        for engine in (placed.engine, placed.prefill):
            if engine is not None:
                self._context.inflight.end(placed.attempt_id, engine)

    def _choose(self, role: Role, request: PlacementRequest, cached: Mapping[str, int]) -> str:
        candidates = self._candidates(role, request)
        if not candidates:
            raise Unavailable("no engine is available", role=role, model=request.model or "any")
        if self._context.health.in_panic(role):
            self._context.counters.add(router_metrics.PANIC_REQUESTS)
            _log.warning("request placed in panic mode: no healthy engine (role=%s)", role)
        untried = [name for name in candidates if name not in request.avoid]
        return self._pick(role, untried or candidates, cached)

    def _candidates(self, role: Role, request: PlacementRequest) -> list[str]:
        return self._context.health.candidates(role, request.model or None)

    def _pick(self, role: Role, candidates: list[str], cached: Mapping[str, int]) -> str:
        if self._round_robin:
            return self._rotations[role].next(candidates)
        return least_loaded(candidates, self._context.work, cached, self._rotations[role])
