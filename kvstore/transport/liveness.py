"""Liveness of the servers that callers wait for: a hung server is found within a second, and so is its return.

A stopped process, a hung kernel or a cut cable answers nothing and closes nothing: every call to it lasts until its own
deadline, and so does the next one. How it is found, and what follows:

1. A caller that waits for a server registers the wait, together with a way to cancel it. That costs about a microsecond.
2. A wait that is older than ``grace_s`` makes the server *suspect*: a probe is sent, the cheapest call that the server answers.
3. An answer makes the server *alive* again, however long its real work takes: a slow server is not a hung one. It is probed
   again after ``grace_s``, for as long as somebody waits.
4. A server that answers no probe for ``silence_s`` is *hung*: all waits for it are cancelled, and new ones are refused with
   ``Unavailable`` without waiting. Callers go on without it: another replica, or a miss.
5. While a server is hung, one probe is under way at any time. The first answer makes the server alive.
6. A process that was itself stopped or starved has no right to call others silent: the time by which its own clock ticks came
   late does not count as silence.

``ServerLiveness`` is the state of one server: pure, events in, decisions out. ``LivenessMonitor`` runs it for many servers with
one thread, which sleeps while nobody waits.
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

from kvstore.core.errors import Unavailable
from kvstore.observe.counters import Counters

log = logging.getLogger(__name__)

GRACE_S = 0.2
"""Waits up to this age raise no suspicion."""
SILENCE_S = 0.7
"""A suspect server that answers no probe for this long is hung. With the grace and one tick: below one second in all."""
TICK_S = 0.05
"""How often ages are looked at while somebody waits."""
LATE_S = 0.2
"""A tick that comes later than this says that this process did not run: that time is no silence of the server's."""
PROBE_S = 5.0
"""Bound of one probe. A hung server that is resumed answers the probe that waits in its socket, however old it is."""
IDLE_S = 2.0
"""The monitor's thread sleeps until it is woken after this long without a wait."""
MAX_SERVERS = 1_024
"""Servers with a state; the one used least recently is forgotten beyond it, if nobody waits for it."""


class ServerState(Enum):
    """What is known of a server."""

    ALIVE = auto()
    SUSPECT = auto()
    HUNG = auto()


@dataclass(frozen=True, slots=True)
class Decision:
    """What an event leads to."""

    probe: bool = False
    """Send a probe, and report how it ended."""
    hung: bool = False
    """The server has just become hung: cancel all waits for it."""
    back: bool = False
    """The server has just answered after it was hung."""


NOTHING = Decision()


