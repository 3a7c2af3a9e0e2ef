"""Checking a durable volume while the node serves: every block is read whole and compared with its header and checksums.

A disk that loses bits says so only when it is read, and what nobody loads nobody reads. A check reads what a volume holds when it
begins, in the order of the slots, beside everything else and at a bounded rate. What is bad leaves as what a load finds bad
does (``quarantine``); where the block lies in DRAM as well it is written anew, which verifies that copy first.

One check of a volume at a time, ``AT_ONCE`` of a node, one read of ``READ_BYTES`` under way each. Blocks are pinned while they
are read and no longer; that they are read is no use of them, so the order of eviction stays. Nothing of a check outlives the
process: a node that was started again knows of none.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvstore.core.clock import Clock
from kvstore.core.errors import Conflict
from kvstore.core.types import Outcome
from kvstore.node.base.volume_guard import VolumeStalled, ignore
from kvstore.node.eviction.on_demand import quarantine
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.process.host_defaults import check_bandwidth
from kvstore.tiers.contract import Slot

log = logging.getLogger(__name__)

AT_ONCE: Final = 2
"""Volumes that are read at once; further ones wait."""
READ_BYTES: Final = 4 << 20
"""The most that one read takes, unless a single block is larger."""
PIN_BLOCKS: Final = 1_024
"""And the most blocks."""
LOGGED_BLOCKS: Final = 20
"""Bad blocks that are named in the log one by one; the end counts them all."""


class CheckState(StrEnum):
    """How far a check is."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


ENDED: Final = frozenset({CheckState.DONE, CheckState.CANCELLED, CheckState.FAILED})


@dataclass(slots=True)
class Check:
    """One check. Written by its thread alone; whoever looks may see it between two counts.

    Attributes:
        operation_id: the caller's, which makes a call that is sent twice begin one check.
        bytes_per_s: the most that it reads, over time.
        blocks: that it is to look at.
        checked_blocks: that it has looked at: ``good``, ``bad``, ``unreadable`` or ``gone`` (before their turn).
        rewritten_blocks: of the bad, those that lay in DRAM too and are written anew.
        began_s: by the node's clock.
        ended_s: likewise; None: it has not.
        why: it failed.
    """

    operation_id: bytes
    bytes_per_s: int
    began_s: float
    state: CheckState = CheckState.WAITING
    blocks: int = 0
    good: int = 0
    bad: int = 0
    unreadable: int = 0
    gone: int = 0
    rewritten_blocks: int = 0
    checked_bytes: int = 0
    ended_s: float | None = None
    why: str = ""
    cancel: threading.Event = field(default_factory=threading.Event)

    @property
    def checked_blocks(self) -> int:
        """Looked at so far."""
        return self.good + self.bad + self.unreadable + self.gone


