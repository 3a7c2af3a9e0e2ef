"""An unexpected exception about one block or namespace stops no duty of a node for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.core.types import BlockKey, StoreOutcome, Tier
from kvstore.node.control import retention
from kvstore.node.durability.writeback import WriteBack
from kvstore.node.eviction.arena import ArenaEvictor
from kvstore.node.eviction.operator_requests import evict_tier
from kvstore.node.eviction.quotas import space_may_free_up
from kvstore.node.eviction.ttl import mark_expired
from kvstore.node.eviction.volumes import VolumeEvictor
from kvstore.node.state.block_states import InvalidTransition, VolumeReplica
from kvstore.node.state.eviction_orders import TtlOrder
from kvstore.node.state.grants import SlotGrant
from kvstore.node.state.model import Block
from kvstore.node.state.residency import Residency
from kvstore.tiers.contract import Slot
from kvstore.tiers.nvme.slab import NvmeSlab
from support.quota_node import TENANTS, QuotaNode
from support.wait import wait_until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[QuotaNode]:
    made = QuotaNode(tmp_path)
    yield made
    made.close()


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str, BlockKey], None]:
    """Make a method fail for one block, which is its first argument."""

    def fail(owner: type, name: str, key: BlockKey) -> None:
        method = getattr(owner, name)

        def failing(self: object, block: Block, *arguments: object, **options: object) -> object:
            if block.key == key:
                raise KeyError(key)
            return method(self, block, *arguments, **options)

        monkeypatch.setattr(owner, name, failing)

    return fail


def test_block_that_cannot_leave_volume_delays_no_other(
    node: QuotaNode, poison: Callable[[type, str, BlockKey], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = node.store_durably(1, 8)
    poison(VolumeEvictor, "remove", keys[5])
    evict_tier(node.table, Tier.NVME)
    left = [block.key for block in node.table.snapshot() if block.nvme_volume is not None]
    assert left == [keys[5]]
    evict_tier(node.table, Tier.DRAM)
    node.set_shares(("acme", None, 0))
    node.enforcer.round()
    assert node.counters.get("eviction_bugs_total") == 1
    node.set_shares()
    assert all(node.table.are_durable(node.store_durably(2, 8)))
    end(node, monkeypatch)


def test_block_that_cannot_leave_dram_delays_no_other(
    node: QuotaNode, poison: Callable[[type, str, BlockKey], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = node.store_durably(1, 8)
    poison(ArenaEvictor, "remove", keys[7])
    assert node.is_resident(keys) == [True] * 8
    for chain in range(2, 40):
        node.store(chain, 0, 8)
        node.write_back()
    assert node.is_resident([keys[7]]) == [True]
    assert node.counters.get("eviction_bugs_total") == 1
    (block,) = (block for block in node.table.snapshot() if block.key == keys[7])
    assert (block.pins, block.set_apart) == (1, True)
    waiting = SlotGrant(node.namespaces[0], node.run(77, 0, 8), [])
    node.write_back()
    assert not space_may_free_up(node.table.residency, waiting, own_only=False), "no store waits for its space"
    assert node.store(99, 0, 8) == [StoreOutcome.STORED] * 8
    end(node, monkeypatch)


def test_block_that_cannot_be_released_keeps_no_other_pinned(
    node: QuotaNode, poison: Callable[[type, str, BlockKey], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    node.table.cache_loads = False
    assert node.store(1, 0, 4) == [StoreOutcome.STORED] * 4
    keys = node.keys(1, 4)
    pinned = node.table.pin_resident(node.namespace, keys)
    node.write_back()
    poison(ArenaEvictor, "remove", keys[0])
    node.table.unpin(block for block in pinned if block is not None)
    assert [block.key for block in node.table.snapshot() if block.dram is not None] == [keys[0]]
    end(node, monkeypatch)


def test_block_in_wrong_state_stops_one_round(node: QuotaNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that were marked before it do not stay marked."""
    keys = node.store_durably(1, 8)
    set_replica = Residency.set_replica

    def failing(self: Residency, block: Block, new: VolumeReplica) -> None:
        if block.key == keys[3]:
            raise InvalidTransition("injected")
        set_replica(self, block, new)

    monkeypatch.setattr(Residency, "set_replica", failing)
    node.set_shares(("acme", None, 0))
    with pytest.raises(InvalidTransition):
        node.enforcer.round()
    assert not any(block.evicting for block in node.table.snapshot())
    node.enforcer.round()
    assert node.held(0, Tier.NVME) == 4
    end(node, monkeypatch)


