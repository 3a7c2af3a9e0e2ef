"""Idle connections use at most their share of the descriptors; other addresses stay reachable."""

from __future__ import annotations

import contextlib
import json
import resource
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.process.fd_limits import MIN_CONNECTIONS, connections_allowed, limit, raise_limit
from kvstore.rpc.client import call, connect

SOFT = 512
_SERVER = """
import asyncio, json, resource, sys
from kvstore.observe.counters import Counters
from kvstore.rpc.server import build_aio_server

async def main():
    bound = await build_aio_server([], addresses=["127.0.0.1:0", sys.argv[1]], services=[], counters=Counters())
    await bound.start()
    print(json.dumps(bound.addresses), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await bound.stop(0.0)

resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
asyncio.run(main())
"""


@contextlib.contextmanager
def soft_limit(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_raise_limit_to_hard_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with soft_limit(SOFT):
        assert limit() == SOFT
        assert connections_allowed() == SOFT // 4
        assert raise_limit() == limit() > SOFT
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard
    with soft_limit(128):
        assert connections_allowed() == MIN_CONNECTIONS


def test_raise_limit_forbidden_keeps_limit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def forbidden(_what: int, _limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    with soft_limit(SOFT):
        with monkeypatch.context() as patch:
            patch.setattr(resource, "setrlimit", forbidden)
            assert raise_limit() == SOFT
        assert "not raised: not allowed to raise maximum limit (limit=512)" in caplog.text


def test_idle_connections_leave_local_socket_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SERVER, f"unix:{tmp_path / 's'}", str(SOFT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server, contextlib.ExitStack() as stack:
        assert server.stdin is not None
        assert server.stdout is not None
        remote, local = json.loads(server.stdout.readline())
        port = int(remote.rpartition(":")[2])
        selector = stack.enter_context(selectors.DefaultSelector())
        for _ in range(SOFT + 100):
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10.0))
            selector.register(idle, selectors.EVENT_READ)
        closed = 0
        while closed < SOFT + 100 - SOFT // 4:  # everything above the share
            ready = selector.select(10.0)
            assert ready, "the server keeps more than its share"
            for key, _ in ready:
                try:
                    ended = not key.fileobj.recv(1024)  # type: ignore[union-attr]  # a socket
                except ConnectionError:
                    ended = True
                if ended:
                    selector.unregister(key.fileobj)
                    closed += 1
        with connect(local) as channel:
            answer = call(health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest(), 10.0)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        server.stdin.close()
        assert server.wait(10.0) == 0
