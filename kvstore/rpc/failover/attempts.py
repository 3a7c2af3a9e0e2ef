"""The attempts of one unary call on several servers: the meaning of a failure, and the server for the next attempt."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final, cast

import grpc
import grpc.aio

from kvstore.core.errors import KVStoreError
from kvstore.observe.metric_definitions import common as common_metrics
from kvstore.rpc.errors import DETAILS_KEY, NOT_EXECUTED, USE_ANOTHER_SERVER, FailedCall, detail_of
from kvstore.rpc.failover.rpc_rules import FORWARDED_TO, Repetition, RpcRule
from kvstore.rpc.failover.selection import CallPlacement, Failure
from kvstore.rpc.failover.servers import MetadataServers

TELLING_S: Final = 0.02
"""A shorter timeout says nothing about the server."""
CUT_S: Final = 1.0
"""A call with a longer timeout is cancelled if its server turns out to be hung. A shorter one times out as soon."""
_LEAST_S: Final = 0.001
_NOT_SENT: Final = ("failed to connect to all addresses", "connections to all backends failing", "errors resolving ")
"""Beginnings of gRPC's messages for a call that was not sent, because the connection could not be opened."""


def unavailable(message: str) -> grpc.RpcError:
    """Return the error of a call that no server could execute, as gRPC would raise it."""
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), message, None)


def failure_of(error: grpc.RpcError) -> Failure | None:
    """Return the verdict of a failed call on its server; None: no verdict, because the server or the caller ended it."""
    failed = cast("FailedCall", error)
    if any(key == DETAILS_KEY for key, _ in failed.trailing_metadata() or ()):  # type: ignore[attr-defined]  # pairs
        detail = detail_of(failed)
        return Failure.UNAVAILABLE if detail is not None and USE_ANOTHER_SERVER in detail.fields else None
    code = failed.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Failure.TIMEOUT
    if code is not grpc.StatusCode.UNAVAILABLE:
        return None
    return Failure.REFUSED if (failed.details() or "").startswith(_NOT_SENT) else Failure.UNAVAILABLE


def deadline_of(timeout_s: float | None) -> float | None:
    """Return the deadline of a call that begins now, in monotonic seconds; None: none."""
    return None if timeout_s is None else time.monotonic() + timeout_s


class UnaryAttempts:
    """Plan of the attempts of one call. ``address`` and ``timeout_s`` are those of the next attempt.

    Args:
        servers: the servers. If they are not ready, call ``wait_ready`` before: nothing waits here without ``wait``, because an
            event loop may call this.
        rule: rule of the RPC.
        deadline_s: deadline of all attempts together, in monotonic seconds; None: none.
        wait: wait until a server answers, instead of failing at once.

    Raises:
        grpc.RpcError: no server answers.
    """

    __slots__ = ("_deadline_s", "_repeatable", "_rule", "_servers", "_tried", "address", "timeout_s")

    def __init__(self, servers: MetadataServers, rule: RpcRule, deadline_s: float | None, *, wait: bool) -> None:
        self._servers = servers
        self._rule = rule
        self._deadline_s = deadline_s
        self._repeatable = rule.repetition is Repetition.REPEAT
        self._tried: tuple[str, ...] = ()
        route = servers.pick(rule.placement)
        if route is None and wait:
            route = servers.wait_usable(rule.placement, self._left_s())
        if route is None:
            raise unavailable(str(servers.no_server()))
        self.address = route.address
        self.timeout_s = self._share(spare=route.spare)

    @property
    def long(self) -> bool:
        """Whether the attempt must be cancelled if its server turns out to be hung."""
        return self.timeout_s is None or self.timeout_s > CUT_S

    @property
    def planner(self) -> bool:
        """Whether ``answered`` needs the trailing metadata of the answer."""
        return self._rule.placement is CallPlacement.PLANNER

    def answered(self, trailing: Iterable[tuple[str, str | bytes]] | None = None) -> None:
        """Record that the server answered, and the trailing metadata of an answer about plans."""
        if self._servers.timed_out:
            self._servers.answered(self.address)
        if trailing is not None:
            self._servers.planned(self.address, next((str(value) for key, value in trailing if key == FORWARDED_TO), ""))

    def failed(self, error: grpc.RpcError) -> bool:
        """Record the failure of the attempt. Returns whether there is another attempt, for which ``address`` is set."""
        failure = failure_of(error)
        if failure is None:
            self.answered()
            failed = cast("FailedCall", error)
            detail = detail_of(failed)
            executed = detail is None or NOT_EXECUTED not in detail.fields
            return failed.code() is grpc.StatusCode.UNAVAILABLE and self._advance(sent=executed)
        telling = failure is not Failure.TIMEOUT or not (
            self._rule.waits or (self.timeout_s is not None and self.timeout_s < TELLING_S)
        )
        if telling:
            self._servers.failed(self.address, failure)
        return self._advance(sent=failure is not Failure.REFUSED)

    def hung(self, *, sent: bool) -> bool:
        """Record that the server is hung. Returns as ``failed``."""
        self._servers.failed(self.address, Failure.HUNG)
        return self._advance(sent=sent)

    def hung_error(self, error: KVStoreError) -> grpc.RpcError:
        """Return the error of a call whose last server is hung."""
        return unavailable(str(error))

    def _advance(self, *, sent: bool) -> bool:
        if sent and not self._repeatable:
            return False
        left_s = self._left_s()
        if left_s is not None and left_s < _LEAST_S:
            return False
        self._tried = (*self._tried, self.address)
        others = self._servers.others(self._rule.placement, self._tried)
        if not others:
            return False
        if sent:
            self._repeatable = False
        self.address = others[0]
        self.timeout_s = self._share(spare=len(others) > 1)
        self._servers.counters.add(common_metrics.FAILOVER_CALLS_REPEATED)
        return True

    def _share(self, *, spare: bool) -> float | None:
        """Time limit of the next attempt: half of what is left, if another server could then repeat the call."""
        left_s = self._left_s()
        return left_s / 2 if left_s is not None and spare and self._repeatable else left_s

    def _left_s(self) -> float | None:
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()
