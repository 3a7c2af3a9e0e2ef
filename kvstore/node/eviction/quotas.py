"""Tenants on this node: what each holds here, and how much of its quota this node may give it.

A quota holds for the whole cluster; the metadata server tells each node its *share* with every heartbeat
(``kvstore.metadata.retention.quota_shares``). Here the shares are kept: a store beyond it makes its own tenant's coldest blocks
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kvstore.core.types import BlockKey, Tier
from kvstore.node.state.block_states import VolumeReplica
from kvstore.node.state.eviction_orders import EvictionOrder
from kvstore.node.state.grants import StoreGrant
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import TIERS, Account, NodeNamespace
from kvstore.node.state.residency import Residency
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.observe.metrics import Event

_limited: Final = LimitedLog(logging.getLogger(__name__))
PIN_PART: Final = 2
"""Pins of namespaces hold up to this fraction (1/n) of a tier; of what is beyond it the coldest make room before anybody else."""
MOST_GIVEN: Final = 1_024
"""Blocks that leave at a time for a quota's sake: so long the table's lock is held."""


def count_pinned(residency: Residency, victims: Sequence[Block]) -> None:
    """Count blocks of pinned namespaces among victims (``SpaceReclaimer.among_pins``)."""
    if residency.accounts.pinned and (pinned := sum(block.namespace.pinned for block in victims)):
        residency.counters.add(node_metrics.EVICTED_PINNED_BLOCKS, pinned)
        _limited.warning("blocks of pinned namespaces evicted: their size had no slot at all (blocks=%d)", pinned)


def held_bytes(residency: Residency, namespaces: Iterable[NodeNamespace], tier: Tier) -> int:
    """What some namespaces hold in a tier, with what is granted to stores under way there."""
    total = 0
    for namespace in namespaces:
        in_dram = tier is Tier.DRAM
        blocks = residency.arena.room.held.get(namespace, 0) + namespace.granted if in_dram else residency.volumes.held(namespace)
        total += blocks * namespace.shape.block_bytes
    return total


def _taken_bytes(residency: Residency, account: Account, tier: Tier) -> int:
    """What a tenant takes of its share: without what is on its way out, and what the share was made without."""
    namespaces = [namespace for namespace in account.namespaces if namespace.counted]
    leaving = sum(namespace.evicting_blocks * namespace.shape.block_bytes for namespace in namespaces) if tier is Tier.NVME else 0
    return held_bytes(residency, namespaces, tier) - leaving


def _limit(namespace: NodeNamespace, tier: Tier) -> int | None:
    """The share that a namespace's blocks are held to; None: there is none, or they do not count yet."""
    return namespace.account.share.of(tier) if namespace.account is not None and namespace.counted else None


def join(residency: Residency, namespace: NodeNamespace, *, empty: bool = False) -> bool:
    """A namespace's blocks go by its tenant's orders from now on.

    Args:
        residency: the blocks.
        namespace: the namespace.
        empty: only where it holds nothing, so that nothing is to be entered.

    Returns:
        Whether it did not before; what it holds is then to be entered (``enter``).
    """
    account = namespace.account
    if account is None or not namespace.counted or all(namespace.in_account[tier] is account.orders.get(tier) for tier in TIERS):
        return False
    if empty and (residency.arena.room.held.get(namespace, 0) or residency.volumes.held(namespace)):
        return False
    for tier, order in account.orders.items():
        namespace.join_account(tier, order)
        order.entering += not empty
    return True


def reserve_in_quota(residency: Residency, namespace: NodeNamespace, count: int) -> bool:
    """Whether a tenant's share has room for ``count`` blocks more in DRAM; its own coldest leave for them."""
    account, share = namespace.account, _limit(namespace, Tier.DRAM)
    if account is None or share is None:
        return True
    join(residency, namespace, empty=True)
    needed = count * namespace.shape.block_bytes
    if needed > share:
        return False
    excess = _taken_bytes(residency, account, Tier.DRAM) + needed - share
    return excess <= 0 or evict_tenant_dram(residency, account.orders[Tier.DRAM], excess) >= excess


def is_full(residency: Residency, namespace: NodeNamespace) -> bool:
    """Whether one block more in DRAM would be beyond the tenant's share."""
    account, share = namespace.account, _limit(namespace, Tier.DRAM)
    if account is None or share is None:
        return False
    return _taken_bytes(residency, account, Tier.DRAM) + namespace.shape.block_bytes > share


def share_below_one_block(namespace: NodeNamespace) -> bool:
    """Whether the tenant's share of DRAM is smaller than a block: there is nothing to wait for."""
    share = _limit(namespace, Tier.DRAM)
    return share is not None and share < namespace.shape.block_bytes


