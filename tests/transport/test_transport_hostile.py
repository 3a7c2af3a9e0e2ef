"""What strangers do to the server's port, and what a bad network does to both sides.

Whatever comes: the server goes on serving others with bounded memory, everything lent is given back, and no byte that is not
the stored one is ever called a hit.
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
from kvstore.core.types import BlockRun, BlockShape, Outcome, StoreOutcome
from kvstore.observe.counters import Counters
from kvstore.testing.fault_proxy import FaultProxy
from kvstore.testing.memory_provider import MemoryProvider, block_key, block_payload, checksums_of
from kvstore.testing.transport_suite import NAMESPACE, PATIENCE_S, ask, content, dense, filled, store
from kvstore.transport.addresses import parse_address
from kvstore.transport.tcp import frames
from kvstore.transport.tcp.frames import FrameKind, ReadFrame, WriteFrame
from kvstore.transport.tcp.peer import TcpPeer
from kvstore.transport.tcp.server import TcpServer

SHAPE = BlockShape(2, 30_000)
COUNT = 24


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
    """A connection that says what the test wants."""
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
    """Whether the server has closed the connection."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def serves(server: TcpServer) -> bool:
    """Whether a decent peer is still served."""
    peer = TcpPeer(server.address)
    try:
        return peer.read(ask(range(COUNT), 2), dense(COUNT, SHAPE)).outcomes == [Outcome.HIT] * COUNT
    finally:
        peer.close()


def a_write() -> WriteFrame:
    numbers = range(100, 104)
    run = BlockRun(NAMESPACE, None, 0, tuple(block_key(number) for number in numbers))
    return WriteFrame(run, SHAPE, False, 60_000)


# ---------------------------------------------------------------- strangers


def test_random_bytes_do_no_harm(server: TcpServer, counters: Counters) -> None:
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
@pytest.mark.parametrize("greet", [True, False], ids=["greeted", "not greeted"])
def test_absurd_frames_are_told_and_end_the_connection(server: TcpServer, head: bytes, greet: bool) -> None:
    with raw(server, greet=greet) as sock:
        sock.sendall(head[: frames.HEAD_BYTES])
        assert refusal(sock).kind is ErrorKind.INVALID_ARGUMENT
        assert ended(sock)
    assert serves(server)


def test_nothing_is_served_before_a_greeting(server: TcpServer, provider: MemoryProvider) -> None:
    with raw(server, greet=False) as sock:
        sock.sendall(frames.encode_read(1, ReadFrame(NAMESPACE, [block_key(1)], SHAPE, 0, 2, 0, 1000)))
        assert isinstance(refusal(sock), InvalidArgument)
        assert ended(sock)
    assert not provider.requests


def test_headers_that_never_come_are_not_waited_for(server: TcpServer, counters: Counters) -> None:
    """Allocating for a header that was announced but never sent is bounded, and so is the wait."""
    with raw(server) as sock, raw(server, greet=False) as silent:
        sock.sendall(frames.encode_head(FrameKind.CHECKSUMS, 1, frames.HEADER_LIMITS[FrameKind.CHECKSUMS]))
        assert ended(sock)
        assert ended(silent)
    assert serves(server)
    counts = counters.snapshot()
    either = (
        "transport_stalled_peers_total",
        "transport_requests_cut_total",
    )  # of two bounds of half a second whichever is met first
    assert sum(counts.get(name, 0) for name in either) >= 1


def test_connections_are_bounded(provider: MemoryProvider, counters: Counters) -> None:
    server = TcpServer(provider, counters=counters, handshake_timeout_s=PATIENCE_S, max_connections=8)
    server.start()
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        for first in range(0, 80, 10):  # none of them is idle: each writes, and its bytes are awaited
            writer = stack.enter_context(raw(server))
            run = BlockRun(NAMESPACE, None, 0, (block_key(200 + first),))
            writer.sendall(frames.encode_write(1, WriteFrame(run, SHAPE, False, 60_000)))
            assert answer(writer)[0].kind is FrameKind.GRANT
        beyond = stack.enter_context(raw(server, greet=False))
        assert isinstance(refusal(beyond), CapacityExceeded)
        peer = TcpPeer(server.address)
        with pytest.raises(Unavailable):
            peer.read(ask([1], 2), dense(1, SHAPE))
        peer.close()
    assert counters.snapshot()["transport_connections_refused_total"] >= 2


