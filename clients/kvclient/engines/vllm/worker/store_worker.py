"""Stores pages in a thread of its own, in the order of the steps, so that a block is stored after its parent.

Pages are pinned until their job is answered, and the scheduler side pins no more than a share of them: that bounds the queue.
Where somebody wants the pages back, what waits for its turn or for the node is given up; only a copy that runs is waited for.
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
from kvclient.engines.vllm.identity.keys import NamespaceKeyMask
from kvclient.engines.vllm.memory.pages import Mark, Pages
from kvclient.engines.vllm.plan import SaveJob, StepAnswer

_log = logging.getLogger(__name__)
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Save:
    """A job, and where it goes: clients change with the weights. ``number`` counts them. Its pages are computed at ``after``."""

    number: int
    chain: bytes
    job: SaveJob
    clients: Sequence[KVClient]
    deadline_s: float
    after: Mark


@dataclass(frozen=True, slots=True)
class _Retire:
    """Clients that nobody needs behind the jobs before."""

    clients: Sequence[KVClient]


class StoreWorker:
    """The thread, its queue and its answers. Thread-safe.

    Args:
        pages: by group: its memory.
        deadline_s: how long after its step a job may be stored: until then its pages are pinned, whatever goes on before it.
        tally: where stores are counted.
    """

    def __init__(self, pages: Sequence[Pages], deadline_s: float, tally: ConnectorCounters) -> None:
        self._pages = pages
        self._deadline_s = deadline_s
        self._tally = tally
        self._queue: queue.SimpleQueue[_Save | _Retire | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._answer = StepAnswer()
        self._pending = 0
        self._added = 0
        self._given_up = 0
        """Jobs up to this number are not stored any more."""
        self._handle: StoreHandle | None = None
        """The store under way."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-save", daemon=True)
        self._thread.start()

    def add(self, chain: bytes, jobs: Sequence[SaveJob], clients: Sequence[KVClient], after: Mark = None) -> None:
        """More to store.

        Args:
            chain: the namespace whose chain the jobs' keys are of.
            jobs: in order.
            clients: by group.
            after: when the jobs' pages are computed.
        """
        with self._changed:
            first = self._added + 1
            self._added += len(jobs)
            self._pending += len(jobs)
        deadline_s = time.monotonic() + self._deadline_s
        for number, job in enumerate(jobs, first):
            self._queue.put(_Save(number, chain, job, clients, deadline_s, after))

    def retire(self, clients: Sequence[KVClient]) -> None:
        """Closes clients when everything before is done."""
        self._queue.put(_Retire(clients))

    def take(self) -> StepAnswer:
        """What is done since the last call."""
        with self._changed:
            answer, self._answer = self._answer, StepAnswer()
            return answer

    def wait(self, timeout_s: float) -> None:
        """Waits a moment for something to be done, if there is anything to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._answer.saved or not self._pending, timeout_s)

    def give_up(self) -> None:
        """All jobs so far count as not stored. They are answered soon: once nothing reads their pages any more."""
        with self._changed:
            self._given_up = self._added
            handle = self._handle
        if handle is not None:
            handle.request_cancel()

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is pending; False: not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Retire):
                for client in item.clients:
                    client.close()
                continue
            held = not self._closed and self._store_all(item)
            with self._changed:
                self._pending -= 1
                self._answer.saved[item.job.job_id] = 1
                if not held:
                    self._answer.not_saved.add(item.job.job_id)
                self._changed.notify_all()

    def _store_all(self, save: _Save) -> bool:
        """Stores one job's blocks, group by group; whether the store holds them all now."""
        try:
            return all(
                self._store(save, client, pages, ids)
                for client, pages, ids in zip(save.clients, self._pages, save.job.block_ids, strict=True)
            )
        except Exception:  # noqa: BLE001  # the edge of a thread: whatever it is, pins must be given back, and the engine goes on
            self._tally.add("bugs")
            _log.exception("a store failed in a way that it should not")
            return False

    def _store(self, save: _Save, client: KVClient, pages: Pages, ids: Sequence[int]) -> bool:
        job = save.job
        left_s = save.deadline_s - time.monotonic()
        if left_s <= 0:
            self._tally.add("stores_late")
            return False
        masked = NamespaceKeyMask(save.chain, client.spec.namespace)
        handle = client.start_store(
            masked.keys(job.keys),
            pages.buffer(ids, save.after),
            parent=BlockKey(masked.keys([job.parent])) if job.parent is not None else None,
            depth=job.first_block,
            deadline_s=left_s,
        )
        with self._changed:
            self._handle = handle
            if save.number <= self._given_up:
                handle.request_cancel()
        try:
            result = handle.result()
        finally:
            with self._changed:
                self._handle = None
        if handle.cancelled:
            self._tally.add("stores_dropped")
        self._tally.add("stores")
        self._tally.add("store_bytes", result.bytes_stored)
        self._tally.add("store_seconds", result.seconds)
        return result.held_blocks == len(ids)

    def close(self) -> None:
        """Gives up what waits, and ends."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(self._deadline_s + _GRACE_S)
