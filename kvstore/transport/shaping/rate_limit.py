"""A bandwidth cap that all connections of a process share, and the wire that keeps it.

Both directions are limited. A sender waits before it hands bytes to the kernel. A receiver waits before it takes bytes, which
fills its receive buffer, so that TCP slows the sender down. Only a receiver can limit what several senders send to it together.

Bytes move in pieces of about a millisecond of the rate. Each piece is booked on one schedule for all connections, first come,
first served, so that busy connections take turns. A thread that must wait sleeps once, until its piece is due. A late wake-up
costs no bandwidth, because the schedule does not shift with it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence

from kvstore.core.errors import DeadlineExceeded
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import transport as transport_metrics
from kvstore.transport.wire import IOV_MAX, Piece, Wire

PIECE_S = 0.001
MIN_PIECE_BYTES = 16 << 10
MAX_PIECE_BYTES = 1 << 20
SMALL_BYTES = 4 << 10
"""Messages below this size are booked but do not wait, so that the request for a read does not wait for the bytes of a load."""
BURST_S = 0.002
"""Seconds of rate that an idle schedule saves up. Covers late wake-ups, and bounds the burst after a pause."""


class RateSchedule:
    """Assigns a start time to each piece of bytes, so that the total keeps to a rate. Pure; not thread-safe.

    Args:
        rate: bytes per second; None: no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._free_s = float("-inf")

    def book(self, size: int, now_s: float) -> float:
        """Book ``size`` bytes; return the time from which they may move. A time in the past means: at once."""
        if self.rate is None:
            return now_s
        start_s = max(self._free_s, now_s - BURST_S)
        self._free_s = start_s + size / self.rate
        return start_s

    @property
    def free_s(self) -> float:
        """When the next piece could move."""
        return self._free_s


class RateLimiter:
    """Limits one direction of one network, for all connections of a process. Thread-safe.

    Args:
        rate: bytes per second; None: no limit.
        counters: counts the time that callers waited.
    """

    def __init__(self, rate: float | None, counters: Counters) -> None:
        self._lock = threading.Lock()
        self._schedule = RateSchedule(rate)
        self._counters = counters

    @property
    def rate(self) -> float | None:
        """Bytes per second; None: no limit."""
        return self._schedule.rate

    @rate.setter
    def rate(self, rate: float | None) -> None:
        with self._lock:
            self._schedule.rate = rate

    @property
    def piece_bytes(self) -> int:
        """Maximum bytes to book at once."""
        rate = self._schedule.rate
        return sys.maxsize if rate is None else min(max(int(rate * PIECE_S), MIN_PIECE_BYTES), MAX_PIECE_BYTES)

    def acquire(self, size: int, deadline_s: float) -> None:
        """Wait until ``size`` bytes may move.

        Raises:
            DeadlineExceeded: they may move only after the deadline; nothing is booked.
        """
        with self._lock:
            now_s = time.monotonic()
            waits = size >= SMALL_BYTES
            if waits and self._schedule.rate is not None and self._schedule.free_s > deadline_s:
                raise DeadlineExceeded("the bandwidth cap leaves no time before the deadline", bytes=size)
            wait_s = self._schedule.book(size, now_s) - now_s
        if waits and wait_s > 0:
            self._counters.add(transport_metrics.CAP_WAIT_SECONDS, int(wait_s * 1e6))
            time.sleep(wait_s)


class RateLimitedWire(Wire):
    """A wire whose bytes wait for the cap. Wires without a cap are not wrapped and cost nothing extra.

    Args:
        wire: the connection; owned from now on.
        sends: limits what the wire sends.
        receives: limits what the wire receives.
    """

    def __init__(self, wire: Wire, sends: RateLimiter, receives: RateLimiter) -> None:
        self._wire = wire
        self._sends = sends
        self._receives = receives

    @property
    def stall_s(self) -> float | None:
        """As ``Wire``. Waits for the cap do not count as stalls."""
        return self._wire.stall_s

    @stall_s.setter
    def stall_s(self, stall_s: float | None) -> None:
        self._wire.stall_s = stall_s

    def send(self, pieces: Sequence[Piece], deadline_s: float) -> None:
        for part in _split(pieces, self._sends):
            self._sends.acquire(sum(map(len, part)), deadline_s)
            self._wire.send(part, deadline_s)

    def receive_into(self, pieces: Sequence[memoryview], deadline_s: float) -> None:
        for part in _split(pieces, self._receives):
            self._receives.acquire(sum(map(len, part)), deadline_s)
            self._wire.receive_into(part, deadline_s)

    def idle_and_open(self) -> bool:
        return self._wire.idle_and_open()

    def shut(self) -> None:
        self._wire.shut()

    def close(self) -> None:
        self._wire.close()


def _split(pieces: Sequence[Piece], limiter: RateLimiter) -> Iterator[list[memoryview]]:
    """Yield the same memory in parts of the limiter's piece size. A short rest stays with the part before it."""
    part: list[memoryview] = []
    space = limiter.piece_bytes
    for piece in pieces:
        view = memoryview(piece)
        while len(view) > space + SMALL_BYTES:
            yield [*part, view[:space]]
            view, part, space = view[space:], [], limiter.piece_bytes
        part.append(view)
        space -= len(view)
        if space <= 0 or len(part) == IOV_MAX:
            yield part
            part, space = [], limiter.piece_bytes
    if part:
        yield part
