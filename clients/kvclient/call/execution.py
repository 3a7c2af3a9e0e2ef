"""One call of an engine: its cancel scope, the RPCs that end with it, and the thread that executes it.

It runs in the engine's thread, or in one of a bounded number of background threads.
A failure of the store is not raised: it becomes a result that contains the error.
Errors of the programmer are raised before a ``PreparedCall`` exists.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

from kvclient.call.open_calls import OpenCalls
from kvstore.core.cancel_scope import CancelScope
from kvstore.core.errors import CapacityExceeded, DeadlineExceeded, Internal, KVStoreError, Unavailable
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.process.threads.submission import LazyThreadPool
from kvstore.rpc.client import NO_RETRY, RetryPolicy, call_cancellable, cancelled_by
from kvstore.rpc.client import call as call_rpc
from kvstore.transport.liveness import WatchedServer

_log = logging.getLogger(__name__)

_HEALTHY_S: Final = 1.0
"""A healthy node answers any call of a store within this, unless the call waits for space."""


class CallScope(CancelScope):
    """Cancel scope of one call."""

    __slots__ = ("cancellable",)

    cancellable: bool
    """Whether another thread may cancel the call while it waits for a server: such waits cost a little more."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401  # those of CancelScope
        super().__init__(*arguments, **options)
        self.cancellable = False


class CancellableMethod(Protocol):
    """A unary method of a synchronous stub."""

    def __call__(
        self,
        request: Any,  # noqa: ANN401
        timeout: float | None = None,
        *,
        metadata: list[tuple[str, str]] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call it and wait."""

    def future(
        self,
        request: Any,  # noqa: ANN401
        timeout: float | None = None,
        *,
        metadata: list[tuple[str, str]] | None = None,
    ) -> Any:  # noqa: ANN401
        """Start the call."""


def call_within(  # gRPC's stubs are untyped here
    scope: CallScope,
    server: WatchedServer,
    method: CancellableMethod,
    request: Any,  # noqa: ANN401
    timeout_s: float,
    retry: RetryPolicy = NO_RETRY,
) -> Any:  # noqa: ANN401
    """Do ``kvstore.rpc.client.call``, ended early if the scope is cancelled or the server is hung.

    A call that cannot be cancelled waits in this thread, which is faster, for as long as a healthy server needs. Only after that
    is it sent again, cancellable; the server recognises the second request by its operation id.

    Raises:
        KVStoreError: as ``call``; ``DeadlineExceeded`` if it was cancelled, ``Unavailable`` if the server is hung.
    """
    if not scope.cancellable:
        try:
            with server.waiting(_nothing):
                return call_rpc(method, request, min(timeout_s, _HEALTHY_S), retry)
        except DeadlineExceeded:
            timeout_s -= _HEALTHY_S
            if timeout_s <= 0:
                raise
    return call_cancellable(method, request, timeout_s, cancelled_by(scope, server.waiting), retry)


def _nothing() -> None:
    """Cancel nothing: the call ends soon without cancellation."""


class Result(Protocol):
    """Result of a call."""

    @property
    def error(self) -> KVStoreError | None:
        """The first failure of the store, if any."""


R = TypeVar("R", bound=Result)
R_co = TypeVar("R_co", bound=Result, covariant=True)


class PreparedCall(Protocol[R_co]):
    """A call whose arguments are checked and whose work has not begun."""

    @property
    def scope(self) -> CallScope:
        """Deadline and cancellation."""

    def run(self) -> R_co:
        """Do the work. Called at most once."""

    def refused(self, error: KVStoreError) -> R_co:
        """Return the result of a call that was not done, or failed unexpectedly."""


class CallRunner:
    """Runs calls. Thread-safe.

    Args:
        incidents: counts failures.
        workers: maximum number of background threads.
        max_pending: background calls that may wait or run; one more is refused.
        strict: raise the error of a result.
    """

    def __init__(self, incidents: LimitedLog, *, workers: int, max_pending: int, strict: bool) -> None:
        self._incidents = incidents
        self._strict = strict
        self._pending = threading.BoundedSemaphore(max_pending)
        self._threads = LazyThreadPool(workers, "kvclient")
        self._scopes: OpenCalls[CallScope] = OpenCalls()

    def run(self, call: PreparedCall[R]) -> R:
        """Run a call in this thread."""
        if not self._scopes.add(call.scope):
            return self._checked(call.refused(Unavailable("the client is closed; make another one with KVClient.connect")))
        try:
            result = call.run()
        except KVStoreError as error:
            result = call.refused(error)
        except Exception as error:  # noqa: BLE001  # the edge to the engine: a bug of ours is a miss there, and loud here
            self._incidents.counters.add(client_metrics.BUGS)
            _log.exception("call failed unexpectedly: answered as a miss")
            internal = Internal("unexpected failure in the client", error=repr(error))
            internal.__cause__ = error
            result = call.refused(internal)
        return self._checked(result)

    def start(self, call: PreparedCall[R]) -> Future[R]:
        """Run a call in a background thread. Cancelling its scope ends it at once if it still waits for a thread.

        Returns:
            The result, which only the call sets: it cannot be cancelled. It is an exception only if ``strict``.
        """
        call.scope.cancellable = True
        if not self._pending.acquire(blocking=False):
            error: KVStoreError = CapacityExceeded("too many calls in the background")
            self._incidents.report(client_metrics.CALLS_REFUSED, "call refused: too many in the background")
            return self._refused(call, error)
        waiting = [call]  # taken out, so that the queue holds no buffer of a cancelled call
        answer: Future[R] = Future()
        answer.set_running_or_notify_cancel()

        def run() -> R | None:
            try:
                taken = waiting.pop()
            except IndexError:  # cancelled meanwhile
                return None
            return self.run(taken)

        def refuse() -> None:
            with suppress(IndexError):
                refused = waiting.pop()
                self._refuse(refused, refused.scope.error(), answer)

        try:
            queued = self._threads.submit(run)
        except Unavailable as closed:
            self._pending.release()
            return self._refused(call, closed)
        registered = call.scope.on_cancel(refuse)

        def ended(_: Future[R | None]) -> None:
            registered.unregister()
            self._pending.release()
            if queued.cancelled():
                refuse()
            elif (raised := queued.exception()) is not None:
                answer.set_exception(raised)
            elif (result := queued.result()) is not None:
                answer.set_result(result)

        queued.add_done_callback(ended)
        return answer

    def close(self) -> None:
        """Cancel the calls under way, and wait for those in the background."""
        for scope in self._scopes.close():
            scope.cancel()
        self._threads.close()

    def _refused(self, call: PreparedCall[R], error: KVStoreError) -> Future[R]:
        answer: Future[R] = Future()
        self._refuse(call, error, answer)
        return answer

    def _refuse(self, call: PreparedCall[R], error: KVStoreError, answer: Future[R]) -> None:
        try:
            answer.set_result(self._checked(call.refused(error)))
        except Exception as raised:  # noqa: BLE001  # the caller gets it from the future
            answer.set_exception(raised)

    def _checked(self, result: R) -> R:
        if self._strict and result.error is not None:
            raise result.error
        return result
