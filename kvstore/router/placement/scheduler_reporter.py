"""Reports the load of this router's engines to the metadata server's scheduler.

vLLM does not know the scheduler, so the router leads the engines' groups. It sees each request start, compute and end; load from
other sources shows in the engines' own metrics. If several routers share a pool, one of them reports, and the scheduler sends it
the assignments of the others. A router that another one replaced stands by: the scheduler rejects its reports as long as the
other one lives, and accepts them afterwards. The prefill group alone decides which router reports for both groups.

To the scheduler, plain engines are prefill engines: the scarce resource is prompt computation, and the cached prefix decides
between them. One virtual decode engine with unlimited capacity completes every pair.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kvclient import (
    Assigned,
    AsyncGroupLeader,
    AsyncSchedulerClient,
    EngineFigures,
    EngineRequest,
    GroupUpdates,
    KVStoreError,
)
from kvstore.core.errors import Conflict, Unavailable
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import router as router_metrics
from kvstore.router.context import RouterContext
from kvstore.router.engines import Role
from kvstore.router.placement.inflight import InflightEntry

_logger = logging.getLogger(__name__)
_log = LimitedLog(_logger)

MAX_INTERVAL_S: Final = 0.1
"""Time between reports while no request waits."""
MIN_INTERVAL_S: Final = 0.003
"""Time between reports while a request waits; doubled after each report without an assignment, up to ``MAX_INTERVAL_S``."""
DOWN_AFTER_S: Final = 1.0
"""A scheduler that has not answered for this long counts as down."""
STAND_BY_INTERVAL_S: Final = 0.5
"""How often a router that was replaced tries to report again."""
_REPORT_TIMEOUT_S: Final = 1.0
_MAX_TOKENS: Final = 1 << 39
"""Largest load that is reported."""
_UNLIMITED_TOKENS: Final = 1 << 39
_MAX_WEAR_TOKENS: Final = 32
"""Shorter than any prefix worth preferring."""
PLAIN_DECODE_ENGINE: Final = "whole"
"""Name of the virtual decode engine of all plain engines."""


@dataclass(slots=True)
class _KnownRequest:
    """A request that the scheduler assigned and announced to this router.

    Attributes:
        generation: latest generation of the assignment.
        since_s: time of the announcement.
        engines: its engines.
    """

    generation: int
    since_s: float
    engines: set[str] = field(default_factory=set)


class SchedulerReporter:
    """Leads the scheduler's groups of one router's engines.

    Args:
        context: the router's state.
        client: client of the scheduler.
        router_id: prefix of the ids of this router's own requests.
    """

    def __init__(self, context: RouterContext, client: AsyncSchedulerClient, router_id: str) -> None:
        self._context = context
        self._client = client
        self._router_id = router_id
        self._engine_prefix = f"{context.config.name}:"
        self.waiting: set[str] = set()
        """This router's requests that wait for an assignment."""
        self.scheduler_down = asyncio.Event()
        """Set while the scheduler does not answer."""
        self._was_answered = False
        self._answered_s = context.now_s()
        self._wake = asyncio.Event()
        self._prefilled: list[int] = []
        self._finished: list[tuple[int, EngineRequest | None]] = []
        """Generations that ended and whose report was not answered yet, with their requests; None: not this router's request."""
        self._known: dict[str, _KnownRequest] = {}
        self._served: Counter[str] = Counter()
        self._active: dict[str, int] = {}  # generation, by id of this router's assigned requests
        self._leaders: tuple[AsyncGroupLeader, AsyncGroupLeader] | None = None  # kept while this router stands by
        self._reports = False
        self._rejected_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._interval_s = MIN_INTERVAL_S

    # ---- lifecycle
    def start(self) -> None:
        """Start to report, or to watch the scheduler if another router reports."""
        if self._context.config.report:
            self.lead()
        self._task = asyncio.create_task(self._run())

    def lead(self) -> None:
        """Become the leader of both groups; ``report`` works from now on."""
        self._lead_with(self._client.leader(f"{self._context.config.name}:prefill", "prefill"))

    async def stop(self) -> None:
        """Stop reporting and remove the engines from the scheduler."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._reports and self._leaders is not None and not self.scheduler_down.is_set():
            await asyncio.gather(*(leader.leave() for leader in self._leaders), return_exceptions=True)

    def engine_of(self, name: str) -> str | None:
        """Return the router's name of an engine from the scheduler's; None for an engine of another router."""
        engine = name.removeprefix(self._engine_prefix)
        return engine if name != engine and engine in self._context.health.engines else None

    def name_of(self, engine: str) -> str:
        """Return the scheduler's name of an engine."""
        return self._engine_prefix + engine

    # ---- events of requests
    def request_waiting(self, request_id: str) -> None:
        """Record that one of this router's requests is about to wait for an assignment."""
        self.waiting.add(request_id)

    def request_sent(self) -> None:
        """Report soon: a request was sent to the scheduler, and the next report triggers its assignment."""
        self._interval_s = MIN_INTERVAL_S
        self._wake.set()

    def request_placed(self, request_id: str, generation: int = 0, engine: str = "") -> None:
        """Record that a request no longer waits.

        Args:
            request_id: the request.
            generation: generation of its assignment; 0 if it has none.
            engine: engine that computes its prompt; empty if it has none. Its work is counted as in flight from now on.
        """
        if generation:
            self._active[request_id] = generation
        if engine:
            self._served[engine] += 1
        self.waiting.discard(request_id)
        self._forget(request_id)

    def request_prefilled(self, request_id: str) -> None:
        """Record that a request's prompt is computed."""
        generation = self._active.get(request_id)
        if self._reports and generation is not None:
            self._prefilled.append(generation)

    def request_finished(self, request: EngineRequest) -> None:
        """Record that an assigned request ended, with or without a response."""
        self._interval_s = MIN_INTERVAL_S
        generation = self._active.pop(request.request_id, 0)
        if self._reports:
            self._finished.append((generation, request))
        else:
            self._context.run_in_background(asyncio.ensure_future(self._cancel(request)))
        if self.waiting:
            self._wake.set()

    def _cancel_finished(self) -> None:
        """End the requests whose end was not reported. The router that reports now does not know them."""
        for _, request in self._finished:
            if request is not None:
                self._context.run_in_background(asyncio.ensure_future(self._cancel(request)))
        self._finished.clear()

    async def _cancel(self, request: EngineRequest) -> None:
        try:
            await self._client.cancel(request)
        except KVStoreError as error:
            self._context.counters.add(router_metrics.CANCELS_FAILED)
            _log.warning("cancel failed: the scheduler keeps the request until its timeout (reason=%s)", error)

    # ---- loop
    async def _run(self) -> None:
        while True:
            started_s = self._context.now_s()
            try:
                await (self.report() if self._reports else self._stand_by())
                self._scheduler_answered()
            except Conflict as error:
                self._reports, self._rejected_s = False, self._context.now_s()
                self._cancel_finished()
                self._context.counters.add(router_metrics.REPORTS_TAKEN_OVER)
                _logger.error("reporting paused: another router reports for these engines (reason=%s)", error)  # noqa: TRY400
            except KVStoreError as error:
                self._scheduler_failed(error)
            except Exception as error:  # task edge: without reports, every request would wait until its deadline
                self._context.counters.add(router_metrics.BACKGROUND_BUGS)
                _logger.exception("report failed: unexpected error, trying again")
                self._scheduler_failed(Unavailable("unexpected error", reason=error))
            self._expire()
            await self._pause(started_s)

    async def _pause(self, started_s: float) -> None:
        """Wait until the next report is due."""
        interval_s = self._interval_s if self.waiting and not self.scheduler_down.is_set() else MAX_INTERVAL_S
        self._interval_s = min(2 * self._interval_s, MAX_INTERVAL_S)
        await asyncio.sleep(max(0.0, min(MIN_INTERVAL_S, started_s + MIN_INTERVAL_S - self._context.now_s())))
        try:
            async with asyncio.timeout(max(0.0, started_s + interval_s - self._context.now_s())):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _scheduler_answered(self) -> None:
        self._answered_s = self._context.now_s()
        if not self._was_answered:
            _logger.info("scheduler connected")
        self._was_answered = True
        self.scheduler_down.clear()

    def _scheduler_failed(self, error: KVStoreError) -> None:
        self._context.counters.add(router_metrics.REPORTS_FAILED)
        _log.warning("report failed: %s", error)
        if self._context.now_s() - self._answered_s > DOWN_AFTER_S and not self.scheduler_down.is_set():
            _logger.warning("scheduler lost: this router places requests alone until the scheduler answers again")
            self.scheduler_down.set()
            self._was_answered = False

    def _lead_with(self, prefill_leader: AsyncGroupLeader) -> None:
        """Report from now on. The decode group gets a new boot, which replaces that of any other router."""
        self._leaders = (prefill_leader, self._client.leader(f"{self._context.config.name}:decode", "decode"))
        self._reports = True

    async def _stand_by(self) -> None:
        """Check the scheduler, and report again if the router that replaced this one is gone.

        Raises:
            Unavailable: the scheduler knows no engines, because no router reports.
            KVStoreError: the scheduler does not answer.
        """
        now_s = self._context.now_s()
        if self._leaders is None or now_s - self._rejected_s < STAND_BY_INTERVAL_S:
            await self._check_scheduler()
            return
        prefill_leader, _ = self._leaders
        try:
            news = await prefill_leader.report(list(self._prefill_figures()), deadline_s=_REPORT_TIMEOUT_S)
        except Conflict:
            self._rejected_s = now_s
            await self._check_scheduler()
            return
        self._lead_with(prefill_leader)
        self._apply(news)
        self._context.counters.add(router_metrics.REPORTS_RESUMED)
        _logger.warning("reporting resumed: no other router reports for these engines")

    async def _check_scheduler(self) -> None:
        """Verify that the scheduler answers and knows engines. For routers that do not report.

        Raises:
            Unavailable: the scheduler knows no engines, because no router reports.
            KVStoreError: the scheduler does not answer.
        """
        if not await self._client.engines(_REPORT_TIMEOUT_S):
            raise Unavailable("the scheduler knows no engines; start the router that reports for them")

    async def report(self) -> None:
        """Send one report. Requires ``lead``.

        Raises:
            Conflict: another router reports for these engines.
            Unavailable: another router has replaced the decode group only. The next report replaces it again.
            KVStoreError: the scheduler does not answer. The next report repeats this one's content.
        """
        assert self._leaders is not None
        prefilled, self._prefilled = self._prefilled, []
        finished = [generation for generation, _ in self._finished]
        prefill_leader, decode_leader = self._leaders
        answers = await asyncio.gather(
            prefill_leader.report(list(self._prefill_figures()), prefilled=prefilled, deadline_s=_REPORT_TIMEOUT_S),
            decode_leader.report(list(self._decode_figures()), finished=finished, deadline_s=_REPORT_TIMEOUT_S),
            return_exceptions=True,
        )
        if not isinstance(answers[1], BaseException):
            del self._finished[: len(finished)]
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        for answer in answers:
            if isinstance(answer, GroupUpdates):
                self._apply(answer)
        self._context.counters.add(router_metrics.REPORTS)
        if isinstance(answers[1], Conflict) and isinstance(answers[0], GroupUpdates):
            self._lead_with(prefill_leader)
            raise Unavailable(
                "another router already reports the decode engines; set router.report=true at one router only", why=answers[1]
            )
        if failures:
            raise failures[0]

    # ---- reported load
    def _prefill_figures(self) -> Iterator[EngineFigures]:
        context = self._context
        for name, engine in context.health.engines.items():
            if not engine.healthy or engine.config.role is Role.DECODE:
                continue
            work = context.work(name)
            yield EngineFigures(
                self.name_of(name),
                engine.config.node or name,
                engine.config.url,
                sequences=work.sequences,
                tokens=min(work.tokens + self._wear(name), _MAX_TOKENS),
            )

    def _wear(self, engine: str) -> int:
        """Return a few tokens for an engine that has served more requests than others.

        The scheduler takes the first of several idle engines. Without these tokens the caches of the others would stay empty.
        """
        least = min(self._served[name] for name, other in self._context.health.engines.items() if other.healthy)
        return min(_MAX_WEAR_TOKENS, self._served[engine] - least)

    def _decode_figures(self) -> Iterator[EngineFigures]:
        context = self._context
        if not context.config.pairs:
            yield EngineFigures(
                self.name_of(PLAIN_DECODE_ENGINE),
                PLAIN_DECODE_ENGINE,
                hbm_tokens=_UNLIMITED_TOKENS,
                free_hbm_tokens=_UNLIMITED_TOKENS,
            )
            return
        for name, engine in context.health.engines.items():
            if not engine.healthy or engine.config.role is not Role.DECODE:
                continue
            work, metrics = context.work(name), context.metrics.get(name)
            capacity = metrics.capacity_tokens if metrics is not None and metrics.capacity_tokens else _UNLIMITED_TOKENS
            used = max(work.kv_tokens, metrics.used_tokens if metrics is not None else 0)
            yield EngineFigures(
                self.name_of(name),
                engine.config.node or name,
                engine.config.url,
                hbm_tokens=capacity,
                sequences=work.sequences,
                tokens=min(work.tokens, _MAX_TOKENS),
                free_hbm_tokens=max(0, capacity - used),
            )

    # ---- announced assignments
    def _apply(self, news: GroupUpdates) -> None:
        for event in news.events:
            if isinstance(event, Assigned):
                self._apply_assigned(event)
            elif (known := self._known.get(event.request_id)) is not None and known.generation == event.generation:
                self._forget(event.request_id)

    def _apply_assigned(self, event: Assigned) -> None:
        """Count an assigned request as in flight, until its own router does that itself."""
        if event.request_id.startswith(self._router_id) and event.request_id not in self.waiting:
            self._apply_reassigned(event)
            return
        self._interval_s = MIN_INTERVAL_S
        engine = self.engine_of(event.engine)
        known = self._known.get(event.request_id)
        if known is not None and known.generation != event.generation:
            self._forget(event.request_id)
            known = None
        if engine is None:
            return
        if known is None:
            known = self._known[event.request_id] = _KnownRequest(event.generation, self._context.now_s())
        known.engines.add(engine)
        decoding = self._context.health.engines[engine].config.role is Role.DECODE
        space = event.prompt_tokens + event.expected_output_tokens if decoding else 0
        entry = InflightEntry(engine, event.prompt_tokens, event.cached_tokens, space, decoding)
        self._context.inflight.begin(event.request_id, entry)

    def _apply_reassigned(self, event: Assigned) -> None:
        """Handle a new generation of one of this router's requests that already runs or has ended.

        The scheduler assigns again after it lost an engine or this router. A running request continues. An ended one is reported
        as finished with its decode engine's group; otherwise it would wait for a prefill engine until its timeout.
        """
        if event.request_id in self._active:
            self._active[event.request_id] = event.generation
        elif event.decode is not None:
            self._finished.append((event.generation, None))

    def _forget(self, request_id: str) -> None:
        known = self._known.pop(request_id, None)
        for engine in known.engines if known is not None else ():
            self._context.inflight.end(request_id, engine)

    def _expire(self) -> None:
        """Forget requests of routers that died."""
        now_s, max_age_s = self._context.now_s(), self._context.config.first_byte_timeout_ms / 1000
        while self._known:
            request_id, known = next(iter(self._known.items()))
            if now_s - known.since_s < max_age_s:
                return
            self._forget(request_id)
            self._context.counters.add(router_metrics.KNOWN_REQUESTS_EXPIRED)
