"""Tenants' quotas on this node: the usage of each tenant, and its limit here.

1. A quota holds for the whole cluster. The metadata server sends each node its *share* with every heartbeat. A store beyond the
   share evicts its own tenant's coldest blocks, and blocks for which none can be evicted are skipped. If space is needed,
   tenants over their share are evicted first. A tenant that is over it for another reason (a smaller share, or loads, which are
   never refused) is brought down soon after. No engine sees an error.
2. Usage is counted in blocks per namespace and volume (``SpaceReclaimer.held``), with or without quotas. Only tenants with a
   quota have an order of eviction of their own, in addition to the common one: a search for a tenant's coldest blocks sees no
   others.
3. Decisions count what is left after all evictions in progress, so two threads do not evict the same excess twice. Blocks that
   a node found on its volumes count only once the share was made with knowledge of them (``NodeNamespace.counted``).

Bytes are payload; slots may be somewhat larger. Functions are called under the table's lock unless they say that they take it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kvstore.core.types import BlockKey, Tier
from kvstore.node.eviction.kept import beyond_kept
from kvstore.node.eviction.usage import held_bytes
from kvstore.node.state.block_states import VolumeReplica
from kvstore.node.state.eviction_orders import EvictionOrder
from kvstore.node.state.grants import SlotGrant
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import TIERS, NodeNamespace, TenantAccount
from kvstore.node.state.residency import Residency
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.observe.metrics import Event
from kvstore.tiers.contract import Evictable

EVICT_BATCH_BLOCKS: Final = 1_024
"""Most blocks that are evicted for a quota under one hold of the table's lock."""


def _taken_bytes(residency: Residency, account: TenantAccount, tier: Tier) -> int:
    """Bytes of a tenant that count against its share: without evictions in progress and uncounted namespaces."""
    namespaces = [namespace for namespace in account.namespaces if namespace.counted]
    leaving = sum(namespace.evicting_blocks * namespace.shape.block_bytes for namespace in namespaces) if tier is Tier.NVME else 0
    return held_bytes(residency, namespaces, tier) - leaving


def _limit(namespace: NodeNamespace, tier: Tier) -> int | None:
    """The share that limits a namespace; None: there is none, or its blocks do not count yet."""
    return namespace.account.share.of(tier) if namespace.account is not None and namespace.counted else None


def join_tenant(residency: Residency, namespace: NodeNamespace, *, empty: bool = False) -> bool:
    """Add a namespace's blocks to its tenant's orders.

    Args:
        residency: the blocks.
        namespace: the namespace.
        empty: only if it holds nothing, so that no block has to be inserted.

    Returns:
        Whether it was added; its blocks are then to be inserted with ``enter``.
    """
    account = namespace.account
    if account is None or not namespace.counted or all(namespace.in_account[tier] is account.orders.get(tier) for tier in TIERS):
        return False
    if empty and (residency.arena_evictor.held(namespace) or residency.volume_evictor.held(namespace)):
        return False
    for tier, order in account.orders.items():
        namespace.join_account(tier, order)
        order.entering += not empty
    return True


def make_room_in_quota(residency: Residency, namespace: NodeNamespace, count: int) -> bool:
    """Evict a tenant's own coldest blocks from DRAM until its share has space for ``count`` more. Returns whether it has."""
    account, share = namespace.account, _limit(namespace, Tier.DRAM)
    if account is None or share is None:
        return True
    join_tenant(residency, namespace, empty=True)
    needed = count * namespace.shape.block_bytes
    if needed > share:
        return False
    excess = _taken_bytes(residency, account, Tier.DRAM) + needed - share
    return excess <= 0 or evict_tenant_dram(residency, account.orders[Tier.DRAM], excess) >= excess


def quota_is_full(residency: Residency, namespace: NodeNamespace) -> bool:
    """Whether one more block in DRAM would exceed the tenant's share."""
    account, share = namespace.account, _limit(namespace, Tier.DRAM)
    if account is None or share is None:
        return False
    return _taken_bytes(residency, account, Tier.DRAM) + namespace.shape.block_bytes > share


def share_below_one_block(namespace: NodeNamespace) -> bool:
    """Whether the tenant's share of DRAM is smaller than one block, so that waiting is pointless."""
    share = _limit(namespace, Tier.DRAM)
    return share is not None and share < namespace.shape.block_bytes


