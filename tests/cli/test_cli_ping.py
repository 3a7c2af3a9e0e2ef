"""``kvstore ping`` against real servers: round trips, kinds, and the cause if a server does not answer."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from certificates import SERVER_NAME, CertificateFiles, make_certificates
from kvstore.cli.app import root
from kvstore.cli.ping.command import ping_all
from kvstore.cli.ping.round_trips import PingOutcome, PingTarget, ServerKind
from kvstore.embedded.cluster import LocalCluster, NodeSpec

TOKEN = "operators-token-1"
NOWHERE = ("--set", "admin.listen=none", "--set", "router.listen=127.0.0.1:0")


def ping(*arguments: str, code: int) -> list[dict[str, Any]]:
    done = CliRunner().invoke(root, ["ping", "--count", "3", "-o", "json", *arguments])
    assert done.exit_code == code, done.output
    answer = json.loads(done.stdout)
    assert answer["ok"] == (code == 0)
    servers: list[dict[str, Any]] = answer["servers"]
    return servers


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster([NodeSpec("a", dram_bytes=32 << 20)], tmp_path_factory.mktemp("store")) as cluster:
        yield cluster


def test_ping_measures_metadata_server_and_nodes(store: LocalCluster) -> None:
    metadata, node = ping("--metadata", store.metadata_address, *NOWHERE, code=0)
    assert (metadata["server"], node["server"], node["name"]) == ("metadata server", "node", "a")
    for server in (metadata, node):
        assert server["count"] == 3
        assert 0 < server["min_ms"] <= server["median_ms"] <= server["max_ms"]


def test_ping_admin_server_is_found(store: LocalCluster) -> None:
    admin = store.start_admin()
    try:
        servers = ping("--metadata", store.metadata_address, "--set", f"admin.listen={admin.address}", *NOWHERE[2:], code=0)
        (given,) = ping(admin.address, code=0)
    finally:
        store.stop("admin")
    assert [server["server"] for server in servers] == ["metadata server", "node", "admin server"]
    assert given["server"] == "admin server"


def test_ping_table_has_a_line_per_server(store: LocalCluster) -> None:
    done = CliRunner().invoke(root, ["ping", "--metadata", store.metadata_address, *NOWHERE])
    assert (done.exit_code, done.stderr) == (0, "")
    heading, metadata, node = done.stdout.splitlines()
    assert heading.split() == ["SERVER", "NAME", "ADDRESS", "COUNT", "MIN", "MEDIAN", "MAX", "RESULT"]
    assert metadata.endswith("answered")
    assert node.split()[:2] == ["node", "a"]


def test_ping_address_finds_the_kind_of_server(store: LocalCluster) -> None:
    local = store.node("a").local_socket
    first, second = ping(local, store.metadata_address, code=0)
    assert (first["server"], first["name"], second["server"]) == ("node", "a", "metadata server")


def test_ping_node_as_metadata_server_is_noticed(store: LocalCluster) -> None:
    (server,) = ping("--metadata", store.node("a").local_socket, *NOWHERE, code=1)
    assert server["detail"] == "it is a node, not a metadata server"


def test_ping_closed_port_is_refused() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        (server,) = ping(f"127.0.0.1:{sock.getsockname()[1]}", code=1)
    assert server["detail"] == "connection refused"


def test_ping_silent_port_does_not_answer() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        (server,) = ping(f"127.0.0.1:{sock.getsockname()[1]}", "--timeout", "300ms", code=1)
    assert "no answer within" in server["detail"] or "did not answer" in server["detail"]


def test_ping_stopped_node_does_not_answer(tmp_path: Path) -> None:
    with LocalCluster([NodeSpec("a", dram_bytes=32 << 20)], tmp_path) as cluster:
        process = cluster.node("a").process.pid
        os.kill(process, signal.SIGSTOP)
        try:
            metadata, node = ping("--metadata", cluster.metadata_address, "--timeout", "500ms", *NOWHERE, code=1)
        finally:
            os.kill(process, signal.SIGCONT)
    assert metadata["outcome"] == "answered"
    assert (node["name"], node["outcome"]) == ("a", "failed")
    assert "answer" in node["detail"]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, CertificateFiles, Path]]:
    """Start a metadata server with TLS and tokens."""
    folder = tmp_path_factory.mktemp("secured")
    files = make_certificates(folder)
    tokens, token = folder / "tokens", folder / "token"
    for file, text in ((tokens, f"operator alice {TOKEN}\n"), (token, TOKEN)):
        file.touch(mode=0o600)
        file.write_text(text)
    settings = [("tls.cert", str(files.cert)), ("tls.key", str(files.key)), ("tokens_file", str(tokens))]
    with LocalCluster([], folder / "data", metadata_settings=settings) as cluster:
        yield cluster.metadata_address, files, token


def test_ping_plain_text_to_tls_is_noticed(secured: tuple[str, CertificateFiles, Path]) -> None:
    (server,) = ping(secured[0], code=1)
    assert server["detail"] == "it speaks TLS and [client.tls] is not set"


def test_ping_token_rejected_exits_3(secured: tuple[str, CertificateFiles, Path]) -> None:
    address, files, token = secured
    tls = ("--set", f"client.tls.ca={files.ca}", "--set", f"client.tls.server_name={SERVER_NAME}")
    (server,) = ping(address, *tls, code=3)
    assert server["outcome"] == "refused"
    assert "client.token_file is not set" in server["detail"]
    (server,) = ping(address, *tls, "--set", f"client.token_file={token}", code=0)
    assert server["count"] == 3


def test_ping_other_http_server_is_noticed(store: LocalCluster) -> None:
    (server,) = ping(f"http://{store.node('a').metrics_address}", code=1)
    assert server["detail"] == "it is an HTTP server, but neither an admin server nor a router of kvstore"


@pytest.mark.parametrize("address", ["http://127.0.0.1:99999", "http://a..b", f"http://{'a' * 70}:80"])
def test_ping_impossible_url_is_reported(address: str) -> None:
    (server,) = ping(address, code=1)
    assert server["detail"].startswith("it is not an address: ")


@pytest.mark.parametrize("address", ["http://127.0.0.1:99999", "https://127.0.0.1:9", "127.0.0.1:99999", "a..b:80", "h:\u00b2"])
def test_ping_registered_address_is_not_a_url(address: str) -> None:
    """A node may register any address: others are still shown, and no URL is requested."""
    target = PingTarget(address=address, kind=ServerKind.NODE, name="a")
    (result,) = ping_all([target], 1, 0.5)
    assert (result.outcome, result.kind) == (PingOutcome.FAILED, ServerKind.NODE)
    assert "HTTP" not in result.detail


class _ClosesEachTime(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"status": "ok"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Write nothing."""


def test_ping_reconnects_with_tls(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    with ThreadingHTTPServer(("127.0.0.1", 0), _ClosesEachTime) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            tls = ("--set", f"client.tls.ca={files.ca}", "--set", f"client.tls.server_name={SERVER_NAME}")
            (found,) = ping(f"https://127.0.0.1:{server.server_port}", *tls, code=0)
        finally:
            server.shutdown()
            thread.join()
    assert (found["server"], found["count"]) == ("admin server", 3)
