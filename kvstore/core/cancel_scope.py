"""Cancellation of the work for one call: a deadline, a ``cancel`` method, and callbacks that wake what waits.

The words are trio's. A scope is created for a call and passed along, or made current in a context. Work for the call

* checks ``ended`` before each new step;
* registers with ``on_cancel`` how to end a wait for something outside, or uses ``wait``, ``join`` and ``result``;
* bounds each wait by ``left_s``, because no timer watches the deadline.

Scopes nest. A scope that is created while another one is current is cancelled together with that one, and its deadline is not
later. The current scope is a context variable: a pool thread sees the scope of a call if its work runs in ``scope.context()``.

    scope = CancelScope.after(timeout_s)
    with scope.on_cancel(rpc.cancel):
        answer = rpc.result(scope.left_s())
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, wait
from contextlib import suppress
from contextvars import Context, ContextVar, Token, copy_context
from types import TracebackType
from typing import Any, Final, NoReturn, Self, TypeVar
from weakref import WeakSet

from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import DeadlineExceeded

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_MONOTONIC: Final = MonotonicClock()


class CancelCallback:
    """Registration of a callback at a scope. A context manager that unregisters it."""

    __slots__ = ("_scope", "callback")

    def __init__(self, scope: CancelScope | None, callback: Callable[[], object]) -> None:
        self._scope = scope
        self.callback = callback

    def unregister(self) -> None:
        """Make sure that a later cancellation does not call the callback. A call that has begun may still run. Idempotent."""
        if self._scope is not None:
            self._scope.discard(self)
            self._scope = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.unregister()


class CancelScope:
    """Deadline and cancellation of one call, or of a part of it. Thread-safe.

    As a context manager it is the current scope inside the ``with`` statement, which one thread at a time may enter.

    Args:
        deadline_s: on ``clock``; None: only the deadline of the enclosing scope counts, if there is one.
        clock: source of time. All scopes that nest must have the same.
    """

    __slots__ = ("__weakref__", "_callbacks", "_cancelled", "_children", "_clock", "_lock", "_tokens", "deadline_s", "started_s")

    def __init__(self, deadline_s: float | None = None, *, clock: Clock = _MONOTONIC) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._cancelled = False
        self._callbacks: dict[CancelCallback, None] = {}
        self._children: WeakSet[CancelScope] | None = None
        self._tokens: list[Token[CancelScope]] = []
        self.started_s = clock.now_s()
        self.deadline_s = math.inf if deadline_s is None else deadline_s
        """Infinite if there is none."""
        enclosing = _current.get(None)
        if enclosing is not None:
            self.deadline_s = min(self.deadline_s, enclosing.deadline_s)
            enclosing.adopt(self)

    @classmethod
    def after(cls, timeout_s: float, clock: Clock = _MONOTONIC) -> Self:
        """Return a scope whose deadline is ``timeout_s`` from now."""
        return cls(clock.now_s() + timeout_s, clock=clock)

    def nested(self, deadline_s: float | None = None) -> CancelScope:
        """Return a scope that is nested in this one, whichever scope is current."""
        token = _current.set(self)
        try:
            return CancelScope(deadline_s, clock=self._clock)
        finally:
            _current.reset(token)

    # ---- state ----
    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called, here or on an enclosing scope."""
        return self._cancelled

    @property
    def ended(self) -> bool:
        """Whether the work must stop: cancelled, or past the deadline."""
        return self._cancelled or self._clock.now_s() >= self.deadline_s

    def left_s(self) -> float:
        """Return the seconds until the deadline: 0 if it has passed or the scope is cancelled, infinite without a deadline."""
        return 0.0 if self._cancelled else max(0.0, self.deadline_s - self._clock.now_s())

    def elapsed_s(self) -> float:
        """Return the seconds since the scope was created."""
        return self._clock.now_s() - self.started_s

    def error(self) -> DeadlineExceeded:
        """Return the error that says why the scope ended."""
        if self._cancelled:
            return DeadlineExceeded("cancelled by the caller")
        return DeadlineExceeded("not finished before the deadline", seconds=round(self.deadline_s - self.started_s, 3))

    # ---- cancellation ----
    def cancel(self) -> None:
        """Cancel the work. Calls all registered callbacks and returns; does not wait for the work to stop. Idempotent."""
        with self._lock:
            self._cancelled = True
            callbacks, self._callbacks = self._callbacks, {}
            children, self._children = self._children, None
        for registered in callbacks:
            _call(registered.callback)
        for child in children or ():
            child.cancel()

    def on_cancel(self, callback: Callable[[], object]) -> CancelCallback:
        """Call ``callback`` once if the scope is cancelled: now, if that has happened already.

        Args:
            callback: ends a wait from another thread. Must not block.

        Returns:
            The registration, to be used in a ``with`` statement or ended by its ``unregister``.
        """
        registered = self._register(callback)
        if registered is None:
            _call(callback)
            return CancelCallback(None, callback)
        return registered

    def wait(self, condition: threading.Condition, timeout_s: float | None = None) -> bool:
        """Wait for a condition that the caller has acquired, until cancellation, the deadline or the timeout.

        A cancellation wakes all threads that wait for the condition, so each must check again what it waits for.

        Returns:
            False: cancelled, or not notified in time.
        """
        left_s = self.left_s()
        if timeout_s is not None:
            left_s = min(left_s, timeout_s)

        def notify() -> None:
            with condition:
                condition.notify_all()

        registered = self._register(notify)
        if registered is None:
            return False
        with registered:
            notified = condition.wait(None if left_s == math.inf else left_s)
        return notified and not self._cancelled

    def join(self, *futures: Future[Any]) -> None:
        """Wait until all work has ended. Work that has not begun when the scope ends is cancelled."""
        for future in futures:
            left_s = self.left_s()
            with self.on_cancel(future.cancel), suppress(CancelledError):
                try:
                    future.exception(None if left_s == math.inf else left_s)
                except TimeoutError:
                    future.cancel()
        wait([future for future in futures if not future.cancelled()])

    def result(self, future: Future[Result]) -> Result:
        """Return ``future.result()``. Work that has not begun when the scope ends is cancelled.

        Raises:
            CancelledError: the work was cancelled before it began.
        """
        self.join(future)
        return future.result()

    # ---- the current scope ----
    def __enter__(self) -> Self:
        self._tokens.append(_current.set(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _current.reset(self._tokens.pop())

    def context(self) -> Context:
        """Return a copy of the caller's context in which this scope is current."""
        context = copy_context()
        context.run(_current.set, self)
        return context

    # ---- registrations ----
    def _register(self, callback: Callable[[], object]) -> CancelCallback | None:
        """Register a callback. None: the scope is cancelled already."""
        registered = CancelCallback(self, callback)
        with self._lock:
            if self._cancelled:
                return None
            self._callbacks[registered] = None
        return registered

    def discard(self, registered: CancelCallback) -> None:
        """Forget a registration."""
        with self._lock:
            self._callbacks.pop(registered, None)

    def adopt(self, child: CancelScope) -> None:
        """Cancel a nested scope together with this one. The reference is weak: no call waits in an unreferenced scope."""
        with self._lock:
            if not self._cancelled:
                if self._children is None:
                    self._children = WeakSet()
                self._children.add(child)
                return
        child.cancel()


class _RootScope(CancelScope):
    """The current scope if none was set. It is never cancelled and never times out."""

    __slots__ = ()

    def cancel(self) -> NoReturn:
        raise RuntimeError("the root scope cannot be cancelled; create a CancelScope")

    def _register(self, callback: Callable[[], object]) -> CancelCallback:
        return CancelCallback(None, callback)


_current: ContextVar[CancelScope] = ContextVar("kvstore_cancel_scope")
_ROOT: Final = _RootScope()


def current() -> CancelScope:
    """Return the scope of this context. If none was set, return one that never ends."""
    return _current.get(_ROOT)


async def run_in_pool(pool: Executor, work: Callable[[], Result]) -> Result:
    """Run work that may wait in a pool, in a scope that is cancelled when the calling coroutine ends."""
    scope = CancelScope()
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, scope.context().run, work)
    finally:
        scope.cancel()


def _call(callback: Callable[[], object]) -> None:
    """Call one callback; an error must not keep the others from being called."""
    try:
        callback()
    except Exception:
        log.exception("cancel callback failed")
