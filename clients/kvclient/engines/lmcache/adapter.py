"""LMCache's interface of L2 adapters. LMCache calls it from several threads; no method waits for the store, except ``close``."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import KeyEntry, KeyListPage
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvclient import KVStoreError
from kvclient.engines.engine_log import share_handlers
from kvclient.engines.fallbacks import LOOKUP_FAILURES
from kvclient.engines.lmcache.counters import AdapterCounters
from kvclient.engines.lmcache.layouts import ObjectLayout
from kvclient.engines.lmcache.ledger import KeyLedger
from kvclient.engines.lmcache.namespaces import REFUSALS
from kvclient.engines.lmcache.objects import ObjectStore
from kvclient.engines.lmcache.options import AdapterOptions
from kvclient.engines.lmcache.tasks import TaskQueue
from kvclient.nodes.namespaces import list_namespaces

_log = logging.getLogger(__name__)

_CHECKED_KEYS = 4_096
_NEVER_LISTED = -1
_REACH_AGAIN_S = 1.0


class KVStoreL2Adapter(L2AdapterInterface):
    """The store behind LMCache. Every failure is a miss, or a store task that failed.

    Args:
        params: ``adapter_params`` of LMCache's configuration; see ``AdapterOptions``.
        l1_memory_desc: LMCache's host memory; not used.

    Raises:
        InvalidArgument: an unknown or invalid option.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:  # noqa: ARG002  # LMCache passes it
        super().__init__(max_capacity_bytes=0)  # the store evicts, not LMCache
        share_handlers(init_logger("lmcache.kvstore"))
        self._options = AdapterOptions.from_params(params)
        self.counters = AdapterCounters()
        self._store = ObjectStore(self._options, self.counters)
        self._ledger = KeyLedger(self._options.max_known_keys)
        self._known_lock = threading.RLock()
        """Held while known keys change and LMCache is notified, in one order for both. Re-entrant: a listener may delete keys."""
        self._store_event, self._lookup_event, self._load_event = (create_event_notifier() for _ in range(3))
        numbers = count()
        bounds = (numbers, self._options.workers, self._options.max_pending, self.counters)
        self._stores: TaskQueue[L2StoreResult] = TaskQueue("store", *bounds, self._store_event.notify)
        self._lookups: TaskQueue[Bitmap] = TaskQueue("lookup", *bounds, self._lookup_event.notify)
        self._loads: TaskQueue[Bitmap] = TaskQueue("load", *bounds, self._load_event.notify)
        self._closing = threading.Event()
        self._close_lock = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="kvstore-lmcache-watch", daemon=True)
        self._watcher.start()
        _log.info("adapter of LMCache started (metadata=%s, node=%s)", self._options.hook.metadata, self._options.hook.node)

    # ---- events ----
    def get_store_event_fd(self) -> int:
        """Return the descriptor that is readable after a store task has ended."""
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that is readable after a lookup has ended."""
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        """Return the descriptor that is readable after a load has ended."""
        return int(self._load_event.fileno())

    # ---- stores ----
    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Start to store objects."""
        return self._stores.submit(
            lambda end_s: self._run_store(keys, objects, end_s), L2StoreResult(False, 0), self._options.hook.store_deadline_s
        )

    def _run_store(self, keys: Sequence[Any], objects: Sequence[Any], end_s: float) -> L2StoreResult:
        if not self._options.hook.store:
            return L2StoreResult(False, 0)
        held, complete, size = self._store.store(keys, objects, end_s)
        with self._known_lock:
            new, forgotten = self._ledger.add(held)
            self._tell(self._notify_keys_stored, new)
            self._tell(self._notify_keys_deleted, forgotten)
        if forgotten:
            self.counters.failed("keys_forgotten", len(forgotten), "known keys forgotten: raise max_known_keys to count them")
        return L2StoreResult(complete, size if complete else 0)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the store tasks that have ended since the last call."""
        return self._stores.take_all()

    # ---- lookups ----
    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        """Start a lookup. Nothing is locked: a load of an object that was evicted since is a miss."""
        return self._lookups.submit(
            lambda end_s: self._run_lookup(keys, group_layout_descs, end_s),
            Bitmap(len(keys)),
            self._options.hook.lookup_deadline_s,
        )

    def _run_lookup(self, keys: Sequence[Any], descs: Mapping[int, Any], end_s: float) -> Bitmap:
        if not self._options.hook.load:
            return Bitmap(len(keys))
        stated = {group: ObjectLayout.of_tensors(desc.shapes, desc.dtypes) for group, desc in (descs or {}).items()}
        held = self._store.find(keys, stated, end_s)
        return _bitmap([one and not hidden for one, hidden in zip(held, self._ledger.hidden(keys), strict=True)])

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return the objects that a lookup found, once; None: it has not ended."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing: nothing is locked."""

    # ---- loads ----
    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Start to load objects into LMCache's memory."""
        return self._loads.submit(
            lambda end_s: self._run_load(keys, objects, end_s), Bitmap(len(keys)), self._options.hook.load_deadline_s
        )

    def _run_load(self, keys: Sequence[Any], objects: Sequence[Any], end_s: float) -> Bitmap:
        if not self._options.hook.load:
            return Bitmap(len(keys))
        hidden = self._ledger.hidden(keys)
        chosen = [at for at, one in enumerate(hidden) if not one]
        arrived = [False] * len(keys)
        loaded = self._store.load([keys[at] for at in chosen], [objects[at] for at in chosen], end_s)
        for at, one in zip(chosen, loaded, strict=True):
            arrived[at] = one
        accessed = [keys[at] for at, one in enumerate(arrived) if one]
        if accessed:
            self._tell(lambda keys, _: self._notify_keys_accessed(keys), [(key, 0) for key in accessed])
        return _bitmap(arrived)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return the objects that a load brought, once; None: it has not ended."""
        return self._loads.take(task_id)

    # ---- known keys ----
    def delete(self, keys: list[Any]) -> None:
        """Hide objects from this process until they are stored again. Their bytes stay until the store evicts them."""
        with self._known_lock:
            self._tell(self._notify_keys_deleted, self._ledger.delete(keys))
        self.counters.add("keys_deleted", len(keys))

    def list_l2_keys(self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None) -> KeyListPage:
        """List the objects that this process stored, and that are still stored as far as is known.

        Args:
            model_name: only of this model.
            page_size: objects per page.
            cursor: from the page before.

        Raises:
            ValueError: a page size below 1, or a malformed cursor.
        """
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        if cursor is not None and not cursor.isdecimal():
            raise ValueError(f"malformed cursor {cursor!r}; take it from the page before")
        with self._known_lock:
            found, following = self._ledger.page(model_name, page_size, _NEVER_LISTED if cursor is None else int(cursor))
        return KeyListPage(
            tuple(KeyEntry(key.to_encoded_object_key(), size) for key, size in found),
            None if following is None else str(following),
        )

    def get_usage(self) -> AdapterUsage:
        """Return how many bytes the listed objects have."""
        with self._known_lock:
            return super().get_usage()

    def _watch(self) -> None:
        """In the background: log whether the store answers at the start, and find out which known keys it has evicted."""
        while not self._reached() and not self._closing.wait(_REACH_AGAIN_S):
            pass
        while not self._closing.wait(self._options.usage_check_s):
            self._check_usage()

    def _reached(self) -> bool:
        """Whether the store has answered anything. If not, ask it."""
        hook = self._options.hook
        if self.counters.connected:
            return True
        try:
            list_namespaces(
                hook.metadata, tls=hook.tls(), token=hook.client_options().shown_token(), timeout_s=hook.connect_deadline_s
            )
        except Exception as error:  # noqa: BLE001  # the edge of the thread
            if self.counters.connected is None:
                _log.warning(
                    "store away: objects are misses until it answers; check that it runs (metadata=%s, error=%s)",
                    hook.metadata,
                    error,
                )
                self.counters.set_connected(False)
            return False
        self.counters.answered()
        return True

    def _check_usage(self) -> None:
        """Forget some known keys that the store has evicted."""
        try:
            keyed = self._ledger.to_check(_CHECKED_KEYS)
            held = self._store.still_held(keyed, time.monotonic() + self._options.hook.lookup_deadline_s) if keyed else None
            if held is None:
                return
            with self._known_lock:
                gone = self._ledger.forget_missing(key for (key, _), one in zip(keyed, held, strict=True) if not one)
                self._tell(self._notify_keys_deleted, gone)
            self.counters.add("keys_gone", len(gone))
        except REFUSALS as refusal:
            self.counters.failed("objects_refused", 1, "usage not checked", refusal)
        except KVStoreError as error:
            self.counters.failed(LOOKUP_FAILURES, 1, "usage not checked", error)
        except Exception as error:  # noqa: BLE001  # the edge of the thread
            self.counters.bug("usage check", error)

    def _tell(self, notify: Any, keyed: Sequence[tuple[Any, int]]) -> None:  # noqa: ANN401
        """Notify LMCache's listeners of keys with sizes. Their failures do not fail the task."""
        if not keyed:
            return
        try:
            notify([key for key, _ in keyed], [size for _, size in keyed])
        except Exception as error:  # noqa: BLE001  # listeners are LMCache's
            self.counters.failed("listener_failures", len(keyed), "LMCache's listener failed", repr(error))

    # ---- state and end ----
    def report_status(self) -> dict[str, Any]:
        """Return the state for LMCache's status."""
        return {
            "is_healthy": not self._closing.is_set() and self.counters.connected is not False,
            "type": type(self).__name__,
            "metadata": self._options.hook.metadata,
            "node": self._options.hook.node,
            "namespaces": self._store.namespaces,
            "known_keys": len(self._ledger),
            "pending": {"store": self._stores.pending, "lookup": self._lookups.pending, "load": self._loads.pending},
            "max_pending": self._options.max_pending,
            "counters": self.counters.totals(),
        }

    def close(self) -> None:
        """End all work and disconnect. After that LMCache's memory is not touched any more. Idempotent."""
        with self._close_lock:
            if self._closing.is_set():
                return
            self._closing.set()
            with ExitStack() as stack:  # all of it, also if a part fails
                for event in (self._store_event, self._lookup_event, self._load_event):
                    stack.callback(event.close)
                stack.callback(self._store.close)
                stack.callback(self._watcher.join, self._options.hook.lookup_deadline_s + self._options.hook.connect_deadline_s)
                for tasks in (self._stores, self._loads, self._lookups):
                    stack.callback(tasks.close)  # the tasks that run have deadlines


def _bitmap(bits: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(bits))
    for at, bit in enumerate(bits):
        if bit:
            bitmap.set(at)
    return bitmap
