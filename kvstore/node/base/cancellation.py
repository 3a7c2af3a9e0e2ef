"""Whether anybody still waits for what a call brings, and how its waits end where nobody does.

A call may hold room, claims or a thread while it waits. Once its caller has gone (left, killed, out of time) that must end at
once, and not at a deadline that the caller chose when it was alive. So each call works in a context with a ``Wanted``: whatever
waits there, in whichever thread the context was taken to, is woken by ``end``, and asks ``over`` before it begins anything new.
What works in no such context is always wanted.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import TypeVar

from kvstore.observe.counters import Counters

Result = TypeVar("Result")

_current: ContextVar[Wanted | None] = ContextVar("kvstore_wanted", default=None)


class Wanted:
    """Of one call, or of a part of it: what ends the one around it ends this one too. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = False
        self._wakes: list[Callable[[], object]] = []
        around = _current.get()
        if around is not None:
            around._wakes_on_end(self.end)

    @property
    def over(self) -> bool:
        """Whether nobody waits any more."""
        return self._over

    def end(self) -> None:
        """Nobody waits any more: what sleeps for it is woken. Does not wait for it to stop."""
        with self._lock:
            self._over = True
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()

    def context(self) -> Context:
        """A copy of the caller's context in which work is for this."""
        context = copy_context()
        context.run(_current.set, self)
        return context

    def _wakes_on_end(self, wake: Callable[[], object]) -> None:
        with self._lock:
            if not self._over:
                self._wakes.append(wake)
                return
        wake()

    @contextmanager
    def _waking(self, wake: Callable[[], object]) -> Iterator[bool]:
        """While inside, ``end`` calls ``wake``; yields whether it has ended already (then nothing is called)."""
        with self._lock:
            over = self._over
            if not over:
                self._wakes.append(wake)
        try:
            yield over
        finally:
            with self._lock:
                if wake in self._wakes:
                    self._wakes.remove(wake)


async def run_in_pool(pool: Executor, work: Callable[[], Result]) -> Result:
    """Work that may wait, in a pool: wanted for as long as the coroutine that calls this lives."""
    wanted = Wanted()
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, wanted.context().run, work)
    finally:
        wanted.end()


def over() -> bool:
    """Whether nobody waits any more for the work of this context."""
    wanted = _current.get()
    return wanted is not None and wanted.over


def wait(condition: threading.Condition, timeout_s: float, counters: Counters) -> bool:
    """``condition.wait``, ended also where nobody waits any more, which is counted. False: that, or too late.

    Other threads that wait for the condition are woken along with it, so each must look again whether it has what it waits for.
    """
    wanted = _current.get()
    if wanted is None:
        return condition.wait(timeout_s)
    with wanted._waking(partial(_notify, condition)) as ended:
        woken = not ended and condition.wait(timeout_s)
    if not wanted.over:
        return woken
    counters.add("node_waits_left_total")
    return False


def _notify(condition: threading.Condition) -> None:
    with condition:
        condition.notify_all()


def result(future: Future[Result]) -> Result:
    """``future.result``; where nobody waits any more, work that has not begun is cancelled.

    Raises:
        CancelledError: it was.
    """
    with ending(future.cancel):
        return future.result()


@contextmanager
def ending(stop: Callable[[], object]) -> Iterator[None]:
    """While inside, ``stop`` is called once nobody waits any more (at once, where that is so already). It must not block."""
    wanted = _current.get()
    if wanted is None:
        yield
        return
    with wanted._waking(stop) as ended:
        if ended:
            stop()
        yield
