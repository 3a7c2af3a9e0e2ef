"""Handle of a call that runs in the background."""

from __future__ import annotations

from concurrent.futures import Future, wait
from types import TracebackType
from typing import Generic, Self, TypeVar

from kvclient.call.arguments import check_seconds
from kvstore.core.cancel_scope import CancelScope

Result = TypeVar("Result")


class CallHandle(Generic[Result]):
    """A call that runs in the background. Thread-safe. A context manager that cancels the call unless it has ended.

    The buffer belongs to the call until ``result`` or ``cancel`` has returned.
    """

    def __init__(self, scope: CancelScope, future: Future[Result]) -> None:
        self._scope = scope
        self._future = future

    @property
    def done(self) -> bool:
        """Whether the call has ended."""
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
        if timeout_s is not None:
            timeout_s = check_seconds("timeout_s", timeout_s, zero=True)
        if not wait((self._future,), timeout_s).done:
            return self.cancel()
        return self._future.result()

    def request_cancel(self) -> None:
        """Cancel the call without waiting. The buffer belongs to the call until ``result`` has returned."""
        self._scope.cancel()

    def cancel(self) -> Result:
        """Cancel the call and return its result. After that nothing touches the buffer."""
        self._scope.cancel()
        return self._future.result()  # bounded: the work checks its scope between two pieces

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.done:
            self.cancel()
