"""Clients of the store, one per namespace: opened when a task first needs them, in the background."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace

from kvclient import CacheSpec, KVClient
from kvclient.engines.options import HookOptions
from kvstore.core.errors import CapacityExceeded, DeadlineExceeded, Unavailable

_MOST = 64
_OPENERS = 2
_RETRY_S = 1.0


class NamespaceClients:
    """Opens clients and keeps them. Thread-safe.

    Args:
        hook: the options.
    """

    def __init__(self, hook: HookOptions) -> None:
        self._hook = hook
        self._options = replace(hook.client_options(), client_name="lmcache", require_store=False)
        self._lock = threading.Lock()
        self._clients: dict[CacheSpec, Future[KVClient]] = {}
        self._begun_s: dict[CacheSpec, float] = {}
        self._pool = ThreadPoolExecutor(_OPENERS, thread_name_prefix="kvstore-lmcache-open")
        self._closed = False

    def client(self, spec: CacheSpec, end_s: float) -> KVClient:
        """Return the client of a namespace.

        Args:
            spec: the namespace.
            end_s: monotonic time until which to wait for it.

        Raises:
            KVStoreError: it is not open yet, cannot be opened, or would be one too many.
        """
        with self._lock:
            opening = self._clients.get(spec)
            if opening is None:
                opening = self._open(spec)
        try:
            return opening.result(max(0.0, end_s - time.monotonic()))
        except FutureTimeoutError:
            raise DeadlineExceeded("the store is not connected yet") from None
        except BaseException:
            with self._lock:
                if self._clients.get(spec) is opening and time.monotonic() - self._begun_s.get(spec, 0.0) > _RETRY_S:
                    del self._clients[spec]  # the next task tries again
            raise

    def _open(self, spec: CacheSpec) -> Future[KVClient]:
        if self._closed:
            raise Unavailable("the adapter is closed")
        if len(self._clients) >= _MOST:
            raise CapacityExceeded("too many models and layouts of objects in one adapter", limit=_MOST)
        self._clients[spec] = opening = self._pool.submit(self._hook.connect, spec, self._options)
        self._begun_s[spec] = time.monotonic()
        return opening

    def opened(self) -> list[KVClient]:
        """Return the clients that are open."""
        with self._lock:
            futures = list(self._clients.values())
        return [one.result() for one in futures if one.done() and not one.cancelled() and one.exception() is None]

    def close(self) -> None:
        """Close all clients. Connects under way end first, by their deadline."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(cancel_futures=True)
        for client in self.opened():
            client.close()
