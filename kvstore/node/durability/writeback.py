"""Write-behind: takes completed blocks from DRAM to where they are durable, in batches, in the order of their completion.

Order is what makes it safe. Per batch: verify the bytes in DRAM against the producer's checksums, write header and data, commit
(sync data, then the catalog's transaction), and only then does the table call the blocks durable. ``WRITERS`` batches are
written at once, so that the disk has work while one of them ends and commits; but they commit and are reported in the order of
completion: a batch waits for its *turn*. Where room is needed, victims leave the catalog first, in a commit of their own, and
only then are their slots used again: at no instant does the catalog name a slot with other content.

A target that fails is left alone for ``REST_S``; blocks that come meanwhile stay in DRAM only, counted: stores are skipped, reads
go on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from kvstore.core.buffers import ScatteredBlocks
from kvstore.core.checksum import verify
from kvstore.core.clock import Clock
from kvstore.core.errors import Conflict, KVStoreError
from kvstore.core.types import StoreOutcome
from kvstore.node.base.volume_guard import VolumeStalled
from kvstore.node.eviction.on_demand import evict_from_volume
from kvstore.node.eviction.quotas import WriteAllowance, claim_durable, unclaim_durable
from kvstore.node.loads.peers import PeerAddress, Peers
from kvstore.node.state.change_log import runs_of
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.failure_tracker import FailureTracker
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.tiers.contract import Slot
from kvstore.transport.contract import WriteRequest

log = logging.getLogger(__name__)
_limited = LimitedLog(log)

BATCH_BLOCKS = 1024
BATCH_BYTES = 32 << 20
PAUSE_EVERY_BYTES = 1 << 20
PAUSE_S = 1e-5
WRITERS = 3
"""Batches written at once."""
REST_S = 2.0
_STALL_LOG_S = 10.0
IDLE_WAIT_S = 0.5
REMOTE_DEADLINE_S = 30.0
CLAIM_TRIES = 8
"""Times that a tenant's coldest blocks leave for a batch of it, while others of it take what they left."""
EVICT_AHEAD = 4
"""Room is made for so many batches at once, so that few commits only remove."""


class Target(Protocol):
    """Where blocks become durable."""

    def persist(self, blocks: Sequence[Block], turn: Callable[[], None]) -> None:
        """Makes blocks of one namespace durable and tells the table, exactly once for each, what became of it.

        Called by several threads at once. ``turn`` returns once all that was handed over before is done and reported; it comes
        before a block is made durable or reported.
        """