def test_strangers_make_way_for_one_another_first(provider: MemoryProvider, counters: Counters) -> None:
    """Who shows no ticket ends no connection of who did, however many it opens, and keeps nobody out meanwhile."""
    server = TcpServer(provider, counters=counters, handshake_timeout_s=PATIENCE_S, max_connections=8)
    server.start()
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        known = [stack.enter_context(raw(server)) for _ in range(4)]
        strangers = [stack.enter_context(raw(server, greet=False)) for _ in range(40)]
        assert serves(server), "one more, which says who it is"
        assert ended(strangers[0])
        for request_id, sock in enumerate(known, start=1):
            sock.sendall(frames.encode_head(FrameKind.PING, request_id))
            assert answer(sock)[0].kind is FrameKind.PONG
    assert "transport_idle_connections_dropped_total" not in counters.snapshot()
    assert counters.get("transport_unauthenticated_connections_dropped_total") >= 36


def test_a_client_that_leaks_idle_connections_locks_nobody_out(server: TcpServer, counters: Counters) -> None:
    with contextlib.ExitStack() as stack:
        decent = TcpPeer(server.address)
        stack.callback(decent.close)
        first = stack.enter_context(raw(server))
        leaked = [stack.enter_context(raw(server)) for _ in range(40)]
        assert ended(first), "the one idle longest gave way"
        assert serves(server)
        assert decent.read(ask(range(COUNT), 2), dense(COUNT, SHAPE)).outcomes == [Outcome.HIT] * COUNT
        leaked[-1].sendall(frames.encode_head(FrameKind.PING, 1))
        assert answer(leaked[-1])[0].kind is FrameKind.PONG, "those used last stay"
        again = decent.read(ask(range(COUNT), 2), dense(COUNT, SHAPE))
        assert again.outcomes == [Outcome.HIT] * COUNT
    counted = counters.snapshot()
    assert counted["transport_idle_connections_dropped_total"] >= 33
    assert "transport_connections_refused_total" not in counted


def test_a_peer_that_does_not_take_its_bytes_lets_go_of_the_pins(
    provider: MemoryProvider, server: TcpServer, counters: Counters
) -> None:
    big = BlockShape(1, 16 << 20)
    other = type(NAMESPACE)(b"x" * 16)
    provider.declare(other, big)
    provider.put(other, [1, 2])
    with raw(server) as sock:
        sock.sendall(frames.encode_read(1, ReadFrame(other, [block_key(1), block_key(2)], big, 0, 1, 0, 600_000)))
        answer(sock)  # it has begun; from here on nothing is taken
        provider.settle()
    server.stop()  # pins are let go of a moment before the stall is counted
    assert counters.snapshot()["transport_stalled_peers_total"] == 1


@pytest.mark.parametrize("sent", [0, 1, 50_000])
def test_a_writer_that_stalls_or_lies_gets_its_grant_aborted(provider: MemoryProvider, server: TcpServer, sent: int) -> None:
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
def test_bytes_without_their_checksums_are_never_stored(provider: MemoryProvider, server: TcpServer, after: str) -> None:
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


