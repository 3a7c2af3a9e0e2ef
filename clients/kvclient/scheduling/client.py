"""Clients of the request scheduler: for routers (``assign``, ``again``, ``cancel``) and leaders of engine groups (``leader``).

Every call has a deadline, and failures are raised as typed errors: routers and leaders decide what to do without a scheduler. A
circuit breaker guards the server: while it does not answer, calls fail at once, except for a trial from time to time. Only
``assign`` continues to try until its deadline, so that a restart of the server is a pause and not an error.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from threading import BoundedSemaphore, Event, Thread
from types import TracebackType
from typing import Final, Self, TypeVar

from kvclient.call.arguments import check_seconds
from kvclient.options import ClientOptions
from kvclient.scheduling.types import (
    Assignment,
    EngineFigures,
    EngineGroupState,
    EngineRequest,
    EngineRole,
    GroupUpdates,
    assign_to_proto,
    assignment_from_proto,
)
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1 import metadata_pb2_grpc
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import CapacityExceeded, DeadlineExceeded, KVStoreError, Unavailable
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.process.tls import TlsConfig
from kvstore.rpc.client import AioUnaryMethod, UnaryMethod, call, call_aio
from kvstore.rpc.failover.connect import connect_metadata, connect_metadata_aio
from kvstore.transport.liveness import CircuitBreaker

log = logging.getLogger(__name__)

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")

_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.5
_WORTH_WAITING: Final = (Unavailable, CapacityExceeded)
_ANSWER_S: Final = 0.25
"""The server gives a request up this long before the caller does (or a tenth of the deadline), so its answer arrives in time."""
_CANCEL_PAUSES_S: Final = (0.0, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Pauses between attempts to cancel a request."""
MAX_CANCELLATIONS: Final = 64
"""Cancellations in the background at a time, per client."""
_CLOSE_S: Final = 1.0
"""``close`` waits this long for cancellations under way."""
_MIN_TELLING_TIMEOUT_S: Final = 0.05
"""A shorter timeout says nothing about the server."""


class _Guard:
    """The circuit breaker around calls to one server."""

    def __init__(self, address: str, options: ClientOptions) -> None:
        self._address = address
        self._breaker = CircuitBreaker(MonotonicClock(), failures=options.breaker_failures, open_s=options.breaker_pause_s)

    def enter(self) -> None:
        if not self._breaker.allow():
            raise Unavailable("the metadata server does not answer; calls fail for a moment", address=self._address)

    def left(self, error: KVStoreError | None, timeout_s: float, *, waits: bool) -> None:
        """Record the end of a call. A call that waits for engines and times out says nothing about the server."""
        if isinstance(error, DeadlineExceeded):
            if not waits and timeout_s >= _MIN_TELLING_TIMEOUT_S:
                self._breaker.failed()
        elif isinstance(error, Unavailable):
            self._breaker.failed()
        else:  # any other error is an answer
            self._breaker.succeeded()


def _pauses_s() -> Iterator[float]:
    """Yield pauses between attempts, with jitter so that callers do not retry at once. The caller's deadline ends them."""
    mean_s = _FIRST_PAUSE_S
    while True:
        yield mean_s * random.uniform(0.5, 1.5)  # noqa: S311  # spreads load, guards nothing
        mean_s = min(2 * mean_s, _LONGEST_PAUSE_S)


class _Uncancelled:
    """Counts and logs requests of one client that are not cancelled."""

    def __init__(self, counters: Counters | None) -> None:
        self._counters = Counters() if counters is None else counters
        self._log = LimitedLog(log)

    def report(self, request: EngineRequest, reason: object) -> None:
        self._counters.add(client_metrics.CANCELLATIONS_FAILED)
        self._log.warning("request not cancelled: %s (reason=%s); the scheduler may still count it", request.request_id, reason)


def _budget_s(left_s: float) -> float:
    return left_s - min(_ANSWER_S, left_s / 10)


