"""Clients of the store, one per namespace: opened in the background when a task first needs them, closed after others did."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from kvclient import CacheSpec, InvalidArgument, KVClient
from kvclient.engines.lmcache.counters import AdapterCounters
from kvclient.engines.options import HookOptions
from kvstore.core.errors import CapacityExceeded, DeadlineExceeded

_log = logging.getLogger(__name__)
MOST = 64
"""Open clients; one more closes the client that was unused for the longest time."""
REFUSALS = (InvalidArgument, CapacityExceeded)
"""Errors of the adapter itself: the store was not asked."""
_OPENERS = 2
_RETRY_S = 1.0


@dataclass(slots=True, eq=False)
class _Entry:
    """A client.

    Attributes:
        opening: ends with the client.
        begun_s: monotonic time at which it began.
        users: tasks that use the client now.
    """

    opening: Future[KVClient]
    begun_s: float
    users: int = 0


class NamespaceClients:
    """Opens clients and keeps the most recently used ones. Thread-safe.

    Args:
        hook: the options.
        counters: counts clients that were closed for others.
    """

    def __init__(self, hook: HookOptions, counters: AdapterCounters) -> None:
        self._hook = hook
        self._counters = counters
        self._options = replace(hook.client_options(), client_name="lmcache", require_store=False)
        self._lock = threading.Lock()
        self._entries: OrderedDict[CacheSpec, _Entry] = OrderedDict()
        """The least recently used one first."""
        self._pool = ThreadPoolExecutor(_OPENERS, thread_name_prefix="kvstore-lmcache-open")
        self._closed = False

    @contextmanager
    def client(self, spec: CacheSpec, end_s: float) -> Iterator[KVClient]:
        """Use the client of a namespace. It stays open inside the ``with`` statement.

        Args:
            spec: the namespace.
            end_s: monotonic time until which to wait for it.

        Raises:
            KVStoreError: it is not open yet, cannot be opened, or would be one too many.
        """
        with self._lock:
            entry = self._entries.get(spec) or self._open(spec)
            self._entries.move_to_end(spec)
            entry.users += 1
        try:
            yield self._opened_by(entry, spec, end_s)
        finally:
            with self._lock:
                entry.users -= 1

    def _opened_by(self, entry: _Entry, spec: CacheSpec, end_s: float) -> KVClient:
        try:
            return entry.opening.result(max(0.0, end_s - time.monotonic()))
        except FutureTimeoutError:
            raise DeadlineExceeded("the store is not connected yet") from None
        except CancelledError:
            raise InvalidArgument("the adapter is closed") from None
        except BaseException:
            with self._lock:
                if self._entries.get(spec) is entry and time.monotonic() - entry.begun_s > _RETRY_S:
                    del self._entries[spec]  # the next task tries again
            raise

    def _open(self, spec: CacheSpec) -> _Entry:
        if self._closed:
            raise InvalidArgument("the adapter is closed")
        if len(self._entries) >= MOST:
            self._close_idle()
        self._entries[spec] = entry = _Entry(self._pool.submit(self._hook.connect, spec, self._options), time.monotonic())
        return entry

    def _close_idle(self) -> None:
        """Close the least recently used client that no task uses, in the background.

        Raises:
            CapacityExceeded: tasks use all of them.
        """
        for spec, entry in self._entries.items():
            if entry.opening.done() and not entry.users:
                del self._entries[spec]
                self._pool.submit(_close, entry.opening)
                self._counters.failed(
                    "namespaces_closed", 1, f"more than {MOST} models and layouts: closed the oldest unused one"
                )
                return
        raise CapacityExceeded("too many combinations of model and object layout are in use at once", limit=MOST)

    def opened(self) -> list[KVClient]:
        """Return the clients that are open."""
        with self._lock:
            openings = [entry.opening for entry in self._entries.values()]
        return [one.result() for one in openings if _is_open(one)]

    def close(self) -> None:
        """Close all clients, also if closing one fails. Connects under way end first, by their deadline."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(cancel_futures=True)
        with ExitStack() as stack:
            for client in self.opened():
                stack.callback(client.close)


def _is_open(opening: Future[KVClient]) -> bool:
    return opening.done() and not opening.cancelled() and opening.exception() is None


def _close(opening: Future[KVClient]) -> None:
    try:
        if _is_open(opening):
            opening.result().close()
    except Exception:  # noqa: BLE001  # the edge of the thread
        _log.exception("client of an unused namespace not closed")
