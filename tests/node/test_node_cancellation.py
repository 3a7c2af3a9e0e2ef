"""A caller that disconnects while a node waits for it: the wait ends at once, and everything it held is released."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from kvstore.core.clock import MonotonicClock
from kvstore.core.types import BlockKey, BlockRun, Outcome
from kvstore.node.base.cancellation import wait
from kvstore.node.loads.runs import LoadedRun
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.grants import LoadClaim
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NamespaceRegistry, NodeNamespace
from kvstore.observe.counters import Counters
from kvstore.testing.memory_provider import ProviderGate
from kvstore.transport.contract import ReadPart, ReadRequest
from support.callers import BOUND_S, CancellableCall
from support.layered_node import SHAPE, SPEC, LayeredNode, StorageNode, keys
from support.node_harness import DRAM
from support.wait import wait_until

DEADLINE_S = 60.0
"""Deadline of the waits. A test fails if it runs almost this long."""


@pytest.fixture
def node() -> Iterator[LayeredNode]:
    made = LayeredNode(arena_bytes=16 * SHAPE.block_bytes, buffer_bytes=8 * SHAPE.block_bytes)
    yield made
    made.check_empty()
    made.close()


@pytest.fixture
def storage() -> Iterator[StorageNode]:
    made = StorageNode("s", range(12))
    yield made
    made.server.stop()


def deadline_s(node: LayeredNode) -> float:
    return node.clock.now_s() + DEADLINE_S


def load_all(node: LayeredNode, count: int, sources: Sequence[object] = (), layer_group: int = 0) -> list[LoadedRun]:
    return list(node.load(count, sources, layer_group, wait_s=DEADLINE_S))  # type: ignore[arg-type]


def test_cancel_wait_for_slots_ends_it(node: LayeredNode) -> None:
    pinned = node.pinned_blocks(16)
    call = CancellableCall(lambda: node.table.reserve(SHAPE, 2, deadline_s(node))).waiting()
    assert call.cancel() is None
    assert node.counters.get("node_waits_cancelled_total") == 1
    node.table.unpin(pinned)


def test_cancel_store_that_waits_for_slots_frees_its_keys(node: LayeredNode) -> None:
    pinned = node.pinned_blocks(16)
    run = BlockRun(SPEC.namespace, None, 0, tuple(keys(2)))
    call = CancellableCall(lambda: node.table.prepare(node.namespace, run, deadline_s(node))).waiting()
    grant = call.cancel()
    assert grant.slots == {}  # type: ignore[attr-defined]
    node.table.unpin(pinned)
    again = node.table.prepare(node.namespace, run, node.clock.now_s())
    assert len(again.slots) == 2, "the cancelled store still holds the keys"
    node.table.abandon(again)


def test_cancel_load_that_waits_for_another_load_ends_it(node: LayeredNode) -> None:
    claim = node.table.claim(node.namespace, keys(1))
    call = CancellableCall(lambda: load_all(node, 1)).waiting()
    assert not any(run.pinned() for run in call.cancel())  # type: ignore[attr-defined]
    node.table.unclaim([keys(1)[index] for index in claim.claimed_absent], ())


def test_cancel_load_that_waits_for_slots_frees_its_claims(node: LayeredNode, storage: StorageNode) -> None:
    pinned = node.pinned_blocks(16)
    call = CancellableCall(lambda: load_all(node, 12, [storage.source(0, 12)])).waiting()
    assert not any(run.pinned() for run in call.cancel())  # type: ignore[attr-defined]
    node.table.unpin(pinned)
    runs = load_all(node, 2, [storage.source(0, 12)])
    assert [outcome for run in runs for outcome in run.outcomes] == [Outcome.HIT] * 2
    for run in runs:
        node.table.unpin(run.pinned())


def test_load_window_fails_others_are_released(node: LayeredNode, storage: StorageNode, monkeypatch: pytest.MonkeyPatch) -> None:
    claim, begun = node.table.claim, threading.Event()

    def failing(namespace: NodeNamespace, requested: Sequence[BlockKey]) -> LoadClaim:
        if requested[0] == keys(1)[0]:
            assert begun.wait(20.0)  # a window that has not begun would be cancelled instead
            raise RuntimeError("a bug")
        begun.set()
        return claim(namespace, requested)

    monkeypatch.setattr(node.table, "claim", failing)
    with pytest.raises(RuntimeError, match="a bug"):
        load_all(node, 4, [storage.source(0, 4)])
    assert node.counters.get("load_window_bugs_total") == 1
    assert [block.pins for block in node.table.snapshot()] == [0, 0], "blocks of the other window"


@pytest.mark.parametrize("layer_group", [2, 0])
def test_cancel_load_from_hung_node_ends_it(node: LayeredNode, storage: StorageNode, layer_group: int) -> None:
    gate, read = ProviderGate(), storage.provider.read

    def hanging(request: ReadRequest) -> Iterator[ReadPart]:
        gate()
        yield from read(request)

    storage.provider.read = hanging  # type: ignore[method-assign]

    def load() -> None:
        for run in node.load(6, [storage.source(0, 6)], layer_group, wait_s=DEADLINE_S):
            node.table.unpin(run.pinned())

    call = CancellableCall(load)
    gate.wait_reached()
    call.cancel()
    assert node.budget.used_bytes == 0
    gate.open.set()


def test_cancel_queued_layered_loads_leaves_the_queue(node: LayeredNode, storage: StorageNode) -> None:
    assert node.budget.admit(8 * SHAPE.block_bytes, node.clock.now_s())
    calls = [CancellableCall(lambda: load_all(node, 8, [storage.source(0, 8)], 2)).waiting() for _ in range(12)]
    assert node.budget.waiting == 12
    for call in calls:
        call.cancel()
    assert node.budget.waiting == 0
    assert node.counters.get("node_waits_cancelled_total") == 12
    node.budget.release(8 * SHAPE.block_bytes)


def test_cancel_prompt_waits_release_the_buffer(node: LayeredNode) -> None:
    """Two prompts are admitted and the others are queued. All are cancelled, and a prompt as large as the buffer is admitted."""
    prompts = node.prompt_waits()

    def wait_for_prompt(count: int) -> list[Outcome]:
        outcomes = []
        for run in prompts.wait(node.request(keys(count), DEADLINE_S)):
            node.table.unpin(run.pinned())
            outcomes += run.outcomes
        return outcomes

    calls = [CancellableCall(lambda: wait_for_prompt(4)) for _ in range(20)]
    wait_until(lambda: (node.budget.used_bytes, node.budget.waiting) == (8 * SHAPE.block_bytes, 18))
    wait_until(lambda: node.gate.awaits(keys(1)))
    whole = CancellableCall(lambda: wait_for_prompt(8))
    wait_until(lambda: node.budget.waiting == 19)
    for call in calls:
        call.cancel()
    wait_until(lambda: node.gate.awaits([keys(8)[7]]))
    grant = node.table.prepare(node.namespace, BlockRun(SPEC.namespace, None, 0, tuple(keys(8))), node.clock.now_s())
    node.table.complete(grant, keys(8), [bytes(8 * SHAPE.layers)] * 8)
    assert whole.answer.result(BOUND_S) == [Outcome.HIT] * 8
    assert not node.gate.awaits(keys(8))


def test_cancel_wait_for_the_index_ends_it() -> None:
    log, clock = ReplicaChangeLog([DRAM], Counters(), MonotonicClock()), MonotonicClock()
    log.stored(DRAM, Block(NamespaceRegistry().of_spec(SPEC), keys(1)[0], None, 0, b""))
    call = CancellableCall(lambda: log.wait_published([DRAM], clock.now_s() + DEADLINE_S)).waiting()
    assert call.cancel() is False


def test_wait_without_a_scope_ends_at_its_timeout() -> None:
    condition, counters = threading.Condition(), Counters()
    with condition:
        assert not wait(condition, 0, counters)
    assert not counters.snapshot()
