"""The traffic class of a process's KV traffic: its mark, its cap, and its yielding to others on the same link.

One object a process, given to all its data-plane servers and peers. Every socket is marked. A cap and yielding concern one
network, the compute network, where collectives run; sockets on others (the storage network) are named by their local address and
are not held back. Without cap and yielding, wires are left as they are.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

from kvstore.core.errors import Conflict, InvalidArgument, KVStoreError, Unsupported
from kvstore.observe.counters import Counters
from kvstore.transport.link_counters import LinkCounters, LinkTotals, speed_of
from kvstore.transport.marking import CS1, MAX_DSCP, UNMARKED, mark
from kvstore.transport.pacing import PacedWire, Pacer
from kvstore.transport.wire import Wire
from kvstore.transport.yielding import KvShare, LinkSample, YieldRule

log = logging.getLogger(__name__)

TICK_S = 0.025
LOOK_SHARE = 0.02
"""The most of a core that looking takes: with hundreds of connections on the host, ticks grow longer."""
_LOG_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """How KV traffic behaves towards everything else.

    Attributes:
        dscp: mark of all data-plane sockets, 0 to 63; 0: unmarked.
        cap_bytes_per_s: the most that this process moves over the compute network, each direction; 0: no cap.
        yields: make way for foreign traffic on the compute link; needs a mark, by which the host's KV traffic is known.
        link_bytes_per_s: rate of the compute link, for yielding; 0: as the NIC's driver says.

    Raises:
        InvalidArgument: out of bounds.
    """

    dscp: int = CS1
    cap_bytes_per_s: int = 0
    yields: bool = False
    link_bytes_per_s: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.dscp <= MAX_DSCP:
            raise InvalidArgument(f"a DSCP mark is 0 to {MAX_DSCP}", dscp=self.dscp)
        if self.cap_bytes_per_s < 0 or self.link_bytes_per_s < 0:
            raise InvalidArgument("rates are 0 or more", cap=self.cap_bytes_per_s, link=self.link_bytes_per_s)
        if self.yields and self.dscp == UNMARKED:
            raise InvalidArgument("yielding tells KV traffic from foreign by its mark: give it a DSCP above 0")


class KvTraffic:
    """What a process's data-plane sockets are passed through. Thread-safe.

    Args:
        settings: the class.
        counters: where refusals and waits are counted.
        uncapped: local addresses that lie on other networks.
    """

    def __init__(self, settings: TrafficClass, counters: Counters, uncapped: Collection[str] = ()) -> None:
        self._settings = settings
        self._counters = counters
        self._uncapped = frozenset(uncapped)
        self._cap = settings.cap_bytes_per_s
        cap = float(self._cap) or None
        self._sends, self._receives = Pacer(cap, counters), Pacer(cap, counters)
        self._paces = cap is not None or settings.yields
        self._lock = threading.Lock()
        self._watch: _LinkWatch | None = None
        self._watching = False
        self._closed = False

    def mark(self, sock: socket.socket) -> None:
        """Marks a socket; where the kernel refuses, that is counted, and its traffic is like any other."""
        if not mark(sock, self._settings.dscp):
            self._counters.add("transport_unmarked_sockets_total")
            log.debug("the kernel refused to mark a data connection")

    def paced(self, wire: Wire, sock: socket.socket) -> Wire:
        """The wire to use for a connected socket: held back where it lies on the capped network."""
        if not self._paces:
            return wire
        local: str = sock.getsockname()[0]
        if local in self._uncapped:
            return wire
        if self._settings.yields:
            self._begin_watch(local)
        return PacedWire(wire, self._sends, self._receives)

    @property
    def rates(self) -> tuple[float | None, float | None]:
        """Bytes a second that may be sent and received now; None: no limit."""
        return self._sends.rate, self._receives.rate

    @property
    def cap_bytes_per_s(self) -> int | None:
        """The cap in force; 0: none; None: none, and none can be set, as connections are not held back at all."""
        return self._cap if self._paces else None

    def change_cap(self, bytes_per_s: int, expected: int | None = None) -> int:
        """Sets another cap, for connections that are there too; 0: none. Returns the one before.

        Raises:
            InvalidArgument: below 0.
            Conflict: another one than expected is in force, or connections are not held back at all.
        """
        if bytes_per_s < 0:
            raise InvalidArgument("rates are 0 or more", cap=bytes_per_s)
        if not self._paces:
            raise Conflict("this process was started without a cap, so its connections cannot be held back: set node.compute_cap")
        with self._lock:
            before = self._cap
            if expected is not None and expected != before:
                raise Conflict("another cap is in force", cap=before, expected=expected)
            self._cap = bytes_per_s
            limit = float(bytes_per_s) or None
            if self._watch is not None:
                self._watch.cap = limit
            else:
                self._sends.rate = self._receives.rate = limit
        return before

    def close(self) -> None:
        """Ends the watch. Idempotent."""
        with self._lock:
            self._closed = True
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()

    def _begin_watch(self, address: str) -> None:
        """On the link of the first connection; where it cannot be watched, KV does not yield, and that is said once."""
        with self._lock:
            if self._watching or self._closed:
                return
            self._watching = True
            try:
                self._watch = _LinkWatch(address, self._settings, self._sends, self._receives, self._counters)
                self._watch.cap = float(self._cap) or None
            except KVStoreError as error:
                self._counters.add("transport_yield_unsupported_total")
                log.warning("KV traffic does not yield to other traffic on the link of %s: %s", address, error)


class _LinkWatch:
    """Looks at a link from time to time, and sets the rates of both directions."""

    def __init__(self, address: str, settings: TrafficClass, sends: Pacer, receives: Pacer, counters: Counters) -> None:
        self._link = LinkCounters(address, settings.dscp)
        rate = settings.link_bytes_per_s or speed_of(self._link.interface)
        if not rate:
            self._link.close()
            raise Unsupported("the rate of the link is not known: configure it", interface=self._link.interface)
        rule = YieldRule(rate)
        self.cap = float(settings.cap_bytes_per_s) or None
        """The most, whatever the link has room for; None: no cap."""
        self._sends, self._receives = sends, receives
        self._sent, self._received = KvShare(rule), KvShare(rule)
        self._counters = counters
        self._quiet_until_s = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-yield", daemon=True)
        self._thread.start()
        log.info("KV traffic yields to other traffic on %s, a link of %.0f MB/s", self._link.interface, rate / 1e6)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        with contextlib.closing(self._link):
            pause_s = TICK_S
            while not self._stopping.wait(pause_s):
                try:
                    cpu_s = time.thread_time()
                    nic, kv = self._link.read()
                    pause_s = max(TICK_S, (time.thread_time() - cpu_s) / LOOK_SHARE)
                except OSError as error:  # an interface that is replaced; the rates stay as they were
                    self._counters.add("transport_link_reads_failed_total")
                    if time.monotonic() >= self._quiet_until_s:
                        self._quiet_until_s = time.monotonic() + _LOG_INTERVAL_S
                        log.warning("the counters of a link cannot be read: %s", error)
                    continue
                self._apply(time.monotonic(), nic, kv)

    def _apply(self, now_s: float, nic: LinkTotals, kv: LinkTotals) -> None:
        sends = LinkSample(now_s, nic.sent, kv.sent, self._sends.moved_bytes)
        receives = LinkSample(now_s, nic.received, kv.received, self._receives.moved_bytes)
        cap = self.cap or float("inf")
        self._sends.rate = min(cap, self._sent.observe(sends))
        self._receives.rate = min(cap, self._received.observe(receives))
        if self._sent.foreign or self._received.foreign:
            self._counters.add("transport_yield_ticks_total")