def test_checksums_of_other_bytes_spoil_that_block(provider: MemoryProvider, server: TcpServer) -> None:
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
def test_a_killed_writer_leaves_nothing(provider: MemoryProvider, server: TcpServer, seed: int) -> None:
    sent = random.Random(seed).randrange(4 * SHAPE.block_bytes)
    said = (
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
        writer.stdin.write(said)
        writer.stdin.close()
        assert writer.stdout.readline() == b"sent\n"
        assert granted.wait(PATIENCE_S)
        writer.send_signal(signal.SIGKILL)
    provider.settle()
    assert (provider.commits, provider.aborts) == (0, 1)
    assert serves(server)


# ---------------------------------------------------------------- bad servers


class Impostor:
    """Answers each connection with bytes of the test's choice, right after whatever it is asked first."""

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
                    for said in self._answers:
                        sock.recv(65_536)
                        sock.sendall(said)
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
LIES = {
    "rubbish": b"\0" * 500,
    "closes": b"",
    "nothing at all": END,
    "half": data_frame(0, [Outcome.MISS]) + END,
    "more than asked": data_frame(0, [Outcome.HIT] * 3) + END,
    "keys beyond": data_frame(7, [Outcome.HIT]) + END,
    "twice": data_frame(0, [Outcome.MISS]) * 2 + END,
    "layers beyond": data_frame(0, [Outcome.MISS] * 2, layer=1) + END,
    "layers out of order": data_frame(0, [Outcome.MISS] * 2, layer=1, layers=1) + END,
    "changes its mind": data_frame(0, [Outcome.MISS] * 2, layers=1) + data_frame(0, [Outcome.HIT] * 2, layer=1, layers=1) + END,
    "another request": frames.encode_head(FrameKind.READ_END, 2),
    "wrong kind": frames.encode_head(FrameKind.PONG, 1),
    "absurd length": frames.HEAD.pack(b"KVB1", FrameKind.DATA, frames.VERSION, 0, 1, 40, 1 << 44),
    "truncated": data_frame(0, [Outcome.HIT] * 2, payload=b"abc"),
    "zeros for bytes": data_frame(0, [Outcome.HIT] * 2) + END,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_server_is_never_believed(lie: str) -> None:
    impostor = Impostor([frames.encode_head(FrameKind.WELCOME, 0), LIES[lie]])
    counters = Counters()
    peer = TcpPeer(impostor.address, counters=counters)
    try:
        outcomes = peer.read(ask([0, 1], 2), dense(2, SHAPE)).outcomes
        assert Outcome.HIT not in outcomes
        assert store(peer, filled(dense, [1], SHAPE), [1]) == [StoreOutcome.LOST]
    finally:
        peer.close()
        impostor.stop()


def test_a_server_that_does_not_greet_is_unavailable() -> None:
    for said in (b"", b"\0" * 24, frames.encode_head(FrameKind.PONG, 0), frames.encode_error(0, Unauthenticated("no"))):
        impostor = Impostor([said])
        peer = TcpPeer(impostor.address)
        with pytest.raises((Unavailable, Unauthenticated)):
            peer.read(ask([0], 2), dense(1, SHAPE))
        peer.close()
        impostor.stop()


# ---------------------------------------------------------------- a bad network


@pytest.fixture
def proxy(server: TcpServer) -> Iterator[FaultProxy]:
    proxy = FaultProxy(server.address)
    yield proxy
    proxy.stop()


def test_flipped_bytes_are_never_hits(provider: MemoryProvider, proxy: FaultProxy) -> None:
    generator = random.Random(11)
    size = COUNT * SHAPE.block_bytes
    hits = 0
    for _ in range(25):
        proxy.to_client.flips = frozenset({generator.randrange(size)})
        peer = TcpPeer(proxy.address, streams=2, cores=4)
        buffer = dense(COUNT, SHAPE)
        try:
            result = peer.read(ask(range(COUNT), 2, within_s=3), buffer)
        except (Unavailable, Unauthenticated):
            continue  # it was a byte of the greeting
        finally:
            peer.close()
        for number, outcome in enumerate(result.outcomes):
            if outcome is Outcome.HIT:
                hits += 1
                assert content(buffer, number) == block_payload(number, SHAPE)
    assert hits > COUNT  # and one flipped byte does not cost everything


def test_flipped_bytes_of_a_write_are_never_stored(provider: MemoryProvider, proxy: FaultProxy) -> None:
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
def test_cut_connections(provider: MemoryProvider, proxy: FaultProxy, seed: int) -> None:
    generator = random.Random(seed)
    peer = TcpPeer(proxy.address, streams=2, cores=4, breaker_failures=1000)
    assert peer.ping(time.monotonic() + PATIENCE_S) > 0
    proxy.to_client.cut_after = generator.randrange(100, COUNT * SHAPE.block_bytes)
    buffer = dense(COUNT, SHAPE)
    outcomes = peer.read(ask(range(COUNT), 2), buffer).outcomes
    assert set(outcomes) <= {Outcome.HIT, Outcome.UNAVAILABLE}
    for number, outcome in enumerate(outcomes):
        if outcome is Outcome.HIT:
            assert content(buffer, number) == block_payload(number, SHAPE)
    proxy.to_client.cut_after = None
    assert peer.read(ask(range(COUNT), 2), buffer).outcomes == [Outcome.HIT] * COUNT
    peer.close()


def test_connections_cut_while_idle_are_replaced_without_a_word(provider: MemoryProvider, proxy: FaultProxy) -> None:
    counters = Counters()
    peer = TcpPeer(proxy.address, streams=2, cores=4, counters=counters)
    for _ in range(3):
        assert peer.read(ask(range(COUNT), 2), dense(COUNT, SHAPE)).outcomes == [Outcome.HIT] * COUNT
        assert StoreOutcome.LOST not in store(peer, filled(dense, [1], SHAPE), [1])
        proxy.cut()
    peer.close()
    assert "transport_peer_broken_total" not in counters.snapshot()


def test_a_stalled_network_ends_at_the_deadline_and_nothing_comes_late(provider: MemoryProvider, proxy: FaultProxy) -> None:
    peer = TcpPeer(proxy.address)
    assert peer.ping(time.monotonic() + PATIENCE_S) > 0
    proxy.to_client.stall_after = 5 * SHAPE.block_bytes
    buffer = dense(COUNT, SHAPE)
    outcomes = peer.read(ask(range(COUNT), 2, within_s=0.3), buffer).outcomes
    assert set(outcomes) <= {Outcome.HIT, Outcome.TIMEOUT}
    assert Outcome.TIMEOUT in outcomes
    before = bytes(buffer.array.reshape(-1))
    proxy.to_client.stall_after = None
    assert peer.read(ask(range(COUNT), 2), dense(COUNT, SHAPE)).outcomes == [Outcome.HIT] * COUNT
    assert bytes(buffer.array.reshape(-1)) == before
    peer.close()


def test_a_slow_network_is_only_slow(provider: MemoryProvider, proxy: FaultProxy) -> None:
    proxy.to_client.bytes_per_s = 8e6
    proxy.to_client.delay_s = 0.001
    peer = TcpPeer(proxy.address, streams=2, cores=4)
    buffer = dense(COUNT, SHAPE)
    assert peer.read(ask(range(COUNT), 2), buffer).outcomes == [Outcome.HIT] * COUNT
    assert all(content(buffer, number) == block_payload(number, SHAPE) for number in range(COUNT))
    peer.close()


def test_a_dead_peer_fails_fast_after_a_few_calls(provider: MemoryProvider, server: TcpServer) -> None:
    counters = Counters()
    peer = TcpPeer(server.address, counters=counters, breaker_failures=2, breaker_open_s=60)
    server.stop()
    for _ in range(5):
        with pytest.raises(Unavailable):
            peer.read(ask([1], 2), dense(1, SHAPE))
        with pytest.raises(Unavailable):
            store(peer, filled(dense, [1], SHAPE), [1])
    peer.close()
    seen = counters.snapshot()
    assert seen["transport_peer_connect_failures_total"] == 2
    assert seen["transport_peer_fast_failures_total"] == 8
    assert seen["transport_peer_breaker_opened_total"] == 1


def test_strangers_do_not_set_the_pace_of_the_log(
    server: TcpServer, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(40):
        with raw(server, greet=False) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
            with contextlib.suppress(ConnectionError):
                while sock.recv(1024):
                    pass
    assert counters.get("transport_bad_frames_total") == 40
    assert len([record for record in caplog.records if "closed a data connection" in record.getMessage()]) <= 1
