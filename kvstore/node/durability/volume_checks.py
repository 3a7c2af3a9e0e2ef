"""Checks of durable volumes while the node serves: every block is read and compared with its header and checksums.

Lost bits are found only when a block is read, and cold blocks are not read. A check reads the blocks that a volume holds when it
begins, in the order of their slots, at a bounded rate. A corrupt block is quarantined, as if a load had found it. If the block is
also in DRAM, that copy is verified and written back.

A volume has one check at a time, a node ``AT_ONCE``. Each has one read of ``READ_BYTES`` in flight. Blocks are pinned only while
they are read. A check does not count as a use, so it does not change the order of eviction. A restart forgets all checks.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import accumulate
from typing import Final

from kvstore.core.clock import Clock
from kvstore.core.errors import Conflict
from kvstore.core.types import Outcome
from kvstore.node.base.volume_guard import VolumeStalled, ignore
from kvstore.node.eviction.volume_commits import quarantine
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.process.host_defaults import check_bandwidth
from kvstore.process.threads.submission import submit
from kvstore.tiers.contract import BlockRecord, Slot

log = logging.getLogger(__name__)

AT_ONCE: Final = 2
"""Volumes checked at once. Further checks wait."""
READ_BYTES: Final = 4 << 20
"""Maximum size of one read, unless a single block is larger."""
PIN_BLOCKS: Final = 1_024
"""Maximum number of blocks per read."""
LOGGED_BLOCKS: Final = 20
"""Corrupt blocks that are logged one by one. The last log line has their total."""


class CheckState(StrEnum):
    """State of a check."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


ENDED: Final = frozenset({CheckState.DONE, CheckState.CANCELLED, CheckState.FAILED})


