"""Probes of gRPC servers by the standard health check, which requires no token."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.observe.limited_log import LimitedLog
from kvstore.rpc.errors import FailedCall

log = logging.getLogger(__name__)
limited = LimitedLog(log)

SHARED_STATE: Final = "kvstore.v1.SharedState"
"""Name under which a metadata server that shares its whole state with others reports its health. Other servers do not know it."""
MAX_CHANNELS = 128
"""Number of open channels; the least recently used one is closed."""
_NO_ANSWER = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})


class HealthProbe:
    """Check whether servers answer. Thread-safe; implements ``kvstore.transport.liveness.Probe``.

    gRPC shares the connection of channels with equal settings, so a probe uses the same connection as calls do.

    Args:
        connect: opens a channel to an address.
    """

    def __init__(self, connect: Callable[[str], grpc.Channel]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._channels: OrderedDict[str, tuple[grpc.Channel, Any]] = OrderedDict()
        """Channels with their health-check methods. Both are made together: gRPC crashes if a closed channel makes a method."""
        self._closed = False

    def __call__(self, address: str, timeout_s: float, ended: Callable[[bool], None]) -> None:
        """Start a probe. ``ended(answered)`` is called once, as a rule from another thread. An error is an answer."""

        def probe() -> None:
            ended(self._check(address, "", timeout_s, wait_for_ready=True)[0] not in _NO_ANSWER)

        if not _start(probe, address):
            ended(False)

    def ask(self, address: str, service: str, timeout_s: float, told: Callable[[bool | None], None]) -> None:
        """Ask whether a server has a service. ``told`` is called once, as a rule from another thread.

        Its argument is None if the server stops, or does not answer.
        """

        def ask() -> None:
            code, status = self._check(address, service, timeout_s, wait_for_ready=False)
            if code is grpc.StatusCode.OK:
                told(True if status == health_pb2.HealthCheckResponse.SERVING else None)
            else:
                told(False if code is grpc.StatusCode.NOT_FOUND else None)

        if not _start(ask, address):
            told(None)

    def close(self) -> None:
        """Close all channels. Running probes end without an answer."""
        with self._lock:
            self._closed = True
            channels = list(self._channels.values())
            self._channels.clear()
        for channel, _ in channels:
            channel.close()

    def _check(self, address: str, service: str, timeout_s: float, *, wait_for_ready: bool) -> tuple[grpc.StatusCode | None, int]:
        """Call a server. Returns how the call ended, and the status that the server reports."""
        check = self._method(address)
        if check is None:
            return grpc.StatusCode.CANCELLED, 0
        try:
            found = check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s, wait_for_ready=wait_for_ready)
        except ValueError:  # the channel was closed by another thread
            return grpc.StatusCode.CANCELLED, 0
        except grpc.RpcError as error:
            return cast("FailedCall", error).code(), 0
        return grpc.StatusCode.OK, found.status

    def _method(self, address: str) -> Any:  # noqa: ANN401  # untyped in gRPC
        """The health check of an address; None: it has no channel now, for example because TLS files are being replaced."""
        retired = None
        try:
            with self._lock:
                if self._closed:
                    return None
                if address not in self._channels:
                    channel = self._connect(address)
                    self._channels[address] = channel, health_pb2_grpc.HealthStub(channel).Check
                    if len(self._channels) > MAX_CHANNELS:
                        retired = self._channels.popitem(last=False)[1][0]
                self._channels.move_to_end(address)
                check = self._channels[address][1]
        except Exception as error:  # noqa: BLE001  # the caller's call must not fail
            limited.warning("server not probed: %s (error=%s)", address, error)
            return None
        if retired is not None:
            retired.close()
        return check


def _start(job: Callable[[], None], address: str) -> bool:
    """Run a job in a thread. Returns False if there are no more threads.

    A gRPC future would start a thread, too. If that fails, all later futures of the channel hang, and so does its ``close``.
    """
    try:
        threading.Thread(target=job, name="kvstore-probe", daemon=True).start()
    except RuntimeError as error:
        limited.warning("server not probed: %s (error=%s)", address, error)
        return False
    return True
