"""Shares of cluster-wide quotas: how much of each tenant's quota each node may hold.

Every heartbeat answer contains the node's *shares*, and the node enforces them (``kvstore.node.eviction.quotas``).
``divide_quota`` makes the shares of one quota from the bytes that each live node holds now. Each node gets as much plus some
headroom, and the rest of the quota is divided by capacity. If that exceeds the quota, nodes that hold little for their capacity
keep what they have, and the others are cut to one level (max-min fairness, weighted by capacity). Therefore:

* shares that were made together never exceed the quota. The bytes held may exceed it for some heartbeats, while one node grows
  into what another must evict, or as long as blocks in use cannot be evicted;
* a tenant whose engines all run on one host has at least seven eighths of its quota there, for any number of nodes;
* a node that begins to hold blocks of the tenant gets its fair share within some heartbeats.

A draining node gets no share, and its blocks do not count: they move to the other nodes, which share the whole quota
and take those blocks only as far as they fit. Meanwhile no node gets headroom at the expense of others, or the moved blocks
would be evicted again. A silent node is left out, because its blocks are not served.

All shares are made at once, on the event loop, and reused for all nodes. It takes time per tenant and node, so other calls run
in between, one run serves all heartbeats that wait for it, and the next run waits ``REST_TIMES`` as long as the run took. A
share names the node's report that it was made from, so that the node knows which of its changes are included.

Of several servers that share an index, the holder of the role ``quota`` makes the shares for all and writes them to the index
(``share_table``). It uses them itself only after they are written. The others read them. An answer waits for that at most
``MAX_WAIT_S``, because the index may be slow; then it has the last known shares. A server answers without shares if it lacks them
or cannot read the newest for two heartbeats, and nodes keep their last ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvproto.v1.common_pb2 import NodeInfo
from kvproto.v1.metadata_pb2 import HeartbeatRequest, NamespaceRule, Retention, TenantShare
from kvstore.core.clock import Clock
from kvstore.core.errors import KVStoreError
from kvstore.core.types import NamespaceId, NodeId, Tier
from kvstore.index.contract import PrefixIndex, ServerRole
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.retention.settings_store import OperatorSettings, RuleSetting
from kvstore.metadata.retention.share_table import ShareTable
from kvstore.metadata.roles.roles import Roles
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics

logger: Final = logging.getLogger(__name__)
limited: Final = LimitedLog(logger)
HEADROOM: Final = 8
"""The headroom of a node is this fraction (1/n) of its part of the quota by capacity."""
REST_TIMES: Final = 20
"""Making shares takes at most one n-th of the event loop's time."""
KEPT_INTERVALS: Final = 4
"""Number of intervals (four are two heartbeats) for which a server hands out shares without a comparison with other servers."""
MAX_WAIT_S: Final = 0.1
"""How long an answer waits for a shared index."""
SLICE_S: Final = 0.002
"""Time after which other calls run in between."""