def space_may_free_up(residency: Residency, waiting: SlotGrant, *, own_only: bool) -> bool:
    """Whether space in DRAM may free up: blocks are being written, read, stored or pinned by others.

    ``own_only``: the tenant's share is full, so only its own blocks of namespaces that are not kept can free space.
    """
    account = waiting.namespace.account
    if own_only and account is not None:
        order = account.orders.get(Tier.DRAM)
        held = (residency.blocks[key] for key in order.keys) if order is not None else ()
        blocks: Iterable[Block] = (block for block in held if not block.namespace.kept)
        stores = [each for each in residency.preparing.values() if each.namespace.account is account and not each.namespace.kept]
    else:
        if len(residency.writes) or residency.loading:
            return True
        blocks, stores = residency.blocks.values(), list(residency.preparing.values())
    if any(other is not waiting for other in stores):
        return True
    in_use = (block for block in blocks if block.in_transfer or block.pins > (1 if block is waiting.guarded else 0))
    return any(not block.set_apart for block in in_use)


def evict_tenant_dram(residency: Residency, order: EvictionOrder, wanted_bytes: int) -> int:
    """Evict the coldest blocks of an order from DRAM. Returns how many bytes.

    Dirty blocks among them are sent to write-back with their parents, so that they may be evicted later.
    """
    met_dirty: dict[BlockKey, Block] = {}
    leaving = list(_coldest(residency, order, wanted_bytes, lambda block: _may_leave_dram(residency, order, block, met_dirty)))
    dirty = residency.with_parents(met_dirty.values(), EVICT_BATCH_BLOCKS)
    for block in dirty:
        residency.enqueue_writeback(block)
    residency.counters.add(node_metrics.CASCADED_BLOCKS, len(dirty))
    residency.evict_from_dram(leaving)
    residency.counters.add(_evicted_event(order), len(leaving))
    return sum(block.nbytes for block in leaving)


def _may_leave_dram(residency: Residency, order: EvictionOrder, block: Block, met_dirty: dict[BlockKey, Block]) -> Evictable:
    """Whether a block may leave DRAM. Idle dirty blocks are added to ``met_dirty``: they may leave once they are written back."""
    if block.namespace.kept and not order.of_kept:
        return None  # skipped until the namespace is no longer kept
    if residency.arena_evictor.is_last_tier and block.key in block.namespace.hinted and not order.of_kept:
        return None  # skipped until no hint protects it: hints protect a part of a quota only, so there are other victims
    if not residency.is_idle(block):
        return False
    if not block.clean and len(met_dirty) < EVICT_BATCH_BLOCKS:
        met_dirty[block.key] = block
    return block.clean


def _evicted_event(order: EvictionOrder) -> Event:
    return node_metrics.EVICTED_KEPT_BLOCKS if order.of_kept else node_metrics.EVICTED_QUOTA_BLOCKS


def mark_coldest_evicting(residency: Residency, order: EvictionOrder, wanted_bytes: int) -> list[Block]:
    """Mark the coldest blocks of an order that may leave durable volumes, and return them for ``evict_from_volume``."""
    if not residency.evicts_nvme:
        return []
    now_s = residency.clock.now_s()

    def to_leave(rule: Callable[[Block], bool]) -> list[Block]:
        def may_leave(block: Block) -> Evictable:
            if (block.namespace.kept or block.key in block.namespace.hinted) and not order.of_kept:
                return None
            return block.nvme_volume is not None and block.nvme_volume.takes_changes(now_s) and rule(block)

        return list(_coldest(residency, order, wanted_bytes, may_leave))

    found = to_leave(residency.leaves_no_orphans) or to_leave(residency.is_idle)
    residency.mark_evicting(found, VolumeReplica.EVICTING if order.of_kept else VolumeReplica.EVICTING_FOR_QUOTA)
    residency.counters.add(_evicted_event(order), len(found))
    return found


def _coldest(
    residency: Residency, order: EvictionOrder, wanted_bytes: int, may_leave: Callable[[Block], Evictable]
) -> Iterator[Block]:
    """Blocks of an order, coldest first, until their bytes suffice or there are ``EVICT_BATCH_BLOCKS``."""
    blocks = residency.blocks
    found_bytes = 0
    if order.entering:
        return  # incomplete: a parent would look like a leaf
    for number, key in enumerate(order.policy.coldest(lambda key: may_leave(blocks[key]))):
        if found_bytes >= wanted_bytes or number >= EVICT_BATCH_BLOCKS:
            return
        found_bytes += blocks[key].nbytes
        yield blocks[key]


