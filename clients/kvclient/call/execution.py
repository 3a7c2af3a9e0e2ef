"""How a call is run: in the caller's thread, or in one of a bounded number of the client's. The edge where nothing is raised.

Whatever goes wrong on our side becomes a result that says so. Programming errors are found, and raised, before a ``Call`` exists.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc

from kvclient.call.incidents import Incidents
from kvclient.call.operation import Operation
from kvstore.core.errors import CapacityExceeded, DeadlineExceeded, Internal, KVStoreError, Unavailable
from kvstore.rpc.client import NO_RETRY, RetryPolicy, call_cancellable
from kvstore.rpc.client import call as call_rpc
from kvstore.transport.liveness import WatchedServer

_log = logging.getLogger(__name__)


class Result(Protocol):
    """Every result says what went wrong."""

    @property
    def error(self) -> KVStoreError | None:
        """The first failure of ours, if any."""


class CancellableMethod(Protocol):
    """A unary method of a synchronous stub."""

    def __call__(
        self,
        request: Any,  # noqa: ANN401
        timeout: float | None = None,
        *,
        metadata: list[tuple[str, str]] | None = None,
    ) -> Any:  # noqa: ANN401
        """Calls it and waits."""

    def future(
        self,
        request: Any,  # noqa: ANN401
        timeout: float | None = None,
        *,
        metadata: list[tuple[str, str]] | None = None,
    ) -> Any:  # noqa: ANN401
        """Calls it."""


R = TypeVar("R", bound=Result)


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """Work that is bounded by an operation, and what to answer where it cannot be done."""

    operation: Operation
    work: Callable[[], R]
    refused: Callable[[KVStoreError], R]


class Caller:
    """Runs calls. Thread-safe.

    Args:
        incidents: where failures are counted.
        workers: threads for calls in the background; made when first needed.
        max_pending: calls in the background, waiting or running; one more is refused.
        strict: raise the error of a result.
    """

    def __init__(self, incidents: Incidents, *, workers: int, max_pending: int, strict: bool) -> None:
        self._incidents = incidents
        self._workers = workers
        self._strict = strict
        self._room = threading.BoundedSemaphore(max_pending)
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._operations: weakref.WeakSet[Operation] = weakref.WeakSet()
        self._closed = False

    def now(self, call: Call[R]) -> R:
        """Runs a call in this thread."""
        if self._closed:
            return self._checked(call.refused(Unavailable("the client is closed")))
        self._operations.add(call.operation)
        try:
            result = call.work()
        except KVStoreError as error:
            result = call.refused(error)
        except Exception as error:  # noqa: BLE001  # the edge to the engine: a bug of ours is a miss there, and loud here
            self._incidents.counters.add("client_bugs_total")
            _log.exception("unexpected failure: the call is answered as a miss")
            internal = Internal("unexpected failure in the client", error=repr(error))
            internal.__cause__ = error
            result = call.refused(internal)
        return self._checked(result)

    def later(self, call: Call[R]) -> Future[R]:
        """Runs a call in a thread of the client's. The future never fails, but for ``strict``."""
        call.operation.cancellable = True
        if not self._room.acquire(blocking=False):
            self._incidents.report("client_calls_refused_total", "too many calls in the background")
            return _done(lambda: self._checked(call.refused(CapacityExceeded("too many calls in the background"))))
        try:
            future = self._executor().submit(self.now, call)
        except Unavailable as error:
            self._room.release()
            return _done(lambda error=error: self._checked(call.refused(error)))  # type: ignore[misc]
        future.add_done_callback(lambda _: self._room.release())
        return future

    def close(self) -> None:
        """Cancels what runs, and waits for what runs in the background."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        for operation in list(self._operations):
            operation.cancel()
        if pool is not None:
            pool.shutdown(wait=True)

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._closed:
                raise Unavailable("the client is closed")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="kvclient")
            return self._pool

    def _checked(self, result: R) -> R:
        if self._strict and result.error is not None:
            raise result.error
        return result


def call_within(  # gRPC's stubs are untyped here
    operation: Operation,
    server: WatchedServer,
    method: CancellableMethod,
    request: Any,  # noqa: ANN401
    timeout_s: float,
    retry: RetryPolicy = NO_RETRY,
) -> Any:  # noqa: ANN401
    """As ``kvstore.rpc.client.call``, but ended if the operation is cancelled, or if the server is hung.

    A call that nobody may cancel waits in this thread, which is faster, for as long as a healthy server needs. Only after that
    is it sent again, cancellable: the server recognises the second request by its operation id.

    Raises:
        KVStoreError: as ``call``; ``DeadlineExceeded`` if it was cancelled, ``Unavailable`` if the server is hung.
    """
    if not operation.cancellable:
        try:
            with server.waiting(_nothing):
                return call_rpc(method, request, min(timeout_s, _HEALTHY_S), retry)
        except DeadlineExceeded:
            timeout_s -= _HEALTHY_S
            if timeout_s <= 0:
                raise

    @contextmanager
    def scope(cancel: Callable[[], object]) -> Iterator[None]:
        with server.waiting(cancel), operation.on_cancel(cancel):
            try:
                yield
            except (grpc.FutureCancelledError, grpc.RpcError) as error:
                if operation.cancelled:
                    raise operation.error() from error
                raise

    return call_cancellable(method, request, timeout_s, scope, retry)


def _nothing() -> None:
    """Cancels nothing: the call ends by itself soon."""


_HEALTHY_S = 1.0
"""A healthy node answers any call of a store within this, unless it waits for room."""


def _done(make: Callable[[], R]) -> Future[R]:
    """A finished future."""
    future: Future[R] = Future()
    try:
        future.set_result(make())
    except KVStoreError as error:
        future.set_exception(error)
    return future
