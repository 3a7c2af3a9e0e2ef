"""Request scheduling over gRPC: routers bring requests and wait, leaders of engine groups report and fetch.

The rules are pure (``kvstore.dualpath.scheduler``); here input is checked, routers wait, what groups must know is kept until they
have it, and silence is noticed. Runs on the event loop only; nothing here is written down: after a restart engines join with
their next report, and routers ask again.

A *generation*, as it travels, names one attempt of one request and nothing else: they are drawn from one counter that starts at
random, so that no report of an attempt before (or of a server before) can be taken for one of now.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core import limits
from kvstore.core.clock import Clock
from kvstore.core.errors import CapacityExceeded, Conflict, DeadlineExceeded, ErrorKind, InvalidArgument, KVStoreError, NotFound
from kvstore.core.status import make_error
from kvstore.dualpath.groups import Engine, EngineKind
from kvstore.dualpath.queues import ReadQueues
from kvstore.dualpath.scheduler import Ask, Fetched, GivenBack, Scheduler, SchedulerLimits
from kvstore.metadata.scheduling.engine_reports import ReportingGroup, check_report, figures_of, ref_of
from kvstore.metadata.scheduling.outbox import NO_WORK, PendingWork
from kvstore.observe.counters import Counters
from kvstore.rpc.codec import check_id, check_name

logger = logging.getLogger(__name__)

MAX_WAITING_CALLS: Final = 2_048
"""Routers' calls that wait at once: half of what the server takes at all, so that nodes and lookups are never shut out."""
MAX_GROUPS: Final = 4_096
MAX_ENGINES: Final = 65_536
MAX_BUDGET_S: Final = 600.0
EVENTS_AT_ONCE: Final = 1_024
"""Events in one answer; a group with so many unread is given no more work."""
MAX_UNREAD: Final = 16 * EVENTS_AT_ONCE
"""A group that lets so many pile up does not listen: it counts as dead."""
ENDED_KEPT: Final = 65_536
"""Requests that are over and whose late retries are told so."""
MAX_NEAR: Final = 1_024
"""Engines that a request may name as having its prefix at hand."""
FORMER_BOOTS: Final = 8
REQUEST_BYTES: Final = 2_048
"""What a request without names takes, of its messages and of the books; measured: 1.6 KB."""
NEAR_BYTES: Final = 192
"""The same of an engine that it names, beside the name."""

_FINISHED: Final = NotFound("the request is finished")


@dataclass(slots=True, eq=False)
class _Request:
    """A request under way. ``turn`` is the scheduler's generation, ``generation`` that which travels."""

    wanted: pb.AssignRequestRequest
    """What its router said, but for ``near``, and nothing that this server does not know."""
    ask: Ask
    """The same as the rules see it."""
    nbytes: int
    """What it is taken to occupy here."""
    generation: int
    since_s: float
    deadline_s: float
    """When it is dropped if it still lacks an engine."""
    turn: int = 0
    prefill: Engine | None = None
    decode: Engine | None = None
    prefilled: bool = False
    before: list[int] = field(default_factory=list)
    """Earlier generations under which its present decode engine had it: that one may finish it under any of them."""
    over: bool = False
    waiting: list[asyncio.Future[pb.Assignment]] = field(default_factory=list)

    @property
    def paired(self) -> bool:
        """Has it both engines?"""
        return self.prefill is not None and self.decode is not None

    def load(self, engine: Engine) -> PendingWork:
        """What it costs an engine."""
        return PendingWork(1, self.ask.cost(engine), self.ask.hbm_bytes)


