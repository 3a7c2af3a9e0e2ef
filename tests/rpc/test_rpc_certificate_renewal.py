"""Servers and data-plane clients use replaced certificate files without a restart, and never a pair that does not fit."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from starlette.responses import PlainTextResponse

from certificates import CertificateFiles, make_certificates
from kvstore.process import tls as tls_files
from kvstore.process.tls import TlsConfig
from kvstore.rpc import http_server
from kvstore.rpc.tls import server_credentials
from kvstore.transport.tls import PeerTls, server_context

WAIT_S = 10.0


@pytest.fixture(autouse=True)
def _checked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_files, "CHECK_S", 0.0)


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return make_certificates(tmp_path / "tls")


def presented(port: int) -> bytes:
    """The certificate that a server presents."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as sock, context.wrap_socket(sock) as secured:
        found = secured.getpeercert(binary_form=True)
    assert found is not None
    return found


def content(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


@contextmanager
def data_plane(tls: TlsConfig) -> Iterator[int]:
    """A server that performs handshakes, with the context of the data plane."""
    context = server_context(tls)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                sock.settimeout(WAIT_S)
                try:
                    with context.wrap_socket(sock, server_side=True) as secured:
                        secured.sendall(b"!")
                        secured.recv(1)
                except OSError:
                    sock.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(WAIT_S)


@contextmanager
def rpc_server(tls: TlsConfig) -> Iterator[int]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", server_credentials(tls, lambda: None))
    server.start()
    yield port
    server.stop(None).wait(WAIT_S)


@pytest.mark.parametrize("server", [data_plane, rpc_server])
def test_replaced_certificate_is_presented(server: object, files: CertificateFiles, tmp_path: Path) -> None:
    fresh = make_certificates(tmp_path / "fresh", authority=files)
    with server(TlsConfig(ca=files.ca, cert=files.cert, key=files.key)) as port:  # type: ignore[operator]
        old = presented(port)
        assert old == content(files.cert)
        shutil.copy(fresh.cert, files.cert)
        assert presented(port) == old, "the key does not fit yet"
        shutil.copy(fresh.key, files.key)
        assert presented(port) == content(fresh.cert) != old
        files.cert.unlink()
        assert presented(port) == content(fresh.cert), "a missing file"


async def test_replaced_certificate_is_presented_over_http(files: CertificateFiles, tmp_path: Path) -> None:
    fresh = make_certificates(tmp_path / "fresh", authority=files)
    tls = TlsConfig(cert=files.cert, key=files.key)
    listener, answer = http_server.bind("127.0.0.1:0", "admin.listen"), PlainTextResponse("ok")
    port = listener.getsockname()[1]
    serving = asyncio.create_task(
        http_server.serve(answer, listener, tls=tls, stop_grace_s=1.0, ready_file=None, malformed=lambda: answer)
    )
    try:
        assert await asyncio.to_thread(presented, port) == content(files.cert)
        shutil.copy(fresh.cert, files.cert)
        shutil.copy(fresh.key, files.key)
        assert await asyncio.to_thread(presented, port) == content(fresh.cert)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()


def test_unfitting_pair_is_logged_once(files: CertificateFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fresh = make_certificates(tmp_path / "fresh", authority=files)
    with data_plane(TlsConfig(cert=files.cert, key=files.key)) as port:
        shutil.copy(fresh.cert, files.cert)
        for _ in range(3):
            presented(port)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "TLS files not reloaded" in caplog.text


def test_replaced_authority_is_trusted_in_three_steps(files: CertificateFiles, tmp_path: Path) -> None:
    """Both authorities are trusted first, then the certificates are replaced, then the old authority is removed."""
    other = make_certificates(tmp_path / "other")
    old_copy = shutil.copytree(files.ca.parent, tmp_path / "old")
    old = CertificateFiles(*(old_copy / path.name for path in (files.ca, files.cert, files.key)))

    def accepted(port: int, client: PeerTls) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port), WAIT_S) as sock, client.wrap(sock, "127.0.0.1") as secured:
                return secured.recv(1) == b"!"  # TLS 1.3: the server refuses after the client's handshake
        except OSError:
            return False

    peer = PeerTls(files.client())
    with data_plane(files.server()) as port:
        assert accepted(port, peer)
        assert not accepted(port, PeerTls(other.client()))
        files.ca.write_bytes(old.ca.read_bytes() + other.ca.read_bytes())
        assert accepted(port, peer)
        shutil.copy(other.cert, files.cert)
        shutil.copy(other.key, files.key)
        assert accepted(port, peer)
        assert not accepted(port, PeerTls(old.client())), "it does not trust the new authority"
        shutil.copy(other.ca, files.ca)
        assert accepted(port, peer)
        trusting = TlsConfig(ca=other.ca, cert=old.cert, key=old.key, server_name="kvstore")
        assert not accepted(port, PeerTls(trusting)), "the server no longer trusts the old authority"
