"""Times to live and kept namespaces on one node: unused chains expire, kept blocks stay up to a bound."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvproto.v1.metadata_pb2 import Retention
from kvstore.core.spec import CacheSpec
from kvstore.core.types import Tier
from kvstore.node.eviction.operator_requests import evict_down_to, evict_namespace, evict_tier, invalidate
from support.quota_node import BLOCK, HALF_DRAM, HALF_NVME, SKIPPED, STORED, QuotaNode


@pytest.fixture(params=["reuse-distance", "lru", "s3-fifo"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[QuotaNode]:
    made = QuotaNode(tmp_path / "slab", request.param)
    yield made
    made.table.validate()
    made.close()


def held(node: QuotaNode, tenant: int = 0) -> tuple[int, int]:
    return node.held(tenant, Tier.DRAM), node.held(tenant, Tier.NVME)


def press(node: QuotaNode, first: int) -> None:
    """Store more blocks of other namespaces than there is space for. Blocks that find no space at once are skipped."""
    for chain in range(first, first + 40):
        node.store(chain, 0, 30, 1)
        node.write_back()


# ---- times to live ----
def test_ttl_unused_blocks_leave_every_tier_used_prefixes_stay(node: QuotaNode) -> None:
    other = node.store_durably(9, 10, 1)
    old = node.store_durably(1, 10)
    node.set_rules((0, 60, False))
    node.clock.advance(40)
    new = node.store_durably(2, 10)
    assert node.is_resident(old[:4], 0) == [True] * 4, "used again, the rest is not"
    node.clock.advance(30)
    node.enforcer.round()
    assert node.is_resident(old, 0) == [True] * 4 + [False] * 6
    assert node.is_resident(new, 0) == [True] * 10
    assert held(node) == (14, 14)
    assert node.is_resident(other, 1) == [True] * 10
    node.clock.advance(61)
    node.enforcer.round()
    assert held(node) == (0, 0)
    assert held(node, 1) == (10, 10)
    assert node.counters.get("evicted_unused_blocks_total") == 20
    assert node.store(1, 0, 3) == [STORED] * 3, "it may be stored again"


def test_ttl_use_of_descendant_keeps_ancestors(node: QuotaNode) -> None:
    keys = node.store_durably(1, 6)
    node.set_rules((0, 60, False))
    node.clock.advance(50)
    assert node.is_resident(keys[5:], 0) == [True], "as of a load whose head another node serves"
    node.clock.advance(50)
    node.enforcer.round()
    assert held(node) == (6, 6)


def test_ttl_blocks_in_use_or_in_write_back_stay(node: QuotaNode) -> None:
    node.set_rules((0, 60, False))
    keys = node.store_durably(1, 4)
    pinned = node.table.pin_resident(node.namespaces[0], keys[2:3])
    node.store(2, 0, 4)
    node.clock.advance(61)
    node.enforcer.round()
    assert held(node) == (7, 3), "the block in use with those before it, and those that are not written yet"
    node.table.unpin([block for block in pinned if block is not None])
    node.write_back()
    node.enforcer.round()
    assert held(node) == (0, 0)


def test_ttl_read_from_volume_counts_as_use(node: QuotaNode) -> None:
    node.set_rules((0, 60, False))
    keys = node.store_durably(1, 4)
    evict_tier(node.table, Tier.DRAM)
    node.clock.advance(50)
    claim = node.table.claim(node.namespaces[0], keys[:2])
    node.table.unclaim([block.key for block in claim.durable.values()], claim.durable.values())
    node.clock.advance(50)
    node.enforcer.round()
    assert held(node) == (0, 2)


def test_ttl_lifted_or_changed_applies_at_once(node: QuotaNode) -> None:
    node.store_durably(1, 4)
    node.set_rules((0, 60, False))
    node.clock.advance(100)
    node.set_rules((0, 3600, False))
    assert held(node) == (4, 4)
    node.set_rules()
    node.clock.advance(10_000)
    node.enforcer.round()
    assert held(node) == (4, 4)
    assert node.namespaces[0].dram_orders == node.namespaces[0].nvme_orders == ()


# ---- kept namespaces ----
def test_evict_namespace_does_not_wait_for_the_end_of_keeping(node: QuotaNode) -> None:
    """The control API has checked the rule. Nodes learn of its end with their next heartbeat."""
    node.store_durably(1, 20)
    node.set_rules((0, 0, True))
    done = evict_namespace(node.table, node.namespaces[0], None, dram=True, nvme=True)
    assert (done.blocks, done.kept) == (40, 0)
    assert held(node) == (0, 0)


def test_kept_blocks_survive_pressure_until_unkept(node: QuotaNode) -> None:
    kept = node.store_durably(1, 20)
    node.set_rules((0, 0, True))
    press(node, 100)
    assert node.held(1, Tier.DRAM) > HALF_DRAM
    assert node.is_resident(kept, 0) == [True] * 20
    assert held(node) == (20, 20)
    evict_down_to(node.table, None, 0)
    evict_tier(node.table, Tier.DRAM)
    assert evict_down_to(node.table, node.table.node_volumes[0], 0).kept >= 20
    assert held(node) == (20, 20)
    node.set_rules()
    press(node, 200)
    assert held(node) == (0, 0), "cold as it is"
    assert node.namespaces[0].dram_orders == ()


def test_invalidate_kept_namespace_drops_it(node: QuotaNode) -> None:
    node.store_durably(1, 5)
    node.set_rules((0, 0, True))
    done = invalidate(node.table, node.namespaces[0], node.clock.now_s())
    assert (done.blocks, done.kept) == (5, 0)
    assert held(node) == (0, 0)
    node.store_durably(1, 5)
    assert node.namespaces[0].kept, "the rule is the namespace's, not its blocks'"


def test_kept_namespaces_take_at_most_half_under_pressure(node: QuotaNode) -> None:
    node.set_rules((0, 0, True))
    for chain in range(10):
        assert node.store_durably(chain, 12)
    assert held(node)[0] > HALF_DRAM - 12, "with nobody else there they may"
    press(node, 100)
    assert node.held(1, Tier.DRAM) >= 30, "others find space"
    assert node.held(1, Tier.NVME) >= 30
    dram, nvme = held(node)
    assert HALF_DRAM - 12 <= dram <= HALF_DRAM
    assert nvme <= HALF_NVME
    assert node.counters.get("evicted_kept_blocks_total") > 0


def test_kept_blocks_survive_quota_and_ttl(node: QuotaNode) -> None:
    kept = node.store_durably(1, 10)
    node.set_rules((0, 60, True))
    settings = Retention()
    settings.shares.add(tenant="acme", dram_bytes=4 * BLOCK, nvme_bytes=4 * BLOCK)
    settings.rules.add(namespace_id=node.namespaces[0].namespace_id, ttl_ms=60_000, kept=True)
    node.enforcer.apply(settings)
    node.clock.advance(100)
    node.enforcer.round()
    assert node.is_resident(kept, 0) == [True] * 10
    assert node.store(2, 0, 4) == [SKIPPED] * 4, "the quota is full of what cannot leave"


def test_kept_blocks_everywhere_leave_space_for_other_sizes(node: QuotaNode) -> None:
    large = CacheSpec(model="large", block_tokens=16, layers=1, layer_block_bytes=16 * BLOCK, tenant="acme")
    for chain in range(HALF_NVME * 2 // 8):  # in every span of both tiers, one block in eight is kept
        node.store_durably(100 + chain, 1, 0)
        node.store(100 + chain, 0, 7, 1)
        node.write_back()
    node.set_rules((0, 0, True))
    before = held(node)
    node.namespaces.append(node.registry.of_spec(large))
    for chain in range(6):
        assert node.store(200 + chain, 0, 1, len(node.namespaces) - 1) == [STORED]
        node.write_back()
    assert node.held(len(node.namespaces) - 1, Tier.DRAM) >= 1
    assert node.held(len(node.namespaces) - 1, Tier.NVME) >= 1
    left = [was - now for was, now in zip(before, held(node), strict=True)]
    assert 0 < left[0] <= 16
    assert 0 < left[1] <= 32, "one place of each tier; then the size makes space among its own"
    assert node.counters.get("evicted_kept_blocks_total") == sum(left)


# ---- restart ----
def test_rules_restart_without_metadata_server_keeps_them(tmp_path: Path) -> None:
    node = QuotaNode(tmp_path / "slab")
    kept = node.store_durably(1, 10)
    node.set_rules((0, 0, True), (1, 60, False))
    node.close()
    again = QuotaNode(tmp_path / "slab")
    again.enforcer.recall()
    assert again.namespaces[0].kept, "before anybody is served"
    press(again, 100)
    assert again.held(0, Tier.NVME) == 10
    assert again.table.are_durable(kept) == [True] * 10
    assert again.namespaces[1].uses is not None
    assert again.namespaces[1].uses.ttl_s == 60
    again.set_rules()
    again.close()
    third = QuotaNode(tmp_path / "slab")
    third.enforcer.recall()
    assert not third.namespaces[0].kept, "lifted"
    third.close()


def test_rules_restart_keeps_copies(tmp_path: Path) -> None:
    node = QuotaNode(tmp_path / "slab")
    node.store_durably(1, 1)
    settings = Retention()
    settings.rules.add(namespace_id=node.namespaces[0].namespace_id, copies=2)
    node.enforcer.apply(settings)
    node.enforcer.round()
    assert node.table.accounts.twice_held == (node.namespaces[0],)
    node.close()
    again = QuotaNode(tmp_path / "slab")
    again.enforcer.recall()
    assert again.namespaces[0].copies == 2
    again.enforcer.apply(Retention())
    again.enforcer.round()
    assert (again.namespaces[0].copies, again.table.accounts.twice_held) == (1, ())
    again.close()


DAMAGE: list[Callable[[bytes], bytes]] = [
    lambda _: b"",
    lambda raw: raw[:-1],
    lambda raw: raw[:20],
    lambda raw: raw[:30] + bytes([raw[30] ^ 1]) + raw[31:],
    lambda raw: b"X" + raw[1:],
    lambda raw: raw + bytes(1 << 20),
]


def test_rules_file_damaged_is_ignored(tmp_path: Path) -> None:
    node = QuotaNode(tmp_path / "slab")
    node.store_durably(1, 4)
    node.set_rules((0, 0, True))
    node.close()
    file = tmp_path / "slab" / "rules"
    good = file.read_bytes()
    (tmp_path / "other").write_bytes(good)
    written: list[Callable[[], object]] = [partial(file.write_bytes, damage(good)) for damage in DAMAGE]
    written += [partial(os.mkfifo, file), file.mkdir, partial(file.symlink_to, tmp_path / "other")]
    for write in written:
        file.unlink()
        write()
        again = QuotaNode(tmp_path / "slab")
        again.enforcer.recall()
        assert not again.namespaces[0].kept
        assert again.counters.get("retention_rules_unreadable_total") == 1
        again.close()
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
            file.touch()


def test_rules_file_write_fails_is_retried(tmp_path: Path) -> None:
    node = QuotaNode(tmp_path / "slab")
    node.store_durably(1, 4)
    file = tmp_path / "slab" / "rules"
    file.mkdir()
    node.set_rules((0, 0, True))
    node.enforcer.round()
    assert node.namespaces[0].kept
    assert node.counters.get("retention_rules_unwritten_total") == 1, "not at every round"
    file.rmdir()
    node.clock.advance(60)
    node.enforcer.round()
    assert file.is_file()
    node.close()


class RuleMachine(RuleBasedStateMachine):
    """Random stores, uses, times and kept namespaces among two, compared with a table of last uses."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.node = QuotaNode(Path(self.folder.name) / "slab", "lru")
        self.current_rules = [(0.0, False), (0.0, False)]

    @rule(chain=st.integers(0, 8), count=st.integers(1, 25), tenant=st.integers(0, 1), durable=st.booleans())
    def store(self, chain: int, count: int, tenant: int, durable: bool) -> None:
        self.node.store(chain, 0, count, tenant)
        if durable:
            self.node.write_back()

    @rule(chain=st.integers(0, 8), first=st.integers(0, 20), count=st.integers(1, 10), tenant=st.integers(0, 1))
    def use(self, chain: int, first: int, count: int, tenant: int) -> None:
        self.node.is_resident(self.node.keys(chain, first + count, tenant)[first:], tenant)

    @rule(seconds=st.integers(1, 50))
    def time(self, seconds: int) -> None:
        self.node.clock.advance(seconds)

    @rule(tenant=st.integers(0, 1), ttl_s=st.sampled_from([0.0, 20.0, 60.0]), kept=st.booleans())
    def change(self, tenant: int, ttl_s: float, kept: bool) -> None:
        self.current_rules[tenant] = ttl_s, kept
        self.node.set_rules(*((number, *one) for number, one in enumerate(self.current_rules)))

    @rule()
    def settle(self) -> None:
        """After a round, no block remains that expired together with all its descendants, unless it is kept."""
        self.node.write_back()
        self.node.enforcer.round()
        now_s = self.node.clock.now_s()
        for tenant, (ttl_s, kept) in enumerate(self.current_rules):
            uses = self.node.namespaces[tenant].uses
            assert (uses is not None) == bool(ttl_s)
            if uses is None or kept:
                continue
            blocks = {block.key: block for block in self.node.table.snapshot() if block.namespace is self.node.namespaces[tenant]}
            latest = {key: uses.used_s[key] for key in blocks}
            for key, block in sorted(blocks.items(), key=lambda item: -item[1].depth):
                if block.parent in latest:
                    latest[block.parent] = max(latest[block.parent], latest[key])
            assert all(used_s > now_s - ttl_s for used_s in latest.values()), "its time is over, and it is still there"

    @invariant()
    def holds(self) -> None:
        self.node.table.validate()
        for namespace in self.node.namespaces[:2]:
            held_keys = {block.key for block in self.node.table.snapshot() if block.namespace is namespace}
            if namespace.uses is not None:
                assert namespace.uses.keys == held_keys == namespace.uses.used_s.keys()
            for tier, order in namespace.kept_orders.items() if namespace.kept else ():
                expected = {
                    block.key
                    for block in self.node.table.snapshot()
                    if block.namespace is namespace and (block.dram if tier is Tier.DRAM else block.nvme) is not None
                }
                assert order.keys == expected

    def teardown(self) -> None:
        self.node.close()
        self.folder.cleanup()


TestRuleMachine = RuleMachine.TestCase
TestRuleMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
