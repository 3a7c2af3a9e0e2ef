"""Reports for the engines: vLLM knows nothing of our scheduler, so the router leads their groups.

It knows best what they have to do, for it sees each request begin, compute and end; what others send them shows in their own
figures. An agent beside each engine would know no more, and would be one more daemon. Of several routers that share a pool one
reports; the scheduler tells it what the others were assigned.

At the scheduler, plain engines are prefill engines: what is scarce for a request is whoever computes its prompt, and the prefix
decides who should. A decode engine with room for anything stands beside them, so that every request finds a pair.
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
    GroupNews,
    KVStoreError,
)
from kvstore.core.errors import Conflict, Unavailable
from kvstore.observe.limited_log import LimitedLog
from kvstore.router.config import Role
from kvstore.router.ledger import Entry
from kvstore.router.parts import Parts

_logger = logging.getLogger(__name__)
_log = LimitedLog(_logger)

IDLE_S: Final = 0.1
"""Between reports while nobody waits."""
FIRST_S: Final = 0.003
"""Between reports while somebody waits, at first; doubled as long as nobody is assigned, up to ``IDLE_S``."""
AWAY_S: Final = 1.0
"""A server that has not answered for so long is away."""
COUNT_S: Final = 0.5
"""How often a router that does not report asks whether the scheduler knows engines."""
_REPORT_S: Final = 1.0
_OVERLOADED: Final = 1 << 39
"""Tokens of an engine that is to get nothing now: above any threshold."""
_ANY_ROOM: Final = 1 << 39
_MOST_WEAR: Final = 32
"""Tokens; less than any prefix worth preferring."""
WHOLE: Final = "whole"
"""The decode engine that stands for all plain ones."""


@dataclass(slots=True)
class _Told:
    """A request that the scheduler told of.

    Attributes:
        generation: the latest.
        since_s: when.
        engines: those that have it.
    """

    generation: int
    since_s: float
    engines: set[str] = field(default_factory=set)


class Reporter:
    """Leads the groups of one router's engines.

    Args:
        parts: of the router.
        client: of the scheduler.
        mine: begins the names of this router's own requests.
    """

    def __init__(self, parts: Parts, client: AsyncSchedulerClient, mine: str) -> None:
        self._parts = parts
        self._client = client
        self._mine = mine
        self._prefix = f"{parts.config.name}:"
        self.waiting: set[str] = set()
        """This router's requests that wait for engines."""
        self.away = asyncio.Event()
        """Set while the server does not answer."""
        self.back = asyncio.Event()
        """Set while it does."""
        self._answered_s = parts.now_s()
        self._counted_s = -COUNT_S
        self._poke = asyncio.Event()
        self._prefilled: list[int] = []
        self._finished: list[int] = []
        self._told: dict[str, _Told] = {}
        self._served: Counter[str] = Counter()
        self._active: dict[str, int] = {}  # this router's requests that have engines: their generation
        self._leaders: tuple[AsyncGroupLeader, AsyncGroupLeader] | None = None
        self._task: asyncio.Task[None] | None = None
        self._gap_s = FIRST_S

    # ---- life
    def start(self) -> None:
        """Begins to report."""
        name = self._parts.config.name
        if self._parts.config.report:
            self._leaders = (self._client.leader(f"{name}:prefill", "prefill"), self._client.leader(f"{name}:decode", "decode"))
        self._task = asyncio.create_task(self._go_on())

    async def stop(self) -> None:
        """Ends; the engines leave the scheduler at once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._leaders is not None and not self.away.is_set():
            await asyncio.gather(*(leader.leave() for leader in self._leaders), return_exceptions=True)

    def engine_of(self, name: str) -> str | None:
        """An engine as the router calls it; None: it is not one of this router's."""
        engine = name.removeprefix(self._prefix)
        return engine if name != engine and engine in self._parts.pool.engines else None

    def name_of(self, engine: str) -> str:
        """An engine as the scheduler calls it."""
        return self._prefix + engine

    # ---- what requests do
    def begins(self, request_id: str) -> None:
        """One of this router's requests will wait."""
        self.waiting.add(request_id)

    def asked(self) -> None:
        """It was sent to the scheduler: a report that follows it finds it there."""
        self._gap_s = FIRST_S
        self._poke.set()

    def placed(self, request_id: str, generation: int = 0, engine: str = "") -> None:
        """It waits no longer.

        Args:
            request_id: which.
            generation: of its assignment; 0: it has none.
            engine: that computes its prompt; it is in the ledger by itself now.
        """
        if generation:
            self._active[request_id] = generation
        if engine:
            self._served[engine] += 1
        self.waiting.discard(request_id)
        self._forget(request_id)

    def prefilled(self, request_id: str) -> None:
        """Its prompt is computed."""
        generation = self._active.get(request_id)
        if self._leaders is not None and generation is not None:
            self._prefilled.append(generation)

    def ended(self, request: EngineRequest) -> None:
        """One that was assigned is over, well or not."""
        self._gap_s = FIRST_S
        generation = self._active.pop(request.request_id, 0)
        if self._leaders is not None:
            self._finished.append(generation)
        else:
            self._parts.keep(asyncio.ensure_future(self._call_off(request)))
        if self.waiting:
            self._poke.set()

    async def _call_off(self, request: EngineRequest) -> None:
        try:
            await self._client.cancel(request)
        except KVStoreError:
            self._parts.counters.add("router_untold_ends_total")

    # ---- the beat
    async def _go_on(self) -> None:
        while True:
            began_s = self._parts.now_s()
            try:
                await (self._report(self._leaders) if self._leaders is not None else self._ask_whether_there())
                self._answered()
            except Conflict as error:
                self._leaders = None
                self._parts.counters.add("router_reports_taken_over_total")
                _logger.error("another router reports for these engines; this one goes on without reporting: %s", error)  # noqa: TRY400
            except KVStoreError as error:
                self._unanswered(error)
            self._expire()
            await self._pause(began_s)

    async def _pause(self, began_s: float) -> None:
        """Until the next report is due: sooner while somebody waits, at once for somebody new."""
        gap_s = self._gap_s if self.waiting and not self.away.is_set() else IDLE_S
        self._gap_s = min(2 * self._gap_s, IDLE_S)
        await asyncio.sleep(max(0.0, min(FIRST_S, began_s + FIRST_S - self._parts.now_s())))
        try:
            async with asyncio.timeout(max(0.0, began_s + gap_s - self._parts.now_s())):
                await self._poke.wait()
        except TimeoutError:
            pass
        self._poke.clear()

    def _answered(self) -> None:
        self._answered_s = self._parts.now_s()
        if not self.back.is_set():
            _logger.info("the scheduler answers")
        self.away.clear()
        self.back.set()

    def _unanswered(self, error: KVStoreError) -> None:
        self._parts.counters.add("router_reports_failed_total")
        _log.warning("the scheduler is of no use: %s", error)
        if self._parts.now_s() - self._answered_s > AWAY_S and not self.away.is_set():
            _logger.warning("the scheduler is away: this router decides by itself until it is back")
            self.away.set()
            self.back.clear()

    async def _ask_whether_there(self) -> None:
        """A router that does not report asks for the sake of the answer, and now and then whether anybody does.

        Raises:
            Unavailable: nobody: the router that reported is gone, or has not come yet.
            KVStoreError: the server does not answer.
        """
        now_s = self._parts.now_s()
        if now_s - self._counted_s >= COUNT_S or self.away.is_set():
            if not await self._client.engines(_REPORT_S):
                raise Unavailable("the scheduler knows no engines: does the router that reports for them live?")
            self._counted_s = now_s
        else:
            await self._client.cancel(EngineRequest(f"{self._mine}-0", 1), _REPORT_S)

    async def _report(self, leaders: tuple[AsyncGroupLeader, AsyncGroupLeader]) -> None:
        prefilled, self._prefilled = self._prefilled, []
        finished, self._finished = self._finished, []
        # what is not told because a call fails goes with the next report: the leader keeps it
        answers = await asyncio.gather(
            leaders[0].report(list(self._prefill_figures()), prefilled=prefilled, deadline_s=_REPORT_S),
            leaders[1].report(list(self._decode_figures()), finished=finished, deadline_s=_REPORT_S),
            return_exceptions=True,
        )
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        for answer in answers:
            if isinstance(answer, GroupNews):
                self._take(answer)
        self._parts.counters.add("router_reports_total")
        if failures:
            raise failures[0]

    # ---- figures
    def _prefill_figures(self) -> Iterator[EngineFigures]:
        parts, now_s = self._parts, self._parts.now_s()
        for name, health in parts.pool.engines.items():
            if not health.up or health.config.role is Role.DECODE:
                continue
            load = parts.load(name)
            tokens = load.tokens + self._wear(name)
            if health.busy_until_s > now_s:
                tokens = _OVERLOADED
            yield EngineFigures(
                self.name_of(name),
                health.config.node or name,
                health.config.url,
                sequences=load.sequences,
                tokens=min(tokens, _OVERLOADED),
            )

    def _wear(self, engine: str) -> int:
        """A few tokens for an engine that has served more than others: among idle ones the scheduler takes the first.

        Without them all idle engines but one would keep empty caches.
        """
        least = min(self._served[name] for name, health in self._parts.pool.engines.items() if health.up)
        return min(_MOST_WEAR, self._served[engine] - least)

    def _decode_figures(self) -> Iterator[EngineFigures]:
        parts, now_s = self._parts, self._parts.now_s()
        if not parts.config.pairs:
            yield EngineFigures(self.name_of(WHOLE), WHOLE, hbm_tokens=_ANY_ROOM, free_hbm_tokens=_ANY_ROOM)
            return
        for name, health in parts.pool.engines.items():
            if not health.up or health.config.role is not Role.DECODE:
                continue
            load, metrics = parts.load(name), parts.metrics.get(name)
            capacity = metrics.capacity_tokens if metrics is not None and metrics.capacity_tokens else _ANY_ROOM
            used = max(load.room_tokens, metrics.used_tokens if metrics is not None else 0)
            yield EngineFigures(
                self.name_of(name),
                health.config.node or name,
                health.config.url,
                hbm_tokens=capacity,
                sequences=load.sequences,
                tokens=min(load.tokens, _OVERLOADED),
                free_hbm_tokens=0 if health.busy_until_s > now_s else max(0, capacity - used),
            )

    # ---- news
    def _take(self, news: GroupNews) -> None:
        for event in news.events:
            if isinstance(event, Assigned):
                self._take_assigned(event)
            elif (told := self._told.get(event.request_id)) is not None and told.generation == event.generation:
                self._forget(event.request_id)

    def _take_assigned(self, event: Assigned) -> None:
        """Books what was assigned, until its own router books it itself: here at once, elsewhere never."""
        if event.request_id.startswith(self._mine) and event.request_id not in self.waiting:
            self._take_again(event)
            return
        self._gap_s = FIRST_S
        engine = self.engine_of(event.engine)
        told = self._told.get(event.request_id)
        if told is not None and told.generation != event.generation:
            self._forget(event.request_id)
            told = None
        if engine is None:
            return
        if told is None:
            told = self._told[event.request_id] = _Told(event.generation, self._parts.now_s())
        told.engines.add(engine)
        decoding = self._parts.pool.engines[engine].config.role is Role.DECODE
        room = event.prompt_tokens + event.expected_output_tokens if decoding else 0
        self._parts.ledger.begin(event.request_id, Entry(engine, event.prompt_tokens, event.near_tokens, room, decoding))

    def _take_again(self, event: Assigned) -> None:
        """One of this router's own that has its engines already, or is over.

        Another generation comes where the scheduler took an engine, or this router, for dead. What runs, runs on; what has ended
        since is told to be over once its decode engine's group may say so, or it would wait for a prefill engine all its time.
        """
        if event.request_id in self._active:
            self._active[event.request_id] = event.generation
        elif event.decode is not None:
            self._finished.append(event.generation)

    def _forget(self, request_id: str) -> None:
        told = self._told.pop(request_id, None)
        for engine in told.engines if told is not None else ():
            self._parts.ledger.end(request_id, engine)

    def _expire(self) -> None:
        """Requests of routers that died without a word do not count for ever."""
        now_s, most_s = self._parts.now_s(), self._parts.config.first_byte_timeout_s
        while self._told:
            request_id, told = next(iter(self._told.items()))
            if now_s - told.since_s < most_s:
                return
            self._forget(request_id)
            self._parts.counters.add("router_told_expired_total")