def space_may_free_up(residency: Residency, waiting: StoreGrant, *, own: bool) -> bool:
    """Whether room in DRAM may come without anybody's doing: something is being written, read, stored or held by others.

    ``own``: it is the tenant's share that is full, so only its own blocks that are not pinned by order can make room.
    """
    account = waiting.namespace.account
    if own and account is not None:
        order = account.orders.get(Tier.DRAM)
        held = (residency.blocks[key] for key in order.keys) if order is not None else ()
        blocks: Iterable[Block] = (block for block in held if not block.namespace.pinned)
        stores = [
            each for each in residency.preparing.values() if each.namespace.account is account and not each.namespace.pinned
        ]
    else:
        if len(residency.writes) or residency.loading:
            return True
        blocks, stores = residency.blocks.values(), list(residency.preparing.values())
    if any(other is not waiting for other in stores):
        return True
    return any(block.pins > (block is waiting.guarded) or block.in_transfer for block in blocks)


def evict_tenant_dram(residency: Residency, order: EvictionOrder, wanted_bytes: int) -> int:
    """The coldest of an order leave DRAM. Returns how many bytes.

    Those that lie nowhere else are written behind, so that they may leave later.
    """
    passed: dict[BlockKey, Block] = {}
    leaving = list(_coldest(residency, order, wanted_bytes, lambda block: _may_leave_dram(residency, order, block, passed)))
    for block in passed.values():
        residency.enqueue_writeback(block)
    residency.counters.add(node_metrics.CASCADED_BLOCKS, len(passed))
    for block in leaving:
        residency.evict_dram(block)
    residency.counters.add(node_metrics.EVICTED_DRAM_BLOCKS, len(leaving))
    residency.counters.add(_evicted_event(order), len(leaving))
    return sum(block.nbytes for block in leaving)


def _may_leave_dram(residency: Residency, order: EvictionOrder, block: Block, passed: dict[BlockKey, Block]) -> bool | None:
    if block.namespace.pinned and not order.of_pins:
        return None  # not asked about again until it is unpinned
    if not residency.is_idle(block):
        return False
    if not block.clean and len(passed) < MOST_GIVEN:
        passed[block.key] = block
    return block.clean


def _evicted_event(order: EvictionOrder) -> Event:
    return node_metrics.EVICTED_PINNED_BLOCKS if order.of_pins else node_metrics.EVICTED_QUOTA_BLOCKS


def durable_victims(residency: Residency, order: EvictionOrder, wanted_bytes: int) -> list[Block]:
    """The coldest blocks of an order that may leave durable volumes, marked as evicting: for ``evict_from_volume``."""
    if not residency.evicts_nvme:
        return []
    now_s = residency.clock.now_s()

    def to_leave(rule: Callable[[Block], bool]) -> list[Block]:
        def may_leave(block: Block) -> bool | None:
            if block.namespace.pinned and not order.of_pins:
                return None
            return block.nvme_volume is not None and block.nvme_volume.takes_changes(now_s) and rule(block)

        return list(_coldest(residency, order, wanted_bytes, may_leave))

    found = to_leave(residency.leaves_no_orphans) or to_leave(residency.is_idle)
    residency.mark_evicting(found, VolumeReplica.EVICTING if order.of_pins else VolumeReplica.EVICTING_FOR_QUOTA)
    residency.counters.add(_evicted_event(order), len(found))
    return found


def _coldest(
    residency: Residency, order: EvictionOrder, wanted_bytes: int, may_leave: Callable[[Block], bool | None]
) -> Iterator[Block]:
    """Blocks of an order, coldest first, until they are enough or ``MOST_GIVEN``."""
    blocks = residency.blocks
    given = 0
    if order.entering:
        return
    for number, key in enumerate(order.policy.coldest(lambda key: may_leave(blocks[key]))):
        if given >= wanted_bytes or number >= MOST_GIVEN:
            return
        given += blocks[key].nbytes
        yield blocks[key]


def over_share(residency: Residency, tier: Tier) -> Iterator[tuple[EvictionOrder, int]]:
    """The tenants that hold more than their share: their order, and by how much."""
    for account in residency.accounts.limited[tier]:
        allowed = account.share.of(tier)
        if allowed is not None and (excess := _taken_bytes(residency, account, tier) - allowed) > 0:
            yield account.orders[tier], excess