def divide_quota(quota: int, held: Sequence[int], capacities: Sequence[int], *, grows: bool = True) -> list[int]:
    """Divide a quota among nodes.

    Args:
        quota: bytes, for all nodes together.
        held: bytes that each node holds now.
        capacities: capacity of each node in the tier, in bytes; 0: no volume of the tier.
        grows: whether nodes get headroom at the expense of others. Otherwise no node gets less than it holds, unless the nodes
            hold more than the quota.

    Returns:
        The share of each node in bytes; the sum is at most the quota.
    """
    total = sum(capacities)
    if not total:
        return [0] * len(held)
    spare = quota // HEADROOM if grows else 0
    wanted = [size + spare * capacity // total if capacity else 0 for size, capacity in zip(held, capacities, strict=True)]
    shares = [0] * len(held)
    left, capacity_left = quota, total
    exceeded = sum(wanted) > quota
    for node in sorted(range(len(held)), key=lambda node: wanted[node] / capacities[node] if capacities[node] else 0.0):
        capacity = capacities[node]
        if not capacity:
            continue
        fair = left * capacity // capacity_left
        shares[node] = min(wanted[node], fair) if exceeded else wanted[node]
        left -= shares[node]
        capacity_left -= capacity
    if exceeded:
        return shares
    return [share + left * capacity // total for share, capacity in zip(shares, capacities, strict=True)]


@dataclass(frozen=True, slots=True)
class _Answers:
    """What heartbeats are answered with.

    Attributes:
        settings: the settings that the answers implement.
        rules: all retention rules, as an encoded ``Retention``.
        table: the shares.
        since_s: when the run that made or read the table began.
        took_s: how long the run took on the event loop.
    """

    settings: OperatorSettings
    rules: bytes
    table: ShareTable
    since_s: float
    took_s: float


class QuotaShares:
    """Makes or reads shares, and answers heartbeats with them.

    Args:
        nodes: live nodes and their reports.
        index: the index. If servers of several hosts share it, the holder of the role ``quota`` makes shares for all of them.
        thread: thread that reads and writes the table of shares in the index.
        roles: roles of this process.
        counters: counters of this process.
        clock: the host's monotonic clock.
        interval_s: how long shares are reused.
    """

    def __init__(
        self,
        nodes: NodeTable,
        index: PrefixIndex,
        thread: IndexThread,
        roles: Roles,
        counters: Counters,
        clock: Clock,
        interval_s: float,
    ) -> None:
        self._nodes = nodes
        self._index = index
        self._thread = thread
        self._roles = roles
        self._counters = counters
        self._clock = clock
        self._interval_s = interval_s
        self._answers: _Answers | None = None
        self._run: asyncio.Task[None] | None = None

    async def answer(self, settings: OperatorSettings, heartbeat: HeartbeatRequest) -> Retention | None:
        """The rules and shares of a node.

        Returns:
            None if the node has not reported what it holds (with a share that ignores its blocks it would evict blocks that it
            may keep), or if this server has no shares that include the report, or none that are new enough. Its previous rules
            and shares then stay in force.
        """
        if not settings.quotas and not settings.rules:
            return Retention(from_sequence=heartbeat.sequence)
        if not heartbeat.usages:
            return None
        if self._stale(settings, heartbeat):
            most_s = MAX_WAIT_S if self._index.leases_roles else None
            _, late = await asyncio.wait([self._begin_run(settings)], timeout=most_s)
            if late:  # the run goes on: others may wait for it, too
                self._counters.add(metadata_metrics.QUOTA_ANSWERS_LATE)
                limited.warning("heartbeat answered with earlier quota shares: the index is slow (waited_s=%.1f)", most_s)
        return self._answer_from(self._answers, heartbeat)

    def tick(self, settings: OperatorSettings) -> None:
        """Make shares for the other servers, if it is time to. Called several times per second."""
        if not self._index.leases_roles or not self._roles.holds(ServerRole.QUOTA):
            return
        if (settings.quotas or settings.rules) and self._stale(settings):
            self._begin_run(settings)

    def _begin_run(self, settings: OperatorSettings) -> asyncio.Task[None]:
        if self._run is None or self._run.done():
            self._run = asyncio.create_task(self._renew(settings))
        return self._run

    def _stale(self, settings: OperatorSettings, heartbeat: HeartbeatRequest | None = None) -> bool:
        answers = self._answers
        if answers is None:
            return True
        age_s = self._clock.now_s() - answers.since_s
        if age_s < REST_TIMES * answers.took_s:
            return False
        if answers.settings is not settings or age_s >= self._interval_s:
            return True
        return heartbeat is not None and not answers.table.includes(heartbeat)

    def _answer_from(self, answers: _Answers | None, heartbeat: HeartbeatRequest) -> Retention | None:
        if answers is None or not answers.table.includes(heartbeat):
            return None
        kept_s = KEPT_INTERVALS * self._interval_s + REST_TIMES * answers.took_s
        if self._index.leases_roles and self._clock.now_s() - answers.since_s > kept_s:
            return None  # other servers may have handed out newer shares
        table, node_id = answers.table, NodeId(heartbeat.node_id)
        answer = Retention.FromString(answers.rules)
        answer.from_sequence = table.reports[node_id][1]
        position = table.positions.get(node_id)
        if position is not None and not self._nodes.is_draining(node_id):
            answer.shares.extend(
                TenantShare(
                    tenant=tenant,
                    dram_bytes=None if dram is None else dram[position],
                    nvme_bytes=None if nvme is None else nvme[position],
                )
                for tenant, dram, nvme in table.tenants
            )
        return answer

    async def _renew(self, settings: OperatorSettings) -> None:
        try:
            if self._roles.holds(ServerRole.QUOTA):
                await self._make(settings)
            else:
                await self._read(settings)
        except KVStoreError as error:  # the previous shares stay in force
            self._counters.add(metadata_metrics.MAINTENANCE_FAILURES)
            limited.warning("shares of quotas not exchanged with other servers: %s", error)
        except Exception:  # process edge: heartbeats must be answered, and the previous shares stay in force
            self._counters.add(metadata_metrics.QUOTA_SHARE_FAILURES)
            logger.exception("quota shares not made: unexpected error, trying again at the next heartbeat")

    async def _make(self, settings: OperatorSettings) -> None:
        made = await self._make_shares(settings)
        if self._index.leases_roles:
            known = await self._thread.run(self._read_note)
            generation = max(0 if one is None else one.generation for one in (known, self._shared_table())) + 1
            made = replace(made, table=replace(made.table, generation=generation, epoch=self._index.epoch))
            if not self._roles.holds(ServerRole.QUOTA):
                return  # this server was stopped in between: another one makes shares
            await self._thread.run(lambda: self._index.put_notes(made.table.notes(), announce=False))
        self._answers = made

    async def _read(self, settings: OperatorSettings) -> None:
        began_s = self._clock.now_s()
        read = await self._thread.run(self._read_note)
        known = self._shared_table()
        table = read if read is not None and read.replaces(known) else known
        if table is not None:
            self._answers = _Answers(settings, _encoded_rules(settings), table, began_s, 0.0)

    def _shared_table(self) -> ShareTable | None:
        """The last table of the present index epoch that this server knows."""
        table = None if self._answers is None else self._answers.table
        return table if table is not None and table.epoch == self._index.epoch else None

    def _read_note(self) -> ShareTable | None:
        """Read the shared table. One that cannot be read is ignored, so that the holder of the role replaces it."""
        try:
            return ShareTable.read(self._index.note)
        except ValueError as error:
            self._counters.add(metadata_metrics.QUOTA_SHARE_FAILURES)
            limited.warning("table of quota shares ignored: %s", error)
            return None

    async def _make_shares(self, settings: OperatorSettings) -> _Answers:
        began_s = slice_s = self._clock.now_s()
        took_s = 0.0
        live = list(self._nodes.live_nodes())
        reports = {
            NodeId(info.node_id): (info.boot_id, report.sequence) for info, report in live if report is not None and report.usages
        }
        sharing = [(info, report) for info, report in live if not self._nodes.is_draining(info.node_id)]
        positions = {NodeId(info.node_id): position for position, (info, _) in enumerate(sharing)}
        moving = {
            usage.tenant
            for info, report in live
            if report is not None and NodeId(info.node_id) not in positions
            for usage in report.tenants
            if not usage.unknown
        }
        held: dict[tuple[str, Tier], list[tuple[int, int]]] = {}
        for position, (_, report) in enumerate(sharing):
            for usage in report.tenants if report is not None else ():
                if usage.tenant in settings.quotas and not usage.unknown:
                    held.setdefault((usage.tenant, Tier.DRAM), []).append((position, usage.dram_bytes))
                    held.setdefault((usage.tenant, Tier.NVME), []).append((position, usage.nvme_bytes))
        capacities = {tier: [_capacity(info, tier) for info, _ in sharing] for tier in (Tier.DRAM, Tier.NVME)}

        def shares_of(tenant: str, tier: Tier, quota: int | None) -> Sequence[int] | None:
            if quota is None:
                return None
            sizes = [0] * len(sharing)
            for position, size in held.get((tenant, tier), ()):
                sizes[position] = size
            return divide_quota(quota, sizes, capacities[tier], grows=tenant not in moving)

        tenants = []
        for tenant, quota in settings.quotas.items():
            tenants.append((tenant, shares_of(tenant, Tier.DRAM, quota.dram), shares_of(tenant, Tier.NVME, quota.nvme)))
            if (worked_s := self._clock.now_s() - slice_s) > SLICE_S:
                took_s += worked_s
                await asyncio.sleep(0)
                slice_s = self._clock.now_s()
        took_s += self._clock.now_s() - slice_s
        return _Answers(settings, _encoded_rules(settings), ShareTable(reports, positions, tenants), began_s, took_s)


def _encoded_rules(settings: OperatorSettings) -> bytes:
    rules = Retention(rules=[rule_to_proto(namespace, rule) for namespace, rule in settings.rules.items()])
    return rules.SerializeToString()


def rule_to_proto(namespace: NamespaceId, rule: RuleSetting) -> NamespaceRule:
    """A namespace's rule as a message."""
    return NamespaceRule(namespace_id=namespace, ttl_ms=rule.ttl_ms, kept=rule.kept, copies=rule.copies)


def _capacity(info: NodeInfo, tier: Tier) -> int:
    return sum(volume.capacity_bytes for volume in info.volumes if int(volume.tier) == int(tier))