def over_share(residency: Residency, tier: Tier) -> Iterator[tuple[EvictionOrder, int]]:
    """Tenants over their share: their order, and the excess in bytes."""
    for account in residency.accounts.limited[tier]:
        allowed = account.share.of(tier)
        if allowed is not None and (excess := _taken_bytes(residency, account, tier) - allowed) > 0:
            yield account.orders[tier], excess


def evict_over_quota(residency: Residency) -> bool:
    """Evict blocks of tenants over their share, and of kept namespaces beyond their part, from DRAM. Whether there were any."""
    evicted_bytes = [
        evict_tenant_dram(residency, order, excess)
        for find in (over_share, beyond_kept)
        for order, excess in find(residency, Tier.DRAM)
    ]
    return sum(evicted_bytes) > 0


def mark_over_quota_evicting(residency: Residency) -> list[Block]:
    """As ``evict_over_quota``, on durable volumes: mark the blocks and return them for ``evict_from_volume``."""
    return mark_all_evicting(residency, (one for find in (over_share, beyond_kept) for one in find(residency, Tier.NVME)))


def mark_all_evicting(residency: Residency, over: Iterable[tuple[EvictionOrder, int]]) -> list[Block]:
    """Mark the coldest blocks of orders, each with its excess in bytes. After an error, none stays marked."""
    found: list[Block] = []
    try:
        for order, excess in over:
            found += mark_coldest_evicting(residency, order, excess)
    except Exception:
        residency.cancel_eviction(found)
        raise
    return found


def free_durable(residency: Residency, namespace: NodeNamespace) -> int | None:
    """Free bytes of the tenant's share on durable volumes; None: no quota. Takes the lock."""
    with residency.lock:
        account, share = namespace.account, _limit(namespace, Tier.NVME)
        if account is None or share is None:
            return None
        return share - _taken_bytes(residency, account, Tier.NVME) - account.reserved_bytes


class WriteAllowance(NamedTuple):
    """Permission to write blocks to durable volumes."""

    blocks: int
    victims: Sequence[Block] = ()
    """If ``blocks`` is 0: blocks of the tenant, marked as evicting, to evict before the caller asks again."""
    account: TenantAccount | None = None
    """The tenant of ``reserved_bytes``; give them back with ``release_durable``."""
    reserved_bytes: int = 0


def reserve_durable(residency: Residency, namespace: NodeNamespace, count: int) -> WriteAllowance:
    """Reserve space for ``count`` blocks on durable volumes, or some, within the share of the tenant; takes the lock."""
    if _limit(namespace, Tier.NVME) is None:
        return WriteAllowance(count)
    size = namespace.shape.block_bytes
    with residency.lock:
        account, allowed = namespace.account, _limit(namespace, Tier.NVME)
        if account is None or allowed is None:  # lifted by another thread
            return WriteAllowance(count)
        join_tenant(residency, namespace, empty=True)
        count = min(count, allowed // size)
        free = allowed - _taken_bytes(residency, account, Tier.NVME) - account.reserved_bytes
        if count and free < count * size:
            victims = mark_coldest_evicting(residency, account.orders[Tier.NVME], count * size - free)
            if victims:
                return WriteAllowance(0, victims)
        count = min(count, max(0, free // size))
        account.reserved_bytes += count * size
        return WriteAllowance(count, (), account, count * size)


def release_durable(residency: Residency, allowance: WriteAllowance) -> None:
    """Return the bytes of ``reserve_durable``, after the write or instead of it; takes the lock."""
    if allowance.account is not None:
        with residency.lock:
            allowance.account.reserved_bytes -= allowance.reserved_bytes


def add_to_orders(residency: Residency, orders: Mapping[Tier, EvictionOrder], held: Sequence[Block]) -> None:
    """Insert a namespace's existing blocks into its new orders; takes the lock for a part at a time.

    Args:
        residency: the blocks.
        orders: by tier, marked as ``entering``.
        held: the namespace's blocks, oldest first: older ones count as colder until they are used.
    """
    for first in range(0, len(held), EVICT_BATCH_BLOCKS):
        with residency.lock:
            for block in held[first : first + EVICT_BATCH_BLOCKS]:
                if residency.blocks.get(block.key) is not block:
                    continue
                if block.dram is not None and Tier.DRAM in orders:
                    orders[Tier.DRAM].insert(block)
                if block.nvme is not None and Tier.NVME in orders:
                    orders[Tier.NVME].insert(block)
    with residency.lock:
        for order in {id(order): order for order in orders.values()}.values():
            order.entering -= 1