class SchedulerClient:
    """The scheduler of one metadata server. Thread-safe.

    Args:
        metadata: address of the metadata server, or of several.
        tls: for the connection.
        options: circuit breaker and token.
        counters: counts requests that could not be cancelled; None: only the log has them.
    """

    def __init__(
        self,
        metadata: str,
        *,
        tls: TlsConfig | None = None,
        options: ClientOptions | None = None,
        counters: Counters | None = None,
    ) -> None:
        options = options or ClientOptions()
        self._uncancelled = _Uncancelled(counters)
        self._guard = _Guard(metadata, options)
        self._channel = connect_metadata(metadata, tls=tls, token=options.shown_token())
        self._stub = metadata_pb2_grpc.MetadataStub(self._channel)
        self._closed = Event()
        self._cancel_slots = BoundedSemaphore(MAX_CANCELLATIONS)

    def assign(self, request: EngineRequest, deadline_s: float) -> Assignment:
        """Wait for a prefill and a decode engine. A repeated call with the same request returns the same engines.

        A call that fails cancels the request in the background: submit it again with a new ``EngineRequest``.

            assignment = scheduler.assign(EngineRequest("r7", prompt_tokens=900), deadline_s=5.0)

        Raises:
            DeadlineExceeded: no engines in time; the request does not wait any longer.
            NotFound: the request has finished or was cancelled.
            Conflict: another request of this name is under way.
            KVStoreError: the server does not answer (until the deadline), or refuses.
        """
        check_seconds("deadline_s", deadline_s)
        try:
            return self._assign(request, 0, deadline_s)
        except BaseException:  # the answer may be late or lost, and the server may have assigned engines
            self._cancel_in_background(request)
            raise

    def reassign(self, request: EngineRequest, lost: Assignment, deadline_s: float) -> Assignment:
        """Wait until a request whose engine seems to have died was given to other engines.

            assignment = scheduler.reassign(request, assignment, deadline_s=5.0)

        Raises:
            DeadlineExceeded: it was not: the engines of ``lost`` may be alive, or no engine has space; call again.
            NotFound: the request has finished, or the server was restarted: submit it again with a new ``EngineRequest``.
            KVStoreError: the server does not answer (until the deadline), or refuses.
        """
        return self._assign(request, lost.generation, deadline_s)

    def cancel(self, request: EngineRequest, deadline_s: float = 1.0) -> bool:
        """Cancel a request; the engines drop it. False: it had finished already.

            scheduler.cancel(request)

        Raises:
            KVStoreError: the server does not answer.
        """
        message = pb.CancelRequestRequest(operation_id=request.operation_id, request_id=request.request_id)
        timeout_s = check_seconds("deadline_s", deadline_s)
        answer: pb.CancelRequestResponse = self._call(self._stub.CancelRequest, message, timeout_s)
        return answer.known

    def leader(self, group: str, role: EngineRole) -> GroupLeader:
        """Return the reporter of an engine group, once per boot of the group: another one replaces this one.

        Example: ``leader = scheduler.leader("prefill-0", "prefill")``
        """
        return GroupLeader(self, EngineGroupState(group, role))

    def close(self) -> None:
        """Close the channel. Calls under way fail."""
        self._closed.set()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _cancel_in_background(self, request: EngineRequest) -> None:
        if not self._cancel_slots.acquire(blocking=False):
            self._uncancelled.report(request, "too many cancellations under way")
            return
        try:
            Thread(target=self._cancel_until_heard, args=(request,), name="kvstore-cancel", daemon=True).start()
        except RuntimeError as error:  # no more threads
            self._cancel_slots.release()
            self._uncancelled.report(request, error)

    def _cancel_until_heard(self, request: EngineRequest) -> None:
        """Repeat the cancellation of a request until the server answers, because no deadline ends an assigned request."""
        try:
            for pause_s in _CANCEL_PAUSES_S:
                if self._closed.wait(pause_s):
                    return
                try:
                    self.cancel(request)
                except (DeadlineExceeded, Unavailable):  # the server may still have the request
                    continue
                except (KVStoreError, ValueError):  # refused, or the channel was closed
                    return
                return
            self._uncancelled.report(request, "the server did not answer")
        finally:
            self._cancel_slots.release()

    def _assign(self, request: EngineRequest, after: int, deadline_s: float) -> Assignment:
        until_s = time.monotonic() + check_seconds("deadline_s", deadline_s)
        pauses = _pauses_s()
        while True:
            left_s = max(0.001, until_s - time.monotonic())
            message = assign_to_proto(request, _budget_s(left_s), after)
            try:
                return assignment_from_proto(request, self._call(self._stub.AssignRequest, message, left_s, waits=True))
            except _WORTH_WAITING:
                wait_s = next(pauses)
                if time.monotonic() + wait_s >= until_s:
                    raise
            time.sleep(wait_s)

    def report_engines(self, request: pb.ReportEnginesRequest, timeout_s: float) -> pb.ReportEnginesResponse:
        """Send the report of a group's leader."""
        answer: pb.ReportEnginesResponse = self._call(self._stub.ReportEngines, request, timeout_s)
        return answer

    def _call(
        self, method: UnaryMethod[_Request, _Response], request: _Request, timeout_s: float, *, waits: bool = False
    ) -> _Response:
        self._guard.enter()
        try:
            answer = call(method, request, timeout_s)
        except KVStoreError as error:
            self._guard.left(error, timeout_s, waits=waits)
            raise
        self._guard.left(None, timeout_s, waits=waits)
        return answer


