"""Hints at one node: protected and ended sessions, limits per tenant, and rules of operators, which outrank hints."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.types import BlockKey, BlockShape, StoreOutcome, Tier
from kvstore.node.ahead.read_ahead import AheadReader
from kvstore.node.base.buffer_budget import BufferBudget
from kvstore.node.eviction.operator_requests import evict_down_to, restore_hinted
from kvstore.node.hints.ledger import SessionHint
from kvstore.node.hints.session_hints import SessionHints
from kvstore.node.state.model import NodeVolume
from kvstore.node.state.namespaces import NamespaceRegistry, TenantLedger
from kvstore.tiers.nvme.slab import NvmeSlab
from support.node_harness import NodeHarness, volume_id
from support.quota_node import ARENA_BYTES, BLOCK, QuotaNode, spec_of
from support.wait import wait_until

ARENA = ARENA_BYTES // BLOCK


def hints_of(node: NodeHarness, share: float = 0.5) -> SessionHints:
    budget = BufferBudget("read_ahead", ARENA_BYTES, node.clock, node.counters)
    return SessionHints(
        node.table, AheadReader(node.table, node.loader, budget, node.counters, node.clock), share, node.counters, node.clock
    )


class DramNode(NodeHarness):
    """A node without volumes, with two tenants."""

    def __init__(self, policy: str, share: float = 0.5) -> None:
        super().__init__(
            policy=policy,
            arena_bytes=ARENA_BYTES,
            registry=NamespaceRegistry(TenantLedger()),
            specs=[spec_of("acme"), spec_of("beta")],
        )
        self.hints = hints_of(self, share)

    def keep(self, name: str, keys: list[BlockKey], namespace: int = 0, keep_s: float = 60.0, **more: float) -> int:
        return self.hints.keep(self.namespaces[namespace], SessionHint(name, keys, keep_s, **more)).protected  # type: ignore[arg-type]

    def flood(self, first: int, blocks: int = 2 * ARENA, namespace: int = 0) -> None:
        """Store other chains."""
        for chain in range(first, first + blocks // 8):
            assert self.store(chain, 0, 8, namespace) == [StoreOutcome.STORED] * 8


@pytest.fixture(params=["reuse-distance", "lru", "s3-fifo"])
def node(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[DramNode]:
    monkeypatch.setattr("kvstore.node.hints.ledger.PART_KEYS", 5)  # chains have several parts
    made = DramNode(request.param)
    yield made
    made.hints.close()
    made.close()


def counted(node: NodeHarness, name: str) -> int:
    return int(node.counters.snapshot().get(name, 0))


def test_protected_session_survives_until_its_ttl(node: DramNode) -> None:
    assert node.store(0, 0, 32) == [StoreOutcome.STORED] * 32
    keys = node.keys(0, 32)
    assert node.keep("chat", keys) == 32
    node.flood(10)
    assert node.is_resident(keys) == [True] * 32
    node.clock.advance(61.0)
    node.hints.sweep()
    assert counted(node, "node_hints_expired_total") == 1
    node.flood(100, 4 * ARENA)
    assert node.is_resident(keys) == [False] * 32


def test_ended_session_leaves_first(node: DramNode) -> None:
    for chain in range(4):
        node.store(chain, 0, 32)
        node.is_resident(node.keys(chain, 32))
    assert node.hints.end(node.namespace, "newest", node.keys(3, 32)).dropped == 32
    node.flood(10, 24)
    assert node.is_resident(node.keys(3, 32)) == [True] * 8 + [False] * 24
    assert all(all(node.is_resident(node.keys(chain, 32))) for chain in range(3))


def test_ended_session_keeps_what_forks_share(node: DramNode) -> None:
    node.store(0, 0, 32)
    keys = node.keys(0, 32)
    assert node.keep("fork", keys[:20]) == 20
    assert node.hints.end(node.namespace, "trunk", keys).dropped == 12
    node.flood(10)
    assert node.is_resident(keys) == [True] * 20 + [False] * 12
    assert node.hints.end(node.namespace, "fork").dropped == 20
    node.flood(100, 2 * ARENA)
    assert not any(node.is_resident(keys))


def test_tenant_protecting_all_leaves_room_for_others(node: DramNode) -> None:
    """Hints of one tenant protect at most its share, and stores of others succeed."""
    node.store(999, 0, 8, 1)
    node.keep("other", node.keys(999, 8, 1), 1)
    for chain in range(ARENA // 8):
        node.store(chain, 0, 8)
        node.keep(f"s{chain}", node.keys(chain, 8), priority=9)
    assert node.hints.protected_bytes() == {"acme": ARENA_BYTES // 2, "beta": 8 * BLOCK}
    node.flood(1_000, namespace=1)
    assert sum(sum(node.is_resident(node.keys(chain, 8))) for chain in range(ARENA // 8)) == ARENA // 2
    modest = node.keys(1_000 + 2 * ARENA // 8 - 1, 8, 1)
    assert node.keep("modest", modest, 1) == 8


def test_tenant_alone_protects_more_until_another_stores(node: DramNode) -> None:
    for chain in range(ARENA // 8):
        node.store(chain, 0, 8)
        node.keep(f"s{chain}", node.keys(chain, 8))
    assert 0.8 * ARENA_BYTES < node.hints.protected_bytes()["acme"] <= 0.9 * ARENA_BYTES
    node.hints.sweep()
    assert node.hints.protected_bytes()["acme"] > 0.8 * ARENA_BYTES
    node.store(1_000, 0, 8, 1)
    node.hints.sweep()
    assert 0.4 * ARENA_BYTES < node.hints.protected_bytes()["acme"] <= ARENA_BYTES // 2
    assert node.keep("other", node.keys(1_000, 8, 1), 1) == 8
    node.flood(1_001, namespace=1)


def test_hints_of_two_tenants_never_fill_the_node(node: DramNode) -> None:
    for namespace in (0, 1):
        for chain in range(ARENA // 16):
            node.store(chain, 0, 8, namespace)
            node.keep(f"s{chain}", node.keys(chain, 8, namespace), namespace)
    assert sum(node.hints.protected_bytes().values()) <= 0.9 * ARENA_BYTES
    node.flood(1_000)


def test_smaller_limit_of_all_spares_the_smaller_tenant(node: DramNode, monkeypatch: pytest.MonkeyPatch) -> None:
    for namespace, chains in ((0, ARENA // 32), (1, ARENA // 16)):
        for chain in range(chains):
            node.store(chain, 0, 8, namespace)
            node.keep(f"s{chain}", node.keys(chain, 8, namespace), namespace)
    before = node.hints.protected_bytes()
    monkeypatch.setattr("kvstore.node.hints.session_hints.PROTECTED_PART", 0.6)
    node.hints.sweep()
    after = node.hints.protected_bytes()
    assert after["acme"] == before["acme"]
    assert 0.5 * ARENA_BYTES < sum(after.values()) <= 0.6 * ARENA_BYTES < sum(before.values())


def test_block_protected_before_it_is_stored(node: DramNode) -> None:
    assert node.keep("early", node.keys(0, 16)) == 16
    node.store(0, 0, 16)
    node.flood(10)
    assert all(node.is_resident(node.keys(0, 16)))


def test_share_of_zero_ignores_hints() -> None:
    node = DramNode("lru", 0.0)
    node.store(0, 0, 16)
    assert node.keep("chat", node.keys(0, 16)) == 0
    assert node.hints.end(node.namespace, "chat", node.keys(0, 16)).dropped == 0
    node.flood(10)
    assert not any(node.is_resident(node.keys(0, 16)))
    node.hints.close()
    node.close()


# ---- with volumes and rules


@pytest.fixture
def quota_node(tmp_path: Path) -> Iterator[QuotaNode]:
    made = QuotaNode(tmp_path / "slab")
    yield made
    made.close()


def test_quota_limits_what_hints_protect(quota_node: QuotaNode) -> None:
    quota_node.set_shares(("acme", 40, 40))
    quota_node.store_durably(900, 8, 1)
    hints = hints_of(quota_node)
    for chain in range(5):
        keys = quota_node.store_durably(chain, 8)
        hints.keep(quota_node.namespaces[0], SessionHint(f"s{chain}", keys, 60.0))
    slot_bytes = quota_node.namespaces[0].slot_bytes
    assert hints.protected_bytes()["acme"] <= 40 * BLOCK // 2
    for chain in range(5, 15):
        quota_node.store_durably(chain, 8)
    assert quota_node.held(0, Tier.NVME) <= 40
    assert sum(block.nvme is not None for block in found(quota_node, 0)) >= 40 * BLOCK // 2 // slot_bytes
    hints.close()


def found(node: QuotaNode, chain: int) -> list[object]:
    return [
        block
        for block in node.table.find(node.namespaces[0], [key for one in range(5) for key in node.keys(one, 8)])
        if block is not None
    ]


def test_kept_namespace_outranks_hints(quota_node: QuotaNode) -> None:
    """Hints of one tenant never evict the kept blocks of another one."""
    kept = quota_node.store_durably(1, 32, 1)
    quota_node.set_rules((1, 0.0, True))
    hints = hints_of(quota_node, 0.9)
    for chain in range(40):
        keys = quota_node.store_durably(chain, 8)
        hints.keep(quota_node.namespaces[0], SessionHint(f"s{chain}", keys, 60.0))
    held = quota_node.table.find(quota_node.namespaces[1], kept)
    assert all(block is not None and block.nvme is not None for block in held)
    hints.close()


def test_hint_of_another_namespace_protects_nothing(quota_node: QuotaNode) -> None:
    keys = quota_node.store_durably(0, 8)
    hints = hints_of(quota_node)
    hints.keep(quota_node.namespaces[1], SessionHint("thief", keys, 60.0))
    assert not quota_node.namespaces[0].hinted
    assert hints.end(quota_node.namespaces[1], "thief", keys).dropped == 0
    hints.close()


def test_expected_turn_brings_blocks_to_dram(tmp_path: Path) -> None:
    node = QuotaNode(tmp_path / "slab")
    hints = hints_of(node)
    keys = node.store_durably(0, 16)
    hints.keep(node.namespaces[0], SessionHint("chat", keys, 60.0, 10.0))
    node.table.drop_staged([block for block in node.table.find(node.namespaces[0], keys) if block is not None])
    node.clock.advance(7.0)
    hints.sweep()
    assert not counted(node, "node_hinted_reads_ahead_total")
    node.clock.advance(1.5)
    hints.sweep()
    wait_until(lambda: all(block is not None and block.dram is not None for block in node.table.find(node.namespaces[0], keys)))
    wait_until(lambda: all(block is not None and not block.pins for block in node.table.find(node.namespaces[0], keys)))
    assert counted(node, "node_read_ahead_bytes_total") == 16 * BLOCK
    hints.close()
    node.close()


def test_expected_turn_read_with_bug_is_counted_and_logged(
    quota_node: QuotaNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError("a bug")

    hints, (namespace, *_) = hints_of(quota_node), quota_node.namespaces
    keys = quota_node.store_durably(0, 8)
    hints.keep(namespace, SessionHint("chat", keys, 60.0, 1.0))
    quota_node.table.drop_staged([block for block in quota_node.table.find(namespace, keys) if block is not None])
    for slab in quota_node.slabs:
        monkeypatch.setattr(slab, "read_with_checksums", fail)
    hints.sweep()
    wait_until(lambda: counted(quota_node, "node_hinted_reads_failed_total") == 1)
    wait_until(lambda: "ZeroDivisionError: a bug" in caplog.text)
    hints.close()


def test_ended_session_is_written_back_all_the_same(quota_node: QuotaNode) -> None:
    hints = hints_of(quota_node)
    assert quota_node.store(0, 0, 16) == [StoreOutcome.STORED] * 16
    assert hints.end(quota_node.namespaces[0], "chat", quota_node.keys(0, 16)).dropped == 16
    quota_node.write_back()
    assert all(quota_node.table.are_durable(quota_node.keys(0, 16)))
    hints.close()


# ---- searches that met protected blocks before


def test_gained_volume_ends_protection_in_dram(node: DramNode, tmp_path: Path) -> None:
    node.store(0, 0, 16)
    keys = node.keys(0, 16)
    assert node.keep("chat", keys) == 16
    node.flood(10)
    assert all(node.is_resident(keys))
    slab = NvmeSlab.open(tmp_path / "slab", volume_id=volume_id(0), capacity_bytes=ARENA_BYTES, io_threads=1)
    assert list(slab.recover()) == []
    gained, residency = NodeVolume(slab), node.table.residency
    node.volumes.append(gained)
    with residency.lock:
        residency.expect_volume(gained)
        assert residency.arena_evictor.is_last_tier
        residency.add_volume(gained)
        assert not residency.arena_evictor.is_last_tier
    restore_hinted(node.table, None)
    node.flood(100, 4 * ARENA)
    assert not any(node.is_resident(keys))
    with residency.lock:
        residency.remove_volume(gained)
    assert residency.arena_evictor.is_last_tier
    node.store(1_000, 0, 16)
    assert node.keep("chat", node.keys(1_000, 16)) == 16
    node.flood(2_000)
    assert all(node.is_resident(node.keys(1_000, 16)))


def test_eviction_on_request_outranks_hints(node: DramNode) -> None:
    node.store(0, 0, 16)
    assert node.keep("chat", node.keys(0, 16)) == 16
    node.flood(10)
    assert all(node.is_resident(node.keys(0, 16)))
    assert evict_down_to(node.table, None, 0) == (ARENA, 0)


def test_eviction_of_volume_outranks_hints(quota_node: QuotaNode) -> None:
    hints = hints_of(quota_node)
    keys = quota_node.store_durably(0, 8)
    hints.keep(quota_node.namespaces[0], SessionHint("chat", keys, 60.0))
    for chain in range(1, 41):
        quota_node.store_durably(chain, 8)
    assert quota_node.table.are_durable(keys) == [True] * 8
    assert evict_down_to(quota_node.table, quota_node.table.node_volumes[0], 0).kept == 0
    hints.close()


def test_hint_changes_the_version_of_the_order(node: DramNode) -> None:
    evictor = node.table.residency.arena_evictor
    node.store(0, 0, 8)
    node.keep("chat", node.keys(0, 8))
    versions = [evictor.version]
    with node.table.residency.lock:
        for change in (evictor.restore, evictor.demote):
            change(node.namespace, node.keys(0, 8))
            versions.append(evictor.version)
    assert len(set(versions)) == 3


def test_session_expired_within_its_hint_leaves_nothing(node: DramNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part of its chain expires before the next one is protected."""
    swept = 0

    def meanwhile(_seconds: float) -> None:
        nonlocal swept
        swept += 1
        if swept == 1:
            node.clock.advance(2.0)
            node.hints.sweep()

    monkeypatch.setattr("kvstore.node.hints.session_hints.time.sleep", meanwhile)
    node.keep("chat", node.keys(0, 16), keep_s=1.0)
    assert not node.namespace.hinted


