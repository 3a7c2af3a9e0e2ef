"""Clients of the request scheduler: for routers (``assign``, ``again``, ``cancel``) and leaders of engine groups (``leader``).

Every call has its deadline, and what goes wrong is raised as a typed error: routers and leaders decide what to do without a
scheduler. Behind a circuit breaker, as the rest of the client: with the server gone, calls fail at once but for a probe now and
then; ``assign`` alone goes on trying until its deadline, so that a restart of the server is a pause and not an error.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self, TypeVar

from kvclient.call.arguments import check_seconds
from kvclient.options import ClientOptions
from kvclient.scheduling.types import (
    Assignment,
    EngineFigures,
    EngineRequest,
    EngineRole,
    GroupBook,
    GroupNews,
    assign_to_proto,
    assignment_from_proto,
)
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1 import metadata_pb2_grpc
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import CapacityExceeded, DeadlineExceeded, KVStoreError, Unavailable
from kvstore.process.tls import TlsConfig
from kvstore.rpc.client import AioUnaryMethod, UnaryMethod, call, call_aio, connect, connect_aio
from kvstore.transport.breaker import CircuitBreaker

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")

_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.5
_WORTH_WAITING: Final = (Unavailable, CapacityExceeded)
_ANSWER_S: Final = 0.25
"""The server gives a request up so long before the caller does (or a tenth of the deadline): its answer arrives in time."""
_CALL_OFF_PAUSES_S: Final = (0.0, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Between attempts to call a request off."""
_CLOSE_S: Final = 1.0
"""``close`` waits so long for what is being called off."""
_TELLING_S: Final = 0.05
"""A server that does not answer within less is not taken to be gone."""


class _Guard:
    """The circuit breaker around calls to one server."""

    def __init__(self, address: str, options: ClientOptions) -> None:
        self._address = address
        self._breaker = CircuitBreaker(MonotonicClock(), failures=options.breaker_failures, open_s=options.breaker_pause_s)

    def enter(self) -> None:
        if not self._breaker.allow():
            raise Unavailable("the metadata server does not answer; not asked again for a moment", address=self._address)

    def left(self, error: KVStoreError | None, timeout_s: float, *, waits: bool) -> None:
        """A call ended. One that waits for engines and runs out of time says nothing about the server."""
        if isinstance(error, DeadlineExceeded):
            if not waits and timeout_s >= _TELLING_S:
                self._breaker.failed()
        elif isinstance(error, Unavailable):
            self._breaker.failed()
        else:  # it answered, if only to refuse
            self._breaker.succeeded()


def _pauses_s() -> Iterator[float]:
    """Between attempts, without end: the deadline ends them. Spread, so that many callers do not come back as one."""
    mean_s = _FIRST_PAUSE_S
    while True:
        yield mean_s * random.uniform(0.5, 1.5)  # noqa: S311  # spreads load, guards nothing
        mean_s = min(2 * mean_s, _LONGEST_PAUSE_S)


def _budget_s(left_s: float) -> float:
    return left_s - min(_ANSWER_S, left_s / 10)


