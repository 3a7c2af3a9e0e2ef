"""Hostile clients, hostile servers and a faulty network.

In all cases the server keeps serving other clients with bounded memory, all parts and grants are released, and wrong bytes are
never reported as a hit.
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.core.errors import CapacityExceeded, ErrorKind, InvalidArgument, KVStoreError, Unauthenticated, Unavailable
from kvstore.core.types import BlockRun, BlockShape, NamespaceId, Outcome, StoreOutcome
from kvstore.observe.counters import Counters
from kvstore.testing.fault_proxy import FaultProxy
from kvstore.testing.memory_provider import MemoryProvider, block_key, block_payload, checksums_of
from kvstore.testing.transport_suite import NAMESPACE, PATIENCE_S, content, dense, filled, read_of, store
from kvstore.transport.addresses import parse_address
from kvstore.transport.contract import ReadRequest
from kvstore.transport.tcp import frames
from kvstore.transport.tcp.frames import FrameKind, ReadFrame, WriteFrame
from kvstore.transport.tcp.peer import TcpPeer
from kvstore.transport.tcp.server import TcpServer
from support.wait import wait_until

SHAPE = BlockShape(2, 30_000)
COUNT = 24
BIG = NamespaceId(b"big" + b"n" * 13)


@pytest.fixture
def provider() -> Iterator[MemoryProvider]:
    provider = MemoryProvider()
    provider.declare(NAMESPACE, SHAPE)
    provider.put(NAMESPACE, range(COUNT))
    yield provider
    provider.settle()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def server(provider: MemoryProvider, counters: Counters) -> Iterator[TcpServer]:
    server = TcpServer(provider, counters=counters, stall_timeout_s=0.5, handshake_timeout_s=0.5, max_connections=8)
    server.start()
    yield server
    server.stop()


@contextlib.contextmanager
def raw(server: TcpServer, *, greet: bool = True) -> Iterator[socket.socket]:
    """Open a raw connection, with or without HELLO."""
    with socket.create_connection(parse_address(server.address), timeout=PATIENCE_S) as sock:
        if greet:
            sock.sendall(frames.encode_hello(b""))
            assert answer(sock)[0].kind is FrameKind.WELCOME
        yield sock


def take(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError("closed")
        data += more
    return data


def answer(sock: socket.socket) -> tuple[frames.Head, bytes]:
    head = frames.decode_head(take(sock, frames.HEAD_BYTES))
    return head, take(sock, head.header_bytes)


def refusal(sock: socket.socket) -> KVStoreError:
    head, header = answer(sock)
    assert head.kind is FrameKind.ERROR
    return frames.decode_error(header)


def ended(sock: socket.socket) -> bool:
    """Return whether the server has closed the connection."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def serves(server: TcpServer) -> bool:
    """Return whether a regular peer is still served."""
    peer = TcpPeer(server.address)
    try:
        return peer.read(read_of(range(COUNT), 2), dense(COUNT, SHAPE)).outcomes == [Outcome.HIT] * COUNT
    finally:
        peer.close()


def a_write() -> WriteFrame:
    numbers = range(100, 104)
    run = BlockRun(NAMESPACE, None, 0, tuple(block_key(number) for number in numbers))
    return WriteFrame(run, SHAPE, False, 60_000)


# ---------------------------------------------------------------- hostile clients


def test_server_random_bytes_keeps_serving(server: TcpServer, counters: Counters) -> None:
    generator = random.Random(7)
    read = frames.encode_read(1, ReadFrame(NAMESPACE, [block_key(1)], SHAPE, 0, 2, 0, 1000))
    for round_ in range(60):
        with contextlib.suppress(OSError), raw(server, greet=round_ % 3 > 0) as sock:
            frame = bytearray(read if round_ % 2 else generator.randbytes(200))
            for _ in range(generator.randrange(1, 6)):
                frame[generator.randrange(len(frame))] = generator.randrange(256)
            sock.sendall(frame)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65_536):
                pass
    assert serves(server)
    assert counters.snapshot()["transport_bad_frames_total"] > 10
    assert "transport_internal_errors_total" not in counters.snapshot()


