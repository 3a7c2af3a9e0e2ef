"""vLLM's offloading connector with the store as its secondary tier.

vLLM makes one instance in each worker and one in the scheduler's process. The workers know the weights and pages, and send what
identifies them to the scheduler, which then opens the tier. So two engines exchange chunks only if their bytes mean the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata, OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform

from kvclient import CacheSpec, InvalidArgument, KVClient, KVStoreError, Unavailable
from kvclient.engines.engine_log import share_handlers
from kvclient.engines.vllm.announcements.messages import engine_hash_name
from kvclient.engines.vllm.identity.adapter_mixing import AdapterMixing
from kvclient.engines.vllm.identity.engine_facts import are_media_named, check_launcher, keeps_drafts
from kvclient.engines.vllm.identity.model_weights import ModelWeights, gather_digests, later_digest
from kvclient.engines.vllm.identity.weights_check import combined_digest
from kvclient.engines.vllm.identity.weights_epoch import WeightsEpoch, given_name, is_named
from kvclient.engines.vllm.options import RECONNECT_S
from kvclient.engines.vllm.tier.canonical import canonical_chunk
from kvclient.engines.vllm.tier.chunks import ChunkStore, hide_split_chunks
from kvclient.engines.vllm.tier.counters import TierCounters
from kvclient.engines.vllm.tier.facts import (
    WorkerFacts,
    check_block_hash,
    chunk_specs,
    row_bytes,
    tier_groups,
    worker_facts,
)
from kvclient.engines.vllm.tier.manager import KVStoreTier, tier_of
from kvclient.engines.vllm.tier.options import TierOptions
from kvclient.engines.vllm.versions import check_version
from kvstore.process.threads.submission import submit

_log = logging.getLogger(__name__)
_PACKAGE = "kvclient.engines.vllm.tier"
_COPYING_S = 0.001
"""How long a step without tokens waits while only pages are copied."""


@dataclass
class TierHandshake(KVConnectorHandshakeMetadata):
    """Sent by each worker to the scheduler at the start. ``rank`` and ``digest`` are of the worker and its own weights."""

    facts: WorkerFacts
    rank: int
    digest: str


@dataclass
class TierPlan(OffloadingConnectorMetadata):
    """vLLM's plan of a step, with the number of a check of the weights that each worker makes before it; 0: none."""

    weights_check: int = 0


