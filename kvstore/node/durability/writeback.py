"""Write-back of completed blocks from DRAM to durable volumes, in batches, in the order of their completion.

Theory of operation.

1. A batch is verified against the producer's checksums, then header and data are written, then it is committed: the data is
   synced, and the catalog's transaction follows. Only then does the table mark the blocks durable.
2. ``WRITERS`` batches are written at once, so that the disk is busy while one of them commits. They commit and are reported in
   the order of completion: each batch waits for its turn (``CommitOrder``).
3. If a volume is full, its victims are removed from the catalog in an earlier commit, and only then are their slots reused. So
   the catalog never names a slot with the content of another block.
4. A target that fails is not used for ``BACKOFF_S``. Blocks that are completed in that time stay in DRAM only, and are counted.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from kvstore.core.buffers import ScatteredBlocks
from kvstore.core.checksum import block_checksums
from kvstore.core.clock import Clock
from kvstore.core.errors import Conflict, KVStoreError
from kvstore.core.types import StoreOutcome
from kvstore.node.base.volume_guard import VolumeStalled
from kvstore.node.eviction.allocation import allocate_nvme
from kvstore.node.eviction.quotas import WriteAllowance, release_durable, reserve_durable
from kvstore.node.eviction.volume_commits import by_volume, evict_from_volume
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
WRITERS = 3
"""Batches written at once."""
BACKOFF_S = 2.0
_STALL_LOG_S = 10.0
IDLE_WAIT_S = 0.5
REMOTE_DEADLINE_S = 30.0
RESERVE_TRIES = 8
"""Attempts to evict a tenant's coldest blocks for a batch, while its other batches use the freed share."""
EVICT_AHEAD = 4
"""An eviction frees space for this many batches, so that few commits only remove."""


class WriteTarget(Protocol):
    """A destination where blocks become durable."""

    def persist(self, blocks: Sequence[Block], wait_turn: Callable[[], None]) -> None:
        """Make blocks of one namespace durable, and report each to the table exactly once.

        The report is ``BlockTable.writeback_done`` or ``BlockTable.writeback_failed``.
        Several threads call this at once. ``wait_turn`` returns after all earlier batches are committed and reported. It must be
        called before a block is committed or reported.
        """


class _FailedWrite(NamedTuple):
    """A block that a volume did not accept."""

    block: Block
    slot: Slot
    error: Exception


class _WrittenBatch(NamedTuple):
    """Result of a write, or of a write and its commit."""

    written: Sequence[tuple[Block, Slot]]
    failed: Sequence[_FailedWrite]


