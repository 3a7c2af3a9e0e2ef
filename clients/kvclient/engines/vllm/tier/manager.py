"""The secondary tier: lookups, loads and stores of chunks between vLLM's host memory and the store.

vLLM calls all methods in the scheduler's process, between steps: none of them waits for the store. Lookups run in a thread of
vLLM's ``AsyncLookupManager``, loads and stores in a few threads of the tier, each with a deadline. Until ``open``, everything
is a miss and nothing is stored. So it is for requests with adapters, because vLLM's keys do not cover an adapter's weights.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvclient import InvalidArgument, KVStoreError, Lookup
from kvclient.engines.vllm.tier.chunks import Chunk, ChunkStore
from kvclient.engines.vllm.tier.facts import TierGroup
from kvclient.engines.vllm.tier.options import TierOptions

_log = logging.getLogger(__name__)
_OWNER = "kvstore"

Work = Callable[[ChunkStore, Sequence[Chunk], Sequence[bytes], "Lookup | None"], tuple[list[bytes], int]]


@dataclass(frozen=True, slots=True)
class _Done:
    """A job that has ended."""

    job: TransferJob
    keys: tuple[bytes, ...]
    arrived: tuple[bytes, ...]
    seconds: float
    nbytes: int


@dataclass(slots=True)
class _Request:
    """One of vLLM's requests, and the last lookup of its chain in each group."""

    request: Any
    found: dict[int, Lookup] = field(default_factory=dict)


class _Requests:
    """vLLM's requests whose chunks may be asked for. The scheduler's thread adds and removes them; others read."""

    def __init__(self) -> None:
        self._known: dict[str, _Request] = {}

    def add(self, request: Any) -> None:  # noqa: ANN401
        """Remember a request, unless it uses an adapter."""
        if getattr(request, "lora_request", None) is None:
            self._known[request.request_id] = _Request(request)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._known.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._known

    def chain(self, request_id: str, group: TierGroup, chunks: int) -> list[bytes]:
        """Return vLLM's hashes of the leading chunks of a request."""
        known = self._known.get(request_id)
        hashes = () if known is None else known.request.block_hashes
        return [bytes(one) for one in hashes[group.hashes - 1 : chunks * group.hashes : group.hashes]]

    def found(self, request_id: str, group_id: int) -> Lookup | None:
        """Return the last lookup of a request's chain."""
        known = self._known.get(request_id)
        return None if known is None else known.found.get(group_id)

    def record_found(self, request_id: str, group_id: int, lookup: Lookup) -> None:
        """Keep the lookup of a chain for the load that follows it."""
        known = self._known.get(request_id)
        if known is not None:
            known.found[group_id] = lookup


class _Finder(AsyncLookupManager):
    """Answers lookups in one thread. vLLM keeps an answer per key until all requests that asked have ended."""

    def __init__(self, tier: KVStoreTier, tier_type: str) -> None:
        self._tier = tier
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> list[bool]:  # noqa: ANN401
        """Look up keys of one request."""
        try:
            return self._tier.find(keys, req_context)
        finally:
            self._tier.wake()


