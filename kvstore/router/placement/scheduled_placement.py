"""Placement by the metadata server's scheduler, and by this router alone while the scheduler is down."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from dataclasses import replace
from functools import partial

from kvclient import Assignment, AsyncSchedulerClient, DeadlineExceeded, EngineRequest, KVStoreError
from kvstore.core.errors import CapacityExceeded
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import router as router_metrics
from kvstore.router.context import RouterContext
from kvstore.router.engines import Role
from kvstore.router.placement.local_placement import LocalPlacement
from kvstore.router.placement.placement import PlacedRequest, PlacementRequest
from kvstore.router.placement.scheduler_reporter import SchedulerReporter

_log = LimitedLog(logging.getLogger(__name__))

_MAX_ASSIGNMENTS = 3
"""Assignments per attempt, if the assigned engines were ejected in the meantime. After them this router chooses."""
_MAX_OUTPUT_TOKENS = 1 << 31
"""Largest output that is reported to the scheduler. An engine rejects requests for more."""
_OUTPUT_DIVISOR = 8
"""Pairs: at most an eighth of the largest decode engine is reserved for the outputs of one request."""
_MAX_CACHED_ENGINES = 64
"""Most engines named to the scheduler as holding a prefix: those with the longest one."""


class ScheduledPlacement:
    """Asks the scheduler to place each request.

    Args:
        context: the router's state.
        client: client of the scheduler.
        local: placement if the scheduler is down, or cannot decide: engines with different models, or no prefill engine.
    """

    def __init__(self, context: RouterContext, client: AsyncSchedulerClient, local: LocalPlacement) -> None:
        self._context = context
        self._client = client
        self._local = local
        router_id = secrets.token_hex(6)
        self._request_ids = (f"{router_id}-{number}" for number in itertools.count(1))
        self.reporter = SchedulerReporter(context, client, router_id)
        self._assigned: dict[str, EngineRequest] = {}  # by attempt id

    async def place(self, request: PlacementRequest) -> PlacedRequest:
        deadline_s = self._context.now_s() + self._context.config.assign_timeout_ms / 1000
        largest = self._largest_decode_engine()
        if largest is not None:
            if request.prompt_tokens >= largest:  # it would stop the queue, and an engine rejects it soon: reserve nothing for it
                self._context.counters.add(router_metrics.UNSCHEDULED)
                _log.warning("request placed without the scheduler: its prompt exceeds every decode engine")
                return self._local.place_now(replace(request, prompt_tokens=1, output_tokens=0))
            most = min(largest // _OUTPUT_DIVISOR, largest - request.prompt_tokens)
            request = replace(request, output_tokens=min(request.output_tokens, most))
        for _ in range(_MAX_ASSIGNMENTS):
            if self.reporter.scheduler_down.is_set() or not self._can_schedule(request):
                break
            placed = await self._request_assignment(request, deadline_s)
            if placed is None:
                break
            if not request.avoid.isdisjoint((placed.engine, placed.prefill)):  # the scheduler does not know this set
                self.release(placed)
                break
            if self._is_healthy(placed):
                self._context.counters.add(router_metrics.SCHEDULED)
                return self._local.register(placed, request)
            self._context.counters.add(router_metrics.ASSIGNMENTS_EJECTED)
            _log.warning("assignment returned: engine was ejected (engine=%s, prefill=%s)", placed.engine, placed.prefill)
            self.release(placed)
        self._context.counters.add(router_metrics.UNSCHEDULED)
        _log.warning("request placed without the scheduler")
        return self._local.place_now(request)

    def prefilled(self, placed: PlacedRequest) -> None:
        self._local.prefilled(placed)
        assigned = self._assigned.get(placed.attempt_id)
        if assigned is not None:
            self.reporter.request_prefilled(assigned.request_id)

    def release(self, placed: PlacedRequest) -> None:
        self._local.release(placed)
        assigned = self._assigned.pop(placed.attempt_id, None)
        if assigned is not None:
            self.reporter.request_finished(assigned)

    async def _request_assignment(self, request: PlacementRequest, deadline_s: float) -> PlacedRequest | None:
        """Ask the scheduler for engines.

        Returns:
            The assigned engines, to be released later; None if this router must choose.

        Raises:
            CapacityExceeded: no engine had capacity in time.
        """
        engine_request = self._engine_request(request)
        self.reporter.request_waiting(engine_request.request_id)
        assignment: Assignment | None = None
        placed: PlacedRequest | None = None
        try:
            assignment = await self._assign(request, engine_request, max(0.001, deadline_s - self._context.now_s()))
            if assignment is not None:
                placed = self._placed(request, assignment)
        except DeadlineExceeded:
            seconds = self._context.config.assign_timeout_ms / 1000
            raise CapacityExceeded("no engine had capacity in time", seconds=seconds) from None
        finally:
            generation = 0 if assignment is None else assignment.generation
            engine = "" if placed is None else placed.prefill or placed.engine
            self.reporter.request_placed(engine_request.request_id, generation, engine)
        if placed is None:
            if assignment is not None:  # to engines of another router
                self.reporter.request_finished(engine_request)
            return None
        self._assigned[request.attempt_id] = engine_request
        return placed

    async def _assign(self, request: PlacementRequest, engine_request: EngineRequest, timeout_s: float) -> Assignment | None:
        """Call the scheduler.

        Returns:
            The assignment; None if this router must choose: the scheduler is down or refused for a reason that does not concern
            the client, or engines changed so that the scheduler can no longer decide.

        Raises:
            DeadlineExceeded: no engine had capacity in time.
        """
        assign = asyncio.ensure_future(self._client.assign(engine_request, timeout_s))
        down = asyncio.ensure_future(self.reporter.scheduler_down.wait())
        futile = asyncio.ensure_future(self._until_not_schedulable(request))
        taken = False
        try:
            await asyncio.sleep(0)  # send the request before the report that triggers its assignment, on the same connection
            self.reporter.request_sent()
            await asyncio.wait((assign, down, futile), return_when=asyncio.FIRST_COMPLETED)
            if not assign.done():
                if not down.done():
                    self._context.counters.add(router_metrics.WAITS_ABANDONED)
                    _log.warning("wait for an assignment abandoned: the required engines were ejected")
                return None
            taken = True
            return assign.result()
        except DeadlineExceeded:
            raise
        except KVStoreError as error:
            self._context.counters.add(router_metrics.ASSIGNMENTS_FAILED)
            _log.warning("assignment failed: %s", error)
            return None
        finally:  # without await: a cancellation here would lose the assignment
            for task in (assign, down, futile):
                task.cancel()
            if not taken:
                assign.add_done_callback(partial(self._return_late, engine_request))

    def _return_late(self, engine_request: EngineRequest, assign: asyncio.Future[Assignment]) -> None:
        """Return an assignment that arrived after its wait was abandoned."""
        if not assign.cancelled() and assign.exception() is None:
            self.reporter.request_placed(engine_request.request_id, assign.result().generation)
            self.reporter.request_finished(engine_request)

    async def _until_not_schedulable(self, request: PlacementRequest) -> None:
        """Wait until the scheduler can no longer decide."""
        while self._can_schedule(request):
            await self._context.health.changed()

    def _is_healthy(self, placed: PlacedRequest) -> bool:
        """Whether the assigned engines are still healthy."""
        engines = self._context.health.engines
        return all(name is None or engines[name].healthy for name in (placed.engine, placed.prefill))

    def _can_schedule(self, request: PlacementRequest) -> bool:
        """Whether the scheduler can decide: there are healthy engines, and all of a role's engines serve the model."""
        health = self._context.health
        roles = (Role.PREFILL, Role.DECODE) if self._context.config.pairs else (Role.PLAIN,)
        for role in roles:
            healthy = health.healthy(role)
            if not healthy or healthy != health.healthy(role, request.model or None):
                return False
        return True

    def _largest_decode_engine(self) -> int | None:
        """Return the most KV that fits a healthy decode engine, in tokens; None if that is unknown, or without pairs."""
        if not self._context.config.pairs:
            return None
        metrics = [self._context.metrics.get(name) for name in self._context.health.healthy(Role.DECODE)]
        if any(one is None or not one.capacity_tokens for one in metrics):
            return None  # the scheduler counts such an engine as one that fits everything
        return max((one.capacity_tokens for one in metrics if one is not None), default=None)

    def _engine_request(self, request: PlacementRequest) -> EngineRequest:
        prompt = request.prompt_tokens
        longest = sorted(request.cached_tokens.items(), key=lambda item: -item[1])[:_MAX_CACHED_ENGINES]
        return EngineRequest(
            next(self._request_ids),
            prompt,
            hit_tokens=min(request.hit_tokens, prompt),
            expected_output_tokens=min(request.output_tokens, _MAX_OUTPUT_TOKENS),
            cached_tokens={self.reporter.name_of(engine): min(tokens, prompt) for engine, tokens in longest},
        )

    def _placed(self, request: PlacementRequest, assignment: Assignment) -> PlacedRequest | None:
        """Translate an assignment into this router's engine names; None if it names engines of another router."""
        prefill = self.reporter.engine_of(assignment.prefill.engine)
        if not self._context.config.pairs:
            return None if prefill is None else PlacedRequest(request.attempt_id, prefill)
        decode = self.reporter.engine_of(assignment.decode.engine)
        if prefill is None or decode is None:
            return None
        return PlacedRequest(request.attempt_id, decode, prefill)