class LocalTarget:
    """The node's own volumes. A batch goes to the volume with the most free space, of those that can hold such blocks."""

    def __init__(self, table: BlockTable, counters: Counters, clock: Clock) -> None:
        self._table = table
        self._counters = counters
        self._clock = clock

    def persist(self, blocks: Sequence[Block], wait_turn: Callable[[], None]) -> None:
        namespace = blocks[0].namespace
        allowance = self._reserve(namespace, len(blocks))
        try:
            self._persist(blocks[: allowance.blocks], wait_turn)
        finally:
            release_durable(self._table.residency, allowance)
        if denied := blocks[allowance.blocks :]:
            wait_turn()
            self._counters.add(node_metrics.WRITE_BACK_BEYOND_QUOTA_BLOCKS, len(denied))
            for block in denied:
                self._table.writeback_failed(block, denied=True)

    def _reserve(self, namespace: NodeNamespace, count: int) -> WriteAllowance:
        """Reserve space in the tenant's share for as many leading blocks as possible, evicting its coldest blocks."""
        for _ in range(RESERVE_TRIES):
            allowance = reserve_durable(self._table.residency, namespace, count)
            if not allowance.victims:
                return allowance
            self._evict(None, allowance.victims)
        return WriteAllowance(0)

    def _persist(self, blocks: Sequence[Block], wait_turn: Callable[[], None]) -> None:
        if not blocks:
            return
        shape = blocks[0].namespace.shape
        node_volumes = [node_volume for node_volume in self._table.node_volumes if node_volume.volume.fits(shape)]
        if not node_volumes:
            self._counters.add(node_metrics.WRITE_BACK_UNFIT_BLOCKS, len(blocks))
            _limited.warning("blocks stay in DRAM only: no volume of this node fits them (block_bytes=%d)", shape.block_bytes)
        for node_volume in sorted(node_volumes, key=self._free_bytes, reverse=True):
            if node_volume.resting_until_s > self._clock.now_s() or not node_volume.guard.takes_changes:
                continue
            remaining = self._write(node_volume, blocks, wait_turn)
            if not remaining:
                return
            blocks = remaining
        wait_turn()
        self._counters.add(node_metrics.WRITE_BACK_DROPPED_BLOCKS, len(blocks))
        for block in blocks:
            self._table.writeback_failed(block)

    @staticmethod
    def _free_bytes(node_volume: NodeVolume) -> int:
        usage = node_volume.volume.usage()
        return usage.capacity_bytes - usage.used_bytes

    def _write(self, node_volume: NodeVolume, blocks: Sequence[Block], wait_turn: Callable[[], None]) -> list[Block]:
        """Write to one volume: allocate slots, write, wait for the turn of the batch, commit, report to the table.

        Where a step fails, the volume does not accept the block:

        | failure | blocks not accepted | their slots are freed |
        |---|---|---|
        | there is no slot | those without a slot | they have none |
        | the write stalls | all of the call | when the write has ended |
        | the write of a block fails | this block | after the commit of the others |
        | the commit stalls | all of the call | when the commit has ended and was undone |
        | the commit fails | all with a slot | at once |

        Returns:
            The blocks that it did not accept.
        """
        slots = self._slots(node_volume, blocks)
        accepted, remaining = blocks[: len(slots)], list(blocks[len(slots) :])
        if not accepted:
            return remaining
        try:
            batch = self._write_slots(node_volume, accepted, slots)
        except VolumeStalled as error:
            self._stalled(node_volume, error)
            return list(blocks)
        wait_turn()
        try:
            batch = self._commit(node_volume, batch)
        except VolumeStalled as error:
            self._stalled(node_volume, error)
            node_volume.volume.free([one.slot for one in batch.failed])
            return list(blocks)
        for block, slot in batch.written:
            self._table.writeback_done(block, node_volume, slot)
        self._counters.add(node_metrics.WRITE_BACK_BLOCKS, len(batch.written))
        if batch.failed:
            self._back_off(node_volume, batch.failed[0].error)
            node_volume.volume.free([one.slot for one in batch.failed])
            remaining += [one.block for one in batch.failed]
        return remaining

    def _write_slots(self, node_volume: NodeVolume, blocks: Sequence[Block], slots: Sequence[Slot]) -> _WrittenBatch:
        """Write headers and data of blocks. They are not durable yet.

        Raises:
            VolumeStalled: the write did not end in time, or was refused. The slots are freed when it has ended.
        """
        view, volume = self._table.dram.view, node_volume.volume
        items = []
        try:
            for block, slot in zip(blocks, slots, strict=True):
                assert block.dram is not None  # blocks that are being written are not evicted
                items.append((slot, block.record(), view(block.dram, block.namespace.shape.block_bytes)))
            errors = node_volume.guard.change(lambda: volume.write(items), lambda _: volume.free(slots))
        except VolumeStalled:
            raise
        except BaseException:  # a bug; no write is in progress. After one in the commit, the catalog may name the slots
            volume.free(slots)
            raise
        outcomes = list(zip(blocks, slots, errors, strict=True))
        return _WrittenBatch(
            [(block, slot) for block, slot, error in outcomes if error is None],
            [_FailedWrite(block, slot, error) for block, slot, error in outcomes if error is not None],
        )

    def _commit(self, node_volume: NodeVolume, batch: _WrittenBatch) -> _WrittenBatch:
        """Sync and commit what was written. Returns the batch; if the commit failed, with all of its blocks as failed.

        Raises:
            VolumeStalled: the commit did not end in time, or was refused. ``_undo_late_commit`` frees the written slots.
        """
        entries = [(slot, block.record()) for block, slot in batch.written]
        try:
            node_volume.guard.change(
                lambda: node_volume.volume.commit(entries, []), partial(self._undo_late_commit, node_volume, batch.written)
            )
        except VolumeStalled:
            raise
        except (OSError, KVStoreError) as error:
            return _WrittenBatch([], [*batch.failed, *(_FailedWrite(block, slot, error) for block, slot in batch.written)])
        if batch.written:
            node_volume.failing.succeeded(self._clock.now_s())
        return batch

    @staticmethod
    def _undo_late_commit(node_volume: NodeVolume, written: Sequence[tuple[Block, Slot]], error: BaseException | None) -> None:
        """Settle a commit that ended after its blocks were given up: the catalog must not name their slots.

        Args:
            node_volume: the volume.
            written: the blocks of the commit.
            error: why the commit failed; None: it succeeded.
        """
        try:
            if error is None:
                node_volume.guard.timed(lambda: node_volume.volume.commit([], [block.key for block, _ in written]))
        except (OSError, KVStoreError) as failure:
            log.warning("volume keeps blocks until restart: %s (blocks=%d): %s", node_volume.volume_id, len(written), failure)
        else:
            node_volume.volume.free([slot for _, slot in written])

    def _slots(self, node_volume: NodeVolume, blocks: Sequence[Block]) -> list[Slot]:
        """Allocate slots for as many leading blocks as possible, evicting others."""
        shape, count = blocks[0].namespace.shape, len(blocks)
        while count:
            slots, victims = allocate_nvme(self._table.residency, node_volume, shape, count, ahead=EVICT_AHEAD)
            if slots is not None:
                return slots
            if not victims:
                count //= 2
            elif not self._evict(node_volume, victims):
                return []
        return []

    def _evict(self, node_volume: NodeVolume | None, victims: Sequence[Block]) -> bool:
        """Evict victims from their volumes. False: those on ``node_volume`` could not be evicted."""
        evicted, bug = True, None
        for each, theirs in by_volume(victims):
            try:
                evict_from_volume(self._table, each, theirs)
            except VolumeStalled as error:
                self._stalled(each, error)
                evicted = evicted and each is not node_volume
            except (OSError, KVStoreError) as error:
                self._back_off(each, error)
                evicted = evicted and each is not node_volume
            except Exception as error:  # noqa: BLE001  # no victim of another volume may stay marked
                bug = error
        if bug is not None:
            raise bug
        return evicted

    def _stalled(self, node_volume: NodeVolume, error: VolumeStalled) -> None:
        """Count a stall. The volume's guard refuses writes until it answers, so no back-off is needed."""
        self._counters.add(node_metrics.WRITE_BACK_ERRORS)
        _limited.warning("write-back stalled: volume %s: %s", node_volume.volume_id, error)

    def _back_off(self, node_volume: NodeVolume, error: Exception) -> None:
        self._counters.add(node_metrics.WRITE_BACK_ERRORS)
        log.warning("write-back failed: volume %s (error=%s, backoff=%.0f s)", node_volume.volume_id, error, BACKOFF_S)
        now_s = self._clock.now_s()
        node_volume.failing.failed(now_s, error)
        node_volume.resting_until_s = now_s + BACKOFF_S


