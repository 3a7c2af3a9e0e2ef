"""What may stay on nodes, by order of operators: kept in a file beside the index, told to nodes with each answer to a heartbeat.

How a tenant's quota is shared out over nodes: ``kvstore.metadata.retention.quota_shares``.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

from kvproto.v1 import admin_pb2 as pb
from kvproto.v1.metadata_pb2 import HeartbeatRequest, NamespaceRule, Retention
from kvstore.core import limits
from kvstore.core.clock import Clock
from kvstore.core.errors import CapacityExceeded, Conflict, InvalidArgument, NotFound
from kvstore.core.types import NamespaceId, Tier
from kvstore.index.contract import PrefixIndex
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.retention.quota_shares import QuotaShares, rule_to_proto
from kvstore.metadata.retention.settings_store import OperatorSettings, QuotaSetting, RuleSetting, SettingsStore
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.rpc.codec import check_id

logger: Final = logging.getLogger(__name__)
_limited: Final = LimitedLog(logger)
MAX_QUOTA: Final = 2**62
MAX_TTL_MS: Final = 10 * 366 * 86_400_000
"""Ten years."""


class RetentionPolicies:
    """Handlers of the calls about what may stay. On the event loop; changes are written in a thread.

    Args:
        file: the orders.
        index: of it, the namespaces that there are.
        nodes: who lives, and what they hold.
        writes: the thread that changes what is kept.
        counters: events of this process.
        clock: the host's monotonic clock.
        interval_s: how long shares of quotas hold.
    """

    def __init__(
        self,
        file: SettingsStore,
        index: PrefixIndex,
        nodes: NodeTable,
        writes: IndexThread,
        counters: Counters,
        clock: Clock,
        interval_s: float,
    ) -> None:
        self._file = file
        self._index = index
        self._nodes = nodes
        self._writes = writes
        self._counters = counters
        self._sharing = QuotaShares(nodes, counters, clock, interval_s)

    # ---- to nodes ----
    async def answer(self, asking: HeartbeatRequest) -> Retention | None:
        """What a node is told; None: what it was told before holds, as orders cannot be read or it has not said what it holds."""
        orders = self._orders()
        return None if orders is None else await self._sharing.answer(orders, asking)

    def _orders(self) -> OperatorSettings | None:
        orders = self._file.now()
        if orders is None:
            self._counters.add(metadata_metrics.ORDERS_UNREADABLE)
            _limited.warning(
                "%s cannot be read (%s): quotas are as nodes heard them last. Mend or remove it",
                self._file.path,
                self._file.wrong,
            )
        return orders

    # ---- to operators ----
    def describe(self, request: pb.DescribeTenantsRequest) -> pb.DescribeTenantsResponse:
        """NamespaceOwners with quota and usage.

        Raises:
            Conflict: the orders cannot be read.
        """
        quotas = self._readable().quotas
        held: Counter[tuple[str, Tier]] = Counter()
        on: Counter[str] = Counter()
        unknown: Counter[Tier] = Counter()
        for _, report in self._nodes.live_nodes():
            for usage in report.tenants if report is not None else ():
                if usage.unknown:
                    unknown.update({Tier.DRAM: usage.dram_bytes, Tier.NVME: usage.nvme_bytes})
                    continue
                held.update({(usage.tenant, Tier.DRAM): usage.dram_bytes, (usage.tenant, Tier.NVME): usage.nvme_bytes})
                on[usage.tenant] += 1
        wanted = [request.tenant] if request.HasField("tenant") else sorted(quotas.keys() | on.keys())
        return pb.DescribeTenantsResponse(
            tenants=[
                pb.TenantDescription(
                    tenant=tenant,
                    quota=quota_to_proto(quotas.get(tenant, QuotaSetting())),
                    dram_bytes=held[tenant, Tier.DRAM],
                    nvme_bytes=held[tenant, Tier.NVME],
                    nodes=on[tenant],
                )
                for tenant in wanted
            ],
            unknown_dram_bytes=unknown[Tier.DRAM],
            unknown_nvme_bytes=unknown[Tier.NVME],
        )

    async def set_quota(self, request: pb.SetTenantQuotaRequest) -> pb.SetTenantQuotaResponse:
        """Sets a tenant's quota, or takes it away.

        Raises:
            InvalidArgument: malformed.
            Conflict: it has another quota than expected, or the orders cannot be read.
            CapacityExceeded: too many tenants have one, or there is no room on disk.
        """
        check_id(request.operation_id, "operation_id")
        tenant, quota = check_tenant(request.tenant), quota_from_proto(request.quota)
        expected = quota_from_proto(request.expected) if request.HasField("expected") else None

        def changed(orders: OperatorSettings) -> OperatorSettings:
            before = orders.quotas.get(tenant, QuotaSetting())
            if expected is not None and before != expected:
                raise Conflict("the tenant has another quota", quota=shown(before), expected=shown(expected))
            if quota and not before and len(orders.quotas) >= limits.MAX_QUOTAS:
                raise CapacityExceeded("too many tenants have a quota", limit=limits.MAX_QUOTAS)
            return orders.with_quota(tenant, quota)

        before, after = await self._writes.run(self._file.change, changed)
        if before != after:
            self._counters.add(metadata_metrics.ORDERS_CHANGED)
            logger.warning(
                "the quota of tenant %r is %s; it was %s", tenant, shown(quota), shown(before.quotas.get(tenant, QuotaSetting()))
            )
        return pb.SetTenantQuotaResponse(
            quota=quota_to_proto(quota), before=quota_to_proto(before.quotas.get(tenant, QuotaSetting()))
        )

    def rule(self, namespace: NamespaceId) -> RuleSetting:
        """What may stay of a namespace; as if nothing was ordered where the orders cannot be read."""
        orders = self._orders()
        return RuleSetting() if orders is None else orders.rules.get(namespace, RuleSetting())

    def rules(self) -> list[NamespaceRule]:
        """All rules, by id of the namespace.

        Raises:
            Conflict: the orders cannot be read.
        """
        return [rule_to_proto(namespace, rule) for namespace, rule in sorted(self._readable().rules.items())]

    async def set_rule(self, request: pb.SetNamespaceRuleRequest) -> pb.SetNamespaceRuleResponse:
        """Sets what may stay of a namespace.

        Raises:
            InvalidArgument: malformed.
            NotFound: nobody registered it, and it has no rule. The rule of one that the index has forgotten can be changed.
            Conflict: it has another rule than expected, or the orders cannot be read.
            CapacityExceeded: too many namespaces have one, or there is no room on disk.
        """
        check_id(request.operation_id, "operation_id")
        namespace, rule = NamespaceId(check_id(request.rule.namespace_id, "namespace_id")), rule_from_proto(request.rule)
        expected = rule_from_proto(request.expected) if request.HasField("expected") else None
        registered = not rule or self._index.spec_of(namespace) is not None

        def changed(orders: OperatorSettings) -> OperatorSettings:
            before = orders.rules.get(namespace, RuleSetting())
            if not registered and not before:
                raise NotFound("no such namespace", namespace_id=namespace.hex())
            if expected is not None and before != expected:
                raise Conflict("the namespace has another rule", rule=shown_rule(before), expected=shown_rule(expected))
            if rule and not before and len(orders.rules) >= limits.MAX_RULES:
                raise CapacityExceeded("too many namespaces have a rule", limit=limits.MAX_RULES)
            return orders.with_rule(namespace, rule)

        orders, after = await self._writes.run(self._file.change, changed)
        before = orders.rules.get(namespace, RuleSetting())
        if orders != after:
            self._counters.add(metadata_metrics.ORDERS_CHANGED)
            logger.warning("namespace %s: %s; it was %s", namespace.hex(), shown_rule(rule), shown_rule(before))
        return pb.SetNamespaceRuleResponse(rule=rule_to_proto(namespace, rule), before=rule_to_proto(namespace, before))

    def _readable(self) -> OperatorSettings:
        orders = self._orders()
        if orders is None:
            raise Conflict("the file of orders cannot be read: mend or remove it", path=self._file.path, why=self._file.wrong)
        return orders


def check_tenant(tenant: str) -> str:
    """A tenant's name, unchanged; empty: the default tenant.

    Raises:
        InvalidArgument: none that a namespace can have.
    """
    if len(tenant.encode()) > limits.MAX_NAME_BYTES or not tenant.isprintable():
        raise InvalidArgument(f"tenant takes {limits.MAX_NAME_BYTES} bytes of printable text at most", got=tenant[:64])
    return tenant


def check_usages(report: HeartbeatRequest) -> None:
    """What a node says that tenants hold there.

    Raises:
        InvalidArgument: malformed.
    """
    if len(report.tenants) > limits.MAX_TENANTS_TOLD:
        raise InvalidArgument("too many tenants", got=len(report.tenants), limit=limits.MAX_TENANTS_TOLD)
    for usage in report.tenants:
        check_tenant(usage.tenant)


def quota_from_proto(message: pb.TenantQuota) -> QuotaSetting:
    """A quota as it is kept.

    Raises:
        InvalidArgument: out of range.
    """
    quota = QuotaSetting(
        message.dram_bytes if message.HasField("dram_bytes") else None,
        message.nvme_bytes if message.HasField("nvme_bytes") else None,
    )
    if max(quota.dram or 0, quota.nvme or 0) > MAX_QUOTA:
        raise InvalidArgument("a quota is out of range", most=MAX_QUOTA)
    return quota


def quota_to_proto(quota: QuotaSetting) -> pb.TenantQuota | None:
    """As it travels; None: none."""
    return pb.TenantQuota(dram_bytes=quota.dram, nvme_bytes=quota.nvme) if quota else None


def shown(quota: QuotaSetting) -> str:
    """In a word: for the log, and for whoever compares."""
    dram, nvme = ("any" if most is None else most for most in (quota.dram, quota.nvme))
    return f"dram={dram},nvme={nvme}"


def rule_from_proto(message: NamespaceRule) -> RuleSetting:
    """A rule as it is kept.

    Raises:
        InvalidArgument: out of range.
    """
    if message.ttl_ms > MAX_TTL_MS:
        raise InvalidArgument("a time to live is out of range", most_ms=MAX_TTL_MS)
    return RuleSetting(message.ttl_ms, message.pinned)


def shown_rule(rule: RuleSetting) -> str:
    """In a word: for the log, and for whoever compares."""
    return f"ttl={rule.ttl_ms},pinned={'yes' if rule.pinned else 'no'}"
