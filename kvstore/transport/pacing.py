"""A cap on bytes a second that all connections of a process share, and the wire that keeps it.

Senders and receivers both hold back: a sender before it gives bytes to the kernel, a receiver before it takes them, which fills
its receive buffer, so that TCP tells the other side to wait. Only a receiver can bound what several senders bring it together.

Bytes are taken in pieces of about a millisecond of the rate, each booked on one time line for all connections, first come, first
served: connections with work to do take turns, and whoever must wait sleeps exactly once, until its piece is due. What a late
wake-up loses is made up for, since the time line does not move with it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence

from kvstore.core.errors import DeadlineExceeded
from kvstore.observe.counters import Counters
from kvstore.transport.wire import IOV_MAX, Piece, Wire

PIECE_S = 0.001
MIN_PIECE_BYTES = 16 << 10
MAX_PIECE_BYTES = 1 << 20
SMALL_BYTES = 4 << 10
"""Requests and headers are booked, but do not wait: a read that stands behind a load must at least be asked for."""
BURST_S = 0.002
"""How far a piece may catch up with an idle time line: covers late wake-ups, and is all that may go out at once after a pause."""


class TimeLine:
    """Books bytes on a time line that runs at a rate. Pure; not thread-safe.

    Args:
        rate: bytes a second; None: no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._free_s = float("-inf")

    def book(self, size: int, now_s: float) -> float:
        """The moment from which ``size`` bytes may move; the past means at once."""
        if self.rate is None:
            return now_s
        start_s = max(self._free_s, now_s - BURST_S)
        self._free_s = start_s + size / self.rate
        return start_s

    @property
    def free_s(self) -> float:
        """When the next piece could move."""
        return self._free_s


class Pacer:
    """One direction of one network, for all connections of a process. Thread-safe.

    Args:
        rate: bytes a second; None: no limit.
        counters: where waits are counted.
    """

    def __init__(self, rate: float | None, counters: Counters) -> None:
        self._lock = threading.Lock()
        self._line = TimeLine(rate)
        self._counters = counters
        self._moved = 0

    @property
    def moved_bytes(self) -> int:
        """Booked so far."""
        return self._moved

    @property
    def rate(self) -> float | None:
        """Bytes a second; None: no limit."""
        return self._line.rate

    @rate.setter
    def rate(self, rate: float | None) -> None:
        with self._lock:
            self._line.rate = rate

    @property
    def piece_bytes(self) -> int:
        """The most to take at once."""
        rate = self._line.rate
        return sys.maxsize if rate is None else min(max(int(rate * PIECE_S), MIN_PIECE_BYTES), MAX_PIECE_BYTES)

    def take(self, size: int, deadline_s: float) -> None:
        """Waits until ``size`` bytes may move.

        Raises:
            DeadlineExceeded: that is after the deadline; nothing is booked.
        """
        with self._lock:
            now_s = time.monotonic()
            waits = size >= SMALL_BYTES
            if waits and self._line.rate is not None and self._line.free_s > deadline_s:
                raise DeadlineExceeded("the cap on KV bandwidth leaves no room before the deadline", bytes=size)
            wait_s = self._line.book(size, now_s) - now_s
            self._moved += size
        if waits and wait_s > 0:
            self._counters.add("transport_cap_wait_us_total", int(wait_s * 1e6))
            time.sleep(wait_s)


class PacedWire(Wire):
    """A wire whose bytes are booked before they move. Wires without a cap are not wrapped, and pay nothing.

    Args:
        wire: the connection; owned from now on.
        sends: for what it sends.
        receives: for what it receives.
    """

    def __init__(self, wire: Wire, sends: Pacer, receives: Pacer) -> None:
        self._wire = wire
        self._sends = sends
        self._receives = receives

    @property
    def stall_s(self) -> float | None:
        """As ``Wire``; waits for the cap are no stalls."""
        return self._wire.stall_s

    @stall_s.setter
    def stall_s(self, stall_s: float | None) -> None:
        self._wire.stall_s = stall_s

    def send(self, pieces: Sequence[Piece], deadline_s: float) -> None:
        for part in _parts(pieces, self._sends):
            self._sends.take(sum(map(len, part)), deadline_s)
            self._wire.send(part, deadline_s)

    def receive_into(self, pieces: Sequence[memoryview], deadline_s: float) -> None:
        for part in _parts(pieces, self._receives):
            self._receives.take(sum(map(len, part)), deadline_s)
            self._wire.receive_into(part, deadline_s)

    def idle_and_open(self) -> bool:
        return self._wire.idle_and_open()

    def shut(self) -> None:
        self._wire.shut()

    def close(self) -> None:
        self._wire.close()


def _parts(pieces: Sequence[Piece], pacer: Pacer) -> Iterator[list[memoryview]]:
    """The same memory, cut so that each part is a piece of the pacer's as it is when the part is due; short tails stay whole."""
    part: list[memoryview] = []
    room = pacer.piece_bytes
    for piece in pieces:
        view = memoryview(piece)
        while len(view) > room + SMALL_BYTES:
            yield [*part, view[:room]]
            view, part, room = view[room:], [], pacer.piece_bytes
        part.append(view)
        room -= len(view)
        if room <= 0 or len(part) == IOV_MAX:
            yield part
            part, room = [], pacer.piece_bytes
    if part:
        yield part
