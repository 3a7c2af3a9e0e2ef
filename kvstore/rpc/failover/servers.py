"""The metadata servers of one channel: which of them is in use, probes of those that are away, DNS.

Runs ``ServerSelection`` for the calls of a channel. Calls do not wait here: probes are made and names are resolved in threads
of their own. Only a call before the first resolution of a name waits for it, up to its own deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import grpc

from kvstore.core.errors import Unavailable
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import common as common_metrics
from kvstore.process.tls import TlsConfig
from kvstore.rpc.failover.addresses import MetadataAddresses
from kvstore.rpc.failover.resolver import Resolver, resolve, system_resolver
from kvstore.rpc.failover.selection import CallPlacement, Condition, Failure, Reason, ServerChange, ServerSelection
from kvstore.rpc.health_probe import SHARED_STATE, HealthProbe
from kvstore.transport.liveness import LivenessMonitor, WatchedServer

log = logging.getLogger(__name__)
limited = LimitedLog(log)

PROBE_TIMEOUT_S: Final = 2.0
RESOLVE_S: Final = 30.0
"""Names are resolved again after this time."""
RESOLVE_AGAIN_S: Final = 1.0
"""After a failed call, names are resolved again, at most once per this time."""
STATE_TIMEOUT_S: Final = 0.5
"""Time to answer whether the servers share their state. Only the first call of a channel waits for it."""
STATE_AGAIN_S: Final = 2.0
"""Pause before the question is repeated if it was not answered."""
_CHANGED: Final = "metadata server changed: %s -> %s (reason=%s, calls=%s)"
_FAILOVER: Final = frozenset(Reason) - {Reason.SHARED, Reason.PLANS}
_LOST: Final = frozenset({Reason.REFUSED, Reason.UNAVAILABLE, Reason.TIMEOUT, Reason.HUNG, Reason.STALLED})

Open = Callable[[str, TlsConfig | None], grpc.Channel]
"""Opens a channel to one address."""


@dataclass(frozen=True, slots=True)
class MetadataServerState:
    """One metadata server, as a caller sees it.

    Attributes:
        address: its address.
        condition: its condition.
        used: whether calls go to it.
    """

    address: str
    condition: Condition
    used: bool


class Route(NamedTuple):
    """The server of the next call.

    Attributes:
        address: address of the server.
        spare: whether another server could repeat the call.
    """

    address: str
    spare: bool


class MetadataServers:
    """Chooses the metadata server of each call. Thread-safe.

    Args:
        addresses: the setting.
        caller: name of this caller; see ``ServerSelection``.
        tls: as for the channels. The certificate of a server found by DNS must have the name, not the IP address.
        open_channel: opens a channel for probes.
        counters: counters of the process.
        resolver: resolves names.
    """

    def __init__(
        self,
        addresses: MetadataAddresses,
        caller: str,
        tls: TlsConfig | None,
        open_channel: Open,
        counters: Counters,
        resolver: Resolver = system_resolver,
    ) -> None:
        self.setting = addresses
        self.counters = counters
        self.on_change: Callable[[], None] = lambda: None
        """Called after a change of the server in use, from any thread."""
        self._tls = tls
        self._tls_names: dict[str, str] = {}
        self._open_channel = open_channel
        self._resolver = resolver
        self._lock = threading.Lock()
        self._closed = False
        self._selection = ServerSelection(
            [entry for entry in addresses.entries if entry not in addresses.names],
            caller,
        )
        self._routes: dict[CallPlacement, Route] = {}
        self._used: set[CallPlacement] = set()
        self._told: set[CallPlacement] = set()
        self._limited = LimitedLog(log)
        self._changed = threading.Condition()
        self.timed_out: set[str] = set()
        """Servers whose last call timed out; the next answer must be recorded by ``answered``."""
        self._probe = HealthProbe(lambda address: open_channel(address, self.tls_of(address)))
        self._timers: dict[str, threading.Timer] = {}
        self._untimed: dict[str, Callable[[], None]] = {}
        """Functions whose timers could not start a thread. The first call at ``_untimed_due_s`` or later runs them."""
        self._untimed_due_s = float("inf")
        self._probing: set[str] = set()
        self._monitor = LivenessMonitor(self._probe, counters)
        self._resolved: dict[str, list[str]] = {}
        self._resolving = False
        self._resolved_s = float("-inf")
        self._resolve_due_s = float("-inf") if addresses.names else float("inf")
        self._state_told = threading.Event()
        self._complete = threading.Event()
        if not addresses.names:
            self._complete.set()

    # ---- calls ----
    def is_ready(self, placement: CallPlacement) -> bool:
        """Whether the servers are known, and whether they share their state, if that matters: else call ``wait_ready``."""
        return self._complete.is_set() and (placement is CallPlacement.SPREAD or self._state_told.is_set())

    def wait_ready(self, placement: CallPlacement, timeout_s: float | None) -> None:
        """Wait for the first resolution of the names, and a moment for the first answer about shared state."""
        self._resolve_if_due()
        self._complete.wait(RESOLVE_S if timeout_s is None else timeout_s)
        if placement is not CallPlacement.SPREAD and self.pick(placement) is not None:
            self._state_told.wait(STATE_TIMEOUT_S if timeout_s is None else min(timeout_s, STATE_TIMEOUT_S))
            self._state_told.set()  # only the first call waits

    def pick(self, placement: CallPlacement) -> Route | None:
        """Return the server for the next call; None: no server answers."""
        route = self._routes.get(placement)
        now_s = time.monotonic()
        if route is not None and now_s < self._resolve_due_s and now_s < self._untimed_due_s:
            return route
        self._resolve_if_due()
        self._call_untimed_if_due()
        with self._lock:
            self._used.add(placement)
            changes = self._choose()
            route = self._routes.get(placement)
        self._tell(changes)
        return route

    def wait_usable(self, placement: CallPlacement, timeout_s: float | None) -> Route | None:
        """As ``pick``, but wait until a server answers. None: none did in time."""
        with self._changed:
            self._changed.wait_for(lambda: self.pick(placement) is not None, timeout_s)
        return self.pick(placement)

    @property
    def addresses(self) -> tuple[str, ...]:
        """All known servers."""
        return self._selection.addresses

    def others(self, placement: CallPlacement, tried: Collection[str]) -> tuple[str, ...]:
        """Return the servers on which a failed call may be repeated, best first."""
        with self._lock:
            return self._selection.others(placement, tried)

    def watched(self, address: str) -> WatchedServer:
        """Return the liveness of a server, at which calls register their waits."""
        return self._monitor.server(address)

    def tls_of(self, address: str) -> TlsConfig | None:
        """Return the TLS files for a server."""
        name = self._tls_names.get(address)
        if self._tls is None or name is None or self._tls.server_name is not None:
            return self._tls
        return replace(self._tls, server_name=name)

    def failed(self, address: str, failure: Failure) -> None:
        """Record a failed call."""
        with self._lock:
            if failure is Failure.TIMEOUT:
                self.timed_out.add(address)
            opened = self._selection.failed(address, failure) and not self._closed
            changes = self._choose() if opened else []
            probed = [address] if self._routes else self._selection.addresses  # the last usable server was lost: try all at once
            if self.setting.names:
                self._resolve_due_s = min(self._resolve_due_s, self._resolved_s + RESOLVE_AGAIN_S)
        if opened:
            self.counters.add(common_metrics.FAILOVER_SERVERS_LOST)
            self._tell(changes)
            for each in probed:
                self._send_probe(each)

    def answered(self, address: str) -> None:
        """Record that a server answered a call after calls that timed out."""
        with self._lock:
            self.timed_out.discard(address)
            self._selection.answered(address)

    def planned(self, address: str, planner: str) -> None:
        """Record an answer about plans; see ``ServerSelection.planned``."""
        with self._lock:
            changes = self._choose() if self._selection.planned(address, planner) else []
        if changes:
            self._tell(changes)

    def no_server(self) -> Unavailable:
        """Return the error of a call while no server answers."""
        self.counters.add(common_metrics.FAILOVER_CALLS_REFUSED)
        if not self._selection.addresses:
            return Unavailable(f"no metadata server is known: the host name of {self.setting} is not known")
        return Unavailable(f"no metadata server answers: {', '.join(self._selection.addresses)}")

    # ---- display ----
    def states(self) -> list[MetadataServerState]:
        """Return all known servers with their state, by address."""
        with self._lock:
            used = {self._selection.current(placement) for placement in self._used}
            return [
                MetadataServerState(address, self._selection.condition(address), address in used)
                for address in sorted(self._selection.addresses)
            ]

    @property
    def probes_waiting(self) -> int:
        """Number of servers that will be probed after a pause."""
        with self._lock:
            return len((self._timers.keys() | self._untimed.keys()) & set(self._selection.addresses))

    def check_idle(self, timeout_s: float) -> None:
        """Probe the servers that no call goes to, so that ``states`` shows those that are away. Blocks up to ``timeout_s``."""
        idle = [state.address for state in self.states() if not state.used and state.condition is Condition.USABLE]
        waits = []
        for address in idle:
            ended = threading.Event()
            answers: list[bool] = []

            def record(answered: bool, ended: threading.Event = ended, answers: list[bool] = answers) -> None:
                answers.append(answered)
                ended.set()

            self._probe(address, timeout_s, record)
            waits.append((address, ended, answers))
        until_s = time.monotonic() + timeout_s
        for address, ended, answers in waits:
            ended.wait(max(0.0, until_s - time.monotonic()))
            if not any(answers):
                self.failed(address, Failure.REFUSED)

    def close(self) -> None:
        """Stop all probes."""
        with self._lock:
            self._closed = True
            timers = list(self._timers.values())
            self._timers.clear()
            self._untimed.clear()
        for timer in timers:
            timer.cancel()
        self._monitor.close()
        self._probe.close()

    # ---- changes ----
    def _choose(self) -> list[tuple[CallPlacement, ServerChange]]:
        """Choose the servers of all placements in use, under the lock. Returns the changes, for ``_tell``."""
        changes = []
        now_s = time.monotonic()
        self._routes = {}
        for placement in self._used:
            address, change = self._selection.choose(placement, now_s)
            if address is not None:
                self._routes[placement] = Route(address, bool(self._selection.others(placement, (address,))))
            if change is not None:
                changes.append((placement, change))
        return changes

    def _tell(self, changes: list[tuple[CallPlacement, ServerChange]]) -> None:
        """Count and log changes, and inform the channel. Not under the lock."""
        told = False
        for placement, change in changes:
            if placement is not CallPlacement.SPREAD and change.after is not None and change.reason in _FAILOVER:
                self._ask_state(change.after)
            if change.before is None and change.reason is Reason.ANSWERS and placement not in self._told:
                self._told.add(placement)
                continue
            told = True
            if change.reason in _FAILOVER:
                self.counters.add(common_metrics.FAILOVER_CHANGES)
            values = (change.before or "none", change.after or "none", change.reason, placement)
            if change.reason in _LOST:  # each call, while all servers refuse calls and answer probes
                self._limited.warning(_CHANGED, *values, cause=f"{placement} {change.reason}")
            else:
                log.info(_CHANGED, *values)
        if told:
            self.on_change()
        with self._changed:
            self._changed.notify_all()

    # ---- probes ----
    def _send_probe(self, address: str) -> None:
        with self._lock:
            if (timer := self._timers.pop(address, None)) is not None:
                timer.cancel()
            self._untimed.pop(address, None)
            if self._closed or address in self._probing:
                return
            self._probing.add(address)
        self._probe(address, PROBE_TIMEOUT_S, partial(self._probe_ended, address))

    def _probe_ended(self, address: str, answered: bool) -> None:
        with self._lock:
            self._probing.discard(address)
            if self._closed:
                return
            pause_s = self._selection.probe_ended(address, answered=answered, now_s=time.monotonic())
            changes = self._choose()
            if pause_s is not None:
                self._start_timer(address, pause_s, self._send_probe, address)
        self._tell(changes)

    def _start_timer(self, key: str, pause_s: float, function: Callable[[str], None], address: str) -> None:
        """Call a function later, unless this is closed before. Call it under the lock."""
        timer = threading.Timer(pause_s, function, (address,))
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError as error:  # no more threads
            limited.warning("no timer for metadata server: %s, left to the next call (reason=%s)", address, error)
            self._untimed[key] = partial(function, address)
            self._untimed_due_s = min(self._untimed_due_s, time.monotonic() + pause_s)
        else:
            self._timers[key] = timer

    def _call_untimed_if_due(self) -> None:
        with self._lock:
            if time.monotonic() < self._untimed_due_s:
                return
            due, self._untimed, self._untimed_due_s = [*self._untimed.values()], {}, float("inf")
        for function in due:
            function()

    # ---- shared state ----
    def _ask_state(self, address: str) -> None:
        """Ask the server in use whether the servers share their state."""
        self._probe.ask(address, SHARED_STATE, STATE_TIMEOUT_S, partial(self._state_answered, address))

    def _state_answered(self, address: str, shares: bool | None) -> None:
        with self._lock:
            if self._closed:
                return
            if shares is None:
                changes = []
                in_use = {self._selection.current(one) for one in (CallPlacement.SHARED, CallPlacement.PLANNER)}
                if address in in_use and SHARED_STATE not in self._timers:
                    self._start_timer(SHARED_STATE, STATE_AGAIN_S, self._ask_state_again, address)
            else:
                self._selection.share_state(shares)
                changes = self._choose()
        self._state_told.set()
        self._tell(changes)

    def _ask_state_again(self, address: str) -> None:
        with self._lock:
            self._timers.pop(SHARED_STATE, None)
        self._ask_state(address)

    # ---- names ----
    def _resolve_if_due(self) -> None:
        with self._lock:
            if self._closed or self._resolving or time.monotonic() < self._resolve_due_s:
                return
            try:
                threading.Thread(target=self._resolve, name="kvstore-resolve", daemon=True).start()
            except RuntimeError as error:  # no more threads: the next call tries again
                limited.warning("host names of metadata servers not resolved (reason=%s)", error)
                return
            self._resolving = True
            self._resolve_due_s = float("inf")

    def _resolve(self) -> None:
        for name in self.setting.entries:
            if name not in self.setting.names:
                continue
            try:
                found = resolve(name, self._resolver)
            except Exception as error:  # noqa: BLE001  # the caller's call must not fail
                limited.warning("host name of metadata servers not resolved: %s (reason=%s)", name, error)
                continue
            if found:
                self._resolved[name] = found
        with self._lock:
            self._resolving = False
            self._resolved_s = time.monotonic()
            known = all(name in self._resolved for name in self.setting.names)
            self._resolve_due_s = self._resolved_s + (RESOLVE_S if known else RESOLVE_AGAIN_S)
            addresses = dict.fromkeys(
                address
                for entry in self.setting.entries
                for address in self._resolved.get(entry, [entry])
                if address not in self.setting.names
            )
            self._tls_names = {address: name.rpartition(":")[0] for name, found in self._resolved.items() for address in found}
            if set(addresses) != set(self._selection.addresses):
                self._selection.replace(list(addresses))
            changes = self._choose()
        self._tell(changes)
        self._complete.set()
