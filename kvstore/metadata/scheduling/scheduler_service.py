"""Request scheduling over gRPC: routers submit requests and wait; leaders of engine groups report and fetch work.

The scheduling rules are pure (``kvstore.dualpath.scheduler``). This module connects them to the calls: groups and their engines
(``groups``), requests and their attempts (``requests``), events and answers (``answers``). It runs on the event loop only and
keeps nothing on disk: after a restart, engines join again with their next report, and routers submit their requests again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Container, Sequence
from typing import Final

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core import limits
from kvstore.core.clock import Clock
from kvstore.core.errors import CapacityExceeded, Conflict, DeadlineExceeded, KVStoreError, NotFound, Unavailable
from kvstore.dualpath.groups import Engine, EngineKind
from kvstore.dualpath.queues import ReadQueues
from kvstore.dualpath.scheduler import FetchResult, RequeuedRequest, Scheduler, SchedulerLimits
from kvstore.metadata.scheduling.answers import RequestNotifier
from kvstore.metadata.scheduling.engine_reports import check_report, figures_of, ref_of
from kvstore.metadata.scheduling.groups import GroupTable, ReportingGroup
from kvstore.metadata.scheduling.requests import RequestTable, RouterRequest, ask_of, check_request, request_bytes
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.rpc.codec import check_id, check_name

logger = logging.getLogger(__name__)

MAX_WAITING_CALLS: Final = 2_048
"""Maximum number of waiting router calls: half of the calls that the server accepts, so that nodes and lookups always get in."""
MAX_BUDGET_S: Final = 600.0
EVENTS_AT_ONCE: Final = 1_024
"""Maximum number of events per answer. A group with as many unread events gets no new work."""
MAX_UNREAD: Final = 16 * EVENTS_AT_ONCE
"""A group with more unread events counts as dead."""
_LOGGED_NAMES: Final = 8

_FINISHED: Final = NotFound("the request is finished")
_CANCELLED: Final = NotFound("the request was cancelled")


class SchedulerService:
    """Handlers of the calls of routers and engine groups.

    Args:
        rules: limits of the scheduler.
        queues: planned reads of all nodes.
        engine_ttl_s: silence after which a group is dead.
        request_ttl_s: age at which a request is forgotten even if engines never report it as finished.
        counters: counters of this process.
        clock: clock.
        draining_nodes: returns the draining nodes, whose engines get no new requests.
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
        draining_nodes: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._rules = rules
        self._queues = queues
        self._engine_ttl_s = engine_ttl_s
        self._request_ttl_s = request_ttl_s
        self._counters = counters
        self._clock = clock
        self._draining_nodes = draining_nodes
        self._waiting_calls = 0
        self._begin()

    def _begin(self) -> None:
        self._scheduler = Scheduler(self._rules)
        self._groups = GroupTable()
        self._requests = RequestTable(self._clock)
        self._notifier = RequestNotifier(self._groups)
        self._paired_s = self._clock.now_s()  # when a request last got its second engine

    def clear(self) -> None:
        """Forget all engines and requests: another server assigns requests now, or this one begins to. Waiting calls fail."""
        requests = list(self._requests)
        for request in requests:
            self._requests.end(request, Unavailable("another server assigns requests now: submit the request again"))
        self._begin()
        if requests:
            logger.warning(
                "requests forgotten: their routers submit them to the server that assigns requests now (requests=%d)",
                len(requests),
            )

    @property
    def engines(self) -> int:
        """Number of engines whose groups report."""
        return self._groups.engines

    def gauges(self) -> dict[str, int]:
        """Numbers of engines and requests."""
        waiting = self._scheduler.waiting()
        return {
            "metadata_scheduler_engines": self._groups.engines,
            "metadata_scheduler_requests": len(self._requests),
            "metadata_scheduler_bytes": self._requests.bytes,
            "metadata_scheduler_waiting_prefill": waiting.prefill,
            "metadata_scheduler_waiting_decode": waiting.decode,
        }

    # ---- engines ----
    def report(self, request: pb.ReportEnginesRequest) -> pb.ReportEnginesResponse:
        """Process a group's report and return its unread events.

        Raises:
            InvalidArgument: the report is malformed.
            Conflict: an engine of this name is in another group, or another boot of the group has replaced this one.
            CapacityExceeded: too many groups or engines.
        """
        engines = check_report(request)
        group = self._find_or_join(request, engines)
        self._counters.add(metadata_metrics.ENGINE_REPORTS)
        if group is None:
            return pb.ReportEnginesResponse()
        if request.membership == group.membership:
            group.outbox.acknowledge(request.acknowledged)
        self._end_reported(group, request)
        group.heard_s = self._clock.now_s()
        if request.sequence > group.sequence:  # a retry gets the answer only: its figures are old
            group.sequence = request.sequence
            self._update_engines(group, request, engines)
            if group.engines:
                self._fetch(group, request)
            else:
                self._remove_group(group, "left")
                return pb.ReportEnginesResponse()
        return pb.ReportEnginesResponse(membership=group.membership, events=group.outbox.first(EVENTS_AT_ONCE))

    def _find_or_join(self, request: pb.ReportEnginesRequest, engines: dict[str, Engine]) -> ReportingGroup | None:
        """The group that reports; a new group joins. None: an unknown group reports no engines."""
        self._groups.check(request, engines)
        group = self._groups.get(request.group)
        kind = EngineKind.PREFILL if request.role == pb.ENGINE_ROLE_PREFILL else EngineKind.DECODE
        if group is not None and group.boot == request.boot_id:
            if group.kind is not kind:
                raise Conflict("the role of a group cannot change", group=group.name, role=group.kind)
            return group
        former: tuple[bytes, ...] = ()
        if group is not None:
            former = group.next_former()
            self._remove_group(group, "restarted")
        if not engines:
            return None
        membership, now_s = secrets.token_bytes(16), self._clock.now_s()
        group = ReportingGroup(request.group, kind, request.boot_id, membership, former, 0, now_s)
        self._groups.add(group)
        self._counters.add(metadata_metrics.GROUPS_JOINED)
        logger.info("engine group joined: %s (role=%s, engines=%d)", group.name, kind, len(engines))
        return group

    def _update_engines(self, group: ReportingGroup, request: pb.ReportEnginesRequest, engines: dict[str, Engine]) -> None:
        """Add new engines, and remove those that moved or are no longer reported. A change of KV memory is a resize only."""
        for name, engine in engines.items():
            before = group.engines.get(name)
            if before is not None and before.hbm_units != engine.hbm_units and before.node == engine.node:
                self._scheduler.resize(name, engine.hbm_units)
                group.engines[name] = engine
                self._counters.add(metadata_metrics.ENGINES_RESIZED)
        removed = [name for name, engine in group.engines.items() if engines.get(name) != engine]
        if removed:
            requeued = self._remove_engines(group, removed, engines)
            names = ", ".join(removed[:_LOGGED_NAMES])
            logger.warning("engines removed: %s (group=%s, requeued_requests=%d)", names, group.name, requeued)
        for state in request.engines:
            if state.engine not in group.engines:
                self._groups.add_engine(group, engines[state.engine])
                self._scheduler.join(engines[state.engine])
            known = group.refs.get(state.engine)
            if known is None or known.address != state.address:
                group.refs[state.engine] = ref_of(state, group.name)

    def _remove_engines(self, group: ReportingGroup, names: Sequence[str], moved: Container[str] = ()) -> int:
        """Remove engines and requeue their requests. A group drops the requests of engines that only moved.

        Returns:
            The number of requeued requests.
        """
        requests = 0
        for name in names:
            requeued = self._scheduler.remove_engine(name)
            engine = self._groups.remove_engine(group, name)
            for one in requeued:
                if name in moved:
                    self._notifier.revoke(self._requests[one.request_id], engine)
                self._requeue(one)
            requests += len(requeued)
        self._counters.add(metadata_metrics.ENGINES_LOST, len(names))
        self._counters.add(metadata_metrics.REQUESTS_GIVEN_BACK, requests)
        return requests

    def _remove_group(self, group: ReportingGroup, why: str) -> None:
        self._groups.remove(group)  # first: the group gets no further events
        engines = list(group.engines)
        requeued = self._remove_engines(group, engines)
        self._scheduler.remove_group(group.name)
        self._counters.add(metadata_metrics.GROUPS_LOST)
        logger.warning(
            "engine group removed: %s (reason=%s, engines=%d, requeued_requests=%d)", group.name, why, len(engines), requeued
        )

    def _fetch(self, group: ReportingGroup, request: pb.ReportEnginesRequest) -> None:
        """Give the scheduler the figures of a report, and assign new work to the group."""
        now_s = self._clock.now_s()
        pending: dict[str, int] = {}

        def pending_tokens(node: str) -> int:
            if node not in pending:
                state = self._queues.state(node, now_s)
                pending[node] = state.pending_tokens if state is not None else 0
            return pending[node]

        figures = figures_of(request, group, pending_tokens)
        self._scheduler.exclude_nodes(self._draining_nodes())
        if len(group.outbox) < EVENTS_AT_ONCE:
            self._assign(group, self._scheduler.fetch(group.name, figures))
        else:
            self._scheduler.report(figures)
            self._counters.add(metadata_metrics.FETCHES_SKIPPED)

    def _assign(self, group: ReportingGroup, fetched: FetchResult) -> None:
        for one in fetched.assigned:
            request = self._requests[one.request_id]
            engine = group.engines[one.engine]
            if group.kind is EngineKind.PREFILL:
                request.prefill, other = engine, request.decode
            else:
                request.decode, other = engine, request.prefill
            self._notifier.announce(engine, request, request.work(engine))
            if other is not None:
                self._notifier.announce(other, request)
                self._notifier.answer_waiters(request)
        if fetched.pairs:
            self._paired_s = self._clock.now_s()
        if fetched.assigned:
            self._counters.add(metadata_metrics.REQUESTS_ASSIGNED, len(fetched.assigned))
            self._counters.add(metadata_metrics.REQUESTS_PAIRED, len(fetched.pairs))

    def _end_reported(self, group: ReportingGroup, report: pb.ReportEnginesRequest) -> None:
        """Process the requests that a group reports as prefilled or finished. Reports on requests of other groups are void."""
        void = 0
        for generation in report.prefilled:
            request = self._request_of(group, generation)
            current = request is not None and request.generation == generation
            if request is not None and current and self._scheduler.prefill_done(request.request_id, request.scheduler_generation):
                request.prefilled = True
            else:
                void += 1
        for generation in report.finished:
            request = self._request_of(group, generation)
            if request is None:
                void += 1
                continue
            self._counters.add(metadata_metrics.REQUESTS_FINISHED)
            if request.generation == generation and self._scheduler.finish(request.request_id, request.scheduler_generation):
                if not request.prefilled and request.prefill is not None:  # its report is late or lost: it need not continue
                    self._notifier.revoke(request, request.prefill)
                self._requests.end(request, _FINISHED)
            else:  # its prefill engine died after its part was done: the engine that would compute the prompt again need not
                self._drop(request, _FINISHED)
        if void:
            self._counters.add(metadata_metrics.SCHEDULER_VOID_REPORTS, void)

    def _request_of(self, group: ReportingGroup, generation: int) -> RouterRequest | None:
        """The request of a generation, if an engine of the group has it."""
        request = self._requests.of_generation(generation)
        if request is None:
            return None
        engine = request.prefill if group.kind is EngineKind.PREFILL else request.decode
        return request if engine is not None and engine.group == group.name else None

    # ---- requests ----
    async def assign(self, call: pb.AssignRequestRequest, left_s: float = MAX_BUDGET_S) -> pb.Assignment:
        """Wait until a request has its engines.

        Args:
            call: the router's call.
            left_s: time until the deadline of the call.

        Raises:
            InvalidArgument: the call is malformed.
            Conflict: another request of this name is in progress.
            CapacityExceeded: too many requests or waiting calls, or they need too much memory.
            DeadlineExceeded: no engines in time. A request that never had engines is dropped.
            NotFound: the request was cancelled, is finished, or (with ``after_generation``) is unknown: submit it again.
        """
        budget_s = min(check_request(call) / 1000, left_s, MAX_BUDGET_S)
        after = call.after_generation
        request = self._requests.find(call)
        if request is not None and request.paired and request.generation != after:
            return self._notifier.assignment(request)
        if self._waiting_calls >= MAX_WAITING_CALLS:
            self._counters.add(metadata_metrics.REQUESTS_REFUSED)
            raise CapacityExceeded("too many calls wait for engines", limit=MAX_WAITING_CALLS)
        nbytes = request_bytes(call)
        self._check_memory(2 * nbytes if request is None else nbytes)
        if request is None:
            request = self._submit(call, budget_s)
        elif not request.paired:
            self._requests.set_deadline(request, max(request.deadline_s, self._clock.now_s() + budget_s))
        requests = self._requests
        requests.bytes += nbytes  # gRPC holds the message as long as its call waits
        try:
            return await self._wait(request, after, budget_s)
        finally:
            requests.bytes -= nbytes

    def cancel(self, call: pb.CancelRequestRequest) -> bool:
        """Drop a request.

        Returns:
            False if the request is unknown. A late call that would submit it is then rejected.

        Raises:
            InvalidArgument: the call is malformed.
        """
        operation = check_id(call.operation_id, "operation_id")
        request = self._requests.get(check_name(call.request_id, "request_id"))
        if request is None or request.message.operation_id != operation:
            self._requests.remember_ended(operation, _CANCELLED)
            return False
        self._drop(request, _CANCELLED)
        self._counters.add(metadata_metrics.REQUESTS_CANCELLED)
        return True

    def _check_memory(self, nbytes: int) -> None:
        if self._requests.bytes + nbytes > limits.MAX_SCHEDULED_BYTES:
            self._counters.add(metadata_metrics.REQUESTS_REFUSED)
            raise CapacityExceeded("requests need too much memory", bytes=self._requests.bytes, limit=limits.MAX_SCHEDULED_BYTES)

    def _submit(self, call: pb.AssignRequestRequest, budget_s: float) -> RouterRequest:
        ask = ask_of(call)
        try:
            self._scheduler.submit(ask)
        except CapacityExceeded:
            self._counters.add(metadata_metrics.REQUESTS_REFUSED)
            raise
        self._counters.add(metadata_metrics.REQUESTS_SUBMITTED)
        return self._requests.add(call, ask, budget_s)

    async def _wait(self, request: RouterRequest, after: int, budget_s: float) -> pb.Assignment:
        answer: asyncio.Future[pb.Assignment] = asyncio.get_running_loop().create_future()
        request.waiters.append(answer)
        self._waiting_calls += 1
        try:
            async with asyncio.timeout(budget_s):
                return await answer
        except TimeoutError:
            if request.paired and not request.ended and request.generation != after:  # paired at the same moment
                return self._notifier.assignment(request)
            late = DeadlineExceeded("no engines for the request in time", request=request.request_id, seconds=budget_s)
            # a call that waited for other engines may come again; the request has a separate deadline
            if not after and not request.paired and not request.ended and request.waiters == [answer]:
                self._drop_late(request, late)
            raise late from None
        finally:
            self._waiting_calls -= 1
            request.waiters.remove(answer)

    # ---- time ----
    def expire(self) -> None:
        """Remove silent groups and overdue requests. Called several times per second."""
        now_s = self._clock.now_s()
        for group in self._groups.all():
            if now_s - group.heard_s > self._engine_ttl_s:
                self._remove_group(group, f"silent for {now_s - group.heard_s:.1f} s")
            elif len(group.outbox) > MAX_UNREAD:
                self._remove_group(group, "acknowledges no events")
        if now_s - self._paired_s > self._engine_ttl_s:
            self._paired_s = now_s
            self._break_deadlock()
        for request in self._requests.pop_overdue(now_s):
            self._drop_late(request, DeadlineExceeded("no engines for the request in time"))
        while (oldest := self._requests.oldest()) is not None and oldest.submitted_s + self._request_ttl_s <= now_s:
            # engines get no event: one may still work on it, and its reports will be void
            self._scheduler.cancel(oldest.request_id)
            self._requests.end(oldest, NotFound("the request is older than the server keeps requests"))
            self._counters.add(metadata_metrics.REQUESTS_FORGOTTEN)

    def _break_deadlock(self) -> None:
        """Requeue requests that hold decode memory, if requests that hold a prefill engine wait for that memory.

        Requests in order of arrival cannot deadlock. But requests of lost engines are requeued before requests that arrived
        earlier.
        """
        halves = [request for request in self._requests if (request.prefill is None) != (request.decode is None)]
        holding = [request for request in halves if request.decode is not None]
        if not holding or len(holding) == len(halves):
            return
        for request in holding:
            self._scheduler.cancel(request.request_id)
            self._notifier.revoke_all(request)
            request.decode = None
            self._requests.begin_attempt(request, 0)
            self._scheduler.submit(request.ask)
        self._counters.add(metadata_metrics.REQUESTS_REQUEUED, len(holding))
        logger.warning("requests requeued: none got both engines (for_s=%.1f, requests=%d)", self._engine_ttl_s, len(holding))

    # ---- changes of one request ----
    def _requeue(self, requeued: RequeuedRequest) -> None:
        """A request lost an engine: it waits again, for as long as it could wait at first."""
        request = self._requests[requeued.request_id]
        remaining_kind = requeued.remaining.role if requeued.remaining is not None else None
        self._requests.begin_attempt(request, requeued.generation, keep_earlier=remaining_kind is EngineKind.DECODE)
        request.prefill = requeued.remaining if remaining_kind is EngineKind.PREFILL else None
        request.decode = requeued.remaining if remaining_kind is EngineKind.DECODE else None
        request.prefilled = False
        self._requests.set_deadline(request, self._clock.now_s() + min(request.message.budget_ms / 1000, MAX_BUDGET_S))
        if requeued.remaining is not None:
            self._notifier.announce(requeued.remaining, request)

    def _drop_late(self, request: RouterRequest, error: DeadlineExceeded) -> None:
        self._drop(request, error)
        self._counters.add(metadata_metrics.REQUESTS_EXPIRED)

    def _drop(self, request: RouterRequest, why: KVStoreError) -> None:
        """Remove a request that is not finished; its engines get an event to drop it."""
        self._scheduler.cancel(request.request_id)
        self._notifier.revoke_all(request)
        self._requests.end(request, why)