class GroupLeader:
    """Reports of one engine group, one at a time."""

    def __init__(self, client: SchedulerClient, book: EngineGroupState) -> None:
        self._client = client
        self._book = book

    def report(
        self,
        engines: Sequence[EngineFigures],
        *,
        prefilled: Iterable[int] = (),
        finished: Iterable[int] = (),
        deadline_s: float = 1.0,
    ) -> GroupUpdates:
        """Report the load of all engines of the group and fetch their work. To be called every few to 100 ms, also without news.

            updates = leader.report([EngineFigures("e0", "node-a")])

        Args:
            engines: all living engines; a missing one counts as dead.
            prefilled: generations of requests whose prompt was computed and handed over since the last report.
            finished: generations of requests that have finished or failed for good; only decode groups report them.
            deadline_s: seconds from now.

        Raises:
            Conflict: another group has an engine of this name, or another boot of the group reports.
            KVStoreError: the server does not answer, or refuses. The next report includes this one.
        """
        request = self._book.request(engines, prefilled, finished)
        timeout_s = check_seconds("deadline_s", deadline_s)
        return self._book.take(request, self._client.report_engines(request, timeout_s))

    def leave(self, deadline_s: float = 1.0) -> None:
        """End the group: its unfinished requests are given to others at once.

            leader.leave()

        Raises:
            KVStoreError: the server does not answer; it notices the missing reports.
        """
        self.report((), deadline_s=deadline_s)


