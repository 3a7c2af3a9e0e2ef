"""Tenants with quotas on one node: a tenant beyond its share loses its own blocks only, and no engine sees an error."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvproto.v1.metadata_pb2 import HeartbeatRequest
from kvstore.core.spec import CacheSpec
from kvstore.core.types import Tier
from kvstore.node.control.retention import RetentionEnforcer
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NamespaceRegistry, TenantLedger
from support.quota_node import BLOCK, SKIPPED, STORED, TENANTS, QuotaNode, spec_of


@pytest.fixture(params=["reuse-distance", "lru", "s3-fifo"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[QuotaNode]:
    made = QuotaNode(tmp_path / "slab", request.param)
    yield made
    made.table.validate()
    made.close()


def test_store_beyond_share_evicts_own_blocks(node: QuotaNode) -> None:
    other = node.store_durably(9, 40, 1)
    node.set_shares(("acme", 20, 30))
    old = node.store_durably(1, 12)
    new = node.store_durably(2, 16)
    assert (node.held(0, Tier.DRAM), node.held(0, Tier.NVME)) == (20, 28)
    assert node.is_resident(new, 0) == [True] * 16
    assert node.is_resident(old, 0) == [True] * 4 + [False] * 8, "its coldest, the chain's end first"
    newest = node.store_durably(3, 16)
    assert (node.held(0, Tier.DRAM), node.held(0, Tier.NVME)) == (20, 30)
    assert node.is_resident(newest, 0) == [True] * 16
    assert node.is_resident(other, 1) == [True] * 40
    assert node.held(1, Tier.NVME) == 40


def test_store_beyond_share_without_evictable_is_skipped(node: QuotaNode) -> None:
    node.set_shares(("acme", 8, None))
    first = node.store_durably(1, 8)
    pinned = node.table.pin_resident(node.namespaces[0], first)
    assert node.store(2, 0, 4) == [SKIPPED] * 4
    assert node.counters.get("store_skipped_quota_blocks_total") == 4
    assert node.store(9, 0, 4, namespace=1) == [STORED] * 4, "nobody else is concerned"
    node.table.unpin([block for block in pinned if block is not None])
    assert node.store(2, 0, 4) == [STORED] * 4


def test_store_larger_than_share_keeps_its_head(node: QuotaNode) -> None:
    node.set_shares(("acme", 6, None))
    outcomes = node.store(1, 0, 20)
    assert outcomes == [STORED] * 6 + [SKIPPED] * 14
    node.set_shares(("acme", 0, None))
    assert node.store(2, 0, 2) == [SKIPPED] * 2, "nothing at all, at once"


def test_share_reduced_evicts_the_coldest(node: QuotaNode) -> None:
    old, new, other = node.store_durably(1, 20), node.store_durably(2, 20), node.store_durably(9, 20, 1)
    node.set_shares(("acme", 25, 10))
    node.enforcer.round()
    assert (node.held(0, Tier.DRAM), node.held(0, Tier.NVME)) == (25, 10)
    assert node.is_resident(new, 0) == [True] * 20
    assert node.is_resident(old, 0) == [True] * 5 + [False] * 15
    assert node.is_resident(other, 1) == [True] * 20
    assert node.held(1, Tier.NVME) == 20
    node.set_shares()
    assert node.store(3, 0, 30) == [STORED] * 30, "lifted"
    assert node.namespaces[0].dram_orders == node.namespaces[0].nvme_orders == ()


def test_space_needed_evicts_tenants_over_share_first(node: QuotaNode) -> None:
    mine, other = node.store_durably(1, 50), node.store_durably(9, 60, 1)
    node.set_shares(("acme", 40, None))
    node.enforcer.join_orders()  # and not evicted yet
    assert node.store(8, 0, 20, namespace=2) == [STORED] * 20
    assert node.held(0, Tier.DRAM) <= 40
    assert node.is_resident(other, 1) == [True] * 60, "though it is as cold"
    assert node.is_resident(mine[:30], 0) == [True] * 30


def test_load_beyond_share_is_granted_and_evicted_soon(node: QuotaNode) -> None:
    keys = node.store_durably(1, 12)
    node.set_shares(("acme", 4, None))
    node.enforcer.round()
    assert node.held(0, Tier.DRAM) == 4
    claim = node.table.claim(node.namespaces[0], keys)
    slots = node.table.reserve(node.namespaces[0].shape, len(claim.durable), node.clock.now_s(), node.namespaces[0])
    assert slots is not None
    for block, slot in zip(claim.durable.values(), slots, strict=True):
        node.table.finish_promotion(block, slot, bytes(8 * block.namespace.shape.layers))
    assert node.held(0, Tier.DRAM) == 12
    node.enforcer.round()
    assert node.held(0, Tier.DRAM) == 12, "in use"
    node.table.unpin([*claim.durable.values(), *claim.resident.values()])
    node.enforcer.round()
    assert node.held(0, Tier.DRAM) == 4


def test_share_of_zero_on_nvme_keeps_dram_and_delays_no_drain(node: QuotaNode) -> None:
    node.set_shares(("acme", None, 0))
    keys = node.store_durably(1, 8)
    assert node.held(0, Tier.NVME) == 0
    assert node.table.are_durable(keys) == [False] * 8
    assert node.counters.get("write_back_beyond_quota_blocks_total") == 8
    assert node.table.not_durable() == 0
    node.store_durably(9, 8, 1)
    assert node.held(1, Tier.NVME) == 8


def test_chain_that_left_nvme_leaves_dram_in_one_round(node: QuotaNode) -> None:
    """Its blocks are no longer durable, and each may leave only after its child."""
    node.store_durably(1, 30)
    node.set_shares(("acme", None, 0))
    node.enforcer.round()
    assert node.held(0, Tier.NVME) == 0
    node.set_shares(("acme", 0, 0))
    node.enforcer.round()
    node.write_back()
    node.enforcer.round()
    assert node.held(0, Tier.DRAM) == 0


def test_namespace_without_spec_has_no_tenant_until_known(node: QuotaNode, tmp_path: Path) -> None:
    node.set_shares(("acme", None, 4))
    strange = node.registry.of_shape(
        CacheSpec(model="x", layers=2, layer_block_bytes=2048, block_tokens=16).namespace, node.namespaces[0].shape
    )
    assert strange.account is None
    fresh = NamespaceRegistry(TenantLedger())
    found = fresh.of_shape(spec_of("acme").namespace, node.namespaces[0].shape)
    enforcer = RetentionEnforcer(node.table, fresh, node.specs, node.counters)
    node.clock.advance(60)
    enforcer.round()
    assert found.account is not None
    assert found.account.tenant == "acme"


def test_usage_is_reported_by_tenant(node: QuotaNode) -> None:
    node.store_durably(1, 3)
    node.store_durably(9, 5, 1)
    beat = HeartbeatRequest()
    node.enforcer.report(beat)
    reported = {one.tenant: (one.dram_bytes // BLOCK, one.nvme_bytes // BLOCK) for one in beat.tenants}
    assert reported == {"acme": (3, 3), "beta": (5, 5)}
    (dram,) = [
        one for one in node.enforcer.by_tenant(node.table.residency.arena_evictor.held_blocks, Tier.DRAM) if one.tenant == "beta"
    ]
    assert (dram.dram_bytes, dram.nvme_bytes) == (5 * BLOCK, 0)


def test_quota_of_one_tenant_keeps_order_of_others(tmp_path: Path) -> None:
    """The same work with and without a quota of an idle tenant: the same blocks stay."""
    left = []
    for number, limited in enumerate((False, True)):
        node = QuotaNode(tmp_path / str(number))
        if limited:
            node.set_shares(("acme", 5, 5))
        for chain in range(60):
            node.store(chain, 0, 1 + chain % 7, 1 + chain % 2)
            node.write_back()
            node.is_resident(node.keys(chain // 3, 3, 1 + chain % 2), 1 + chain % 2)
        node.enforcer.round()
        left.append({(block.key, block.dram is not None, block.nvme is not None) for block in node.table.snapshot()})
        node.close()
    assert left[0] == left[1]


class TenantMachine(RuleBasedStateMachine):
    """Random stores, loads, pins and shares of three tenants."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.node = QuotaNode(Path(self.folder.name) / "slab", "lru")
        self.shares: dict[str, tuple[int | None, int | None]] = {}
        self.pinned: list[list[Block]] = []

    @rule(chain=st.integers(0, 12), count=st.integers(1, 30), tenant=st.integers(0, 2))
    def store(self, chain: int, count: int, tenant: int) -> None:
        outcomes = self.node.store(chain, 0, count, tenant)
        granted = [outcome for outcome in outcomes if outcome is not SKIPPED]
        assert outcomes == granted + [SKIPPED] * (count - len(granted)), "prefix first"

    @rule()
    def durable(self) -> None:
        self.node.write_back()

    @rule(chain=st.integers(0, 12), count=st.integers(1, 20), tenant=st.integers(0, 2))
    def pin(self, chain: int, count: int, tenant: int) -> None:
        found = self.node.table.pin_resident(self.node.namespaces[tenant], self.node.keys(chain, count, tenant))
        self.pinned.append([block for block in found if block is not None])

    @rule()
    def unpin(self) -> None:
        if self.pinned:
            self.node.table.unpin(self.pinned.pop())

    @rule(tenant=st.integers(0, 2), dram=st.none() | st.integers(0, 60), nvme=st.none() | st.integers(0, 60))
    def share(self, tenant: int, dram: int | None, nvme: int | None) -> None:
        self.shares[TENANTS[tenant]] = dram, nvme
        self.node.set_shares(*((name, *share) for name, share in self.shares.items() if share != (None, None)))

    @rule()
    def settle(self) -> None:
        """If no block is in use or in write-back, no tenant holds more than its share after a round."""
        while self.pinned:
            self.unpin()
        self.node.write_back()
        self.node.enforcer.round()
        self.node.write_back()  # blocks that had to be written first
        self.node.enforcer.round()
        for tenant, (dram, nvme) in self.shares.items():
            position = TENANTS.index(tenant)
            assert dram is None or self.node.held(position, Tier.DRAM) <= dram, (tenant, dram)
            assert nvme is None or self.node.held(position, Tier.NVME) <= nvme, (tenant, nvme)

    @invariant()
    def holds(self) -> None:
        self.node.table.validate()
        for namespace in self.node.namespaces:
            assert namespace.granted == 0
            for tier, order in namespace.in_account.items():
                if order is None:
                    continue
                held = {
                    block.key
                    for block in self.node.table.snapshot()
                    if block.namespace is namespace and (block.dram if tier is Tier.DRAM else block.nvme) is not None
                }
                assert order.keys == held, "its order knows its blocks, and no others"

    def teardown(self) -> None:
        self.node.close()
        self.folder.cleanup()


TestTenantMachine = TenantMachine.TestCase
TestTenantMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
