"""The secondary tier: lookups, loads and stores of chunks between vLLM's host memory and the store.

vLLM calls all methods in the scheduler's process, between steps: none of them waits for the store. Lookups, loads and stores
run in threads of the tier, each with a deadline. Until ``open``, everything is a miss and nothing is stored. So it is for
requests with adapters, because vLLM's keys do not cover an adapter's weights.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvclient import InvalidArgument
from kvclient.engines.vllm.announcements.chunk_observer import ChunkObserver
from kvclient.engines.vllm.identity.adapter_mixing import AdapterMixing
from kvclient.engines.vllm.request_paths import request_paths
from kvclient.engines.vllm.scheduler.session_hints import request_hint
from kvclient.engines.vllm.tier.chunks import Chunk, ChunkStore
from kvclient.engines.vllm.tier.counters import CONNECTED, COUNTERS, GAUGES, TierCounters, metric_name
from kvclient.engines.vllm.tier.facts import TierGroup
from kvclient.engines.vllm.tier.jobs import ChunkJobs, EndedJob, JobPart
from kvclient.engines.vllm.tier.lookups import ChunkLookups
from kvclient.engines.vllm.tier.options import TierOptions
from kvclient.engines.vllm.tier.page_copies import PageCopies
from kvclient.engines.vllm.tier.requests import TierRequest, TierRequests
from kvstore.observe.limited_log import LimitedLog

_limited = LimitedLog(logging.getLogger(__name__))


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
        self._requests = TierRequests()
        self.media_named = True
        """See ``engine_facts.are_media_named``."""
        self.keeps_drafts = False
        """See ``engine_facts.keeps_drafts``."""
        self.mixing = AdapterMixing()
        """Whether KV of requests without an adapter, of which alone chunks are stored, may be wrong."""
        self.counters = TierCounters()
        self.page_copies = PageCopies(offloading_spec.config.parallel.world_size)
        announce = bool(offloading_spec.config.enable_kv_cache_events)
        self.observer: ChunkObserver | None = None
        """None: chunks are neither announced nor labelled."""
        if announce or self._options.block_labels:
            self.observer = ChunkObserver(self._options, announce=announce, counters=self.counters)
        self._ended = threading.Event()
        self._jobs = ChunkJobs(self._options.workers, self.counters, self._ended.set)
        self._lookups = ChunkLookups(self._options.hook.lookup_deadline_s, self.counters, self._ended.set)

    def open(self, stores: Mapping[int, ChunkStore], groups: Sequence[TierGroup], engine_hash: str) -> None:
        """Use these namespaces from now on. No job may be running. ``engine_hash``: see ``engine_hash_name``."""
        self.close_stores()
        self._groups = {group.group_id: group for group in groups}
        self.stores = dict(stores)
        if self.observer is not None:
            specs = {group_id: store.spec for group_id, store in stores.items()}
            self.observer.connect(specs, self._groups, engine_hash)
        self.counters.set_connected(all(store.is_connected for store in stores.values()))

    def close_stores(self) -> None:
        """Disconnect, retract what was announced, and forget all answers: everything is a miss."""
        stores, self.stores = self.stores, {}
        self._requests.renew()
        if self.observer is not None:
            self.observer.disconnect()
        self.counters.set_connected(False)
        for store in stores.values():
            store.close()

    # ---- lookups ----
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:  # noqa: ANN401
        """Return whether a chunk is in the store; RETRY until the answer has arrived."""
        request = self._requests.get(req_context.req_id)
        if request is None or not self.stores or not self._options.hook.load:
            return LookupResult.MISS
        found = self._lookups.ask(request, get_offload_group_idx(key), key, self._position(key, req_context))
        if found is None:
            return LookupResult.RETRY
        if found and self.page_copies.stale:  # a hit is given a row at once
            self.counters.failed("reset_misses", 1, "chunk not loaded: copies of before a reset have not ended")
            return LookupResult.MISS
        return LookupResult.HIT if found else LookupResult.MISS

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
        if self.mixing.happened:
            self.counters.add("stores_unsure")
        self._submit(job_metadata, self._options.hook.store and not self.mixing.happened, self._options.hook.store_deadline_s)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start to load chunks into rows that vLLM has allocated."""
        self._submit(job_metadata, True, self._options.hook.load_deadline_s)

    def _submit(self, job: TransferJob, wanted: bool, deadline_s: float) -> None:
        keys = list(job.keys)  # may be a set: keys and rows are taken in one pass
        ended = EndedJob(job.job_id, job.is_promotion, tuple(keys))
        request = self._requests.get(job.req_context.req_id)
        if not wanted or request is None or not self.stores:
            self._jobs.refuse(ended)
            return
        by_group: dict[int, list[Chunk]] = {}
        for key, row in zip(keys, map(int, job.chunk_ids), strict=True):
            chunk = Chunk(key, get_offload_block_hash(key), self._position(key, job.req_context), self._rows[row])
            by_group.setdefault(get_offload_group_idx(key), []).append(chunk)
        parts: list[JobPart] = []
        paths = request_paths(request.request, self._options.hook) if job.is_promotion else None
        for group_id, chunks in by_group.items():
            if (store := self.stores.get(group_id)) is not None:
                last = max((chunk.position for chunk in chunks if chunk.position is not None), default=-1)
                chain = request.chain(self._groups[group_id], last + 1)
                parts.append(JobPart(store, chunks, chain, request.found.get(group_id), paths))
        if self.observer is not None and job.is_promotion:
            self.observer.found(request.request, by_group)
        elif self.observer is not None:
            self.observer.planned(job.job_id, request.request, by_group)
        self._jobs.submit(ended, parts, deadline_s)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended since the last call."""
        results: list[JobResult] = []
        for job in self._jobs.ended():
            missing = frozenset(job.keys).difference(job.arrived)
            if job.loads:
                if missing:  # otherwise vLLM would ask for the same chunks again and again
                    self._requests.record_failed(missing)
            elif self.observer is not None:
                self.observer.ended(job.job_id, job.arrived)
            results.append(JobResult(job.job_id, not missing, job.arrived, job.seconds, job.nbytes))
        return results

    def wait_ended(self, busy_s: float, idle_s: float) -> None:
        """Wait until a load, a store or a lookup ends, for an engine that has nothing else to do.

        Args:
            busy_s: limit while loads, stores or lookups are running.
            idle_s: limit otherwise.
        """
        self._ended.wait(busy_s if self._jobs.busy or self._lookups.busy else idle_s)
        self._ended.clear()

    # ---- vLLM's other hooks ----
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return which chunks of this engine the store has gained and lost since the last call, by medium."""
        return () if self.observer is None else self.observer.take_events(self.locality)

    def on_new_request(self, _req_context: Any) -> RequestOffloadingContext:  # noqa: ANN401
        """Return the policy: chunks are stored when they are new."""
        return RequestOffloadingContext()

    def begin_request(self, request: Any) -> None:  # noqa: ANN401
        """Receive a request itself: vLLM's hook does not have it."""
        if not self._requests.add(request, media_named=self.media_named, keeps_drafts=self.keeps_drafts):
            self.counters.add("requests_skipped")

    def on_request_finished(self, req_context: Any) -> None:  # noqa: ANN401
        """Pass the request's hint about its session to the store, and forget the request: no call for it will follow."""
        if (request := self._requests.get(req_context.req_id)) is not None:
            self._give_hint(req_context, request)
        self._requests.forget(req_context.req_id)

    def _give_hint(self, req_context: Any, request: TierRequest) -> None:  # noqa: ANN401
        """Give the hint of a request that ended, in the namespaces of all groups whose chunks are a chain."""
        try:
            if (hint := request_hint(req_context)) is None:
                return
            chained = [group for group_id in self.stores if (group := self._groups[group_id]).chained]
            for group in chained:
                store = self.stores[group.group_id]
                store.give_hint(hint, request.chain(group, len(request.request.block_hashes) // group.hashes))
        except InvalidArgument as error:
            self.counters.add("hints_refused")
            _limited.warning("hint ignored: request %s: %s", req_context.req_id, error)
        else:
            self.counters.add("hints" if chained else "hints_refused")
            if not chained:
                _limited.warning("hint ignored: request %s: no open store keeps its chunks as a chain", req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:  # noqa: ANN401
        """Start the lookups of this step."""
        self._lookups.flush(self.stores, self._groups)
        self._requests.end_waits(context.new_req_ids)
        self._requests.end_waits(context.preempted_req_ids)

    def drain_jobs(self) -> None:
        """Wait until no load or store touches vLLM's memory. Each has a deadline, and ends early if its store is closed."""
        self._jobs.drain()

    def shutdown(self) -> None:
        """End all work and disconnect."""
        self._jobs.shutdown()
        if self.observer is not None:
            self.observer.close()
        self.close_stores()
        self._lookups.shutdown()
        self._rows = np.empty((0, 0), np.uint8)  # vLLM unmaps its memory

    # ---- metrics ----
    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003
        """Declare the counts of the tier for vLLM's metrics endpoint."""
        counters = {metric_name(name): OffloadingCounterMetadata(text) for name, text in COUNTERS.items()}
        return counters | {metric_name(name): OffloadingGaugeMetadata(text) for name, text in GAUGES.items()}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the counts since the last call. vLLM calls this after each step."""
        counts, connected = self.counters.take()
        if not counts and connected is None:
            return None
        stats = OffloadingConnectorStats()
        for name, count in counts.items():
            stats.increase_counter(metric_name(name), count)
        if connected is not None:
            stats.set_gauge(metric_name(CONNECTED), int(connected))
        return stats


def tier_of(connector_scheduler: Any) -> KVStoreTier:  # noqa: ANN401
    """Find the tier among those of vLLM's scheduler.

    Raises:
        InvalidArgument: there is none, or more than one.
    """
    every = getattr(connector_scheduler.manager, "secondary_tiers", ())  # another spec of vLLM's offloading has none
    tiers = [tier for tier in every if isinstance(tier, KVStoreTier)]
    if len(tiers) != 1:
        raise InvalidArgument(
            "exactly one KVStoreTier is required; remove spec_name and secondary_tiers from kv_connector_extra_config",
            tiers=len(tiers),
        )
    return tiers[0]
