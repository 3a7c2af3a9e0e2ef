"""Sessions: retries get the same answer, and a session's slots are freed, but never while its engine may still write to them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial

import pytest

from kvstore.core.checksum import layer_checksums
from kvstore.core.errors import CapacityExceeded, DeadlineExceeded, LeaseLost, PermissionDenied
from kvstore.core.limits import MAX_SESSIONS, TENANT_SHARE
from kvstore.core.types import BlockKey, BlockRun, NodeId, OperationId, Outcome, SessionId, StoreOutcome
from kvstore.node.base.slow_sources import SlowSources
from kvstore.node.loads.runs import Runs
from kvstore.node.loads.timings import LoadTimings, waiting_for
from kvstore.node.rpc import load_stream
from kvstore.node.rpc.load_stream import LoadStreams
from kvstore.node.rpc.sessions import MAX_STORES_PER_SESSION, REMOTE_IDLE_TTL_S, UNCONNECTED_TTL_S, Session, Sessions
from kvstore.node.rpc.wait_threads import WaitThreads
from kvstore.node.state.model import Block
from kvstore.observe.metric_definitions import transport as transport_metrics
from kvstore.observe.slow_loads import RecentLoads
from kvstore.rpc.auth.interceptor import set_caller
from kvstore.rpc.auth.tokens import AccessRole, Principal
from kvstore.transport.contract import ReadControl
from support.node_harness import NODE_ID, SHAPE, NodeHarness
from support.wait import wait_until


class Node(NodeHarness):
    def __init__(self) -> None:
        super().__init__()
        self.sessions = Sessions(self.table, self.gate, self.counters, self.clock, lease_s=5.0, prepare_ttl_s=30.0)

    def open(self) -> Session:
        session = self.sessions.open(self.namespace, "test")
        assert self.sessions.connect(session.session_id)
        return session

    def numbered(self, first: int, count: int) -> BlockRun:
        keys = tuple(numbered_key(number) for number in range(first, first + count))
        return BlockRun(self.namespace.namespace_id, None, 0, keys)

    def prepare_in(self, session: Session, first: int, count: int, operation: int = 1) -> tuple[bytes, bytes]:
        return self.sessions.prepare(session, op(operation), self.numbered(first, count), self.clock.now_s())

    def complete_in(self, session: Session, first: int, count: int, operation: int = 1) -> list[StoreOutcome]:
        sums = layer_checksums(memoryview(bytes(SHAPE.block_bytes)), SHAPE)
        return self.sessions.complete(session, op(operation), list(self.numbered(first, count).keys), [sums] * count)

    @property
    def used(self) -> int:
        return self.arena.usage().blocks


def numbered_key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def op(number: int) -> OperationId:
    return OperationId(number.to_bytes(16, "big"))


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.table.validate()
    made.table.close()
    made.arena.close()


def test_prepare_retried_returns_the_same_slots(node: Node) -> None:
    session = node.open()
    first = node.prepare_in(session, 0, 4)
    assert node.prepare_in(session, 0, 4) == first
    assert node.used == 4


def test_prepare_skipped_is_tried_again(node: Node) -> None:
    full = node.prepare("full", 0, 512)
    session = node.open()
    assert set(node.prepare_in(session, 0, 2)[0]) == {StoreOutcome.SKIPPED}
    node.table.abandon(full)
    assert set(node.prepare_in(session, 0, 2)[0]) == {StoreOutcome.STORED}


def test_prepare_retry_waits_for_the_first_attempt(node: Node) -> None:
    full = node.prepare("full", 0, 512)
    session = node.open()
    later_s = node.clock.now_s() + 60.0
    with ThreadPoolExecutor(2) as threads:
        attempts = [threads.submit(node.sessions.prepare, session, op(1), node.numbered(0, 2), later_s)]
        wait_until(lambda: bool(session.granting))
        with pytest.raises(DeadlineExceeded):
            node.prepare_in(session, 0, 2)
        attempts.append(threads.submit(node.sessions.prepare, session, op(1), node.numbered(0, 2), later_s))
        node.table.abandon(full)
        answers = [attempt.result(60.0) for attempt in attempts]
    assert answers[0] == answers[1]
    assert set(answers[0][0]) == {StoreOutcome.STORED}
    assert node.used == 2


def test_complete_retried_returns_the_same_answer(node: Node) -> None:
    session = node.open()
    node.prepare_in(session, 0, 4)
    assert node.complete_in(session, 0, 4) == [StoreOutcome.STORED] * 4
    assert node.complete_in(session, 0, 4) == [StoreOutcome.STORED] * 4


def test_complete_in_two_steps_stores_both_parts(node: Node) -> None:
    session = node.open()
    node.prepare_in(session, 0, 4)
    assert node.complete_in(session, 0, 2) == [StoreOutcome.STORED] * 2
    assert node.complete_in(session, 0, 4) == [StoreOutcome.STORED] * 4


def test_engine_dies_releases_everything(node: Node) -> None:
    session = node.open()
    node.prepare_in(session, 0, 2)
    node.complete_in(session, 0, 2)
    node.prepare_in(session, 10, 3, operation=2)
    blocks = [block for block in node.table.pin_resident(node.namespace, [numbered_key(0)]) if block is not None]
    node.sessions.lease(session, blocks)
    node.sessions.end(session.session_id)
    assert node.used == 2
    assert blocks[0].pins == 0
    with pytest.raises(LeaseLost):
        node.sessions.get(session.session_id)


def test_store_too_slow_is_lost_but_keeps_slots_reserved(node: Node) -> None:
    session = node.open()
    node.prepare_in(session, 0, 3)
    node.clock.advance(31.0)
    node.sessions.expire()
    assert node.complete_in(session, 0, 3) == [StoreOutcome.LOST] * 3
    assert node.used == 3, "nobody can stop the engine's copy: its slots must not be given to others"
    node.sessions.end(session.session_id)
    assert node.used == 0


def test_keys_of_expired_store_are_free_again(node: Node) -> None:
    slow, other = node.open(), node.open()
    node.prepare_in(slow, 0, 3)
    node.complete_in(slow, 0, 1)
    node.clock.advance(31.0)
    node.sessions.expire()
    node.sessions.expire()
    assert node.gate.stores_under_way() == 0
    absent = node.table.claim(node.namespace, [numbered_key(1)])
    assert absent.claimed_absent == [0], "a load waits for a store that never ends"
    node.table.unclaim([numbered_key(1)], ())
    outcomes, _ = node.prepare_in(other, 0, 3, operation=2)
    assert list(outcomes) == [StoreOutcome.EXISTS, StoreOutcome.STORED, StoreOutcome.STORED]
    assert node.complete_in(slow, 0, 3) == [StoreOutcome.LOST] * 3
    assert node.used == 5
    node.sessions.abort(slow, op(1))
    assert node.used == 3
    assert node.complete_in(other, 1, 2, operation=2) == [StoreOutcome.STORED] * 2


def test_leases_expire_by_time(node: Node) -> None:
    session = node.open()
    node.prepare_in(session, 0, 1)
    node.complete_in(session, 0, 1)
    blocks = [block for block in node.table.pin_resident(node.namespace, [numbered_key(0)]) if block is not None]
    lease = node.sessions.lease(session, blocks)
    node.clock.advance(5.5)
    node.sessions.expire()
    assert blocks[0].pins == 0
    node.sessions.release(session, [lease])
    assert blocks[0].pins == 0, "a release after expiry must not unpin twice"


def test_lease_beyond_limit_is_rejected_without_ending(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client must keep the session: it drops one on ``LeaseLost``."""
    monkeypatch.setattr("kvstore.node.rpc.sessions.MAX_LEASES_PER_SESSION", 1)
    session = node.open()
    node.prepare_in(session, 0, 1)
    node.complete_in(session, 0, 1)
    blocks = [block for block in node.table.pin_resident(node.namespace, [numbered_key(0)]) if block]
    lease = node.sessions.lease(session, blocks)
    node.table.pin_again(blocks)
    with pytest.raises(CapacityExceeded):
        node.sessions.lease(session, blocks)
    assert blocks[0].pins == 1
    node.sessions.release(session, [lease])
    assert node.sessions.get(session.session_id) is session


