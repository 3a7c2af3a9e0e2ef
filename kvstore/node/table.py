"""The block table: the authoritative record of the blocks that this node holds. The index has only hints.

Theory of operation.

1. A block has up to two replicas here: a DRAM slot and an NVMe slot. All decisions (which store gets a slot, which block is
   evicted or written back) are taken under one lock, in memory, without I/O. The movers (``loads.loader``,
   ``durability.writeback``) execute them and report back.
2. This module has the operations of stores, loads and write-back, and the waits. ``state.residency`` has the state and its steps.
   ``eviction`` chooses the blocks to evict. ``Residency.evict_from_dram`` and ``eviction.volume_commits`` carry it out, for
   allocation, write-back, rules (``control.retention``) and operators' requests. These, volume checks and ``loads.locate``
   acquire the same lock as ``table.residency.lock``.
3. Invariants. A block is in the table exactly while it has a replica. A slot belongs to one block, one store or one mover
   (``validate`` asserts these two). A block with ``pins`` > 0 is evicted from no tier. A dirty block leaves DRAM only after it
   was written back or given up, or because its time to live ended or it was invalidated. A slot given to
   a writer is reused only after ``complete`` or ``abandon``, never because time has passed. After ``close`` no slot of the arena
   is reused: a node that stops ends sessions whose engines may still copy.
4. Eviction to free space takes children before their parents. Two exceptions: an operator may evict one volume while children
   stay on other volumes, and children on a volume that accepts no changes stay there.

Threads: any. A wait ends at the caller's deadline, or when the caller disconnects (``base.cancellation``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvstore.core.types import BlockKey, BlockRun, BlockShape, StoreOutcome, Tier, VolumeId
from kvstore.node.base.cancellation import wait
from kvstore.node.eviction.allocation import allocate_dram, grant_slots
from kvstore.node.eviction.quotas import make_room_in_quota
from kvstore.node.state.block_states import DramState, VolumeReplica
from kvstore.node.state.grants import KeyWaiter, LoadClaim, SlotGrant
from kvstore.node.state.invariants import validate
from kvstore.node.state.model import EVICTING, Block, NodeVolume
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.state.residency import Residency
from kvstore.node.state.store_admission import admit
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.tiers.contract import BlockRecord, Slot


class BlockTable:
    """Blocks, space and pins of one node.

    Args:
        residency: arena, volumes and their orders of eviction; of this table only.
        writes_back: whether stored blocks are written back.
        cache_loads: whether DRAM is a cache. If not, it only stages: an unused durable block leaves at once.
    """

    def __init__(self, residency: Residency, *, writes_back: bool, cache_loads: bool = True) -> None:
        self.residency = residency
        self.dram = residency.dram
        self.memory_volume = self.dram  # the name in ``PublishedBlocks``, whose volume may also be on a device
        self.node_volumes = residency.node_volumes
        self.accounts = residency.accounts
        self.cache_loads = cache_loads
        self.clock = residency.clock
        self._writes_back = writes_back
        self._counters = residency.counters
        self._lock = residency.lock
        self._changed = residency.changed
        self._blocks = residency.blocks
        self._preparing = residency.preparing
        self._loading = residency.loading
        self._writes = residency.writes
        self.on_durable_needing_copy: Callable[[Block], None] = lambda _block: None
        """Called under the lock for each block of a namespace with two copies that became durable here."""

    # ---- recovery
    def restore(self, node_volume: NodeVolume, namespace: NodeNamespace, record: BlockRecord, slot: Slot) -> bool:
        """Insert a durable block found at start. Returns False if the table knows the key already: the slot is not used."""
        with self._lock:
            block = self._blocks.get(record.key)
            if block is not None and (block.nvme_volume is not None or block.namespace is not namespace):
                return False
            if block is None:
                block = self._blocks[record.key] = Block(namespace, record.key, record.parent, record.depth, record.checksums)
            self.residency.put_on_volume(block, node_volume, slot)
            return True

    # ---- storing
    def prepare(self, namespace: NodeNamespace, run: BlockRun, deadline_s: float, *, heads: bool = False) -> SlotGrant:
        """Grant slots for the blocks of a run that are neither held nor being written.

        Grants are prefix-first: from the first block without space on, all are SKIPPED. If there is space for none, wait for some
        until the deadline. ``heads``: each key is the head of a chain.

        The first writer of a key decides its namespace, parent and depth. The run is cut before the first key known with another
        namespace, parent or depth.

        Raises:
            Conflict: the first key is held or being written with another namespace, parent or depth.
            InvalidArgument: a block does not fit the empty arena.
        """
        grant = SlotGrant(namespace, run, [])
        with self._lock:
            if admitted := admit(self.residency, grant, heads=heads):
                try:
                    grant_slots(self.residency, grant, admitted, lambda: self.wait_changed(deadline_s))
                except BaseException:  # the caller gets no grant to abandon
                    self._abandon(grant)
                    for position in admitted:
                        self._preparing.pop(run.keys[position], None)  # those without a slot
                    raise
                self._settle(grant)  # if no slot was granted, neither complete nor abandon will be called
        return grant

    def complete(self, grant: SlotGrant, keys: Sequence[BlockKey], checksums: Sequence[bytes]) -> list[StoreOutcome]:
        """Make written blocks visible, in the order given."""
        outcomes: list[StoreOutcome] = []
        residency = self.residency
        with self._lock:
            for key, checksum in zip(keys, checksums, strict=True):
                slot = grant.slots.pop(key, None)
                if slot is None:
                    held = key in self._blocks and self._blocks[key].namespace is grant.namespace
                    outcomes.append(StoreOutcome.EXISTS if held else StoreOutcome.LOST)
                    continue
                del self._preparing[key]
                grant.namespace.granted -= 1
                block = Block(grant.namespace, key, grant.parents[key], grant.depths[key], checksum)
                self._blocks[key] = block
                if key == grant.tail:
                    block.transient, block.produced_here = True, False
                    residency.put_in_dram(block, slot, DramState.CLEAN)
                elif self._writes_back:
                    if not self.cache_loads:
                        block.transient = True
                    residency.put_in_dram(block, slot, DramState.WRITING)
                    self._writes.add(block)
                else:
                    residency.put_in_dram(block, slot, DramState.CLEAN)
                outcomes.append(StoreOutcome.STORED)
            if not self._writes.empty:
                residency.has_writes.notify()
            self._settle(grant)
            self._changed.notify_all()
        return outcomes

    def abandon(self, grant: SlotGrant) -> None:
        """Give back the slots of a store that were not completed. Call only when its writer can no longer access them."""
        with self._lock:
            self._abandon(grant)

    def _abandon(self, grant: SlotGrant) -> None:
        self._revoke(grant)
        self.dram.free(grant.revoked)
        grant.namespace.granted -= len(grant.revoked)
        if grant.revoked:
            self._counters.add(node_metrics.STORE_ABANDONED_BLOCKS, len(grant.revoked))
        grant.revoked.clear()
        self._changed.notify_all()

    def revoke(self, grant: SlotGrant) -> None:
        """Take from a store what it has not completed: others may store its keys, and no load waits for them any more.

        Its slots stay reserved until ``abandon``, because its writer may still write to them.
        """
        with self._lock:
            self._revoke(grant)
            self._changed.notify_all()

    def _revoke(self, grant: SlotGrant) -> None:
        for key in grant.slots:
            del self._preparing[key]
        grant.revoked += grant.slots.values()
        grant.slots.clear()
        self._settle(grant)

    def _settle(self, grant: SlotGrant) -> None:
        if not grant.slots and grant.guarded is not None:
            guarded, grant.guarded = grant.guarded, None
            guarded.pins -= 1
            if guarded.pins == 0 and guarded.lives_by_pins:
                self.residency.release(guarded)

    # ---- reading
    def pin_resident(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> list[Block | None]:
        """Pin the keys that are in DRAM, and mark them used. Returns one entry per key."""
        get = self._blocks.get
        with self._lock:
            found: list[Block | None] = []
            used: list[BlockKey] = []
            for key in keys:
                block = get(key)
                if block is not None and block.dram is not None and block.namespace is namespace:
                    block.pins += 1
                    found.append(block)
                    used.append(key)
                else:
                    found.append(None)
            self.residency.arena_evictor.touch(namespace, used)
        return found

    def pin_again(self, blocks: Sequence[Block]) -> bool:
        """Pin blocks again whose slots are kept by pins. Returns False, and pins none, if one is no longer pinned."""
        with self._lock:
            if any(block.pins == 0 or block.dram is None for block in blocks):
                return False
            for block in blocks:
                block.pins += 1
            return True

    def find(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> list[Block | None]:
        """Return the blocks that this node holds in any tier. A hint: ``claim`` decides."""
        get = self._blocks.get
        with self._lock:
            return [block if (block := get(key)) is not None and block.namespace is namespace else None for key in keys]

    def unpin(self, blocks: Iterable[Block]) -> None:
        """End pins."""
        with self._lock:
            for block in blocks:
                block.pins -= 1
                if block.pins == 0 and block.lives_by_pins:
                    self.residency.release(block)
            self._changed.notify_all()

    def claim(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> LoadClaim:
        """Reserve the right to bring keys into DRAM, so that two loads do not read the same block twice."""
        claim = LoadClaim()
        touch = self.residency.volume_evictor.touch
        with self._lock:
            for position, key in enumerate(keys):
                block = self._blocks.get(key)
                if block is not None and block.namespace is not namespace:
                    claim.absent.append(position)
                elif block is not None and block.dram is not None:
                    block.pins += 1
                    claim.resident[position] = block
                elif key in self._loading or key in self._preparing:
                    claim.busy.append(position)
                elif block is not None and block.bits & EVICTING:
                    claim.absent.append(position)
                elif block is not None:
                    block.pins += 1  # its NVMe slot must stay until the read ends
                    self._loading.add(key)
                    claim.durable[position] = block
                    touch(namespace, (key,))
                else:
                    self._loading.add(key)
                    claim.absent.append(position)
                    claim.claimed_absent.append(position)
        return claim

    def is_loading(self, key: BlockKey) -> bool:
        """Whether a load has claimed a key and brings it. A store does not count."""
        with self._lock:
            return key in self._loading

    def await_resident(self, namespace: NodeNamespace, key: BlockKey, deadline_s: float) -> Block | None:
        """Wait while another load or store brings a key; then pin it. None: it did not arrive."""
        with self._lock:
            while key in self._loading or key in self._preparing:
                if not self.wait_changed(deadline_s):
                    return None
            block = self._blocks.get(key)
            if block is None or block.dram is None or block.namespace is not namespace:
                return None
            block.pins += 1
            return block

    def subscribe(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> KeyWaiter:
        """Wait for keys from any source: each block is pinned once it is in DRAM. End the wait with ``unsubscribe``."""
        waiter = KeyWaiter(namespace)
        with self._lock:
            present: list[BlockKey] = []
            for position, key in enumerate(keys):
                block = self._blocks.get(key)
                if block is not None and block.dram is not None and block.namespace is namespace:
                    block.pins += 1
                    waiter.arrivals.append((position, block))
                    present.append(key)
                    continue
                if key not in waiter.missing:
                    self.residency.waiters.setdefault(key, []).append(waiter)
                waiter.missing.setdefault(key, []).append(position)
            self.residency.arena_evictor.touch(namespace, present)
        return waiter

    def next_arrivals(self, waiter: KeyWaiter, deadline_s: float) -> list[tuple[int, Block]]:
        """Wait for more blocks: (position, block). The caller owns their pins. Empty: no more blocks in time."""
        with self._lock:
            while not waiter.arrivals and waiter.missing:
                if not self.wait_changed(deadline_s):
                    break
            arrivals, waiter.arrivals = waiter.arrivals, []
            return arrivals

    def unsubscribe(self, waiter: KeyWaiter) -> None:
        """End a wait. Pins that the caller did not take are released."""
        waiters = self.residency.waiters
        with self._lock:
            for key in waiter.missing:
                others = [each for each in waiters.pop(key) if each is not waiter]
                if others:
                    waiters[key] = others
            arrivals, waiter.arrivals, waiter.missing = waiter.arrivals, [], {}
        self.unpin([block for _, block in arrivals])

    def reserve(
        self, shape: BlockShape, count: int, deadline_s: float, namespace: NodeNamespace | None = None
    ) -> list[Slot] | None:
        """Allocate DRAM slots for a load, all or none, evicting and waiting as needed."""
        with self._lock:
            if (
                namespace is not None
                and self.residency.accounts.limited[Tier.DRAM]
                and not make_room_in_quota(self.residency, namespace, count)
            ):
                self._counters.add(node_metrics.LOAD_BEYOND_QUOTA_BLOCKS, count)  # never refused: the blocks are evicted soon
            while (slots := allocate_dram(self.residency, shape, count)) is None:
                if not self.wait_changed(deadline_s):
                    self._counters.add(node_metrics.LOAD_NO_SPACE_BLOCKS, count)
                    return None
            return slots

    def unreserve(self, slots: Sequence[Slot]) -> None:
        """Give back reserved slots."""
        with self._lock:
            self.dram.free(slots)
            self._changed.notify_all()

    def finish_promotion(self, block: Block, slot: Slot, checksums: bytes) -> None:
        """Note that a claimed durable block is in DRAM too; the claim's pin becomes the caller's."""
        with self._lock:
            if block.nvme_volume is None:  # its replica on the volume proved corrupt, and the block left the table
                self._blocks.setdefault(block.key, block)
            block.checksums = checksums
            if not self.cache_loads:
                block.transient = True
            self.residency.put_in_dram(block, slot, DramState.CLEAN)
            self._loading.discard(block.key)
            self._changed.notify_all()

    def insert_fetched(self, block: Block, slot: Slot, *, clean: bool = True) -> Block:
        """Insert a block fetched from another node (claimed as absent) into DRAM; it is returned pinned.

        Args:
            block: the block.
            slot: where it is.
            clean: whether it may leave without being written.
        """
        with self._lock:
            self._blocks[block.key] = block
            block.pins += 1
            block.produced_here = False
            self._arrive(block, slot, DramState.CLEAN if clean else DramState.DIRTY)
        return block

    def begin_fill(self, block: Block, slot: Slot) -> Block:
        """Note that a block (claimed as absent) begins to arrive in ``slot``, layer by layer; it is returned pinned.

        It stays out of the table until ``finish_fill``. If that is never called, its last pin gives the slot back.
        """
        with self._lock:
            self.residency.set_dram_state(block, DramState.FILLING)
            block.dram, block.pins = slot, 1
        return block

    def finish_fill(self, block: Block) -> None:
        """Note that all layers of a filling block are ready: insert it into the table. Its pins stay."""
        with self._lock:
            slot = block.dram
            assert slot is not None
            self._blocks[block.key] = block
            block.produced_here = False
            self._arrive(block, slot)

    def _arrive(self, block: Block, slot: Slot, state: DramState = DramState.CLEAN) -> None:
        if not self.cache_loads:
            block.transient = True
        self.residency.put_in_dram(block, slot, state)
        self._loading.discard(block.key)
        self._changed.notify_all()

    def unclaim(self, keys: Iterable[BlockKey], blocks: Iterable[Block]) -> None:
        """Give up claims: ``keys`` are all of them, ``blocks`` those that were claimed with a pin."""
        with self._lock:
            self._loading.difference_update(keys)
            for block in blocks:
                block.pins -= 1
            self._changed.notify_all()

    # ---- write-back
    def take_pending(self, max_blocks: int, max_bytes: int, wait_s: float) -> list[Block]:
        """Return the next blocks to write back, oldest first, all of one namespace. Waits up to ``wait_s`` for the first.

        Report each with ``writeback_done`` or ``writeback_failed``.
        """
        with self._lock:
            if self._writes.empty and not self.residency.closed:
                self.residency.has_writes.wait(wait_s)
            return self._writes.take(max_blocks, max_bytes)

    def wake_write_back(self) -> None:
        """End the wait of ``take_pending``, which then returns no blocks unless some are pending."""
        with self._lock:
            self.residency.has_writes.notify_all()

    def writeback_done(self, block: Block, node_volume: NodeVolume | None, slot: Slot | None) -> None:
        """Note that a block is durable: in a slot of ``node_volume``, or (None) on another node."""
        with self._lock:
            if node_volume is not None and slot is not None:
                if node_volume not in self.node_volumes:  # another node adopted it meanwhile
                    self.residency.finish_writeback(block)
                    return
                self.residency.put_on_volume(block, node_volume, slot)
                block.produced_here = True  # it may have been evicted for its tenant's quota
                if block.namespace.copies > 1:
                    self.on_durable_needing_copy(block)
            elif not block.durable_remotely:
                self.residency.set_replica(block, VolumeReplica.REMOTE)
            self.residency.finish_writeback(block)

    def writeback_failed(self, block: Block, *, corrupt: bool = False, denied: bool = False) -> None:
        """Note that a block could not be written. It stays in DRAM only and may be evicted, i.e. lost.

        Args:
            block: the block.
            corrupt: its bytes are corrupt; it leaves the table at once, and its slot is freed after its last pin.
            denied: its tenant's quota is used up; it need not become durable, and no drain waits for it.
        """
        with self._lock:
            if denied:
                block.produced_here = False
            self.residency.finish_writeback(block)
            if corrupt and block.dram is not None:
                self.residency.condemn(block)

    def wait_written(self, deadline_s: float) -> bool:
        """Wait until all blocks that now wait for write-back are written or given up. Returns False at the deadline."""
        with self._lock:
            mark = self._writes.enqueued
            while self._writes.finished < mark:
                if not self.wait_changed(deadline_s):
                    return False
            return True

    def are_durable(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return which blocks survive this process: on a volume here, or on the storage node that they were written to."""
        for node_volume in self.node_volumes:
            node_volume.look_in_place()
        with self._lock:
            found = (self._blocks.get(key) for key in keys)
            return [
                key in self.residency.gone if block is None else block.durable for key, block in zip(keys, found, strict=True)
            ]

    def not_durable(self, tenant: str | None = None) -> int:
        """Return how many blocks (of a tenant) that were stored here would not survive this process."""
        mine = [one for one in self.snapshot() if tenant is None or (one.namespace.spec and one.namespace.spec.tenant == tenant)]
        return sum(block.volatile for block in mine)

    def requeue_writeback(self, blocks: Iterable[Block]) -> int:
        """Queue for write-back the blocks that only DRAM holds, including those given up before. Returns how many."""
        if not self._writes_back:
            return 0
        sent = 0
        with self._lock:
            for block in blocks:
                if self._blocks.get(block.key) is not block or block.dram is None:
                    continue
                if block.nvme_volume is None and not block.durable_remotely and not block.writing:
                    self.residency.enqueue_writeback(block)
                    sent += 1
        return sent

    def give_up_pending(self) -> int:
        """Give up all blocks that now wait for write-back, as if each had failed. Writes in progress continue."""
        with self._lock:
            given_up = self._writes.take_all()
            for block in given_up:
                self.residency.finish_writeback(block)
            return len(given_up)

    # ---- looking
    def snapshot(self) -> list[Block]:
        """Return all blocks, parents before children if both were added in that order. For inventories."""
        with self._lock:
            return list(self._blocks.values())

    def held_by(self, volume: VolumeId) -> list[Block]:
        """Return all blocks that one volume holds, in the order of ``snapshot``."""
        blocks = self.snapshot()
        if volume == self.dram.volume_id:
            return [block for block in blocks if block.dram is not None]
        return [block for block in blocks if (node_volume := block.nvme_volume) is not None and node_volume.volume_id == volume]

    def counts(self) -> tuple[int, int]:
        """Return the number of blocks in the table, and of blocks waiting for write-back."""
        with self._lock:
            return len(self._blocks), len(self._writes)

    def close(self) -> None:
        """Allocate no slot of the arena any more, and wake all waiting threads. Their waits fail."""
        with self._lock:
            self.residency.closed = True
            self._changed.notify_all()
            self.residency.has_writes.notify_all()

    def validate(self) -> None:
        """Assert the invariants."""
        with self._lock:
            validate(self.residency)

    # ---- marking
    def mark_clean(self, blocks: Iterable[Block], *, transient: bool = False) -> None:
        """Let dirty blocks leave DRAM without being written. ``transient``: with their last pin, or after a write in progress."""
        with self._lock:
            for block in blocks:
                block.transient = block.transient or transient
                if block.dirty:
                    self.residency.set_dram_state(block, DramState.CLEAN)

    def mark_dirty(self, blocks: Iterable[Block]) -> None:
        """Have clean blocks written before they leave DRAM, except transient ones."""
        with self._lock:
            for block in blocks:
                if block.clean and not block.transient:
                    self.residency.set_dram_state(block, DramState.DIRTY)

    def drop_staged(self, blocks: Iterable[Block]) -> None:
        """Take blocks out of DRAM that came there only to be copied, unless they are in use. Their replicas on volumes stay."""
        with self._lock:
            for block in blocks:
                if block.dram is not None and block.nvme_volume is not None and block.clean and self.residency.is_idle(block):
                    self.residency.remove_from_dram(block)
            self._changed.notify_all()

    # ---- inside the lock
    def wait_changed(self, deadline_s: float) -> bool:
        """Wait until space or residency may have changed. The caller holds the lock. False at the deadline."""
        left_s = deadline_s - self.clock.now_s()
        return left_s > 0 and not self.residency.closed and wait(self._changed, left_s, self._counters)