class ServerLiveness:
    """State of one server. Pure; not thread-safe.

    Args:
        grace_s: see ``GRACE_S``.
        silence_s: see ``SILENCE_S``.
        tick_s: how often ``tick`` is meant to be called while somebody waits.
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
        """Whether ticks change nothing until somebody waits: alive, and no probe under way."""
        return self.state is ServerState.ALIVE and not self._probing

    def tick(self, now_s: float, oldest_wait_s: float | None) -> Decision:
        """Looks at the ages.

        Args:
            now_s: monotonic seconds.
            oldest_wait_s: when the oldest wait for this server began; None: nobody waits.
        """
        late_s = 0.0 if self._ticked_s is None else now_s - self._ticked_s - self._tick_s
        self._ticked_s = now_s
        if late_s > LATE_S:
            self._suspect_since_s += late_s
        if self.state is ServerState.ALIVE:
            if oldest_wait_s is None or now_s - max(oldest_wait_s, self._answered_s) < self._grace_s:
                return NOTHING
            self.state, self._suspect_since_s = ServerState.SUSPECT, now_s
        elif self.state is ServerState.SUSPECT and now_s - self._suspect_since_s >= self._silence_s:
            self.state = ServerState.HUNG
            return Decision(probe=self._begin_probe(), hung=True)
        return Decision(probe=self._begin_probe())

    def rest(self) -> None:
        """Ticks stop for a while: the next one is not late."""
        self._ticked_s = None

    def probe_ended(self, now_s: float, *, answered: bool) -> Decision:
        """A probe ended, with an answer of whatever content or without one."""
        self._probing = False
        if not answered:
            return NOTHING
        back = self.state is ServerState.HUNG
        self.state, self._answered_s = ServerState.ALIVE, now_s
        return Decision(back=back)

    def _begin_probe(self) -> bool:
        begun, self._probing = not self._probing, True
        return begun


Probe = Callable[[str, float, Callable[[bool], None]], None]
"""``probe(server, timeout_s, ended)``: starts a probe and returns; ``ended(answered)`` is called once, from any thread."""


class Wait:
    """One wait for a server, as a context manager: refused if the server is hung, cancelled if it becomes so.

    Raises:
        Unavailable: on entry, if the server is hung; on exit, in place of whatever the cancellation raised.
    """

    __slots__ = ("_cancel", "_server", "began_s", "cut")

    def __init__(self, server: WatchedServer, cancel: Callable[[], object]) -> None:
        self._server = server
        self._cancel = cancel
        self.began_s = 0.0
        self.cut = False
        """Whether it was cancelled because the server is hung."""

    def cancel(self) -> None:
        """Ends it because the server is hung. For ``WatchedServer``."""
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
    """One server that callers wait for. Thread-safe. Made by ``LivenessMonitor.server``."""

    def __init__(self, address: str, wake: Callable[[WatchedServer], None], counters: Counters) -> None:
        self.address = address
        self._wake = wake
        self._counters = counters
        self._lock = threading.Lock()
        self._liveness = ServerLiveness()
        self._waits: dict[int, Wait] = {}  # by identity
        self._hung_since_s = 0.0
        self._quiet_since_s: float | None = None

    @property
    def hung(self) -> bool:
        """Whether it answers nothing at the moment: callers go on without it."""
        return self._liveness.state is ServerState.HUNG

    def waiting(self, cancel: Callable[[], object]) -> Wait:
        """A wait for this server, to be used in a ``with`` statement.

        Args:
            cancel: ends the wait soon, from another thread; must not block, and may be called after the wait has ended.
        """
        return Wait(self, cancel)

    def check(self) -> None:
        """Refuses calls that would wait for nothing.

        Raises:
            Unavailable: the server is hung.
        """
        if self.hung:
            self._counters.add("transport_peer_waits_refused_total")
            raise self.error()

    def error(self) -> Unavailable:
        """Why calls to it are given up."""
        return Unavailable("the server stopped answering; calls to it are given up until it answers again", server=self.address)

    def begin_wait(self, wait: Wait) -> None:
        """Registers a wait; ``end_wait`` must follow.

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
        """The wait is over, one way or the other. Idempotent."""
        with self._lock:
            self._waits.pop(id(wait), None)

    # ---- for the monitor
    def tick(self, now_s: float) -> Decision:
        """Looks at the ages of the waits; cancels them all if the server has just become hung."""
        with self._lock:
            oldest_s = min((wait.began_s for wait in self._waits.values()), default=None)
            decision = self._liveness.tick(now_s, oldest_s)
            waits = list(self._waits.values()) if decision.hung else []
        if decision.hung:
            self._hung_since_s = now_s
            self._counters.add("transport_peer_hung_total")
            self._counters.add("transport_peer_waits_cut_total", len(waits))
            log.warning("server stopped answering: %s (calls given up=%d)", self.address, len(waits))
        for wait in waits:
            try:
                wait.cancel()
            except Exception:
                log.exception("cannot cancel a wait for a hung server: %s", self.address)
        return decision

    def probe_ended(self, now_s: float, *, answered: bool) -> None:
        """A probe ended."""
        with self._lock:
            decision = self._liveness.probe_ended(now_s, answered=answered)
        if decision.back:
            log.warning("server answers again: %s (after=%.1f s)", self.address, now_s - self._hung_since_s)

    def quiet_for_s(self, now_s: float) -> float:
        """For how long nobody has waited for it, and no probe was under way."""
        with self._lock:
            if self._waits or not self._liveness.settled:
                self._quiet_since_s = None
                return 0.0
            if self._quiet_since_s is None:
                self._quiet_since_s = now_s
            return now_s - self._quiet_since_s

    @property
    def waited_for(self) -> bool:
        """Whether somebody waits for it."""
        return bool(self._waits)

    def rest(self) -> None:
        """Ticks stop until somebody waits again."""
        with self._lock:
            self._liveness.rest()


class LivenessMonitor:
    """Runs the liveness of all servers that one client or daemon calls. Thread-safe.

    Args:
        probe: how a server is asked whether it answers at all.
        counters: where hung servers are counted.
        on_close: called when it has ended: lets go of what probes use.
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

    def server(self, address: str) -> WatchedServer:
        """The state of one server; the same object for the same address."""
        with self._changed:
            server = self._servers.get(address)
            if server is None:
                server = self._servers[address] = WatchedServer(address, self._wake, self._counters)
                if len(self._servers) > MAX_SERVERS:
                    self._forget_one()
            self._servers.move_to_end(address)
            return server

    @property
    def awake(self) -> frozenset[WatchedServer]:
        """Servers whose ages are looked at."""
        return frozenset(self._awake)

    def close(self) -> None:
        """Ends the thread. Waits are no longer watched."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if self._on_close is not None:
            self._on_close()

    def _wake(self, server: WatchedServer) -> None:
        """Somebody waits for a server: its ages are looked at from now on."""
        if server in self._awake:  # the common case, without the lock: _let_rest looks again after it has removed one
            return
        with self._changed:
            if self._closed:
                return
            self._awake.add(server)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-liveness", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _forget_one(self) -> None:
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
                    self._send_probe(server)
                if server.quiet_for_s(now_s) >= IDLE_S:
                    self._let_rest(server)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, TICK_S)

    def _let_rest(self, server: WatchedServer) -> None:
        with self._changed:
            self._awake.discard(server)
        server.rest()
        if server.waited_for:  # the wait began before the server was removed, and was left to us
            self._wake(server)

    def _send_probe(self, server: WatchedServer) -> None:
        def ended(answered: bool) -> None:
            server.probe_ended(time.monotonic(), answered=answered)

        try:
            self._probe(server.address, PROBE_S, ended)
        except Exception:
            log.exception("cannot probe a server: %s", server.address)
            ended(False)