@dataclass
class TierOutput(OffloadingWorkerMetadata):
    """vLLM's output of a worker, with digests of the weights by number of the check and rank."""

    weights: dict[tuple[int, int], str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> TierOutput:
        """Merge the output of another worker."""
        merged = super().aggregate(other)
        assert isinstance(merged, OffloadingWorkerMetadata)
        assert isinstance(other, TierOutput)
        return TierOutput(merged.completed_jobs, merged.transfer_stats, self.weights | other.weights)


class TierScheduler(OffloadingConnectorScheduler):
    """vLLM's scheduler of offloading, without chunks that it would store from wrong pages.

    If host memory was full in earlier steps, a job has several chunks, and pages of each may have been given away; see
    ``hide_split_chunks``. For each further part of a streamed input, vLLM plans all pages of the request again.
    """

    counters: TierCounters
    keeps_drafts: bool
    """See ``engine_facts.keeps_drafts``."""

    @classmethod
    def of(cls, made: OffloadingConnectorScheduler, counters: TierCounters, *, keeps_drafts: bool = False) -> TierScheduler:
        """Return a scheduler in the place of one that vLLM has just made."""
        scheduler: Any = object.__new__(cls)
        vars(scheduler).update(vars(made), counters=counters, keeps_drafts=keeps_drafts)
        return scheduler  # type: ignore[no-any-return]

    def on_new_request(self, request: Any) -> None:  # noqa: ANN401
        """Receive a request. The KV of one that may go on after KV of drafts is not copied to host memory."""
        super().on_new_request(request)
        if self.keeps_drafts and request.resumable:
            self._req_status[request.request_id].max_offload_tokens = 0

    def _update_req_states(self, scheduler_output: Any) -> None:  # noqa: ANN401
        for new in scheduler_output.scheduled_new_reqs:
            for group in self._req_status[new.req_id].group_states:
                group.block_ids.clear()  # of the parts before; vLLM appends the pages of all parts
        super()._update_req_states(scheduler_output)

    def _build_store_jobs(self, scheduler_output: Any) -> dict[int, Any]:  # noqa: ANN401
        hidden = 0
        for state in self._req_status.values():
            for group in self._sliding_window_groups:
                one = state.group_states[group]
                first = 0 if state.req.is_finished() else one.next_stored_chunk_idx
                hidden += hide_split_chunks(one.block_ids, first, self.config.blocks_per_chunk)
        if hidden:
            self.counters.failed("store_missing_chunks", hidden, "chunks not stored", "pages of a window were given away")
        return super()._build_store_jobs(scheduler_output)  # type: ignore[no-any-return]


class KVStoreOffloadingConnector(OffloadingConnector):
    """vLLM's offloading with the store as its secondary tier. Methods without underscore are hooks that vLLM calls."""

    connector_scheduler: Any
    """vLLM's; None in a worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:  # noqa: ANN401
        """Create one side of the connector.

        Raises:
            InvalidArgument: an impossible option, or an engine whose chunks cannot be shared safely.
            Unsupported: an untested version of vLLM.
        """
        share_handlers(logging.getLogger("vllm"))
        transfer = vllm_config.kv_transfer_config
        transfer.kv_connector_extra_config = with_tier(transfer.kv_connector_extra_config or {})
        self._options = TierOptions.from_extra_config(transfer.kv_connector_extra_config)
        check_version(vllm.__version__, allow_untested=self._options.allow_untested_vllm)
        check_launcher(vllm_config.parallel_config)
        self._block_hash = check_block_hash(vllm_config)
        self._config = build_offloading_config(vllm_config, kv_cache_config)
        if self._config.canonical_layout and not self._config.parallel.is_parallelism_agnostic:
            if role == KVConnectorRole.WORKER and vllm_config.parallel_config.rank == 0:
                _log.warning("canonical layout impossible for this model: KV is shared at equal tensor parallelism only")
            transfer.kv_connector_extra_config["canonical_layout"] = False
            self._config = build_offloading_config(vllm_config, kv_cache_config)
        self._first_name = given_name(self._options)
        """Of the first weights epoch, by the user; empty: none."""
        self._weights = WeightsEpoch(self._options)
        self._digest = ""
        """Of a worker's weights at the start."""
        self._later_digest: Callable[[], str] = str
        self._digests: dict[tuple[int, int], str] = {}
        """Of a worker's weights, for the scheduler."""
        self._groups = tier_groups(self._config, kv_cache_config)
        self._facts: WorkerFacts | None = None
        self._specs: dict[int, CacheSpec] = {}
        super().__init__(vllm_config, role, kv_cache_config)
        self._tier: KVStoreTier | None = tier_of(self.connector_scheduler) if role == KVConnectorRole.SCHEDULER else None
        if self._tier is not None:
            self._tier.mixing = AdapterMixing(vllm_config)
            self._tier.media_named = are_media_named(vllm_config)
            self._tier.keeps_drafts = drafts = keeps_drafts(vllm_config)
            self.connector_scheduler = TierScheduler.of(self.connector_scheduler, self._tier.counters, keeps_drafts=drafts)

    # ---- start: worker, then scheduler ----
    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Identify weights and pages. vLLM calls this in a worker after it allocated the KV cache.

        Raises:
            InvalidArgument: the attention backend computes wrong tokens after a prefix that was loaded.
        """
        config = self._vllm_config
        canonical = None
        if self._config.canonical_layout:
            canonical = canonical_chunk(config, self._kv_cache_config, kv_caches, self._config)
            if not is_named(self._options):
                _log.warning("canonical_layout without weights_epoch: KV is shared at equal tensor parallelism only")
        held = ModelWeights.of_caller(config.model_config.dtype)
        self._digest, self._later_digest = held.digest(), later_digest(held, config.parallel_config)
        weights = combined_digest(gather_digests(self._digest, config.parallel_config))
        named = is_named(self._options)
        self._facts = worker_facts(config, self._kv_cache_config, kv_caches, weights, canonical, named=named)
        if self._facts.whole_prompts_only:
            raise InvalidArgument(
                f"{self._facts.whole_prompts_only} computes prompts only as a whole: KV cannot be offloaded, so remove"
                " kv_transfer_config"
            )
        super().register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what identifies this worker. vLLM sends it to the scheduler at start."""
        return None if self._facts is None else TierHandshake(self._facts, self._vllm_config.parallel_config.rank, self._digest)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """Receive what identifies all workers, in the scheduler, and open the tier."""
        handshakes = [handshake for _, handshake in sorted(metadata.items()) if isinstance(handshake, TierHandshake)]
        workers = [handshake.facts for handshake in handshakes]
        if not workers:
            return
        self._weights = WeightsEpoch(self._options, len(workers), self._open_tier.counters.add)
        digest = combined_digest(one.digest for one in sorted(handshakes, key=lambda one: one.rank))
        self._weights.start(self._first_name or workers[0].weights, digest)
        chunk_bytes = row_bytes(workers[0], self._open_tier.block_size_bytes)
        self._specs = chunk_specs(self._options.hook, workers, self._groups, self._config, chunk_bytes, self._block_hash)
        self._open(self._options.hook.connect_deadline_s, require=self._options.hook.require_store)

    @property
    def _open_tier(self) -> KVStoreTier:
        assert self._tier is not None
        return self._tier

    def _open(self, deadline_s: float, *, require: bool) -> None:
        """Connect the tier in the namespaces of the current weights epoch, all at once.

        Raises:
            KVStoreError: a required store does not answer, or an option is impossible.
        """
        hook = self._options.hook
        options = replace(hook.client_options(), client_name="vllm-tier", connect_deadline_s=deadline_s, require_store=require)
        specs = [replace(spec, weights_epoch=self._weights.name) for spec in self._specs.values()]
        connects: list[Future[KVClient]] = []
        failed: list[BaseException] = []
        with ThreadPoolExecutor(max_workers=len(specs)) as pool:
            try:
                connects.extend(submit(pool, hook.connect, spec, options) for spec in specs)  # keeps those before an error
            except Unavailable as error:
                failed.append(error)
        failed += [why for one in connects if (why := one.exception()) is not None]
        if failed:
            for one in connects:
                if one.exception() is None:
                    one.result().close()
            raise failed[0]
        self._open_tier.open(
            {group_id: ChunkStore(one.result()) for group_id, one in zip(self._specs, connects, strict=True)},
            self._groups,
            engine_hash_name(self._vllm_config),
        )
        for spec in specs:
            _log.info("namespace used: %s (model=%s, %s)", spec.namespace.hex(), spec.model, spec.layout)

    # ---- scheduler ----
    def on_new_request(self, request: Any) -> None:  # noqa: ANN401
        """Receive a request. vLLM calls this in the scheduler."""
        self._open_tier.begin_request(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401
        """Return how many more tokens can be loaded, and whether asynchronously; None: ask again, the weights are checked."""
        if self._weights.hold_back():
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[no-any-return]

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401
        """Apply the output of the workers. vLLM calls this in the scheduler after each step."""
        super().update_connector_output(connector_output)
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, TierOutput):
            self._open_tier.page_copies.reported(meta.completed_jobs)
            self._weights.answered(meta.weights)
        self._end_checks()

    def _end_checks(self) -> None:
        """Open the tier if a check of the weights has ended."""
        checked = not self._weights.is_open
        self._weights.end_checks()
        if checked and self._weights.is_open and self._specs:
            try:
                self._open(RECONNECT_S, require=False)
            except KVStoreError as error:
                _log.error("tier closed until the next reset: not connected (error=%s)", error)
            except Exception as error:  # noqa: BLE001  # the edge to the engine; for example, no more threads
                self._open_tier.counters.bug("connection of the tier", error)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ANN401
        """Return the plan of a step. A step without work waits a little for the end of a load, store or lookup.

        The wait comes last: vLLM has then begun what this step found to do.
        """
        self._end_checks()
        self._open_tier.mixing.step_planned(scheduler_output)
        plan = super().build_connector_meta(scheduler_output)
        self._open_tier.page_copies.planned([*plan.load_jobs, *plan.store_jobs])
        check = self._weights.plan_check(computes=bool(scheduler_output.total_num_scheduled_tokens))
        if check:
            assert isinstance(plan, OffloadingConnectorMetadata)
            return TierPlan(**vars(plan), weights_check=check)
        if not (scheduler_output.total_num_scheduled_tokens or plan.load_jobs or plan.store_jobs or plan.jobs_to_flush):
            self._open_tier.wait_ended(self._options.idle_wait_ms / 1_000, _COPYING_S)
        return plan

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:  # noqa: ANN401
        """Receive vLLM's block pool. After its reset, chunks are announced again: vLLM publishes that all blocks were cleared."""
        reset = gpu_block_pool.reset_prefix_cache

        @wraps(reset)
        def reset_prefix_cache() -> bool:
            done = bool(reset())
            if done and self._open_tier.observer is not None:
                self._open_tier.observer.announce_again()
            return done

        gpu_block_pool.reset_prefix_cache = reset_prefix_cache  # vLLM lacks a hook for a reset of the pool

    def reset_cache(self) -> bool | None:
        """Make sure that lookups no longer find KV of earlier weights. vLLM calls this when its cache is reset.

        The tier is closed until the weights are checked. If pages are in use, vLLM keeps its cache, and KV of the old weights
        would be stored under the name of the new ones. So the tier is then closed until a reset succeeds.
        """
        self._open_tier.close_stores()  # before vLLM waits for loads and stores under way: this cancels them
        reset: bool | None = super().reset_cache()
        self._open_tier.page_copies.reset()
        self._weights.reset_ended(cleared=not self._holds_pages())
        self._weights.renew()
        return False if self._weights.is_closed else reset

    def _holds_pages(self) -> bool:
        """Whether pages of the engine's cache are in use; the null page always is."""
        if self._kv_cache_manager is None:
            return False
        pool = self._kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - pool.get_num_free_blocks()) > 1

    # ---- worker ----
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step, with a check of the weights if it asks for one."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, TierPlan):
            self._digests[connector_metadata.weights_check, self._vllm_config.parallel_config.rank] = self._later_digest()

    def build_connector_worker_meta(self) -> TierOutput | None:
        """Return the jobs that have ended and digests of the weights, which vLLM sends to the scheduler."""
        output = super().build_connector_worker_meta()
        digests, self._digests = self._digests, {}
        if output is None:
            return TierOutput(weights=digests) if digests else None
        return TierOutput(output.completed_jobs, output.transfer_stats, digests)

    # ---- metrics ----
    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *more: Any) -> KVConnectorPromMetrics:  # noqa: ANN401
        """Declare the metrics. vLLM calls this in the process of its API server, which makes no instance."""
        transfer = vllm_config.kv_transfer_config
        transfer.kv_connector_extra_config = with_tier(transfer.kv_connector_extra_config or {})
        return super().build_prom_metrics(vllm_config, *more)


def with_tier(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's configuration with the store as a secondary tier, and with the options that it requires."""
    given = dict(extra_config)
    tiers = list(given.get("secondary_tiers", []))
    if not any(tier.get("type") == KVStoreTier.__name__ for tier in tiers):
        tiers.append({"type": KVStoreTier.__name__, "module_path": _PACKAGE})
    given["secondary_tiers"] = tiers
    given.setdefault("offload_prompt_only", False)  # a later turn begins with the answer
    if current_platform.is_cpu():
        given.setdefault("spec_name", "HostTieringSpec")
        given.setdefault("spec_module_path", _PACKAGE)
    else:
        given.setdefault("spec_name", "TieringOffloadingSpec")
    return given
