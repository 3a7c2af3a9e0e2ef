"""Namespaces and tenants of this node."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from kvstore.core.errors import CapacityExceeded, Conflict, NotFound
from kvstore.core.limits import MAX_NAMESPACES, MAX_NAMESPACES_OF_TENANT
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey, BlockShape, NamespaceId, Tier
from kvstore.node.state.eviction_orders import EvictionOrder, TtlOrder
from kvstore.tiers.contract import EvictionPolicy
from kvstore.tiers.eviction.policy import LruPolicy
from kvstore.tiers.nvme.slot_header import slot_bytes

TIERS: Final = (Tier.DRAM, Tier.NVME)


class NodeNamespace:
    """One namespace. A node has one object per namespace, so ``is`` compares them."""

    __slots__ = (
        "account",
        "copies",
        "counted",
        "dram_orders",
        "evicting_blocks",
        "granted",
        "hinted",
        "in_account",
        "kept",
        "kept_orders",
        "namespace_id",
        "nvme_orders",
        "shape",
        "slot_bytes",
        "spec",
        "uses",
    )

    def __init__(self, namespace_id: NamespaceId, shape: BlockShape, spec: CacheSpec | None) -> None:
        self.namespace_id = namespace_id
        self.shape = shape
        self.slot_bytes = slot_bytes(shape)
        """Size of a slot of a durable volume for one of its blocks."""
        self.spec = spec
        self.account: TenantAccount | None = None
        """Its tenant; None: its spec is not known yet."""
        self.copies = 1
        """Number of nodes whose volumes are to hold each durable block: an operator's rule."""
        self.counted = False
        """Whether its tenant's share was computed with knowledge of its blocks, or it held nothing when its tenant became known.
        Until then its blocks do not count against the share, and none is evicted for it."""
        self.granted = 0
        """Blocks granted to stores in progress."""
        self.evicting_blocks = 0
        """Blocks that are being evicted from durable volumes."""
        self.in_account: dict[Tier, EvictionOrder | None] = {Tier.DRAM: None, Tier.NVME: None}
        """Its tenant's orders that its blocks are in."""
        self.dram_orders: tuple[EvictionOrder, ...] = ()
        """Orders in addition to the common one that its blocks in DRAM are in; usually empty. Guarded by the table's lock, as all
        fields except the id, shape, spec and account are."""
        self.nvme_orders: tuple[EvictionOrder, ...] = ()
        self.hinted: dict[BlockKey, int] = {}
        """Sessions whose hints protect a block, by key (``kvstore.node.hints``)."""
        self.kept = False
        """Whether an operator's rule keeps it (``kvstore namespaces keep``): its blocks are evicted last, up to a bound
        (``kvstore.node.eviction.kept``)."""
        self.kept_orders: dict[Tier, EvictionOrder] = {}
        """Its own orders while it is kept."""
        self.uses: TtlOrder | None = None
        """When its blocks were used last, if it has a time to live."""

    def join_account(self, tier: Tier, order: EvictionOrder) -> None:
        """Put its blocks in a tier under its tenant's order."""
        self.leave_account(tier)
        self.in_account[tier] = order
        self.add_order(tier, order)

    def leave_account(self, tier: Tier) -> None:
        """Remove an order for its blocks in a tier."""
        order, self.in_account[tier] = self.in_account[tier], None
        if order is not None:
            self.drop_order(tier, order)

    def add_order(self, tier: Tier, order: EvictionOrder) -> None:
        """Add an order for its blocks in a tier."""
        if tier is Tier.DRAM:
            self.dram_orders = (*self.dram_orders, order)
        else:
            self.nvme_orders = (*self.nvme_orders, order)

    def drop_order(self, tier: Tier, order: EvictionOrder) -> None:
        """Remove an order for its blocks in a tier."""
        if tier is Tier.DRAM:
            self.dram_orders = tuple(one for one in self.dram_orders if one is not order)
        else:
            self.nvme_orders = tuple(one for one in self.nvme_orders if one is not order)


class QuotaShare(NamedTuple):
    """The most that a tenant may hold on this node, in bytes of payload; None: no quota."""

    dram: int | None = None
    nvme: int | None = None

    def of(self, tier: Tier) -> int | None:
        """Bytes in a tier."""
        return self.dram if tier is Tier.DRAM else self.nvme


