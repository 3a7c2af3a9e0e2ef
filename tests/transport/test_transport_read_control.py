"""A read that another thread watches and cancels returns at once, does not count as a failure of the peer, and writes nothing
later."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest

from kvstore.core.buffers import DenseBlocks
from kvstore.core.types import BlockShape, NamespaceId, Outcome
from kvstore.observe.counters import Counters
from kvstore.process.tls import TlsConfig
from kvstore.testing.fault_proxy import FaultProxy
from kvstore.testing.memory_provider import MemoryProvider, block_key, block_payload
from kvstore.transport.contract import ReadControl, ReadRequest
from kvstore.transport.tcp import connection_pool
from kvstore.transport.tcp.peer import TcpPeer
from kvstore.transport.tcp.server import TcpServer
from kvstore.transport.tls import PeerTls

SHAPE = BlockShape(4, 65536)
NAMESPACE = NamespaceId(b"n" * 16)
COUNT = 40
WAIT_S = 20.0


def test_read_cancelled_returns_and_peer_stays_usable() -> None:
    provider = MemoryProvider()
    provider.declare(NAMESPACE, SHAPE)
    provider.put(NAMESPACE, range(COUNT))
    server = TcpServer(provider)
    server.start()
    proxy = FaultProxy(server.address)
    proxy.to_client.stall_after = 3 << 20
    peer = TcpPeer(proxy.address, breaker_failures=1)
    memory = np.zeros((COUNT, SHAPE.block_bytes), np.uint8)
    keys = [block_key(number) for number in range(COUNT)]
    for _ in range(3):
        control = ReadControl()
        outcomes: list[Outcome] = []

        def read(control: ReadControl = control, outcomes: list[Outcome] = outcomes) -> None:
            request = ReadRequest(NAMESPACE, keys, 0, SHAPE.layers, 0, time.monotonic() + 60.0)
            outcomes += peer.read(
                request, DenseBlocks(memory.reshape(-1, SHAPE.layers, SHAPE.layer_block_bytes)), control=control
            ).outcomes

        reading = threading.Thread(target=read)
        reading.start()
        end_s = time.monotonic() + WAIT_S
        while control.bytes_received < 2 << 20:
            assert time.monotonic() < end_s, "received bytes are not reported"
            time.sleep(0.001)
        control.cancel()
        reading.join(WAIT_S)
        assert not reading.is_alive()
        assert set(outcomes) <= {Outcome.HIT, Outcome.UNAVAILABLE, Outcome.TIMEOUT}
        assert len(outcomes) == COUNT
        memory[:] = 0xA5
        proxy.cut()
        time.sleep(0.05)
        assert (memory == 0xA5).all()
    proxy.to_client.stall_after = None
    request = ReadRequest(NAMESPACE, keys, 0, SHAPE.layers, 0, time.monotonic() + WAIT_S)
    assert (
        peer.read(request, DenseBlocks(memory.reshape(-1, SHAPE.layers, SHAPE.layer_block_bytes))).outcomes
        == [Outcome.HIT] * COUNT
    ), "the breaker must not be open"
    assert [bytes(row) for row in memory] == [block_payload(number, SHAPE) for number in range(COUNT)]
    peer.close()
    proxy.stop()
    server.stop()


def test_read_cancelled_before_begin_reads_nothing() -> None:
    provider = MemoryProvider()
    provider.declare(NAMESPACE, SHAPE)
    provider.put(NAMESPACE, range(4))
    server = TcpServer(provider)
    server.start()
    peer = TcpPeer(server.address)
    control = ReadControl()
    control.cancel()
    memory = np.zeros((4, SHAPE.block_bytes), np.uint8)
    request = ReadRequest(NAMESPACE, [block_key(number) for number in range(4)], 0, 4, 0, time.monotonic() + WAIT_S)
    assert (
        Outcome.HIT
        not in peer.read(
            request, DenseBlocks(memory.reshape(-1, SHAPE.layers, SHAPE.layer_block_bytes)), control=control
        ).outcomes
    )
    assert not memory.any()
    peer.close()
    server.stop()


def start_read(peer: TcpPeer, control: ReadControl) -> tuple[threading.Thread, list[Outcome]]:
    """Start a read of two blocks in a thread; return it with the outcomes that it will have."""
    outcomes: list[Outcome] = []
    memory = np.zeros((2, SHAPE.layers, SHAPE.layer_block_bytes), np.uint8)
    request = ReadRequest(NAMESPACE, [block_key(0), block_key(1)], 0, SHAPE.layers, 0, time.monotonic() + 60.0)

    def read() -> None:
        outcomes.extend(peer.read(request, DenseBlocks(memory), control=control).outcomes)

    reading = threading.Thread(target=read)
    reading.start()
    return reading, outcomes


@pytest.mark.parametrize("tls", [None, PeerTls(TlsConfig())], ids=["hello", "tls"])
def test_read_cancelled_during_handshake_returns(tls: PeerTls | None) -> None:
    """A peer accepts the connection and never answers."""
    control, counters = ReadControl(), Counters()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = TcpPeer(f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout_s=50.0, counters=counters, tls=tls)
        reading, outcomes = start_read(peer, control)
        with silent.accept()[0] as accepted:
            assert accepted.recv(1)
            control.cancel()
            reading.join(WAIT_S)
            assert not reading.is_alive()
        peer.close()
    assert outcomes == [Outcome.UNAVAILABLE] * 2
    assert counters.get("transport_peer_connect_failures_total") == 0, "the peer did not fail"


def test_read_cancelled_during_connect_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose queue of connections is full does not answer the SYN."""
    monkeypatch.setattr(connection_pool, "_TCP_CONNECT_S", 50.0)
    control, counters = ReadControl(), Counters()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        peer = TcpPeer(f"127.0.0.1:{full.getsockname()[1]}", connect_timeout_s=50.0, counters=counters)
        reading, outcomes = start_read(peer, control)
        threading.Timer(0.1, control.cancel).start()
        reading.join(WAIT_S)
        assert not reading.is_alive()
        peer.close()
    assert outcomes == [Outcome.UNAVAILABLE] * 2
    assert counters.get("transport_peer_connect_failures_total") == 0, "the peer did not fail"


def test_read_cancelled_while_connections_are_in_use_returns() -> None:
    first, second = ReadControl(), ReadControl()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = TcpPeer(f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout_s=50.0, max_connections=1)
        holding, _ = start_read(peer, first)
        with silent.accept()[0]:
            waiting, outcomes = start_read(peer, second)
            threading.Timer(0.1, second.cancel).start()
            waiting.join(WAIT_S)
            assert not waiting.is_alive()
            assert holding.is_alive()
            first.cancel()
            holding.join(WAIT_S)
        peer.close()
    assert outcomes == [Outcome.UNAVAILABLE] * 2
