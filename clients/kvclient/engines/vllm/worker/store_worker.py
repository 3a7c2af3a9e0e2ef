"""Stores pages in its own thread, in the order of the steps, so that a block is stored after its parent.

Pages are pinned until their job has ended, and the scheduler side pins at most a share of all pages, which bounds the queue. If
the pages are wanted back, waiting jobs and waits for the node are cancelled; only a copy under way is waited for.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvclient import BlockKey, KVClient, StoreHandle
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.identity.kv_groups import GroupBlocks
from kvclient.engines.vllm.memory.pages import Mark, Pages
from kvclient.engines.vllm.plan import StoreJob, WorkerOutput
from kvstore.core.keys import NamespaceKeyMask

_log = logging.getLogger(__name__)
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class _QueuedStore:
    """A job with its clients, which change with the weights. ``number`` counts jobs; the pages are computed at ``after``."""

    number: int
    chain: bytes
    job: StoreJob
    clients: Sequence[KVClient]
    deadline_s: float
    after: Mark


@dataclass(frozen=True, slots=True)
class _RetiredClients:
    """Queue entry: clients to close after all earlier jobs."""

    clients: Sequence[KVClient]


class StoreWorker:
    """The thread, its queue and its answers. Thread-safe.

    Args:
        pages: memory per group.
        blocks: how the pages of the groups divide a request.
        deadline_s: time from its step within which a job must be stored. Its pages are pinned until then at most.
        counters: counts the stores.
    """

    def __init__(self, pages: Sequence[Pages], blocks: GroupBlocks, deadline_s: float, counters: ConnectorCounters) -> None:
        self._pages = pages
        self._blocks = blocks
        self._deadline_s = deadline_s
        self._counters = counters
        self._queue: queue.SimpleQueue[_QueuedStore | _RetiredClients | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._answer = WorkerOutput()
        self._pending = 0
        self._added = 0
        self._cancelled_up_to = 0
        """Number of the last cancelled job; earlier jobs are cancelled too."""
        self._handle: StoreHandle | None = None
        """Handle of the store in progress; None: none."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-save", daemon=True)
        self._thread.start()

    def add(self, chain: bytes, jobs: Sequence[StoreJob], clients: Sequence[KVClient], after: Mark = None) -> None:
        """Queue jobs to store.

        Args:
            chain: the namespace whose chain the jobs' keys are of.
            jobs: the jobs, in order.
            clients: clients per group.
            after: mark after which the jobs' pages are computed.
        """
        with self._changed:
            first = self._added + 1
            self._added += len(jobs)
            self._pending += len(jobs)
        deadline_s = time.monotonic() + self._deadline_s
        for number, job in enumerate(jobs, first):
            self._queue.put(_QueuedStore(number, chain, job, clients, deadline_s, after))

    def retire(self, clients: Sequence[KVClient]) -> None:
        """Close clients after all earlier jobs."""
        self._queue.put(_RetiredClients(clients))

    def take(self) -> WorkerOutput:
        """Return the jobs that have ended since the last call."""
        with self._changed:
            answer, self._answer = self._answer, WorkerOutput()
            return answer

    def wait(self, timeout_s: float) -> None:
        """Wait briefly for a job to end, if any is pending."""
        with self._changed:
            self._changed.wait_for(lambda: self._answer.stores_done or not self._pending, timeout_s)

    def cancel_pending(self) -> None:
        """Cancel all jobs added so far. They end as soon as nothing reads their pages. Does not block."""
        with self._changed:
            self._cancelled_up_to = self._added
            handle = self._handle
        if handle is not None:
            handle.request_cancel()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is pending. False: timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, _RetiredClients):
                self._close_all(item.clients)
                continue
            held = not self._closed and self._store_all(item)
            with self._changed:
                self._pending -= 1
                self._answer.stores_done[item.job.job_id] = 1
                if not held:
                    self._answer.stores_failed.add(item.job.job_id)
                self._changed.notify_all()

    def _close_all(self, clients: Sequence[KVClient]) -> None:
        for client in clients:
            try:
                client.close()
            except Exception:  # noqa: BLE001  # top of a thread: later jobs need it
                self._counters.add("bugs")
                _log.exception("client of earlier weights not closed: unexpected error")

    def _store_all(self, save: _QueuedStore) -> bool:
        """Store one job's blocks, part by part. Return whether the store now holds all of them."""
        try:
            return all(self._store(save, part) for part in range(len(save.clients)))
        except Exception:  # noqa: BLE001  # top of a thread: pins must be released after any error
            self._counters.add("bugs")
            _log.exception("store failed: unexpected error")
            return False

    def _store(self, save: _QueuedStore, part: int) -> bool:
        job, client, ids = save.job, save.clients[part], save.job.block_ids[part]
        left_s = save.deadline_s - time.monotonic()
        if left_s <= 0:
            self._counters.add("stores_late")
            return False
        masked = NamespaceKeyMask(save.chain, client.spec.namespace)
        handle = client.start_store(
            masked.keys(self._blocks.page_keys(part, job.keys)),
            self._pages[part].buffer(ids, save.after),
            parent=BlockKey(masked.keys([job.parent])) if job.parent is not None else None,
            depth=job.first_block * self._blocks.pages_per_block(part),
            deadline_s=left_s,
        )
        with self._changed:
            self._handle = handle
            if save.number <= self._cancelled_up_to:
                handle.request_cancel()
        try:
            result = handle.result()
        finally:
            with self._changed:
                self._handle = None
        if handle.cancelled:
            self._counters.add("stores_dropped")
        self._counters.add("stores")
        self._counters.add("store_bytes", result.bytes_stored)
        self._counters.add("store_seconds", result.seconds)
        return result.held_blocks == len(ids)

    def close(self) -> None:
        """Cancel pending jobs and stop the thread."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(self._deadline_s + _GRACE_S)
