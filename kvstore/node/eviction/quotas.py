"""Tenants on this node: what each holds here, and how much of its quota this node may give it.

A quota holds for the whole cluster; the metadata server tells each node its *share* with every heartbeat
(``kvstore.metadata.retention.quotas``). Here the shares are kept: a store beyond it makes its own tenant's coldest blocks
leave, and is skipped as far as none can; where room is needed, tenants over their share give first; and who is over it for
another reason (a share that became smaller, loads, which are never refused for it) is brought down soon after.
No engine sees an error of it.

What is held is counted in blocks a namespace and volume (``held``), whether there are quotas or not. Only tenants with a
quota have an order of eviction of their own, beside the common one, in which their blocks stay: so finding a tenant's coldest
looks at nobody else's, and the common order is as it is without quotas.

Decisions count what will be there once all that is on its way out of a volume has left it: who looks meanwhile, in another
thread, finds no excess twice. What a node found on its volumes counts only once the share was made with knowledge of it
(``NodeNamespace.counted``): a share of a tenant that seems to hold nothing here is small.

Bytes are payload, as in all that is said of usage; slots may be somewhat larger. All but ``Accounts.of`` under the table's lock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.core.types import BlockKey, Tier
from kvstore.node.control.migration_plan import slot_space
from kvstore.node.state.eviction_reason import Leaving
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.observe.metrics import Event
from kvstore.tiers.contract import EvictionPolicy
from kvstore.tiers.eviction.policy import LruPolicy

if TYPE_CHECKING:
    from kvstore.node.state.model import Block, StoreGrant
    from kvstore.node.state.namespaces import NodeNamespace
    from kvstore.node.table import BlockTable

_limited: Final = LimitedLog(logging.getLogger(__name__))
TIERS: Final = (Tier.DRAM, Tier.NVME)
PIN_PART: Final = 2
"""Pins of namespaces hold up to this fraction (1/n) of a tier; of what is beyond it the coldest make room before anybody else."""
MOST_GIVEN: Final = 1_024
"""Blocks that leave at a time for a quota's sake: so long the table's lock is held."""


class EvictionOrder:
    """Some namespaces' blocks in one tier, in an order of eviction of their own beside the common one."""

    __slots__ = ("entering", "keys", "of_pins", "policy")

    def __init__(self, policy: EvictionPolicy, *, of_pins: bool = False) -> None:
        self.policy = policy
        self.of_pins = of_pins
        """Its blocks are those of pinned namespaces, whose pins it does not heed."""
        self.keys: set[BlockKey] = set()
        self.entering = 0
        """Namespaces whose blocks of before are still to come in: nothing is taken from it, for a parent may seem to be a
        leaf."""

    def insert(self, block: Block) -> None:
        """A block has come; harmless where it is in it already."""
        if block.key not in self.keys:
            self.keys.add(block.key)
            self.policy.insert(block.key, block.parent)

    def remove(self, block: Block) -> None:
        """A block is about to leave the tier."""
        self.keys.discard(block.key)
        self.policy.remove(block.key)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Blocks were used."""
        self.policy.touch(keys)


class QuotaShare(NamedTuple):
    """The most that a tenant may hold on this node, in bytes of payload; None: no quota."""

    dram: int | None = None
    nvme: int | None = None

    def of(self, tier: Tier) -> int | None:
        """In a tier."""
        return self.dram if tier is Tier.DRAM else self.nvme


class Account:
    """One tenant's namespaces here, and its share."""

    __slots__ = ("claimed_bytes", "namespaces", "orders", "share", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.namespaces: list[NodeNamespace] = []
        self.share = QuotaShare()
        self.orders: dict[Tier, EvictionOrder] = {}
        """Of the tiers that it has a quota in."""
        self.claimed_bytes = 0
        """On their way to durable volumes, by leave of ``claim_durable``."""


class Accounts:
    """All tenants of a node.

    Args:
        make_order: an empty order of eviction, for a tenant with a quota.
    """

    def __init__(self, make_order: Callable[[], EvictionPolicy] = LruPolicy) -> None:
        self._make_order = make_order
        self._lock = threading.Lock()
        self._accounts: dict[str, Account] = {}
        self.pinned: tuple[NodeNamespace, ...] = ()
        """Namespaces that are pinned."""
        self.limited: dict[Tier, tuple[Account, ...]] = dict.fromkeys(TIERS, ())
        """Those with a quota in a tier."""

    @property
    def in_force(self) -> bool:
        """Whether somebody may have to give before others."""
        return bool(self.pinned or any(self.limited.values()))

    def count_pinned(self, leaving: Sequence[Block], counters: Counters) -> None:
        """Counts those of pinned namespaces among blocks that make room (``SpaceReclaimer.among_pins``)."""
        if self.pinned and (pinned := sum(block.namespace.pinned for block in leaving)):
            counters.add(node_metrics.EVICTED_PINNED_BLOCKS, pinned)
            _limited.warning("%d blocks of pinned namespaces made room: their size had no place at all", pinned)

    def of(self, namespace: NodeNamespace, tenant: str) -> Account:
        """The account of a tenant, which a namespace turns out to belong to. Thread-safe; once a namespace."""
        with self._lock:
            account = self._accounts.get(tenant)
            if account is None:
                account = self._accounts[tenant] = Account(tenant)
            account.namespaces.append(namespace)
            return account

    def all(self) -> list[Account]:
        """A look at them."""
        with self._lock:
            return list(self._accounts.values())

    def told(self, shares: Mapping[str, QuotaShare]) -> None:
        """The shares in force from now on. Tenants without one have no quota."""
        before = {account.tenant for limited in self.limited.values() for account in limited}
        with self._lock:
            concerned = [self._accounts.setdefault(tenant, Account(tenant)) for tenant in shares.keys() | before]
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


def held_bytes(table: BlockTable, namespaces: Iterable[NodeNamespace], tier: Tier) -> int:
    """What some namespaces hold in a tier, with what is granted to stores under way there."""
    total = 0
    for namespace in namespaces:
        in_dram = tier is Tier.DRAM
        blocks = table._arena.room.held.get(namespace, 0) + namespace.granted if in_dram else table._durable.held(namespace)
        total += blocks * namespace.shape.block_bytes
    return total


def _taken_bytes(table: BlockTable, account: Account, tier: Tier) -> int:
    """What a tenant takes of its share: without what is on its way out, and what the share was made without."""
    namespaces = [namespace for namespace in account.namespaces if namespace.counted]
    leaving = sum(namespace.parting * namespace.shape.block_bytes for namespace in namespaces) if tier is Tier.NVME else 0
    return held_bytes(table, namespaces, tier) - leaving


def _limit(namespace: NodeNamespace, tier: Tier) -> int | None:
    """The share that a namespace's blocks are held to; None: there is none, or they do not count yet."""
    return namespace.account.share.of(tier) if namespace.account is not None and namespace.counted else None


def durable_share(namespace: NodeNamespace) -> int | None:
    """Bytes that a namespace's tenant may hold on durable volumes; None: no quota holds for it."""
    return _limit(namespace, Tier.NVME)


def join(table: BlockTable, namespace: NodeNamespace, *, empty: bool = False) -> bool:
    """A namespace's blocks go by its tenant's orders from now on.

    Args:
        table: the blocks.
        namespace: the namespace.
        empty: only where it holds nothing, so that nothing is to be entered.

    Returns:
        Whether it did not before; what it holds is then to be entered (``enter``).
    """
    account = namespace.account
    if account is None or not namespace.counted or all(namespace.in_account[tier] is account.orders.get(tier) for tier in TIERS):
        return False
    if empty and (table._arena.room.held.get(namespace, 0) or table._durable.held(namespace)):
        return False
    for tier, order in account.orders.items():
        namespace.join_account(tier, order)
        order.entering += not empty
    return True


def make_own_room(table: BlockTable, namespace: NodeNamespace, count: int) -> bool:
    """Whether a tenant's share has room for ``count`` blocks more in DRAM; its own coldest leave for them."""
    account, share = namespace.account, _limit(namespace, Tier.DRAM)
    if account is None or share is None:
        return True
    join(table, namespace, empty=True)
    needed = count * namespace.shape.block_bytes
    if needed > share:
        return False
    excess = _taken_bytes(table, account, Tier.DRAM) + needed - share
    return excess <= 0 or give_dram(table, account.orders[Tier.DRAM], excess) >= excess


def is_full(table: BlockTable, namespace: NodeNamespace) -> bool:
    """Whether one block more in DRAM would be beyond the tenant's share."""
    account, share = namespace.account, _limit(namespace, Tier.DRAM)
    if account is None or share is None:
        return False
    return _taken_bytes(table, account, Tier.DRAM) + namespace.shape.block_bytes > share


def holds_nothing(namespace: NodeNamespace) -> bool:
    """Whether the tenant's share of DRAM is smaller than a block: there is nothing to wait for."""
    share = _limit(namespace, Tier.DRAM)
    return share is not None and share < namespace.shape.block_bytes


def may_come(table: BlockTable, waiting: StoreGrant, *, own: bool) -> bool:
    """Whether room in DRAM may come without anybody's doing: something is being written, read, stored or held by others.

    ``own``: it is the tenant's share that is full, so only its own blocks that are not pinned by order can make room.
    """
    account = waiting.namespace.account
    if own and account is not None:
        order = account.orders.get(Tier.DRAM)
        held = (table._blocks[key] for key in order.keys) if order is not None else ()
        blocks: Iterable[Block] = (block for block in held if not block.namespace.pinned)
        stores = [each for each in table._preparing.values() if each.namespace.account is account and not each.namespace.pinned]
    else:
        if table._pending or table._in_write or table._loading:
            return True
        blocks, stores = table._blocks.values(), list(table._preparing.values())
    if any(other is not waiting for other in stores):
        return True
    return any(block.pins > (block is waiting.guarded) or block.leaving or block.pending for block in blocks)


def give_dram(table: BlockTable, order: EvictionOrder, wanted_bytes: int) -> int:
    """The coldest of an order leave DRAM. Returns how many bytes.

    Those that lie nowhere else are written behind, so that they may leave later.
    """
    passed: dict[BlockKey, Block] = {}
    leaving = list(_coldest(table, order, wanted_bytes, lambda block: _may_leave_dram(table, order, block, passed)))
    for block in passed.values():
        table._enqueue(block)
    table._counters.add(node_metrics.CASCADED_BLOCKS, len(passed))
    for block in leaving:
        table._evict_dram(block)
    table._counters.add(node_metrics.EVICTED_DRAM_BLOCKS, len(leaving))
    table._counters.add(_evicted_event(order), len(leaving))
    return sum(block.nbytes for block in leaving)


def _may_leave_dram(table: BlockTable, order: EvictionOrder, block: Block, passed: dict[BlockKey, Block]) -> bool | None:
    if block.namespace.pinned and not order.of_pins:
        return None  # not asked about again until it is unpinned
    if not table._idle(block):
        return False
    if not block.expendable and len(passed) < MOST_GIVEN:
        passed[block.key] = block
    return block.expendable


def _evicted_event(order: EvictionOrder) -> Event:
    return node_metrics.EVICTED_PINNED_BLOCKS if order.of_pins else node_metrics.EVICTED_QUOTA_BLOCKS


def durable_victims(table: BlockTable, order: EvictionOrder, wanted_bytes: int) -> list[Block]:
    """The coldest of an order that may leave durable volumes, marked as leaving: for ``leave_nvme``, each on its own volume."""
    now_s = table._clock.now_s()

    def to_leave(rule: Callable[[Block], bool]) -> list[Block]:
        def may_leave(block: Block) -> bool | None:
            if block.namespace.pinned and not order.of_pins:
                return None
            return block.nvme_volume is not None and block.nvme_volume.takes_changes(now_s) and rule(block)

        return list(_coldest(table, order, wanted_bytes, may_leave))

    found = to_leave(table._no_loss) or to_leave(table._dispensable)
    for block in found:
        block.leave(Leaving.FOR_ROOM if order.of_pins else Leaving.FOR_QUOTA)
    table._counters.add(_evicted_event(order), len(found))
    return found


def _coldest(
    table: BlockTable, order: EvictionOrder, wanted_bytes: int, may_leave: Callable[[Block], bool | None]
) -> Iterator[Block]:
    """Blocks of an order, coldest first, until they are enough or ``MOST_GIVEN``."""
    blocks = table._blocks
    given = 0
    if order.entering:
        return
    for number, key in enumerate(order.policy.coldest(lambda key: may_leave(blocks[key]))):
        if given >= wanted_bytes or number >= MOST_GIVEN:
            return
        given += blocks[key].nbytes
        yield blocks[key]


def over_share(table: BlockTable, tier: Tier) -> Iterator[tuple[EvictionOrder, int]]:
    """The tenants that hold more than their share: their order, and by how much."""
    for account in table.accounts.limited[tier]:
        allowed = account.share.of(tier)
        if allowed is not None and (excess := _taken_bytes(table, account, tier) - allowed) > 0:
            yield account.orders[tier], excess


def beyond_pins(table: BlockTable, tier: Tier) -> Iterator[tuple[EvictionOrder, int]]:
    """Pinned namespaces that take more than their part of a tier together: the orders of the largest, and by how much."""
    pinned = table.accounts.pinned
    if not pinned:
        return
    volumes = [table.dram] if tier is Tier.DRAM else [node_volume.volume for node_volume in table.node_volumes]
    taken = {namespace: _slot_bytes(table, namespace, tier) for namespace in pinned}
    excess = sum(taken.values()) - sum(volume.usage().capacity_bytes for volume in volumes) // PIN_PART
    for namespace in sorted(pinned, key=lambda one: -taken[one]):
        if excess <= 0:
            return
        yield namespace.pin_orders[tier], excess
        excess -= taken[namespace]


def _slot_bytes(table: BlockTable, namespace: NodeNamespace, tier: Tier) -> int:
    """What a namespace takes of the room of a tier: whole slots, without what is on its way out."""
    if tier is Tier.DRAM:
        return held_bytes(table, [namespace], tier)
    return (table._durable.held(namespace) - namespace.parting) * slot_space(namespace.shape.block_bytes)


def give_first(table: BlockTable) -> bool:
    """Tenants over their share, and pins beyond their part, give of DRAM before anybody else does. Whether any did."""
    given = [give_dram(table, order, excess) for find in (over_share, beyond_pins) for order, excess in find(table, Tier.DRAM)]
    return sum(given) > 0


def first_victims(table: BlockTable) -> list[Block]:
    """As ``give_first``, of durable volumes: blocks marked as leaving."""
    found: list[Block] = []
    for find in (over_share, beyond_pins):
        for order, excess in find(table, Tier.NVME):
            found += durable_victims(table, order, excess)
    return found


def free_durable(table: BlockTable, namespace: NodeNamespace) -> int | None:
    """Bytes that may come to durable volumes without anything's leaving for the tenant's quota; None: any; takes the lock."""
    with table._lock:
        account, share = namespace.account, _limit(namespace, Tier.NVME)
        if account is None or share is None:
            return None
        return share - _taken_bytes(table, account, Tier.NVME) - account.claimed_bytes


class Leave(NamedTuple):
    """Leave to bring blocks to durable volumes."""

    blocks: int
    victims: Sequence[Block] = ()
    """Where it is 0: blocks of the tenant that are to leave first, marked; then ask again."""
    account: Account | None = None
    """Whom ``claimed_bytes`` are noted for; give them back with ``unclaim_durable``."""
    claimed_bytes: int = 0


def claim_durable(table: BlockTable, namespace: NodeNamespace, count: int) -> Leave:
    """Leave to bring ``count`` blocks of a namespace to durable volumes, or some, within the tenant's share; takes the lock."""
    if _limit(namespace, Tier.NVME) is None:
        return Leave(count)
    size = namespace.shape.block_bytes
    with table._lock:
        account, allowed = namespace.account, _limit(namespace, Tier.NVME)
        if account is None or allowed is None:  # lifted meanwhile
            return Leave(count)
        join(table, namespace, empty=True)
        count = min(count, allowed // size)
        free = allowed - _taken_bytes(table, account, Tier.NVME) - account.claimed_bytes
        if count and free < count * size:
            victims = durable_victims(table, account.orders[Tier.NVME], count * size - free)
            if victims:
                return Leave(0, victims)
        count = min(count, max(0, free // size))
        account.claimed_bytes += count * size
        return Leave(count, (), account, count * size)


def unclaim_durable(table: BlockTable, leave: Leave) -> None:
    """What ``claim_durable`` let come is there, or will not come; takes the lock."""
    if leave.account is not None:
        with table._lock:
            leave.account.claimed_bytes -= leave.claimed_bytes


def enter(table: BlockTable, orders: Mapping[Tier, EvictionOrder], held: Sequence[Block]) -> None:
    """Blocks that were there before their namespace got an order come into it; takes the lock, by parts.

    Args:
        table: the blocks.
        orders: by tier, marked as being entered to.
        held: the namespace's blocks, as they came: who came first is taken to be colder, until they are used.
    """
    for first in range(0, len(held), MOST_GIVEN):
        with table._lock:
            for block in held[first : first + MOST_GIVEN]:
                if table._blocks.get(block.key) is not block:
                    continue
                if block.dram is not None and Tier.DRAM in orders:
                    orders[Tier.DRAM].insert(block)
                if block.nvme is not None and Tier.NVME in orders:
                    orders[Tier.NVME].insert(block)
    with table._lock:
        for order in {id(order): order for order in orders.values()}.values():
            order.entering -= 1
