"""Release of leases and unwritten slots to a node, off the critical path."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

from kvclient.options import ClientOptions
from kvproto.v1 import node_pb2, node_pb2_grpc
from kvstore.core.errors import KVStoreError
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.process.threads.submission import start_thread
from kvstore.rpc.client import call

log = logging.getLogger(__name__)
limited = LimitedLog(log)

QUIET_S = 0.005
"""If no lease was released for this long, no more are coming: the loads wait, perhaps for the very space that these hold."""
LONGEST_S = 0.05
"""Maximum time between the release of a lease and the call."""
MAX_PENDING_RELEASES = 4_096
"""Leases and slots waiting to be given back; more are left to the end of the session."""
_ARENA_SHARE = 16
"""Leases are sent at the latest when they hold 1/16 of the arena, so that large loads flow through it."""
_TIMEOUT_S = 2.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


class ReleaseBatcher:
    """Decides when released leases are sent to the node. Not thread-safe.

    One call per lease would slow the loads down. But a lease keeps blocks and their ancestors in the arena, which may be the
    whole of a small arena, and a load must not wait for space that unneeded leases hold. Leases are therefore sent as soon
    as they hold ``max_bytes``, or after a pause without further leases, and at the latest after ``LONGEST_S``.

    Args:
        max_bytes: bytes of blocks that may be held, over all loads of the session.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._first_s = self._last_s = math.inf
        self._bytes = 0
        self._urgent = False

    def added(self, now_s: float, nbytes: int, *, urgent: bool) -> None:
        """Record a release of blocks with ``nbytes`` bytes in the arena. If it is urgent, it must not wait for others."""
        if self._first_s == math.inf:
            self._first_s = now_s
        self._last_s = now_s
        self._bytes += nbytes
        self._urgent |= urgent or self._bytes >= self._max_bytes

    def left_s(self, now_s: float) -> float:
        """Return the seconds until the next call; 0 or less: now; infinite: nothing to send."""
        if self._urgent:
            return 0.0
        return min(self._last_s + QUIET_S, self._first_s + LONGEST_S) - now_s

    def sent(self) -> None:
        """Record that everything was sent."""
        self._first_s = self._last_s = math.inf
        self._bytes = 0
        self._urgent = False


class LeaseReleaser:
    """Releases leases and unwritten slots from a separate thread. Thread-safe.

    What the node did not answer is sent again, after a pause that doubles: slots that are not given back would stay reserved
    until the engine ends. A lost session needs nothing more, because its end gives everything back.

    Leases of many loads are sent in one call (see ``ReleaseBatcher``). ``stub.Release.future`` is unsuitable: starting a call
    that way costs the loading thread almost a millisecond, and gRPC cancels the call when the future is dropped.
    """

    def __init__(
        self, stub: node_pb2_grpc.NodeStub, opened: node_pb2.OpenSessionResponse, options: ClientOptions, incidents: LimitedLog
    ) -> None:
        self._stub = stub
        self._session_id = opened.session_id
        self._counters = incidents.counters
        self._batcher = ReleaseBatcher(min(options.release_bytes, opened.arena_bytes // _ARENA_SHARE))
        self._changed = threading.Condition()
        self._leases: list[int] = []
        self._aborts: list[bytes] = []
        self._closed = False
        self._pause_s = 0.0
        self._paused_until_s = -math.inf
        self._thread: threading.Thread | None = None

    def release(self, lease_ids: list[int], nbytes: int = 0, *, urgent: bool = False) -> None:
        """Release leases of blocks with ``nbytes`` bytes: now if ``urgent``, otherwise after a moment, together with others."""
        with self._changed:
            if self._rejects(len(lease_ids)):
                return
            self._leases += lease_ids
            self._added(nbytes, urgent=urgent)

    def abort(self, operation_id: bytes) -> None:
        """Give the slots of a ``Prepare`` back. Nothing may write to them any more."""
        with self._changed:
            if self._rejects(1):
                return
            self._aborts.append(operation_id)
            self._added(0, urgent=True)

    def close(self) -> None:
        """Stop the thread. The end of the session gives everything back that is pending."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _rejects(self, more: int) -> bool:
        """Whether nothing more is accepted. Leases then end by time, and slots with the session."""
        if not self._closed and len(self._leases) + len(self._aborts) + more > MAX_PENDING_RELEASES:
            self._counters.add(client_metrics.RETURNS_DROPPED, more)
            return True
        return self._closed

    def _added(self, nbytes: int, *, urgent: bool) -> None:
        now_s = time.monotonic()
        before_s = self._batcher.left_s(now_s)
        self._batcher.added(now_s, nbytes, urgent=urgent)
        if self._thread is None:
            self._thread = start_thread(self._run, "kvclient-release")
            if self._thread is None:  # the next call tries again
                self._counters.add(client_metrics.RETURNS_FAILED)
                limited.warning("leases and slots not returned yet (reason=no more threads)")
        elif self._batcher.left_s(now_s) < before_s:  # otherwise the thread wakes up in time
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (left_s := self._left_s()) > 0:
                    self._changed.wait(None if left_s == math.inf else left_s)
                if self._closed:
                    return
                leases, self._leases = self._leases, []
                aborts, self._aborts = self._aborts, []
                self._batcher.sent()
            failed = self._send(leases, aborts)
            with self._changed:
                self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S) if failed else 0.0
                if failed:
                    self._counters.add(client_metrics.RETURNS_FAILED)
                    self._leases = leases + self._leases
                    self._aborts += aborts
                    self._paused_until_s = time.monotonic() + self._pause_s
                    self._batcher.added(time.monotonic(), 0, urgent=True)

    def _left_s(self) -> float:
        """Seconds until the next call; infinite: nothing to send."""
        now_s = time.monotonic()
        left_s = self._batcher.left_s(now_s)
        return left_s if left_s == math.inf else max(left_s, self._paused_until_s - now_s)

    def _send(self, leases: list[int], aborts: list[bytes]) -> bool:
        """Send, and remove from the lists what needs no further call. Returns whether a call failed that is worth repeating."""
        try:
            while aborts:
                abort = node_pb2.AbortRequest(session_id=self._session_id, operation_id=aborts[0])
                self._call(self._stub.Abort, abort)
                aborts.pop(0)
            if leases:
                release = node_pb2.ReleaseRequest(session_id=self._session_id, lease_ids=leases)
                self._call(self._stub.Release, release)
                leases.clear()
        except Exception as error:  # noqa: BLE001  # thread edge: later releases need it
            limited.warning("leases and slots not returned yet, retrying (error=%s)", error)
            return True
        return False

    def _call(self, method: Any, request: Any) -> None:  # noqa: ANN401  # a gRPC method and its request
        """Call a method. Drop errors that a retry would meet again, such as a lost session, whose end releases everything."""
        try:
            call(method, request, _TIMEOUT_S)
        except KVStoreError as error:
            if error.retryable:
                raise
            self._counters.add(client_metrics.RETURNS_REFUSED)
            limited.warning("leases or slots refused by the node (error=%s)", error)
