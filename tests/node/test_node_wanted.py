"""Who leaves while a node waits for it: the wait ends at once, whatever it waits for, and everything it held is given back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest
from test_node_staging import DRAM, SHAPE, SPEC, Node, Storage, keys

from kvstore.core.clock import MonotonicClock
from kvstore.core.types import BlockKey, BlockRun, Outcome
from kvstore.node.base.cancellation import Wanted, ending, over, result, wait
from kvstore.node.loads.prompt_wait import Prompts
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.grants import LoadClaim
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NamespaceRegistry, NodeNamespace
from kvstore.observe.counters import Counters
from kvstore.testing.memory_provider import ProviderGate
from kvstore.transport.contract import ReadPart, ReadRequest

DEADLINE_S = 60.0
"""Of the waits; nothing here may come near it."""
BOUND_S = 10.0


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node(arena_bytes=16 * SHAPE.block_bytes, buffer_bytes=8 * SHAPE.block_bytes)
    yield made
    made.empty()
    made.close()


class Call:
    """Work of a caller that may leave."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.wanted = Wanted()
        self.answer: Future[object] = Future()
        self._work = work
        self._thread = threading.Thread(target=self.wanted.context().run, args=(self._run,))
        self._thread.start()

    def _run(self) -> None:
        try:
            self.answer.set_result(self._work())
        except BaseException as error:  # noqa: BLE001  # whoever asks is told
            self.answer.set_exception(error)

    def sleeps(self) -> Call:
        while not self.wanted._wakes:
            assert not self.answer.done(), "it did not wait"
        return self

    def leave(self) -> object:
        self.wanted.end()
        return self.answer.result(BOUND_S)


def later(node: Node) -> float:
    return node.clock.now_s() + DEADLINE_S


def fill(node: Node, count: int) -> list[Block]:
    """Blocks that somebody uses: they do not leave."""
    run = BlockRun(SPEC.namespace, None, 0, tuple(keys(64)[-count:]))
    prepared = node.table.prepare(node.namespace, run, node.clock.now_s())
    node.table.complete(prepared, list(run.keys), [bytes(8 * SHAPE.layers)] * count)
    return [block for block in node.table.pin_resident(node.namespace, run.keys) if block is not None]


def test_a_wait_for_room_ends(node: Node) -> None:
    pinned = fill(node, 16)
    call = Call(lambda: node.table.reserve(SHAPE, 2, later(node))).sleeps()
    assert call.leave() is None
    assert node.counters.get("node_waits_left_total") == 1
    node.table.unpin(pinned)


def test_a_stores_wait_for_room_ends(node: Node) -> None:
    pinned = fill(node, 16)
    run = BlockRun(SPEC.namespace, None, 0, tuple(keys(2)))
    call = Call(lambda: node.table.prepare(node.namespace, run, later(node))).sleeps()
    prepared = call.leave()
    assert prepared.slots == {}  # type: ignore[attr-defined]
    node.table.unpin(pinned)
    assert len(node.table.prepare(node.namespace, run, node.clock.now_s()).slots) == 2, "its keys are not taken any more"
    node.table.abandon(node.table.residency.preparing[keys(1)[0]])


def test_a_wait_for_anothers_load_ends(node: Node) -> None:
    claim = node.table.claim(node.namespace, keys(1))
    call = Call(lambda: list(node.loader.load(node.namespace, keys(1), later(node)))).sleeps()
    assert not any(part.pinned() for part in call.leave())  # type: ignore[attr-defined]
    node.table.unclaim([keys(1)[at] for at in claim.claimed_absent], ())


def test_a_load_whose_windows_wait_for_room_ends(node: Node) -> None:
    """Its claims, too: who comes next brings the blocks at once."""
    storage = Storage("s")
    storage.provider.put(SPEC.namespace, range(12))
    pinned = fill(node, 16)
    call = Call(lambda: list(node.loader.load(node.namespace, keys(12), later(node), sources=[storage.source(0, 12)]))).sleeps()
    assert not any(part.pinned() for part in call.leave())  # type: ignore[attr-defined]
    node.table.unpin(pinned)
    parts = list(node.loader.load(node.namespace, keys(2), later(node), sources=[storage.source(0, 12)]))
    assert [outcome for part in parts for outcome in part.outcomes] == [Outcome.HIT] * 2
    for part in parts:
        node.table.unpin(part.pinned())
    storage.server.stop()


