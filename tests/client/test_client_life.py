"""Connecting, lost servers and reconnecting: the engine continues whichever server dies."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from client_fakes import FakeMetadata, FakeNode, SkewedClock, payloads

from kvclient import CacheSpec, ClientOptions, KVClient, Lookup, Outcome, StoreOutcome
from kvclient.call.execution import CallRunner, CallScope
from kvclient.call.open_calls import OpenCalls
from kvclient.results import LoadResult
from kvclient.store.layerwise import LayerwiseStore
from kvstore.core.clock import ManualClock
from kvstore.core.errors import CapacityExceeded, DeadlineExceeded, Internal, InvalidArgument, KVStoreError, NotFound, Unavailable
from kvstore.observe.limited_log import LimitedLog
from samples import sample
from support.chains import token_chain
from support.wait import wait_until

MakeClient = Callable[..., KVClient]
MakeNode = Callable[..., FakeNode]


# ---------------------------------------------------------------- connect
def test_connect_auto_finds_local_node(
    spec: CacheSpec, metadata: FakeMetadata, make_node: MakeNode, folder: Path, make_client: MakeClient
) -> None:
    away = make_node("away")
    away.stop()  # its socket no longer exists, as if it ran on another host
    away.socket.unlink(missing_ok=True)
    here = make_node("here")
    client = make_client("auto")
    assert client.local_node == "here"
    assert here.names().count("OpenSession") == 1
    assert client.keys(np.arange(8, dtype=np.uint32)) == token_chain(spec, 2)


def test_connect_several_local_nodes_says_which_and_why(
    make_node: MakeNode, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    make_node("first")
    make_node("second")
    with caplog.at_level("INFO", "kvclient"):
        client = make_client("auto")
    choice = client.local_node_choice
    assert choice is not None
    assert (client.local_node, choice.node_id, choice.others) == ("first", "first", ("second",))
    assert choice.reason.endswith("comes first in local_roles, and its id is the first of that role")
    assert f"local node chosen: first (reason={choice.reason}, others=second)" in caplog.messages


def test_connect_local_node_option_names_the_node(make_node: MakeNode, make_client: MakeClient) -> None:
    make_node("first")
    make_node("second")
    client = make_client("auto", local_node="second")
    choice = client.local_node_choice
    assert choice is not None
    assert (client.local_node, choice.reason, choice.others) == ("second", "the option local_node names it", ("first",))
    with pytest.raises(Unavailable, match=r"not on this host.*elsewhere.*first, second"):
        make_client("auto", local_node="elsewhere")


@pytest.fixture(params=["killed", "stopped"])
def silent(request: pytest.FixtureRequest, make_node: MakeNode) -> Iterator[FakeNode]:
    """A node that is preferred, and whose socket is not listened on (after kill -9) or not accepted on (SIGSTOP)."""
    node = make_node("first")
    node.stop()
    node.socket.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(node.socket))
        if request.param == "stopped":
            listener.listen()
        else:
            listener.close()
        yield node


@pytest.mark.parametrize("require_store", [True, False])
def test_connect_passes_over_silent_node(
    silent: FakeNode, make_node: MakeNode, make_client: MakeClient, *, require_store: bool
) -> None:
    make_node("second")
    client = make_client("auto", require_store=require_store)
    choice = client.local_node_choice
    assert choice is not None
    assert (client.local_node, choice.reason) == ("second", f"preferred nodes do not answer: {silent.node_id}")


def test_connect_only_silent_node_error_advises(silent: FakeNode, make_client: MakeClient) -> None:
    with pytest.raises(KVStoreError) as failed:
        make_client("auto", connect_deadline_s=1.0)
    said = str(failed.value)
    assert said.startswith(f"cannot reach the local node at {silent.address}: ")
    assert said.endswith("(`kvstore status` lists nodes), or pass node=None to connect (blocks then travel over TCP)")


def test_connect_without_require_store_waits_for_no_node(
    spec: CacheSpec, silent: FakeNode, clock: SkewedClock, make_client: MakeClient
) -> None:
    client = make_client("auto", require_store=False, connect_deadline_s=3600.0)  # would wait for an hour
    assert (client.local_node, client.stats()["client_session_open"]) == (None, 0)
    silent.start()
    wait_until(lambda: client.load(token_chain(spec, 1), bytearray(spec.block_bytes)) and client.local_node == "first")


def test_connect_auto_without_node_uses_tcp(make_client: MakeClient) -> None:
    client = make_client("auto")
    assert client.local_node is None
    assert client.stats()["client_session_open"] == 0


def test_connect_without_servers_raises(spec: CacheSpec, folder: Path, metadata: FakeMetadata, near: FakeNode) -> None:
    quick = ClientOptions(connect_deadline_s=1.0)
    nobody = f"unix:{folder}/nobody"
    with pytest.raises(Unavailable, match=r"nothing listens on \S+/nobody; check that it runs") as away:
        KVClient.connect(metadata.address, spec, node=nobody, options=quick)
    assert away.value.__suppress_context__
    with pytest.raises(Unavailable, match=r"at 127\.0\.0\.1:1: connection refused") as dead:
        KVClient.connect("127.0.0.1:1", spec, node=None, options=quick)
    assert dead.value.__suppress_context__, "one line, without what the library went through"
    with pytest.raises(InvalidArgument):
        KVClient.connect("no address", spec)
    with pytest.raises(InvalidArgument):
        KVClient.connect(None, spec)
    with pytest.raises(InvalidArgument):
        ClientOptions(workers=0)
    patient = ClientOptions(connect_deadline_s=1.0, require_store=False)
    with KVClient.connect("127.0.0.1:1", spec, node=nobody, options=patient) as client:
        assert client.load(token_chain(spec, 2), bytearray(2 * spec.block_bytes)).hit_blocks == 0
        assert client.store(token_chain(spec, 2), bytes(2 * spec.block_bytes)).outcomes.tolist() == [StoreOutcome.SKIPPED] * 2
        assert client.lookup(token_chain(spec, 2)).error is not None


def test_connect_steps_share_one_deadline(
    clock: SkewedClock, metadata: FakeMetadata, near: FakeNode, make_client: MakeClient
) -> None:
    register, open_session = metadata.RegisterNamespace, near.OpenSession
    left_s = {}

    def slowly(request: Any, context: grpc.ServicerContext) -> Any:
        left_s["metadata"] = context.time_remaining()
        clock.ahead_s += 100.0
        return register(request, context)

    def then(request: Any, context: grpc.ServicerContext) -> Any:
        left_s["node"] = context.time_remaining()
        return open_session(request, context)

    near.OpenSession = then  # type: ignore[method-assign]
    metadata.RegisterNamespace = slowly  # type: ignore[method-assign]
    for server in (metadata, near):
        server.stop()
        server.start()
    make_client(near, connect_deadline_s=150.0, require_store=False)
    rounded_s = 0.5  # gRPC rounds deadlines up on the wire
    assert left_s["metadata"] <= 75.0 + rounded_s
    assert left_s["node"] <= 50.0 + rounded_s


def test_connect_without_metadata_server_works(spec: CacheSpec, near: FakeNode) -> None:
    keys = token_chain(spec, 3)
    with KVClient.connect(None, spec, node=near.address) as client:
        data = payloads(keys, spec.shape)
        assert client.store(keys, data).held_blocks == 3
        assert client.lookup(keys) == Lookup(keys)
        assert client.load(keys, np.zeros_like(data)).hit_blocks == 3


# ---------------------------------------------------------------- the metadata server goes and comes
def test_metadata_server_down_misses_fast_local_hits_remain(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, make_client: MakeClient
) -> None:
    keys = token_chain(spec, 3)
    near.blocks.hold(keys)
    metadata.runs = [(0, 3, near)]
    client = make_client(near, breaker_pause_s=0.2)
    metadata.stop()
    for _ in range(4):
        lookup = client.lookup(keys)
        assert (lookup.hit_blocks, lookup.runs) == (0, ())
        assert isinstance(lookup.error, KVStoreError)
    assert "calls fail for a moment" in str(client.lookup(keys).error)
    result = client.load(keys, out := np.zeros((3, spec.block_bytes), np.uint8))
    assert result.hit_blocks == 3
    assert isinstance(result.error, Unavailable)
    assert np.array_equal(out, payloads(keys, spec.shape))
    metadata.start()
    wait_until(lambda: client.lookup(keys).hit_blocks == 3)


def test_metadata_server_back_is_used_at_once(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, make_client: MakeClient
) -> None:
    """gRPC connects only while a call waits, and calls to a lost server do not wait."""
    keys = token_chain(spec, 2)
    near.blocks.hold(keys)
    metadata.runs = [(0, 2, near)]
    metadata.stop()
    client = make_client("auto", breaker_pause_s=3600, require_store=False)
    wait_until(lambda: "calls fail for a moment" in str(client.lookup(keys).error))
    assert client.stats()["client_session_open"] == 0
    metadata.start()
    wait_until(lambda: client.lookup(keys).hit_blocks == 2)
    wait_until(lambda: client.load(keys, bytearray(2 * spec.block_bytes)).hit_blocks == 2)
    wait_until(lambda: client.stats()["client_session_open"] == 1)


def test_metadata_server_silent_costs_the_deadline(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, make_client: MakeClient
) -> None:
    over = threading.Event()
    metadata.Lookup = lambda request, context: over.wait(10)  # type: ignore[method-assign,assignment]
    metadata.stop()
    metadata.start()
    client = make_client(near)
    lookup = client.lookup(token_chain(spec, 2), deadline_s=0.2)
    over.set()
    assert isinstance(lookup.error, DeadlineExceeded)
    assert lookup.seconds < 5


def test_lookup_server_lost_without_threads_is_a_miss(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, start = make_client(near), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kvclient-revive":
            raise RuntimeError("can't start new thread")
        start(thread)

    metadata.stop()
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", refuse)
        lookup = client.lookup(token_chain(spec, 2))
    assert isinstance(lookup.error, Unavailable)
    metadata.runs = [(0, 2, near)]
    metadata.start()
    wait_until(lambda: client.lookup(token_chain(spec, 2)).hit_blocks == 2)


def test_forgotten_namespace_is_registered_again(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, make_client: MakeClient
) -> None:
    client = make_client(near)
    answer, forgot = metadata.Lookup, [True]

    def lookup(request: object, context: object) -> object:
        if forgot:
            forgot.clear()
            metadata.fail = NotFound("no such namespace")
            try:
                return answer(request, context)  # type: ignore[arg-type]
            finally:
                metadata.fail = None
        return answer(request, context)  # type: ignore[arg-type]

    metadata.Lookup = lookup  # type: ignore[method-assign,assignment]
    metadata.stop()
    metadata.start()
    metadata.runs = [(0, 2, near)]
    wait_until(lambda: client.lookup(token_chain(spec, 2)).hit_blocks == 2)
    assert metadata.calls.count("RegisterNamespace") == 2


def test_forgotten_namespace_calls_share_the_deadline(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, clock: SkewedClock, make_client: MakeClient
) -> None:
    client = make_client(near)
    metadata.calls.clear()
    left_s: list[float] = []

    def late(answer: Callable[[Any, grpc.ServicerContext], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
        def answer_late(request: object, context: grpc.ServicerContext) -> object:
            left_s.append(context.time_remaining())
            clock.ahead_s += 5.0
            metadata.fail = None if metadata.calls else NotFound("no such namespace")
            return answer(request, context)

        return answer_late

    metadata.Lookup = late(metadata.Lookup)  # type: ignore[method-assign]
    metadata.RegisterNamespace = late(metadata.RegisterNamespace)  # type: ignore[method-assign]
    metadata.stop()
    metadata.start()
    metadata.runs = [(0, 2, near)]
    wait_until(lambda: client.lookup(token_chain(spec, 2), deadline_s=30.0).hit_blocks == 2)
    assert metadata.calls == ["Lookup", "RegisterNamespace", "Lookup"]
    assert [left < most for left, most in zip(left_s, (31.0, 26.0, 21.0), strict=True)] == [True] * 3


# ---------------------------------------------------------------- the node goes and comes
def test_restarted_node_is_found_again(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    keys = token_chain(spec, 4)
    data = payloads(keys, spec.shape)
    client = make_client(near)
    assert client.store(keys, data).held_blocks == 4
    near.stop()
    for _ in range(3):
        result = client.load(keys, np.zeros_like(data))
        assert (result.hit_blocks, client.store(keys, data).held_blocks) == (0, 0)
        assert isinstance(result.error, KVStoreError)
    assert "until it is open again, loads read from the nodes directly, and nothing is stored" in caplog.text
    near.start()
    wait_until(lambda: client.store(keys, data).held_blocks == 4)
    out = np.zeros_like(data)
    assert client.load(keys, out).hit_blocks == 4
    assert np.array_equal(out, data)
    stats = client.stats()
    assert (stats["client_session_lost_total"], stats["client_session_opened_total"], stats["client_session_open"]) == (1, 1, 1)


def test_restarted_node_lookup_opens_the_session(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, make_client: MakeClient
) -> None:
    """Otherwise the first prompt after an outage is not stored."""
    keys = token_chain(spec, 4)
    client = make_client(near)
    near.stop()
    wait_until(lambda: client.stats()["client_session_open"] == 0)
    near.start()

    def looked_up() -> bool:
        assert client.lookup(keys).error is None
        return client.stats()["client_session_open"] == 1

    wait_until(looked_up)
    assert client.store(keys, payloads(keys, spec.shape)).held_blocks == 4


def test_strict_client_raises_failures(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    client = make_client(near, strict=True)
    near.fail["Load"] = Unavailable("going away")
    keys = token_chain(spec, 1)
    with pytest.raises(Unavailable):
        client.load(keys, bytearray(spec.block_bytes))
    with pytest.raises(KVStoreError):
        client.start_load(keys, bytearray(spec.block_bytes)).result()


def test_closed_client_answers_misses(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    client = make_client(near)
    keys = token_chain(spec, 2)
    near.blocks.hold(keys)
    client.close()
    client.close()
    assert client.load(keys, bytearray(2 * spec.block_bytes)).count(Outcome.UNAVAILABLE) == 2
    assert client.store(keys, bytes(2 * spec.block_bytes)).held_blocks == 0
    assert client.start_load(keys, bytearray(2 * spec.block_bytes)).result().hit_blocks == 0
    assert client.lookup(keys).hit_blocks == 0
    assert not client.flush(0.1)
    with near.called:
        assert near.called.wait_for(lambda: near.left, 5)


def test_close_ends_the_session_if_a_step_fails(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise MemoryError

    client = make_client(near)
    store = client.begin_store(token_chain(spec, 2))
    with monkeypatch.context() as patched:
        patched.setattr(LayerwiseStore, "abort", fail)
        with pytest.raises(MemoryError):
            client.close()
    assert client.start_load(token_chain(spec, 2), bytearray(2 * spec.block_bytes)).result().hit_blocks == 0
    store.abort()
    with near.called:
        assert near.called.wait_for(lambda: near.left, 5)


def test_close_ends_loads_under_way(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    over = threading.Event()
    near.load_script = lambda request, context: iter([near.progress([])] if over.wait(10) else [])
    client = make_client(near)
    handle = client.start_load(token_chain(spec, 2), bytearray(2 * spec.block_bytes))
    near.wait_called("Load")
    client.close()
    assert handle.done
    assert handle.result().hit_blocks == 0
    over.set()


def test_client_serves_many_threads(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 40)
    data = payloads(keys, spec.shape)
    client = make_client(near)
    client.store(keys, data)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(5):
            out = np.zeros_like(data)
            result = client.load(keys[: 10 + number], out[: 10 + number], verify="always")
            if result.hit_blocks != 10 + number or not np.array_equal(out[: 10 + number], data[: 10 + number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_forked_child_gets_an_error(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(near)
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(InvalidArgument, match="fork"):
        client.lookup(token_chain(spec, 1))
    with pytest.raises(InvalidArgument, match="fork"):
        client.hints.end("chat")
    client.close()  # no effect: the connections are the parent's
    monkeypatch.undo()
    assert client.lookup(token_chain(spec, 1)).error is None


# ---------------------------------------------------------------- small parts
def test_failures_are_counted_and_rarely_logged(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    incidents = LimitedLog(logging.getLogger("kvclient"), 10.0, clock.now_s)
    with caplog.at_level(logging.WARNING, "kvclient"):
        for _ in range(5):
            incidents.report("client_bugs_total", "a thing", Unavailable("x"), amount=2)
        clock.advance(10.0)
        incidents.report("client_bugs_total", "a thing")
        incidents.report("client_reports_dropped_total", "another")
    assert incidents.counters.snapshot() == {"client_bugs_total": 11, "client_reports_dropped_total": 1}
    assert [record.message for record in caplog.records] == [
        "a thing: x (counter=client_bugs_total, suppressed=0)",
        "a thing (counter=client_bugs_total, suppressed=4)",
        "another (counter=client_reports_dropped_total, suppressed=0)",
    ]


class ScriptedCall:
    """A ``PreparedCall`` that does what a test says."""

    def __init__(self, clock: ManualClock, work: Callable[[], LoadResult]) -> None:
        self.scope = CallScope.after(1.0, clock)
        self._work = work

    def run(self) -> LoadResult:
        return self._work()

    def refused(self, error: KVStoreError) -> LoadResult:
        return LoadResult(np.full(1, Outcome.UNAVAILABLE, np.uint8), error=error)


def test_call_runner_turns_failures_into_misses() -> None:
    clock = ManualClock()
    incidents = LimitedLog(logging.getLogger("kvclient"), 0.0, clock.now_s)
    caller = CallRunner(incidents, workers=1, max_pending=1, strict=False)

    def bug() -> LoadResult:
        raise ZeroDivisionError

    assert isinstance(caller.run(ScriptedCall(clock, bug)).error, Internal)
    assert incidents.counters.snapshot()["client_bugs_total"] == 1
    go_on = threading.Event()

    def waits() -> LoadResult:
        go_on.wait(10)
        return LoadResult(np.full(1, Outcome.HIT, np.uint8))

    first = caller.start(ScriptedCall(clock, waits))
    assert isinstance(caller.start(ScriptedCall(clock, waits)).result(5).error, CapacityExceeded)
    go_on.set()
    assert first.result(5).hit_blocks == 1
    wait_until(lambda: caller.start(ScriptedCall(clock, waits)).result(5).hit_blocks == 1)
    caller.close()
    assert isinstance(caller.start(ScriptedCall(clock, waits)).result(5).error, Unavailable)


def test_call_that_begins_while_the_client_closes_is_refused() -> None:
    class Late(ScriptedCall):
        @property
        def scope(self) -> CallScope:
            caller.close()
            return self._scope

        @scope.setter
        def scope(self, scope: CallScope) -> None:
            self._scope = scope

    clock = ManualClock()
    caller = CallRunner(LimitedLog(logging.getLogger("kvclient"), 0.0, clock.now_s), workers=1, max_pending=1, strict=False)
    assert isinstance(caller.run(Late(clock, lambda: pytest.fail("it ran"))).error, Unavailable)


def test_open_calls_close_while_calls_begin(request: pytest.FixtureRequest) -> None:
    interval_s = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(interval_s))
    sys.setswitchinterval(1e-6)
    clock = ManualClock()
    for _ in range(sample(15, 200)):
        calls: OpenCalls[CallScope] = OpenCalls()
        kept = [CallScope.after(1.0, clock) for _ in range(3000)]
        added: list[CallScope] = []

        def begin(calls: OpenCalls[CallScope] = calls, kept: list[CallScope] = kept, added: list[CallScope] = added) -> None:
            added += [scope for scope in kept if calls.add(scope)]

        thread = threading.Thread(target=begin)
        thread.start()
        closed = calls.close()
        thread.join(10)
        assert set(map(id, closed)) == set(map(id, added))


def test_calls_cancelled_in_the_queue_count_until_taken_out() -> None:
    """Or the queue would grow without a bound. It holds no buffer of such a call."""
    clock, go_on, began = ManualClock(), threading.Event(), threading.Event()
    caller = CallRunner(LimitedLog(logging.getLogger("kvclient"), 0.0, clock.now_s), workers=1, max_pending=2, strict=False)

    def waits() -> LoadResult:
        began.set()
        go_on.wait(10)
        return LoadResult(np.full(1, Outcome.HIT, np.uint8))

    first = caller.start(ScriptedCall(clock, waits))
    assert began.wait(10)
    queued = ScriptedCall(clock, waits)
    freed, answer = weakref.ref(queued), caller.start(queued)
    queued.scope.cancel()
    assert isinstance(answer.result(5).error, DeadlineExceeded)
    assert isinstance(caller.start(ScriptedCall(clock, waits)).result(5).error, CapacityExceeded)
    del queued
    gc.collect()
    assert freed() is None
    go_on.set()
    assert first.result(5).hit_blocks == 1
    wait_until(lambda: caller.start(ScriptedCall(clock, waits)).result(5).hit_blocks == 1)
    caller.close()