async def test_load_stream_shows_bytes_of_its_load_only(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of a load that waits do not count what other loads receive, so its client can see that it stalls."""
    monkeypatch.setattr(load_stream, "PROGRESS_INTERVAL_S", 0.001)
    control, proceed = ReadControl(), threading.Event()
    sources = SlowSources(NODE_ID, node.clock)
    timer = LoadTimings(NODE_ID, 1.0, node.counters, RecentLoads(), sources, node.clock).begin(1, SHAPE.block_bytes)

    def runs() -> Runs:
        with waiting_for(NodeId("far"), control):
            assert proceed.wait(10.0)
        yield from ()

    threads = WaitThreads(1, "loads", node.counters)
    seen: list[int] = []
    streams = LoadStreams(node.table, node.sessions, node.clock)
    async for message in streams.stream(node.open(), runs(), threads, timer, want_checksums=False):
        seen.append(message.bytes_received)
        node.counters.add(transport_metrics.PEER_BYTES_RECEIVED, 1 << 20)
        if len(seen) == 3:
            control.add_bytes(7)
        elif len(seen) == 5:
            proceed.set()
    threads.close()
    assert seen[:5] == [0, 0, 0, 7, 7]


def test_answer_names_block_found_corrupt_since(node: Node) -> None:
    session = node.open()
    node.store("a", 0, 2)
    run = node.loader.load_resident(node.request(node.keys("a", 2), 1.0))
    assert run is not None
    with node.table.residency.lock:
        node.table.residency.enqueue_writeback(run.pinned()[0])
    node.table.writeback_failed(*node.table.take_pending(1, 1 << 20, 0.0), corrupt=True)
    message = LoadStreams(node.table, node.sessions, node.clock).message(session, run, want_checksums=False)
    assert [one.outcome for one in message.runs] == [Outcome.CORRUPT, Outcome.HIT]
    assert node.used == 1
    node.sessions.release(session, [message.lease_id])


def test_lease_in_ended_session_unpins_blocks(node: Node) -> None:
    session = node.open()
    node.prepare_in(session, 0, 1)
    node.complete_in(session, 0, 1)
    blocks = [block for block in node.table.pin_resident(node.namespace, [numbered_key(0)]) if block is not None]
    node.sessions.end(session.session_id)
    with pytest.raises(LeaseLost):
        node.sessions.lease(session, blocks)
    assert blocks[0].pins == 0


def test_session_without_arena_connection_ends(node: Node) -> None:
    session = node.sessions.open(node.namespace, "ghost")
    node.clock.advance(UNCONNECTED_TTL_S + 1)
    node.sessions.expire()
    with pytest.raises(LeaseLost):
        node.sessions.get(session.session_id)


def test_engine_connects_while_its_session_expires(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no slots that the end of the session gives to others."""
    other = node.open()
    node.prepare_in(other, 0, 1)
    node.complete_in(other, 0, 1)
    blocks = [block for block in node.table.pin_resident(node.namespace, [numbered_key(0)]) if block is not None]
    node.sessions.lease(other, blocks)
    session = node.sessions.open(node.namespace, "late")
    node.clock.advance(UNCONNECTED_TTL_S + 1)
    connected: list[bool] = []
    unpin = node.table.unpin

    def connect(blocks: Iterable[Block]) -> None:
        """The engine connects after the lease of the other engine was found expired."""
        if not connected:
            connected.append(node.sessions.connect(session.session_id))
            if connected[0]:
                node.prepare_in(session, 10, 2)
        unpin(blocks)

    monkeypatch.setattr(node.table, "unpin", connect)
    node.sessions.expire()
    assert len(connected) == 1
    assert node.used == 1 + 2 * connected[0]


def test_arena_connection_is_accepted_once_per_session(node: Node) -> None:
    session = node.open()
    assert not node.sessions.connect(session.session_id)
    assert not node.sessions.connect(SessionId(bytes(16)))


@pytest.mark.parametrize(
    ("far", "advice"),
    [
        ({}, "connect to the arena socket"),
        ({"over_tcp": True}, "connect to the arena socket"),
        ({"remote": True, "over_tcp": True}, "store over the data plane"),
    ],
)
def test_prepare_without_arena_is_denied(node: Node, far: dict[str, bool], advice: str) -> None:
    """Otherwise an engine could complete slots unwritten, and read bytes that other engines left there."""
    node.prepare_in(local := node.open(), 0, 4)
    node.complete_in(local, 0, 4)
    session = node.sessions.open(node.namespace, "thief", **far)
    with pytest.raises(PermissionDenied, match=advice):
        node.prepare_in(session, 100, 1)
    assert node.used == 4, "nothing left for it either"
    assert node.complete_in(session, 100, 1) == [StoreOutcome.LOST]
    assert node.counters.get("store_without_arena_total") == 1


def test_stores_in_progress_are_bounded(node: Node) -> None:
    session = node.open()
    for number in range(MAX_STORES_PER_SESSION):
        node.prepare_in(session, number, 1, operation=number)
    with pytest.raises(CapacityExceeded):
        node.prepare_in(session, 10_000, 1, operation=10_000)
    node.complete_in(session, 0, 1, operation=0)
    node.prepare_in(session, 10_000, 1, operation=10_000)


def test_store_aborted_before_its_grant_gets_no_slots(node: Node) -> None:
    session = node.open()
    node.sessions.abort(session, op(1))
    with pytest.raises(LeaseLost):
        node.prepare_in(session, 0, 4)
    assert node.used == 0


def test_prepare_without_grants_pins_nothing(node: Node) -> None:
    session = node.open()
    outcomes, _ = node.prepare_in(session, 0, 300)
    granted = outcomes.index(StoreOutcome.SKIPPED)
    node.complete_in(session, 0, granted)
    parent = node.table.pin_resident(node.namespace, [numbered_key(granted - 1)])[0]
    assert parent is not None
    node.table.unpin([parent])
    more = BlockRun(node.namespace.namespace_id, numbered_key(granted - 1), granted, (numbered_key(granted),))
    assert node.sessions.prepare(session, op(2), more, node.clock.now_s())[0] == bytes([StoreOutcome.SKIPPED])
    assert parent.pins == 0, "the parent is guarded only while children are being written"


# ---- sessions of engines of other hosts ----
def test_remote_session_idle_ends(node: Node) -> None:
    session = node.sessions.open(node.namespace, "far", remote=True)
    assert not node.sessions.connect(session.session_id)
    node.clock.advance(UNCONNECTED_TTL_S + 1)
    node.sessions.expire()
    assert node.sessions.get(session.session_id) is session, "it need not come to the door"
    node.clock.advance(REMOTE_IDLE_TTL_S - 1)
    node.sessions.expire()
    assert node.sessions.get(session.session_id) is session, "it was used"
    node.clock.advance(REMOTE_IDLE_TTL_S + 1)
    node.sessions.expire()
    with pytest.raises(LeaseLost):
        node.sessions.get(session.session_id)


def test_remote_session_with_a_lease_continues(node: Node) -> None:
    local = node.open()
    node.prepare_in(local, 0, 1)
    node.complete_in(local, 0, 1)
    session = node.sessions.open(node.namespace, "far", remote=True)
    node.clock.advance(REMOTE_IDLE_TTL_S + 1)
    blocks = [block for block in node.table.pin_resident(node.namespace, [numbered_key(0)]) if block is not None]
    node.sessions.lease(session, blocks)
    node.sessions.expire()
    assert blocks[0].pins == 1
    node.clock.advance(6.0)
    node.sessions.expire()
    node.sessions.expire()
    assert blocks[0].pins == 0
    with pytest.raises(LeaseLost):
        node.sessions.get(session.session_id)


def test_release_concurrent_with_end_unpins_once(node: Node) -> None:
    session = node.open()
    node.prepare_in(session, 0, 1)
    node.complete_in(session, 0, 1)
    blocks = [block for block in node.table.pin_resident(node.namespace, [numbered_key(0)]) if block is not None]
    lease = node.sessions.lease(session, blocks)
    node.sessions.end(session.session_id)
    node.sessions.release(session, [lease])
    assert blocks[0].pins == 0
    with pytest.raises(LeaseLost):
        node.sessions.lease(session, [block for block in node.table.pin_resident(node.namespace, [numbered_key(0)]) if block])
    assert blocks[0].pins == 0


def test_sessions_over_tcp_are_at_most_half(node: Node) -> None:
    for _ in range(MAX_SESSIONS // 2):
        node.sessions.open(node.namespace, "far", remote=True, over_tcp=True)
    with pytest.raises(CapacityExceeded):
        node.sessions.open(node.namespace, "far", remote=True, over_tcp=True)
    for _ in range(MAX_SESSIONS // 2):
        node.sessions.open(node.namespace, "here")
    with pytest.raises(CapacityExceeded):
        node.sessions.open(node.namespace, "here")


def test_sessions_over_tcp_of_a_tenant_have_a_limit(node: Node) -> None:
    context = copy_context()
    context.run(set_caller, Principal("acme", AccessRole.TENANT))
    open_far = partial(node.sessions.open, node.namespace, "far", remote=True, over_tcp=True)
    mine = [context.run(open_far) for _ in range(MAX_SESSIONS // 2 // TENANT_SHARE)]
    with pytest.raises(CapacityExceeded, match="tenant limit"):
        context.run(open_far)
    open_far()
    node.sessions.end(mine[0].session_id)
    context.run(open_far)


def test_gate_drain_ends_while_stopping_stays_closed(node: Node) -> None:
    node.gate.set_draining(True)
    node.gate.stop()
    node.gate.set_draining(False)
    assert node.gate.closed


def test_closed_gate_grants_no_slots_and_finishes_stores(node: Node) -> None:
    session = node.open()
    node.prepare_in(session, 0, 3)
    node.gate.set_draining(True)
    assert node.gate.stores_under_way() == 3
    assert node.complete_in(session, 0, 3) == [StoreOutcome.STORED] * 3
    assert node.gate.stores_under_way() == 0
    outcomes, offsets = node.prepare_in(session, 0, 5, operation=2)
    assert list(outcomes) == [StoreOutcome.EXISTS] * 3 + [StoreOutcome.SKIPPED] * 2
    assert offsets == b""
    assert node.counters.get("store_skipped_closed_blocks_total") == 2
    assert node.used == 3
    node.gate.set_draining(False)
    assert list(node.prepare_in(session, 0, 5, operation=3)[0]) == [StoreOutcome.EXISTS] * 3 + [StoreOutcome.STORED] * 2
    vigil = node.table.subscribe(node.namespace, [numbered_key(9)])
    assert node.gate.awaits([numbered_key(8), numbered_key(9)])
    node.table.unsubscribe(vigil)
    assert not node.gate.awaits([numbered_key(9)])
