"""Cancel scope of one call of an engine, and RPCs that end with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import grpc

from kvstore.core.cancel_scope import CancelScope
from kvstore.core.errors import DeadlineExceeded
from kvstore.rpc.client import NO_RETRY, RetryPolicy, call_cancellable
from kvstore.rpc.client import call as call_rpc
from kvstore.transport.liveness import WatchedServer

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

    @contextmanager
    def cancelled_with(cancel: Callable[[], object]) -> Iterator[None]:
        with server.waiting(cancel), scope.on_cancel(cancel):
            try:
                yield
            except (grpc.FutureCancelledError, grpc.RpcError) as error:
                if scope.cancelled:
                    raise scope.error() from error
                raise

    return call_cancellable(method, request, timeout_s, cancelled_with, retry)


def _nothing() -> None:
    """Cancel nothing: the call ends soon without cancellation."""
