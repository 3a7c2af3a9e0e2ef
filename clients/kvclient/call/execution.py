"""Execution of calls, in the engine's thread or in one of a bounded number of background threads.

A failure of the store is not raised: it becomes a result that contains the error.
Errors of the programmer are raised before a ``PreparedCall`` exists.
"""

from __future__ import annotations

import logging
import threading
import weakref
from concurrent.futures import Future
from typing import Protocol, TypeVar

from kvclient.call.scope import CallScope
from kvclient.call.threads import LazyThreadPool
from kvstore.core.errors import CapacityExceeded, Internal, KVStoreError, Unavailable
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import client as client_metrics

_log = logging.getLogger(__name__)


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
        self._scopes: weakref.WeakSet[CallScope] = weakref.WeakSet()
        self._closed = False

    def run(self, call: PreparedCall[R]) -> R:
        """Run a call in this thread."""
        if self._closed:
            return self._checked(call.refused(Unavailable("the client is closed")))
        self._scopes.add(call.scope)
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
        """Run a call in a background thread. The future fails only if ``strict``."""
        call.scope.cancellable = True
        if not self._pending.acquire(blocking=False):
            error: KVStoreError = CapacityExceeded("too many calls in the background")
            self._incidents.report(client_metrics.CALLS_REFUSED, "refused a call: too many in the background")
            return self._refused(call, error)
        try:
            future = self._threads.submit(self.run, call)
        except Unavailable as closed:
            self._pending.release()
            return self._refused(call, closed)
        future.add_done_callback(lambda _: self._pending.release())
        return future

    def close(self) -> None:
        """Cancel the calls under way, and wait for those in the background."""
        self._closed = True
        for scope in list(self._scopes):
            scope.cancel()
        self._threads.close()

    def _refused(self, call: PreparedCall[R], error: KVStoreError) -> Future[R]:
        future: Future[R] = Future()
        try:
            future.set_result(self._checked(call.refused(error)))
        except KVStoreError as raised:
            future.set_exception(raised)
        return future

    def _checked(self, result: R) -> R:
        if self._strict and result.error is not None:
            raise result.error
        return result