def test_what_other_windows_brought_is_given_back_where_one_fails(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage("s")
    storage.provider.put(SPEC.namespace, range(4))
    claim, begun = node.table.claim, threading.Event()

    def failing(namespace: NodeNamespace, wanted: Sequence[BlockKey]) -> LoadClaim:
        if wanted[0] == keys(1)[0]:
            assert begun.wait(20.0)  # a window that has not begun would be cancelled instead
            raise RuntimeError("a bug")
        begun.set()
        return claim(namespace, wanted)

    monkeypatch.setattr(node.table, "claim", failing)
    with pytest.raises(RuntimeError, match="a bug"):
        list(node.loader.load(node.namespace, keys(4), later(node), sources=[storage.source(0, 4)]))
    assert node.counters.get("load_window_bugs_total") == 1
    assert [block.pins for block in node.table.snapshot()] == [0, 0], "of the window that went well"
    storage.server.stop()


@pytest.mark.parametrize("layer_group", [2, 0])
def test_a_load_from_a_node_that_hangs_ends(node: Node, layer_group: int) -> None:
    storage = Storage("s")
    storage.provider.put(SPEC.namespace, range(6))
    gate, read = ProviderGate(), storage.provider.read

    def hanging(request: ReadRequest) -> Iterator[ReadPart]:
        gate()
        yield from read(request)

    storage.provider.read = hanging  # type: ignore[method-assign]
    sources = [storage.source(0, 6)]

    def load() -> None:
        if layer_group:
            parts = node.load(6, sources, layer_group, wait_s=DEADLINE_S)
        else:
            parts = node.loader.load(node.namespace, keys(6), later(node), sources=sources)
        for part in parts:
            node.table.unpin(part.pinned())

    call = Call(load)
    gate.wait_reached()
    call.leave()
    assert node.buffer.used_bytes == 0
    gate.open.set()
    storage.server.stop()


def test_staged_loads_that_wait_in_line_leave_it(node: Node) -> None:
    storage = Storage("s")
    assert node.buffer.admit(8 * SHAPE.block_bytes, node.clock.now_s())
    calls = [Call(lambda: list(node.load(8, [storage.source(0, 8)], 2, wait_s=DEADLINE_S))).sleeps() for _ in range(12)]
    assert node.buffer.waiting == 12
    for call in calls:
        call.leave()
    assert node.buffer.waiting == 0
    assert node.counters.get("node_waits_left_total") == 12
    node.buffer.release(8 * SHAPE.block_bytes)
    storage.server.stop()


def test_prompts_that_nobody_waits_for_leave_their_room(node: Node) -> None:
    """Two have room, the others stand in line; all leave, and one that needs the whole buffer has it at once."""
    prompts = Prompts(node.loader._node_id, node.table, node.loader, node.buffer, node.counters)

    def arrive(count: int) -> list[Outcome]:
        outcomes = []
        for part in prompts.arrive(node.namespace, keys(count), later(node)):
            node.table.unpin(part.pinned())
            outcomes += part.outcomes
        return outcomes

    calls = [Call(lambda: arrive(4)).sleeps() for _ in range(20)]
    while node.buffer.waiting < 18:  # they stand in line a moment after they can be woken
        assert not any(call.answer.done() for call in calls), "one did not wait"
    assert (node.buffer.used_bytes, node.buffer.waiting) == (8 * SHAPE.block_bytes, 18)
    whole = Call(lambda: arrive(8)).sleeps()
    for call in calls:
        call.leave()
    run = BlockRun(SPEC.namespace, None, 0, tuple(keys(8)))
    prepared = node.table.prepare(node.namespace, run, node.clock.now_s())
    node.table.complete(prepared, keys(8), [bytes(8 * SHAPE.layers)] * 8)
    assert whole.answer.result(BOUND_S) == [Outcome.HIT] * 8
    assert not node.table.residency.waiters
    assert node.counters.get("node_waits_left_total") == 20


def test_a_wait_for_the_index_ends() -> None:
    log, clock = ReplicaChangeLog([DRAM], Counters(), MonotonicClock()), MonotonicClock()
    log.stored(DRAM, Block(NamespaceRegistry().of_spec(SPEC), keys(1)[0], None, 0, b""))
    call = Call(lambda: log.wait_published([DRAM], clock.now_s() + DEADLINE_S)).sleeps()
    assert call.leave() is False


# ---- the thing itself ----
def test_what_ends_the_whole_ends_its_parts_and_not_the_other_way() -> None:
    whole = Wanted()
    part = whole.context().run(Wanted)
    other = whole.context().run(Wanted)
    part.end()
    assert (whole.over, other.over) == (False, False)
    whole.end()
    assert other.over
    assert whole.context().run(Wanted).over, "a part of what has ended already"


def test_what_nobody_waits_for_is_not_begun() -> None:
    hold = threading.Event()
    begun: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold.wait)
        behind = pool.submit(begun.append, 1)
        call = Call(lambda: result(behind)).sleeps()
        with pytest.raises(CancelledError):
            call.leave()
        hold.set()
    assert begun == []


def test_without_a_call_everything_is_wanted() -> None:
    assert not over()
    condition = threading.Condition()
    with condition:
        assert not wait(condition, 0, Counters())
    with ending(lambda: pytest.fail("nobody left")):
        pass


def test_stopping_comes_at_once_where_nobody_waits_any_more() -> None:
    wanted, stopped = Wanted(), []
    wanted.end()

    def work() -> None:
        with ending(lambda: stopped.append(1)):
            assert over()

    wanted.context().run(work)
    assert stopped == [1]
