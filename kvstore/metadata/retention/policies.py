"""Quotas and retention rules: operators set them, nodes get them with each heartbeat answer.

``settings_store`` says where they are kept. ``quota_shares`` divides quotas among nodes.
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
from kvstore.metadata.retention.settings_store import OperatorSettings, QuotaSetting, RuleSetting, SettingsStore, unreadable
from kvstore.metadata.roles.roles import Roles
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.rpc.codec import check_id

logger: Final = logging.getLogger(__name__)
_limited: Final = LimitedLog(logger)
MAX_QUOTA: Final = 2**62
MAX_TTL_MS: Final = 10 * 366 * 86_400_000
"""Ten years."""


class _Usage:
    """Usage of all tenants, summed over the heartbeats of live nodes."""

    def __init__(self) -> None:
        self._held: Counter[tuple[str, Tier]] = Counter()
        self.nodes: Counter[str] = Counter()

    def add(self, report: HeartbeatRequest) -> None:
        """Add a node."""
        for usage in report.tenants:
            if usage.unknown:
                continue
            self._held.update({(usage.tenant, Tier.DRAM): usage.dram_bytes, (usage.tenant, Tier.NVME): usage.nvme_bytes})
            self.nodes[usage.tenant] += 1

    def of(self, tenant: str, quota: QuotaSetting) -> pb.TenantDescription:
        """Return one tenant."""
        return pb.TenantDescription(
            tenant=tenant,
            quota=quota_to_proto(quota),
            dram_bytes=self._held[tenant, Tier.DRAM],
            nvme_bytes=self._held[tenant, Tier.NVME],
            nodes=self.nodes[tenant],
        )


class RetentionPolicies:
    """Handlers of the calls about quotas and retention rules. On the event loop.

    Args:
        store: the settings.
        index: the index, for its namespaces.
        nodes: live nodes and their reports.
        reads: thread that exchanges shares of quotas with other servers.
        roles: roles of this process.
        counters: counters of this process.
        clock: the host's monotonic clock.
        interval_s: how long shares of quotas are reused.
    """

    def __init__(
        self,
        store: SettingsStore,
        index: PrefixIndex,
        nodes: NodeTable,
        reads: IndexThread,
        roles: Roles,
        counters: Counters,
        clock: Clock,
        interval_s: float,
    ) -> None:
        self._store = store
        self._index = index
        self._nodes = nodes
        self._counters = counters
        self._shares = QuotaShares(nodes, index, reads, roles, counters, clock, interval_s)

    # ---- nodes ----
    async def answer(self, heartbeat: HeartbeatRequest) -> Retention | None:
        """The rules and shares of a node.

        Returns:
            None if the settings file cannot be read, or the node has not reported what it holds. The node's previous rules and
            shares then stay in force.
        """
        settings = self._read()
        return None if settings is None else await self._shares.answer(settings, heartbeat)

    def tick(self) -> None:
        """Make shares for other servers, if this one does. Called several times per second."""
        settings = self._store.read()
        if settings is not None:
            self._shares.tick(settings)

    def _read(self) -> OperatorSettings | None:
        settings = self._store.read()
        if settings is None:
            self._counters.add(metadata_metrics.ORDERS_UNREADABLE)
            _limited.warning(
                "settings file %s cannot be read (%s): nodes keep their last settings; repair or remove the file",
                self._store.path,
                self._store.problem,
            )
        return settings

    def _readable(self) -> OperatorSettings:
        settings = self._read()
        if settings is None:
            raise unreadable(self._store.path, self._store.problem)
        return settings

    # ---- quotas ----
    def describe(self, request: pb.DescribeTenantsRequest) -> pb.DescribeTenantsResponse:
        """Tenants with their quotas and usage.

        Raises:
            Conflict: the settings file cannot be read.
        """
        quotas, usage = self._readable().quotas, self._usage()
        selected = [request.tenant] if request.HasField("tenant") else sorted(quotas.keys() | usage.nodes.keys())
        return pb.DescribeTenantsResponse(
            tenants=[usage.of(tenant, quotas.get(tenant, QuotaSetting())) for tenant in selected],
        )

    def with_quota(self) -> list[pb.TenantDescription]:
        """Tenants that have a quota; none if the settings file cannot be read."""
        settings = self._store.read()
        if settings is None or not settings.quotas:
            return []
        usage = self._usage()
        return [usage.of(tenant, quota) for tenant, quota in sorted(settings.quotas.items())]

    def _usage(self) -> _Usage:
        usage = _Usage()
        for _, report in self._nodes.live_nodes():
            if report is not None:
                usage.add(report)
        return usage

    async def set_quota(self, request: pb.SetTenantQuotaRequest) -> pb.SetTenantQuotaResponse:
        """Set or remove a tenant's quota.

        Raises:
            InvalidArgument: the call is malformed.
            Conflict: the present quota differs from the expected one, or the settings file cannot be read.
            CapacityExceeded: too many tenants have a quota, or the disk is full.
        """
        check_id(request.operation_id, "operation_id")
        tenant, quota = check_tenant(request.tenant), quota_from_proto(request.quota)
        expected = quota_from_proto(request.expected) if request.HasField("expected") else None

        def edit(settings: OperatorSettings) -> OperatorSettings:
            before = settings.quotas.get(tenant, QuotaSetting())
            if expected is not None and before != expected:
                raise Conflict(
                    "the tenant's quota differs from the expected one",
                    quota=format_quota(before),
                    expected=format_quota(expected),
                )
            if quota and not before and len(settings.quotas) >= limits.MAX_QUOTAS:
                raise CapacityExceeded("too many tenants have a quota", limit=limits.MAX_QUOTAS)
            return settings.with_quota(tenant, quota)

        settings, changed = await self._store.change(edit)
        before = settings.quotas.get(tenant, QuotaSetting())
        if settings != changed:
            self._counters.add(metadata_metrics.SETTINGS_CHANGED)
            logger.warning("quota changed: tenant %r (%s; before: %s)", tenant, format_quota(quota), format_quota(before))
        return pb.SetTenantQuotaResponse(quota=quota_to_proto(quota), before=quota_to_proto(before))

    # ---- rules ----
    def rule(self, namespace: NamespaceId) -> RuleSetting:
        """The rule of a namespace; an empty rule if the settings file cannot be read."""
        settings = self._read()
        return RuleSetting() if settings is None else settings.rules.get(namespace, RuleSetting())

    def rules(self) -> list[NamespaceRule]:
        """All rules, by namespace id.

        Raises:
            Conflict: the settings file cannot be read.
        """
        return [rule_to_proto(namespace, rule) for namespace, rule in sorted(self._readable().rules.items())]

    async def set_rule(self, request: pb.SetNamespaceRuleRequest) -> pb.SetNamespaceRuleResponse:
        """Set the rule of a namespace.

        Raises:
            InvalidArgument: the call is malformed.
            NotFound: the namespace is not registered and has no rule. An existing rule can be changed even if the index no longer
                knows the namespace.
            Conflict: the present rule differs from the expected one, or the settings file cannot be read.
            CapacityExceeded: too many namespaces have a rule, or the disk is full.
        """
        check_id(request.operation_id, "operation_id")
        namespace, rule = NamespaceId(check_id(request.rule.namespace_id, "namespace_id")), rule_from_proto(request.rule)
        expected = rule_from_proto(request.expected) if request.HasField("expected") else None
        registered = not rule or self._index.spec_of(namespace) is not None

        def edit(settings: OperatorSettings) -> OperatorSettings:
            before = settings.rules.get(namespace, RuleSetting())
            if not registered and not before:
                raise NotFound("no such namespace", namespace_id=namespace.hex())
            if expected is not None and before != expected:
                raise Conflict(
                    "the namespace's rule differs from the expected one", rule=format_rule(before), expected=format_rule(expected)
                )
            if rule and not before and len(settings.rules) >= limits.MAX_RULES:
                raise CapacityExceeded("too many namespaces have a rule", limit=limits.MAX_RULES)
            return settings.with_rule(namespace, rule)

        settings, changed = await self._store.change(edit)
        before = settings.rules.get(namespace, RuleSetting())
        if settings != changed:
            self._counters.add(metadata_metrics.SETTINGS_CHANGED)
            logger.warning("rule changed: namespace %s (%s; before: %s)", namespace.hex(), format_rule(rule), format_rule(before))
        return pb.SetNamespaceRuleResponse(rule=rule_to_proto(namespace, rule), before=rule_to_proto(namespace, before))


def check_tenant(tenant: str) -> str:
    """Check a tenant's name; empty: the default tenant.

    Raises:
        InvalidArgument: the name is too long or not printable.
    """
    if len(tenant.encode()) > limits.MAX_NAME_BYTES or not tenant.isprintable():
        raise InvalidArgument(f"tenant must be printable text of at most {limits.MAX_NAME_BYTES} bytes", got=tenant[:64])
    return tenant


def check_usages(report: HeartbeatRequest) -> None:
    """Check a node's report of what each tenant holds.

    Raises:
        InvalidArgument: the report is malformed.
    """
    if len(report.tenants) > limits.MAX_TENANTS_TOLD:
        raise InvalidArgument("too many tenants", got=len(report.tenants), limit=limits.MAX_TENANTS_TOLD)
    for usage in report.tenants:
        check_tenant(usage.tenant)


def quota_from_proto(message: pb.TenantQuota) -> QuotaSetting:
    """Decode a quota.

    Raises:
        InvalidArgument: it is out of range.
    """
    quota = QuotaSetting(
        message.dram_bytes if message.HasField("dram_bytes") else None,
        message.nvme_bytes if message.HasField("nvme_bytes") else None,
    )
    if max(quota.dram or 0, quota.nvme or 0) > MAX_QUOTA:
        raise InvalidArgument("quota is out of range", limit=MAX_QUOTA)
    return quota


def quota_to_proto(quota: QuotaSetting) -> pb.TenantQuota | None:
    """Encode a quota; None: unlimited."""
    return pb.TenantQuota(dram_bytes=quota.dram, nvme_bytes=quota.nvme) if quota else None


def format_quota(quota: QuotaSetting) -> str:
    """A quota as text, for logs and errors."""
    dram, nvme = ("any" if size is None else size for size in (quota.dram, quota.nvme))
    return f"dram={dram},nvme={nvme}"


def rule_from_proto(message: NamespaceRule) -> RuleSetting:
    """Decode a rule.

    Raises:
        InvalidArgument: it is out of range.
    """
    if message.ttl_ms > MAX_TTL_MS:
        raise InvalidArgument("ttl_ms is out of range", limit=MAX_TTL_MS)
    if message.copies > limits.MAX_COPIES:
        raise InvalidArgument(f"copies must be 1 or {limits.MAX_COPIES}", got=message.copies)
    return RuleSetting(message.ttl_ms, message.kept, message.copies or 1)


def format_rule(rule: RuleSetting) -> str:
    """A rule as text, for logs and errors."""
    return f"ttl={rule.ttl_ms},kept={'yes' if rule.kept else 'no'},copies={rule.copies}"
