"""Callers whose work a test cancels while it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from kvstore.core.cancel_scope import CancelCallback, CancelScope

BOUND_S = 10.0


class ObservedScope(CancelScope):
    """A scope that shows when work in it begins to wait."""

    __slots__ = ("began_to_wait",)

    def __init__(self) -> None:
        self.began_to_wait = threading.Event()
        super().__init__()

    def _register(self, callback: Callable[[], object]) -> CancelCallback | None:
        registered = super()._register(callback)
        self.began_to_wait.set()
        return registered


class CancellableCall:
    """Work in a thread, for a caller that may disconnect."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.scope = ObservedScope()
        self.answer: Future[object] = Future()
        self._work = work
        self._thread = threading.Thread(target=self.scope.context().run, args=(self._run,))
        self._thread.start()

    def _run(self) -> None:
        try:
            self.answer.set_result(self._work())
        except BaseException as error:  # noqa: BLE001  # raised in the test
            self.answer.set_exception(error)

    def waiting(self) -> CancellableCall:
        """Return once the work waits for an event that a cancellation ends."""
        assert self.scope.began_to_wait.wait(BOUND_S), "the work did not wait"
        assert not self.answer.done(), "the work did not wait"
        return self

    def cancel(self) -> object:
        """Disconnect the caller, and return the result of the work."""
        self.scope.cancel()
        return self.answer.result(BOUND_S)
