"""Diagnosis of unreachable servers: real gRPC servers, real TLS, and servers without gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from certificates import SERVER_NAME, CertificateFiles, make_certificates
from kvstore.core.errors import DeadlineExceeded, KVStoreError, Unauthenticated, Unavailable
from kvstore.observe.counters import Counters
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.diagnosis import Diagnoser, Target, diagnose
from kvstore.rpc.server import build_aio_server

WAIT_S = 20.0


@contextmanager
def serving(tls: TlsConfig | None, address: str = "127.0.0.1:0") -> Iterator[str]:
    """Address of a gRPC server of this project."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[str, object]:
        made = await build_aio_server([], addresses=[address], services=[], counters=Counters(), tls=tls)
        await made.start()
        return made.addresses[0], made

    bound, server = asyncio.run_coroutine_threadsafe(start(), loop).result(WAIT_S)
    try:
        yield bound
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0.0), loop).result(WAIT_S)  # type: ignore[attr-defined]
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.close()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return make_certificates(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return make_certificates(tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module")
def mutual(ours: CertificateFiles) -> Iterator[str]:
    with serving(TlsConfig(ours.ca, ours.cert, ours.key, require_client_cert=True)) as address:
        yield address


def why(address: str, tls: TlsConfig | None) -> str | None:
    return diagnose(address, tls, "[client.tls]", WAIT_S)


def test_diagnose_matching_tls_finds_nothing(mutual: str, ours: CertificateFiles) -> None:
    assert why(mutual, ours.client()) is None


def test_diagnose_plain_text_to_tls_says_so(mutual: str) -> None:
    assert why(mutual, None) == "it speaks TLS and [client.tls] is not set"


def test_diagnose_foreign_ca_names_the_file(mutual: str, ours: CertificateFiles, theirs: CertificateFiles) -> None:
    found = why(mutual, TlsConfig(theirs.ca, ours.cert, ours.key, server_name=SERVER_NAME))
    assert found == f"its certificate is not signed by [client.tls] ca {theirs.ca}"


def test_diagnose_no_client_certificate_says_required(mutual: str, ours: CertificateFiles) -> None:
    assert why(mutual, TlsConfig(ours.ca, server_name=SERVER_NAME)) == "it requires a client certificate ([client.tls] cert, key)"


def test_diagnose_foreign_client_certificate_says_refused(mutual: str, ours: CertificateFiles, theirs: CertificateFiles) -> None:
    found = why(mutual, TlsConfig(ours.ca, theirs.cert, theirs.key, server_name=SERVER_NAME))
    assert found is not None
    assert found.startswith(f"it does not accept the client certificate {theirs.cert}")


def test_diagnose_other_name_lists_the_names(mutual: str, ours: CertificateFiles) -> None:
    expected = "its certificate is for 'kvstore', expected {!r}: set [client.tls] server_name"
    assert why(mutual, ours.client("another")) == expected.format("another")
    assert why(mutual, ours.client(None)) == expected.format("127.0.0.1")


def test_diagnose_tls_to_plain_text_says_so(ours: CertificateFiles) -> None:
    with serving(None) as address:
        assert why(address, TlsConfig(ours.ca)) == "it does not speak TLS and [client.tls] is set"
        assert why(address, None) is None


def test_diagnose_closed_port_says_refused(ours: CertificateFiles) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        assert why(address, None) == "connection refused"
        assert why(address, TlsConfig(ours.ca)) == "connection refused"


def test_diagnose_missing_unix_socket_names_it(tmp_path: Path) -> None:
    assert why(f"unix:{tmp_path}/gone.sock", None) == f"nothing listens on {tmp_path}/gone.sock"


def test_diagnose_unknown_host_names_it() -> None:
    assert why("no-such-host.invalid:1", None) == "the host name no-such-host.invalid is not known"
    assert why("a..b:1", None) == "the host name a..b is not known"


@pytest.mark.parametrize("stays", [False, True])
def test_diagnose_server_that_ends_blames_no_certificate(ours: CertificateFiles, stays: bool) -> None:
    """A server that is killed in a handshake resets the connection, and refuses the next one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reset() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                if not stays:
                    listener.close()
                connection.recv(1)  # the handshake has begun
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()

        thread = threading.Thread(target=reset)
        thread.start()
        found = why(f"127.0.0.1:{listener.getsockname()[1]}", ours.client())
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
    thread.join(WAIT_S)
    assert found == ("it closed the connection during the TLS handshake" if stays else "connection refused")


def test_diagnose_silent_server_ends_in_time(ours: CertificateFiles) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts connections but sends nothing
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert diagnose(address, None, "", 0.2) == "no answer within 0.2 s"
        assert diagnose(address, TlsConfig(ours.ca), "", 0.2) == "no answer within 0.2 s"


def test_diagnose_http_server_says_no_grpc_port() -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = why(f"127.0.0.1:{server.server_port}", None)
        server.shutdown()
    assert found in ("it is an HTTP server, not a gRPC port", "it is not a gRPC port")


def target(address: str, token: TokenSource | None = None) -> Target:
    return Target("the metadata server", address, None, token, "[client.tls]", "client.token_file")


def test_explain_unreachable_keeps_the_class(tmp_path: Path) -> None:
    gone = target(f"unix:{tmp_path}/gone.sock")
    told = gone.explain(Unavailable("Socket closed"))
    assert isinstance(told, Unavailable)
    assert told.message == f"cannot reach the metadata server at {gone.address}: nothing listens on {tmp_path}/gone.sock"


def test_explain_answering_server_keeps_its_words() -> None:
    with serving(None) as address:
        own = Unavailable("the index takes no changes")
        assert target(address).explain(own) is own
        late = target(address).explain(DeadlineExceeded("Deadline Exceeded"))
        assert late.message.endswith("it accepts connections, but did not answer in time")


def test_explain_unauthenticated_names_the_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-some-length")
    file.chmod(0o600)

    def told(token: TokenSource | None) -> str:
        return target("127.0.0.1:1", token).explain(Unauthenticated("no")).message

    at = "the metadata server at 127.0.0.1:1"
    assert told(None) == f"a token is required by {at} (client.token_file is not set)"
    assert told(TokenSource(file=file)) == f"the token in {file} is not known to {at}"
    assert told(TokenSource("another-token-of-length")) == f"the token given is not known to {at}"


def test_diagnoser_repeated_failure_connects_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[KVStoreError] = []
    now = [0.0]

    def explain(_self: Target, error: KVStoreError, _timeout_s: float) -> KVStoreError:
        asked.append(error)
        return Unavailable(f"explained {len(asked)}")

    monkeypatch.setattr(Target, "explain", explain)
    found = Diagnoser(target("127.0.0.1:1"), 30.0, lambda: now[0])
    failure = Unavailable("Socket closed")
    assert found.known(failure) is failure
    assert [found.explain(failure).message for _ in range(3)] == ["explained 1"] * 3
    assert found.known(Unavailable("again")).message == "explained 1"
    now[0] = 30.0
    assert found.explain(failure).message == "explained 2"
    found.answered()
    assert found.explain(failure).message == "explained 3"
