"""Waits for prompts: every block is pinned from the moment it is in DRAM, from any source, and released with the prompt."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvstore.core.types import BlockRun, NamespaceId, Outcome, Tier
from kvstore.node.eviction.operator_requests import evict_tier
from kvstore.node.loads.prompt_wait import PromptWaits
from kvstore.node.loads.runs import LoadedRun
from support.callers import ObservedScope
from support.layered_node import SHAPE, SPEC, LayeredNode, StorageNode, keys
from support.wait import wait_until

LONG_S = 20.0
NEVER_S = 1000.0
"""Far longer than a test may take: a wait that is not cancelled fails the test."""


@pytest.fixture
def node() -> Iterator[LayeredNode]:
    made = LayeredNode(arena_bytes=40 * SHAPE.block_bytes)
    yield made
    made.check_empty()
    made.close()


@pytest.fixture
def storage() -> Iterator[StorageNode]:
    made = StorageNode("s", range(10))
    yield made
    made.server.stop()


class DecodeEngine:
    """A decode engine that waits for a prompt, in a thread."""

    def __init__(
        self,
        node: LayeredNode,
        count: int,
        wait_s: float = LONG_S,
        *,
        transfer: str = "",
        prompts: PromptWaits | None = None,
        queued: bool = False,
    ) -> None:
        self.node = node
        self.count = count
        self.prompts = prompts or node.prompt_waits()
        self.transfer = transfer
        self.runs: list[LoadedRun] = []
        self.scope = ObservedScope()
        self.thread = threading.Thread(target=self.scope.context().run, args=(self._wait, wait_s))
        before, registered = node.budget.waiting, self.prompts.of_transfers + bool(transfer)
        self.thread.start()
        last = keys(count)[-1:]
        wait_until(
            lambda: (
                not self.thread.is_alive()
                or (
                    self.prompts.of_transfers == registered
                    and (node.budget.waiting > before if queued else node.gate.awaits(last))
                )
            ),
            poll_s=0.001,
        )

    def _wait(self, wait_s: float) -> None:
        self.runs += self.prompts.wait(self.node.request(keys(self.count), wait_s), self.transfer)

    def disconnect(self) -> list[Outcome]:
        self.scope.cancel()
        return self.end(last=False)

    def end(self, *, last: bool = True) -> list[Outcome]:
        """Return the outcomes, check the bytes of hits and unpin them. ``last``: no other engine waits."""
        self.thread.join(LONG_S)
        assert not self.thread.is_alive()
        for run in self.runs:
            for index, block in enumerate(run.blocks, start=run.first):
                if block is not None:
                    assert self.node.are_layers_right(block, 0, SHAPE.layers)
                    assert block.key == keys(64)[index]
            self.node.table.unpin(run.pinned())
        self.node.table.validate()
        assert not last or not self.node.gate.awaits(keys(64))
        return [outcome for run in sorted(self.runs, key=lambda run: run.first) for outcome in run.outcomes]


def test_prompt_from_stores_and_loads_completes(node: LayeredNode, storage: StorageNode) -> None:
    engine = DecodeEngine(node, 12)
    node.store_blocks(10, 2, tail=True)
    node.drive(node.load(10, [storage.source(0, 10)], 2))
    assert engine.end() == [Outcome.HIT] * 12
    assert node.counters.get("prompts_complete_total") == 1


def test_prompt_early_blocks_are_not_evicted(node: LayeredNode) -> None:
    engine = DecodeEngine(node, 8)
    node.store_blocks(4, 4)
    evict_tier(node.table, Tier.DRAM)
    for first in range(12, 60, 6):  # all other blocks of the arena are replaced
        node.store_blocks(first, 4)
        evict_tier(node.table, Tier.DRAM)
    node.store_blocks(0, 4)
    assert engine.end() == [Outcome.HIT] * 8


def test_prompt_transient_blocks_stay_until_it_ends() -> None:
    node, storage = LayeredNode(cache_loads=False), StorageNode("s", range(4))
    engine = DecodeEngine(node, 6)
    node.drive(node.load(4, [storage.source(0, 4)], 2))  # its leases end here
    node.store_blocks(4, 2)
    assert engine.end() == [Outcome.HIT] * 6
    node.check_empty()
    storage.server.stop()
    node.close()


def test_prompt_missing_blocks_time_out(node: LayeredNode) -> None:
    node.store_blocks(0, 2)
    assert DecodeEngine(node, 5, wait_s=0.1).end() == [Outcome.HIT] * 2 + [Outcome.TIMEOUT] * 3
    assert node.counters.get("prompts_incomplete_total") == 1


def test_prompt_disconnect_releases_buffer_and_blocks(node: LayeredNode) -> None:
    node.budget.capacity_bytes = 6 * SHAPE.block_bytes
    node.store_blocks(0, 2)
    first = DecodeEngine(node, 6, NEVER_S)
    second, third = DecodeEngine(node, 5, NEVER_S, queued=True), DecodeEngine(node, 6, NEVER_S, queued=True)
    assert node.budget.waiting == 2
    assert second.disconnect() == [Outcome.NO_SPACE] * 5, "an engine in the queue"
    assert first.disconnect() == [Outcome.HIT] * 2 + [Outcome.TIMEOUT] * 4
    node.store_blocks(2, 4)
    assert third.end() == [Outcome.HIT] * 6
    assert (node.budget.used_bytes, node.budget.waiting) == (0, 0)
    assert node.counters.get("prefill_buffer_timeouts_total") == 0


def test_prompt_larger_than_the_buffer_has_no_space(node: LayeredNode) -> None:
    node.budget.capacity_bytes = SHAPE.block_bytes
    assert DecodeEngine(node, 2).end() == [Outcome.NO_SPACE] * 2


def test_prompt_keys_of_another_namespace_do_not_count(node: LayeredNode) -> None:
    engine = DecodeEngine(node, 2, wait_s=0.3)
    other = node.registry.of_shape(NamespaceId(b"n" * 16), SHAPE)
    grant = node.table.prepare(other, BlockRun(other.namespace_id, None, 0, tuple(keys(2))), node.clock.now_s())
    node.table.complete(grant, keys(2), [bytes(8 * SHAPE.layers)] * 2)
    node.table.validate()
    assert engine.end() == [Outcome.TIMEOUT] * 2


def test_prompt_of_two_engines_one_times_out_other_completes(node: LayeredNode) -> None:
    one, two = DecodeEngine(node, 4, wait_s=0.1), DecodeEngine(node, 4)
    assert one.end(last=False) == [Outcome.TIMEOUT] * 4
    node.store_blocks(0, 4)
    assert two.end() == [Outcome.HIT] * 4


def test_prompt_node_closes_ends_the_wait() -> None:
    node = LayeredNode()
    engine = DecodeEngine(node, 4)
    node.table.close()
    assert engine.end() == [Outcome.TIMEOUT] * 4
    node.close()


# ---- abandoned transfers
def test_abandon_ends_waits_with_the_blocks_in_dram(node: LayeredNode) -> None:
    """A transfer has several waits, one per shard and group. Waits for other transfers continue."""
    prompts = node.prompt_waits()
    node.store_blocks(0, 2)
    calls = [DecodeEngine(node, 5, NEVER_S, transfer="t", prompts=prompts) for _ in range(3)]
    other = DecodeEngine(node, 5, NEVER_S, transfer="o", prompts=prompts)
    assert prompts.abandon("t") == 3
    for call in calls:
        assert call.end(last=False) == [Outcome.HIT] * 2 + [Outcome.UNAVAILABLE] * 3
    node.store_blocks(2, 3)
    assert other.end() == [Outcome.HIT] * 5
    assert (node.counters.get("prompts_abandoned_total"), node.counters.get("prompts_complete_total")) == (3, 1)


def test_abandon_before_the_wait_begins_ends_it(node: LayeredNode) -> None:
    prompts = node.prompt_waits()
    assert prompts.abandon("t") == 0
    assert DecodeEngine(node, 3, NEVER_S, transfer="t", prompts=prompts).end() == [Outcome.UNAVAILABLE] * 3
    node.store_blocks(0, 3)
    assert DecodeEngine(node, 3, NEVER_S, transfer="t", prompts=prompts).end() == [Outcome.HIT] * 3, "all arrived nonetheless"
    assert prompts.abandon("t") == 0


def test_abandon_by_a_tenant_ends_its_own_waits_only(node: LayeredNode) -> None:
    """Engines choose the names of transfers: two may be equal, and one may be guessed."""
    prompts = node.prompt_waits()
    assert SPEC.tenant != "acme"
    assert prompts.abandon("t", "acme") == 0, "before the wait begins"
    call = DecodeEngine(node, 3, NEVER_S, transfer="t", prompts=prompts)
    assert prompts.abandon("t", "acme") == 0
    node.store_blocks(0, 2)
    assert prompts.abandon("t", SPEC.tenant) == 1
    assert call.end() == [Outcome.HIT] * 2 + [Outcome.UNAVAILABLE]


def test_abandon_ends_a_queued_wait(node: LayeredNode) -> None:
    prompts = node.prompt_waits()
    assert node.budget.admit(node.budget.capacity_bytes, node.clock.now_s())
    engine = DecodeEngine(node, 2, NEVER_S, transfer="t", prompts=prompts, queued=True)
    assert prompts.abandon("t") == 1
    assert engine.end() == [Outcome.NO_SPACE] * 2
    assert node.budget.waiting == 0
    node.budget.release(node.budget.capacity_bytes)
