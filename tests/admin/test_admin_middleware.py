"""Middleware of the admin server, without a store: authorization, limits and error responses."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from kvstore.admin.app import make_app
from kvstore.admin.etags import check_match
from kvstore.admin.main import store_endpoint
from kvstore.admin.middleware import AdminMiddleware
from kvstore.admin.pagination import after, cursor_for, page_of
from kvstore.admin.problems import PreconditionError
from kvstore.config.admin import AdminConfig
from kvstore.config.base import TlsSection
from kvstore.config.client import ClientSection
from kvstore.control_api.store_rpc import StoreRpc
from kvstore.core.errors import InvalidArgument
from kvstore.embedded.cluster import LocalCluster
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.rpc import http_server
from kvstore.rpc.auth.tokens import AccessRole, TokenTable, WatchedFile
from kvstore.rpc.auth.tokens import tokens_file as watched

RUNBOOK_RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "alerts.yml"
ALICE, BOB = "operators-token-1", "readers-token-2-x"
NOBODY = AdminConfig(metadata="127.0.0.1:1", timeout_ms=500)
"""Serve the application without a metadata server."""


@asynccontextmanager
async def application(
    counters: Counters, config: AdminConfig = NOBODY, tokens: WatchedFile[TokenTable] | None = None
) -> AsyncIterator[Any]:
    rpc = StoreRpc(store_endpoint(config), counters)
    yield make_app(rpc, config, tokens, counters)
    await rpc.close()


@asynccontextmanager
async def served(
    config: AdminConfig = NOBODY, tokens: WatchedFile[TokenTable] | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, Counters]]:
    counters = Counters()
    async with (
        application(counters, config, tokens) as app,
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:7470") as client,
    ):
        yield client, counters


async def test_runbook_has_the_target_of_each_alert(tmp_path: Path) -> None:
    """Alertmanager links to it, so it needs no token."""
    urls = re.findall(r'runbook_url: "(.*)#(.*)"', RUNBOOK_RULES.read_text(encoding="utf-8"))
    assert len(urls) > 10
    async with served(tokens=watched(tokens_file(tmp_path, f"operator alice {ALICE}\n"))) as (client, _):
        for path, fragment in urls:
            answer = await client.get(f"/{path}")
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            assert f'id="{fragment}"' in answer.text


def tokens_file(folder: Path, text: str) -> Path:
    file = folder / "tokens"
    file.write_text(text)
    file.chmod(0o600)
    return file


@pytest.fixture
def tokens(tmp_path: Path) -> WatchedFile[TokenTable]:
    return watched(tokens_file(tmp_path, f"# who\noperator alice {ALICE}\n\n  read bob   {BOB}\n"))


def problem(answer: httpx.Response, status: int, kind: str) -> Any:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["kind"] == kind
    assert body["status"] == status
    assert body["request_id"] == answer.headers["x-request-id"]
    return body


def test_token_table_returns_callers_of_tokens(tokens: WatchedFile[TokenTable]) -> None:
    alice, bob = tokens.get().caller(ALICE), tokens.get().caller(BOB)
    assert alice is not None
    assert bob is not None
    assert (alice.name, alice.role, bob.name, bob.role) == ("alice", AccessRole.OPERATOR, "bob", AccessRole.READ)
    for nobodys in ("", ALICE[:-1], ALICE + "x", ALICE.upper(), "\udc80"):
        assert tokens.get().caller(nobodys) is None


@pytest.mark.parametrize(
    "text",
    ["", "# nobody\n", "operator alice\n", "admin alice 0123456789abcdef\n", "read bob short\n", "read b/b 0123456789abcdef\n",
     f"read a {ALICE}\noperator b {ALICE}\n", "read bob 0123456789abcdéf0\n"],
)  # fmt: skip
def test_tokens_file_invalid_is_rejected(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        watched(tokens_file(tmp_path, text))
    assert "0123456789" not in str(refused.value)
    assert ALICE not in str(refused.value)


def test_tokens_file_readable_by_others_logs_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tokens_file(tmp_path, f"read bob {BOB}\n")
    watched(file)
    assert not caplog.records
    file.chmod(0o644)
    watched(file)
    assert "chmod 600" in caplog.text
    assert BOB not in caplog.text
    with pytest.raises(InvalidArgument, match="cannot be read"):
        watched(tmp_path / "none")


def test_tokens_file_not_regular_is_rejected_at_once(tmp_path: Path) -> None:
    """A pipe without a writer would block the start, and reading a device never ends."""
    pipe, folder, huge = tmp_path / "pipe", tmp_path / "folder", tmp_path / "huge"
    os.mkfifo(pipe)
    folder.mkdir()
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    for path, why in ((pipe, "not a regular file"), (folder, "not a regular file"), (Path("/dev/zero"), "not a regular file"),
                      (huge, "too long")):  # fmt: skip
        with pytest.raises(InvalidArgument, match=why):
            watched(path)
    link = tmp_path / "link"  # as Kubernetes mounts secrets
    link.symlink_to(tokens_file(tmp_path, f"read bob {BOB}\n"))
    assert watched(link).get().caller(BOB) is not None


def test_remote_listen_requires_tokens_and_tls(tmp_path: Path) -> None:
    for listen in ("0.0.0.0:7470", "[::]:7470", "store.example:7470"):
        with pytest.raises(InvalidArgument, match="requires tokens"):
            AdminConfig(listen=listen, allow_insecure_remote=True).check()
        with pytest.raises(InvalidArgument, match=r"requires TLS; set admin\.tls, or admin\.allow_insecure_remote"):
            AdminConfig(listen=listen, tokens_file=tmp_path).check()
        AdminConfig(listen=listen, tokens_file=tmp_path, allow_insecure_remote=True).check()
        AdminConfig(listen=listen, tokens_file=tmp_path, tls=TlsSection(cert=tmp_path, key=tmp_path)).check()
    with pytest.raises(InvalidArgument):
        AdminConfig(listen="unix:/x").check()
    for wrong in ({"timeout_ms": 0}, {"max_body_bytes": 1}, {"max_inflight": 0}):
        with pytest.raises(ValidationError):
            AdminConfig(**wrong)  # type: ignore[arg-type]


async def test_roles_limit_requests_and_changes_are_audited(
    tokens: WatchedFile[TokenTable], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    change = {"url": "/v1/path-policy", "json": {"policy": "split"}}
    async with served(tokens=tokens) as (client, counters):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {ALICE}"}, {"authorization": ALICE}):
            answer = await client.get("/v1/nodes", headers=headers)
            problem(answer, 401, "unauthenticated")
            assert "bearer" in answer.headers["www-authenticate"].lower()
        bob, alice = {"authorization": f"Bearer {BOB}"}, {"authorization": f"bearer  {ALICE}"}
        problem(await client.put(**change, headers=bob), 403, "permission_denied")
        problem(await client.delete("/v1/anything", headers=bob), 403, "permission_denied")
        # authorized: the missing metadata server is the error
        problem(await client.get("/v1/nodes", headers=bob), 503, "unavailable")
        problem(
            await client.post("/v1/blocks/lookup", json={"namespace_id": "0" * 32, "keys": []}, headers=bob), 503, "unavailable"
        )
        problem(await client.put(**change, headers=alice), 503, "unavailable")
        # public: no token required
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        problem(await client.get("/readyz"), 503, "unavailable")
        assert (await client.get("/v1/openapi.json")).status_code == 200
        problem(await client.get("/metrics"), 401, "unauthenticated")
        assert "kvstore_admin_requests_total" in (await client.get("/metrics", headers=bob)).text
        assert counters.snapshot()["admin_errors_unauthenticated_total"] == 5
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvstore.audit"]
    assert '"who": "alice"' in line
    assert '"outcome": "unavailable"' in line
    assert not any(token in record.getMessage() for record in caplog.records for token in (ALICE, BOB))


async def test_orders_name_the_caller_of_the_rest_api(tokens: WatchedFile[TokenTable], tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.write_text("operator admin-1 token-of-the-admin-server\nnode host-1 token-of-the-node\n")
    (tmp_path / "own").write_text("token-of-the-admin-server")
    with LocalCluster([], tmp_path / "store", metadata_settings=[("tokens_file", str(shown))]) as cluster:
        config = AdminConfig(metadata=cluster.metadata_address, client=ClientSection(token_file=tmp_path / "own"))
        async with served(config, tokens) as (client, _):
            client.headers["authorization"] = f"Bearer {ALICE}"
            for order in ("first", "second"):
                at = {"params": {"tenant": order}}
                quota = await client.get("/v1/tenants/quota", **at)
                match = {"if-match": quota.headers["etag"], "kv-on-behalf-of": "mallory"}
                wanted = {"dram_bytes": 1 << 30, "nvme_bytes": None}
                done = await client.put("/v1/tenants/quota", json=wanted, headers=match, **at)
                assert done.status_code == 200, done.text
            events = (await client.get("/v1/cluster-events")).json()["items"]
    assert [(one["subject"], one["who"]) for one in events if one["kind"] == "order"] == [
        ("first", "alice (via admin-1)"),
        ("second", "alice (via admin-1)"),
    ]


async def test_without_tokens_cross_origin_requests_are_rejected() -> None:
    async with served() as (client, _):
        problem(await client.get("/v1/nodes", headers={"host": "evil.example"}), 403, "permission_denied")
        problem(await client.get("/v1/nodes", headers={"host": "127.0.0.1.evil.example:7470"}), 403, "permission_denied")
        problem(await client.get("/v1/nodes", headers={"host": ""}), 403, "permission_denied")
        problem(await client.get("/v1/nodes", headers={"origin": "http://evil.example"}), 403, "permission_denied")
        problem(await client.get("/v1/nodes", headers={"origin": "null"}), 403, "permission_denied")
        problem(await client.get("/v1/nodes", headers={"origin": "http://["}), 403, "permission_denied")
        for host in ("127.0.0.1:7470", "localhost:7470", "[::1]:7470", "localhost"):
            problem(await client.get("/v1/nodes", headers={"host": host, "origin": f"http://{host}"}), 503, "unavailable")


async def test_limits_of_body_time_and_inflight_are_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(NOBODY.model_copy(update={"max_body_bytes": 1_024, "max_inflight": 1})) as (client, _):
        lookup = {"url": "/v1/blocks/lookup", "headers": {"content-type": "application/json"}}
        problem(await client.post(**lookup, content=b" " * 1_025), 413, "invalid_argument")

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b" " * 512

        problem(await client.post(**lookup, content=pieces()), 413, "invalid_argument")
        problem(await client.post(**lookup, content=b"[" * 1_000), 400, "invalid_argument")
        problem(await client.post(**lookup, content=b'{"namespace_id": NaN}'), 400, "invalid_argument")
        monkeypatch.setattr("kvstore.admin.middleware.BODY_S", 0.05)
        held = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b"{"
            held.set()
            await asyncio.Event().wait()

        late = asyncio.create_task(client.post(**lookup, content=slow()))
        await held.wait()
        refused = problem(await client.get("/v1/nodes"), 429, "capacity_exceeded")
        assert refused["retryable"]
        assert (await client.get("/healthz")).status_code == 200, "what is public has places of its own"
        problem(await late, 504, "deadline_exceeded")
        problem(await client.get("/v1/nodes"), 503, "unavailable")


@asynccontextmanager
async def listening(
    tokens: WatchedFile[TokenTable], config: AdminConfig
) -> AsyncIterator[tuple[str, int, Callable[[str], Awaitable[int]], Counters]]:
    """Serve on a real port, and yield a function that requests a path with the read token."""
    counters = Counters()
    rpc = StoreRpc(store_endpoint(config), counters)
    app = make_app(rpc, config, tokens, counters)
    listener = http_server.bind("127.0.0.1:0", "test")
    serving = asyncio.create_task(
        http_server.serve(app, listener, tls=None, stop_grace_s=1.0, ready_file=None, malformed=app.malformed)
    )
    host, port = listener.getsockname()

    async def ask(path: str) -> int:
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            return (await client.get(path, headers={"authorization": f"Bearer {BOB}"})).status_code

    try:
        yield host, port, ask, counters
    finally:
        signal.raise_signal(signal.SIGTERM)
        await serving
        await rpc.close()


def deaf(host: str, port: int, path: str) -> socket.socket:
    """Open a connection that sends many requests and reads no response."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.connect((host, port))
    sock.setblocking(False)
    with suppress(BlockingIOError):
        for _ in range(100):
            sock.send(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode() * 100)
    return sock


