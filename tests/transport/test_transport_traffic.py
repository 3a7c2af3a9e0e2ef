"""The traffic class: DSCP marks on real sockets, the bandwidth cap, and the interface of an address."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.buffers import DenseBlocks
from kvstore.core.errors import Conflict, DeadlineExceeded, InvalidArgument, Unsupported
from kvstore.core.types import BlockKey, BlockShape, NamespaceId, Outcome
from kvstore.observe.counters import Counters
from kvstore.testing.memory_provider import MemoryProvider, block_key
from kvstore.transport.addresses import interface_of
from kvstore.transport.contract import ReadRequest
from kvstore.transport.shaping.rate_limit import (
    BURST_S,
    MAX_PIECE_BYTES,
    MIN_PIECE_BYTES,
    PIECE_S,
    SMALL_BYTES,
    RateLimitedWire,
    RateLimiter,
    RateSchedule,
)
from kvstore.transport.shaping.socket_marking import CS1, mark
from kvstore.transport.shaping.traffic import KvTraffic, TrafficClass
from kvstore.transport.tcp.peer import TcpPeer
from kvstore.transport.tcp.server import TcpServer
from kvstore.transport.wire import PlainWire, Wire

SHAPE = BlockShape(4, 64 << 10)
NAMESPACE = NamespaceId(b"traffic-class-ns")


# ---------------------------------------------------------------- marks
def tos_of(sock: socket.socket) -> tuple[int, int]:
    if sock.family == socket.AF_INET6:
        tos = sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
    else:
        tos = sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)
    return tos & 0xFC, sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_mark_sets_dscp_and_priority(family: socket.AddressFamily) -> None:
    with socket.socket(family) as sock:
        before = tos_of(sock)
        assert mark(sock, 0)
        assert tos_of(sock) == before
        assert mark(sock, CS1)
        assert tos_of(sock) == (0x20, 2)
        assert mark(sock, 63)
        assert tos_of(sock) == (0xFC, 2)


def test_mark_refused_is_counted() -> None:
    counters = Counters()
    sock = socket.socket()
    sock.close()
    KvTraffic(TrafficClass(CS1), counters).mark(sock)
    assert counters.get("transport_unmarked_sockets_total") == 1


@pytest.mark.parametrize(
    "wrong",
    [{"dscp": 64}, {"dscp": -1}, {"cap_bytes_per_s": -1}],
)
def test_traffic_class_out_of_bounds_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        TrafficClass(**wrong)


class RecordingTraffic(KvTraffic):
    """Records the sockets that passed through ``limited``."""

    def __init__(self, settings: TrafficClass) -> None:
        self.counters = Counters()
        super().__init__(settings, self.counters)
        self.sockets: list[socket.socket] = []
        self.seen = threading.Semaphore(0)

    def limited(self, wire: Wire, sock: socket.socket) -> Wire:
        self.sockets.append(sock)
        self.seen.release()
        return super().limited(wire, sock)


@contextmanager
def connected(serves: KvTraffic, reads: KvTraffic, blocks: int = 16) -> Iterator[tuple[TcpPeer, list[BlockKey]]]:
    provider = MemoryProvider()
    provider.declare(NAMESPACE, SHAPE)
    provider.put(NAMESPACE, range(blocks))
    keys = [block_key(number) for number in range(blocks)]
    server = TcpServer(provider, "127.0.0.1:0", traffic=serves)
    server.start()
    peer = TcpPeer(server.address, traffic=reads)
    try:
        yield peer, keys
    finally:
        peer.close()
        server.stop()


def read(peer: TcpPeer, keys: list[BlockKey], deadline_s: float = 30.0) -> list[Outcome]:
    space = DenseBlocks(np.zeros((len(keys), SHAPE.layers, SHAPE.layer_block_bytes), np.uint8))
    return peer.read(ReadRequest(NAMESPACE, keys, 0, SHAPE.layers, 0, time.monotonic() + deadline_s), space).outcomes


def test_cap_of_sender_limits_read_and_marks_sockets() -> None:
    serves, reads = RecordingTraffic(TrafficClass(CS1, cap_bytes_per_s=40_000_000)), RecordingTraffic(TrafficClass(10))
    with connected(serves, reads) as (peer, keys):
        begin_s = time.monotonic()
        assert read(peer, keys) == [Outcome.HIT] * len(keys)
        # only a lower bound that the cap implies, minus the allowed bursts
        assert time.monotonic() - begin_s >= len(keys) * SHAPE.block_bytes / 40e6 - 10 * BURST_S
        assert serves.seen.acquire(timeout=5)
        assert [tos_of(sock) for sock in serves.sockets] == [(0x20, 2)]
        assert [tos_of(sock) for sock in reads.sockets] == [(0x28, 2)]
        assert serves.counters.get("transport_cap_wait_us_total") > 0
        assert serves.rates == (40e6, 40e6)
        assert reads.rates == (None, None)


def test_cap_of_reader_limits_read() -> None:
    serves, reads = RecordingTraffic(TrafficClass()), RecordingTraffic(TrafficClass(CS1, cap_bytes_per_s=40_000_000))
    with connected(serves, reads) as (peer, keys):
        begin_s = time.monotonic()
        assert read(peer, keys) == [Outcome.HIT] * len(keys)
        assert time.monotonic() - begin_s >= len(keys) * SHAPE.block_bytes / 40e6 - 10 * BURST_S


def test_cap_too_low_for_deadline_is_timeout_outcome() -> None:
    serves, reads = RecordingTraffic(TrafficClass()), RecordingTraffic(TrafficClass(CS1, cap_bytes_per_s=100_000))
    with connected(serves, reads) as (peer, keys):
        outcomes = read(peer, keys, deadline_s=0.3)
        assert outcomes.count(Outcome.HIT) < len(keys)
        assert set(outcomes) <= {Outcome.HIT, Outcome.TIMEOUT, Outcome.UNAVAILABLE}


def test_change_cap_requires_expected_cap() -> None:
    traffic = KvTraffic(TrafficClass(8, 1000), Counters())
    assert traffic.cap_bytes_per_s == 1000
    with pytest.raises(Conflict):
        traffic.change_cap(2000, expected=999)
    assert traffic.change_cap(2000, expected=1000) == 1000
    assert (traffic.cap_bytes_per_s, traffic.rates) == (2000, (2000.0, 2000.0))
    assert traffic.change_cap(0) == 2000
    assert (traffic.cap_bytes_per_s, traffic.rates) == (0, (None, None))
    assert traffic.change_cap(3000, expected=0) == 0
    with pytest.raises(InvalidArgument):
        traffic.change_cap(-1)
    without = KvTraffic(TrafficClass(), Counters())
    assert without.cap_bytes_per_s is None
    with pytest.raises(Conflict, match=r"node\.compute_cap"):
        without.change_cap(1000)


def test_limited_wraps_only_capped_networks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as dialled:
        plain = PlainWire(dialled)
        assert KvTraffic(TrafficClass(), Counters()).limited(plain, dialled) is plain
        assert KvTraffic(TrafficClass(8, 1000), Counters(), {"127.0.0.1"}).limited(plain, dialled) is plain
        assert isinstance(KvTraffic(TrafficClass(8, 1000), Counters(), {"127.0.0.2"}).limited(plain, dialled), RateLimitedWire)


# ---------------------------------------------------------------- the cap
BOOKINGS = st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 0.1)), min_size=1, max_size=50)


@given(BOOKINGS, st.floats(1e4, 1e9))
def test_schedule_window_is_within_rate_and_burst(bookings: list[tuple[int, float]], rate: float) -> None:
    line = RateSchedule(rate)
    now_s, moved = 0.0, []
    for size, pause_s in bookings:
        now_s += pause_s
        moved.append((max(now_s, line.book(size, now_s)), size))
    assert [at_s for at_s, _ in moved] == sorted(at_s for at_s, _ in moved)  # first come, first served
    for first in range(len(moved)):
        total = 0
        for at_s, size in moved[first:]:
            # bytes begun before now, without the piece that begins now
            assert total <= (at_s - moved[first][0] + BURST_S) * rate * (1 + 1e-9) + 1
            total += size


@given(st.lists(st.tuples(st.floats(PIECE_S, 0.1), st.floats(0, 1)), min_size=1, max_size=50), st.floats(1e7, 1e9))
def test_schedule_busy_caller_gets_whole_rate(bookings: list[tuple[float, float]], rate: float) -> None:
    line = RateSchedule(rate)
    now_s, total = 0.0, 0
    for piece_s, late in bookings:
        size = math.ceil(piece_s * rate)
        total += size
        # a wake-up that is late by less than one piece loses no bandwidth
        now_s = max(now_s, line.book(size, now_s)) + late * PIECE_S
    assert line.free_s <= total / rate + 1e-6


@given(st.floats(1, 1e12))
def test_limiter_piece_size_is_bounded(rate: float) -> None:
    limiter = RateLimiter(rate, Counters())
    assert MIN_PIECE_BYTES <= limiter.piece_bytes <= MAX_PIECE_BYTES
    limiter.rate = None
    assert limiter.piece_bytes > MAX_PIECE_BYTES


def test_limiter_small_messages_are_booked_without_wait() -> None:
    limiter = RateLimiter(1_000.0, Counters())
    for _ in range(100):
        limiter.acquire(100, time.monotonic() - 1)
    with pytest.raises(DeadlineExceeded):
        limiter.acquire(10_000, time.monotonic() + 1)


def test_limiter_refused_bytes_are_not_booked() -> None:
    limiter = RateLimiter(1e6, Counters())
    for _ in range(100):
        limiter.acquire(1_000, 0.0)
    with pytest.raises(DeadlineExceeded):
        limiter.acquire(1_000_000_000, time.monotonic())
    limiter.acquire(SMALL_BYTES, time.monotonic() + 30)  # would be refused after the other's 1000 seconds


class CountingLimiter(RateLimiter):
    """A limiter that lists the sizes that it let through."""

    def __init__(self, rate: float | None, counters: Counters) -> None:
        super().__init__(rate, counters)
        self.sizes: list[int] = []

    def acquire(self, size: int, deadline_s: float) -> None:
        super().acquire(size, deadline_s)
        self.sizes.append(size)


@given(st.lists(st.integers(0, 300_000), min_size=1, max_size=30), st.floats(1e9, 1e11))
def test_limited_wire_moves_bytes_unchanged(sizes: list[int], rate: float) -> None:
    near, far = socket.socketpair()
    limiter = CountingLimiter(rate, Counters())
    data = np.random.default_rng(1).integers(0, 256, sum(sizes), np.uint8)
    got = np.zeros_like(data)
    cuts = np.cumsum(sizes)[:-1]
    deadline_s = time.monotonic() + 30
    sender, receiver = RateLimitedWire(PlainWire(near), limiter, limiter), RateLimitedWire(PlainWire(far), limiter, limiter)
    thread = threading.Thread(target=sender.send, args=([memoryview(part) for part in np.split(data, cuts)], deadline_s))
    thread.start()
    receiver.receive_into([memoryview(part) for part in np.split(got, cuts)], deadline_s)
    thread.join()
    sender.close()
    receiver.close()
    assert np.array_equal(data, got)
    assert sum(limiter.sizes) == 2 * len(data)


# ---------------------------------------------------------------- network interfaces
def test_interface_of_local_address_is_named() -> None:
    assert interface_of("127.0.0.1") == "lo"
    if socket.has_ipv6 and Path("/proc/self/net/if_inet6").exists():
        assert interface_of("::1") == "lo"


@pytest.mark.parametrize("address", ["198.51.100.7", "2001:db8::7"])
def test_interface_of_foreign_address_is_refused(address: str) -> None:
    with pytest.raises(Unsupported):
        interface_of(address)
