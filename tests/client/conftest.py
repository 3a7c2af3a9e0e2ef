"""Fakes and clients of the client's tests."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from client_fakes import FakeMetadata, FakeNode, SkewedClock

from kvclient import CacheSpec, ClientOptions, KVClient
from kvstore.lab.accounting_check import check_accounts
from support.wait import wait_until

MakeClient = Callable[..., KVClient]
NoCallThreads = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def spec() -> CacheSpec:
    return CacheSpec(model="test", block_tokens=4, layers=3, layer_block_bytes=512)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="kvc-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SkewedClock:
    """The clock of clients that connect after this."""
    clock = SkewedClock()
    monkeypatch.setattr("kvclient.client.MonotonicClock", lambda: clock)
    return clock


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def metadata(spec: CacheSpec, stack: ExitStack) -> FakeMetadata:
    server = FakeMetadata(spec)
    stack.callback(server.stop)
    return server


@pytest.fixture
def make_node(spec: CacheSpec, stack: ExitStack, folder: Path, metadata: FakeMetadata) -> Callable[..., FakeNode]:
    def make(node_id: str = "near", **settings: int) -> FakeNode:
        node = FakeNode(folder, spec, node_id, **settings)
        stack.callback(node.stop)
        metadata.nodes.append(node)
        return node

    return make


@pytest.fixture
def near(make_node: Callable[..., FakeNode]) -> FakeNode:
    """The node on this host."""
    return make_node("near")


@pytest.fixture
def make_client(spec: CacheSpec, stack: ExitStack, metadata: FakeMetadata) -> MakeClient:
    def make(node: FakeNode | str | None = None, **settings: object) -> KVClient:
        options = ClientOptions(**{"reopen_pause_s": 0.01, "breaker_pause_s": 0.05, **settings})  # type: ignore[arg-type]
        address = node.address if isinstance(node, FakeNode) else node
        client = stack.enter_context(KVClient.connect(metadata.address, spec, node=address, options=options))
        stack.callback(lambda: check_accounts(client.stats(), spec.block_tokens))
        return client

    return make


@pytest.fixture
def no_call_threads(monkeypatch: pytest.MonkeyPatch) -> NoCallThreads:
    """Let gRPC start no thread for the calls of a channel.

    Threads of this test's earlier calls would serve later ones: they end first.
    """
    of_other_tests = set(threading.enumerate())
    start = threading.Thread.start

    def serves_calls(thread: threading.Thread) -> bool:
        return thread.name.endswith("(_run)") and thread not in of_other_tests

    def refuse(thread: threading.Thread) -> None:
        if serves_calls(thread):
            raise RuntimeError("can't start new thread")
        start(thread)

    @contextmanager
    def refuses() -> Iterator[None]:
        wait_until(lambda: not any(map(serves_calls, threading.enumerate())), "the threads of earlier calls have ended")
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            yield

    return refuses
