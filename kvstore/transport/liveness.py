"""Liveness of servers: detects within a second that a server hangs, and that it answers again.

A stopped process, a hung kernel or a cut cable answers nothing and closes nothing, so that every call lasts until its own
deadline, and so does the next call. The rules:

1. A caller that waits for a server registers the wait with a callback that cancels it. This costs about a microsecond.
2. If a wait is older than ``grace_s``, the server becomes *suspect*, and a probe is sent: the cheapest call that the server
   answers.
3. Any answer makes the server *alive* again: a slow server is not a hung server. It is probed again after ``AGAIN_S``, for as
   long as a caller waits.
4. If a suspect server answers no probe for ``silence_s``, it is *hung*. All waits for it are cancelled, and new waits are refused
   with ``Unavailable``. Callers continue with another replica or a miss.
5. While a server is hung, one probe is always under way. The first answer makes the server alive.
6. A hung server that no caller has asked for during ``FORGET_S`` is not probed any more: nothing is known about it then. Its
   address may belong to another host by now.
7. The monitoring process may itself be stopped or starved. The time by which its own ticks were late does not count as silence.

``ServerLiveness`` is the state of one server: pure, with events as input and decisions as output. ``LivenessMonitor`` runs it
for many servers in one thread, which sleeps while no caller waits. ``CircuitBreaker`` covers servers that answer with failures:
after several, callers fail fast for a short time instead of waiting again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from types import TracebackType
from typing import Self

from kvstore.core.clock import Clock
from kvstore.core.errors import Unavailable
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import transport as transport_metrics
from kvstore.process.threads.submission import start_thread

log = logging.getLogger(__name__)
limited = LimitedLog(log)

GRACE_S = 0.2
"""A wait older than this makes its server suspect."""
SILENCE_S = 0.7
"""A suspect server that answers no probe for this long is hung. Grace, silence and one tick together are below one second."""
TICK_S = 0.05
"""Interval at which the ages of waits are checked."""
AGAIN_S = 0.5
"""A server that answered a probe is not probed again for this long."""
LATE_S = 0.2
"""A tick later than this means that this process did not run; that time does not count as silence of the server."""
PROBE_S = 5.0
"""Timeout of one probe. A hung server that resumes answers the probe in its socket, however old the probe is."""
IDLE_S = 2.0
"""After this time without a wait, a server is no longer checked until the next wait."""
FORGET_S = 60.0
"""After this time without a call, a hung server is forgotten."""
MAX_SERVERS = 1_024
"""Maximum number of servers with a state. Beyond it, the least recently used server without a wait is dropped."""


class ServerState(Enum):
    """Liveness state of a server."""

    ALIVE = auto()
    SUSPECT = auto()
    HUNG = auto()


@dataclass(frozen=True, slots=True)
class LivenessDecision:
    """Actions that follow from an event."""

    probe: bool = False
    """Send a probe and report its end."""
    hung: bool = False
    """The server has just become hung; cancel all waits for it."""
    recovered: bool = False
    """The server was hung and has just answered."""


NOTHING = LivenessDecision()


class ServerLiveness:
    """State machine of one server. Pure; not thread-safe.

    Args:
        grace_s: see ``GRACE_S``.
        silence_s: see ``SILENCE_S``.
        tick_s: expected interval between calls of ``tick``.
    """

    def __init__(self, *, grace_s: float = GRACE_S, silence_s: float = SILENCE_S, tick_s: float = TICK_S) -> None:
        self.state = ServerState.ALIVE
        self._grace_s = grace_s
        self._silence_s = silence_s
        self._tick_s = tick_s
        self._probing = False
        self._suspect_since_s = 0.0
        self._answered_s = float("-inf")
        self._ticked_s: float | None = None

    @property
    def settled(self) -> bool:
        """Whether the server is alive and no probe is under way, so that ticks change nothing until the next wait."""
        return self.state is ServerState.ALIVE and not self._probing

    def tick(self, now_s: float, oldest_wait_s: float | None) -> LivenessDecision:
        """Check the age of the oldest wait.

        Args:
            now_s: monotonic seconds.
            oldest_wait_s: when the oldest wait for this server began; None: no caller waits.
        """
        late_s = 0.0 if self._ticked_s is None else now_s - self._ticked_s - self._tick_s
        self._ticked_s = now_s
        if late_s > LATE_S:
            self._suspect_since_s += late_s
        if self.state is ServerState.ALIVE:
            if oldest_wait_s is None or now_s - oldest_wait_s < self._grace_s or now_s - self._answered_s < AGAIN_S:
                return NOTHING
            self.state, self._suspect_since_s = ServerState.SUSPECT, now_s
        elif self.state is ServerState.SUSPECT and now_s - self._suspect_since_s >= self._silence_s:
            self.state = ServerState.HUNG
            return LivenessDecision(probe=self._begin_probe(), hung=True)
        return LivenessDecision(probe=self._begin_probe())

    def pause(self) -> None:
        """Pause: the time until the next tick does not count as late."""
        self._ticked_s = None

    def probe_ended(self, now_s: float, *, answered: bool) -> LivenessDecision:
        """Record the end of a probe. Any answer counts, even an error."""
        self._probing = False
        if not answered:
            return NOTHING
        recovered = self.state is ServerState.HUNG
        self.state, self._answered_s = ServerState.ALIVE, now_s
        return LivenessDecision(recovered=recovered)

    def forget(self) -> None:
        """Treat a hung server as alive, because no caller used it for ``FORGET_S``."""
        self.state = ServerState.ALIVE

    def _begin_probe(self) -> bool:
        begun, self._probing = not self._probing, True
        return begun


Probe = Callable[[str, float, Callable[[bool], None]], None]
"""``probe(server, timeout_s, ended)``: starts a probe and returns. ``ended(answered)`` must be called once, from any thread."""


def data_plane(address: str) -> str:
    """Return the name of the data plane at an address, among the servers of a monitor."""
    return f"data plane {address}"


class Wait:
    """One wait for a server, as a context manager: refused if the server is hung, cancelled if the server becomes hung.

    Raises:
        Unavailable: on entry, if the server is hung; on exit, in place of the exception that the cancellation caused.
    """

    __slots__ = ("_cancel", "_server", "began_s", "cut")

    def __init__(self, server: WatchedServer, cancel: Callable[[], object]) -> None:
        self._server = server
        self._cancel = cancel
        self.began_s = 0.0
        self.cut = False
        """Whether this wait was cancelled because the server is hung."""

    def cancel(self) -> None:
        """Cancel this wait because the server is hung. Called by ``WatchedServer``."""
        self.cut = True
        self._cancel()

    def __enter__(self) -> Self:
        self._server.begin_wait(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.end_wait(self)
        if self.cut and isinstance(error, Exception):
            raise self._server.error() from error


class WatchedServer:
    """Liveness of one server, and the waits for it. Thread-safe. Made by ``LivenessMonitor.server``."""

    def __init__(self, address: str, wake: Callable[[WatchedServer], None], counters: Counters, probe: Probe) -> None:
        self.address = address
        self._probe = probe
        self._wake = wake
        self._counters = counters
        self._lock = threading.Lock()
        self._liveness = ServerLiveness()
        self._waits: dict[int, Wait] = {}  # by identity
        self._hung_since_s = 0.0
        self._refused_s = 0.0
        self._idle_since_s: float | None = None

    @property
    def hung(self) -> bool:
        """Whether the server is hung; callers must continue without it."""
        return self._liveness.state is ServerState.HUNG

    def waiting(self, cancel: Callable[[], object]) -> Wait:
        """Return a wait for this server, to be used in a ``with`` statement.

        Args:
            cancel: ends the wait soon. Called from another thread, possibly after the wait has ended; must not block.
        """
        return Wait(self, cancel)

    def check(self) -> None:
        """Refuse a call to a hung server.

        Raises:
            Unavailable: the server is hung.
        """
        if self.hung:
            self._refused_s = time.monotonic()
            self._counters.add(transport_metrics.PEER_WAITS_REFUSED)
            raise self.error()

    def error(self) -> Unavailable:
        """Return the error of calls to this server while it is hung."""
        return Unavailable("the server stopped answering; calls to it fail until it answers again", server=self.address)

    def begin_wait(self, wait: Wait) -> None:
        """Register a wait. ``end_wait`` must follow.

        Raises:
            Unavailable: the server is hung; nothing is registered.
        """
        wait.began_s = time.monotonic()
        with self._lock:
            hung = self.hung
            if not hung:
                self._waits[id(wait)] = wait
        if hung:
            self.check()
        self._wake(self)

    def end_wait(self, wait: Wait) -> None:
        """Unregister a wait. Idempotent."""
        with self._lock:
            self._waits.pop(id(wait), None)

    # ---- called by the monitor
    def tick(self, now_s: float) -> LivenessDecision:
        """Check the ages of the waits. Cancel all of them if the server has just become hung."""
        with self._lock:
            oldest_s = min((wait.began_s for wait in self._waits.values()), default=None)
            decision = self._liveness.tick(now_s, oldest_s)
            waits = list(self._waits.values()) if decision.hung else []
            forgotten = self.hung and now_s - max(self._hung_since_s, self._refused_s) >= FORGET_S and not decision.hung
            if forgotten:
                self._liveness.forget()
        if forgotten:
            log.warning("hung server no longer probed: %s (unused_s=%.0f)", self.address, FORGET_S)
        if decision.hung:
            self._hung_since_s = now_s
            self._counters.add(transport_metrics.PEER_HUNG)
            self._counters.add(transport_metrics.PEER_WAITS_CUT, len(waits))
            log.warning("server stopped answering: %s (cancelled_calls=%d)", self.address, len(waits))
        for wait in waits:
            try:
                wait.cancel()
            except Exception:
                log.exception("cancellation of a wait failed: %s", self.address)
        return decision

    def probe_ended(self, now_s: float, *, answered: bool) -> None:
        """Record the end of a probe."""
        with self._lock:
            decision = self._liveness.probe_ended(now_s, answered=answered)
        if decision.recovered:
            log.warning("server answered again: %s (after_s=%.1f)", self.address, now_s - self._hung_since_s)

    def send_probe(self) -> None:
        """Start a probe of the server."""

        def ended(answered: bool) -> None:
            self.probe_ended(time.monotonic(), answered=answered)

        try:
            self._probe(self.address, PROBE_S, ended)
        except Exception:
            log.exception("probe failed: %s", self.address)
            ended(False)

    def idle_for_s(self, now_s: float) -> float:
        """Return for how many seconds there was neither a wait nor a probe."""
        with self._lock:
            if self._waits or not self._liveness.settled:
                self._idle_since_s = None
                return 0.0
            if self._idle_since_s is None:
                self._idle_since_s = now_s
            return now_s - self._idle_since_s

    @property
    def has_waits(self) -> bool:
        """Whether a caller waits for this server."""
        return bool(self._waits)

    def pause(self) -> None:
        """Pause the checks until the next wait."""
        with self._lock:
            self._liveness.pause()


class LivenessMonitor:
    """Monitors all servers that one client or daemon calls. Thread-safe.

    Args:
        probe: starts a probe of a server, unless the server has a probe of another kind.
        counters: counts hung servers and cancelled waits.
        on_close: called by ``close`` at the end, to free what probes use.
    """

    def __init__(self, probe: Probe, counters: Counters, on_close: Callable[[], None] | None = None) -> None:
        self._probe = probe
        self._on_close = on_close
        self._counters = counters
        self._changed = threading.Condition()
        self._servers: OrderedDict[str, WatchedServer] = OrderedDict()
        self._awake: set[WatchedServer] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    def server(self, address: str, probe: Probe | None = None) -> WatchedServer:
        """Return the liveness of one server: the same object for the same address.

        Args:
            address: the server's address, or another unique name.
            probe: starts a probe of this server; None: the monitor's. Only the first call for an address decides.
        """
        with self._changed:
            server = self._servers.get(address)
            if server is None:
                server = self._servers[address] = WatchedServer(address, self._wake, self._counters, probe or self._probe)
                if len(self._servers) > MAX_SERVERS:
                    self._drop_one()
            self._servers.move_to_end(address)
            return server

    def hung(self, address: str) -> bool:
        """Whether a server is known to be hung."""
        server = self._servers.get(address)
        return server is not None and server.hung

    @property
    def awake(self) -> frozenset[WatchedServer]:
        """Servers whose waits are checked at the moment."""
        return frozenset(self._awake)

    def close(self) -> None:
        """Stop the thread. Waits are no longer checked."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if self._on_close is not None:
            self._on_close()

    def _wake(self, server: WatchedServer) -> None:
        """Begin to check the waits for a server. If no thread can be started, the next wait for any server tries again."""
        # the common case needs no lock, because _pause checks for waits after it removed a server
        if server in self._awake and self._thread is not None:
            return
        with self._changed:
            if self._closed:
                return
            self._awake.add(server)
            if self._thread is None:
                self._thread = start_thread(self._run, "kvstore-liveness")
            if self._thread is None:
                self._counters.add(transport_metrics.PEER_WAITS_UNCHECKED)
                limited.warning("server not checked while a call waits: %s (reason=no more threads)", server.address)
            self._changed.notify()

    def _drop_one(self) -> None:
        for address, server in self._servers.items():
            if server not in self._awake:
                del self._servers[address]
                return

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._awake or self._closed)
                if self._closed:
                    return
                awake = list(self._awake)
            for server in awake:
                now_s = time.monotonic()
                if server.tick(now_s).probe:
                    server.send_probe()
                if server.idle_for_s(now_s) >= IDLE_S:
                    self._pause(server)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, TICK_S)

    def _pause(self, server: WatchedServer) -> None:
        with self._changed:
            self._awake.discard(server)
        server.pause()
        if server.has_waits:  # the wait began before the server was removed from the set
            self._wake(server)


