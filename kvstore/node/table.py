"""What this node holds: the truth that the index only hints at.

Theory of operation. A *block* has up to two replicas here: a DRAM slot and an NVMe slot. All decisions (who gets a slot, what
leaves, what is written behind) are taken under one lock, in memory, without I/O; the movers (``loader``, ``writebehind``)
carry them out and report back. Every change of a replica is logged under the same lock, so what is published is in order.

Invariants (``check`` asserts them; every test calls it):

* a block is in the table exactly while it has a replica; a slot belongs to one block, one prepared store or one mover;
* nothing with ``pins`` > 0 leaves any tier; a block that is nowhere else leaves DRAM only after it was written behind, or that
  was given up (cascade before drop);
* a parent leaves DRAM, or the durable volumes, only after its children there;
* a slot given to a writer is reused only after ``complete`` or ``abandon``: never because time has passed.
Threads: any. Waiting ends at the caller's deadline, or if the caller has gone (``kvstore.node.base.cancellation``).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence

from kvstore.core.clock import Clock
from kvstore.core.types import BlockKey, BlockRun, BlockShape, StoreOutcome
from kvstore.node.base.cancellation import wait
from kvstore.node.eviction.arena import ArenaEvictor
from kvstore.node.eviction.cascade import with_parents
from kvstore.node.eviction.quotas import Accounts, first_victims, give_first, holds_nothing, is_full, make_own_room, may_come
from kvstore.node.eviction.volumes import VolumeEvictor
from kvstore.node.state.chain_conflicts import make_way
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.eviction_reason import Leaving
from kvstore.node.state.invariants import check_invariants
from kvstore.node.state.model import Block, Claim, KeyWaiter, NodeVolume, Recent, StoreGrant
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.tiers.contract import BlockRecord, EvictionPolicy, MappedVolume, Rows, Slot
from kvstore.tiers.eviction.policy import LruPolicy

PIECE_BLOCKS = 64
"""Room is made for so many blocks at a time: large enough for contiguous slots, small enough to grant what there is."""
PENDING_SHARE = 0.75
"""Share of the arena that blocks waiting for write-behind may take before stores are skipped."""


class BlockTable:
    """Blocks, room and pins of one node."""

    def __init__(
        self,
        dram: MappedVolume,
        dram_policy: EvictionPolicy,
        node_volumes: Sequence[NodeVolume],
        log: ReplicaChangeLog,
        counters: Counters,
        clock: Clock,
        *,
        writes_behind: bool,
        keep_loaded: bool = True,
        cascades_chains: bool = False,
        make_durable_policy: Callable[[Rows], EvictionPolicy] = LruPolicy,
        accounts: Accounts | None = None,
    ) -> None:
        self.dram = dram
        self.accounts = Accounts() if accounts is None else accounts
        self.keep_loaded = keep_loaded
        """Whether DRAM is a cache. If not, it only stages: what nobody uses leaves, what was stored once it is durable."""
        self._cascades_chains = cascades_chains
        self.node_volumes = list(node_volumes)
        self._dram_policy = dram_policy
        self._log = log
        self._counters = counters
        self._clock = clock
        self._writes_behind = writes_behind
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # room or residency may have changed
        self._has_pending = threading.Condition(self._lock)
        self._blocks: dict[BlockKey, Block] = {}
        self._durable = VolumeEvictor(self._blocks, make_durable_policy, self.node_volumes, clock)
        self._arena = ArenaEvictor(dram, self._blocks, dram_policy, self._idle)
        self._preparing: dict[BlockKey, StoreGrant] = {}
        self._loading: set[BlockKey] = set()
        self._gone: Recent[BlockKey] = Recent()  # left this node, durable on the storage node
        self._vigils: dict[BlockKey, list[KeyWaiter]] = {}
        self._spared: Container[BlockKey] = ()
        self._pending: deque[Block] = deque()
        self._pending_bytes = 0
        self._pending_limit = int(dram.usage().capacity_bytes * PENDING_SHARE)
        self._in_write = 0
        self._enqueued = 0
        self._finished = 0  # of those enqueued, in order: one writer takes them first in, first out
        self._closed = False

    # ---------------------------------------------------------------- recovery
    def restore(self, node_volume: NodeVolume, namespace: NodeNamespace, record: BlockRecord, slot: Slot) -> bool:
        """Takes over a durable block found at start. False where the table knows the key already (the slot is not taken)."""
        with self._lock:
            block = self._blocks.get(record.key)
            if block is not None and (block.nvme_volume is not None or block.namespace is not namespace):
                return False
            if block is None:
                block = self._blocks[record.key] = Block(namespace, record.key, record.parent, record.depth, record.checksums)
            self._set_nvme(block, node_volume, slot)
            return True

    # ---------------------------------------------------------------- storing
    def prepare(self, namespace: NodeNamespace, run: BlockRun, deadline_s: float, *, heads: bool = False) -> StoreGrant:
        """Grants slots for the blocks of a run that are neither held nor being written.

        Grants are prefix-first: from the first block without room on, everything is SKIPPED. Where there is room for none, waits
        for some until the deadline. ``heads``: each key is the head of a chain of its own.
        """
        prepared = StoreGrant(namespace, run, [])
        with self._lock:
            wanted: list[int] = []
            known: list[BlockKey] = []
            clear = make_way(self, namespace, run, deadline_s, heads=heads)
            for position, key in enumerate(run.keys[:clear]):
                if key in self._blocks:
                    prepared.outcomes.append(StoreOutcome.EXISTS)
                    known.append(key)
                elif key in self._preparing or key in self._loading:  # a load may be fetching it from elsewhere right now
                    prepared.outcomes.append(StoreOutcome.IN_PROGRESS)
                else:
                    prepared.outcomes.append(StoreOutcome.STORED)
                    self._preparing[key] = prepared  # taken now: a key twice in one run is IN_PROGRESS the second time
                    prepared.depths[key] = run.depth if heads else run.depth + position
                    prepared.parents[key] = run.keys[position - 1] if position and not heads else run.parent
                    wanted.append(position)
            prepared.outcomes += [StoreOutcome.SKIPPED] * (len(run.keys) - clear)
            self._arena.touch(namespace, known)
            if not wanted:
                return prepared
            guarded = self._blocks.get(prepared.parents[run.keys[wanted[0]]] or BlockKey(b""))
            if guarded is not None and (guarded.dram is None or (guarded.expendable and not guarded.durable)):
                guarded.pins += 1
                prepared.guarded = guarded
            self._grant(prepared, wanted, deadline_s)
            self._settle(prepared)  # nothing granted: nobody will complete or abandon it
        return prepared

    def _grant(self, prepared: StoreGrant, wanted: list[int], deadline_s: float) -> None:
        shape, run = prepared.namespace.shape, prepared.run
        granted = 0
        piece = PIECE_BLOCKS
        while granted < len(wanted):
            count = min(piece, len(wanted) - granted)
            over = self._pending_bytes > self._pending_limit
            own = over or make_own_room(self, prepared.namespace, count)
            slots = self._allocate(shape, count) if own and not over else None
            if slots is None and piece > 1 and not over:
                piece = max(1, count // 2)
                continue
            if slots is None:
                # never waits for more while holding some (two large stores would wait for each other), nor for nothing
                if granted or holds_nothing(prepared.namespace) or not may_come(self, prepared, own=not own):
                    break
                if not self._wait(self._changed, deadline_s):
                    break
                piece = PIECE_BLOCKS
                continue
            for slot in slots:
                position = wanted[granted]
                key = run.keys[position]
                prepared.slots[key] = slot
                granted += 1
            prepared.namespace.granted += len(slots)
        for position in wanted[granted:]:
            del self._preparing[run.keys[position]]
            prepared.outcomes[position] = StoreOutcome.SKIPPED
        if granted < len(wanted):
            full = not over and is_full(self, prepared.namespace)
            skipped = node_metrics.STORE_SKIPPED_QUOTA_BLOCKS if full else node_metrics.STORE_SKIPPED_NO_ROOM_BLOCKS
            self._counters.add(skipped, len(wanted) - granted)

    def complete(self, prepared: StoreGrant, keys: Sequence[BlockKey], checksums: Sequence[bytes]) -> list[StoreOutcome]:
        """Makes written blocks visible, in the order given."""
        outcomes: list[StoreOutcome] = []
        with self._lock:
            for key, checksum in zip(keys, checksums, strict=True):
                slot = prepared.slots.pop(key, None)
                if slot is None:
                    held = key in self._blocks and self._blocks[key].namespace is prepared.namespace
                    outcomes.append(StoreOutcome.EXISTS if held else StoreOutcome.LOST)
                    continue
                del self._preparing[key]
                prepared.namespace.granted -= 1
                block = Block(prepared.namespace, key, prepared.parents[key], prepared.depths[key], checksum)
                self._blocks[key] = block
                self._set_dram(block, slot)
                if key == prepared.tail:
                    block.expendable = block.passing = True
                    block.ours = False
                elif self._writes_behind:
                    block.passing = not self.keep_loaded
                    self._enqueue(block)
                else:
                    block.expendable = True
                outcomes.append(StoreOutcome.STORED)
            self._settle(prepared)
            self._changed.notify_all()
        return outcomes

    def abandon(self, prepared: StoreGrant) -> None:
        """Gives back whatever of a store was not completed. Call only once its writer can no longer touch the slots."""
        with self._lock:
            for key, slot in prepared.slots.items():
                del self._preparing[key]
                self.dram.free((slot,))
            prepared.namespace.granted -= len(prepared.slots)
            if prepared.slots:
                self._counters.add(node_metrics.STORE_ABANDONED_BLOCKS, len(prepared.slots))
            prepared.slots.clear()
            self._settle(prepared)
            self._changed.notify_all()

    def _settle(self, prepared: StoreGrant) -> None:
        if not prepared.slots and prepared.guarded is not None:
            prepared.guarded.pins -= 1
            prepared.guarded = None

    # ---------------------------------------------------------------- reading
    def pin_resident(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> list[Block | None]:
        """Pins those of the keys that lie in DRAM, and marks them used. One entry a key."""
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
            self._arena.touch(namespace, used)
        return found

    def pin_if_pinned(self, blocks: Sequence[Block]) -> bool:
        """One more pin on blocks whose slots are kept by somebody's pins; none where one of them has none any more."""
        with self._lock:
            if any(block.pins == 0 or block.dram is None for block in blocks):
                return False
            for block in blocks:
                block.pins += 1
            return True

    def pin_again(self, blocks: Iterable[Block]) -> None:
        """One more pin on blocks that the caller has pinned."""
        with self._lock:
            for block in blocks:
                block.pins += 1

    def held(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of the keys this node holds in any tier. A hint."""
        with self._lock:
            found = (self._blocks.get(key) for key in keys)
            return [block is not None and block.namespace is namespace for block in found]

    def unpin(self, blocks: Iterable[Block]) -> None:
        """Ends pins."""
        with self._lock:
            for block in blocks:
                block.pins -= 1
                if block.pins == 0 and block.transient:
                    self._let_go(block)
            self._changed.notify_all()

    def volumes_of(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> list[NodeVolume | None]:
        """On which durable volume each of the keys lies. A hint: ``claim`` decides."""
        with self._lock:
            found = (self._blocks.get(key) for key in keys)
            return [block.nvme_volume if block is not None and block.namespace is namespace else None for block in found]

    def claim(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> Claim:
        """Reserves the right to bring keys into DRAM, so that two loads do not read the same block twice."""
        claim = Claim()
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
                elif block is not None and block.leaves:
                    claim.absent.append(position)
                elif block is not None:
                    block.pins += 1  # its NVMe slot must stay while it is read
                    self._loading.add(key)
                    claim.durable[position] = block
                    self._durable.touch(namespace, (key,))
                else:
                    self._loading.add(key)
                    claim.absent.append(position)
                    claim.claimed_absent.append(position)
        return claim

    def await_resident(self, namespace: NodeNamespace, key: BlockKey, deadline_s: float) -> Block | None:
        """Waits while another load or store brings a key in; then pins it, or None where it did not come."""
        with self._lock:
            while key in self._loading or key in self._preparing:
                if not self._wait(self._changed, deadline_s):
                    return None
            block = self._blocks.get(key)
            if block is None or block.dram is None or block.namespace is not namespace:
                return None
            block.pins += 1
            return block

    def watch(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> KeyWaiter:
        """Waits for keys, whoever brings them: each block is pinned the moment it lies in DRAM. End it with ``unwatch``."""
        vigil = KeyWaiter(namespace)
        with self._lock:
            here: list[BlockKey] = []
            for position, key in enumerate(keys):
                block = self._blocks.get(key)
                if block is not None and block.dram is not None and block.namespace is namespace:
                    block.pins += 1
                    vigil.came.append((position, block))
                    here.append(key)
                    continue
                if key not in vigil.missing:
                    self._vigils.setdefault(key, []).append(vigil)
                vigil.missing.setdefault(key, []).append(position)
            self._arena.touch(namespace, here)
        return vigil

    def came(self, vigil: KeyWaiter, deadline_s: float) -> list[tuple[int, Block]]:
        """Waits for more of a vigil: (position, block), whose pins are the caller's. Empty: nothing more in time."""
        with self._lock:
            while not vigil.came and vigil.missing:
                if not self._wait(self._changed, deadline_s):
                    break
            came, vigil.came = vigil.came, []
            return came

    def unwatch(self, vigil: KeyWaiter) -> None:
        """Ends a vigil; pins that nobody took are given back."""
        with self._lock:
            for key in vigil.missing:
                others = [one for one in self._vigils.pop(key) if one is not vigil]
                if others:
                    self._vigils[key] = others
            came, vigil.came, vigil.missing = vigil.came, [], {}
        self.unpin([block for _, block in came])

    def reserve(
        self, shape: BlockShape, count: int, deadline_s: float, namespace: NodeNamespace | None = None
    ) -> list[Slot] | None:
        """Takes DRAM slots to load into, all or none, evicting and waiting as needed."""
        with self._lock:
            if namespace is not None and not make_own_room(self, namespace, count):
                self._counters.add(node_metrics.LOAD_BEYOND_QUOTA_BLOCKS, count)  # never refused: it leaves again soon
            while (slots := self._allocate(shape, count)) is None:
                if not self._wait(self._changed, deadline_s):
                    self._counters.add(node_metrics.LOAD_NO_ROOM_BLOCKS, count)
                    return None
            return slots

    def unreserve(self, slots: Sequence[Slot]) -> None:
        """Gives reserved slots back."""
        with self._lock:
            self.dram.free(slots)
            self._changed.notify_all()

    def promoted(self, block: Block, slot: Slot, checksums: bytes) -> None:
        """A claimed durable block now lies in DRAM too; the claim's pin becomes the caller's."""
        with self._lock:
            block.checksums, block.passing = checksums, not self.keep_loaded
            self._set_dram(block, slot)
            self._loading.discard(block.key)
            self._changed.notify_all()

    def adopted(self, block: Block, slot: Slot) -> Block:
        """A block fetched from a peer (claimed as absent) now lies in DRAM; it is returned pinned."""
        with self._lock:
            self._blocks[block.key] = block
            block.pins += 1
            block.expendable, block.ours = True, False
            block.passing = not self.keep_loaded
            self._set_dram(block, slot)
            self._loading.discard(block.key)
            self._changed.notify_all()
        return block

    def arriving(self, block: Block, slot: Slot) -> Block:
        """A block (claimed as absent) begins to arrive in ``slot``, layer by layer; it is returned pinned.

        It stays out of the table until ``arrived``. Where that never comes, its slot is given back with its last pin.
        """
        with self._lock:
            block.dram, block.pins, block.arriving = slot, 1, True
        return block

    def arrived(self, block: Block) -> None:
        """All layers of an arriving block are there: it is a block like any other, and its pins go on."""
        with self._lock:
            slot = block.dram
            assert slot is not None
            block.arriving, block.expendable, block.ours = False, True, False
            block.passing = not self.keep_loaded
            self._blocks[block.key] = block
            self._set_dram(block, slot)
            self._loading.discard(block.key)
            self._changed.notify_all()

    def unclaim(self, keys: Iterable[BlockKey], blocks: Iterable[Block]) -> None:
        """Gives claims up: ``keys`` of all, ``blocks`` those that were claimed with a pin."""
        with self._lock:
            self._loading.difference_update(keys)
            for block in blocks:
                block.pins -= 1
            self._changed.notify_all()

    # ---------------------------------------------------------------- write-behind
    def take_pending(self, max_blocks: int, max_bytes: int, wait_s: float) -> list[Block]:
        """Next blocks to write behind, oldest first, all of one namespace; waits up to ``wait_s`` for the first.

        Hand each back with ``persisted`` or ``not_persisted``.
        """
        with self._lock:
            if not self._pending and not self._closed:
                self._has_pending.wait(wait_s)
            taken: list[Block] = []
            room = max_bytes
            while self._pending and len(taken) < max_blocks and (room > 0 or not taken):
                if taken and self._pending[0].namespace is not taken[0].namespace:
                    break
                block = self._pending.popleft()
                room -= block.namespace.shape.block_bytes
                taken.append(block)
            self._in_write += len(taken)
            return taken

    def persisted(self, block: Block, node_volume: NodeVolume | None, slot: Slot | None) -> None:
        """A block is durable: in a slot of ``node_volume``, or (None) on another node."""
        with self._lock:
            if node_volume is not None and slot is not None:
                self._set_nvme(block, node_volume, slot)
                block.ours = True  # again, where it had left for its tenant's quota
            else:
                block.elsewhere = True
            self._written(block)

    def not_persisted(self, block: Block, *, corrupt: bool = False, denied: bool = False) -> None:
        """A block could not be written; it stays in DRAM only, or leaves at once where its bytes proved bad.

        Where its tenant's quota ``denied`` it a place, nobody owes it to become durable: no drain waits for that.
        """
        with self._lock:
            block.ours = block.ours and not denied
            self._written(block)
            if corrupt and block.dram is not None and block.pins == 0:
                self._evict_dram(block)

    def allocate_nvme(
        self, node_volume: NodeVolume, shape: BlockShape, count: int, ahead: int
    ) -> tuple[list[Slot] | None, list[Block]]:
        """Slots in a durable volume, or (None, victims): blocks whose removal must be committed first (``evicted_nvme``).

        They lie on any durable volume, and make room for ``ahead`` times the count where so many can leave, so that few commits
        only remove; or for some of the count, where blocks of other sizes are in the way: then ask again.
        """
        with self._lock:
            slots = node_volume.volume.allocate(shape, count)
            if slots is not None:
                return slots, []
            victims = first_victims(self) if self.accounts.in_force else []
            if not victims:
                victims = self._durable.victims(node_volume, shape, (count * ahead, count), self._no_loss, self._dispensable)
                for block in victims:
                    block.leave()
                self.accounts.count_pinned(victims, self._counters)
            return None, victims

    def evicted_nvme(self, node_volume: NodeVolume, victims: Sequence[Block]) -> None:
        """The catalog no longer holds ``victims``: their slots may be used again."""
        with self._lock:
            for block in victims:
                for_quota = block.stay() is Leaving.FOR_QUOTA
                if block.nvme is None or block.nvme_volume is not node_volume:
                    continue
                node_volume.volume.free((block.nvme,))
                self._durable.remove(block, node_volume)
                self._log.removed(node_volume.volume_id, block.key)
                block.unsettle()
                block.expendable = False  # should it leave DRAM too, it is written again first (cascade)
                block.ours = block.ours and not for_quota
                self._drop_if_nowhere(block)
            self._counters.add(node_metrics.EVICTED_NVME_BLOCKS, len(victims))
            self._changed.notify_all()

    def wait_written(self, deadline_s: float) -> bool:
        """Waits until all that waits for write-behind now was written or given up. False where the deadline came first."""
        with self._lock:
            mark = self._enqueued
            while self._finished < mark:
                if not self._wait(self._changed, deadline_s):
                    return False
            return True

    def are_durable(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which blocks outlive this process: here, or on the storage node that they were written to."""
        for node_volume in self.node_volumes:
            node_volume.look_in_place()
        with self._lock:
            found = (self._blocks.get(key) for key in keys)
            return [key in self._gone if block is None else block.durable for key, block in zip(keys, found, strict=True)]

    def not_durable(self, tenant: str | None = None) -> int:
        """How many blocks (of a tenant) that were stored here would not outlive this process."""
        mine = [one for one in self.snapshot() if tenant is None or (one.namespace.spec and one.namespace.spec.tenant == tenant)]
        return sum(block.ours and not block.durable for block in mine)

    def write_again(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> int:
        """Sends those of the keys to write-behind that lie in DRAM only: given up before, or not meant to be kept. How many."""
        if not self._writes_behind:
            return 0
        sent = 0
        with self._lock:
            for key in keys:
                block = self._blocks.get(key)
                if block is None or block.namespace is not namespace or block.dram is None or block.nvme is not None:
                    continue
                if not block.elsewhere and not block.pending:
                    self._enqueue(block)
                    sent += 1
        return sent

    def spare(self, keys: Container[BlockKey]) -> None:
        """These do not leave the durable volumes for the sake of others, until this is called again."""
        with self._lock:
            self._spared = keys

    def give_up_pending(self) -> int:
        """Nothing that waits for write-behind now is written any more: as if each had failed. What is being written goes on."""
        with self._lock:
            given_up, self._pending = self._pending, deque()
            self._in_write += len(given_up)  # taken, and handed back at once
            for block in given_up:
                self._written(block)
            return len(given_up)

    # ---- eviction on demand
    def evict_dram(self) -> int:
        """Drops from DRAM whatever is not pinned and may leave as it is. Returns how many blocks."""
        with self._lock:
            victims = list(self._arena.coldest())
            for key, _ in victims:
                self._evict_dram(self._blocks[key])
            self._changed.notify_all()
            return len(victims)

    def nvme_victims(self, node_volume: NodeVolume) -> list[Block]:
        """All unpinned blocks of a durable volume, children first: on their way out, for ``evicted_nvme``."""
        with self._lock:
            victims = [self._blocks[key] for key, _ in self._durable.coldest(node_volume, self._idle)]
            for block in victims:
                block.leave()
            return victims

    def stay_on_nvme(self, victims: Sequence[Block]) -> None:
        """The catalog could not be changed: victims stay."""
        with self._lock:
            for block in victims:
                block.stay()
            self._changed.notify_all()

    # ---- looking
    def snapshot(self) -> list[Block]:
        """All blocks, parents before children where both came in order. For inventories."""
        with self._lock:
            return list(self._blocks.values())

    def warmth(self, keys: Sequence[BlockKey]) -> list[int]:
        """How late blocks would leave DRAM: a number each, the larger the later; what does not lie there: 0."""
        with self._lock:
            return self._arena.warmth(keys)

    def counts(self) -> tuple[int, int]:
        """Blocks in the table, and blocks waiting for write-behind."""
        with self._lock:
            return len(self._blocks), len(self._pending) + self._in_write

    def close(self) -> None:
        """Wakes everybody who waits; waits end unsuccessfully."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            self._has_pending.notify_all()

    def check(self) -> None:
        """Asserts the invariants."""
        with self._lock:
            check_invariants(self)

    # ---- inside the lock
    def _wait(self, condition: threading.Condition, deadline_s: float) -> bool:
        left_s = deadline_s - self._clock.now_s()
        return left_s > 0 and not self._closed and wait(condition, left_s, self._counters)

    def _allocate(self, shape: BlockShape, count: int) -> list[Slot] | None:
        while (slots := self.dram.allocate(shape, count)) is None:
            if self.accounts.in_force and give_first(self):
                continue
            leaving, cold = self._arena.victims(shape, count)
            if self._cascades_chains:
                cold = with_parents(self._blocks, cold, self._idle, max(PIECE_BLOCKS, 2 * count))
            for block in cold:  # those that lie in DRAM only are written behind, so that they may leave
                self._enqueue(block)
            self._counters.add(node_metrics.CASCADED_BLOCKS, len(cold))
            if not leaving:
                return None
            for block in leaving:
                self._evict_dram(block)
            self._counters.add(node_metrics.EVICTED_DRAM_BLOCKS, len(leaving))
            self.accounts.count_pinned(leaving, self._counters)
        return slots

    @staticmethod
    def _idle(block: Block) -> bool:
        return block.pins == 0 and not block.moves

    def _dispensable(self, block: Block) -> bool:
        """Whether a block may leave its durable volume for the sake of others."""
        return self._idle(block) and block.key not in self._spared

    def _no_loss(self, block: Block) -> bool:
        """Whether it may, without leaving children in DRAM that no lookup finds."""
        return self._dispensable(block) and (block.dram is not None or not self._dram_policy.is_parent(block.key))

    def _set_dram(self, block: Block, slot: Slot) -> None:
        block.dram = slot
        self._arena.insert(block, slot)
        self._log.stored(self.dram.volume_id, block)
        if block.key in self._vigils:
            self._end_vigils(block)

    def _end_vigils(self, block: Block) -> None:
        """A block that somebody waits for is there: theirs before it can leave again."""
        others: list[KeyWaiter] = []
        for vigil in self._vigils.pop(block.key):
            if vigil.namespace is not block.namespace:
                others.append(vigil)
                continue
            for position in vigil.missing.pop(block.key):
                block.pins += 1
                vigil.came.append((position, block))
        if others:
            self._vigils[block.key] = others

    def _set_nvme(self, block: Block, node_volume: NodeVolume, slot: Slot) -> None:
        block.settle(node_volume, slot)
        block.expendable = True
        self._durable.insert(block)
        self._log.stored(node_volume.volume_id, block)

    def _let_go(self, block: Block) -> None:
        """Nobody has a block pinned any more that never arrived whole, or was only passing through."""
        if block.arriving:
            assert block.dram is not None
            self.dram.free((block.dram,))
            block.dram = None
        elif block.dram is not None and block.expendable and self._idle(block) and (block.durable or not block.ours):
            self._evict_dram(block)

    def _evict_dram(self, block: Block) -> None:
        assert block.dram is not None
        self._log.removed(self.dram.volume_id, block.key)
        self._arena.remove(block, block.dram)
        self.dram.free((block.dram,))
        block.dram = None
        block.forget_checksums()
        self._drop_if_nowhere(block)

    def _drop_if_nowhere(self, block: Block) -> None:
        if block.dram is None and block.nvme_volume is None and self._blocks.get(block.key) is block:
            del self._blocks[block.key]
            if block.elsewhere:
                self._gone.add(block.key)

    def _enqueue(self, block: Block) -> None:
        block.pending = True
        self._pending.append(block)
        self._enqueued += 1
        self._pending_bytes += block.namespace.shape.block_bytes
        self._has_pending.notify()

    def _written(self, block: Block) -> None:
        block.pending = False
        block.expendable = True  # also where it could not be written: it must not clog the arena
        self._pending_bytes -= block.namespace.shape.block_bytes
        self._in_write -= 1
        self._finished += 1
        if block.passing and block.pins == 0:
            self._let_go(block)
        self._changed.notify_all()
