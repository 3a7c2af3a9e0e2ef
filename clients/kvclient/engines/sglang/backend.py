"""The storage backend that SGLang's HiCache loads: a facade over the pools. Nothing here raises into SGLang's threads.

SGLang calls it from several background threads: one looks up pages, one loads them into host memory, one stores them. A failure
counts as a miss or as a page that is not stored. It is counted and logged, and SGLang computes the page.

    --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvstore", "module_path": "kvclient.engines.sglang.backend",
        "class_name": "KVStoreHiCache", "interface_v1": 1, "hicache_storage_pass_prefix_keys": true}'
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvclient import KVStoreError
from kvclient.engines.sglang.engine_patches import follow_weight_updates, store_sharded_pools, tell_whole_prefixes
from kvclient.engines.sglang.generations import OF_THIS_PROCESS
from kvclient.engines.sglang.model_facts import server_arguments
from kvclient.engines.sglang.namespaces import KV
from kvclient.engines.sglang.options import BackendOptions
from kvclient.engines.sglang.page_keys import Prefix
from kvclient.engines.sglang.page_store import SinglePages
from kvclient.engines.sglang.pool_hits import LeadingPages, TrailingPages, restorable
from kvclient.engines.sglang.pools import Pools
from kvclient.engines.sglang.stats import BackendStats
from kvstore.observe.metric_definitions import hooks as hooks_metrics

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


class KVStoreHiCache(HiCacheStorage):
    """HiCache's third tier, backed by the store.

    Args:
        storage_config: SGLang's ``HiCacheStorageConfig``; its ``extra_config`` holds the options.
        _arguments: further arguments that SGLang passes to backends; unused.

    Raises:
        InvalidArgument: an option is unknown or invalid. SGLang then does not attach the backend.
    """

    def __init__(self, storage_config: Any, _arguments: object = None) -> None:  # noqa: ANN401
        options = BackendOptions.from_mapping(storage_config.extra_config or {})
        self._chained, self._loads = options.chained, options.hook.load
        self._activity = BackendStats()
        self._pools = Pools(options, storage_config, _cache_dtype(), self._activity, OF_THIS_PROCESS)
        if self._chained and options.mend_prefixes and not tell_whole_prefixes():
            self._activity.incidents.counters.add(hooks_metrics.SGLANG_PREFIXES_AS_REPORTED)
        if not follow_weight_updates(OF_THIS_PROCESS):
            self._activity.incidents.report(
                hooks_metrics.SGLANG_WEIGHT_UPDATES_UNSEEN,
                "this SGLang does not tell when its weights change: call /clear_hicache_storage_backend after each update",
            )
        store_sharded_pools(KVStoreHiCache)
        self._trailing: set[str] = set()
        self._has_kv = False

    # ---- pools ----
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:  # noqa: ANN401
        """Register the host pool of the KV and connect to the store; fail if ``require_store`` is set and it does not answer.

        Raises:
            KVStoreError: the pages fit no namespace, or the store does not answer and ``require_store`` is set.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._pools.register(KV, mem_pool_host)
        self._has_kv = getattr(mem_pool_host, "kv_buffer", None) is not None
        if self._has_kv:
            self._pools.pool(KV, chained=self._chained)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:  # noqa: ANN401
        """Register another host pool (or the first one again, by its name)."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._pools.register(str(host_pool_name), host_pool)

    # ---- pages in host memory, in place ----
    def batch_exists(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many leading pages the store can serve."""
        if not self._has_kv:
            return 0
        return self._guarded("exists", lambda: self._kv().held(keys, _prefix(extra_info)), 0)

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages into host memory. Return which were loaded."""
        if not self._has_kv:
            return self._without_kv(keys)
        return self._guarded("get", lambda: self._get(KV, self._chained, keys, host_indices, extra_info), [False] * len(keys))

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages from host memory. Return which the store holds."""
        if not self._has_kv:
            return self._without_kv(keys)
        return self._guarded("set", lambda: self._set(KV, self._chained, keys, host_indices, extra_info), [False] * len(keys))

    # ---- several pools ----
    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return how many leading pages all pools together can restore."""
        transfers = pool_transfers or ()
        return self._guarded("exists", lambda: self._exists(keys, transfers, extra_info), PoolTransferResult.empty())

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages of each pool. Return which were loaded."""
        return {one.name: self._move(one, "get", self._get, extra_info) for one in transfers}

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of each pool. Return which the store holds."""
        return {one.name: self._move(one, "set", self._set, extra_info) for one in transfers}

    # ---- flat pages ----
    def batch_get(
        self,
        keys: Sequence[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: object = None,  # noqa: ARG002  # SGLang's signature
    ) -> list[torch.Tensor | None]:
        """Load flat pages into tensors. Return the loaded ones, None for each of the others."""

        def work() -> list[torch.Tensor | None]:
            pages = list(target_locations or ())
            if not self._has_kv:
                return [page if good else None for page, good in zip(pages, self._without_kv(keys), strict=True)]
            pool = self._kv()
            buffer = pool.pages.flat(pages, writable=True)
            came = pool.load(keys, buffer, Prefix(None))
            return [page if good else None for page, good in zip(pages, came, strict=True)]

        return self._guarded("get", work, [None] * len(keys))

    def batch_set(
        self,
        keys: Sequence[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: object = None,  # noqa: ARG002  # SGLang's signature
        target_sizes: object = None,  # noqa: ARG002
    ) -> bool:
        """Store flat pages. Return whether the store holds all of them."""

        def work() -> bool:
            if not self._has_kv:
                return all(self._without_kv(keys))
            pool = self._kv()
            pages = [page.contiguous() for page in values or ()]
            return all(pool.keep(keys, pool.pages.flat(pages, writable=False), Prefix(None)))

        return self._guarded("set", work, False)

    def get(
        self,
        key: str,
        target_location: torch.Tensor | None = None,
        target_sizes: object = None,  # noqa: ARG002  # SGLang's signature
    ) -> torch.Tensor | None:
        """Load one flat page; None: a miss."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: object = None,  # noqa: ARG002  # SGLang's signature
        target_sizes: object = None,  # noqa: ARG002
    ) -> bool:
        """Store one flat page."""
        return self.batch_set([key], None if value is None else [value])

    def exists(self, key: str) -> bool:
        """Check whether the store can serve a page. For chained pages this works only at the head of the chain."""
        return self.batch_exists([key]) > 0

    # ---- lifecycle ----
    def clear(self) -> None:
        """Stop this engine from finding anything stored before, also after storage is attached again. Stored pages remain."""
        self._guarded("clear", self._pools.clear, None)

    def get_stats(self) -> StorageMetrics:
        """Return pages and bandwidth of the operations since the last call, for SGLang's metrics."""
        metrics = StorageMetrics()
        loads, stores = self._activity.taken("get"), self._activity.taken("set")
        metrics.prefetch_pgs.extend(loads.pages)
        metrics.prefetch_bandwidth.extend(loads.gigabytes_per_second)
        metrics.backup_pgs.extend(stores.pages)
        metrics.backup_bandwidth.extend(stores.gigabytes_per_second)
        return metrics

    def counters(self) -> Mapping[str, int]:
        """Return totals by name, including those of the store's client."""
        return self._pools.counters()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until the pages stored on this host's node are durable. False: timeout, or nothing durable exists."""
        return self._guarded("flush", lambda: self._pools.flush(timeout_s), False)

    def close(self) -> None:
        """Disconnect from the store. SGLang calls it when the backend is detached."""
        self._guarded("close", self._pools.close, None)

    # ---- internals ----
    def _without_kv(self, keys: Sequence[str]) -> list[bool]:
        """Answer for a pool of KV without bytes: SGLang asks for the pages of the pools beside it separately."""
        return [self._guarded("get", lambda: self._pools.is_open, False)] * len(keys)

    def _kv(self) -> Any:  # noqa: ANN401
        return self._pools.pool(KV, chained=self._chained)

    def _get(
        self, name: str, chained: bool, keys: Sequence[str], indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None
    ) -> list[bool]:
        pool = self._pools.pool(name, chained=chained)
        buffer, deliver = pool.pages.target(indices, len(keys))
        came = pool.load(keys, buffer, _prefix(extra_info))
        deliver(came)
        return came

    def _set(
        self, name: str, chained: bool, keys: Sequence[str], indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None
    ) -> list[bool]:
        pool = self._pools.pool(name, chained=chained)
        return pool.keep(keys, pool.pages.source(indices, len(keys)), _prefix(extra_info))

    def _move(
        self,
        transfer: PoolTransfer,
        kind: str,
        move: Callable[[str, bool, Sequence[str], torch.Tensor, HiCacheStorageExtraInfo | None], list[bool]],
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        keys, name = transfer.keys or [], str(transfer.name)
        chained = self._chains(transfer)
        return self._guarded(kind, lambda: move(name, chained, keys, transfer.host_indices, extra_info), [False] * len(keys))

    def _chains(self, transfer: PoolTransfer) -> bool:
        """Check whether a pool's pages form chains. Pools that have pages only at some positions do not."""
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            self._trailing.add(str(transfer.name))
        return self._chained and str(transfer.name) not in self._trailing

    def _exists(
        self, keys: Sequence[str], transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None
    ) -> PoolTransferResult:
        prefix = _prefix(extra_info)
        if not self._loads:
            return PoolTransferResult.empty()
        kv_pages = self._kv().held(keys, prefix) if self._has_kv else len(keys)
        leading = keys[:kv_pages]
        pools: list[tuple[str, LeadingPages | TrailingPages]] = []
        for one in transfers:
            if one.hit_policy == PoolHitPolicy.BLOCK_GROUPS or not leading:
                continue  # these never limit the hit, but SGLang needs a result for each pool
            pool = self._pools.pool(str(one.name), chained=self._chains(one))
            if one.hit_policy == PoolHitPolicy.TRAILING_PAGES and isinstance(pool.store, SinglePages):
                pools.append((one.name, TrailingPages(pool.store.each_held(leading).tolist(), max(1, len(one.keys or ())))))
            else:
                pools.append((one.name, LeadingPages(pool.held(leading, prefix))))
        found = restorable(kv_pages, pools)
        by_pool = {**({KV: kv_pages} if kv_pages else {}), **found.by_pool}
        return PoolTransferResult(found.pages, by_pool, found.lengths)

    def _guarded(self, kind: str, work: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
        """Call a function and return the given value if it fails: SGLang must never see an exception."""
        try:
            return work()
        except KVStoreError as error:
            self._activity.incidents.report(hooks_metrics.SGLANG_FAILED[kind], f"{kind} of pages failed", error)
        except Exception as error:  # noqa: BLE001  # the edge to SGLang's threads, whose pools and tensors may raise anything
            self._activity.incidents.report(
                hooks_metrics.SGLANG_BROKE[kind], f"{kind} of pages broke: {type(error).__name__}", error
            )
            _log.debug("%s of pages broke", kind, exc_info=True)
        return otherwise


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> Prefix:
    return Prefix(None if extra_info is None else extra_info.prefix_keys)


def _cache_dtype() -> str:
    """The configured type of SGLang's cache; empty: unknown."""
    return str(getattr(server_arguments(), "kv_cache_dtype", ""))
