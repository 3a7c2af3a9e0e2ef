"""Where each block of a node is, and the steps by which that changes.

Everything here is called under ``lock``, in memory, without I/O. ``BlockTable`` has the verbs for callers and waits for them;
``kvstore.node.eviction`` decides which blocks leave. Every change of a replica is logged under the lock, so what is published is
in order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvstore.core.clock import Clock
from kvstore.core.types import BlockKey
from kvstore.node.eviction.arena import ArenaEvictor
from kvstore.node.eviction.volumes import VolumeEvictor
from kvstore.node.state.block_states import (
    LEGAL_IN_DRAM,
    LEGAL_ON_VOLUME,
    VOLUME_SHIFT,
    DramState,
    InvalidTransition,
    TransitionLog,
    VolumeReplica,
)
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.grants import KeyWaiter, SlotGrant
from kvstore.node.state.model import IN_TRANSFER, STATE_MASK, Block, NodeVolume, Recent
from kvstore.node.state.namespaces import TenantLedger
from kvstore.node.state.writeback_queue import WritebackQueue
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.tiers.contract import EvictionPolicy, MappedVolume, Rows, Slot
from kvstore.tiers.eviction.policy import LruPolicy

log = logging.getLogger(__name__)

_ABSENT: Final = DramState.ABSENT
PENDING_SHARE: Final = 0.75
"""Fraction of the arena that blocks waiting for write-back may occupy before stores wait for it, and are then skipped."""
_VOLUME_MASK: Final = STATE_MASK << VOLUME_SHIFT


class Residency:
    """Blocks, their replicas and their orders of eviction.

    Args:
        dram: the arena.
        dram_policy: the order in which blocks leave it.
        node_volumes: the durable volumes.
        log: hears of every change of a replica.
        counters: events.
        clock: time.
        make_durable_policy: makes the order in which blocks leave the volumes.
        accounts: the tenants; None: none has a quota.
        cascades_chains: whether dirty blocks that are to be evicted are written with their parents.
    """

    def __init__(
        self,
        dram: MappedVolume,
        dram_policy: EvictionPolicy,
        node_volumes: Sequence[NodeVolume],
        log: ReplicaChangeLog,
        counters: Counters,
        clock: Clock,
        *,
        make_durable_policy: Callable[[Rows], EvictionPolicy] = LruPolicy,
        accounts: TenantLedger | None = None,
        cascades_chains: bool = False,
    ) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        """Space or residency may have changed."""
        self.has_writes = threading.Condition(self.lock)
        """Blocks wait for write-back."""
        self.dram = dram
        self.dram_policy = dram_policy
        self.node_volumes = list(node_volumes)
        self.accounts = accounts or TenantLedger()
        self.counters = counters
        self.clock = clock
        self.blocks: dict[BlockKey, Block] = {}
        self.arena_evictor = ArenaEvictor(dram, self.blocks, dram_policy, self.is_idle, self.node_volumes)
        self.volume_evictor = VolumeEvictor(self.blocks, make_durable_policy, self.node_volumes, clock)
        self.preparing: dict[BlockKey, SlotGrant] = {}
        """Keys that are being stored."""
        self.loading: set[BlockKey] = set()
        """Keys that are being loaded into DRAM."""
        self.gone: Recent[BlockKey] = Recent()
        """Keys that left this node and are durable on the storage node."""
        self.waiters: dict[BlockKey, list[KeyWaiter]] = {}
        self.writes = WritebackQueue()
        self.pending_limit_bytes = int(dram.usage().capacity_bytes * PENDING_SHARE)
        """Blocks may wait for write-back up to this size before stores wait for it."""
        self.cascades_chains = cascades_chains
        self.evicts_nvme = True
        """Whether blocks may leave a volume to free space for others."""
        self.closed = False
        """No slot of the arena is allocated any more: sessions end, and slots that they held are freed while engines may still
        access them."""
        self.story = TransitionLog()
        self._record = self.story.entries.append
        self._log = log

    # ---- predicates
    @staticmethod
    def is_idle(block: Block) -> bool:
        """Whether a block is not in use, in write-back or in eviction."""
        return not block.pins and not block.bits & IN_TRANSFER

    def leaves_no_orphans(self, block: Block) -> bool:
        """Whether a block may leave its volume without leaving children in DRAM that no lookup finds."""
        return self.is_idle(block) and (block.dram is not None or not self.dram_policy.children(block.key))

    # ---- bugs
    def set_apart(self, block: Block, bug: Exception) -> None:
        """Pin a block for good, after an unexpected error in its eviction. Its state is unknown: no search may meet it again."""
        block.pins += 1
        block.set_apart = True
        self.counters.add(node_metrics.EVICTION_BUGS)
        log.error("block not evicted: unexpected error, not tried again (key=%s)", block.key.hex(), exc_info=bug)

    # ---- DRAM
    def set_dram_state(self, block: Block, new: DramState) -> None:
        """Change a block's state in DRAM.

        Raises:
            InvalidTransition: no transition joins the two states.
        """
        bits = block.bits
        if (bits & STATE_MASK) << 4 | new not in LEGAL_IN_DRAM:
            raise self.story.invalid(block.key, DramState(bits & STATE_MASK), new)
        self._record((block.key, new))
        block.bits = bits & ~STATE_MASK | new

    def put_in_dram(self, block: Block, slot: Slot, state: DramState) -> None:
        """Note that a block is in a slot of the arena now; callers that wait for its key get it pinned.

        Raises:
            InvalidTransition: its state does not allow that.
        """
        bits = block.bits  # as ``set_dram_state``, inline: a call per block that comes
        if (bits & STATE_MASK) << 4 | state not in LEGAL_IN_DRAM:
            raise self.story.invalid(block.key, block.dram_state, state)
        self._record((block.key, state))
        block.bits = bits & ~STATE_MASK | state
        block.dram = slot
        self.arena_evictor.insert(block, slot)
        self._log.stored(self.dram.volume_id, block)
        if block.key in self.waiters:
            self._hand_over(block)

    def _hand_over(self, block: Block) -> None:
        others: list[KeyWaiter] = []
        for waiter in self.waiters.pop(block.key):
            if waiter.namespace is not block.namespace:
                others.append(waiter)
                continue
            for position in waiter.missing.pop(block.key):
                block.pins += 1
                waiter.arrivals.append((position, block))
        if others:
            self.waiters[block.key] = others

    def remove_from_dram(self, block: Block) -> None:
        """Take a block out of DRAM, and out of the table if it is nowhere else. Counts no eviction: ``evict_from_dram`` does."""
        slot = block.dram
        assert slot is not None
        self._log.removed(self.dram.volume_id, block.key)
        self.arena_evictor.remove(block, slot)
        self.dram.free((slot,))
        self.set_dram_state(block, _ABSENT)
        block.dram = None
        if block.nvme_volume is None:
            self.drop_if_nowhere(block)
        else:
            block.checksums = b""  # its slot's header has them

    def condemn(self, block: Block) -> None:
        """Take a block that is corrupt in DRAM out of the table, so that no new read finds it. Readers keep the slot."""
        if not block.pins:
            self.remove_from_dram(block)
            return
        slot = block.dram
        assert slot is not None
        assert block.nvme_volume is None  # it was about to be written there
        self._log.removed(self.dram.volume_id, block.key)
        self.arena_evictor.remove(block, slot)
        self._leave_table(block)
        block.condemned = True

    def evict_from_dram(self, blocks: Sequence[Block]) -> None:
        """Evict blocks from DRAM, and count them."""
        for block in blocks:
            self._leave_dram(block)
        self.counters.add(node_metrics.EVICTED_DRAM_BLOCKS, len(blocks))

    def _leave_dram(self, block: Block) -> None:
        try:
            self.remove_from_dram(block)
        except Exception as bug:  # noqa: BLE001  # the others must leave
            self.set_apart(block, bug)

    def release(self, block: Block) -> None:
        """Let a block that lives by its pins leave DRAM, after its last pin."""
        if block.filling or block.condemned:
            slot = block.dram
            assert slot is not None
            self.dram.free((slot,))
            self.set_dram_state(block, DramState.ABSENT)
            block.dram = None
        elif block.clean and self.is_idle(block) and (block.durable or not block.produced_here):
            self._leave_dram(block)

    def drop_if_nowhere(self, block: Block) -> None:
        """Remove a block from the table if it has no replica here."""
        if block.dram is None and block.nvme_volume is None and self.blocks.get(block.key) is block:
            self._leave_table(block)
            if block.durable_remotely:
                self.gone.add(block.key)

    def _leave_table(self, block: Block) -> None:
        del self.blocks[block.key]
        self.volume_evictor.on_left_table(block)

    # ---- write-back
    def with_parents(self, leaves: Iterable[Block], limit: int) -> list[Block]:
        """Return dirty blocks, each followed by its dirty ancestors, at most ``limit`` blocks in all.

        Policies yield a parent only after its children, so a chain would otherwise be written one block at a time.
        """
        found: dict[BlockKey, Block] = {}
        for leaf in leaves:
            block: Block | None = leaf
            while block is not None and block.key not in found and block.dram is not None and len(found) < limit:
                if block.clean or block.namespace is not leaf.namespace or not self.is_idle(block):
                    break
                found[block.key] = block
                block = self.blocks.get(block.parent) if block.parent is not None else None
        return list(found.values())

    def enqueue_writeback(self, block: Block) -> None:
        """Send a block in DRAM to write-back."""
        self.set_dram_state(block, DramState.WRITING)
        self.writes.add(block)
        self.has_writes.notify()

    def finish_writeback(self, block: Block) -> None:
        """Note that a block was written or given up. It may leave DRAM in both cases: it must not clog the arena."""
        self.set_dram_state(block, DramState.CLEAN)
        self.writes.finish(block)
        if block.pins == 0 and block.transient:
            self.release(block)
        self.changed.notify_all()

    # ---- durable volumes
    def expect_volume(self, node_volume: NodeVolume) -> None:
        """Accept blocks of another volume, which is not written to before ``add_volume``."""
        self._log.add_volume(node_volume.volume_id)
        self.volume_evictor.add_volume(node_volume)

    def add_volume(self, node_volume: NodeVolume) -> None:
        """Use an expected volume as one of this node's.

        If it is the first one, blocks that hints protect may leave the arena from then on: call ``restore_hinted``.
        """
        self.node_volumes.append(node_volume)

    def remove_volume(self, node_volume: NodeVolume) -> None:
        """Forget a volume that holds no blocks."""
        if node_volume in self.node_volumes:
            self.node_volumes.remove(node_volume)
        self.volume_evictor.remove_volume(node_volume)

    def set_replica(self, block: Block, new: VolumeReplica) -> None:
        """Change the state of a block's replica on a volume.

        Raises:
            InvalidTransition: no transition joins the two states.
        """
        bits = block.bits
        if bits & _VOLUME_MASK | new not in LEGAL_ON_VOLUME:
            raise self.story.invalid(block.key, block.volume_replica, new)
        self._record((block.key, new))
        block.bits = bits & ~_VOLUME_MASK | new << VOLUME_SHIFT

    def put_on_volume(self, block: Block, node_volume: NodeVolume, slot: Slot) -> None:
        """Note that a block is in a slot of a durable volume now."""
        self.set_replica(block, VolumeReplica.PRESENT)
        block.put_on(node_volume, slot)
        if block.bits & DramState.DIRTY:
            self.set_dram_state(block, DramState.CLEAN)
        self.volume_evictor.insert(block, node_volume, slot)
        self._log.stored(node_volume.volume_id, block)

    def mark_evicting(self, blocks: Iterable[Block], reason: VolumeReplica = VolumeReplica.EVICTING) -> None:
        """Note that blocks are about to leave their volumes.

        Raises:
            InvalidTransition: one cannot, because of a bug. None is marked, and that one is set apart: callers may try again.
        """
        marked: list[Block] = []
        for block in blocks:
            try:
                self.set_replica(block, reason)
            except InvalidTransition as bug:
                self.cancel_eviction(marked)
                self.set_apart(block, bug)
                raise
            block.namespace.evicting_blocks += 1
            marked.append(block)

    def cancel_eviction(self, blocks: Iterable[Block]) -> None:
        """Note that blocks stay on their volumes after all."""
        for block in blocks:
            self.set_replica(block, VolumeReplica.PRESENT)
            block.namespace.evicting_blocks -= 1

    def remove_from_volume(self, block: Block, node_volume: NodeVolume) -> None:
        """Note that an evicting block has left its volume. Its slot is the caller's."""
        self.volume_evictor.remove(block, node_volume)  # first: if it fails, no read may begin
        self.set_replica(block, VolumeReplica.ABSENT)
        block.namespace.evicting_blocks -= 1
        self._log.removed(node_volume.volume_id, block.key)
        block.take_off()
