"""Placement by the metadata server's scheduler, and by this router alone while that is away."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets

from kvclient import Assignment, AsyncSchedulerClient, DeadlineExceeded, EngineRequest, KVStoreError
from kvstore.core.errors import CapacityExceeded
from kvstore.observe.limited_log import LimitedLog
from kvstore.router.config import Role
from kvstore.router.local_placement import LocalPlacement
from kvstore.router.parts import Parts, Place, Wanted
from kvstore.router.reporter import Reporter

_log = LimitedLog(logging.getLogger(__name__))

_MOST_ASKED = 3
"""Times that one attempt is asked about, where the engines that it was assigned had died meanwhile; then this router decides."""
_MOST_OUTPUT = 1 << 31
"""Tokens of an answer that the scheduler is told: more answers at once than any engine gives are the engine's to refuse."""
_MAX_NEAR = 64
"""Engines named to the scheduler as near; those with the most."""


class ScheduledPlacement:
    """Asks the scheduler for each request.

    Args:
        parts: of the router.
        client: of the scheduler.
        local: for when it is away, or cannot know: engines that do not all serve the same models, or nobody who prefills.
    """

    def __init__(self, parts: Parts, client: AsyncSchedulerClient, local: LocalPlacement) -> None:
        self._parts = parts
        self._client = client
        self._local = local
        mine = secrets.token_hex(6)
        self._names = (f"{mine}-{number}" for number in itertools.count(1))
        self.reporter = Reporter(parts, client, mine)
        self._asked: dict[str, EngineRequest] = {}  # by attempt

    async def place(self, wanted: Wanted) -> Place:
        until_s = self._parts.now_s() + self._parts.config.assign_timeout_s
        for _ in range(_MOST_ASKED):
            if self.reporter.away.is_set() or not self._schedulable(wanted):
                break
            place = await self._ask(wanted, until_s)
            if place is None:
                break
            if not wanted.avoid.isdisjoint((place.engine, place.prefill)):  # which the scheduler is not told of
                self.done(place)
                break
            if self._all_in(place):
                self._parts.counters.add("router_scheduled_total")
                return self._local.enter(place, wanted)
            self._parts.counters.add("router_assigned_dead_total")
            _log.warning("a request was assigned to an engine that is out by now: %s", place.prefill or place.engine)
            self.done(place)
        return self._by_itself(wanted)

    async def _ask(self, wanted: Wanted, until_s: float) -> Place | None:
        """A place that the scheduler assigned and is to be told the end of; None: this router is to decide by itself.

        Raises:
            CapacityExceeded: no engine had room in time.
        """
        request = self._request(wanted)
        self.reporter.begins(request.request_id)
        assignment: Assignment | None = None
        place: Place | None = None
        try:
            assignment = await self._assign(wanted, request, max(0.001, until_s - self._parts.now_s()))
            if assignment is not None:
                place = self._place(wanted, assignment)
        except DeadlineExceeded:
            raise CapacityExceeded("no engine had room in time", seconds=self._parts.config.assign_timeout_s) from None
        finally:
            generation = 0 if assignment is None else assignment.generation
            self.reporter.placed(request.request_id, generation, "" if place is None else place.prefill or place.engine)
        if place is None:
            if assignment is not None:  # of engines that are another router's
                self.reporter.ended(request)
            return None
        self._asked[wanted.attempt] = request
        return place

    def prefilled(self, place: Place) -> None:
        self._local.prefilled(place)
        asked = self._asked.get(place.attempt)
        if asked is not None:
            self.reporter.prefilled(asked.request_id)

    def done(self, place: Place) -> None:
        self._local.done(place)
        asked = self._asked.pop(place.attempt, None)
        if asked is not None:
            self.reporter.ended(asked)

    def dropped(self, place: Place) -> None:
        self.done(place)

    async def _assign(self, wanted: Wanted, request: EngineRequest, timeout_s: float) -> Assignment | None:
        """Engines for a request; None: this router is to decide.

        So it is where the scheduler is away, or refuses for a reason that is none of the client's business, and where engines
        went out or changed so that it can no longer know: it would wait for engines that may never come.

        Raises:
            DeadlineExceeded: nobody has room in time.
        """
        assign = asyncio.ensure_future(self._client.assign(request, timeout_s))
        away = asyncio.ensure_future(self.reporter.away.wait())
        vain = asyncio.ensure_future(self._until_vain(wanted))
        taken = False
        try:
            await asyncio.sleep(0)  # the request goes out first, and then, on the same connection, the report that fetches it
            self.reporter.asked()
            await asyncio.wait((assign, away, vain), return_when=asyncio.FIRST_COMPLETED)
            if not assign.done():
                if not away.done():
                    self._parts.counters.add("router_waits_in_vain_total")
                    _log.warning("engines that a request waited for at the scheduler are out: it waits no longer")
                return None
            taken = True
            return assign.result()
        except DeadlineExceeded:
            raise
        except KVStoreError as error:
            self._parts.counters.add("router_assignments_failed_total")
            _log.warning("the scheduler assigned nothing: %s", error)
            return None
        finally:
            for waits in (assign, away, vain):
                waits.cancel()
            await asyncio.wait((assign, away, vain))
            if not taken and not assign.cancelled() and assign.exception() is None:  # it came as nobody waited any more
                self.reporter.placed(request.request_id, assign.result().generation)
                self.reporter.ended(request)

    async def _until_vain(self, wanted: Wanted) -> None:
        """Waits until the scheduler can no longer know."""
        while self._schedulable(wanted):
            await self._parts.pool.changed()

    def _all_in(self, place: Place) -> bool:
        """Are its engines still in? One may have gone out between the scheduler's decision and now."""
        engines = self._parts.pool.engines
        return all(name is None or engines[name].up for name in (place.engine, place.prefill))

    def _schedulable(self, wanted: Wanted) -> bool:
        """Can the scheduler know? It takes all engines of a role for equal."""
        pool, now_s, up = self._parts.pool, self._parts.now_s(), []
        roles = (Role.PREFILL, Role.DECODE) if self._parts.config.pairs else (Role.PLAIN,)
        for role in roles:
            up = pool.candidates(role, now_s)
            if not up or up != pool.candidates(role, now_s, wanted.model or None):
                return False
        return True

    def _by_itself(self, wanted: Wanted) -> Place:
        self._parts.counters.add("router_unscheduled_total")
        _log.warning("a request is placed without the scheduler")
        return self._local.place_now(wanted)

    def _request(self, wanted: Wanted) -> EngineRequest:
        prompt, output = wanted.prompt_tokens, min(wanted.output_tokens, _MOST_OUTPUT)
        if self._parts.config.pairs:  # what fits no engine would wait for ever: the engine itself is to refuse it
            sizes = [metrics.capacity_tokens for metrics in self._parts.metrics.values() if metrics.capacity_tokens]
            if sizes:
                prompt = max(1, min(prompt, max(sizes)))
                output = min(output, max(sizes) - prompt)
        nearest = sorted(wanted.near_tokens.items(), key=lambda item: -item[1])[:_MAX_NEAR]
        return EngineRequest(
            next(self._names),
            prompt,
            hit_tokens=min(wanted.hit_tokens, prompt),
            expected_output_tokens=output,
            near={self.reporter.name_of(engine): min(tokens, prompt) for engine, tokens in nearest},
        )

    def _place(self, wanted: Wanted, assignment: Assignment) -> Place | None:
        """An assignment in this router's names; None: it names engines that are not this router's."""
        prefill = self.reporter.engine_of(assignment.prefill.engine)
        if not self._parts.config.pairs:
            return None if prefill is None else Place(wanted.attempt, prefill)
        decode = self.reporter.engine_of(assignment.decode.engine)
        if prefill is None or decode is None:
            return None
        return Place(wanted.attempt, decode, prefill)