@pytest.mark.parametrize(
    "head",
    [
        frames.HEAD.pack(b"KVB1", FrameKind.READ, frames.VERSION, 0, 1, 0xFFFFFFFF, 0),
        frames.HEAD.pack(b"KVB1", FrameKind.WRITE, frames.VERSION, 0, 1, 0x7FFFFFFF, 0),
        frames.HEAD.pack(b"KVB1", FrameKind.READ, frames.VERSION, 0, 1, 100, 1 << 62),
        frames.HEAD.pack(b"KVB1", FrameKind.PAYLOAD, frames.VERSION, 0, 1, 0, 1 << 40),
        frames.HEAD.pack(b"KVB1", FrameKind.DATA, frames.VERSION, 0, 1, 0, 1 << 40),
        frames.HEAD.pack(b"KVB1", 99, frames.VERSION, 0, 1, 0, 0),
        frames.HEAD.pack(b"KVB1", FrameKind.PING, 200, 0, 1, 0, 0),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
@pytest.mark.parametrize("greet", [True, False], ids=["after HELLO", "before HELLO"])
def test_server_invalid_head_answers_error_and_closes(server: TcpServer, head: bytes, greet: bool) -> None:
    with raw(server, greet=greet) as sock:
        sock.sendall(head[: frames.HEAD_BYTES])
        assert refusal(sock).kind is ErrorKind.INVALID_ARGUMENT
        assert ended(sock)
    assert serves(server)


def test_server_without_thread_refuses_one_connection(
    server: TcpServer, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    failures = [RuntimeError("can't start new thread")]

    def limited_start(thread: threading.Thread) -> None:
        if thread.name.startswith("data-127.") and failures:
            raise failures.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited_start)
    with raw(server, greet=False) as sock:
        assert isinstance(refusal(sock), CapacityExceeded)
        assert ended(sock)
    assert serves(server)
    assert counters.snapshot()["transport_accept_errors_total"] == 1


def test_server_request_before_hello_is_refused(server: TcpServer, provider: MemoryProvider) -> None:
    with raw(server, greet=False) as sock:
        sock.sendall(frames.encode_read(1, ReadFrame(NAMESPACE, [block_key(1)], SHAPE, 0, 2, 0, 1000)))
        assert isinstance(refusal(sock), InvalidArgument)
        assert ended(sock)
    assert not provider.requests


def test_server_missing_header_times_out(server: TcpServer, counters: Counters) -> None:
    """A header that was announced but never sent costs bounded memory and bounded time."""
    with raw(server) as sock, raw(server, greet=False) as silent:
        sock.sendall(frames.encode_head(FrameKind.CHECKSUMS, 1, frames.HEADER_LIMITS[FrameKind.CHECKSUMS]))
        assert ended(sock)
        assert ended(silent)
    assert serves(server)
    counts = counters.snapshot()
    either = (
        "transport_stalled_peers_total",
        "transport_requests_cut_total",
    )  # both timeouts are half a second; either may come first
    assert sum(counts.get(name, 0) for name in either) >= 1


def test_server_busy_connections_above_limit_are_refused(provider: MemoryProvider, counters: Counters) -> None:
    server = TcpServer(provider, counters=counters, handshake_timeout_s=PATIENCE_S, max_connections=8)
    server.start()
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        for first in range(0, 80, 10):  # no connection is idle: each has a write under way
            writer = stack.enter_context(raw(server))
            run = BlockRun(NAMESPACE, None, 0, (block_key(200 + first),))
            writer.sendall(frames.encode_write(1, WriteFrame(run, SHAPE, False, 60_000)))
            assert answer(writer)[0].kind is FrameKind.GRANT
        beyond = stack.enter_context(raw(server, greet=False))
        assert isinstance(refusal(beyond), CapacityExceeded)
        peer = TcpPeer(server.address)
        with pytest.raises(Unavailable):
            peer.read(read_of([1], 2), dense(1, SHAPE))
        peer.close()
    assert counters.snapshot()["transport_connections_refused_total"] >= 2


def test_server_full_evicts_unauthenticated_first(provider: MemoryProvider, counters: Counters) -> None:
    """Unauthenticated connections neither displace authenticated ones nor lock out a new client."""
    server = TcpServer(provider, counters=counters, handshake_timeout_s=PATIENCE_S, max_connections=8)
    server.start()
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        authenticated = [stack.enter_context(raw(server)) for _ in range(4)]
        unauthenticated = [stack.enter_context(raw(server, greet=False)) for _ in range(40)]
        assert serves(server), "a new client with a valid HELLO is served"
        assert ended(unauthenticated[0])
        for request_id, sock in enumerate(authenticated, start=1):
            sock.sendall(frames.encode_head(FrameKind.PING, request_id))
            assert answer(sock)[0].kind is FrameKind.PONG
    assert "transport_idle_connections_dropped_total" not in counters.snapshot()
    assert counters.get("transport_unauthenticated_connections_dropped_total") >= 36


def test_server_full_evicts_longest_idle(server: TcpServer, counters: Counters) -> None:
    with contextlib.ExitStack() as stack:
        regular = TcpPeer(server.address)
        stack.callback(regular.close)
        first = stack.enter_context(raw(server))
        leaked = [stack.enter_context(raw(server)) for _ in range(40)]
        assert ended(first), "the connection idle longest was evicted"
        assert serves(server)
        assert regular.read(read_of(range(COUNT), 2), dense(COUNT, SHAPE)).outcomes == [Outcome.HIT] * COUNT
        leaked[-1].sendall(frames.encode_head(FrameKind.PING, 1))
        assert answer(leaked[-1])[0].kind is FrameKind.PONG, "recently used connections stay open"
        again = regular.read(read_of(range(COUNT), 2), dense(COUNT, SHAPE))
        assert again.outcomes == [Outcome.HIT] * COUNT
    counted = counters.snapshot()
    assert counted["transport_idle_connections_dropped_total"] >= 33
    assert "transport_connections_refused_total" not in counted


def test_server_stalled_reader_releases_pins(provider: MemoryProvider, server: TcpServer, counters: Counters) -> None:
    big = BlockShape(1, 16 << 20)
    other = type(NAMESPACE)(b"x" * 16)
    provider.declare(other, big)
    provider.put(other, [1, 2])
    with raw(server) as sock:
        sock.sendall(frames.encode_read(1, ReadFrame(other, [block_key(1), block_key(2)], big, 0, 1, 0, 600_000)))
        answer(sock)  # the answer has begun; the client receives no more
        provider.settle()
    server.stop()  # the pins are released shortly before the stall is counted
    assert counters.snapshot()["transport_stalled_peers_total"] == 1


@pytest.mark.parametrize("sent", [0, 1, 50_000])
def test_server_stalled_or_false_write_is_aborted(provider: MemoryProvider, server: TcpServer, sent: int) -> None:
    with raw(server) as sock:
        sock.sendall(frames.encode_write(1, a_write()))
        assert answer(sock)[0].kind is FrameKind.GRANT
        if sent:
            sock.sendall(frames.encode_head(FrameKind.PAYLOAD, 1, 0, 4 * SHAPE.block_bytes) + bytes(sent))
        assert ended(sock)
    with raw(server) as sock:
        sock.sendall(frames.encode_write(1, a_write()))
        answer(sock)
        sock.sendall(frames.encode_head(FrameKind.PAYLOAD, 1, 0, 4 * SHAPE.block_bytes + 1))
        assert isinstance(refusal(sock), InvalidArgument)
    provider.settle()
    assert (provider.commits, provider.aborts) == (0, 2)
    assert provider.held(NAMESPACE, 100) is None


@pytest.mark.parametrize("after", ["nothing", "too few", "too many", "another request", "another kind"])
def test_server_write_without_checksums_is_aborted(provider: MemoryProvider, server: TcpServer, after: str) -> None:
    payload = [block_payload(number, SHAPE) for number in range(100, 104)]
    checksums = checksums_of(payload, SHAPE)
    follows = {
        "nothing": b"",
        "too few": frames.encode_checksums(1, checksums[:3]),
        "too many": frames.encode_checksums(1, np.concatenate([checksums, checksums[:1]])),
        "another request": frames.encode_checksums(2, checksums),
        "another kind": frames.encode_head(FrameKind.PING, 1),
    }[after]
    with raw(server) as sock:
        sock.sendall(frames.encode_write(1, a_write()))
        answer(sock)
        sock.sendall(frames.encode_head(FrameKind.PAYLOAD, 1, 0, 4 * SHAPE.block_bytes) + b"".join(payload) + follows)
        assert ended(sock) if after == "nothing" else isinstance(refusal(sock), InvalidArgument)
    provider.settle()
    assert (provider.commits, provider.aborts) == (0, 1)
    assert provider.held(NAMESPACE, 100) is None


def test_server_write_wrong_checksum_drops_that_block(provider: MemoryProvider, server: TcpServer) -> None:
    payload = [block_payload(number, SHAPE) for number in range(100, 104)]
    checksums = checksums_of(payload, SHAPE)
    checksums[2, 1] ^= np.uint64(1)
    with raw(server) as sock:
        sock.sendall(frames.encode_write(1, a_write()))
        answer(sock)
        sock.sendall(frames.encode_head(FrameKind.PAYLOAD, 1, 0, 4 * SHAPE.block_bytes) + b"".join(payload))
        sock.sendall(frames.encode_checksums(1, checksums))
        assert answer(sock)[0].kind is FrameKind.WRITTEN
    provider.settle()
    assert provider.held(NAMESPACE, 101) == payload[1]
    assert provider.held(NAMESPACE, 102) is None


WRITER = """
import socket, sys
from kvstore.transport.tcp import frames
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
stdin = sys.stdin.buffer
sock.sendall(stdin.read())
print("sent", flush=True)
sock.recv(1 << 16, socket.MSG_WAITALL)
"""


@pytest.mark.parametrize("seed", range(3))
def test_server_writer_killed_aborts_write(provider: MemoryProvider, server: TcpServer, seed: int) -> None:
    sent = random.Random(seed).randrange(4 * SHAPE.block_bytes)
    request = (
        frames.encode_hello(b"")
        + frames.encode_write(1, a_write())
        + frames.encode_head(FrameKind.PAYLOAD, 1, 0, 4 * SHAPE.block_bytes)
        + bytes(sent)
    )
    granted = threading.Event()
    provider.on_grant = granted.set
    port = str(parse_address(server.address)[1])
    with subprocess.Popen([sys.executable, "-c", WRITER, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write(request)
        writer.stdin.close()
        assert writer.stdout.readline() == b"sent\n"
        assert granted.wait(PATIENCE_S)
        writer.send_signal(signal.SIGKILL)
    provider.settle()
    assert (provider.commits, provider.aborts) == (0, 1)
    assert serves(server)


# ---------------------------------------------------------------- hostile servers


class Impostor:
    """A server that answers each received message with the next of the given byte strings."""

    def __init__(self, answers: list[bytes]) -> None:
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with sock, contextlib.suppress(OSError):
                    sock.settimeout(PATIENCE_S)
                    for data in self._answers:
                        sock.recv(65_536)
                        sock.sendall(data)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(65_536):
                        pass

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_S)
        self._listener.close()


def data_frame(first: int, outcomes: list[Outcome], layer: int = 0, layers: int = 2, payload: bytes | None = None) -> bytes:
    hits = outcomes.count(Outcome.HIT)
    frame = frames.DataFrame(first, bytes(outcomes), hits, layer, layers, frames.Tier.DRAM, np.zeros((hits, layers), np.uint64))
    size = hits * layers * SHAPE.layer_block_bytes
    return frames.encode_data(1, frame, size) + (bytes(size) if payload is None else payload)


END = frames.encode_head(FrameKind.READ_END, 1)
FALSE_ANSWERS = {
    "garbage": b"\0" * 500,
    "closes": b"",
    "nothing at all": END,
    "half of the keys": data_frame(0, [Outcome.MISS]) + END,
    "more keys than requested": data_frame(0, [Outcome.HIT] * 3) + END,
    "keys beyond": data_frame(7, [Outcome.HIT]) + END,
    "twice": data_frame(0, [Outcome.MISS]) * 2 + END,
    "layers beyond": data_frame(0, [Outcome.MISS] * 2, layer=1) + END,
    "layers out of order": data_frame(0, [Outcome.MISS] * 2, layer=1, layers=1) + END,
    "changed outcome": data_frame(0, [Outcome.MISS] * 2, layers=1) + data_frame(0, [Outcome.HIT] * 2, layer=1, layers=1) + END,
    "another request": frames.encode_head(FrameKind.READ_END, 2),
    "wrong kind": frames.encode_head(FrameKind.PONG, 1),
    "absurd length": frames.HEAD.pack(b"KVB1", FrameKind.DATA, frames.VERSION, 0, 1, 40, 1 << 44),
    "truncated": data_frame(0, [Outcome.HIT] * 2, payload=b"abc"),
    "zeros for bytes": data_frame(0, [Outcome.HIT] * 2) + END,
}


@pytest.mark.parametrize("case", FALSE_ANSWERS)
def test_peer_false_answers_are_no_hits(case: str) -> None:
    impostor = Impostor([frames.encode_head(FrameKind.WELCOME, 0), FALSE_ANSWERS[case]])
    counters = Counters()
    peer = TcpPeer(impostor.address, counters=counters)
    try:
        outcomes = peer.read(read_of([0, 1], 2), dense(2, SHAPE)).outcomes
        assert Outcome.HIT not in outcomes
        assert store(peer, filled(dense, [1], SHAPE), [1]) == [StoreOutcome.LOST]
    finally:
        peer.close()
        impostor.stop()


def test_peer_server_without_welcome_is_unavailable() -> None:
    for data in (b"", b"\0" * 24, frames.encode_head(FrameKind.PONG, 0), frames.encode_error(0, Unauthenticated("no"))):
        impostor = Impostor([data])
        peer = TcpPeer(impostor.address)
        with pytest.raises((Unavailable, Unauthenticated)):
            peer.read(read_of([0], 2), dense(1, SHAPE))
        peer.close()
        impostor.stop()


# ---------------------------------------------------------------- a faulty network


@pytest.fixture
def proxy(server: TcpServer) -> Iterator[FaultProxy]:
    proxy = FaultProxy(server.address)
    yield proxy
    proxy.stop()


def test_read_flipped_bytes_are_no_hits(provider: MemoryProvider, proxy: FaultProxy) -> None:
    generator = random.Random(11)
    size = COUNT * SHAPE.block_bytes
    hits = 0
    for _ in range(25):
        proxy.to_client.flips = frozenset({generator.randrange(size)})
        peer = TcpPeer(proxy.address, streams=2, cores=4)
        buffer = dense(COUNT, SHAPE)
        try:
            result = peer.read(read_of(range(COUNT), 2, within_s=3), buffer)
        except (Unavailable, Unauthenticated):
            continue  # the flipped byte was part of HELLO or WELCOME
        finally:
            peer.close()
        for number, outcome in enumerate(result.outcomes):
            if outcome is Outcome.HIT:
                hits += 1
                assert content(buffer, number) == block_payload(number, SHAPE)
    assert hits > COUNT  # one flipped byte does not fail all blocks


def test_write_flipped_bytes_are_not_stored(provider: MemoryProvider, proxy: FaultProxy) -> None:
    generator = random.Random(5)
    for round_ in range(20):
        numbers = range(1000 + 10 * round_, 1004 + 10 * round_)
        proxy.to_server.flips = frozenset({generator.randrange(300, 4 * SHAPE.block_bytes)})
        peer = TcpPeer(proxy.address)
        outcomes = store(peer, filled(dense, numbers, SHAPE), numbers, within_s=3)
        peer.close()
        assert outcomes.count(StoreOutcome.STORED) < 4
        for number in numbers:
            assert provider.held(NAMESPACE, number) in (None, block_payload(number, SHAPE))


@pytest.mark.parametrize("seed", range(6))
def test_read_connection_cut_next_read_succeeds(provider: MemoryProvider, proxy: FaultProxy, seed: int) -> None:
    generator = random.Random(seed)
    peer = TcpPeer(proxy.address, streams=2, cores=4, breaker_failures=1000)
    assert peer.read(read_of([0], 2), dense(1, SHAPE)).outcomes == [Outcome.HIT]  # a connection is open
    proxy.to_client.cut_after = generator.randrange(100, COUNT * SHAPE.block_bytes)
    buffer = dense(COUNT, SHAPE)
    outcomes = peer.read(read_of(range(COUNT), 2), buffer).outcomes
    assert set(outcomes) <= {Outcome.HIT, Outcome.UNAVAILABLE}
    for number, outcome in enumerate(outcomes):
        if outcome is Outcome.HIT:
            assert content(buffer, number) == block_payload(number, SHAPE)
    proxy.to_client.cut_after = None
    assert peer.read(read_of(range(COUNT), 2), buffer).outcomes == [Outcome.HIT] * COUNT
    peer.close()


def test_read_without_helper_thread_succeeds(
    provider: MemoryProvider, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may start one of two helper threads. The first has begun to receive when the second is refused."""
    counters = Counters()
    peer = TcpPeer(proxy.address, streams=3, cores=6, counters=counters)
    start = threading.Thread.start
    refused: list[str] = []

    def limited_start(thread: threading.Thread) -> None:
        if thread.name == f"data-{proxy.address}_1":
            refused.append(thread.name)
            wait_until(lambda: counters.snapshot().get("transport_peer_bytes_received_total", 0) > 0)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited_start)
    shape = BlockShape(2, 1 << 20)
    provider.declare(BIG, shape)
    provider.put(BIG, range(12))
    buffer = dense(12, shape)
    request = ReadRequest(BIG, [block_key(number) for number in range(12)], 0, 2, 0, time.monotonic() + 20.0)
    result = peer.read(request, buffer)
    peer.close()
    assert refused
    assert result.outcomes == [Outcome.HIT] * 12
    assert [content(buffer, number) for number in range(12)] == [block_payload(number, shape) for number in range(12)]
    assert counters.snapshot()["transport_peer_helpers_refused_total"] == 1


def test_peer_idle_connections_cut_are_replaced(provider: MemoryProvider, proxy: FaultProxy) -> None:
    counters = Counters()
    peer = TcpPeer(proxy.address, streams=2, cores=4, counters=counters)
    for _ in range(3):
        assert peer.read(read_of(range(COUNT), 2), dense(COUNT, SHAPE)).outcomes == [Outcome.HIT] * COUNT
        assert StoreOutcome.LOST not in store(peer, filled(dense, [1], SHAPE), [1])
        proxy.cut()
    peer.close()
    assert "transport_peer_broken_total" not in counters.snapshot()


def test_read_stalled_network_times_out_without_late_bytes(provider: MemoryProvider, proxy: FaultProxy) -> None:
    peer = TcpPeer(proxy.address)
    assert peer.read(read_of([0], 2), dense(1, SHAPE)).outcomes == [Outcome.HIT]  # a connection is open
    proxy.to_client.stall_after = 5 * SHAPE.block_bytes
    buffer = dense(COUNT, SHAPE)
    outcomes = peer.read(read_of(range(COUNT), 2, within_s=0.3), buffer).outcomes
    assert set(outcomes) <= {Outcome.HIT, Outcome.TIMEOUT}
    assert Outcome.TIMEOUT in outcomes
    before = bytes(buffer.array.reshape(-1))
    proxy.to_client.stall_after = None
    assert peer.read(read_of(range(COUNT), 2), dense(COUNT, SHAPE)).outcomes == [Outcome.HIT] * COUNT
    assert bytes(buffer.array.reshape(-1)) == before
    peer.close()


def test_read_slow_network_succeeds(provider: MemoryProvider, proxy: FaultProxy) -> None:
    proxy.to_client.bytes_per_s = 8e6
    proxy.to_client.delay_s = 0.001
    peer = TcpPeer(proxy.address, streams=2, cores=4)
    buffer = dense(COUNT, SHAPE)
    assert peer.read(read_of(range(COUNT), 2), buffer).outcomes == [Outcome.HIT] * COUNT
    assert all(content(buffer, number) == block_payload(number, SHAPE) for number in range(COUNT))
    peer.close()


def test_peer_dead_server_fails_fast(provider: MemoryProvider, server: TcpServer) -> None:
    counters = Counters()
    peer = TcpPeer(server.address, counters=counters, breaker_failures=2, breaker_open_s=60)
    server.stop()
    for _ in range(5):
        with pytest.raises(Unavailable):
            peer.read(read_of([1], 2), dense(1, SHAPE))
        with pytest.raises(Unavailable):
            store(peer, filled(dense, [1], SHAPE), [1])
    peer.close()
    seen = counters.snapshot()
    assert seen["transport_peer_connect_failures_total"] == 2
    assert seen["transport_peer_fast_failures_total"] == 8
    assert seen["transport_peer_breaker_opened_total"] == 1


def test_server_repeated_bad_frames_log_once(server: TcpServer, counters: Counters, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(40):
        with raw(server, greet=False) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
            with contextlib.suppress(ConnectionError):
                while sock.recv(1024):
                    pass
    assert counters.get("transport_bad_frames_total") == 40
    assert len([record for record in caplog.records if "data connection closed" in record.getMessage()]) <= 1