class RemoteTarget:
    """A storage node: blocks are durable after it reports so."""

    def __init__(
        self, table: BlockTable, peers: Peers, find: FindNode, counters: Counters, clock: Clock, failing: FailureTracker
    ) -> None:
        self._failing = failing
        self._table = table
        self._peers = peers
        self._find = find
        self._counters = counters
        self._clock = clock
        self._backoff_until_s = 0.0

    def persist(self, blocks: Sequence[Block], wait_turn: Callable[[], None]) -> None:
        wait_turn()  # the storage node, too, stores parents before children
        durable: set[int] = set()
        if self._backoff_until_s <= self._clock.now_s():
            try:
                durable = self._send(blocks[0].namespace, blocks)
            except KVStoreError as error:
                self._counters.add(node_metrics.WRITE_BACK_ERRORS)
                log.warning("write-back failed: storage node (error=%s, backoff=%.0f s)", error, BACKOFF_S)
                self._failing.failed(self._clock.now_s(), error)
                self._backoff_until_s = self._clock.now_s() + BACKOFF_S
            else:
                self._failing.succeeded(self._clock.now_s())
        self._counters.add(node_metrics.WRITE_BACK_BLOCKS, len(durable))
        self._counters.add(node_metrics.WRITE_BACK_DROPPED_BLOCKS, len(blocks) - len(durable))
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
            except Conflict as error:  # a fault of these blocks, not of the storage node
                self._counters.add(node_metrics.WRITE_BACK_CONFLICTS)
                _limited.warning("blocks not written back: conflict on the storage node: %s", error)
                continue
            kept = (StoreOutcome.STORED, StoreOutcome.EXISTS)
            durable |= {id(block) for block, outcome in zip(parts, outcomes, strict=True) if outcome in kept}
        return durable