class TenantAccount:
    """One tenant's namespaces here, and its share."""

    __slots__ = ("namespaces", "orders", "reserved_bytes", "share", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.namespaces: list[NodeNamespace] = []
        self.share = QuotaShare()
        self.orders: dict[Tier, EvictionOrder] = {}
        """Orders of the tiers in which it has a quota."""
        self.reserved_bytes = 0
        """Bytes being written to durable volumes, reserved by ``reserve_durable``."""


class TenantLedger:
    """All tenants of a node.

    Args:
        make_order: makes an empty order of eviction, for a tenant with a quota.
    """

    def __init__(self, make_order: Callable[[], EvictionPolicy] = LruPolicy) -> None:
        self._make_order = make_order
        self._lock = threading.Lock()
        self._accounts: dict[str, TenantAccount] = {}
        self.kept: tuple[NodeNamespace, ...] = ()
        """Kept namespaces: see ``NodeNamespace.kept``."""
        self.twice_held: tuple[NodeNamespace, ...] = ()
        """Namespaces with two copies."""
        self.limited: dict[Tier, tuple[TenantAccount, ...]] = dict.fromkeys(TIERS, ())
        """Tenants with a quota in a tier."""

    @property
    def has_rules(self) -> bool:
        """Whether any tenant has a quota or any namespace is kept."""
        return bool(self.kept or any(self.limited.values()))

    def of(self, namespace: NodeNamespace, tenant: str) -> TenantAccount:
        """Add a namespace to the account of its tenant, once per namespace. Thread-safe."""
        with self._lock:
            account = self._accounts.get(tenant)
            if account is None:
                account = self._accounts[tenant] = TenantAccount(tenant)
            account.namespaces.append(namespace)
            return account

    def all(self) -> list[TenantAccount]:
        """A copy of the list."""
        with self._lock:
            return list(self._accounts.values())

    def apply_shares(self, shares: Mapping[str, QuotaShare]) -> None:
        """Replace all shares. Tenants without one are not limited."""
        before = {account.tenant for limited in self.limited.values() for account in limited}
        with self._lock:
            concerned = [self._accounts.setdefault(tenant, TenantAccount(tenant)) for tenant in shares.keys() | before]
        for account in concerned:
            account.share = shares.get(account.tenant, QuotaShare())
            for tier in TIERS:
                if account.share.of(tier) is None:
                    if account.orders.pop(tier, None) is not None:
                        for namespace in account.namespaces:
                            namespace.leave_account(tier)
                elif tier not in account.orders:
                    account.orders[tier] = EvictionOrder(self._make_order())
        self.limited = {tier: tuple(one for one in concerned if tier in one.orders) for tier in TIERS}


class NamespaceRegistry:
    """All namespaces of a node. Thread-safe; bounded.

    Args:
        accounts: the tenants; None: new ones.
    """

    def __init__(self, accounts: TenantLedger | None = None) -> None:
        self.accounts = TenantLedger() if accounts is None else accounts
        self._lock = threading.Lock()
        self._known: dict[NamespaceId, NodeNamespace] = {}
        self._of_tenant: Counter[str] = Counter()  # namespaces with a known spec, by tenant

    def of_spec(self, spec: CacheSpec) -> NodeNamespace:
        """The namespace of a spec.

        Raises:
            CapacityExceeded: too many namespaces, of its tenant or of all.
        """
        namespace = self._known.get(spec.namespace)
        if namespace is None or namespace.spec is None or namespace.shape != spec.shape:
            with self._lock:
                fresh = spec.namespace not in self._known
                # a namespace found on a volume adds nothing: only its tenant becomes known
                if fresh and spec.tenant and self._of_tenant[spec.tenant] >= MAX_NAMESPACES_OF_TENANT:
                    raise CapacityExceeded(
                        "this node knows too many namespaces of this tenant", tenant=spec.tenant, limit=MAX_NAMESPACES_OF_TENANT
                    )
                namespace = self._of_shape(spec.namespace, spec.shape)
                if namespace.spec is None:
                    self._of_tenant[spec.tenant] += 1
                    namespace.counted = fresh
                    namespace.account = self.accounts.of(namespace, spec.tenant)
                    namespace.spec = spec
        return namespace

    def of_shape(self, namespace_id: NamespaceId, shape: BlockShape) -> NodeNamespace:
        """A namespace whose spec is not known here (a recovered volume, a peer's write).

        Raises:
            Conflict: the namespace is known with another shape.
            CapacityExceeded: too many namespaces.
        """
        with self._lock:
            return self._of_shape(namespace_id, shape)

    def _of_shape(self, namespace_id: NamespaceId, shape: BlockShape) -> NodeNamespace:
        namespace = self._known.get(namespace_id)
        if namespace is None:
            if len(self._known) >= MAX_NAMESPACES:
                raise CapacityExceeded("this node knows too many namespaces", limit=MAX_NAMESPACES)
            namespace = self._known[namespace_id] = NodeNamespace(namespace_id, shape, None)
        elif namespace.shape != shape:
            raise Conflict("this namespace has blocks of another shape", known=namespace.shape, given=shape)
        return namespace

    def find(self, namespace_id: NamespaceId) -> NodeNamespace | None:
        """A known namespace, or None."""
        return self._known.get(namespace_id)

    def all(self) -> list[NodeNamespace]:
        """A copy of the list."""
        with self._lock:
            return list(self._known.values())

    def get(self, namespace_id: NamespaceId) -> NodeNamespace:
        """A namespace already known.

        Raises:
            NotFound: it is not.
        """
        namespace = self._known.get(namespace_id)
        if namespace is None:
            raise NotFound("this node does not know the namespace", namespace=namespace_id.hex())
        return namespace
