"""Writes labels of blocks in a separate thread, so that the engine never waits for it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from kvclient.events.block_groups import GroupBlockId
from kvclient.events.labels import BlockLabel, LabelNamespace
from kvclient.results import HELD
from kvstore.core.errors import InvalidArgument, KVStoreError
from kvstore.observe.limited_log import LimitedLog

if TYPE_CHECKING:
    from kvclient.client import KVClient

_log = logging.getLogger(__name__)
limited = LimitedLog(_log)

_MOST_WAITING: Final = 1_024
"""Runs of blocks that wait to be labelled."""
_MOST_WAITING_BYTES: Final = 64 << 20
"""Memory of these runs. A run may be a whole prompt."""
_MOST_RECENT: Final = 262_144
REWRITE_S: Final = 600.0
"""A label that was written longer ago is written again, in case that it was evicted."""
_BATCH: Final = 512
_RETRY_S: Final = 5.0
_CLOSE_S: Final = 5.0


class LabelSource(Protocol):
    """Blocks of one engine that were stored or found."""

    @property
    def memory_bytes(self) -> int:
        """Approximate memory of the blocks while they wait."""

    def labels(self) -> Iterable[tuple[GroupBlockId, BlockLabel]]:
        """Yield blocks and their labels. Called in the writer's thread."""


class LabelWriter:
    """Stores labels of blocks. ``put`` may be called from any thread and does not wait.

        writer = LabelWriter(labels, lambda spec: KVClient.connect("127.0.0.1:7400", spec))
        writer.put(source)

    Args:
        namespace: of the labels.
        connect: connects to the store in the namespace of the labels. Called in the writer's thread.
        count: receives counts: ``labels_stored``, ``labels_failed`` and ``labels_dropped``.
    """

    def __init__(
        self,
        namespace: LabelNamespace,
        connect: Callable[[LabelNamespace], KVClient],
        count: Callable[[str, int], None] = lambda _name, _count: None,
    ) -> None:
        self._namespace = namespace
        self._connect = connect
        self._count = count
        self._waiting: queue.Queue[LabelSource | None] = queue.Queue(_MOST_WAITING)
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._recent: OrderedDict[GroupBlockId, float] = OrderedDict()
        self._client: KVClient | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-labels", daemon=True)
        self._thread.start()

    def put(self, source: LabelSource) -> bool:
        """Label these blocks soon. False: too many wait, so these get no labels, and routers do not see them.

        Example: ``writer.put(source)``
        """
        if self._enqueue(source):
            return True
        self._count("labels_dropped", 1)
        limited.warning("blocks not labelled: too many wait (runs=%d, bytes=%d)", self._waiting.qsize(), self._waiting_bytes)
        return False

    def _enqueue(self, source: LabelSource) -> bool:
        size = source.memory_bytes
        with self._lock:
            if self._waiting_bytes + size > _MOST_WAITING_BYTES:
                return False
            self._waiting_bytes += size
        try:
            self._waiting.put_nowait(source)
        except queue.Full:
            self._release(size)
            return False
        return True

    def _release(self, size: int) -> None:
        with self._lock:
            self._waiting_bytes -= size

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that was put has been written or has failed; False: not in time.

        Example: ``writer.flush(10.0)``
        """
        end_s = time.monotonic() + timeout_s
        while self._waiting.unfinished_tasks:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        """End the thread and disconnect. Labels that wait are dropped."""
        self._stopped.set()
        with suppress(queue.Full):  # the thread wakes for a waiting run, and sees that it is stopped
            self._waiting.put_nowait(None)
        self._thread.join(_CLOSE_S)

    # ---- the thread ----
    def _run(self) -> None:
        while not self._stopped.is_set():
            source = self._waiting.get()
            try:
                if source is not None and not self._stopped.is_set():
                    self._write(source)
            except KVStoreError as error:
                self._count("labels_failed", 1)
                _log.warning("labels not stored: %s", error)
                self._stopped.wait(_RETRY_S)
            except Exception:  # noqa: BLE001  # the edge of the thread: later labels must still be written
                self._count("labels_failed", 1)
                _log.exception("labels not stored")
            finally:
                if source is not None:
                    self._release(source.memory_bytes)
                self._waiting.task_done()
        if self._client is not None:
            self._client.close()

    def _write(self, source: LabelSource) -> None:
        now_s = time.monotonic()
        size = self._namespace.spec.layer_block_bytes
        batch: list[tuple[GroupBlockId, bytes]] = []
        for block, label in source.labels():
            if now_s - self._recent.get(block, -REWRITE_S) < REWRITE_S:
                continue
            try:
                batch.append((block, label.encode(size)))
            except InvalidArgument as error:
                self._count("labels_failed", 1)
                _log.warning("block not labelled: %s", error)
            if len(batch) == _BATCH:
                self._store(batch, now_s)
                batch = []
        if batch:
            self._store(batch, now_s)

    def _store(self, batch: Sequence[tuple[GroupBlockId, bytes]], now_s: float) -> None:
        if self._client is None:
            self._client = self._connect(self._namespace)
        keys = [self._namespace.key(block) for block, _ in batch]
        rows = np.frombuffer(b"".join(row for _, row in batch), np.uint8).reshape(len(batch), -1)
        result = self._client.store_heads(keys, rows)
        held = HELD[result.outcomes].tolist()
        for (block, _), good in zip(batch, held, strict=True):
            if good:
                self._recent[block] = now_s
                self._recent.move_to_end(block)
        while len(self._recent) > _MOST_RECENT:
            self._recent.popitem(last=False)
        self._count("labels_stored", sum(held))
        if missing := len(held) - sum(held):
            self._count("labels_failed", missing)
            _log.warning("labels not stored: %d (error=%s)", missing, result.error)