class AsyncSchedulerClient:
    """``SchedulerClient`` for asyncio: thousands of requests wait without a thread each."""

    def __init__(
        self,
        metadata: str,
        *,
        tls: TlsConfig | None = None,
        options: ClientOptions | None = None,
        counters: Counters | None = None,
    ) -> None:
        options = options or ClientOptions()
        self._uncancelled = _Uncancelled(counters)
        self._guard = _Guard(metadata, options)
        self._channel = connect_metadata_aio(metadata, tls=tls, token=options.shown_token())
        self._stub = metadata_pb2_grpc.MetadataStub(self._channel)
        self._cancellations: set[asyncio.Task[None]] = set()
        self._probe = EngineRequest(f"probe-{secrets.token_hex(8)}", 1)  # one per client: the server remembers it

    async def assign(self, request: EngineRequest, deadline_s: float) -> Assignment:
        """See ``SchedulerClient.assign``. A cancelled coroutine cancels its request, too.

        Example: ``assignment = await scheduler.assign(request, deadline_s=5.0)``
        """
        check_seconds("deadline_s", deadline_s)
        try:
            return await self._assign(request, 0, deadline_s)
        except BaseException:  # the answer may be late or lost, and the server may have assigned engines
            if len(self._cancellations) >= MAX_CANCELLATIONS:
                self._uncancelled.report(request, "too many cancellations under way")
                raise
            task = asyncio.create_task(self._cancel_until_heard(request))
            self._cancellations.add(task)
            task.add_done_callback(self._cancellations.discard)
            raise

    async def reassign(self, request: EngineRequest, lost: Assignment, deadline_s: float) -> Assignment:
        """See ``SchedulerClient.reassign``.

        Example: ``assignment = await scheduler.reassign(request, assignment, deadline_s=5.0)``
        """
        return await self._assign(request, lost.generation, deadline_s)

    async def cancel(self, request: EngineRequest, deadline_s: float = 1.0) -> bool:
        """See ``SchedulerClient.cancel``.

        Example: ``await scheduler.cancel(request)``
        """
        return (await self._cancel(request, deadline_s)).known

    async def engines(self, deadline_s: float = 1.0) -> int:
        """Return the number of engines that the scheduler knows. Without engines, requests wait until their deadlines.

            await scheduler.engines()

        Raises:
            KVStoreError: the server does not answer.
        """
        return (await self._cancel(self._probe, deadline_s)).engines

    def leader(self, group: str, role: EngineRole) -> AsyncGroupLeader:
        """See ``SchedulerClient.leader``.

        Example: ``leader = scheduler.leader("decode-0", "decode")``
        """
        return AsyncGroupLeader(self, EngineGroupState(group, role))

    async def close(self) -> None:
        """Close the channel after the cancellations under way. Other calls fail."""
        if self._cancellations:
            _, late = await asyncio.wait(self._cancellations, timeout=_CLOSE_S)
            for task in late:
                task.cancel()
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _cancel(self, request: EngineRequest, deadline_s: float) -> pb.CancelRequestResponse:
        message = pb.CancelRequestRequest(operation_id=request.operation_id, request_id=request.request_id)
        timeout_s = check_seconds("deadline_s", deadline_s)
        answer: pb.CancelRequestResponse = await self._call(self._stub.CancelRequest, message, timeout_s)
        return answer

    async def _cancel_until_heard(self, request: EngineRequest) -> None:
        """Repeat the cancellation of a request until the server answers, because no deadline ends an assigned request."""
        for pause_s in _CANCEL_PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                await self.cancel(request)
            except (DeadlineExceeded, Unavailable):  # the server may still have the request
                continue
            except KVStoreError:
                return
            return
        self._uncancelled.report(request, "the server did not answer")

    async def _assign(self, request: EngineRequest, after: int, deadline_s: float) -> Assignment:
        until_s = time.monotonic() + check_seconds("deadline_s", deadline_s)
        pauses = _pauses_s()
        while True:
            left_s = max(0.001, until_s - time.monotonic())
            message = assign_to_proto(request, _budget_s(left_s), after)
            try:
                return assignment_from_proto(request, await self._call(self._stub.AssignRequest, message, left_s, waits=True))
            except _WORTH_WAITING:
                wait_s = next(pauses)
                if time.monotonic() + wait_s >= until_s:
                    raise
            await asyncio.sleep(wait_s)

    async def report_engines(self, request: pb.ReportEnginesRequest, timeout_s: float) -> pb.ReportEnginesResponse:
        """Send the report of a group's leader."""
        answer: pb.ReportEnginesResponse = await self._call(self._stub.ReportEngines, request, timeout_s)
        return answer

    async def _call(
        self, method: AioUnaryMethod[_Request, _Response], request: _Request, timeout_s: float, *, waits: bool = False
    ) -> _Response:
        self._guard.enter()
        try:
            answer = await call_aio(method, request, timeout_s)
        except KVStoreError as error:
            self._guard.left(error, timeout_s, waits=waits)
            raise
        self._guard.left(None, timeout_s, waits=waits)
        return answer


class AsyncGroupLeader:
    """``GroupLeader`` for asyncio."""

    def __init__(self, client: AsyncSchedulerClient, book: EngineGroupState) -> None:
        self._client = client
        self._book = book

    async def report(
        self,
        engines: Sequence[EngineFigures],
        *,
        prefilled: Iterable[int] = (),
        finished: Iterable[int] = (),
        deadline_s: float = 1.0,
    ) -> GroupUpdates:
        """See ``GroupLeader.report``.

        Example: ``updates = await leader.report(engines)``
        """
        request = self._book.request(engines, prefilled, finished)
        timeout_s = check_seconds("deadline_s", deadline_s)
        return self._book.take(request, await self._client.report_engines(request, timeout_s))

    async def leave(self, deadline_s: float = 1.0) -> None:
        """See ``GroupLeader.leave``.

        Example: ``await leader.leave()``
        """
        await self.report((), deadline_s=deadline_s)
