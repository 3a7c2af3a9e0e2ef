"""Peers that fail a TLS handshake at a gRPC port are counted and named; peers with calls are not."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from certificates import CertificateFiles, make_certificates
from kvstore.core.errors import Unavailable
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.process.tls import TlsConfig
from kvstore.rpc import tls_connections
from kvstore.rpc.client import call_aio, connect_aio
from kvstore.rpc.server import build_aio_server
from kvstore.rpc.tls_connections import TlsConnections, parse_peer, peers_of_port

WAIT_S = 20.0
UNUSED = "rpc_tls_connections_without_call_total"


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return make_certificates(tmp_path)


@pytest.fixture
async def served(files: CertificateFiles, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, Counters]]:
    monkeypatch.setattr(tls_connections, "SCAN_INTERVAL_S", 0.0)
    monkeypatch.setattr(tls_connections, "_limited", LimitedLog(logging.getLogger("kvstore.rpc.tls_connections"), 0.0))
    monkeypatch.setattr(TlsConnections.__init__, "__defaults__", (0.5,))
    counters = Counters()
    tls = TlsConfig(files.ca, files.cert, files.key, require_client_cert=True)
    server = await build_aio_server([], addresses=["127.0.0.1:0"], services=[], counters=counters, tls=tls)
    await server.start()
    yield server.addresses[0], counters
    await server.stop(0.0)


async def ask(address: str, tls: TlsConfig | None) -> None:
    async with connect_aio(address, tls=tls, own_connection=True) as channel:
        await call_aio(health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest(), WAIT_S)


async def test_handshake_failed_names_the_peer(
    served: tuple[str, Counters], files: CertificateFiles, caplog: pytest.LogCaptureFixture
) -> None:
    address, counters = served
    with pytest.raises(Unavailable):
        await ask(address, TlsConfig(files.ca))
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as stranger:  # a connection without a word of TLS
        own = stranger.getsockname()[1]
        end_s = asyncio.get_running_loop().time() + WAIT_S
        while counters.get(UNUSED) < 2:
            assert asyncio.get_running_loop().time() < end_s, caplog.messages
            await asyncio.sleep(0.05)
    lines = [line for line in caplog.messages if "without a call" in line]
    assert any(f"peer=127.0.0.1:{own}, port={port}" in line for line in lines)


@pytest.mark.parametrize("look_s", [0.0, 0.3], ids=["each is seen at once", "most are seen late"])
async def test_peer_with_calls_is_not_counted(
    served: tuple[str, Counters],
    files: CertificateFiles,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    look_s: float,
) -> None:
    monkeypatch.setattr(tls_connections, "SCAN_INTERVAL_S", look_s)
    address, counters = served
    ours = files.client()
    for _ in range(5):
        await ask(address, ours)
    async with connect_aio(address, tls=ours, own_connection=True) as idle:  # calls once, and stays
        await call_aio(health_pb2_grpc.HealthStub(idle).Check, health_pb2.HealthCheckRequest(), WAIT_S)
        host, port = address.split(":")
        end_s = asyncio.get_running_loop().time() + WAIT_S
        strangers: list[socket.socket] = []
        while not counters.get(UNUSED):
            assert asyncio.get_running_loop().time() < end_s
            strangers.append(socket.create_connection((host, int(port))))
            await asyncio.sleep(0.2)
        theirs = {f"peer=127.0.0.1:{one.getsockname()[1]}," for one in strangers}
        for stranger in strangers:
            stranger.close()
    named = [line for line in caplog.messages if "without a call" in line]
    assert [line for line in named if not any(peer in line for peer in theirs)] == []


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_peers_of_a_port_are_those_connected(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((host, port)) as client:
            accepted, _ = listener.accept()
            with accepted:
                assert set(peers_of_port(port)) == {(host, client.getsockname()[1])}


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("ipv4:127.0.0.1:4711", ("127.0.0.1", 4711)),
        ("ipv6:%5B::1%5D:4711", ("::1", 4711)),
        ("ipv6:[::ffff:10.0.0.1]:1", ("10.0.0.1", 1)),
        ("unix:", ("", 0)),
    ],
)
def test_peer_of_grpc_is_read(peer: str, expected: tuple[str, int]) -> None:
    assert parse_peer(peer) == expected