class KVStoreTier(SecondaryTierManager):
    """vLLM's view of the store. ``KVStoreOffloadingConnector`` makes and opens it.

    Args:
        offloading_spec: vLLM's offloading.
        primary_kv_view: vLLM's host memory, one row per chunk.
        tier_type: its name in vLLM's configuration.
        backpressure_detector: vLLM's, if configured.
        locality: for vLLM's events and filters: ``LOCAL`` or ``REMOTE``; None: unknown.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,  # noqa: ANN401
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,  # noqa: ANN401
        locality: str | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality else None
        self._options = TierOptions.from_extra_config(offloading_spec.extra_config)
        self._rows = np.asarray(primary_kv_view).view(np.uint8)
        self._groups: dict[int, TierGroup] = {}
        self.stores: dict[int, ChunkStore] = {}
        """By group; empty: not open."""
        self.requests = _Requests()
        self._events: list[OffloadingEvent] | None = [] if offloading_spec.config.enable_kv_cache_events else None
        self._running: set[Future[None]] = set()
        self._done: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(self._options.workers, thread_name_prefix="kvstore-tier")
        self._finder = _Finder(self, tier_type)

    def open(self, stores: Mapping[int, ChunkStore], groups: Sequence[TierGroup]) -> None:
        """Use these namespaces from now on, in place of earlier ones. No job may be running."""
        self.close_stores()
        self._groups = {group.group_id: group for group in groups}
        self.stores = dict(stores)

    def close_stores(self) -> None:
        """Disconnect: everything is a miss."""
        stores, self.stores = self.stores, {}
        for store in stores.values():
            store.close()

    # ---- lookups ----
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:  # noqa: ANN401
        """Return whether a chunk is in the store; RETRY until the answer has come."""
        if not self._options.hook.load or req_context.req_id not in self.requests:
            return LookupResult.MISS
        found = self._finder.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def find(self, keys: Sequence[bytes], req_context: Any) -> list[bool]:  # noqa: ANN401
        """Look up keys of one request: each group with one call, or two."""
        found = dict.fromkeys(keys, False)
        by_group: dict[int, list[bytes]] = {}
        for key in keys:
            by_group.setdefault(get_offload_group_idx(key), []).append(key)
        for group_id, asked in by_group.items():
            store = self.stores.get(group_id)
            if store is None:
                continue
            positions = {key: self._position(key, req_context) for key in asked}
            chunks = max((at for at in positions.values() if at is not None), default=-1) + 1
            if chunks:
                chain = self.requests.chain(req_context.req_id, self._groups[group_id], chunks)
                lookup = store.find_chain(chain)
                self.requests.record_found(req_context.req_id, group_id, lookup)
                found.update({key: at is not None and at < lookup.hit_blocks for key, at in positions.items()})
            heads = [key for key, at in positions.items() if at is None]
            if heads:
                found.update(zip(heads, store.find_heads([get_offload_block_hash(key) for key in heads]), strict=True))
        return [found[key] for key in keys]

    def _position(self, key: bytes, req_context: Any) -> int | None:  # noqa: ANN401
        """Return a key's position in the chain of its group; None: it is stored as a head."""
        group = self._groups.get(get_offload_group_idx(key))
        end = req_context.get_offload_key_position(key)
        if group is None or not group.chained or end is None or end % group.chunk_tokens:
            return None
        return int(end) // group.chunk_tokens - 1

    # ---- jobs ----
    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start to store chunks. vLLM keeps their rows until the job has ended."""
        options = self._options.hook

        def store(to: ChunkStore, chunks: Sequence[Chunk], chain: Sequence[bytes], _: Lookup | None) -> tuple[list[bytes], int]:
            return to.store(chunks, chain, options.store_deadline_s)

        self._submit(job_metadata, store if options.store else None)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start to load chunks into rows that vLLM has allocated."""
        options = self._options.hook

        def load(
            source: ChunkStore, chunks: Sequence[Chunk], chain: Sequence[bytes], found: Lookup | None
        ) -> tuple[list[bytes], int]:
            return source.load(chunks, chain, found, options.load_deadline_s)

        self._submit(job_metadata, load)

    def _submit(self, job: TransferJob, work: Work | None) -> None:
        request_id = job.req_context.req_id
        by_group: dict[int, list[Chunk]] = {}
        keys = list(job.keys)  # may be a set: keys and rows are taken in one pass
        for key, row in zip(keys, map(int, job.chunk_ids), strict=True):
            chunk = Chunk(key, get_offload_block_hash(key), self._position(key, job.req_context), self._rows[row])
            by_group.setdefault(get_offload_group_idx(key), []).append(chunk)
        if work is None or request_id not in self.requests:
            self._done.put(_Done(job, tuple(keys), (), 0.0, 0))
            return
        parts: list[tuple[ChunkStore, list[Chunk], list[bytes], Lookup | None]] = []
        for group_id, chunks in by_group.items():
            if (store := self.stores.get(group_id)) is not None:
                last = max((chunk.position for chunk in chunks if chunk.position is not None), default=-1)
                chain = self.requests.chain(request_id, self._groups[group_id], last + 1)
                parts.append((store, chunks, chain, self.requests.found(request_id, group_id)))
        future = self._pool.submit(self._run, job, tuple(keys), work, parts)
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    def _run(
        self,
        job: TransferJob,
        keys: tuple[bytes, ...],
        work: Work,
        parts: Sequence[tuple[ChunkStore, list[Chunk], list[bytes], Lookup | None]],
    ) -> None:
        began_s = time.perf_counter()
        arrived: list[bytes] = []
        nbytes = 0
        try:
            for store, chunks, chain, found in parts:
                good, size = work(store, chunks, chain, found)
                arrived += good
                nbytes += size
        except (KVStoreError, RuntimeError) as error:
            _log.warning("offloading job ended early: %d chunks (load=%s, error=%s)", len(keys), job.is_promotion, error)
        finally:
            self._done.put(_Done(job, keys, tuple(arrived), time.perf_counter() - began_s, nbytes))
            self.wake()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended since the last call."""
        results: list[JobResult] = []
        while True:
            try:
                done = self._done.get_nowait()
            except queue.Empty:
                return results
            complete = len(done.arrived) == len(done.keys)
            if done.job.is_promotion:
                if not complete:  # otherwise vLLM would ask for the same chunks for ever
                    self._finder.mark_miss(set(done.keys).difference(done.arrived))
            elif done.arrived and self._events is not None:
                self._events.append(OffloadingEvent(list(done.arrived), self.medium, False, self.locality, _OWNER))
            results.append(JobResult(done.job.job_id, complete, done.arrived, done.seconds, done.nbytes))

    @property
    def busy(self) -> bool:
        """Whether loads or stores are running."""
        return bool(self._running)

    def wake(self) -> None:
        """End ``wait_ended``: something has ended."""
        self._ended.set()

    def wait_ended(self, timeout_s: float) -> None:
        """Wait until a load, a store or a lookup ends, for an engine that has nothing else to do."""
        self._ended.wait(timeout_s)
        self._ended.clear()

    # ---- vLLM's other hooks ----
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the chunks that were stored since the last call."""
        events = self._events or []
        if events:
            self._events = []
        return events

    def on_new_request(self, _req_context: Any) -> RequestOffloadingContext:  # noqa: ANN401
        """Return the policy: chunks are stored when they are new."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:  # noqa: ANN401
        """Forget a request: no call for it will follow."""
        self._finder.cleanup(req_context.req_id)
        self.requests.forget(req_context.req_id)

    def on_schedule_end(self, _context: Any) -> None:  # noqa: ANN401
        """Start the lookups of this step."""
        self._finder.flush()

    def drain_jobs(self) -> None:
        """Wait until no load or store touches vLLM's memory. Each has a deadline."""
        wait(set(self._running))

    def shutdown(self) -> None:
        """End all work and disconnect."""
        self.drain_jobs()
        self._pool.shutdown()
        self._finder.shutdown()
        self.close_stores()
        self._rows = np.empty((0, 0), np.uint8)  # vLLM unmaps its memory


def tier_of(connector_scheduler: Any) -> KVStoreTier:  # noqa: ANN401
    """Find the tier among those of vLLM's scheduler.

    Raises:
        InvalidArgument: there is none, or more than one.
    """
    tiers = [tier for tier in connector_scheduler.manager.secondary_tiers if isinstance(tier, KVStoreTier)]
    if len(tiers) != 1:
        raise InvalidArgument("secondary_tiers must have one KVStoreTier", got=len(tiers))
    return tiers[0]