async def still(counters: Counters) -> None:
    """Wait until the server answers no more requests."""
    before = -1
    while (now := counters.get("admin_requests_total")) != before or not now:
        before = now
        await asyncio.sleep(0.2)


async def test_clients_that_stop_reading_block_no_others(tokens: WatchedFile[TokenTable]) -> None:
    async with listening(tokens, NOBODY.model_copy(update={"max_inflight": 2})) as (host, port, ask, counters):
        refused = [deaf(host, port, "/v1/nodes") for _ in range(4)]
        await still(counters)
        assert await ask("/v1/nodes") == 503, "let in, and the metadata server is not there"
        public = [deaf(host, port, "/v1/openapi.json") for _ in range(4)]
        await still(counters)
        assert await ask("/v1/nodes") == 503, "what is public has places of its own"
        for sock in (*refused, *public):
            sock.close()


async def test_client_that_stops_reading_is_disconnected(
    tokens: WatchedFile[TokenTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.admin.middleware.SEND_STALL_S", 0.1)
    async with listening(tokens, NOBODY) as (host, port, ask, counters):
        socks = [deaf(host, port, path) for path in ("/v1/nodes", "/v1/openapi.json")]
        loop = asyncio.get_running_loop()
        await still(counters)
        for sock in socks:
            with suppress(ConnectionError):
                while await loop.sock_recv(sock, 1 << 16):
                    pass  # data sent before the abort, then the end of the connection
            sock.close()
        assert counters.get("admin_answers_untaken_total") == 2
        assert await ask("/healthz") == 200


async def test_client_that_sends_no_request_is_disconnected(
    tokens: WatchedFile[TokenTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_FIRST_REQUEST_S", 0.1)
    async with listening(tokens, NOBODY) as (host, port, ask, _):
        loop = asyncio.get_running_loop()
        for begun in (b"", b"GET /healthz HTTP/1.1\r\nhost:"):
            with socket.create_connection((host, port)) as sock:
                sock.setblocking(False)
                await loop.sock_sendall(sock, begun)
                with suppress(ConnectionError):
                    assert await loop.sock_recv(sock, 1) == b""
        assert await ask("/healthz") == 200


async def test_client_that_begins_a_second_request_is_disconnected(
    tokens: WatchedFile[TokenTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_FIRST_REQUEST_S", 0.1)
    monkeypatch.setattr(http_server, "_KEEP_ALIVE_S", 1)
    async with listening(tokens, NOBODY) as (host, port, _, _):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.write(b"G")
        with suppress(ConnectionError):
            assert b"HTTP" not in await reader.read(), "the end of the connection"
        writer.close()


async def test_rejected_changes_are_logged(
    tokens: WatchedFile[TokenTable], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.admin.middleware._limited", LimitedLog(logging.getLogger("kvstore.admin.middleware")))
    async with served(tokens=tokens) as (client, _):
        await client.delete("/v1/nodes/a%0Ab")
        await client.delete("/v1/nodes/a", headers={"authorization": f"Bearer {BOB}"})
        await client.get("/v1/nodes")
    lines = [record.getMessage() for record in caplog.records if record.name == "kvstore.admin.middleware"]
    assert len(lines) == 2
    assert "none was given (request=DELETE /v1/nodes/a\\nb, peer=127.0.0.1:" in lines[0]
    assert "'DELETE /v1/nodes/a' requires the role operator; this token is 'bob' (read)" in lines[1]


async def test_public_path_body_is_not_awaited() -> None:
    async with application(Counters()) as app:
        scope = {"type": "http", "method": "POST", "path": "/healthz", "headers": [], "query_string": b"", "http_version": "1.1"}
        said: list[int] = []

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            said.append(message.get("status", 0))

        await asyncio.wait_for(
            app({**scope, "raw_path": b"/healthz", "scheme": "http", "server": ("127.0.0.1", 7470)}, receive, send), 5
        )
        assert said[0] == 405


async def test_request_with_many_errors_gets_short_response() -> None:
    async with served() as (client, _):
        lookup = {"url": "/v1/blocks/lookup", "headers": {"content-type": "application/json"}}
        for text in ('"tokens": [' + "-1," * 300_000 + "1]", '"keys": [' + '"x",' * 300_000 + '"x"]'):
            answer = await client.post(**lookup, content=('{"namespace_id": "' + "0" * 32 + '", ' + text + "}").encode())
            problem(answer, 400, "invalid_argument")
            assert len(answer.content) < 4_096
        fields = ", ".join(f'"f{number}": 1' for number in range(100_000))
        answer = await client.post(**lookup, content=("{" + fields + "}").encode())
        problem(answer, 400, "invalid_argument")
        assert len(answer.content) < 4_096


@pytest.mark.parametrize("path", ["/", "/healthz"])
async def test_probe_with_head_succeeds(path: str) -> None:
    async with served() as (client, _):
        assert (await client.head(path)).status_code == (await client.get(path)).status_code == 200


async def test_unknown_paths_and_bugs_get_problem_responses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served() as (client, _):
        problem(await client.get("/v1/nothing"), 404, "not_found")
        refused = await client.delete("/v1/nodes")
        problem(refused, 405, "unsupported")
        assert refused.headers["allow"] == "GET"
        everything = {"/v1/tenants/quota": "DELETE, GET, PUT", "/v1/path-policy": "GET, PUT", "/healthz": "GET, HEAD"}
        for path, allowed in everything.items():
            refused = await client.patch(path)
            problem(refused, 405, "unsupported")
            assert refused.headers["allow"] == allowed
        problem(await client.get("/v1/nodes?limit=0"), 400, "invalid_argument")
        problem(await client.get("/v1/nodes?limit=501"), 400, "invalid_argument")
        problem(await client.get("/v1/nodes?cursor=%00"), 400, "invalid_argument")
        for forged, which in product(("", "-1", "²", "9" * 20), ("cluster-events", "plans")):
            problem(await client.get(f"/v1/{which}?cursor={cursor_for(which, forged)}"), 400, "invalid_argument")
        misspelt = problem(await client.get("/v1/volumes?nod=a"), 400, "invalid_argument")
        assert misspelt["detail"].startswith("unknown query parameter; this path takes: cursor, limit, node")
        problem(await client.delete("/v1/tenants/quota?tenant=a&ttenant=b"), 400, "invalid_argument")
        problem(await client.get("/v1/blocks/xyz"), 400, "invalid_argument")
        answer = await client.get("/v1/nodes", headers={"x-request-id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        answer = await client.get("/v1/nodes", headers={"x-request-id": "evil\tname"})
        assert answer.headers["x-request-id"] != "evil\tname"

    async def broken(*_: object) -> None:
        raise RuntimeError("a secret of ours")

    async with served() as (client, counters):
        monkeypatch.setattr(StoreRpc, "nodes", broken)
        problem(await client.get("/v1/nodes"), 500, "internal")
        assert counters.snapshot()["admin_errors_internal_total"] == 1
    middleware = AdminMiddleware(broken, NOBODY, None, Counters())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://127.0.0.1") as client:
        body = problem(await client.get("/v1/nodes"), 500, "internal")
    assert "secret" not in str(body)
    assert "a secret of ours" in caplog.text, "the log has it"


def test_cursor_continues_after_last_entry() -> None:
    entries = [f"n{number}" for number in range(5)]
    shown, cursor = page_of("nodes", entries, str, None, 2)
    assert shown == ["n0", "n1"]
    shown, cursor = page_of("nodes", [*entries, "n0a"], str, cursor, 2)
    assert shown == ["n2", "n3"], "what came in before it moves nothing"
    assert page_of("nodes", entries, str, cursor, 2) == (["n4"], None)
    assert after("nodes", cursor_for("nodes", "a\udc80é")) == "a\udc80é"
    for wrong in ("", "!", "bm90IGpzb24", cursor_for("volumes", "n1"), cursor_for("nodes", "x")[:-3], "W10", "é"):
        with pytest.raises(InvalidArgument, match="cursor"):
            after("nodes", wrong)


def test_if_match_must_name_current_state() -> None:
    assert check_match('"split"', "split") == "split"
    assert check_match('"a", "split"', "split") == "split"
    assert check_match(" * ", "split") is None
    for header, status in ((None, 428), ("", 428), ('"other"', 412), ('W/"split"', 412), ("split", 412)):
        with pytest.raises(PreconditionError) as refused:
            check_match(header, "split")
        assert refused.value.status == status
