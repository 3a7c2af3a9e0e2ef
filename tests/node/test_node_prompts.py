"""Awaited prompts: every block is kept from the moment at which it comes, whoever brings it, and given back with the prompt."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from test_node_staging import SHAPE, SPEC, Node, Storage, keys

from kvstore.core.checksum import layer_checksums
from kvstore.core.types import BlockRun, NamespaceId, Outcome, StoreOutcome
from kvstore.node.base.cancellation import Wanted
from kvstore.node.loads.loader import Part
from kvstore.node.loads.prompt_wait import Prompts
from kvstore.testing.memory_provider import block_payload

LONG_S = 20.0


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node(arena_bytes=40 * SHAPE.block_bytes)
    yield made
    made.empty()
    made.close()


def store(node: Node, first: int, count: int, *, tail: bool = False) -> None:
    run = BlockRun(SPEC.namespace, keys(64)[first - 1] if first else None, first, tuple(keys(64)[first : first + count]))
    prepared = node.table.prepare(node.namespace, run, node.clock.now_s() + LONG_S)
    if tail:
        prepared.tail = run.keys[-1]
    sums = []
    for number, (key, slot) in enumerate(prepared.slots.items(), start=first):
        assert key == keys(64)[number]
        node.arena.view(slot, SHAPE.block_bytes)[:] = block_payload(number, SHAPE)
        sums.append(layer_checksums(memoryview(block_payload(number, SHAPE)), SHAPE))
    assert set(node.table.complete(prepared, list(run.keys), sums)) == {StoreOutcome.STORED}


def prompts_of(node: Node) -> Prompts:
    return Prompts(node.loader._node_id, node.table, node.loader, node.buffer, node.counters)


class Waiting:
    """A decode engine that waits for a prompt."""

    def __init__(
        self, node: Node, count: int, wait_s: float = LONG_S, *, transfer: str = "", prompts: Prompts | None = None
    ) -> None:
        self.node = node
        self.prompts = prompts if prompts is not None else prompts_of(node)
        self.transfer = transfer
        self.parts: list[Part] = []
        self.wanted = Wanted()
        self.thread = threading.Thread(target=self.wanted.context().run, args=(self._wait, count, wait_s))
        self.thread.start()
        while not node.table.residency.waiters and self.thread.is_alive():
            pass

    def _wait(self, count: int, wait_s: float) -> None:
        self.parts += self.prompts.arrive(self.node.namespace, keys(count), self.node.clock.now_s() + wait_s, self.transfer)

    def leave(self) -> list[Outcome]:
        """Its engine goes away."""
        self.wanted.end()
        return self.end(alone=False)

    def end(self, *, alone: bool = True) -> list[Outcome]:
        self.thread.join(LONG_S)
        assert not self.thread.is_alive()
        for part in self.parts:
            for at, block in enumerate(part.blocks):
                if block is not None:
                    assert self.node.layers_right(block, 0, SHAPE.layers)
                    assert block.key == keys(64)[part.first + at]
            self.node.table.unpin(part.pinned())
        self.node.table.validate()
        assert not alone or not self.node.table.residency.waiters
        return [outcome for part in sorted(self.parts, key=lambda part: part.first) for outcome in part.outcomes]


class Queued(Waiting):
    """One for which there is no room yet."""

    def __init__(self, node: Node, count: int) -> None:
        before = node.buffer.waiting
        super().__init__(node, count, 1000.0)
        while node.buffer.waiting == before and self.thread.is_alive():
            pass


def test_blocks_from_stores_and_loads_make_a_prompt(node: Node) -> None:
    storage = Storage("s")
    storage.provider.put(SPEC.namespace, range(10))
    waiting = Waiting(node, 12)
    store(node, 10, 2, tail=True)
    node.take(node.load(10, [storage.source(0, 10)], 2))
    assert waiting.end() == [Outcome.HIT] * 12
    assert node.counters.get("prompts_complete_total") == 1
    storage.server.stop()


def test_what_came_early_does_not_leave_before_the_rest_is_there(node: Node) -> None:
    waiting = Waiting(node, 8)
    store(node, 4, 4)
    node.table.evict_dram()
    for chain in range(12, 60, 6):  # everything else in the arena is replaced
        store(node, chain, 4)
        node.table.evict_dram()
    store(node, 0, 4)
    assert waiting.end() == [Outcome.HIT] * 8


def test_what_only_passes_through_stays_for_who_waits() -> None:
    node = Node(keep=False)
    storage = Storage("s")
    storage.provider.put(SPEC.namespace, range(4))
    waiting = Waiting(node, 6)
    node.take(node.load(4, [storage.source(0, 4)], 2))  # its leases end here
    store(node, 4, 2)
    assert waiting.end() == [Outcome.HIT] * 6
    node.empty()
    storage.server.stop()
    node.close()


def test_what_does_not_come_is_told_in_time(node: Node) -> None:
    store(node, 0, 2)
    waiting = Waiting(node, 5, wait_s=0.1)
    assert waiting.end() == [Outcome.HIT] * 2 + [Outcome.TIMEOUT] * 3
    assert node.counters.get("prompts_incomplete_total") == 1


def test_who_leaves_gives_room_and_blocks_back_at_once(node: Node) -> None:
    """Waits are far longer than the test may take: one that a leaver does not end is seen."""
    node.buffer.capacity_bytes = 6 * SHAPE.block_bytes
    store(node, 0, 2)
    first = Waiting(node, 6, wait_s=1000.0)
    second, third = Queued(node, 5), Queued(node, 6)
    assert node.buffer.waiting == 2
    assert second.leave() == [Outcome.NO_ROOM] * 5, "who waits in line, too"
    assert first.leave() == [Outcome.HIT] * 2 + [Outcome.TIMEOUT] * 4
    store(node, 2, 4)
    assert third.end() == [Outcome.HIT] * 6
    assert (node.buffer.used_bytes, node.buffer.waiting) == (0, 0)
    assert node.counters.get("prefill_buffer_timeouts_total") == 0


def test_a_prompt_larger_than_the_buffer_has_no_room(node: Node) -> None:
    node.buffer.capacity_bytes = SHAPE.block_bytes
    assert Waiting(node, 2).end() == [Outcome.NO_ROOM] * 2


def test_the_same_key_of_another_namespace_is_not_meant(node: Node) -> None:
    waiting = Waiting(node, 2, wait_s=0.3)
    other = node.namespaces.of_shape(NamespaceId(b"n" * 16), SHAPE)
    prepared = node.table.prepare(other, BlockRun(other.namespace_id, None, 0, tuple(keys(2))), node.clock.now_s())
    node.table.complete(prepared, keys(2), [bytes(8 * SHAPE.layers)] * 2)
    node.table.validate()
    assert waiting.end() == [Outcome.TIMEOUT] * 2


def test_two_wait_for_the_same_blocks_and_one_leaves(node: Node) -> None:
    one, two = Waiting(node, 4, wait_s=0.1), Waiting(node, 4)
    assert one.end() == [Outcome.TIMEOUT] * 4 if not node.table.residency.waiters else True
    one.thread.join(LONG_S)
    store(node, 0, 4)
    assert two.end() == [Outcome.HIT] * 4


def test_a_closing_node_ends_the_wait() -> None:
    node = Node()
    waiting = Waiting(node, 4)
    node.table.close()
    assert waiting.end() == [Outcome.TIMEOUT] * 4
    node.close()


FOR_EVER_S = 1000.0


def test_a_transfer_that_is_abandoned_is_answered_with_what_is_there(node: Node) -> None:
    """All calls of it, one a shard and group; those of others wait on."""
    prompts = prompts_of(node)
    store(node, 0, 2)
    calls = [Waiting(node, 5, FOR_EVER_S, transfer="t", prompts=prompts) for _ in range(3)]
    other = Waiting(node, 5, FOR_EVER_S, transfer="o", prompts=prompts)
    while len(node.table.residency.waiters.get(keys(5)[4], ())) < 4:
        pass
    assert prompts.abandon("t") == 3
    for call in calls:
        assert call.end(alone=False) == [Outcome.HIT] * 2 + [Outcome.UNAVAILABLE] * 3
    store(node, 2, 3)
    assert other.end() == [Outcome.HIT] * 5
    assert (node.counters.get("prompts_abandoned_total"), node.counters.get("prompts_complete_total")) == (3, 1)


def test_a_transfer_may_be_abandoned_before_anybody_waits(node: Node) -> None:
    prompts = prompts_of(node)
    assert prompts.abandon("t") == 0
    assert Waiting(node, 3, FOR_EVER_S, transfer="t", prompts=prompts).end() == [Outcome.UNAVAILABLE] * 3
    store(node, 0, 3)
    assert Waiting(node, 3, FOR_EVER_S, transfer="t", prompts=prompts).end() == [Outcome.HIT] * 3, "it came nonetheless"
    assert prompts.abandon("t") == 0
    assert not prompts._awaiting


def test_a_tenant_abandons_its_own_prompts_alone(node: Node) -> None:
    """Names of transfers are the engines': two may have the same, and one may be guessed."""
    prompts = prompts_of(node)
    assert SPEC.tenant != "acme"
    assert prompts.abandon("t", "acme") == 0, "before anybody waits"
    call = Waiting(node, 3, FOR_EVER_S, transfer="t", prompts=prompts)
    assert prompts.abandon("t", "acme") == 0
    store(node, 0, 2)
    assert prompts.abandon("t", SPEC.tenant) == 1
    assert call.end() == [Outcome.HIT] * 2 + [Outcome.UNAVAILABLE]


def test_who_waits_for_room_in_vain_is_told_too(node: Node) -> None:
    prompts = prompts_of(node)
    assert node.buffer.admit(node.buffer.capacity_bytes, node.clock.now_s())
    done: list[Part] = []
    thread = threading.Thread(
        target=lambda: done.extend(prompts.arrive(node.namespace, keys(2), node.clock.now_s() + FOR_EVER_S, "t"))
    )
    thread.start()
    while not node.buffer.waiting:
        pass
    assert prompts.abandon("t") == 1
    thread.join(LONG_S)
    assert [part.outcomes for part in done] == [[Outcome.NO_ROOM] * 2]
    assert node.buffer.waiting == 0
    node.buffer.release(node.buffer.capacity_bytes)