def beyond_pins(residency: Residency, tier: Tier) -> Iterator[tuple[EvictionOrder, int]]:
    """Pinned namespaces that take more than their part of a tier together: the orders of the largest, and by how much."""
    pinned = residency.accounts.pinned
    if not pinned:
        return
    volumes = [residency.dram] if tier is Tier.DRAM else [node_volume.volume for node_volume in residency.node_volumes]
    taken = {namespace: _slot_bytes(residency, namespace, tier) for namespace in pinned}
    excess = sum(taken.values()) - sum(volume.usage().capacity_bytes for volume in volumes) // PIN_PART
    for namespace in sorted(pinned, key=lambda one: -taken[one]):
        if excess <= 0:
            return
        yield namespace.pin_orders[tier], excess
        excess -= taken[namespace]


def _slot_bytes(residency: Residency, namespace: NodeNamespace, tier: Tier) -> int:
    """What a namespace takes of the room of a tier: whole slots, without what is on its way out."""
    if tier is Tier.DRAM:
        return held_bytes(residency, [namespace], tier)
    return (residency.volumes.held(namespace) - namespace.evicting_blocks) * namespace.slot_bytes


def evict_over_quota(residency: Residency) -> bool:
    """Tenants over their share, and pins beyond their part, give of DRAM before anybody else does. Whether any did."""
    given = [
        evict_tenant_dram(residency, order, excess)
        for find in (over_share, beyond_pins)
        for order, excess in find(residency, Tier.DRAM)
    ]
    return sum(given) > 0


def over_quota_victims(residency: Residency) -> list[Block]:
    """As ``evict_over_quota``, of durable volumes: blocks marked as leaving."""
    found: list[Block] = []
    for find in (over_share, beyond_pins):
        for order, excess in find(residency, Tier.NVME):
            found += durable_victims(residency, order, excess)
    return found


def free_durable(residency: Residency, namespace: NodeNamespace) -> int | None:
    """Bytes that may come to durable volumes without anything's leaving for the tenant's quota; None: any; takes the lock."""
    with residency.lock:
        account, share = namespace.account, _limit(namespace, Tier.NVME)
        if account is None or share is None:
            return None
        return share - _taken_bytes(residency, account, Tier.NVME) - account.claimed_bytes


class WriteAllowance(NamedTuple):
    """WriteAllowance to bring blocks to durable volumes."""

    blocks: int
    victims: Sequence[Block] = ()
    """Where it is 0: blocks of the tenant that are to leave first, marked; then ask again."""
    account: Account | None = None
    """Whom ``claimed_bytes`` are noted for; give them back with ``unclaim_durable``."""
    claimed_bytes: int = 0


def claim_durable(residency: Residency, namespace: NodeNamespace, count: int) -> WriteAllowance:
    """Reserve room for ``count`` blocks of a namespace on durable volumes, or some, within its tenant's share; takes the lock."""
    if _limit(namespace, Tier.NVME) is None:
        return WriteAllowance(count)
    size = namespace.shape.block_bytes
    with residency.lock:
        account, allowed = namespace.account, _limit(namespace, Tier.NVME)
        if account is None or allowed is None:  # lifted meanwhile
            return WriteAllowance(count)
        join(residency, namespace, empty=True)
        count = min(count, allowed // size)
        free = allowed - _taken_bytes(residency, account, Tier.NVME) - account.claimed_bytes
        if count and free < count * size:
            victims = durable_victims(residency, account.orders[Tier.NVME], count * size - free)
            if victims:
                return WriteAllowance(0, victims)
        count = min(count, max(0, free // size))
        account.claimed_bytes += count * size
        return WriteAllowance(count, (), account, count * size)


def unclaim_durable(residency: Residency, leave: WriteAllowance) -> None:
    """What ``claim_durable`` let come is there, or will not come; takes the lock."""
    if leave.account is not None:
        with residency.lock:
            leave.account.claimed_bytes -= leave.claimed_bytes


def enter(residency: Residency, orders: Mapping[Tier, EvictionOrder], held: Sequence[Block]) -> None:
    """Blocks that were there before their namespace got an order come into it; takes the lock, by parts.

    Args:
        residency: the blocks.
        orders: by tier, marked as being entered to.
        held: the namespace's blocks, as they came: who came first is taken to be colder, until they are used.
    """
    for first in range(0, len(held), MOST_GIVEN):
        with residency.lock:
            for block in held[first : first + MOST_GIVEN]:
                if residency.blocks.get(block.key) is not block:
                    continue
                if block.dram is not None and Tier.DRAM in orders:
                    orders[Tier.DRAM].insert(block)
                if block.nvme is not None and Tier.NVME in orders:
                    orders[Tier.NVME].insert(block)
    with residency.lock:
        for order in {id(order): order for order in orders.values()}.values():
            order.entering -= 1