def test_hint_waits_for_parts_of_the_one_before(node: DramNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one replaces all parts of the first one. If they mixed, later parts of the first one would stay."""
    first, second = node.keys(0, 16), node.keys(1, 3)
    other = threading.Thread(target=node.keep, args=("chat", second))

    def meanwhile(_seconds: float) -> None:
        if threading.current_thread() is not other and other.ident is None:
            other.start()
            other.join(0.05)  # if it did not wait, it would end by then

    monkeypatch.setattr("kvstore.node.hints.session_hints.time.sleep", meanwhile)
    assert node.keep("chat", first) == 16
    other.join()
    assert list(node.namespace.hinted) == second


# ---- other sizes of blocks

SMALL, LARGE, OTHER = BlockShape(1, 4096), BlockShape(1, 1 << 16), BlockShape(1, 8192)


def protect_every_span(node: NodeHarness, chains: int) -> SessionHints:
    """Fill a tier with small chains, and protect the head of each: every slot of a large block has some of them."""
    hints = hints_of(node, 0.9)
    for chain in range(chains):
        node.store(chain, 0, 8)
        node.write_back()
        assert hints.keep(node.namespaces[0], SessionHint(f"s{chain}", node.keys(chain, 1), 60.0)).protected == 1
    return hints


@pytest.mark.parametrize("policy", ["reuse-distance", "lru", "s3-fifo"])
def test_hints_shut_no_block_size_out_of_dram(policy: str) -> None:
    """One span is emptied. Blocks of a kept namespace stay."""
    node = NodeHarness(policy=policy, shapes=(SMALL, LARGE, OTHER))
    node.namespaces[2].kept = True
    kept = node.store(900, 0, 8, 2)
    hints = protect_every_span(node, 1 << 8 >> 3)
    assert node.store(901, 0, 1, 1) == [StoreOutcome.STORED]
    assert node.is_resident(node.keys(900, 8, 2), 2) == [True] * len(kept)
    assert counted(node, "evicted_hinted_blocks_total") >= 1
    hints.close()
    node.close()


def test_hints_shut_no_block_size_out_of_volumes(tmp_path: Path) -> None:
    node = NodeHarness(tmp_path, volumes=[1 << 20], shapes=(SMALL, LARGE), arena_bytes=1 << 22)
    hints = protect_every_span(node, 1 << 7 >> 3)
    assert node.store(901, 0, 1, 1) == [StoreOutcome.STORED]
    node.write_back()
    assert node.table.are_durable(node.keys(901, 1, 1)) == [True]
    assert counted(node, "evicted_hinted_blocks_total") >= 1
    hints.close()
    node.close()
