"""The stream of messages that answers a load: each run of blocks becomes one message under a lease.

A separate thread waits for the runs. While it waits, a message without runs shows from time to time that the load waits, and how
many bytes have arrived for it. When the caller disconnects, the load is cancelled, and a task releases what it holds once its
thread has stopped.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import cast

import numpy as np

from kvproto.v1 import common_pb2, node_pb2
from kvstore.core.cancel_scope import CancelScope
from kvstore.core.clock import Clock
from kvstore.core.types import Outcome
from kvstore.node.loads.runs import LoadedRun, Runs, equal_stretches
from kvstore.node.loads.timings import LoadTimer
from kvstore.node.rpc.sessions import Session, Sessions
from kvstore.node.rpc.wait_threads import WaitThreads
from kvstore.node.state.model import CONDEMNED, Block
from kvstore.node.table import BlockTable

PROGRESS_INTERVAL_S = 0.2
"""Interval of messages without runs."""


class LoadStreams:
    """Turns runs of loads into messages. To be used on the event loop only.

    Args:
        table: its blocks are unpinned if a run is not delivered.
        sessions: hold the leases.
        clock: time.
    """

    def __init__(self, table: BlockTable, sessions: Sessions, clock: Clock) -> None:
        self._table = table
        self._sessions = sessions
        self._clock = clock
        self._releasing: set[asyncio.Task[None]] = set()

    async def stream(
        self, session: Session, runs: Runs, threads: WaitThreads, timer: LoadTimer | None, *, want_checksums: bool
    ) -> AsyncIterator[node_pb2.LoadProgress]:
        """Yield the messages of a load.

        Args:
            session: of the caller; takes the leases.
            runs: the load.
            threads: one of them waits for the runs, and is released when it no longer works for the load.
            timer: measures the waits and counts the bytes; None: no message shows a wait.
            want_checksums: messages carry the checksums of the layers.

        Raises:
            CapacityExceeded: no thread is free, or the caller's tenant is at its limit.
        """
        release_thread = threads.acquire()
        began_s = self._clock.now_s()
        driver = _RunDriver(self._table, runs)
        loop = asyncio.get_running_loop()
        next_run: asyncio.Future[LoadedRun | None] | None = None
        scope = CancelScope()
        context = scope.context()  # the driver runs in other threads, on behalf of the same call
        if timer is not None:
            context.run(timer.peers.record_in_context)
        try:
            while True:
                next_run = loop.run_in_executor(threads.pool, context.run, driver.next)
                while not (await asyncio.wait((next_run,), timeout=PROGRESS_INTERVAL_S))[0]:
                    session.used_s = self._clock.now_s()
                    if timer is not None:  # an engine that learns of a wait releases leases
                        yield node_pb2.LoadProgress(bytes_received=timer.peers.received_bytes)
                run = next_run.result()
                if run is None:
                    return
                granted_ms = int((self._clock.now_s() - began_s) * 1000)  # before the lease begins: never too late
                driver.delivered()
                if timer is not None:
                    timer.ready(run)
                message = self.message(session, run, want_checksums=want_checksums)
                message.granted_ms = granted_ms
                message.bytes_received = timer.peers.received_bytes if timer is not None else 0
                sent_s = self._clock.now_s()
                yield message
                if timer is not None:
                    timer.delivered(sent_s)
        finally:
            scope.cancel()  # the caller may have disconnected
            task = loop.create_task(_release(next_run, threads.pool, driver.close, release_thread))
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)

    def message(self, session: Session, run: LoadedRun, *, want_checksums: bool) -> node_pb2.LoadProgress:
        """Return a run as a message. A lease takes over its pins; if this raises, they are released."""
        self._drop_condemned(run)
        blocks = run.pinned()
        lease_id = self._sessions.lease(session, blocks) if blocks else 0
        messages = [
            self._run_message(run, start, end, want_checksums=want_checksums) for start, end in equal_stretches(run.outcomes)
        ]
        return node_pb2.LoadProgress(runs=messages, lease_id=lease_id)

    def _drop_condemned(self, run: LoadedRun) -> None:
        """Answer CORRUPT for whole blocks that proved corrupt since they were pinned."""
        for offset, block in enumerate(run.blocks):
            if block is not None and block.bits & CONDEMNED and run.checksums is None:
                run.blocks[offset], run.outcomes[offset] = None, Outcome.CORRUPT
                self._table.unpin((block,))

    @staticmethod
    def _run_message(run: LoadedRun, start: int, end: int, *, want_checksums: bool) -> node_pb2.LoadedRun:
        """Return blocks ``[start, end)`` of a run, which have the same outcome."""
        outcome = run.outcomes[start]
        message = node_pb2.LoadedRun(start=run.first + start, count=end - start, outcome=cast("common_pb2.Outcome", int(outcome)))
        if outcome is not Outcome.HIT:
            return message
        blocks = [block for block in run.blocks[start:end] if block is not None]
        message.tier = cast("common_pb2.Tier", int(run.tier))
        message.source_node, message.offsets = run.node, _packed_offsets(blocks)
        message.first_layer, message.layer_count = run.first_layer, run.layer_count
        if want_checksums and run.checksums is None:
            message.checksums = b"".join([block.checksums for block in blocks])
        elif want_checksums and run.checksums is not None:
            earlier_hits = sum(earlier is Outcome.HIT for earlier in run.outcomes[:start])
            rows = run.checksums[earlier_hits : earlier_hits + len(blocks)]
            message.checksums = rows.astype("<u8", copy=False).tobytes()
        return message


class _RunDriver:
    """Iterates the runs of a load, in threads. Closes them after the last call of ``next`` has returned."""

    def __init__(self, table: BlockTable, runs: Runs) -> None:
        self._table = table
        self._runs = runs
        self._lock = threading.Lock()
        self._undelivered: LoadedRun | None = None

    def next(self) -> LoadedRun | None:
        """Wait for the next run. None: there is none."""
        with self._lock:
            self._undelivered = next(self._runs, None)
            return self._undelivered

    def delivered(self) -> None:
        """Note that a lease takes over the pins of the last run."""
        self._undelivered = None

    def close(self) -> None:
        """Release a run that was not delivered, and end the load."""
        with self._lock:  # a call of `next` that still runs ends soon: its scope is cancelled
            if self._undelivered is not None:
                self._table.unpin(self._undelivered.pinned())
            self._runs.close()


async def _release(
    next_run: asyncio.Future[LoadedRun | None] | None,
    pool: ThreadPoolExecutor,
    close: Callable[[], None],
    release_thread: Callable[[], None],
) -> None:
    """Release what a load holds, once no thread works for it any more."""
    try:
        if next_run is not None and not (await asyncio.wait((next_run,)))[0].pop().cancelled():
            next_run.exception()  # raised when the run was awaited, or irrelevant after a disconnect
        with suppress(RuntimeError):  # the pool is shut down, and so is the table
            await asyncio.get_running_loop().run_in_executor(pool, close)
    finally:
        release_thread()


def _packed_offsets(blocks: Sequence[Block]) -> bytes:
    """Return the offsets of pinned blocks in the arena: little-endian uint64 each."""
    return np.fromiter(
        (block.dram.offset for block in blocks if block.dram is not None), dtype="<u8", count=len(blocks)
    ).tobytes()
