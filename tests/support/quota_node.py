"""A node whose namespaces belong to tenants with quotas, and have retention rules."""

from __future__ import annotations

from pathlib import Path

from kvproto.v1.common_pb2 import CacheSpec as SpecMessage
from kvproto.v1.metadata_pb2 import Retention
from kvstore.core.spec import CacheSpec
from kvstore.core.types import StoreOutcome, Tier
from kvstore.node.control.retention import RetentionEnforcer
from kvstore.node.eviction.usage import held_bytes
from kvstore.node.state.namespaces import NamespaceRegistry, TenantLedger
from kvstore.rpc.codec import spec_to_proto
from kvstore.tiers.eviction.policy import make_policy
from support.node_harness import NodeHarness

BLOCK = 4096
ARENA_BYTES = 1 << 19  # 128 blocks: all of them compete
SLAB_BYTES = 1 << 20
HALF_DRAM, HALF_NVME = ARENA_BYTES // BLOCK // 2, SLAB_BYTES // (2 * BLOCK) // 2  # a slot has a header
STORED, SKIPPED = StoreOutcome.STORED, StoreOutcome.SKIPPED
TENANTS = ("acme", "beta", "")


def spec_of(tenant: str) -> CacheSpec:
    """Return the spec of a tenant's namespace."""
    return CacheSpec(model="m", block_tokens=16, layers=2, layer_block_bytes=BLOCK // 2, tenant=tenant)


class QuotaNode(NodeHarness):
    """A node with one namespace per tenant; ``namespace`` is the tenant's position."""

    def __init__(self, folder: Path, policy: str = "reuse-distance") -> None:
        super().__init__(
            folder,
            volumes=[SLAB_BYTES],
            policy=policy,
            specs=[spec_of(tenant) for tenant in TENANTS],
            registry=NamespaceRegistry(TenantLedger(lambda: make_policy(policy))),
            arena_bytes=ARENA_BYTES,
            publishes=True,
        )
        self.rules_file = folder / "rules"
        self.enforcer = RetentionEnforcer(self.table, self.registry, self.specs, self.counters, self.rules_file)

    def specs(self) -> list[SpecMessage]:
        return [spec_to_proto(spec_of(tenant)) for tenant in TENANTS]

    def set_shares(self, *shares: tuple[str, int | None, int | None], report: int = 0) -> None:
        """Set quota shares: tenant, blocks in DRAM, blocks on NVMe. ``report``: the node's report that they are based on."""
        retention = Retention(from_sequence=report)
        for tenant, dram, nvme in shares:
            share = retention.shares.add(tenant=tenant)
            if dram is not None:
                share.dram_bytes = dram * BLOCK
            if nvme is not None:
                share.nvme_bytes = nvme * BLOCK
        self.enforcer.apply(retention)

    def set_rules(self, *rules: tuple[int, float, bool]) -> None:
        """Set retention rules: position of the tenant, time to live in seconds, kept."""
        retention = Retention()
        for tenant, ttl_s, kept in rules:
            retention.rules.add(namespace_id=self.namespaces[tenant].namespace_id, ttl_ms=int(ttl_s * 1000), kept=kept)
        self.enforcer.apply(retention)
        self.enforcer.round()

    def held(self, tenant: int, tier: Tier) -> int:
        """Return how many blocks a tenant holds."""
        return held_bytes(self.table.residency, [self.namespaces[tenant]], tier) // BLOCK