class LocalTarget:
    """This node's own NVMe volumes; each batch goes to the one with the most room, of those that can hold such blocks at all."""

    def __init__(self, table: BlockTable, counters: Counters, clock: Clock) -> None:
        self._table = table
        self._counters = counters
        self._clock = clock

    def persist(self, blocks: Sequence[Block], turn: Callable[[], None]) -> None:
        namespace = blocks[0].namespace
        leave = self._claim(namespace, len(blocks))
        try:
            self._persist(blocks[: leave.blocks], turn)
        finally:
            unclaim_durable(self._table.residency, leave)
        if denied := blocks[leave.blocks :]:
            turn()
            self._counters.add(node_metrics.WRITE_BEHIND_BEYOND_QUOTA_BLOCKS, len(denied))
            for block in denied:
                self._table.writeback_failed(block, denied=True)

    def _claim(self, namespace: NodeNamespace, wanted: int) -> WriteAllowance:
        """How many leading blocks their tenant's share lets come to the volumes; its coldest have left for them."""
        for _ in range(CLAIM_TRIES):
            leave = claim_durable(self._table.residency, namespace, wanted)
            if not leave.victims:
                return leave
            self._leave(None, leave.victims)
        return WriteAllowance(0)

    def _persist(self, blocks: Sequence[Block], turn: Callable[[], None]) -> None:
        if not blocks:
            return
        shape = blocks[0].namespace.shape
        node_volumes = [node_volume for node_volume in self._table.node_volumes if node_volume.volume.fits(shape)]
        if not node_volumes:
            self._counters.add(node_metrics.WRITE_BEHIND_UNFIT_BLOCKS, len(blocks))
            _limited.warning("blocks of %d bytes fit no volume of this node: they stay in DRAM only", shape.block_bytes)
        for node_volume in sorted(node_volumes, key=self._room, reverse=True):
            if node_volume.resting_until_s > self._clock.now_s() or not node_volume.guard.takes_changes:
                continue
            left = self._write(node_volume, blocks, turn)
            if not left:
                return
            blocks = left
        turn()
        self._counters.add(node_metrics.WRITE_BEHIND_DROPPED_BLOCKS, len(blocks))
        for block in blocks:
            self._table.writeback_failed(block)

    @staticmethod
    def _room(node_volume: NodeVolume) -> int:
        usage = node_volume.volume.usage()
        return usage.capacity_bytes - usage.used_bytes

    def _write(self, node_volume: NodeVolume, blocks: Sequence[Block], turn: Callable[[], None]) -> list[Block]:
        """Writes to one volume; returns the blocks it did not take."""
        slots = self._slots(node_volume, blocks)
        taken, left = blocks[: len(slots)], list(blocks[len(slots) :])
        if not taken:
            return left
        view = self._table.dram.view
        items = []
        for block, slot in zip(taken, slots, strict=True):
            assert block.dram is not None  # pending blocks do not leave DRAM
            items.append((slot, block.record(), view(block.dram, block.namespace.shape.block_bytes)))
        try:
            errors = node_volume.guard.change(lambda: node_volume.volume.write(items), lambda _: node_volume.volume.free(slots))
        except VolumeStalled as error:
            self._stalled(node_volume, error)
            return list(blocks)
        written = [(block, slot) for block, slot, error in zip(taken, slots, errors, strict=True) if error is None]
        failed = [(block, slot, error) for block, slot, error in zip(taken, slots, errors, strict=True) if error is not None]
        turn()

        def late(error: BaseException | None) -> None:
            """The commit ended after its blocks were given up: the catalog must not name their slots."""
            try:
                if error is None:
                    node_volume.guard.timed(lambda: node_volume.volume.commit([], [block.key for block, _ in written]))
            except (OSError, KVStoreError) as failure:
                log.warning("volume keeps blocks until restart: %s (blocks=%d): %s", node_volume.volume_id, len(written), failure)
            else:
                node_volume.volume.free([slot for _, slot in written])

        entries = [(slot, block.record()) for block, slot in written]
        try:
            node_volume.guard.change(lambda: node_volume.volume.commit(entries, []), late)
        except VolumeStalled as error:
            self._stalled(node_volume, error)
            node_volume.volume.free([slot for _, slot, _ in failed])
            return list(blocks)
        except (OSError, KVStoreError) as error:
            failed += [(block, slot, error) for block, slot in written]
            written = []
        else:
            if written:
                node_volume.failing.succeeded(self._clock.now_s())
        for block, slot in written:
            self._table.writeback_done(block, node_volume, slot)
        self._counters.add(node_metrics.WRITE_BEHIND_BLOCKS, len(written))
        if failed:
            self._rest(node_volume, failed[0][2])
            node_volume.volume.free([slot for _, slot, _ in failed])
            left += [block for block, _, _ in failed]
        return left

    def _slots(self, node_volume: NodeVolume, blocks: Sequence[Block]) -> list[Slot]:
        """Slots for as many leading blocks as room can be made for."""
        shape, count = blocks[0].namespace.shape, len(blocks)
        while count:
            slots, victims = self._table.allocate_nvme(node_volume, shape, count, ahead=EVICT_AHEAD)
            if slots is not None:
                return slots
            if not victims:
                count //= 2
            elif not self._leave(node_volume, victims):
                return []
        return []

    def _leave(self, node_volume: NodeVolume | None, victims: Sequence[Block]) -> bool:
        """Victims leave their volumes, for the sake of room on ``node_volume``, if that is why. False: that one's do not."""
        left = True
        for each in self._table.node_volumes:
            theirs = [block for block in victims if block.nvme_volume is each]
            try:
                evict_from_volume(self._table, each, theirs)
            except VolumeStalled as error:
                self._stalled(each, error)
                left = left and each is not node_volume
            except (OSError, KVStoreError) as error:
                self._rest(each, error)
                left = left and each is not node_volume
        return left

    def _stalled(self, node_volume: NodeVolume, error: VolumeStalled) -> None:
        """Count a stall. The volume's guard refuses writes until it answers, so no rest is needed."""
        self._counters.add(node_metrics.WRITE_BEHIND_ERRORS)
        _limited.warning("%s does not take blocks: %s", node_volume.volume_id, error)

    def _rest(self, node_volume: NodeVolume, error: Exception) -> None:
        self._counters.add(node_metrics.WRITE_BEHIND_ERRORS)
        log.warning("%s does not take blocks (%s); it is left alone for %.0f s", node_volume.volume_id, error, REST_S)
        now_s = self._clock.now_s()
        node_volume.failing.failed(now_s, error)
        node_volume.resting_until_s = now_s + REST_S


