"""The pools of one backend, each with a client for its namespace, created on first use."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import distributed

from kvclient import BlockBuffer, InvalidArgument, KVClient, Unavailable
from kvclient.engines.options import HookOptions
from kvclient.engines.sglang.generations import Generations
from kvclient.engines.sglang.host_pages import HostPages
from kvclient.engines.sglang.model_facts import model_text, server_arguments
from kvclient.engines.sglang.namespaces import holds_draft, page_spec
from kvclient.engines.sglang.options import BackendOptions
from kvclient.engines.sglang.page_keys import Prefix
from kvclient.engines.sglang.page_store import ChainedPages, PageStore, SinglePages
from kvclient.engines.sglang.stats import BackendStats
from kvstore.observe.metric_definitions import hooks as hooks_metrics

_log = logging.getLogger(__name__)
_PROCESS_ID = secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class OpenPool:
    """A pool's pages, client and page store."""

    pages: HostPages
    client: KVClient
    store: PageStore
    activity: BackendStats
    loads: bool
    stores: bool

    def held(self, hashes: Sequence[str], prefix: Prefix) -> int:
        """Return how many leading pages can be served."""
        return self.store.held(hashes, prefix) if hashes and self.loads else 0

    def load(self, hashes: Sequence[str], buffer: BlockBuffer, prefix: Prefix) -> list[bool]:
        """Load pages. Return which were loaded."""
        if not hashes or not self.loads:
            return [False] * len(hashes)
        with self.activity.moving("get", len(hashes), self._page_bytes) as moved:
            moved += self.store.load(hashes, buffer, prefix)
        return moved

    def keep(self, hashes: Sequence[str], buffer: BlockBuffer, prefix: Prefix) -> list[bool]:
        """Store pages. Return which the store holds."""
        if not hashes or not self.stores:
            return [False] * len(hashes)
        if isinstance(self.store, ChainedPages) and not prefix.is_known:
            self.activity.incidents.report(
                hooks_metrics.SGLANG_SET_WITHOUT_PREFIX_PAGES,
                "pages are not stored, since SGLang does not tell what comes before them: set hicache_storage_pass_prefix_keys "
                "and interface_v1, or chained to false",
                amount=len(hashes),
            )
            return [False] * len(hashes)
        with self.activity.moving("set", len(hashes), self._page_bytes) as moved:
            moved += self.store.store(hashes, buffer, prefix)
        return moved

    @property
    def _page_bytes(self) -> int:
        shape = self.pages.shape
        return shape.layers * shape.layer_block_bytes


