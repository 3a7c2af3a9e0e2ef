"""Enforces tenants' quotas, and namespaces' times to live, whether they are kept, and how many copies they have.

The settings arrive with responses of the metadata server (``apply``). Heartbeats report what tenants hold (``report``). A thread
runs a round every ``TICK_S``: it adds namespaces to their tenants' orders of eviction, applies and saves the rules, evicts blocks
of tenants that exceed their share, evicts blocks whose time to live has ended, looks up the specs of namespaces that were found
at start, and repeats quarantines that a volume's catalog did not take. Each round does a bounded number of batches, and holds the
table's lock for one batch at a time.

Without the metadata server, the last settings remain in force. Rules also survive a restart
(``kvstore.node.control.rules_file``).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from kvproto.v1.common_pb2 import CacheSpec
from kvproto.v1.metadata_pb2 import (
    DrainNodeRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    NamespaceRule,
    RegisterNodeResponse,
    Retention,
    TenantUsage,
)
from kvstore.core.errors import KVStoreError
from kvstore.core.limits import MAX_TENANTS_TOLD
from kvstore.core.types import NamespaceId, Tier
from kvstore.node.control.rules_file import read_rules, write_rules
from kvstore.node.eviction.quotas import (
    EVICT_BATCH_BLOCKS,
    add_to_orders,
    evict_tenant_dram,
    join_tenant,
    mark_all_evicting,
    over_share,
)
from kvstore.node.eviction.ttl import MOST_EXPIRED, mark_expired
from kvstore.node.eviction.usage import held_bytes
from kvstore.node.eviction.volume_commits import by_volume, evict_from_volume, retry_quarantine
from kvstore.node.state.eviction_orders import EvictionOrder, TtlOrder
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import TIERS, NamespaceRegistry, NodeNamespace, QuotaShare
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.rpc.codec import spec_from_proto
from kvstore.tiers.eviction.policy import LruPolicy

log = logging.getLogger(__name__)
_limited = LimitedLog(log)

TICK_S: Final = 0.5
BATCHES: Final = 16
"""Maximum number of batches of 1,024 blocks per tenant and tier in one round."""
KEEP_S: Final = 5.0
"""Pause between attempts to write the rules to a disk that fails."""
SPECS_RETRY_S: Final = 5.0
"""Interval of requests for specs that the metadata server does not know either."""


class _Rule(NamedTuple):
    """Rule of one namespace on this node."""

    ttl_s: float = 0.0
    """Time to live; 0: none."""
    kept: bool = False
    copies: int = 1


class _BegunOrders(NamedTuple):
    """Eviction orders that a rule begins for a namespace, by tier. One order may be that of both tiers."""

    namespace: NodeNamespace
    orders: dict[Tier, EvictionOrder]


class RetentionEnforcer:
    """Enforces quotas and rules of namespaces. ``report`` and ``apply`` from one thread; ``start`` and ``stop`` once each.

    Args:
        table: the blocks of this node.
        namespaces: its namespaces.
        specs: returns the specs of all namespaces; raises ``KVStoreError``.
        counters: metrics.
        rules_file: where rules are kept across restarts; None: rules end with the process.
    """

    def __init__(
        self,
        table: BlockTable,
        namespaces: NamespaceRegistry,
        specs: Callable[[], Iterable[CacheSpec]],
        counters: Counters,
        rules_file: Path | None = None,
    ) -> None:
        self._table = table
        self._namespaces = namespaces
        self._specs = specs
        self._counters = counters
        self._rules_file = rules_file
        self._saved: dict[NamespaceId, _Rule] = {}
        self._keep_at_s = 0.0
        self._specs_requested_s = -SPECS_RETRY_S
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._shares: dict[str, QuotaShare] = {}
        self._reported = self._applied_report = 0  # numbers of heartbeats: the last one, and that of the current shares
        self._joining: dict[NodeNamespace, int] = {}  # namespaces that do not count yet, and the first report that included them
        self._rules: dict[NamespaceId, _Rule] = {}
        self._with_rules: set[NodeNamespace] = set()
        self._thread = threading.Thread(target=self._run, name="kvstore-retention", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop the thread after its current batch."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def recall(self) -> None:
        """Restore the saved rules for blocks found on volumes. Call before ``start`` and before the node serves."""
        if self._rules_file is None:
            return
        try:
            saved = read_rules(self._rules_file)
        except (OSError, ValueError) as error:
            self._counters.add(node_metrics.RETENTION_RULES_UNREADABLE)
            log.warning("rules not restored: %s (error=%s); the metadata server sends them again", self._rules_file, error)
            return
        self._rules = self._saved = _rules_of(saved)
        if self._rules:
            log.info("rules restored: %s (rules=%d)", self._rules_file, len(self._rules))
            self._apply_rules()

    def _keep_rules(self) -> None:
        now_s = self._table.clock.now_s()
        rules = self._rules
        if self._rules_file is None or rules == self._saved or now_s < self._keep_at_s:
            return
        messages = (
            NamespaceRule(namespace_id=one, ttl_ms=round(rule.ttl_s * 1000), kept=rule.kept, copies=rule.copies)
            for one, rule in rules.items()
        )
        try:
            write_rules(self._rules_file, messages)
        except OSError as error:
            self._keep_at_s = now_s + KEEP_S
            self._counters.add(node_metrics.RETENTION_RULES_UNWRITTEN)
            _limited.warning("rules not saved, trying again: %s (error=%s)", self._rules_file, error)
        else:
            self._saved = rules

    def apply(self, settings: Retention) -> None:
        """Apply the response of the metadata server. The same response again changes nothing."""
        shares = {
            one.tenant: QuotaShare(
                one.dram_bytes if one.HasField("dram_bytes") else None, one.nvme_bytes if one.HasField("nvme_bytes") else None
            )
            for one in settings.shares
        }
        rules = _rules_of(settings.rules)
        if rules != self._rules:
            self._rules = rules
            self._wake.set()
        if settings.from_sequence > self._reported or 0 < settings.from_sequence < self._applied_report:
            return  # shares are stale: computed from an older report, by a server that lags behind, or for another boot
        self._applied_report = settings.from_sequence
        known = [namespace for namespace, report in self._joining.items() if report <= settings.from_sequence]
        if shares == self._shares and not known:
            return
        with self._table.residency.lock:
            self._namespaces.accounts.apply_shares(shares)
            for namespace in known:
                namespace.counted = True
                del self._joining[namespace]
        self._shares = shares
        self._wake.set()

    def on_heartbeat(self, response: HeartbeatResponse) -> None:
        if response.HasField("retention"):  # an older server sends no rules
            self.apply(response.retention)

    def on_registered(self, response: RegisterNodeResponse, *, new_index: bool) -> Sequence[DrainNodeRequest]:  # noqa: ARG002
        return []

    def report(self, heartbeat: HeartbeatRequest) -> None:
        """Add to a heartbeat what tenants hold here. If there are too many: those with a quota, then those that hold most.

        The same thread calls this and ``apply``.
        """
        joining = [namespace for namespace in self._namespaces.all() if namespace.account is not None and not namespace.counted]
        usages = []  # counts may be slightly old: a block that moves now is in the next heartbeat
        for account in self._namespaces.accounts.all():
            dram, nvme = (held_bytes(self._table.residency, account.namespaces, tier) for tier in TIERS)
            usages.append(TenantUsage(tenant=account.tenant, dram_bytes=dram, nvme_bytes=nvme))
        unattributed = [namespace for namespace in self._namespaces.all() if namespace.account is None]
        dram, nvme = (held_bytes(self._table.residency, unattributed, tier) for tier in TIERS)
        usages.append(TenantUsage(unknown=True, dram_bytes=dram, nvme_bytes=nvme))
        usages = [one for one in usages if one.dram_bytes or one.nvme_bytes]
        usages.sort(key=lambda one: (one.tenant not in self._shares, -max(one.dram_bytes, one.nvme_bytes)))
        left_out = {one.tenant for one in usages[MAX_TENANTS_TOLD:]}
        self._reported = heartbeat.sequence
        heartbeat.tenants.extend(usages[:MAX_TENANTS_TOLD])
        for namespace in joining:
            if namespace.account is not None and namespace.account.tenant not in left_out:
                self._joining.setdefault(namespace, self._reported)

    # ---- rounds ----
    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.round()
            except (KVStoreError, OSError) as error:
                self._counters.add(node_metrics.RETENTION_FAILED)
                _limited.warning("retention round failed, trying again: %s", error)
            except Exception:  # process edge: without this thread, quotas would apply to new stores only
                self._counters.add(node_metrics.RETENTION_BUGS)
                log.exception("retention round failed: unexpected error, trying again")
            self._wake.wait(TICK_S)
            self._wake.clear()

    def round(self) -> None:
        """Run one round of all duties.

        Raises:
            KVStoreError: a volume's catalog could not be changed, or the metadata server does not answer. The next round retries.
            OSError: see ``KVStoreError``.
            Exception: a bug. All duties are attempted, also for all namespaces, before anything is raised.
        """
        errors: list[Exception] = []
        duties: list[Callable[[], None]] = [self._keep_rules, self.enforce_quotas, self._drop_expired, self._learn_specs]
        if self._rules or self._with_rules:
            duties.insert(0, self._apply_rules)
        if any(self._namespaces.accounts.limited.values()):
            duties.insert(0, self.join_orders)
        for duty in duties:
            _attempt(duty, errors)
        for node_volume in self._table.node_volumes:
            _attempt(partial(retry_quarantine, node_volume, self._table.clock.now_s()), errors)
        _raise_first(errors)

    def join_orders(self) -> None:
        """Add namespaces to their tenant's orders if they are new, or their tenant has a new quota. Part of ``round``."""
        table = self._table
        fresh = []
        for account in self._namespaces.accounts.all():
            for namespace in account.namespaces if account.orders else ():
                with table.residency.lock:
                    if join_tenant(table.residency, namespace):
                        fresh.append(namespace)
        for namespace, blocks in self._held_of(fresh).items():
            orders = {tier: order for tier, order in namespace.in_account.items() if order is not None}
            add_to_orders(table.residency, orders, blocks)

    def _held_of(self, namespaces: Sequence[NodeNamespace]) -> dict[NodeNamespace, list[Block]]:
        """The blocks of some namespaces, in the order in which they were added."""
        held: dict[NodeNamespace, list[Block]] = {namespace: [] for namespace in namespaces}
        for block in self._table.snapshot() if held else ():
            if block.namespace in held:
                held[block.namespace].append(block)
        return held

    def _apply_rules(self) -> None:
        """Apply new and ended rules, also to namespaces opened since the last round.

        1. Switch each namespace whose rule is another one than that in force.
        2. Attach its new eviction orders. Blocks that are stored from now on enter them.
        3. Insert the namespace's earlier blocks into the new orders. Until that ends, nothing is evicted by them.
        4. Return the blocks of namespaces that are no longer kept to the other orders.

        The list of earlier blocks is made after step 2: each block is in the list, or entered the new orders by itself.
        """
        begun: list[_BegunOrders] = []
        no_longer_kept: list[NodeNamespace] = []
        for namespace in self._namespaces.all():
            rule = self._rules.get(namespace.namespace_id, _Rule())
            in_force = _rule_in_force(namespace)
            if rule != in_force:
                begun += self._switch(namespace, rule)
                if in_force.kept and not rule.kept:
                    no_longer_kept.append(namespace)
        for namespace, orders in begun:
            self._attach(namespace, orders)
        held = self._held_of([*(namespace for namespace, _ in begun), *no_longer_kept])
        for namespace, orders in begun:
            add_to_orders(self._table.residency, orders, held[namespace])
        for namespace in no_longer_kept:
            self._make_evictable(namespace, held[namespace])
        known = self._namespaces.all()
        self._table.accounts.twice_held = tuple(namespace for namespace in known if namespace.copies > 1)
        self._with_rules = {one for one in known if one.kept or one.uses is not None or one.copies > 1}

    def _switch(self, namespace: NodeNamespace, rule: _Rule) -> list[_BegunOrders]:
        """Put a rule into force for one namespace, under one hold of the table's lock.

        Returns:
            The eviction orders that the rule begins. They are not attached to the namespace yet.
        """
        table = self._table
        with table.residency.lock:
            begun = [self._switch_ttl(namespace, rule.ttl_s), self._switch_kept(namespace, kept=rule.kept)]
            namespace.kept, namespace.copies = rule.kept, rule.copies
            table.accounts.kept = tuple(one for one in {*table.accounts.kept, namespace} if one.kept)
        return [_BegunOrders(namespace, orders) for orders in begun if orders]

    def _switch_ttl(self, namespace: NodeNamespace, ttl_s: float) -> dict[Tier, EvictionOrder]:
        """Begin, change or end a namespace's time to live. The caller holds the table's lock. Returns the orders that begin."""
        uses = namespace.uses
        if uses is None:
            if not ttl_s:
                return {}
            namespace.uses = TtlOrder(self._table.clock, ttl_s)
            return dict.fromkeys(TIERS, namespace.uses)
        if ttl_s:
            uses.ttl_s = ttl_s
        else:
            for tier in TIERS:
                namespace.drop_order(tier, uses)
            namespace.uses = None
        return {}

    @staticmethod
    def _switch_kept(namespace: NodeNamespace, *, kept: bool) -> dict[Tier, EvictionOrder]:
        """Begin or end the orders of a kept namespace. The caller holds the table's lock. Returns the orders that begin."""
        if kept and not namespace.kept:
            namespace.kept_orders = {tier: EvictionOrder(LruPolicy(), of_kept=True) for tier in TIERS}
            return namespace.kept_orders
        if namespace.kept and not kept:
            for tier, order in namespace.kept_orders.items():
                namespace.drop_order(tier, order)
        return {}

    def _attach(self, namespace: NodeNamespace, orders: dict[Tier, EvictionOrder]) -> None:
        """Have new blocks of a namespace enter its new orders, which evict nothing before its earlier blocks are in them."""
        with self._table.residency.lock:
            for tier, order in orders.items():
                order.entering = 1
                namespace.add_order(tier, order)

    def _make_evictable(self, namespace: NodeNamespace, blocks: Sequence[Block]) -> None:
        """Return the blocks of a namespace that is no longer kept to the other orders, a part at a time."""
        residency = self._table.residency
        keys = [block.key for block in blocks]
        for first in range(0, len(keys), EVICT_BATCH_BLOCKS):
            with residency.lock:
                residency.arena_evictor.restore(namespace, keys[first : first + EVICT_BATCH_BLOCKS])
                residency.volume_evictor.restore(namespace, keys[first : first + EVICT_BATCH_BLOCKS])

    def enforce_quotas(self) -> None:
        """Evict blocks beyond the shares, in batches. Part of ``round``.

        Raises:
            KVStoreError, OSError: as ``round``.
        """
        table = self._table
        for _ in range(BATCHES):
            with table.residency.lock:
                over = list(over_share(table.residency, Tier.DRAM))
                given = sum(evict_tenant_dram(table.residency, order, excess) for order, excess in over)
                victims = mark_all_evicting(table.residency, over_share(table.residency, Tier.NVME))
                if given:
                    table.residency.changed.notify_all()
            self._evict_marked(victims)
            if self._stopping.is_set() or not (given or victims):
                return

    def _drop_expired(self) -> None:
        errors: list[Exception] = []
        for namespace in self._with_rules:
            _attempt(partial(self._drop_expired_of, namespace), errors)
        _raise_first(errors)

    def _drop_expired_of(self, namespace: NodeNamespace) -> None:
        table = self._table
        for _ in range(BATCHES):
            with table.residency.lock:
                victims = (
                    mark_expired(table.residency, namespace.uses) if namespace.uses is not None and not namespace.kept else []
                )
            try:
                self._evict_marked([block for block in victims if block.nvme is not None])
            finally:
                with table.residency.lock:
                    idle = [block for block in victims if block.nvme is None and block.dram is not None]
                    table.residency.evict_from_dram([block for block in idle if table.residency.is_idle(block)])
                    table.residency.changed.notify_all()
            self._counters.add(node_metrics.EVICTED_UNUSED_BLOCKS, len(victims))
            if self._stopping.is_set() or len(victims) < MOST_EXPIRED:
                return

    def _evict_marked(self, victims: Sequence[Block]) -> None:
        """Evict marked blocks from their volumes. A volume whose catalog cannot be changed does not delay the others."""
        errors: list[Exception] = []
        for node_volume, theirs in by_volume(victims):
            _attempt(partial(evict_from_volume, self._table, node_volume, theirs), errors)
        _raise_first(errors)

    def _learn_specs(self) -> None:
        """Look up the specs of namespaces found at start that no engine has opened since."""
        now_s = self._table.clock.now_s()
        unknown = {namespace.namespace_id for namespace in self._namespaces.all() if namespace.spec is None}
        if not unknown or now_s < self._specs_requested_s + SPECS_RETRY_S:
            return
        self._specs_requested_s = now_s
        for message in self._specs():
            spec = spec_from_proto(message)
            if spec.namespace in unknown:
                self._namespaces.of_spec(spec)

    def by_tenant(self, held: dict[NodeNamespace, int], tier: Tier) -> list[TenantUsage]:
        """Return the bytes that each tenant holds in a tier, sorted by tenant; of more than ``MAX_TENANTS_TOLD``, the largest."""
        known: Counter[tuple[bool, str]] = Counter()
        for namespace, blocks in held.copy().items():
            whose = (True, "") if namespace.account is None else (False, namespace.account.tenant)
            known[whose] += blocks * namespace.shape.block_bytes
        field = "dram_bytes" if tier is Tier.DRAM else "nvme_bytes"
        most = sorted((whose for whose, size in known.most_common(MAX_TENANTS_TOLD) if size), key=lambda whose: whose)
        return [
            TenantUsage(tenant=tenant, unknown=unattributed, **{field: known[unattributed, tenant]})
            for unattributed, tenant in most
        ]


def _attempt(work: Callable[[], None], errors: list[Exception]) -> None:
    """Do a part of a round. An error is appended to ``errors``, so that it ends no other part."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  # raised at the end of the round
        errors.append(error)


def _raise_first(errors: Sequence[Exception]) -> None:
    """Raise the first error, bugs before failures of volumes and servers."""
    for error in sorted(errors, key=lambda error: isinstance(error, (KVStoreError, OSError))):
        raise error


def _rules_of(rules: Iterable[NamespaceRule]) -> dict[NamespaceId, _Rule]:
    return {NamespaceId(one.namespace_id): _Rule(one.ttl_ms / 1000, one.kept, max(1, one.copies)) for one in rules}


def _rule_in_force(namespace: NodeNamespace) -> _Rule:
    """The rule that a namespace follows now."""
    return _Rule(namespace.uses.ttl_s if namespace.uses is not None else 0.0, namespace.kept, namespace.copies)
