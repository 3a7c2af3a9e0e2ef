"""Shares of quotas as nodes are told them: made anew now and then, of what nodes said that they hold, for all of them at once.

Only numbers are kept; what one node is told is put together when it asks. Making them takes time for every tenant with a quota
and every node: so it lets other calls through on the way, is done once for all who wait for it, and rests afterwards for
``REST_TIMES`` as long as it took. Runs on the event loop.

A share says of which report of the node it was made, so that a node knows whether what it has told since is in it. Nodes that
drain have no share, and what they hold does not count: it is on its way to the others, which share all of the quota.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvproto.v1.common_pb2 import NodeInfo
from kvproto.v1.metadata_pb2 import HeartbeatRequest, NamespaceRule, Retention, TenantShare
from kvstore.core.clock import Clock
from kvstore.core.types import NamespaceId, NodeId, Tier
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.retention.quotas import shares
from kvstore.metadata.retention.settings_store import OperatorSettings, RuleSetting
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import metadata as metadata_metrics

logger: Final = logging.getLogger(__name__)
REST_TIMES: Final = 20
"""QuotaShares out takes at most one n-th of the loop's time."""
SLICE_S: Final = 0.002
"""So long it goes on before other calls are let through."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """Shares as they were made."""

    orders: OperatorSettings
    rules: bytes
    """As a ``Retention`` that says them alone."""
    reports: Mapping[NodeId, tuple[bytes, int]]
    """Boot and number of the report of each node that has said what it holds."""
    places: Mapping[NodeId, int]
    """Positions of those that have a share."""
    tenants: Sequence[tuple[str, Sequence[int] | None, Sequence[int] | None]]
    """Each tenant's shares by position, in DRAM and on NVMe."""
    made_s: float
    took_s: float


class QuotaShares:
    """What nodes are told.

    Args:
        nodes: who lives, and what they hold.
        counters: events of this process.
        clock: the host's monotonic clock.
        interval_s: how long shares hold.
    """

    def __init__(self, nodes: NodeTable, counters: Counters, clock: Clock, interval_s: float) -> None:
        self._nodes = nodes
        self._counters = counters
        self._clock = clock
        self._interval_s = interval_s
        self._shared: _Shared | None = None
        self._making: asyncio.Task[None] | None = None

    async def answer(self, orders: OperatorSettings, asking: HeartbeatRequest) -> Retention | None:
        """What a node is told, which has just said what it holds; None: nothing, what it was told before holds.

        Never before it has said what it holds: with a share made without that it would let go of what it may keep.
        """
        if not orders.quotas and not orders.rules:
            return Retention(report=asking.report)
        if not asking.usages:
            return None
        if self._stale(orders, asking):
            if self._making is None or self._making.done():
                self._making = asyncio.create_task(self._make(orders))
            await asyncio.shield(self._making)  # others may wait for it, too
        return self._told(asking)

    def _stale(self, orders: OperatorSettings, asking: HeartbeatRequest) -> bool:
        shared = self._shared
        if shared is None:
            return True
        age_s = self._clock.now_s() - shared.made_s
        if age_s < REST_TIMES * shared.took_s:
            return False
        return shared.orders is not orders or age_s >= self._interval_s or not _knows(shared, asking)

    def _told(self, asking: HeartbeatRequest) -> Retention | None:
        shared = self._shared
        if shared is None or not _knows(shared, asking):
            return None
        node_id = NodeId(asking.node_id)
        told = Retention.FromString(shared.rules)
        told.report = shared.reports[node_id][1]
        place = shared.places.get(node_id)
        if place is not None and not self._nodes.is_draining(node_id):
            told.shares.extend(
                TenantShare(
                    tenant=tenant,
                    dram_bytes=None if dram is None else dram[place],
                    nvme_bytes=None if nvme is None else nvme[place],
                )
                for tenant, dram, nvme in shared.tenants
            )
        return told

    async def _make(self, orders: OperatorSettings) -> None:
        try:
            self._shared = await self._share_out(orders)
        except Exception:  # process edge: heartbeats are to be answered, and what nodes were told before holds
            self._counters.add(metadata_metrics.QUOTA_SHARE_FAILURES)
            logger.exception("sharing out quotas failed, trying again")

    async def _share_out(self, orders: OperatorSettings) -> _Shared:
        began_s = slice_s = self._clock.now_s()
        took_s = 0.0
        living = list(self._nodes.live_nodes())
        reports = {
            NodeId(info.node_id): (info.boot_id, report.report) for info, report in living if report is not None and report.usages
        }
        sharing = [(info, report) for info, report in living if not self._nodes.is_draining(info.node_id)]
        places = {NodeId(info.node_id): place for place, (info, _) in enumerate(sharing)}
        moving = {
            usage.tenant
            for info, report in living
            if report is not None and NodeId(info.node_id) not in places
            for usage in report.tenants
            if not usage.unknown
        }
        held: dict[tuple[str, Tier], list[tuple[int, int]]] = {}
        for place, (_, report) in enumerate(sharing):
            for usage in report.tenants if report is not None else ():
                if usage.tenant in orders.quotas and not usage.unknown:
                    held.setdefault((usage.tenant, Tier.DRAM), []).append((place, usage.dram_bytes))
                    held.setdefault((usage.tenant, Tier.NVME), []).append((place, usage.nvme_bytes))
        rooms = {tier: [_capacity(info, tier) for info, _ in sharing] for tier in (Tier.DRAM, Tier.NVME)}

        def of(tenant: str, tier: Tier, quota: int | None) -> Sequence[int] | None:
            if quota is None:
                return None
            known = [0] * len(sharing)
            for place, size in held.get((tenant, tier), ()):
                known[place] = size
            return shares(quota, known, rooms[tier], grows=tenant not in moving)

        tenants = []
        for tenant, quota in orders.quotas.items():
            tenants.append((tenant, of(tenant, Tier.DRAM, quota.dram), of(tenant, Tier.NVME, quota.nvme)))
            if (worked_s := self._clock.now_s() - slice_s) > SLICE_S:
                took_s += worked_s
                await asyncio.sleep(0)
                slice_s = self._clock.now_s()
        took_s += self._clock.now_s() - slice_s
        rules = Retention(rules=[rule_to_proto(namespace, rule) for namespace, rule in orders.rules.items()])
        return _Shared(orders, rules.SerializeToString(), reports, places, tenants, began_s, took_s)


def rule_to_proto(namespace: NamespaceId, rule: RuleSetting) -> NamespaceRule:
    """A namespace's rule as it travels."""
    return NamespaceRule(namespace_id=namespace, ttl_ms=rule.ttl_ms, pinned=rule.pinned)


def _knows(shared: _Shared, asking: HeartbeatRequest) -> bool:
    """Whether they were made of what this boot of a node has said."""
    known = shared.reports.get(NodeId(asking.node_id))
    return known is not None and known[0] == asking.boot_id


def _capacity(info: NodeInfo, tier: Tier) -> int:
    return sum(volume.capacity_bytes for volume in info.volumes if int(volume.tier) == int(tier))