class Pools:
    """The registered pools. Thread-safe.

    Args:
        options: the user's options.
        config: SGLang's ``HiCacheStorageConfig``.
        cache_dtype: dtype of the cache, if SGLang reports it.
        activity: counts the operations.
        generations: those of this process, which outlive the backend.
    """

    def __init__(
        self,
        options: BackendOptions,
        config: Any,  # noqa: ANN401
        cache_dtype: str,
        activity: BackendStats,
        generations: Generations,
    ) -> None:
        self._options = options
        self._config = config
        self._cache_dtype = cache_dtype
        self._activity = activity
        self._generations = generations
        self._lock = threading.Lock()
        self._registered: dict[str, Any] = {}
        self._open: dict[tuple[str, bool], OpenPool] = {}
        self._key_tokens = 0
        self._generation = generations.of(options.hook.weights_epoch)
        self._closed = False

    def register(self, name: str, pool: Any) -> None:  # noqa: ANN401  # SGLang's pools have no common type to import
        """Register a host pool under a name."""
        with self._lock:
            self._registered[name] = pool
            if not self._key_tokens:  # the anchor pool must be registered first
                self._key_tokens = int(getattr(pool, "logical_page_size", pool.page_size))

    def pool(self, name: str, *, chained: bool) -> OpenPool:
        """Return a registered pool whose pages are stored in one of the two ways.

        Raises:
            KVStoreError: unknown pool, its pages fit no namespace, or the store does not answer and is required.
        """
        self._renew()
        with self._lock:
            found = self._open.get((name, chained))
            if found is None:
                found = self._open[name, chained] = self._opened(name, chained)
            return found

    def _opened(self, name: str, chained: bool) -> OpenPool:
        pool = self._registered.get(name)
        if pool is None or self._closed:
            raise InvalidArgument("no such host pool", pool=name, registered=", ".join(self._registered))
        if self._generation is None:
            raise Unavailable(
                "the weights were changed or released, and SGLang's caches were not flushed since: call /flush_cache, then "
                "/clear_hicache_storage_backend"
            )
        options, hook = self._options, self._hook()
        pages = HostPages(pool, zero_copy=options.zero_copy)
        if options.zero_copy and not pages.in_place:
            self._activity.incidents.counters.add(hooks_metrics.SGLANG_COPIED_POOLS)
            _log.info("pages copied: host pool %s (its layout does not report their addresses)", name)
        sample = not hook.weights_epoch
        model = model_text(server_arguments(), draft=holds_draft(name, pool), sample=sample, make_unique=self._unique)
        if sample and not model:
            self._activity.incidents.report(
                hooks_metrics.SGLANG_WEIGHTS_UNKNOWN,
                "SGLang does not report its weights, so all engines with the same model name share KV; set weights_epoch",
            )
        spec = page_spec(
            hook,
            self._config,
            pool,
            pages,
            name=name,
            model_text=model,
            chained=chained,
            cache_dtype=options.kv_cache_dtype or self._cache_dtype,
            key_tokens=self._key_tokens,
        )
        # SGLang's threads wait here, so wait no longer than for a load; a later call tries again.
        client_options = hook.client_options()
        connect_s = min(client_options.connect_deadline_s, hook.load_deadline_s)
        client = hook.connect(spec, replace(client_options, client_name="sglang", connect_deadline_s=connect_s))
        if chained:
            store: PageStore = ChainedPages(client, hook.load_deadline_s, hook.store_deadline_s)
        else:
            store = SinglePages(client, hook.load_deadline_s, hook.store_deadline_s, hook.lookup_deadline_s)
        _log.info(
            "host pool opened: %s (layout=%s, page_bytes=%d, namespace=%s)",
            name,
            spec.layout,
            spec.block_bytes,
            spec.namespace.hex(),
        )
        return OpenPool(pages, client, store, self._activity, hook.load, hook.store)

    @property
    def is_open(self) -> bool:
        """Whether pages may be loaded and stored: not after ``close``, and not while SGLang may hold KV of other weights."""
        self._renew()
        return self._generation is not None and not self._closed

    def clear(self) -> None:
        """Switch to new namespaces: no backend of this process finds pages stored under a ``weights_epoch`` that it has used."""
        self._generations.clear()
        self._renew()

    def _renew(self) -> None:
        """Close the pools of an earlier generation, and all pools while there is none."""
        with self._lock:
            generation = self._generations.of(self._options.hook.weights_epoch)
            if generation == self._generation:
                return
            self._generation = generation
            before, self._open = list(self._open.values()), {}
        for pool in before:
            pool.client.close()

    def _hook(self) -> HookOptions:
        """Return the hook's options with the salt of the current generation."""
        hook = self._options.hook
        if not self._generation:
            return hook
        salt = f"{hook.salt}/{self._generation}/{self._engine_id()}"
        return replace(hook, salt=hashlib.sha256(salt.encode()).hexdigest())

    def _unique(self) -> str:
        """Return an id that no other engine has, equal on all ranks that share their pages."""
        return self._shared_id() or secrets.token_hex(16)

    def _engine_id(self) -> str:
        """Return an id of this engine, equal on all ranks that share their pages."""
        return self._shared_id() or f"{_PROCESS_ID}/{os.getpid()}"

    def _shared_id(self) -> str:
        """Return the id of the engine's rank that asked first, the same on all ranks; empty: ranks share no pages."""
        world = distributed.group.WORLD
        if not self._config.is_mla_model or self._config.tp_size == 1 or world is None:
            return ""
        store = world.get_group_store()
        return str(store.compare_set("kvstore/engine", "", f"{_PROCESS_ID}/{os.getpid()}").decode())

    def counters(self) -> dict[str, int]:
        """Return totals of the backend and its clients by name."""
        with self._lock:
            clients = [pool.client for pool in self._open.values()]
        totals = dict(self._activity.incidents.counters.snapshot())
        for client in clients:
            for name, value in client.stats().items():
                totals[name] = totals.get(name, 0) + value
        return totals

    def flush(self, timeout_s: float) -> bool:
        """Wait until the pages stored on this host's node are durable; see ``KVClient.flush``."""
        with self._lock:
            clients = [pool.client for pool in self._open.values()]
        done = [client.flush(timeout_s) for client in clients]  # flush all, even after one failed
        return all(done)

    def close(self) -> None:
        """Cancel running operations and disconnect from the store. Later calls are misses."""
        with self._lock:
            self._closed = True
            before, self._open = list(self._open.values()), {}
        for pool in before:
            pool.client.close()
