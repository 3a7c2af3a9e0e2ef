"""The traffic class of a process's KV traffic: its DSCP mark and its bandwidth cap.

Each process has one ``KvTraffic`` and gives it to all its data-plane servers and peers. Every socket is marked. The cap concerns
one network, the compute network, on which collectives run. Sockets on other networks (the storage network) are recognised by
their local address and are not capped. Without a cap, wires are not wrapped and cost nothing extra.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Collection
from dataclasses import dataclass

from kvstore.core.errors import Conflict, InvalidArgument
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import transport as transport_metrics
from kvstore.transport.shaping.rate_limit import RateLimitedWire, RateLimiter
from kvstore.transport.shaping.socket_marking import CS1, MAX_DSCP, mark
from kvstore.transport.wire import Wire

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """How the network should treat KV traffic.

    Attributes:
        dscp: DSCP mark of all data-plane sockets, 0 to 63; 0: unmarked.
        cap_bytes_per_s: maximum rate of this process on the compute network, per direction; 0: no cap.

    Raises:
        InvalidArgument: a value is out of bounds.
    """

    dscp: int = CS1
    cap_bytes_per_s: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.dscp <= MAX_DSCP:
            raise InvalidArgument(f"the DSCP mark must be 0 to {MAX_DSCP}", dscp=self.dscp)
        if self.cap_bytes_per_s < 0:
            raise InvalidArgument("the bandwidth cap must be 0 or more bytes per second", cap=self.cap_bytes_per_s)


class KvTraffic:
    """Marks and caps the data-plane sockets of one process. Thread-safe.

    Args:
        settings: the traffic class.
        counters: counts refused marks and waits for the cap.
        uncapped: local addresses on networks without a cap.
    """

    def __init__(self, settings: TrafficClass, counters: Counters, uncapped: Collection[str] = ()) -> None:
        self._settings = settings
        self._counters = counters
        self._uncapped = frozenset(uncapped)
        self._cap = settings.cap_bytes_per_s
        rate = float(self._cap) or None
        self._sends, self._receives = RateLimiter(rate, counters), RateLimiter(rate, counters)
        self._has_limit = rate is not None
        self._lock = threading.Lock()

    def mark(self, sock: socket.socket) -> None:
        """Mark a socket. If the kernel refuses, count that and leave the socket unmarked."""
        if not mark(sock, self._settings.dscp):
            self._counters.add(transport_metrics.UNMARKED_SOCKETS)
            log.debug("data connection not marked: the kernel refused the DSCP value")

    def limited(self, wire: Wire, sock: socket.socket) -> Wire:
        """Return the wire to use for a connected socket: capped if the socket uses the capped network, else ``wire`` itself."""
        if not self._has_limit or sock.getsockname()[0] in self._uncapped:
            return wire
        return RateLimitedWire(wire, self._sends, self._receives)

    @property
    def rates(self) -> tuple[float | None, float | None]:
        """Bytes per second that may be sent and received now; None: no limit."""
        return self._sends.rate, self._receives.rate

    @property
    def cap_bytes_per_s(self) -> int | None:
        """The cap in force; 0: none. None: this process was started without a cap, so none can be set."""
        return self._cap if self._has_limit else None

    def change_cap(self, bytes_per_s: int, expected: int | None = None) -> int:
        """Set another cap, also for connections that are already open; 0 removes it.

        Args:
            bytes_per_s: the new cap.
            expected: change the cap only if this one is in force; None: change any.

        Returns:
            The cap before.

        Raises:
            InvalidArgument: the cap is below 0.
            Conflict: another cap than expected is in force, or the process was started without a cap.
        """
        if bytes_per_s < 0:
            raise InvalidArgument("the bandwidth cap must be 0 or more bytes per second", cap=bytes_per_s)
        if not self._has_limit:
            raise Conflict(
                "this process was started without a cap, so its open connections cannot be capped: set node.compute_cap"
            )
        with self._lock:
            before = self._cap
            if expected is not None and expected != before:
                raise Conflict("another cap is in force", cap=before, expected=expected)
            self._cap = bytes_per_s
            self._sends.rate = self._receives.rate = float(bytes_per_s) or None
        return before