class FindNode(Protocol):
    """A function that finds the storage node."""

    def __call__(self) -> PeerAddress:
        """Return its current addresses.

        Raises:
            KVStoreError: the storage node is unknown or not alive.
        """


class CommitOrder:
    """Makes batches commit in the order of their numbers."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._done = 0
        self._changed = threading.Condition()

    def wait(self, number: int) -> None:
        """Wait until all earlier batches are done. Their I/O bounds the wait."""
        with self._changed:
            while self._done < number:
                if not self._changed.wait(_STALL_LOG_S):
                    self._counters.add(node_metrics.WRITE_BACK_STALLS)
                    log.warning("write-back waits: an earlier batch has not ended (waited=%.0f s)", _STALL_LOG_S)

    def done(self, number: int) -> None:
        """Note that a batch and all earlier ones are done."""
        self.wait(number)
        with self._changed:
            self._done = number + 1
            self._changed.notify_all()


class WriteBack:
    """The threads of write-back: one verifies a batch while the others write earlier ones."""

    def __init__(self, table: BlockTable, target: WriteTarget, counters: Counters) -> None:
        self._table = table
        self._target = target
        self._counters = counters
        self._stopping = threading.Event()
        self._checked: queue.Queue[tuple[int, list[Block]] | None] = queue.Queue(maxsize=1)
        self._order = CommitOrder(counters)
        writers = [
            threading.Thread(target=self._write_loop, name=f"kvstore-write-back-{number}", daemon=True)
            for number in range(WRITERS)
        ]
        self._threads = [
            threading.Thread(target=self._verify_loop, name="kvstore-write-back-check", daemon=True),
            *writers,
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> None:
        """Finish the batches in progress and stop. Blocks that wait stay in DRAM."""
        self._stopping.set()
        self._table.wake_write_back()
        for thread in self._threads:
            thread.join(timeout_s)

    def _verify_loop(self) -> None:
        number = 0
        while not self._stopping.is_set():
            blocks: Sequence[Block] = ()
            try:
                blocks = self._table.take_pending(BATCH_BLOCKS, BATCH_BYTES, IDLE_WAIT_S)
                valid = self._verified(blocks)
            except Exception as bug:  # noqa: BLE001  # thread edge, as below
                self._failed(blocks, bug)
                continue
            if valid:
                self._checked.put((number, valid))
                number += 1
        for _ in range(WRITERS):
            self._checked.put(None)

    def _write_loop(self) -> None:
        while (batch := self._checked.get()) is not None:
            number, blocks = batch
            try:
                self._target.persist(blocks, partial(self._order.wait, number))
            except Exception as bug:  # noqa: BLE001  # thread edge: write-back must go on
                self._order.wait(number)
                self._failed(blocks, bug)
            finally:
                self._order.done(number)

    def _failed(self, blocks: Sequence[Block], bug: Exception) -> None:
        """Report a batch that failed with an unexpected error: no block of it may stay in the queue."""
        self._counters.add(node_metrics.WRITE_BACK_BUGS)
        log.error("write-back failed: unexpected error (blocks=%d)", len(blocks), exc_info=bug)
        for block in blocks:
            if block.writing:
                try:
                    self._table.writeback_failed(block)
                except Exception:  # thread edge: the others must be reported
                    log.exception("block not reported: unexpected error (key=%s)", block.key.hex())

    def _verified(self, blocks: Sequence[Block]) -> list[Block]:
        """Return the blocks, all of one namespace, whose bytes match their producers' checksums. The others are dropped."""
        if not blocks:
            return []
        shape = blocks[0].namespace.shape
        views = [self._table.dram.view(block.dram, shape.block_bytes) for block in blocks if block.dram is not None]
        assert len(views) == len(blocks), "blocks that are being written are not evicted"
        found = block_checksums(ScatteredBlocks(views, shape), range(len(blocks))).astype("<u8", copy=False)
        valid = []
        for block, checksums in zip(blocks, found, strict=True):
            if checksums.tobytes() == block.checksums:
                valid.append(block)
                continue
            self._counters.add(node_metrics.WRITE_BACK_CORRUPT_BLOCKS)
            log.error("block dropped: corrupt in DRAM (key=%s)", block.key.hex())
            self._table.writeback_failed(block, corrupt=True)
        return valid