class SchedulerService:
    """The scheduler behind RPCs.

    Args:
        rules: bounds of the rules.
        queues: planned reads of all nodes.
        engine_ttl_s: silence after which a group is dead.
        request_ttl_s: a request is forgotten so long after it came, whatever engines say (or never say).
        counters: events of this process.
        clock: time.
        shut_nodes: answers the nodes whose engines are given nothing, as they drain.
    """

    def __init__(
        self,
        rules: SchedulerLimits,
        queues: ReadQueues,
        *,
        engine_ttl_s: float,
        request_ttl_s: float,
        counters: Counters,
        clock: Clock,
        shut_nodes: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._scheduler = Scheduler(rules)
        self._queues = queues
        self._engine_ttl_s = engine_ttl_s
        self._request_ttl_s = request_ttl_s
        self._counters = counters
        self._clock = clock
        self._groups: dict[str, ReportingGroup] = {}
        self._home: dict[str, str] = {}  # engine -> group
        self._requests: dict[str, _Request] = {}  # in the order in which they came
        self._attempts: dict[int, _Request] = {}  # by generation
        self._generations = itertools.count(secrets.randbits(62) + 1)
        self._ended: OrderedDict[bytes, tuple[ErrorKind, str]] = OrderedDict()
        self._deadlines: list[tuple[float, int, _Request]] = []
        self._shut_nodes = shut_nodes
        self._waiting_calls = 0
        self._bytes = 0  # that requests and waiting calls are taken to occupy
        self._paired_s = clock.now_s()  # when a request last got its second engine

    def gauges(self) -> dict[str, int]:
        """How much there is of everything, for people."""
        waiting = self._scheduler.waiting()
        return {
            "metadata_scheduler_engines": len(self._home),
            "metadata_scheduler_requests": len(self._requests),
            "metadata_scheduler_bytes": self._bytes,
            "metadata_scheduler_waiting_prefill": waiting.prefill,
            "metadata_scheduler_waiting_decode": waiting.decode,
        }

    # ---- engines ----
    def report(self, request: pb.ReportEnginesRequest) -> pb.ReportEnginesResponse:
        """Takes a group's report in, and answers what it must know.

        Raises:
            InvalidArgument: malformed.
            Conflict: an engine of this name is in another group, or another boot of the group has taken its place.
            CapacityExceeded: too many groups or engines.
        """
        engines = check_report(request)
        group = self._group(request, engines)
        self._counters.add("metadata_engine_reports_total")
        if group is None:
            return pb.ReportEnginesResponse()
        if request.membership == group.membership:
            group.mail.acknowledge(request.acknowledged)
        self._ended_by(group, request)
        group.heard_s = self._clock.now_s()
        if request.sequence > group.sequence:  # else a retry: it gets its answer, and its figures are old
            group.sequence = request.sequence
            self._take_members(group, request, engines)
            if group.engines:
                self._fetch(group, request)
            else:
                self._lose(group, "has left")
                return pb.ReportEnginesResponse()
        return pb.ReportEnginesResponse(membership=group.membership, events=group.mail.first(EVENTS_AT_ONCE))

    def _group(self, request: pb.ReportEnginesRequest, engines: dict[str, Engine]) -> ReportingGroup | None:
        """The group that reports, made where it is new; None: one that is not known says good-bye."""
        group = self._groups.get(request.group)
        if group is not None and request.boot_id in group.former:
            raise Conflict("another boot of this group has taken its place", group=request.group)
        for name in engines:
            if self._home.get(name, request.group) != request.group:
                raise Conflict("an engine of this name is in another group", engine=name, group=self._home[name])
        more = len(engines) - (len(group.engines) if group is not None else 0)
        if len(self._home) + more > MAX_ENGINES or (group is None and len(self._groups) >= MAX_GROUPS):
            raise CapacityExceeded("too many engines", engines=len(self._home), groups=len(self._groups))
        role = EngineKind.PREFILL if request.role == pb.ENGINE_ROLE_PREFILL else EngineKind.DECODE
        if group is not None and group.boot == request.boot_id:
            if group.role is not role:
                raise Conflict("a group keeps its role", group=group.name, role=group.role)
            return group
        former: tuple[bytes, ...] = ()
        if group is not None:
            former = (*group.former, group.boot)[-FORMER_BOOTS:]
            self._lose(group, "was restarted")
        if not engines:
            return None
        membership, now_s = secrets.token_bytes(16), self._clock.now_s()
        group = self._groups[request.group] = ReportingGroup(request.group, role, request.boot_id, membership, former, 0, now_s)
        self._counters.add("metadata_groups_joined_total")
        logger.info("engine group %s joined: %s, %d engines", group.name, role, len(engines))
        return group

    def _take_members(self, group: ReportingGroup, request: pb.ReportEnginesRequest, engines: dict[str, Engine]) -> None:
        """Engines that are new join, those that are no longer reported (or have moved) are gone. More or less room is no move."""
        for name, engine in engines.items():
            before = group.engines.get(name)
            if before is not None and before.hbm_bytes != engine.hbm_bytes and before.node == engine.node:
                self._scheduler.resize(name, engine.hbm_bytes)
                group.engines[name] = engine
                self._counters.add("metadata_engines_resized_total")
        gone = [name for name, engine in group.engines.items() if engines.get(name) != engine]
        if gone:
            given_back = self._remove(group, gone, engines)
            logger.warning("engine group %s lost %s; %d requests given back", group.name, ", ".join(gone[:8]), given_back)
        for state in request.engines:
            if state.engine not in group.engines:
                engine = group.engines[state.engine] = engines[state.engine]
                self._home[state.engine] = group.name
                self._scheduler.join(engine)
            known = group.refs.get(state.engine)
            if known is None or known.address != state.address:
                group.refs[state.engine] = ref_of(state, group.name)

    def _remove(self, group: ReportingGroup, names: Sequence[str], staying: Container[str] = ()) -> int:
        """Engines are gone; answers how many requests wait again for that. Of those that live on elsewhere the group is told."""
        requests = 0
        for name in names:
            given_back = self._scheduler.remove_engine(name)
            engine = group.engines.pop(name)
            del group.refs[name], self._home[name]
            for back in given_back:
                if name in staying:
                    self._revoke(self._requests[back.request_id], engine)
                self._given_back(back)
            requests += len(given_back)
        self._counters.add("metadata_engines_lost_total", len(names))
        self._counters.add("metadata_requests_given_back_total", requests)
        return requests

    def _lose(self, group: ReportingGroup, why: str) -> None:
        """A group is gone, with all its engines."""
        del self._groups[group.name]  # first: nothing more is told to it
        engines = list(group.engines)
        given_back = self._remove(group, engines)
        self._scheduler.remove_group(group.name)
        self._counters.add("metadata_groups_lost_total")
        logger.warning("engine group %s %s: %d engines gone, %d requests given back", group.name, why, len(engines), given_back)

    def _fetch(self, group: ReportingGroup, request: pb.ReportEnginesRequest) -> None:
        now_s = self._clock.now_s()
        pending: dict[str, int] = {}

        def pending_tokens(node: str) -> int:
            if node not in pending:
                state = self._queues.state(node, now_s)
                pending[node] = state.pending_tokens if state is not None else 0
            return pending[node]

        figures = figures_of(request, group, pending_tokens)
        self._scheduler.shut(self._shut_nodes())
        if len(group.mail) < EVENTS_AT_ONCE:
            self._assigned(group, self._scheduler.fetch(group.name, figures))
        else:
            self._scheduler.report(figures)
            self._counters.add("metadata_fetches_skipped_total")

    def _assigned(self, group: ReportingGroup, fetched: Fetched) -> None:
        for one in fetched.assigned:
            entry = self._requests[one.request_id]
            engine = group.engines[one.engine]
            if group.role is EngineKind.PREFILL:
                entry.prefill, other = engine, entry.decode
            else:
                entry.decode, other = engine, entry.prefill
            self._tell(engine, entry, entry.load(engine))
            if other is not None:
                self._tell(other, entry)
                self._answer(entry)
        if fetched.pairs:
            self._paired_s = self._clock.now_s()
        if fetched.assigned:
            self._counters.add("metadata_requests_assigned_total", len(fetched.assigned))
            self._counters.add("metadata_requests_paired_total", len(fetched.pairs))

    def _ended_by(self, group: ReportingGroup, request: pb.ReportEnginesRequest) -> None:
        """What a group says of its requests; of those that are no longer (or never were) its own it is void."""
        void = 0
        for generation in request.prefilled:
            entry = self._own(group, generation)
            current = entry is not None and entry.generation == generation
            if entry is not None and current and self._scheduler.prefill_done(entry.wanted.request_id, entry.turn):
                entry.prefilled = True
            else:
                void += 1
        for generation in request.finished:
            entry = self._own(group, generation)
            if entry is None:
                void += 1
                continue
            self._counters.add("metadata_requests_finished_total")
            if entry.generation == generation and self._scheduler.finish(entry.wanted.request_id, entry.turn):
                if not entry.prefilled and entry.prefill is not None:  # whose word comes late, or never: it need not go on
                    self._revoke(entry, entry.prefill)
                self._end(entry, _FINISHED)
            else:  # its prefill engine died after it had done its part: whoever was to compute the prompt again need not
                self._drop(entry, _FINISHED)
        if void:
            self._counters.add("metadata_scheduler_void_reports_total", void)

    def _own(self, group: ReportingGroup, generation: int) -> _Request | None:
        """The request of a generation, if an engine of the group has it."""
        entry = self._attempts.get(generation)
        if entry is None:
            return None
        engine = entry.prefill if group.role is EngineKind.PREFILL else entry.decode
        return entry if engine is not None and engine.group == group.name else None

    # ---- requests ----
    async def assign(self, request: pb.AssignRequestRequest, left_s: float = MAX_BUDGET_S) -> pb.Assignment:
        """Waits until a request has its engines.

        Args:
            request: what a router asks.
            left_s: how long the caller waits at most, whatever its request says.

        Raises:
            InvalidArgument: malformed.
            Conflict: another request of this name is under way.
            CapacityExceeded: too many requests, or too many calls that wait, or they take too much memory.
            DeadlineExceeded: no engines in time. Where the request had none before, it is dropped.
            NotFound: the request was called off, is finished, or (with ``after_generation``) is not known: submit it again.
        """
        budget_s = min(_check_request(request) / 1000, left_s, MAX_BUDGET_S)
        after = request.after_generation
        entry = self._find(request)
        if entry is not None and entry.paired and entry.generation != after:
            return self._assignment(entry)
        if self._waiting_calls >= MAX_WAITING_CALLS:
            self._counters.add("metadata_requests_refused_total")
            raise CapacityExceeded("too many calls wait for engines", limit=MAX_WAITING_CALLS)
        nbytes = _bytes_of(request)
        self._check_room(2 * nbytes if entry is None else nbytes)
        if entry is None:
            entry = self._submit(request, budget_s, nbytes)
        elif not entry.paired:
            self._wait_until(entry, max(entry.deadline_s, self._clock.now_s() + budget_s))
        self._bytes += nbytes  # gRPC has the message for as long as its call waits
        try:
            return await self._wait(entry, after, budget_s)
        finally:
            self._bytes -= nbytes

    def _check_room(self, nbytes: int) -> None:
        if self._bytes + nbytes > limits.MAX_SCHEDULED_BYTES:
            self._counters.add("metadata_requests_refused_total")
            raise CapacityExceeded("requests take too much memory", bytes=self._bytes, limit=limits.MAX_SCHEDULED_BYTES)

    def cancel(self, request: pb.CancelRequestRequest) -> bool:
        """Drops a request. False: it is not known (any more); a late call that would bring it is refused then.

        Raises:
            InvalidArgument: malformed.
        """
        operation = check_id(request.operation_id, "operation_id")
        entry = self._requests.get(check_name(request.request_id, "request_id"))
        if entry is None or entry.wanted.operation_id != operation:
            self._remember(operation, NotFound("the request was called off"))
            return False
        self._drop(entry, NotFound("the request was called off"))
        self._counters.add("metadata_requests_cancelled_total")
        return True

    def _find(self, request: pb.AssignRequestRequest) -> _Request | None:
        """The request that a call speaks of; None: it is new."""
        ended = self._ended.get(request.operation_id)
        if ended is not None:
            kind, message = ended
            raise make_error(kind, message, {"request": request.request_id})
        entry = self._requests.get(request.request_id)
        if entry is not None and entry.wanted.operation_id != request.operation_id:
            raise Conflict("another request of this name is under way", request=request.request_id)
        if entry is None and request.after_generation:
            raise NotFound("the request is not known (the server may have been restarted): submit it again")
        return entry

    def _submit(self, request: pb.AssignRequestRequest, budget_s: float, nbytes: int) -> _Request:
        ask, now_s = _ask(request), self._clock.now_s()
        try:
            self._scheduler.submit(ask)
        except CapacityExceeded:
            self._counters.add("metadata_requests_refused_total")
            raise
        wanted = pb.AssignRequestRequest(
            operation_id=request.operation_id,
            request_id=request.request_id,
            prompt_tokens=request.prompt_tokens,
            hit_tokens=request.hit_tokens,
            expected_output_tokens=request.expected_output_tokens,
            budget_ms=request.budget_ms,
        )
        entry = _Request(wanted, ask, nbytes, next(self._generations), now_s, now_s + budget_s)
        self._requests[request.request_id] = entry
        self._bytes += nbytes
        self._attempts[entry.generation] = entry
        self._wait_until(entry, entry.deadline_s)
        self._counters.add("metadata_requests_submitted_total")
        return entry

    async def _wait(self, entry: _Request, after: int, budget_s: float) -> pb.Assignment:
        answer: asyncio.Future[pb.Assignment] = asyncio.get_running_loop().create_future()
        entry.waiting.append(answer)
        self._waiting_calls += 1
        try:
            async with asyncio.timeout(budget_s):
                return await answer
        except TimeoutError:
            if entry.paired and not entry.over and entry.generation != after:  # in this very moment
                return self._assignment(entry)
            late = DeadlineExceeded("no engines for the request in time", request=entry.wanted.request_id, seconds=budget_s)
            # a call that waited for other engines may come again; the request has its own deadline then
            if not after and not entry.paired and not entry.over and entry.waiting == [answer]:
                self._too_late(entry, late)
            raise late from None
        finally:
            self._waiting_calls -= 1
            entry.waiting.remove(answer)

    def _answer(self, entry: _Request) -> None:
        """The request has its engines: whoever waits for it hears of it."""
        for call in entry.waiting:
            if not call.done():
                call.set_result(self._assignment(entry))

    # ---- time ----
    def expire(self) -> None:
        """Notices groups that are silent or do not listen, and requests that nobody waits for any more. Called now and then."""
        now_s = self._clock.now_s()
        for group in list(self._groups.values()):
            if now_s - group.heard_s > self._engine_ttl_s:
                self._lose(group, f"was silent for {now_s - group.heard_s:.1f} s")
            elif len(group.mail) > MAX_UNREAD:
                self._lose(group, "acknowledges nothing that it is told")
        if now_s - self._paired_s > self._engine_ttl_s:
            self._paired_s = now_s
            self._untangle()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, _, entry = heapq.heappop(self._deadlines)
            if not entry.over and not entry.paired and entry.deadline_s <= now_s:
                self._too_late(entry, DeadlineExceeded("no engines for the request in time"))
        while self._requests:
            entry = next(iter(self._requests.values()))
            if entry.since_s + self._request_ttl_s > now_s:
                break
            # engines are told nothing: one may still be at work on it, only its reports will be void
            self._scheduler.cancel(entry.wanted.request_id)
            self._end(entry, NotFound("the request is older than the server keeps requests"))
            self._counters.add("metadata_requests_forgotten_total")

    def _untangle(self) -> None:
        """Ends a standstill: some hold prefill engines and wait for room to decode, which others hold that wait to be prefilled.

        In order of arrival nobody waits in a circle; but what the dead give back goes before what came earlier. Those that hold
        room queue anew: it serves the others first.
        """
        halves = [entry for entry in self._requests.values() if (entry.prefill is None) != (entry.decode is None)]
        holding = [entry for entry in halves if entry.decode is not None]
        if not holding or len(holding) == len(halves):
            return
        for entry in holding:
            self._scheduler.cancel(entry.wanted.request_id)
            self._revoke_all(entry)
            self._forget_attempts(entry)
            entry.generation, entry.turn, entry.decode = next(self._generations), 0, None
            self._attempts[entry.generation] = entry
            self._scheduler.submit(entry.ask)
        self._counters.add("metadata_requests_requeued_total", len(holding))
        logger.warning("no request got both engines for %.1f s: %d that held one queue anew", self._engine_ttl_s, len(holding))

    def _wait_until(self, entry: _Request, deadline_s: float) -> None:
        entry.deadline_s = deadline_s
        heapq.heappush(self._deadlines, (deadline_s, next(self._generations), entry))
        if len(self._deadlines) > 2 * len(self._requests) + 1_024:  # most are of requests that have their engines or are over
            live = {id(entry): (entry.deadline_s, entry.generation, entry) for _, _, entry in self._deadlines if not entry.over}
            self._deadlines = [item for item in live.values() if not item[2].paired]
            heapq.heapify(self._deadlines)

    def _too_late(self, entry: _Request, error: DeadlineExceeded) -> None:
        self._drop(entry, error)
        self._counters.add("metadata_requests_expired_total")

    # ---- within ----
    def _given_back(self, back: GivenBack) -> None:
        """A request lost an engine: it waits again, as long as it was allowed to at first."""
        entry = self._requests[back.request_id]
        if back.left is not None and back.left.role is EngineKind.DECODE:
            entry.before.append(entry.generation)
        else:
            self._forget_attempts(entry)
        entry.generation, entry.turn = next(self._generations), back.generation
        self._attempts[entry.generation] = entry
        entry.prefill = back.left if back.left is not None and back.left.role is EngineKind.PREFILL else None
        entry.decode = back.left if back.left is not None and back.left.role is EngineKind.DECODE else None
        entry.prefilled = False
        self._wait_until(entry, self._clock.now_s() + min(entry.wanted.budget_ms / 1000, MAX_BUDGET_S))
        if back.left is not None:
            self._tell(back.left, entry)

    def _drop(self, entry: _Request, why: KVStoreError) -> None:
        """A request leaves the scheduler without being finished; engines that have it are told."""
        self._scheduler.cancel(entry.wanted.request_id)
        self._revoke_all(entry)
        self._end(entry, why)

    def _revoke_all(self, entry: _Request) -> None:
        """Engines that have something to do for the request are told to leave it."""
        for engine in (None if entry.prefilled else entry.prefill, entry.decode):
            if engine is not None:
                self._revoke(entry, engine)

    def _revoke(self, entry: _Request, engine: Engine) -> None:
        """One of them is."""
        group = self._groups.get(engine.group)
        if group is not None:
            revoked = pb.RevokedRequest(request_id=entry.wanted.request_id, generation=entry.generation)
            group.mail.put(pb.SchedulerEvent(revoked=revoked))

    def _forget_attempts(self, entry: _Request) -> None:
        """What engines say of the request's attempts until now is void."""
        for generation in (*entry.before, entry.generation):
            del self._attempts[generation]
        entry.before.clear()

    def _end(self, entry: _Request, why: KVStoreError) -> None:
        entry.over = True
        del self._requests[entry.wanted.request_id]
        self._bytes -= entry.nbytes
        entry.ask = Ask(entry.ask.request_id, entry.ask.tokens)  # the heap of deadlines may hold on to the entry
        self._forget_attempts(entry)
        self._remember(entry.wanted.operation_id, why)
        for call in entry.waiting:
            if not call.done():
                call.set_exception(make_error(why.kind, why.message, {"request": entry.wanted.request_id}))

    def _remember(self, operation: bytes, why: KVStoreError) -> None:
        self._ended[operation] = (why.kind, why.message)
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def _tell(self, engine: Engine, entry: _Request, load: PendingWork = NO_WORK) -> None:
        """An engine's group is told how a request stands."""
        group = self._groups.get(engine.group)
        if group is None:
            return
        wanted = entry.wanted
        assigned = pb.ScheduledRequest(
            request_id=wanted.request_id,
            generation=entry.generation,
            engine=engine.engine,
            prompt_tokens=wanted.prompt_tokens,
            hit_tokens=wanted.hit_tokens,
            expected_output_tokens=wanted.expected_output_tokens,
            prefill=self._ref(entry.prefill),
            decode=self._ref(entry.decode),
            near_tokens=entry.ask.spared(engine),
        )
        group.mail.put(pb.SchedulerEvent(assigned=assigned), engine.engine, load)

    def _assignment(self, entry: _Request) -> pb.Assignment:
        return pb.Assignment(generation=entry.generation, prefill=self._ref(entry.prefill), decode=self._ref(entry.decode))

    def _ref(self, engine: Engine | None) -> pb.EngineRef | None:
        """An engine as others are told of it. One that has done its part may be gone: then what it joined with."""
        if engine is None:
            return None
        group = self._groups.get(engine.group)
        known = group.refs.get(engine.engine) if group is not None else None
        return known or pb.EngineRef(engine=engine.engine, node=engine.node, group=engine.group)


def _ask(request: pb.AssignRequestRequest) -> Ask:
    """A request as the rules see it. Room is counted in tokens: any unit does, so long as engines use the same."""
    room = request.prompt_tokens + request.expected_output_tokens
    return Ask(request.request_id, request.prompt_tokens, room, {near.engine: near.tokens for near in request.near})


def _bytes_of(request: pb.AssignRequestRequest) -> int:
    """What a request is taken to occupy, once as its call's message and once in the books: measured, and rounded up."""
    return REQUEST_BYTES + request.ByteSize() + len(request.near) * NEAR_BYTES


def _check_request(request: pb.AssignRequestRequest) -> int:
    """A request's shape; answers its budget in milliseconds.

    Raises:
        InvalidArgument: a field is missing or out of bounds.
    """
    check_id(request.operation_id, "operation_id")
    check_name(request.request_id, "request_id")
    if request.prompt_tokens < 1 or request.hit_tokens > request.prompt_tokens:
        raise InvalidArgument(
            "a request takes a prompt, and hits within it", prompt_tokens=request.prompt_tokens, hit_tokens=request.hit_tokens
        )
    if len(request.near) > MAX_NEAR or any(near.tokens > request.prompt_tokens for near in request.near):
        raise InvalidArgument("engines have a part of the prompt at hand, and not too many of them", most=MAX_NEAR)
    for near in request.near:
        check_name(near.engine, "engine")
    if sum(len(near.engine) for near in request.near) > limits.MAX_NEAR_NAMES:
        raise InvalidArgument("names of engines at hand are too long, all together", most=limits.MAX_NEAR_NAMES)
    if request.budget_ms < 1:
        raise InvalidArgument("a request takes a budget: how long it may wait for engines", budget_ms=request.budget_ms)
    return request.budget_ms