class SchedulerClient:
    """The scheduler of one metadata server. Thread-safe.

    Args:
        metadata: address of the metadata server.
        tls: as for every channel of the client.
        options: bounds; of them those of the circuit breaker, and the token.
    """

    def __init__(self, metadata: str, *, tls: TlsConfig | None = None, options: ClientOptions | None = None) -> None:
        options = options or ClientOptions()
        self._guard = _Guard(metadata, options)
        self._channel = connect(metadata, tls=tls, token=options.shown_token())
        self._stub = metadata_pb2_grpc.MetadataStub(self._channel)
        self._calling_off: set[object] = set()

    def assign(self, request: EngineRequest, deadline_s: float) -> Assignment:
        """Waits for a prefill and a decode engine. Called again with the same request, it answers what was found.

        Raises:
            DeadlineExceeded: none in time; the request waits no longer.
            NotFound: the request is over: finished, or called off.
            Conflict: another request of this name is under way.
            KVStoreError: the server does not answer (until the deadline), or refuses.
        """
        try:
            return self._assign(request, 0, deadline_s)
        except DeadlineExceeded:  # the server may have found some in the last moment, and would keep them for us
            message = pb.CancelRequestRequest(operation_id=request.operation_id, request_id=request.request_id)
            with suppress(ValueError):  # the channel was closed
                calling_off = self._stub.CancelRequest.future(message, timeout=_CLOSE_S)
                self._calling_off.add(calling_off)  # gRPC cancels a call whose future is dropped
                calling_off.add_done_callback(self._calling_off.discard)
            raise

    def again(self, request: EngineRequest, lost: Assignment, deadline_s: float) -> Assignment:
        """Waits until a request whose engine seems to have died was given to others.

        Raises:
            DeadlineExceeded: it was not: the engines of ``lost`` may well live, or nobody has room; ask again.
            NotFound: the request is over, or the server was restarted: submit it anew, with a new ``EngineRequest``.
            KVStoreError: the server does not answer (until the deadline), or refuses.
        """
        return self._assign(request, lost.generation, deadline_s)

    def cancel(self, request: EngineRequest, deadline_s: float = 1.0) -> bool:
        """Nobody wants the answer any more: the engines are told to drop it. False: it was over already.

        Raises:
            KVStoreError: the server does not answer.
        """
        message = pb.CancelRequestRequest(operation_id=request.operation_id, request_id=request.request_id)
        timeout_s = check_seconds("deadline_s", deadline_s)
        answer: pb.CancelRequestResponse = self._call(self._stub.CancelRequest, message, timeout_s)
        return answer.known

    def leader(self, group: str, role: EngineRole) -> GroupLeader:
        """For the leader of an engine group, once in its life: another one is another life, and takes this one's place."""
        return GroupLeader(self, GroupBook(group, role))

    def close(self) -> None:
        """Closes the channel; calls under way fail."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

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
    """Reports for one engine group. One report at a time."""

    def __init__(self, client: SchedulerClient, book: GroupBook) -> None:
        self._client = client
        self._book = book

    def report(
        self,
        engines: Sequence[EngineFigures],
        *,
        prefilled: Iterable[int] = (),
        finished: Iterable[int] = (),
        deadline_s: float = 1.0,
    ) -> GroupNews:
        """Tells how all engines of the group are, and fetches what is for them. Every few to 100 ms, also with nothing to tell.

        Args:
            engines: all that live; one that is missing is gone.
            prefilled: generations of requests whose prompt is computed and with the decode engine, since the last report.
            finished: generations of requests that are done, or failed for good; decode groups alone say so.
            deadline_s: seconds from now.

        Raises:
            Conflict: an engine's name is taken by another group, or another life of the group reports.
            KVStoreError: the server does not answer, or refuses. What was to be told goes with the next report.
        """
        request = self._book.request(engines, prefilled, finished)
        timeout_s = check_seconds("deadline_s", deadline_s)
        return self._book.take(request, self._client._call(self._client._stub.ReportEngines, request, timeout_s))

    def leave(self, deadline_s: float = 1.0) -> None:
        """The group ends: what it has not finished is given to others at once.

        Raises:
            KVStoreError: the server does not answer; it will notice by the silence.
        """
        self.report((), deadline_s=deadline_s)


class AsyncSchedulerClient:
    """As ``SchedulerClient``, for the running event loop: thousands of requests wait without a thread each."""

    def __init__(self, metadata: str, *, tls: TlsConfig | None = None, options: ClientOptions | None = None) -> None:
        options = options or ClientOptions()
        self._guard = _Guard(metadata, options)
        self._channel = connect_aio(metadata, tls=tls, token=options.shown_token())
        self._stub = metadata_pb2_grpc.MetadataStub(self._channel)
        self._calling_off: set[asyncio.Task[None]] = set()

    async def assign(self, request: EngineRequest, deadline_s: float) -> Assignment:
        """As ``SchedulerClient.assign``; cancelled, it calls the request off."""
        try:
            return await self._assign(request, 0, deadline_s)
        except (asyncio.CancelledError, DeadlineExceeded):  # late, the server may have found some in the last moment
            task = asyncio.create_task(self._call_off(request))
            self._calling_off.add(task)
            task.add_done_callback(self._calling_off.discard)
            raise

    async def again(self, request: EngineRequest, lost: Assignment, deadline_s: float) -> Assignment:
        """As ``SchedulerClient.again``."""
        return await self._assign(request, lost.generation, deadline_s)

    async def cancel(self, request: EngineRequest, deadline_s: float = 1.0) -> bool:
        """As ``SchedulerClient.cancel``."""
        message = pb.CancelRequestRequest(operation_id=request.operation_id, request_id=request.request_id)
        timeout_s = check_seconds("deadline_s", deadline_s)
        answer: pb.CancelRequestResponse = await self._call(self._stub.CancelRequest, message, timeout_s)
        return answer.known

    async def engines(self, deadline_s: float = 1.0) -> int:
        """How many engines the scheduler knows; with none, every request waits in vain.

        Raises:
            KVStoreError: the server does not answer.
        """
        timeout_s = check_seconds("deadline_s", deadline_s)
        answer: pb.GetStatsResponse = await self._call(self._stub.GetStats, pb.GetStatsRequest(), timeout_s)
        return int(answer.counters.get("metadata_scheduler_engines", 0))

    def leader(self, group: str, role: EngineRole) -> AsyncGroupLeader:
        """As ``SchedulerClient.leader``."""
        return AsyncGroupLeader(self, GroupBook(group, role))

    async def close(self) -> None:
        """Closes the channel, after what is being called off; calls under way fail."""
        if self._calling_off:
            _, late = await asyncio.wait(self._calling_off, timeout=_CLOSE_S)
            for task in late:
                task.cancel()
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _call_off(self, request: EngineRequest) -> None:
        """Until the server has heard it: a request that it has assigned meanwhile has no deadline of its own any more."""
        for pause_s in _CALL_OFF_PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                await self.cancel(request)
            except (DeadlineExceeded, Unavailable):  # it hangs, or calls to it are held back: it may still have the request
                continue
            except KVStoreError:
                return
            return

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
    """As ``GroupLeader``."""

    def __init__(self, client: AsyncSchedulerClient, book: GroupBook) -> None:
        self._client = client
        self._book = book

    async def report(
        self,
        engines: Sequence[EngineFigures],
        *,
        prefilled: Iterable[int] = (),
        finished: Iterable[int] = (),
        deadline_s: float = 1.0,
    ) -> GroupNews:
        """As ``GroupLeader.report``."""
        request = self._book.request(engines, prefilled, finished)
        timeout_s = check_seconds("deadline_s", deadline_s)
        return self._book.take(request, await self._client._call(self._client._stub.ReportEngines, request, timeout_s))

    async def leave(self, deadline_s: float = 1.0) -> None:
        """As ``GroupLeader.leave``."""
        await self.report((), deadline_s=deadline_s)
