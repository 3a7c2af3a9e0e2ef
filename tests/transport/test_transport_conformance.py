"""The transport suite over TCP, in clear text and with TLS."""

from __future__ import annotations

import ssl
import time
from dataclasses import replace
from pathlib import Path

import pytest

from certificates import SERVER_NAME, make_certificates
from kvstore.core.errors import DeadlineExceeded, InvalidArgument, Unavailable
from kvstore.core.limits import MAX_DEPTH, MAX_HELD_CONNECTIONS, MAX_KEYS_PER_CALL
from kvstore.core.types import BlockShape, Outcome
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.process.tls import TlsConfig
from kvstore.testing.memory_provider import MemoryProvider
from kvstore.testing.transport_suite import NAMESPACE, TransportSuite, dense, read_of, write_of
from kvstore.transport.contract import BlockPeer, BlockProvider
from kvstore.transport.tcp import server as tcp_server
from kvstore.transport.tcp.peer import TcpPeer
from kvstore.transport.tcp.server import TcpServer
from kvstore.transport.tickets import TicketAuthority
from kvstore.transport.tls import PeerTls, server_context


class TestTcp(TransportSuite):
    streams = 3
    server_tls: ssl.SSLContext | None = None
    client_tls: PeerTls | None = None

    def serve(self, provider: BlockProvider, authority: TicketAuthority | None = None) -> TcpServer:
        server = TcpServer(provider, authority=authority, tls=self.server_tls)
        server.start()
        return server

    def connect(self, served: TcpServer, ticket: bytes = b"") -> BlockPeer:
        return TcpPeer(served.address, ticket=ticket, streams=self.streams, cores=2 * self.streams, tls=self.client_tls)


def test_layer_writes_beyond_limit_wait_for_free_one() -> None:
    """A layer-wise write above the limit waits until another one ends, but no longer than its deadline."""
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
        cls.server_tls = server_context(files.server())
        cls.client_tls = PeerTls.of(files.client())


def test_tls_untrusted_peers_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides refuse peers whose certificate their authority did not sign, and peers without TLS."""
    monkeypatch.setattr(tcp_server, "limited", LimitedLog(tcp_server.log, interval_s=0.0))
    ours, theirs = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "theirs")
    shape = BlockShape(1, 100)
    provider, counters = MemoryProvider(), Counters()
    provider.declare(NAMESPACE, shape)
    server = TcpServer(provider, tls=server_context(ours.server()), counters=counters)
    server.start()
    try:
        untrusted = {
            "another authority": replace(ours.client(), ca=theirs.ca),
            "no certificate": TlsConfig(ca=ours.ca, server_name=SERVER_NAME),
            "a foreign certificate": replace(ours.client(), cert=theirs.cert, key=theirs.key),
            "another name": ours.client("elsewhere.example"),
            "no name, connected by address": ours.client(None),
            "clear text": None,
        }
        for config in untrusted.values():
            peer = TcpPeer(server.address, tls=PeerTls.of(config))
            with pytest.raises(Unavailable):
                peer.read(read_of([1], 1), dense(1, shape))
            peer.close()
        assert not provider.requests
        named = TcpPeer(server.address, tls=PeerTls.of(ours.client()))
        assert named.read(read_of([1], 1), dense(1, shape)).outcomes == [Outcome.MISS]
        named.close()
    finally:
        server.stop()
    assert counters.snapshot()["transport_tls_failures_total"] >= 3
    refused = [record.getMessage() for record in caplog.records if "TLS handshake failed" in record.getMessage()]
    assert len(refused) >= 3
    assert all("(peer=127.0.0.1:" in line and "reason=" in line for line in refused), refused


def test_tls_unusable_files_are_refused(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    with pytest.raises(InvalidArgument):
        server_context(TlsConfig())
    with pytest.raises(InvalidArgument):
        PeerTls.of(TlsConfig(ca=tmp_path / "missing.pem"))
    with pytest.raises(InvalidArgument):
        server_context(TlsConfig(cert=files.key, key=files.cert))


def test_peer_call_beyond_limits_names_the_limit() -> None:
    shape, peer = BlockShape(1, 64), TcpPeer("127.0.0.1:1")
    with pytest.raises(InvalidArgument, match="more keys than blocks in the destination"):
        peer.read(read_of(range(2), 1), dense(1, shape))
    count = MAX_KEYS_PER_CALL + 1
    with pytest.raises(InvalidArgument, match=f"too many keys for one read .*limit={MAX_KEYS_PER_CALL}"):
        peer.read(read_of(range(count), 1), dense(count, shape))
    write = write_of(range(2), shape)
    with pytest.raises(InvalidArgument, match=f"chain too long.*limit={MAX_DEPTH}"):
        peer.write(replace(write, run=replace(write.run, depth=MAX_DEPTH)), dense(2, shape))
    peer.close()