class RemoteTarget:
    """A storage node: blocks are durable once it says so."""

    def __init__(
        self, table: BlockTable, peers: Peers, find: FindNode, counters: Counters, clock: Clock, failing: FailureTracker
    ) -> None:
        self._failing = failing
        self._table = table
        self._peers = peers
        self._find = find
        self._counters = counters
        self._clock = clock
        self._resting_until = 0.0

    def persist(self, blocks: Sequence[Block], turn: Callable[[], None]) -> None:
        turn()  # the storage node, too, takes parents before their children
        durable: set[int] = set()
        if self._resting_until <= self._clock.now_s():
            try:
                durable = self._send(blocks[0].namespace, blocks)
            except KVStoreError as error:
                self._counters.add(node_metrics.WRITE_BEHIND_ERRORS)
                log.warning("the storage node does not take blocks (%s); it is left alone for %.0f s", error, REST_S)
                self._failing.failed(self._clock.now_s(), error)
                self._resting_until = self._clock.now_s() + REST_S
            else:
                self._failing.succeeded(self._clock.now_s())
        self._counters.add(node_metrics.WRITE_BEHIND_BLOCKS, len(durable))
        self._counters.add(node_metrics.WRITE_BEHIND_DROPPED_BLOCKS, len(blocks) - len(durable))
        for block in blocks:
            if id(block) in durable:
                self._table.writeback_done(block, None, None)
            else:
                self._table.writeback_failed(block)

    def _send(self, namespace: NodeNamespace, blocks: Sequence[Block]) -> set[int]:
        peer = self._peers.peer(self._find(), namespace)
        shape = namespace.shape
        by_key = {block.key: block for block in blocks}
        durable: set[int] = set()
        for run in runs_of(blocks):
            parts = [by_key[key] for key in run.keys]
            source = ScatteredBlocks(
                [self._table.dram.view(block.dram, shape.block_bytes) for block in parts if block.dram is not None], shape
            )
            checksums = np.frombuffer(b"".join(block.checksums for block in parts), "<u8").reshape(len(parts), shape.layers)
            request = WriteRequest(run, shape, durable=True, deadline_s=self._clock.now_s() + REMOTE_DEADLINE_S)
            try:
                outcomes = peer.write(request, source, checksums)
            except Conflict as error:  # these blocks' affair, not the storage node's
                self._counters.add(node_metrics.WRITE_BEHIND_CONFLICTS)
                _limited.warning("the storage node holds a block elsewhere: %s", error)
                continue
            kept = (StoreOutcome.STORED, StoreOutcome.EXISTS)
            durable |= {id(block) for block, outcome in zip(parts, outcomes, strict=True) if outcome in kept}
        return durable


class FindNode(Protocol):
    """Finds the storage node."""

    def __call__(self) -> PeerAddress:
        """Its addresses now.

        Raises:
            KVStoreError: it is not known or not alive.
        """


