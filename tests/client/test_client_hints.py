"""Hints to nodes that ended the session, to a node that does not answer, and after a bug in the thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from client_fakes import FakeMetadata, FakeNode, payloads

from kvclient import CacheSpec, KVClient
from kvclient.nodes.hints import MAX_WAITING
from kvclient.nodes.lookup_memory import ChainNodes
from support.chains import token_chain
from support.wait import wait_until

NoCallThreads = Callable[[], AbstractContextManager[None]]
MakeClient = Callable[..., KVClient]


def test_hint_after_idle_session_is_sent_again(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, make_node: Callable[..., FakeNode], make_client: MakeClient
) -> None:
    far, client, keys = make_node("far"), make_client(near), token_chain(spec, 4)
    metadata.runs = [(0, 4, far)]
    assert client.lookup(keys).hit_blocks == 4
    for turn in (1, 2):
        client.hints.keep("chat", keys)
        wait_until(lambda: client.stats().get("client_hints_to_other_nodes_total", 0) == turn)  # noqa: B023  # ends in this turn
        far.sessions.clear()  # idle for a minute
    assert far.names().count("OpenSession") == 2
    assert far.names().count("Hint") == 3
    assert client.stats().get("client_hints_failed_total", 0) == 0
    assert near.names().count("Hint") == 2


def test_hint_to_node_that_refuses_is_sent_twice(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, make_node: Callable[..., FakeNode], make_client: MakeClient
) -> None:
    far, client, keys = make_node("far"), make_client(near), token_chain(spec, 4)
    metadata.runs = [(0, 4, far)]
    assert client.lookup(keys).hit_blocks == 4
    far.forgets_sessions = True
    client.hints.keep("chat", keys)
    wait_until(lambda: client.stats().get("client_hints_failed_total", 0) == 1)
    assert far.names().count("Hint") == 2


def test_hints_waiting_for_the_node_are_bounded(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client, keys, answers = make_client(near, lookup_deadline_s=60.0), token_chain(spec, 4), threading.Event()
    near.hint_script = lambda _: answers.wait(30) and None
    try:
        assert all(client.hints.keep("chat", keys) for _ in range(MAX_WAITING))
        assert not any(client.hints.keep("chat", keys) for _ in range(3))
        assert client.stats()["client_hints_not_sent_total"] == 3
        assert caplog.text.count("hint not sent: too many are waiting") == 1
    finally:
        answers.set()
    wait_until(lambda: client.hints.keep("chat", keys))


def test_hint_thread_that_fails_is_counted(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, keys = make_client(near), token_chain(spec, 4)

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ChainNodes, "of", broken)
    for _ in range(2):
        assert client.hints.keep("chat", keys)
    wait_until(lambda: client.stats().get("client_bugs_total", 0) == 2, "the thread goes on")
    assert "RuntimeError: a bug" in caplog.text


def test_hint_without_session_and_thread_is_not_sent(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The session with the node is lost, and no thread can be started to open another one."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    client, keys = make_client(near), token_chain(spec, 4)
    near.stop()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not client.hints.keep("chat", keys)
    assert client.stats()["client_session_refused_total"] == 1
    assert "session with the local node not opened: can't start new thread" in caplog.text
    near.start()
    wait_until(lambda: client.hints.keep("chat", keys), "a later hint opens a session")


def test_hint_without_call_thread_replaces_the_channel(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, no_call_threads: NoCallThreads
) -> None:
    """gRPC serves the calls of a channel in a thread. If it cannot start one, all later calls of that channel hang."""
    client, keys = make_client(near), token_chain(spec, 4)
    with no_call_threads():
        assert not client.hints.keep("chat", keys)
    assert client.stats()["client_hints_not_sent_total"] == 1
    assert client.stats()["client_session_lost_total"] == 1
    wait_until(lambda: client.hints.keep("chat", keys), "a session is open")
    assert client.start_store(keys, payloads(keys, spec.shape)).result(30).error is None
    client.close()  # does not hang


def test_hint_to_other_node_replaces_its_broken_channel(
    spec: CacheSpec,
    metadata: FakeMetadata,
    near: FakeNode,
    make_node: Callable[..., FakeNode],
    make_client: MakeClient,
    no_call_threads: NoCallThreads,
) -> None:
    far, client, keys = make_node("far"), make_client(near), token_chain(spec, 4)
    metadata.runs = [(0, 4, far)]
    assert client.lookup(keys).hit_blocks == 4

    def hint_counts_in(counter: str) -> None:
        before = client.stats().get(counter, 0)
        client.hints.keep("chat", keys)
        wait_until(lambda: client.stats().get(counter, 0) > before, f"{counter} grows")

    for _turn in range(2):
        with no_call_threads():
            hint_counts_in("client_hints_failed_total")
        hint_counts_in("client_hints_to_other_nodes_total")
    client.close()  # does not hang