@dataclass(slots=True)
class Check:
    """One check. Its thread writes it; readers may see it between two updates.

    Attributes:
        operation_id: of the caller. A retried call does not begin a second check.
        bytes_per_s: maximum read rate.
        blocks: number of blocks to check.
        checked_blocks: blocks that are checked: ``good``, ``bad``, ``unreadable``, or ``gone`` (evicted earlier).
        rewritten_blocks: bad blocks that are written back from DRAM.
        began_s: on the node's clock.
        ended_s: on the node's clock; None: the check has not ended.
        why: reason of a failure.
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
        """Number of blocks that are checked."""
        return self.good + self.bad + self.unreadable + self.gone


class VolumeChecks:
    """The checks of one node. Thread-safe; ``close`` once.

    Args:
        table: the blocks.
        counters: metrics.
        clock: time.
        rate_of: maximum read rate of a volume, in bytes per second; None: not measured.
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
        """Cancel all checks, and wait for reads in flight."""
        with self._lock:
            for check in self._last.values():
                check.cancel.set()
        self._pool.shutdown(cancel_futures=True)

    def last(self, node_volume: NodeVolume) -> Check | None:
        """Return the current or last check of a volume since the node started; None: there was none."""
        with self._lock:
            return self._last.get(node_volume.volume_id)

    def begin(self, node_volume: NodeVolume, operation_id: bytes, bytes_per_s: int) -> Check:
        """Begin a check in the background.

        Args:
            node_volume: the volume.
            operation_id: if it is that of the last check, no check begins.
            bytes_per_s: maximum read rate; 0: a part of the volume's own maximum.

        Raises:
            Conflict: the volume is being checked.
            Unavailable: no thread can start.
        """
        with self._lock:
            before = self._last.get(node_volume.volume_id)
            if before is not None and before.operation_id == operation_id:
                return before
            if before is not None and before.state not in ENDED:
                raise Conflict("the volume is being checked already", volume_id=node_volume.volume_id, state=before.state.value)
            rate = bytes_per_s or check_bandwidth(self._rate_of(node_volume))
            check = Check(operation_id, rate, self._clock.now_s())
            submit(self._pool, self._run, node_volume, check)
            self._last[node_volume.volume_id] = check
        self._counters.add(node_metrics.VOLUME_CHECKS_BEGUN)
        return check

    def cancel(self, node_volume: NodeVolume) -> Check | None:
        """Cancel the check of a volume after its current read. Quarantined blocks stay quarantined. None: there was none."""
        check = self.last(node_volume)
        if check is not None:
            check.cancel.set()
        return check

    # ---- in the pool ----
    def _run(self, node_volume: NodeVolume, check: Check) -> None:
        name = node_volume.volume_id
        try:
            blocks = held_blocks(self._table, node_volume)
            check.blocks, check.state = len(blocks), CheckState.RUNNING
            log.info("check started: volume %s (blocks=%d, bytes_per_s=%d)", name, len(blocks), check.bytes_per_s)
            self._check(node_volume, blocks, check)
            end = CheckState.CANCELLED if check.cancel.is_set() and check.checked_blocks < check.blocks else CheckState.DONE
        except VolumeStalled as error:
            end, check.why = CheckState.FAILED, str(error)
            log.warning("check failed: volume %s (%s)", name, error)
        except Exception as error:  # thread edge: callers must learn that the check ended, and why
            end, check.why = CheckState.FAILED, f"{type(error).__name__}: {error}"
            self._counters.add(node_metrics.VOLUME_CHECK_BUGS)
            log.exception("check failed: volume %s: unexpected error", name)
        check.ended_s, check.state = self._clock.now_s(), end
        tell = log.warning if check.bad or check.unreadable else log.info
        tell(
            "check ended: volume %s (state=%s, checked=%d, blocks=%d, good=%d, bad=%d, rewritten=%d, unreadable=%d, gone=%d)",
            name, end.value, check.checked_blocks, check.blocks, check.good, check.bad, check.rewritten_blocks, check.unreadable,
            check.gone,
        )  # fmt: skip

    def _check(self, node_volume: NodeVolume, blocks: Sequence[Block], check: Check) -> None:
        largest = max((block.nbytes for block in blocks), default=0)
        memory = memoryview(mmap.mmap(-1, max(READ_BYTES, largest)))
        due_s = self._clock.now_s()
        for batch in batches_of(blocks):
            if check.cancel.wait(max(0.0, due_s - self._clock.now_s())):
                return
            nbytes = self._read(node_volume, batch, check, memory)
            # time lost to a slow disk is not made up for by reading faster
            due_s = max(due_s, self._clock.now_s() - nbytes / check.bytes_per_s) + nbytes / check.bytes_per_s

    def _read(self, node_volume: NodeVolume, batch: Sequence[Block], check: Check, memory: memoryview) -> int:
        """Read some blocks and check them. Returns the number of bytes."""
        with pinned_on(self._table, node_volume, batch) as pinned:
            check.gone += len(batch) - len(pinned)
            # if this raises, the memory is not used again
            outcomes = node_volume.guard.read(partial(node_volume.volume.read, read_items(pinned, memory)), ignore)
            for (block, slot), outcome in zip(pinned, outcomes, strict=True):
                self._judge(node_volume, block, slot, outcome, check)
        nbytes = sum(block.nbytes for block, _ in pinned)
        check.checked_bytes += nbytes
        self._counters.add(node_metrics.VOLUME_CHECK_BYTES, nbytes)
        return nbytes

    def _judge(self, node_volume: NodeVolume, block: Block, slot: Slot, outcome: Outcome, check: Check) -> None:
        if outcome is Outcome.HIT:
            check.good += 1
            return
        if check.bad + check.unreadable < LOGGED_BLOCKS:
            log.warning(
                "block not good: %s (volume=%s, outcome=%s)", block.key.hex(), node_volume.volume_id, outcome.name.lower()
            )
        self._counters.add(node_metrics.NVME_READ_FAILED_BLOCKS[outcome.name.lower()])
        if outcome is not Outcome.CORRUPT:
            check.unreadable += 1  # not quarantined: a later read may succeed
            return
        check.bad += 1
        quarantine(self._table, node_volume, block, slot, self._counters)
        # after the quarantine: its commit would also remove the new copy from the catalog
        check.rewritten_blocks += self._table.requeue_writeback([block])


def held_blocks(table: BlockTable, node_volume: NodeVolume) -> list[Block]:
    """Return the blocks that a volume holds, in the order of their slots."""
    # the lock is held for a copy only; blocks that are evicted or moved later are recognised when they are pinned
    found = [
        (slot.offset, block)
        for block in table.snapshot()
        if block.nvme_volume is node_volume and (slot := block.nvme) is not None
    ]
    return [block for _, block in sorted(found, key=lambda pair: pair[0])]


@contextmanager
def pinned_on(table: BlockTable, node_volume: NodeVolume, batch: Sequence[Block]) -> Iterator[list[tuple[Block, Slot]]]:
    """Inside, the blocks of a batch that are still on a volume are pinned, so that their slots are not reused."""
    with table.residency.lock:
        pinned = [
            (block, block.nvme)
            for block in batch
            if block.nvme is not None and block.nvme_volume is node_volume and not block.evicting
        ]
        for block, _ in pinned:
            block.pins += 1
    try:
        yield pinned
    finally:
        table.unpin([block for block, _ in pinned])


def read_items(pinned: Sequence[tuple[Block, Slot]], memory: memoryview) -> list[tuple[Slot, BlockRecord, memoryview]]:
    """Return the arguments of a read of pinned blocks into consecutive parts of some memory."""
    ends = list(accumulate(block.nbytes for block, _ in pinned))
    return [(slot, block.record(), memory[end - block.nbytes : end]) for (block, slot), end in zip(pinned, ends, strict=True)]


def batches_of(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Cut blocks into batches of one read each."""
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
