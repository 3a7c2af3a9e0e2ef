"""Namespaces as this node knows them: an id, a block shape, and the spec where somebody has shown it."""

from __future__ import annotations

import threading
from collections import Counter

from kvstore.core.errors import CapacityExceeded, Conflict, NotFound
from kvstore.core.limits import MAX_NAMESPACES, MAX_NAMESPACES_OF_TENANT
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockShape, NamespaceId, Tier
from kvstore.node.eviction.quotas import Account, Accounts, SideOrder
from kvstore.node.eviction.ttl import UseOrder
from kvstore.tiers.nvme.slot_header import slot_bytes


class Domain:
    """One namespace. There is one object a namespace and node, so that ``is`` compares them."""

    __slots__ = (
        *("account", "counted", "dram_orders", "granted", "in_account", "namespace", "nvme_orders", "parting", "pin_orders"),
        *("pinned", "shape", "slot_bytes", "spec", "uses"),
    )

    def __init__(self, namespace: NamespaceId, shape: BlockShape, spec: CacheSpec | None) -> None:
        self.namespace = namespace
        self.shape = shape
        self.slot_bytes = slot_bytes(shape)
        """Size of a slot of a durable volume for one of its blocks."""
        self.spec = spec
        self.account: Account | None = None
        """Its tenant's; None: nobody has shown the spec yet."""
        self.counted = False
        """Whether its tenant's share here was made with knowledge of what it holds, or it held nothing when its tenant became
        known. Until then its blocks do not count against the share, and none of them leaves for it."""
        self.granted = 0
        """Blocks granted to stores that are under way."""
        self.parting = 0
        """Blocks that are on their way out of durable volumes."""
        self.in_account: dict[Tier, SideOrder | None] = {Tier.DRAM: None, Tier.NVME: None}
        """The orders of its tenant that its blocks go by."""
        self.dram_orders: tuple[SideOrder, ...] = ()
        """Orders beside the common one that its blocks in DRAM go by; empty for nearly all. Guarded by the table's lock, as all
        but namespace, shape, spec and account are."""
        self.nvme_orders: tuple[SideOrder, ...] = ()
        self.pinned = False
        """Its blocks are not evicted, up to a bound (``kvstore.node.eviction.quotas``)."""
        self.pin_orders: dict[Tier, SideOrder] = {}
        """While it is pinned."""
        self.uses: UseOrder | None = None
        """When its blocks were used last, where it has a time to live."""

    def join_account(self, tier: Tier, order: SideOrder) -> None:
        """Its blocks in a tier go by its tenant's order."""
        self.leave_account(tier)
        self.in_account[tier] = order
        self.add_order(tier, order)

    def leave_account(self, tier: Tier) -> None:
        """They no longer do."""
        order, self.in_account[tier] = self.in_account[tier], None
        if order is not None:
            self.drop_order(tier, order)

    def add_order(self, tier: Tier, order: SideOrder) -> None:
        """Its blocks in a tier go by an order beside the common one."""
        if tier is Tier.DRAM:
            self.dram_orders = (*self.dram_orders, order)
        else:
            self.nvme_orders = (*self.nvme_orders, order)

    def drop_order(self, tier: Tier, order: SideOrder) -> None:
        """They no longer do."""
        if tier is Tier.DRAM:
            self.dram_orders = tuple(one for one in self.dram_orders if one is not order)
        else:
            self.nvme_orders = tuple(one for one in self.nvme_orders if one is not order)


class Domains:
    """All namespaces of a node. Thread-safe; bounded.

    Args:
        accounts: of their tenants; None: some of its own.
    """

    def __init__(self, accounts: Accounts | None = None) -> None:
        self.accounts = Accounts() if accounts is None else accounts
        self._lock = threading.Lock()
        self._known: dict[NamespaceId, Domain] = {}
        self._of_tenant: Counter[str] = Counter()  # as many as have shown a namespace of theirs

    def of_spec(self, spec: CacheSpec) -> Domain:
        """The domain of a spec.

        Raises:
            CapacityExceeded: too many namespaces, of its tenant or of all.
        """
        domain = self._known.get(spec.namespace)
        if domain is None or domain.spec is None or domain.shape != spec.shape:
            with self._lock:
                fresh = spec.namespace not in self._known
                # what lies here already is known to be this tenant's now, however much that is: nothing is added
                if fresh and spec.tenant and self._of_tenant[spec.tenant] >= MAX_NAMESPACES_OF_TENANT:
                    raise CapacityExceeded(
                        "this node knows too many namespaces of this tenant", tenant=spec.tenant, limit=MAX_NAMESPACES_OF_TENANT
                    )
                domain = self._of_shape(spec.namespace, spec.shape)
                if domain.spec is None:
                    self._of_tenant[spec.tenant] += 1
                    domain.counted = fresh
                    domain.account = self.accounts.of(domain, spec.tenant)
                    domain.spec = spec
        return domain

    def of_shape(self, namespace: NamespaceId, shape: BlockShape) -> Domain:
        """The domain of a namespace whose spec is not known here (a recovered volume, a peer's write).

        Raises:
            Conflict: the namespace is known with another shape.
            CapacityExceeded: too many namespaces.
        """
        with self._lock:
            return self._of_shape(namespace, shape)

    def _of_shape(self, namespace: NamespaceId, shape: BlockShape) -> Domain:
        domain = self._known.get(namespace)
        if domain is None:
            if len(self._known) >= MAX_NAMESPACES:
                raise CapacityExceeded("this node knows too many namespaces", limit=MAX_NAMESPACES)
            domain = self._known[namespace] = Domain(namespace, shape, None)
        elif domain.shape != shape:
            raise Conflict("this namespace has blocks of another shape", known=domain.shape, given=shape)
        return domain

    def find(self, namespace: NamespaceId) -> Domain | None:
        """A namespace already known, or None."""
        return self._known.get(namespace)

    def all(self) -> list[Domain]:
        """A look at them."""
        with self._lock:
            return list(self._known.values())

    def get(self, namespace: NamespaceId) -> Domain:
        """A namespace already known.

        Raises:
            NotFound: it is not.
        """
        domain = self._known.get(namespace)
        if domain is None:
            raise NotFound("this node does not know the namespace", namespace=namespace.hex())
        return domain