def test_victims_of_another_tenant_do_not_stay_marked(node: QuotaNode, monkeypatch: pytest.MonkeyPatch) -> None:
    for tenant in range(2):
        node.store_durably(1, 4, tenant)
    set_replica, poisoned = Residency.set_replica, node.keys(1, 4, 1)[2]

    def failing(self: Residency, block: Block, new: VolumeReplica) -> None:
        if block.key == poisoned:
            raise InvalidTransition("injected")
        set_replica(self, block, new)

    monkeypatch.setattr(Residency, "set_replica", failing)
    node.set_shares(*((tenant, None, 0) for tenant in TENANTS[:2]))
    with pytest.raises(InvalidTransition):
        node.enforcer.round()
    assert not any(block.evicting for block in node.table.snapshot())
    node.enforcer.round()
    assert node.held(0, Tier.NVME) == 0
    end(node, monkeypatch)


def test_slot_that_cannot_be_freed_keeps_no_block(node: QuotaNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block is nowhere, so the table must not hold it: stores of its key would find that it exists."""
    keys = node.store_durably(1, 4)
    evict_tier(node.table, Tier.DRAM)
    free, failures = NvmeSlab.free, [1]

    def failing(self: NvmeSlab, slots: Sequence[Slot]) -> None:
        if failures:
            failures.pop()
            raise KeyError("injected")
        free(self, slots)

    monkeypatch.setattr(NvmeSlab, "free", failing)
    evict_tier(node.table, Tier.NVME)
    assert list(node.table.snapshot()) == []
    assert node.store(1, 0, 4) == [StoreOutcome.STORED] * len(keys)
    end(node, monkeypatch)


def test_namespace_that_fails_delays_no_other(node: QuotaNode, monkeypatch: pytest.MonkeyPatch) -> None:
    for tenant in range(3):
        node.store_durably(1, 4, tenant)
    node.set_rules((0, 1.0, False), (1, 1.0, False), (2, 1.0, False))
    node.clock.advance(10.0)
    poisoned = node.namespaces[1].uses

    def failing(residency: Residency, order: TtlOrder) -> list[Block]:
        if order is poisoned:
            raise KeyError("injected")
        return mark_expired(residency, order)

    monkeypatch.setattr(retention, "mark_expired", failing)
    with pytest.raises(KeyError):
        node.enforcer.round()
    with pytest.raises(KeyError):
        node.enforcer.round()  # copies in DRAM follow
    assert [node.held(tenant, Tier.NVME) for tenant in range(3)] == [0, 4, 0]


def test_duty_that_fails_delays_no_other(node: QuotaNode, monkeypatch: pytest.MonkeyPatch) -> None:
    node.store_durably(1, 8)
    node.set_rules((0, 1.0, False))
    monkeypatch.setattr(node.enforcer, "enforce_quotas", lambda: 1 // 0)
    node.clock.advance(10.0)
    with pytest.raises(ZeroDivisionError):
        node.enforcer.round()
    assert node.held(0, Tier.NVME) == 0, "its time to live has ended"


def test_write_back_goes_on_after_bugs(node: QuotaNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one in the report of a batch that failed, and one in the choice of a batch."""
    persist, take_pending = node.target.persist, node.table.take_pending
    failures = {"persist": 3, "report": 3, "take": 1}

    def fails(what: str) -> None:
        if failures[what]:
            failures[what] -= 1
            raise KeyError("injected")

    def failing_persist(blocks: list[Block], wait_turn: Callable[[], None]) -> None:
        fails("persist")
        persist(blocks, wait_turn)

    def failing_take(most: int, nbytes: int, wait_s: float) -> list[Block]:
        fails("take")
        return take_pending(most, nbytes, wait_s)

    report = node.table.writeback_failed

    def failing_report(block: Block, **how: bool) -> None:
        report(block, **how)
        fails("report")

    monkeypatch.setattr(node.target, "persist", failing_persist)
    monkeypatch.setattr(node.table, "take_pending", failing_take)
    monkeypatch.setattr(node.table, "writeback_failed", failing_report)
    write_back = WriteBack(node.table, node.target, node.counters)
    write_back.start()
    try:
        for chain in range(4):
            node.store(chain, 0, 2)
            wait_until(lambda: len(node.table.residency.writes) == 0, "the batch is reported")
        assert all(node.table.are_durable(node.keys(3, 2)))
        assert failures == {"persist": 0, "report": 0, "take": 0}
    finally:
        write_back.stop(5.0)


def end(node: QuotaNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the faults. The table is not valid any more: it has a block in no known state."""
    monkeypatch.undo()
    node.expected_bugs = 1
    monkeypatch.setattr(node.table, "validate", lambda: None)
