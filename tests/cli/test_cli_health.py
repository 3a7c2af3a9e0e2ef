"""``kvstore health`` succeeds only while a daemon serves."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from certificates import make_certificates
from kvstore.cli.app import root
from kvstore.embedded.cluster import LocalCluster, NodeSpec


@pytest.fixture
def other_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A node of this user that runs beside the test."""
    with tempfile.TemporaryDirectory(prefix="kvh-") as name, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        folder = Path(name) / "kvstore" / "other"
        folder.mkdir(parents=True)
        listener.bind(str(folder / "other.sock"))
        listener.listen()
        yield


def health(*arguments: str) -> Result:
    return CliRunner().invoke(root, ["health", *arguments])


@pytest.mark.usefixtures("other_node")
def test_health_mutual_tls_metadata_and_node(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path / "pki").settings()
    with LocalCluster([NodeSpec("a", settings=tls)], tmp_path / "store", metadata_settings=tls) as cluster:
        metadata = [f"metadata.{name}={value}" for name, value in (*tls, ("listen", cluster.metadata_address))]
        node = ["node.node_id=a", f"node.run_dir={Path(cluster.node('a').local_socket.removeprefix('unix:')).parent}"]

        def asked(daemon: str, settings: list[str]) -> Result:
            return health(daemon, *(part for setting in settings for part in ("--set", setting)))

        assert (asked("metadata", metadata).output, asked("node", node).output) == ("metadata: serves\n", "node: serves\n")
        assert asked("node", node[1:]).output == "node: serves\n", "the only node of the folder is asked if none is configured"
        stranger = asked("metadata", [setting for setting in metadata if ".tls." not in setting])
        assert stranger.exit_code == 1
        cluster.kill("a")
        gone = asked("node", node)
        assert gone.exit_code == 1
        assert gone.output.startswith("Error: node: ")


def test_health_admin_follows_metadata_server(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("read bob readers-token-2-x\n")
    ours = make_certificates(tmp_path / "pki").settings()
    with LocalCluster([], tmp_path / "store") as cluster:
        settings = [
            *ours,
            ("tokens_file", str(tokens)),
            ("listen", cluster.start_admin(*ours, ("tokens_file", str(tokens))).address),
        ]

        def asked(settings: list[tuple[str, str]], *more: str) -> Result:
            return health("admin", *more, *(part for name, value in settings for part in ("--set", f"admin.{name}={value}")))

        assert asked(settings).output == "admin: serves\n"
        assert asked([one for one in settings if one[0] != "tls.require_client_cert"]).exit_code == 1, "it wants a certificate"
        cluster.stop("metadata")
        without = asked(settings)
        assert (without.exit_code, without.output) == (1, "Error: admin: running, but not serving\n")
        told = asked(settings, "-o", "json")
        assert json.loads(told.stdout) == {
            "daemon": "admin",
            "serves": False,
            "local_only": False,
            "detail": "running, but not serving",
        }
        cluster.kill("admin")
        assert asked(settings).output.startswith("Error: admin: ")


@pytest.fixture
def front() -> Iterator[tuple[str, list[int]]]:
    """Fake router that answers with the status in the list."""
    status = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status[0] if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(json.dumps({}).encode())

        def log_message(self, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", status
        server.shutdown()


def test_health_router_follows_engines(front: tuple[str, list[int]]) -> None:
    address, status = front
    port = address.rpartition(":")[2]
    everywhere = ("--set", f"router.listen=0.0.0.0:{port}")  # queried through loopback
    assert health("router", *everywhere).output == "router: serves\n"
    status[0] = 503
    without = health("router", *everywhere)
    assert (without.exit_code, without.output) == (1, "Error: router: running, but not serving\n")


def test_health_unknown_address_is_reported() -> None:
    nowhere = health("metadata", "--set", "metadata.listen=127.0.0.1:0")
    assert nowhere.exit_code == 1
    assert "any free port" in nowhere.output
    assert health("engine").exit_code == 2
