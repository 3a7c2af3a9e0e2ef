"""The transport suite over TCP, in clear text and with TLS."""

from __future__ import annotations

import ssl
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.core.errors import DeadlineExceeded, InvalidArgument, Unavailable
from kvstore.core.limits import MAX_HELD_CONNECTIONS
from kvstore.core.tls import TlsConfig
from kvstore.core.types import BlockShape
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.testing.certificates import make_certificates
from kvstore.testing.memory_provider import MemoryProvider
from kvstore.testing.transport_suite import NAMESPACE, TransportSuite, ask, dense, write_of
from kvstore.transport import tcp_server
from kvstore.transport.contract import BlockPeer, BlockProvider
from kvstore.transport.tcp_peer import TcpPeer
from kvstore.transport.tcp_server import TcpServer
from kvstore.transport.tickets import TicketAuthority
from kvstore.transport.tls import ssl_context


class TestTcp(TransportSuite):
    streams = 3
    server_tls: ssl.SSLContext | None = None
    client_tls: ssl.SSLContext | None = None

    def serve(self, provider: BlockProvider, authority: TicketAuthority | None = None) -> TcpServer:
        server = TcpServer(provider, authority=authority, tls=self.server_tls)
        server.start()
        return server

    def connect(self, served: TcpServer, ticket: bytes = b"") -> BlockPeer:
        return TcpPeer(served.address, ticket=ticket, streams=self.streams, cores=2 * self.streams, tls=self.client_tls)


def test_writes_layer_by_layer_are_bounded_by_themselves() -> None:
    """One more than there is room for waits for one that ends, no longer than its deadline."""
    shape, provider = BlockShape(1, 100), MemoryProvider()
    provider.declare(NAMESPACE, shape)
    server = TcpServer(provider)
    server.start()
    peer = TcpPeer(server.address)
    try:
        writes = [peer.begin_write(write_of([number], shape)) for number in range(MAX_HELD_CONNECTIONS)]
        with pytest.raises(DeadlineExceeded):
            peer.begin_write(replace(write_of([99], shape), deadline_s=time.monotonic() + 0.05))
        writes.pop().abort()
        writes.append(peer.begin_write(write_of([99], shape)))
        for write in writes:
            write.abort()
    finally:
        peer.close()
        server.stop()


class TestTls(TestTcp):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def contexts(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        files = make_certificates(tmp_path_factory.mktemp("tls"))
        mutual = TlsConfig(ca=files.ca, cert=files.cert, key=files.key, require_client_cert=True)
        cls.server_tls = ssl_context(mutual, server_side=True)
        cls.client_tls = ssl_context(TlsConfig(ca=files.ca, cert=files.cert, key=files.key), server_side=False)


def test_strangers_do_not_get_past_tls(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither side talks to one that its own authority does not vouch for, nor to one that does not speak TLS."""
    monkeypatch.setattr(tcp_server, "limited", LimitedLog(tcp_server.log, interval_s=0.0))
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    ours, theirs = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "theirs")
    shape = BlockShape(1, 100)
    provider, counters = MemoryProvider(), Counters()
    provider.declare(NAMESPACE, shape)
    server_config = TlsConfig(ca=ours.ca, cert=ours.cert, key=ours.key, require_client_cert=True)
    server = TcpServer(provider, tls=ssl_context(server_config, server_side=True), counters=counters)
    server.start()
    try:
        strangers = {
            "another authority": TlsConfig(ca=theirs.ca, cert=ours.cert, key=ours.key),
            "no certificate": TlsConfig(ca=ours.ca),
            "a foreign certificate": TlsConfig(ca=ours.ca, cert=theirs.cert, key=theirs.key),
        }
        contexts = {name: ssl_context(config, server_side=False) for name, config in strangers.items()}
        for tls in (*contexts.values(), None):
            peer = TcpPeer(server.address, tls=tls)
            with pytest.raises(Unavailable):
                peer.read(ask([1], 1), dense(1, shape))
            peer.close()
        good = ssl_context(TlsConfig(ca=ours.ca, cert=ours.cert, key=ours.key), server_side=False)
        wrong_name = TcpPeer(server.address, tls=good, server_name="elsewhere.example")
        with pytest.raises(Unavailable):
            wrong_name.read(ask([1], 1), dense(1, shape))
        named = TcpPeer(server.address, tls=good, server_name="localhost")
        assert named.ping(time.monotonic() + 10) > 0
        named.close()
        wrong_name.close()
    finally:
        server.stop()
    assert not provider.requests
    assert counters.snapshot()["transport_tls_failures_total"] >= 3
    refused = [record.getMessage() for record in caplog.records if "TLS handshake failed" in record.getMessage()]
    assert len(refused) >= 3
    assert all("(peer=127.0.0.1:" in line and "reason=" in line for line in refused), refused


def test_unusable_tls_files_are_told(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    with pytest.raises(InvalidArgument):
        ssl_context(TlsConfig(), server_side=True)
    with pytest.raises(InvalidArgument):
        ssl_context(TlsConfig(ca=tmp_path / "missing.pem"), server_side=False)
    with pytest.raises(InvalidArgument):
        ssl_context(TlsConfig(cert=files.key, key=files.cert), server_side=True)