class Turns:
    """Who comes when: batches are numbered as they are handed over, and done in that order."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._done = 0
        self._changed = threading.Condition()

    def wait(self, number: int) -> None:
        """Waits until all before ``number`` are done: as long as their I/O takes, which ends in some way."""
        with self._changed:
            while self._done < number:
                if not self._changed.wait(_STALL_LOG_S):
                    self._counters.add(node_metrics.WRITE_BEHIND_STALLS)
                    log.warning("write-behind waits for a batch that has not ended for %.0f s", _STALL_LOG_S)

    def done(self, number: int) -> None:
        """``number`` is done, and so is all before it."""
        self.wait(number)
        with self._changed:
            self._done = number + 1
            self._changed.notify_all()


class WriteBehind:
    """The threads that carry blocks to the target: one checks their bytes while the others write those before."""

    def __init__(self, table: BlockTable, target: Target, counters: Counters) -> None:
        self._table = table
        self._target = target
        self._counters = counters
        self._stopping = threading.Event()
        self._checked: queue.Queue[tuple[int, list[Block]] | None] = queue.Queue(maxsize=1)
        self._turns = Turns(counters)
        writers = [
            threading.Thread(target=self._persist_for_ever, name=f"kvstore-write-behind-{number}", daemon=True)
            for number in range(WRITERS)
        ]
        self._threads = [
            threading.Thread(target=self._check_for_ever, name="kvstore-write-behind-check", daemon=True),
            *writers,
        ]

    def start(self) -> None:
        """Begins."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> None:
        """Finishes the batches under way and ends; what still waits stays in DRAM."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout_s)

    def _check_for_ever(self) -> None:
        number = 0
        while not self._stopping.is_set():
            blocks = self._table.take_pending(BATCH_BLOCKS, BATCH_BYTES, IDLE_WAIT_S)
            try:
                sound = self._sound_of(blocks)
            except Exception as bug:  # noqa: BLE001  # process edge, as below
                self._failed(blocks, bug)
                continue
            if sound:
                self._checked.put((number, sound))
                number += 1
        for _ in range(WRITERS):
            self._checked.put(None)

    def _persist_for_ever(self) -> None:
        while (batch := self._checked.get()) is not None:
            number, blocks = batch
            try:
                self._target.persist(blocks, partial(self._turns.wait, number))
            except Exception as bug:  # noqa: BLE001  # process edge: it must not end write-behind for good
                self._turns.wait(number)
                self._failed(blocks, bug)
            self._turns.done(number)

    def _failed(self, blocks: Sequence[Block], bug: Exception) -> None:
        """None of them stays pending."""
        self._counters.add(node_metrics.WRITE_BEHIND_BUGS)
        log.error("write-behind of %d blocks failed", len(blocks), exc_info=bug)
        for block in blocks:
            if block.writing:
                self._table.writeback_failed(block)

    def _sound_of(self, blocks: Sequence[Block]) -> list[Block]:
        """Those whose bytes match; with pauses that let the writers go on.

        A thread that hashes short Layer Blocks lets go of the interpreter lock and takes it again before anybody has woken
        up: the writers would get it every few milliseconds only. A pause, however short, hands it over. Measured: a durable
        store is a seventh faster.
        """
        sound = []
        since_pause = 0
        for block in blocks:
            if since_pause >= PAUSE_EVERY_BYTES:
                time.sleep(PAUSE_S)
                since_pause = 0
            since_pause += block.namespace.shape.block_bytes
            if self._sound(block):
                sound.append(block)
        return sound

    def _sound(self, block: Block) -> bool:
        """Whether the bytes in DRAM are those that the producer summed; if not, the block leaves at once."""
        shape = block.namespace.shape
        assert block.dram is not None
        if verify(self._table.dram.view(block.dram, shape.block_bytes), shape, block.checksums):
            return True
        self._counters.add(node_metrics.WRITE_BEHIND_CORRUPT_BLOCKS)
        log.error("block %s in DRAM does not match its checksums: dropped", block.key.hex())
        self._table.writeback_failed(block, corrupt=True)
        return False
