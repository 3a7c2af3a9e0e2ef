"""The arena server: one descriptor per session, private to the user, and each end reported exactly once."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import selectors
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvclient.memory.arena import open_arena
from kvstore.core.errors import Conflict, InvalidArgument, PermissionDenied, Unavailable
from kvstore.core.types import SessionId
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.transport.shm import ArenaServer

SIZE = 1 << 20
PATIENCE_S = 20.0
FIRST, SECOND = SessionId(b"1" * 16), SessionId(b"2" * 16)


class Node:
    """A minimal node: an arena, its expected sessions, and the sessions that the arena server reported as closed."""

    def __init__(self, folder: Path) -> None:
        self.fd = os.memfd_create("arena")
        os.truncate(self.fd, SIZE)
        self.expected = {FIRST, SECOND}
        self.closed: queue.SimpleQueue[SessionId] = queue.SimpleQueue()
        self.counters = Counters()
        self.server = ArenaServer(
            folder / "run" / "arena.sock",
            lambda session: (self.fd, SIZE) if session in self.expected else None,
            self.closed.put,
            max_connections=4,
            handshake_timeout_s=0.3,
            counters=self.counters,
        )
        self.server.start()

    @property
    def path(self) -> Path:
        return self.server.path

    def next_closed(self) -> SessionId:
        return self.closed.get(timeout=PATIENCE_S)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.server.stop()
    os.close(node.fd)


def test_arena_both_sides_share_memory(node: Node) -> None:
    arena = open_arena(node.path, FIRST, PATIENCE_S)
    assert arena.size == len(arena.view) == SIZE
    assert not arena.view.readonly
    arena.view[100:105] = b"hello"
    assert os.pread(node.fd, 5, 100) == b"hello"
    os.pwrite(node.fd, b"reply", SIZE - 5)
    assert bytes(arena.view[-5:]) == b"reply"
    assert arena.alive
    arena.close()
    arena.close()
    assert not arena.alive
    assert node.next_closed() == FIRST
    assert node.closed.empty()


def test_arena_socket_is_private_to_user(node: Node) -> None:
    assert stat.S_IMODE(node.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(node.path.parent.stat().st_mode) == 0o700


def test_arena_unknown_or_second_session_is_refused(node: Node) -> None:
    arena = open_arena(node.path, FIRST, PATIENCE_S)
    for session in (SessionId(b"?" * 16), FIRST):
        with pytest.raises(PermissionDenied):
            open_arena(node.path, session, PATIENCE_S)
    with pytest.raises(InvalidArgument):
        open_arena(node.path, SessionId(b"short"), PATIENCE_S)
    assert arena.alive
    arena.close()
    assert node.next_closed() == FIRST
    again = open_arena(node.path, FIRST, PATIENCE_S)
    again.close()
    assert node.next_closed() == FIRST
    assert node.counters.snapshot()["arena_connections_refused_total"] == 2


def test_arena_invalid_session_id_closes_connection(node: Node) -> None:
    for data in (b"", b"1" * 5, b"1" * 40):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(str(node.path))
            sock.sendall(data)
            with contextlib.suppress(ConnectionError):
                while sock.recv(100):
                    pass
    arena = open_arena(node.path, SECOND, PATIENCE_S)
    arena.close()
    assert node.next_closed() == SECOND


def test_arena_connections_above_limit_are_refused(node: Node) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(node.path))
        with pytest.raises(Unavailable):
            open_arena(node.path, FIRST, PATIENCE_S)


ENGINE = """
import sys
from kvclient.memory.arena import open_arena
arena = open_arena(sys.argv[1], b"1" * 16, 20.0)
arena.view[0:3] = b"me!"
print("mapped", flush=True)
sys.stdin.read()
"""


def test_arena_engine_killed_closes_session(node: Node) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(node.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"mapped\n"
        assert node.closed.empty()
        engine.send_signal(signal.SIGKILL)
        assert node.next_closed() == FIRST
    assert os.pread(node.fd, 3, 0) == b"me!"
    assert node.closed.empty()


def test_arena_connection_not_watched_others_go_on(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = open_arena(node.path, FIRST, PATIENCE_S)
    refusals = [OSError(errno.ENOSPC, "too many watched descriptors"), MemoryError()]
    register = selectors.DefaultSelector.register

    def refuse(selector: selectors.DefaultSelector, fileobj: socket.socket, events: int) -> object:
        if refusals:
            raise refusals.pop()
        return register(selector, fileobj, events)

    def fail(_server: ArenaServer) -> None:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    monkeypatch.setattr(selectors.DefaultSelector, "register", refuse)
    for _ in range(2):
        with pytest.raises(Unavailable):
            open_arena(node.path, SECOND, 0.5)
    monkeypatch.setattr(ArenaServer, "_next_timeout_s", fail)
    second = open_arena(node.path, SECOND, PATIENCE_S)
    second.close()
    assert node.next_closed() == SECOND
    assert arena.alive
    assert node.closed.empty(), "the first engine may still write"
    assert node.counters.snapshot()[volumes_metrics.ARENA_ACCEPT_ERRORS] == 2
    assert node.counters.snapshot()[volumes_metrics.ARENA_INTERNAL_ERRORS] == 1
    arena.close()


def test_arena_close_with_views_is_refused(node: Node) -> None:
    arena = open_arena(node.path, FIRST, PATIENCE_S)
    held = arena.view[10:20]
    with pytest.raises(Conflict):
        arena.close()
    assert arena.alive
    assert node.closed.empty()
    held[:] = bytes(10)
    held.release()
    arena.close()
    assert node.next_closed() == FIRST


def test_arena_stop_closes_each_session_once(tmp_path: Path) -> None:
    node = Node(tmp_path)
    arenas = [open_arena(node.path, session, PATIENCE_S) for session in (FIRST, SECOND)]
    node.server.stop()
    node.server.stop()
    assert {node.next_closed(), node.next_closed()} == {FIRST, SECOND}
    assert node.closed.empty()
    for arena in arenas:
        assert not arena.alive
        arena.close()
    assert not node.path.exists()
    with pytest.raises(Unavailable):
        open_arena(node.path, FIRST, PATIENCE_S)
    os.close(node.fd)


def test_arena_path_too_long_is_refused(tmp_path: Path) -> None:
    server = ArenaServer(tmp_path / ("x" * 120), lambda _: None, lambda _: None, counters=Counters())
    with pytest.raises(InvalidArgument):
        server.start()
    server.stop()