class CircuitBreaker:
    """Counts consecutive failures. Thread-safe.

    Closed: all calls pass. After ``failures`` consecutive failures the breaker opens and refuses calls for ``open_s`` seconds.
    Then one call passes as a trial, and all others are refused for another ``open_s``. If the trial succeeds, the breaker
    closes. If it fails, the breaker opens again.

    Args:
        clock: source of time.
        failures: consecutive failures that open the breaker.
        open_s: seconds between a failure and the next trial.
    """

    def __init__(self, clock: Clock, *, failures: int = 3, open_s: float = 1.0) -> None:
        self._clock = clock
        self._limit = failures
        self._open_s = open_s
        self._lock = threading.Lock()
        self._failures = 0
        self._open_until_s: float | None = None

    def allow(self) -> bool:
        """Return whether a call may be tried now. True from an open breaker means: this call is the trial."""
        with self._lock:
            if self._open_until_s is None:
                return True
            now_s = self._clock.now_s()
            if now_s < self._open_until_s:
                return False
            self._open_until_s = now_s + self._open_s
            return True

    def succeeded(self) -> None:
        """Record a success and close the breaker."""
        with self._lock:
            self._failures = 0
            self._open_until_s = None

    def failed(self) -> bool:
        """Record a failure. Return whether this failure opened the breaker."""
        with self._lock:
            self._failures += 1
            if self._failures < self._limit:
                return False
            opened = self._open_until_s is None
            self._open_until_s = self._clock.now_s() + self._open_s
            return opened
