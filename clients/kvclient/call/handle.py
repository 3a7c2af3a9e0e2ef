"""Handle of a call that runs in the background."""

from __future__ import annotations

from concurrent.futures import Future, wait
from types import TracebackType
from typing import Generic, Self, TypeVar

from kvclient.call.arguments import check_seconds
from kvstore.core.cancel_scope import CancelScope

Result = TypeVar("Result")

GRACE_S = 0.5
"""Between a call's deadline and the end of its last piece of work."""


def left_with_grace_s(scope: CancelScope) -> float:
    """Return the seconds until a call has ended, unless it still waits for a thread."""
    return max(0.0, scope.deadline_s - scope.started_s - scope.elapsed_s() + GRACE_S)


class CallHandle(Generic[Result]):
    """A call that runs in the background. Thread-safe. A context manager that cancels the call unless it has ended.

    The buffer belongs to the call until ``result`` or ``cancel`` has returned.
    """

    def __init__(self, scope: CancelScope, future: Future[Result]) -> None:
        self._scope = scope
        self._future = future

    @property
    def done(self) -> bool:
        """Whether the call has ended. A call that still waits for a thread after its deadline ends here."""
        if not self._future.done() and left_with_grace_s(self._scope) == 0:
            self._scope.cancel()
        return self._future.done()

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called, or ``result`` gave up waiting."""
        return self._scope.cancelled

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the result. If it does not come in time, the call is cancelled and the result says what was done by then.

        Args:
            timeout_s: seconds to wait; None: until the deadline of the call.

        Raises:
            InvalidArgument: ``timeout_s`` is not a number of seconds.
        """
        left_s = left_with_grace_s(self._scope) if timeout_s is None else check_seconds("timeout_s", timeout_s, zero=True)
        if not wait((self._future,), left_s).done:
            return self.cancel()
        return self._future.result()

    def request_cancel(self) -> None:
        """Cancel the call without waiting. The buffer belongs to the call until ``result`` has returned."""
        self._scope.cancel()

    def cancel(self) -> Result:
        """Cancel the call and return its result. After that nothing touches the buffer."""
        self._scope.cancel()
        return self._future.result()  # bounded: a call without a thread ends at once, others check their scope between two pieces

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.done:
            self.cancel()
