"""Reads ahead: blocks come into DRAM, and stay there, for a request that still waits in the queue of its engine.

1. A call is admitted when its blocks fit into the budget (``node.read_ahead``), in order of arrival. Of a prefix that is
   longer, the first blocks are read.
2. It reads one window at a time, and only while no load that an engine waits for is reading.
3. Its blocks are pinned until the caller ends the call, or until the deadline. A load finds them in DRAM, or waits for the window
   that is being read: no block is read twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from kvstore.core.cancel_scope import current
from kvstore.core.clock import Clock
from kvstore.core.types import BlockKey, Tier
from kvstore.node.base.buffer_budget import BufferBudget
from kvstore.node.base.cancellation import wait
from kvstore.node.loads.loader import Loader
from kvstore.node.loads.runs import BlockRequest
from kvstore.node.state.model import Block
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.rpc.auth.interceptor import tenant


class AheadReader:
    """Holds blocks for requests that wait. Thread-safe.

    Args:
        table: the node's blocks.
        loader: reads them.
        budget: admission.
        counters: metrics.
        clock: time.
    """

    def __init__(self, table: BlockTable, loader: Loader, budget: BufferBudget, counters: Counters, clock: Clock) -> None:
        self._table = table
        self._loader = loader
        self._budget = budget
        self._counters = counters
        self._clock = clock
        self._never = threading.Condition()

    def hold(self, request: BlockRequest) -> int:
        """Read blocks into DRAM and hold them until the current scope is cancelled, or until the deadline.

        Returns:
            The bytes that were read from volumes and peers.
        """
        with self._admission(request, tenant()) as admitted:
            return 0 if admitted is None else self._hold(admitted, request.namespace.shape.block_bytes)

    def bring(self, request: BlockRequest, of_tenant: str) -> int:
        """Read blocks into DRAM for a turn that is expected, and leave them there. Returns the bytes that were read."""
        block_bytes = request.namespace.shape.block_bytes
        with self._admission(request, of_tenant or None) as admitted:
            if admitted is None:
                return 0
            read = 0
            with closing(self._loader.load(admitted, ahead=True)) as runs:
                while self._loader.reads.wait_none(request.deadline_s) and (run := next(runs, None)) is not None:
                    pinned = run.pinned()
                    if run.tier is not Tier.DRAM:
                        read += len(pinned) * block_bytes
                    self._table.unpin(pinned)
            self._counters.add(node_metrics.READ_AHEAD_BYTES, read)
            return read

    @contextmanager
    def _admission(self, request: BlockRequest, of_tenant: str | None) -> Iterator[BlockRequest | None]:
        """Admit the longest prefix of a request that fits into the budget. Yields that prefix; None: it was refused."""
        block_bytes = request.namespace.shape.block_bytes
        count = min(len(request.chain), self._budget.limit_bytes(of_tenant) // block_bytes)
        if not count:
            self._counters.add(node_metrics.READ_AHEAD_REFUSED)
            yield None
            return
        with self._budget.admission(count * block_bytes, request.deadline_s, of_tenant) as admitted:
            if not admitted:
                self._counters.add(node_metrics.READ_AHEAD_REFUSED)
            yield request.part(0, count) if admitted else None

    def _hold(self, request: BlockRequest, block_bytes: int) -> int:
        keys = request.chain.keys
        held: list[Block] = []
        read: list[BlockKey] = []
        found = self._table.find(request.namespace, keys)
        absent = [key for key, block in zip(keys, found, strict=True) if block is None or block.dram is None]
        self._loader.unasked.add(absent)
        try:
            with closing(self._loader.load(request, ahead=True)) as runs:
                while self._loader.reads.wait_none(request.deadline_s) and (run := next(runs, None)) is not None:
                    pinned = run.pinned()
                    held += pinned
                    if run.tier is not Tier.DRAM or run.node != self._loader.node_id:
                        read += [block.key for block in pinned]
                        self._counters.add(node_metrics.READ_AHEAD_BYTES, len(pinned) * block_bytes)
            self._wait_end(request.deadline_s)
        finally:
            self._table.unpin(held)
            unused = self._loader.unasked.discard(read)
            self._counters.add(node_metrics.READ_AHEAD_UNUSED_BYTES, unused * block_bytes)
            self._loader.unasked.discard(absent)
        return len(read) * block_bytes

    def _wait_end(self, deadline_s: float) -> None:
        with self._never:
            while not current().cancelled and (left_s := deadline_s - self._clock.now_s()) > 0:
                wait(self._never, left_s, self._counters)