class VolumeChecks:
    """The checks of one node. Thread-safe; ``close`` once.

    Args:
        table: whose blocks are checked.
        counters: what was found.
        clock: time.
        rate_of: what a volume reads at most, bytes a second; None: not measured.
    """

    def __init__(
        self,
        table: BlockTable,
        counters: Counters,
        clock: Clock,
        rate_of: Callable[[NodeVolume], float | None] = lambda _node_volume: None,
    ) -> None:
        self._table = table
        self._rate_of = rate_of
        self._counters = counters
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, Check] = {}
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kvstore-check")

    def close(self) -> None:
        """Ends them; waits for reads under way."""
        with self._lock:
            for check in self._last.values():
                check.cancel.set()
        self._pool.shutdown(cancel_futures=True)

    def last(self, node_volume: NodeVolume) -> Check | None:
        """The check of a volume that is under way, or the last one since the node was started; None: there was none."""
        with self._lock:
            return self._last.get(node_volume.volume_id)

    def begin(self, node_volume: NodeVolume, operation_id: bytes, bytes_per_s: int) -> Check:
        """Begins a check of a volume in the background.

        Args:
            node_volume: the volume.
            operation_id: with that of the last one, nothing is begun.
            bytes_per_s: the most to read, over time; 0: a part of what the volume reads at most.

        Raises:
            Conflict: one is under way.
        """
        with self._lock:
            before = self._last.get(node_volume.volume_id)
            if before is not None and before.operation_id == operation_id:
                return before
            if before is not None and before.state not in ENDED:
                raise Conflict("the volume is being checked already", volume_id=node_volume.volume_id, state=before.state.value)
            rate = bytes_per_s or check_bandwidth(self._rate_of(node_volume))
            check = self._last[node_volume.volume_id] = Check(operation_id, rate, self._clock.now_s())
            self._pool.submit(self._run, node_volume, check)
        self._counters.add(node_metrics.VOLUME_CHECKS_BEGUN)
        return check

    def cancel(self, node_volume: NodeVolume) -> Check | None:
        """Ends the check of a volume after the read that is under way; what it found bad stays out. None: there was none."""
        check = self.last(node_volume)
        if check is not None:
            check.cancel.set()
        return check

    # ---- in the pool ----
    def _run(self, node_volume: NodeVolume, check: Check) -> None:
        name = node_volume.volume_id
        try:
            blocks = self._held(node_volume)
            check.blocks, check.state = len(blocks), CheckState.RUNNING
            log.info("checking volume %s: %d blocks, at most %d bytes/s", name, len(blocks), check.bytes_per_s)
            self._check(node_volume, blocks, check)
            end = CheckState.CANCELLED if check.cancel.is_set() and check.checked_blocks < check.blocks else CheckState.DONE
        except VolumeStalled as error:
            end, check.why = CheckState.FAILED, str(error)
            log.warning("check of volume failed: %s (%s)", name, error)
        except Exception as error:  # the thread's edge: whoever asks is to learn that it ended, and why
            end, check.why = CheckState.FAILED, f"{type(error).__name__}: {error}"
            self._counters.add(node_metrics.VOLUME_CHECK_BUGS)
            log.exception("the check of volume %s failed", name)
        check.ended_s, check.state = self._clock.now_s(), end
        tell = log.warning if check.bad or check.unreadable else log.info
        tell(
            "check of volume %s %s: %d of %d blocks looked at, %d good, %d bad and taken out (%d of them written anew from DRAM),"
            " %d unreadable, %d had left",
            name, end.value, check.checked_blocks, check.blocks, check.good, check.bad, check.rewritten_blocks, check.unreadable,
            check.gone,
        )  # fmt: skip

    def _held(self, node_volume: NodeVolume) -> list[Block]:
        """What the volume holds, in the order in which it lies there."""
        # the lock is held for a copy alone; what leaves or moves meanwhile is told apart when it is pinned
        found = [
            (slot.offset, block)
            for block in self._table.snapshot()
            if block.nvme_volume is node_volume and (slot := block.nvme) is not None
        ]
        return [block for _, block in sorted(found, key=lambda pair: pair[0])]

    def _check(self, node_volume: NodeVolume, blocks: Sequence[Block], check: Check) -> None:
        largest = max((block.nbytes for block in blocks), default=0)
        memory = memoryview(mmap.mmap(-1, max(READ_BYTES, largest)))
        due_s = self._clock.now_s()
        for batch in batches_of(blocks):
            if check.cancel.wait(max(0.0, due_s - self._clock.now_s())):
                return
            nbytes = self._read(node_volume, batch, check, memory)
            # what a slow disk or a busy host has cost is not made up for by reading faster
            due_s = max(due_s, self._clock.now_s() - nbytes / check.bytes_per_s) + nbytes / check.bytes_per_s

    def _read(self, node_volume: NodeVolume, batch: Sequence[Block], check: Check, memory: memoryview) -> int:
        """Reads some blocks and judges them. Returns how many bytes."""
        pinned = pin_held(self._table, node_volume, batch)
        check.gone += len(batch) - len(pinned)
        try:
            items, at = [], 0
            for block, slot in pinned:
                items.append((slot, block.record(), memory[at : at + block.nbytes]))
                at += block.nbytes
            outcomes = node_volume.guard.read(
                lambda: node_volume.volume.read(items), ignore
            )  # its memory is not used again once that raises
            for (block, slot), outcome in zip(pinned, outcomes, strict=True):
                self._judge(node_volume, block, slot, outcome, check)
        finally:
            self._table.unpin([block for block, _ in pinned])
        check.checked_bytes += at
        self._counters.add(node_metrics.VOLUME_CHECK_BYTES, at)
        return at

    def _judge(self, node_volume: NodeVolume, block: Block, slot: Slot, outcome: Outcome, check: Check) -> None:
        if outcome is Outcome.HIT:
            check.good += 1
            return
        if check.bad + check.unreadable < LOGGED_BLOCKS:
            log.warning("check of %s: block %s: %s", node_volume.volume_id, block.key.hex(), outcome.name)
        self._counters.add(node_metrics.NVME_READ_FAILED_BLOCKS[outcome.name.lower()])
        if outcome is not Outcome.CORRUPT:
            check.unreadable += 1  # the disk may do better another time: a load tries again, too
            return
        check.bad += 1
        quarantine(self._table, node_volume, block, slot, self._counters)
        # only now: before the catalog forgot the bad copy, it would forget the new one with it
        check.rewritten_blocks += self._table.requeue_writeback(block.namespace, [block.key])


def pin_held(table: BlockTable, node_volume: NodeVolume, batch: Sequence[Block]) -> list[tuple[Block, Slot]]:
    """Pins those blocks of a batch that are still on a volume. Their slots stay theirs until they are unpinned."""
    with table.residency.lock:
        pinned = [
            (block, block.nvme)
            for block in batch
            if block.nvme is not None and block.nvme_volume is node_volume and not block.evicting
        ]
        for block, _ in pinned:
            block.pins += 1
    return pinned


def batches_of(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Blocks in groups that one read takes."""
    batch: list[Block] = []
    size = 0
    for block in blocks:
        if batch and (size + block.nbytes > READ_BYTES or len(batch) == PIN_BLOCKS):
            yield batch
            batch, size = [], 0
        batch.append(block)
        size += block.nbytes
    if batch:
        yield batch
