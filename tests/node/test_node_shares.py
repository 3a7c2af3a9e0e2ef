"""Quota shares during a start, a drain, concurrent writes and kept namespaces of the same tenant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvproto.v1.metadata_pb2 import HeartbeatRequest
from kvstore.core.types import BlockKey, BlockRun, NodeId, Tier
from kvstore.node.control.admission_gate import AdmissionGate
from kvstore.node.control.pull import FreeShares, Puller
from kvstore.node.eviction.kept import beyond_kept
from kvstore.node.eviction.quotas import mark_coldest_evicting, over_share, release_durable, reserve_durable
from kvstore.node.eviction.volume_commits import evict_from_volume
from kvstore.node.loads.peers import PeerAddress
from kvstore.node.state.block_states import VolumeReplica
from support.quota_node import BLOCK, HALF_NVME, SKIPPED, STORED, QuotaNode


@pytest.fixture(params=["reuse-distance", "lru", "s3-fifo"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[QuotaNode]:
    made = QuotaNode(tmp_path / "slab", request.param)
    yield made
    made.table.validate()
    made.close()


def held(node: QuotaNode) -> tuple[int, int]:
    return node.held(0, Tier.DRAM), node.held(0, Tier.NVME)


def told_of(node: QuotaNode, number: int) -> dict[tuple[bool, str], int]:
    """The heartbeat of a number: bytes on NVMe per tenant."""
    beat = HeartbeatRequest(sequence=number)
    node.enforcer.report(beat)
    return {(one.unknown, one.tenant): one.nvme_bytes // BLOCK for one in beat.tenants}


# ---- start ----
def test_share_without_knowledge_of_found_blocks_evicts_none(tmp_path: Path) -> None:
    before = QuotaNode(tmp_path / "slab")
    before.store_durably(1, 20)
    before.close()
    node = QuotaNode(tmp_path / "slab")
    assert told_of(node, 1) == {(True, ""): 20}
    node.set_shares(("acme", None, 4), report=1)  # no node seems to hold blocks of the tenant here, so the server grants little
    node.clock.advance(60)
    node.enforcer.round()
    assert node.namespaces[0].account is not None, "whose they are is known now"
    node.enforcer.round()
    assert told_of(node, 2) == {(False, "acme"): 20}
    node.set_shares(("acme", None, 5), report=1)  # a response from the server's cache
    assert node.store_durably(2, 3), "nor are stores held to it"
    node.enforcer.round()
    assert held(node)[1] == 23
    node.set_shares(("acme", None, 18), report=2)
    node.enforcer.round()
    assert held(node)[1] == 18, "now it counts"
    node.set_shares(("acme", None, 1), report=1)  # a stale response
    node.set_shares(("acme", None, 1), report=99)  # for another boot of this node
    node.enforcer.round()
    assert held(node)[1] == 18
    node.table.validate()
    node.close()


def test_share_namespace_opened_by_engine_counts_at_once(node: QuotaNode) -> None:
    node.set_shares(("acme", 4, 4))
    assert node.store(1, 0, 6) == [STORED] * 4 + [SKIPPED] * 2


# ---- drains ----
def test_drain_blocks_evicted_for_quota_need_no_durability(node: QuotaNode) -> None:
    node.store_durably(1, 20)
    node.set_shares(("acme", None, 5))
    node.enforcer.round()
    assert held(node) == (20, 5)
    assert node.table.not_durable() == 0, "a drain has nothing to wait for"
    node.store_durably(2, 5)
    assert held(node) == (25, 5), "its own made space"
    assert node.table.not_durable() == 0
    node.set_shares()
    kept = node.keys(1, 20)
    node.table.requeue_writeback(filter(None, node.table.find(node.namespaces[0], kept)))
    node.write_back()
    assert node.table.are_durable(kept) == [True] * 20
    assert all(block.produced_here for block in node.table.snapshot()), "durable here again: that is to be kept"


def test_drain_kept_blocks_beyond_part_need_durability(node: QuotaNode) -> None:
    node.set_rules((0, 0, True))
    node.store_durably(1, 10)
    order = node.namespaces[0].kept_orders[Tier.NVME]
    with node.table.residency.lock:
        victims = mark_coldest_evicting(node.table.residency, order, 3 * BLOCK)
    assert [block.volume_replica for block in victims] == [VolumeReplica.EVICTING] * 3
    evict_from_volume(node.table, node.table.node_volumes[0], victims)
    assert node.table.not_durable() == 3


def test_drain_applies_rules_only_and_evicts_nothing(node: QuotaNode) -> None:
    node.store_durably(1, 20)
    node.set_shares(("acme", 8, 10))
    node.set_shares()
    node.enforcer.round()
    assert held(node) == (20, 20)


def test_drain_pull_stops_at_free_share(node: QuotaNode) -> None:
    shares = FreeShares(node.table)
    namespace = node.namespaces[0]
    here = node.store_durably(1, 6)

    def run(chain: int, count: int) -> BlockRun:
        return BlockRun(namespace.namespace_id, None, 0, tuple(node.keys(chain, count)))

    with shares.reserve(namespace, run(2, 1000)) as fits:
        assert fits, "no quota"
    node.set_shares(("acme", None, 10))
    with shares.reserve(namespace, run(2, 3)) as fits, shares.reserve(namespace, run(3, 2)) as more:
        assert (fits, more) == (True, False), "another run that comes meanwhile counts"
    with shares.reserve(namespace, run(1, 6 + 4)) as fits:
        assert fits, "what is here takes no more space"
    with shares.reserve(namespace, run(3, 5)) as fits:
        assert not fits
    node.set_shares(("acme", None, 6))
    unused: Any = None  # the transport to the other node: not reached
    puller = Puller(node.table, unused, unused, AdmissionGate(node.table, node.counters), node.counters)
    (outcomes, why) = puller.pull(namespace, [run(3, 5)], PeerAddress(NodeId("x"), "", ""), node.clock.now_s())
    assert (outcomes, why) == ([SKIPPED] * 5, "no free space in the tenant's quota here")
    assert node.table.are_durable(here) == [True] * 6


# ---- concurrency ----
def test_excess_does_not_count_evictions_in_progress(node: QuotaNode) -> None:
    node.store_durably(1, 20)
    node.set_shares(("acme", None, 12))
    node.enforcer.join_orders()
    table = node.table
    with table.residency.lock:
        ((order, excess),) = over_share(table.residency, Tier.NVME)
        victims = mark_coldest_evicting(table.residency, order, excess)
        assert len(victims) == 8
        assert list(over_share(table.residency, Tier.NVME)) == [], "another thread looks before they have left"
    evict_from_volume(table, table.node_volumes[0], victims)
    assert held(node)[1] == 12
    first = reserve_durable(table.residency, node.namespaces[0], 4)
    second = reserve_durable(table.residency, node.namespaces[0], 4)
    assert (first.blocks, len(first.victims)) == (0, 4)
    assert (second.blocks, len(second.victims)) == (4, 0), "what leaves for one is not asked for twice"
    evict_from_volume(table, table.node_volumes[0], first.victims)
    release_durable(table.residency, second)
    assert held(node)[1] == 8


def test_excess_counts_blocks_that_could_not_leave(node: QuotaNode) -> None:
    node.store_durably(1, 20)
    node.set_shares(("acme", None, 12))
    node.enforcer.join_orders()
    table = node.table
    with table.residency.lock:
        ((order, excess),) = over_share(table.residency, Tier.NVME)
        victims = mark_coldest_evicting(table.residency, order, excess)
    table.residency.cancel_eviction(victims)
    with table.residency.lock:
        assert [size for _, size in over_share(table.residency, Tier.NVME)] == [8 * BLOCK]


def test_kept_blocks_beyond_their_part_are_searched_once(node: QuotaNode) -> None:
    node.set_rules((0, 0, True))
    for chain in range(8):
        node.store_durably(chain, (HALF_NVME + 8) // 8 + 1)
    table = node.table
    with table.residency.lock:
        ((order, excess),) = beyond_kept(table.residency, Tier.NVME)
        victims = mark_coldest_evicting(table.residency, order, excess)
        assert victims
        assert list(beyond_kept(table.residency, Tier.NVME)) == []
    table.residency.cancel_eviction(victims)


# ---- kept namespaces of a tenant over its share ----
def test_kept_blocks_are_skipped_until_unkept(node: QuotaNode, monkeypatch: pytest.MonkeyPatch) -> None:
    for chain in range(30):
        node.store_durably(chain, 1)
    node.set_rules((0, 0, True))
    node.set_shares(("acme", 4, 4))
    node.enforcer.join_orders()
    (account,) = (one for one in node.registry.accounts.all() if Tier.DRAM in one.orders)
    policy = account.orders[Tier.DRAM].policy
    coldest = policy.coldest
    visited: list[BlockKey] = []

    def counting(evictable: Callable[[BlockKey], bool | None]) -> Iterator[BlockKey]:
        def visit(key: BlockKey) -> bool | None:
            visited.append(key)
            return evictable(key)

        return coldest(visit)

    monkeypatch.setattr(policy, "coldest", counting)
    node.enforcer.enforce_quotas()
    assert len(visited) == 30
    node.enforcer.enforce_quotas()
    assert len(visited) == 30, "no block was visited again"
    assert held(node) == (30, 30)
    node.set_shares(("acme", 4, 4))
    node.set_rules()
    node.set_shares(("acme", 4, 4))
    node.enforcer.round()
    assert held(node) == (4, 4)


def test_share_full_of_kept_blocks_fails_without_waiting(node: QuotaNode, monkeypatch: pytest.MonkeyPatch) -> None:
    node.store_durably(1, 8)
    node.set_rules((0, 0, True))
    node.set_shares(("acme", 8, None))
    others = node.prepare(9, 0, 4, 1)  # a store of another tenant, which cannot help
    waits = []

    def waited(*arguments: Any) -> bool:
        waits.append(arguments)
        return False

    monkeypatch.setattr(node.table, "wait_changed", waited)
    assert node.prepare(2, 0, 4).outcomes == [SKIPPED] * 4
    assert not waits
    node.set_rules()
    node.set_shares(("acme", 8, None))
    node.enforcer.join_orders()
    used = node.table.pin_resident(node.namespaces[0], node.keys(1, 8))
    assert node.prepare(2, 0, 4).outcomes == [SKIPPED] * 4
    assert waits, "its own come free one day"
    node.table.unpin([block for block in used if block is not None])
    node.table.abandon(others)
