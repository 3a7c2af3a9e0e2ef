"""The facade that vLLM loads. ``scheduler_connector`` makes the decisions, ``worker_connector`` moves the pages.

Loaded out of tree: ``kv_connector`` is ``KVStoreConnector``, ``kv_connector_module_path`` this module. vLLM makes two instances:
one in each worker, one in the scheduler's process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

from kvclient import CacheSpec, ClientOptions, KVClient, Tier
from kvclient.engines.engine_log import share_handlers
from kvclient.engines.vllm.announcements.messages import engine_hash_name, group_kinds
from kvclient.engines.vllm.announcements.observer import RequestObserver
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.identity.adapter_mixing import AdapterMixing
from kvclient.engines.vllm.identity.engine_facts import (
    are_media_named,
    check_launcher,
    check_steps,
    group_facts,
    has_replica_of_lower_rank,
    keeps_drafts,
    kernel_of,
    whole_prompts_only,
)
from kvclient.engines.vllm.identity.epoch_machine import EpochDecision
from kvclient.engines.vllm.identity.kv_groups import GroupBlocks, check_stages, group_blocks, read_groups
from kvclient.engines.vllm.identity.model_weights import ModelWeights, gather_digests, later_digest
from kvclient.engines.vllm.identity.namespaces import group_spec
from kvclient.engines.vllm.identity.weights_check import combined_digest
from kvclient.engines.vllm.identity.weights_epoch import WeightsEpoch, given_name, is_named
from kvclient.engines.vllm.memory.device_pages import make_pages
from kvclient.engines.vllm.memory.int8_groups import int8_groups
from kvclient.engines.vllm.memory.pages import GroupPages, Pages
from kvclient.engines.vllm.options import RECONNECT_S, RESET_GRACE_S, ConnectorOptions
from kvclient.engines.vllm.plan import StepPlan, WorkerOutput
from kvclient.engines.vllm.scheduler.prefix_cache_watch import PrefixCacheWatch
from kvclient.engines.vllm.scheduler.prefix_lookup import BackgroundLookup
from kvclient.engines.vllm.scheduler.scheduler_connector import SchedulerConnector
from kvclient.engines.vllm.scheduler.verdicts import Verdicts
from kvclient.engines.vllm.versions import check_version, vllm_imports
from kvclient.engines.vllm.worker.cpu_affinity import unbound
from kvclient.engines.vllm.worker.sleep_mode import guard_sleep, may_sleep
from kvclient.engines.vllm.worker.worker_connector import LoadCompletions, WorkerConnector
from kvstore.recompute.decisions import LoadDecisions
from kvstore.recompute.verdict import Overlap

with vllm_imports():
    import vllm
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from kvclient.engines.vllm.metrics import CACHE_INFO, COPY_RATES, StorePromMetrics, StoreStats

_log = logging.getLogger(__name__)
_MAX_PENDING = 1_024
"""Loads of one group that may wait or run at once: about as many requests as an engine has."""
_NULL_PAGES = 1
"""Pages that vLLM's pool always counts as used."""
_RESET_WAIT_S = 1.0
"""How long a reset of the cache waits, once stores are given up, for the copies that run."""
_SOURCES = {Tier.DRAM: CacheHitSource.HOST, Tier.NVME: CacheHitSource.DISK}


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The plan of a step, which vLLM sends from the scheduler to the workers."""

    plan: StepPlan


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """The output of a worker, which vLLM sends to the scheduler after a step."""

    answer: WorkerOutput

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Merge the output of another worker. vLLM combines all workers before the scheduler gets the output."""
        self.answer.merge(other.answer)
        return self


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Sent by a worker to the scheduler at the start: the namespaces of its pages, one per part of a group.

    ``tables``: the block table of each part. ``rank`` and ``digest`` are of the worker and its weights. ``whole_prompts_only``:
    the backend or model that cannot continue after a prefix, if any.
    """

    specs: list[CacheSpec]
    tables: list[int]
    rank: int
    digest: str
    whole_prompts_only: str = ""


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV connector to the tiered store. Methods without underscore are hooks that vLLM calls.

    ``scheduler_side`` and ``worker_side`` are the two halves: an instance has one of them, according to its role.
    """

    options_class: type[ConnectorOptions] = ConnectorOptions

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:  # noqa: ANN401
        """Create one side of the connector. vLLM does this once in the scheduler and once in each worker.

        Raises:
            InvalidArgument: an impossible option, or a model or way of running it that the connector cannot serve.
            Unsupported: an untested version of vLLM.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        share_handlers(logging.getLogger("vllm"))
        self._options = self.options_class.from_mapping(self._kv_transfer_config.kv_connector_extra_config or {})
        check_version(vllm.__version__, allow_untested=self._options.allow_untested_vllm)
        self._groups = read_groups(vllm_config, kv_cache_config)
        self._tables = len({group.table for group in self._groups})
        """Number of vLLM's KV cache groups, each of which has one block table and one or more parts."""
        self._options.check_groups(self._tables, len(self._groups))
        check_launcher(vllm_config.parallel_config)
        if self._options.load_mode == "layerwise":
            check_steps(vllm_config)
        self._first_name = given_name(self._options)
        """Of the first weights epoch, by the user; empty: none."""
        self._digest = ""
        """Of a worker's weights at the start."""
        self._pages: Sequence[Pages] = ()
        self._specs: list[CacheSpec] = []
        self._shards: list[list[CacheSpec]] = []
        self._whole_prompts_only = ""
        self._scheduler: SchedulerConnector | None = None
        self._observer: RequestObserver | None = None
        self._cache_watch: PrefixCacheWatch | None = None
        self._shown_cache: tuple[str, int] | None = None
        """Name and state of the prefix cache, as routers know it."""
        self._worker: WorkerConnector | None = None
        self._shown_rates: Mapping[str, Any] = {}
        """Copy strategies and their rates, as the metrics show them."""
        self._restore_allocator: Callable[[], None] | None = None
        self._completions = LoadCompletions()
        self._raised_before: BaseException | None = None
        """The exception that the caller of the step is handling, if any."""
        if role == KVConnectorRole.SCHEDULER:
            counters, blocks = ConnectorCounters(), group_blocks(self._groups)
            self._observer = self._make_observer(vllm_config, kv_cache_config, blocks, counters)
            self._scheduler = SchedulerConnector(
                self._options,
                blocks,
                workers=vllm_config.parallel_config.world_size,
                observer=self._observer,
                counters=counters,
                weights=WeightsEpoch(self._options, vllm_config.parallel_config.world_size, counters.add),
            )
            self._scheduler.media_named = are_media_named(vllm_config)
            self._scheduler.keeps_drafts = keeps_drafts(vllm_config)
            if (lora := getattr(vllm_config, "lora_config", None)) is not None:
                self._scheduler.adapters.target_modules = tuple(lora.target_modules or ())
                self._scheduler.adapters.watch()
            self._scheduler.adapters.mixing = AdapterMixing(vllm_config)

    def _make_observer(
        self,
        vllm_config: Any,  # noqa: ANN401
        kv_cache_config: Any,  # noqa: ANN401
        blocks: GroupBlocks,
        counters: ConnectorCounters,
    ) -> RequestObserver | None:
        """Return what announces and labels blocks; None: neither is wanted, or vLLM hashes other blocks."""
        events, block_tokens = vllm_config.kv_events_config, blocks.block_tokens
        announce = events is not None and events.enable_kv_cache_events
        if not (announce or self._options.block_labels):
            return None
        if not blocks.has_equal_pages or kv_cache_config.hash_block_size not in {None, block_tokens}:
            _log.warning("blocks are neither announced nor labelled: vLLM hashes blocks of another size")
            return None
        return RequestObserver(
            self._options,
            group_kinds(kv_cache_config),
            block_tokens,
            engine_hash=engine_hash_name(vllm_config),
            announce=announce,
            counters=counters,
        )

    # ---- start: worker, then scheduler ----
    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Connect to the store. vLLM calls this in a worker after it allocated the KV cache, which defines the namespaces."""
        config = self._kv_cache_config
        pages = self._pages = self._make_pages([[kv_caches[name] for name in group.layers] for group in self._groups])
        weights = ModelWeights.of_caller(self._vllm_config.model_config.dtype)
        parallel = self._vllm_config.parallel_config
        digest = self._digest = weights.digest()
        epoch = self._first_name or combined_digest(gather_digests(digest, parallel))
        facts = group_facts(self._vllm_config, config, self._groups, pages, kv_caches, named=is_named(self._options))
        self._specs = [group_spec(self._options.hook.with_epoch(epoch), one) for one in facts]
        for spec in self._specs:
            _log.info("namespace used: %s (model=%s, %s)", spec.namespace.hex(), spec.model, spec.layout)
        self._whole_prompts_only = whole_prompts_only(self._vllm_config, self._groups)
        layers = [group.layers for group in self._groups]
        stores = self._options.hook.store and not has_replica_of_lower_rank(config)
        with unbound():
            self._worker = WorkerConnector(
                self._options,
                self._connect_worker,
                epoch,
                pages,
                layers,
                stores=stores,
                weights=later_digest(weights, parallel),
                digest=digest,
                rank=parallel.rank,
            )
            self._guard_sleep()
            self._worker.wait_pinned()  # vLLM captures graphs next; the driver may refuse to pin during that

    def _guard_sleep(self) -> None:
        """If the engine may unmap a KV cache on a device, let it do so only without copies under way.

        Raises:
            InvalidArgument: vLLM's sleep mode is on, in a form that cannot be guarded.
        """
        if all(isinstance(pages, GroupPages) for pages in self._pages) or not may_sleep(self._vllm_config.model_config):
            return
        from vllm.device_allocator import get_mem_allocator_instance  # fails on a CPU

        self._restore_allocator = guard_sleep(get_mem_allocator_instance(), self.worker_side)

    def _make_pages(self, groups: Sequence[Sequence[Any]]) -> Sequence[Pages]:
        """Return the pages of the worker's tensors, on the host or a device."""
        options = self._options
        strategy: Any = options.device_copies
        gds: Any = options.device_gds
        int8 = None
        if options.stored_dtype == "int8":
            int8 = [
                int8_groups(layers[0], group.kind, *kernel_of(self._vllm_config, group))
                for group, layers in zip(self._groups, groups, strict=True)
            ]
        return make_pages(
            groups,
            self._kv_cache_config.num_blocks,
            strategy=strategy,
            staging_bytes=options.device_staging_bytes,
            checksums=options.device_checksums,
            gds=gds,
            ring_bytes=options.device_gds_bytes,
            int8=int8,
        )

    def _connect_worker(self, weights_epoch: str) -> Sequence[KVClient]:
        """Make the clients of an epoch, one per part of a group."""
        options, connect = self._worker_options(), self._options.hook.connect
        if self._worker is not None:  # between two steps of a running engine
            options = replace(options, require_store=False, connect_deadline_s=RECONNECT_S)
        specs = [replace(spec, weights_epoch=weights_epoch) for spec in self._specs]
        with unbound(), ExitStack() as failed:
            clients = []
            for spec, pages in zip(specs, self._pages, strict=True):
                clients.append(connect(spec, options, device=pages.watcher(spec), gds=pages.disk_reader()))
                failed.callback(clients[-1].close)
            failed.pop_all()
            return clients

    def _worker_options(self) -> ClientOptions:
        return replace(self._options.hook.client_options(), client_name="vllm-worker", max_pending=_MAX_PENDING)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return the namespaces of a worker's pages. vLLM sends them to the scheduler at start."""
        tables = [group.table for group in self._groups]
        return Handshake(self._specs, tables, self._vllm_config.parallel_config.rank, self._digest, self._whole_prompts_only)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """Receive the namespaces of all workers, in the scheduler. Ranks with equal pages have equal namespaces.

        Raises:
            InvalidArgument: a worker has no layer of some part of a KV cache group.
        """
        handshakes: list[Handshake] = []
        for _, handshake in sorted(metadata.items()):
            assert isinstance(handshake, Handshake)
            handshakes.append(handshake)
        tables = check_stages([handshake.tables for handshake in handshakes])
        shards: list[list[CacheSpec]] = [[] for _ in tables]
        digests: dict[int, str] = {}
        for handshake in handshakes:
            self._whole_prompts_only = handshake.whole_prompts_only or self._whole_prompts_only
            digests[handshake.rank] = handshake.digest
            for known, spec in zip(shards, handshake.specs, strict=True):
                if spec not in known:
                    known.append(spec)
        self._shards = shards
        # vLLM shows the scheduler one layer of a group, and so not all parts
        self.scheduler_side.use_blocks(GroupBlocks([specs[0].block_tokens for specs in shards], tables))
        digest = combined_digest(digest for _, digest in sorted(digests.items()))
        self.scheduler_side.weights.start(shards[0][0].weights_epoch, digest)
        self._connect_scheduler()

    def _connect_scheduler(self) -> None:
        """Look up prefixes in the namespaces of the current epoch, unless vLLM computes prompts only as a whole."""
        if self._whole_prompts_only:
            self.scheduler_side.counters.add("whole_prompts_only")
            _log.warning("%s computes prompts only as a whole: nothing is loaded or stored", self._whole_prompts_only)
            return
        weights = self.scheduler_side.weights
        name = weights.name
        shards = [[replace(spec, weights_epoch=name) for spec in group] for group in self._shards]
        running = self.scheduler_side.prefix_lookup is not None
        finder = BackgroundLookup(self._options.hook, shards, self.scheduler_side.counters, running=running)
        self.scheduler_side.connect(finder, weights.number, name)
        if self._options.load_choice != "always" and len(shards) == 1 and not running:
            if self._kv_transfer_config.kv_load_failure_policy == "recompute":
                self.scheduler_side.use_verdicts(self._make_verdicts(shards[0][0], finder.blocks.block_tokens))
            else:  # a probe that ends early would end its request
                _log.warning("found blocks are always loaded: load_choice requires kv_load_failure_policy recompute")
        if self._observer is not None:
            self._observer.connect([spec for group in shards for spec in group], finder.chain.spec)
        if self._cache_watch is None and not running:
            self._cache_watch = self._make_cache_watch(shards, finder.chain.spec)
        elif self._cache_watch is not None:
            self._cache_watch.connect(finder.chain.spec)

    def _make_cache_watch(self, shards: Sequence[Sequence[CacheSpec]], chain: CacheSpec) -> PrefixCacheWatch | None:
        """Return what publishes the blocks of vLLM's own prefix cache; None: it is not wanted, or not possible."""
        config, blocks = self._kv_cache_config, group_blocks(self._groups)
        if not self._options.published_blocks or not self._options.hook.metadata:
            return None
        if not self._vllm_config.cache_config.enable_prefix_caching:
            return None
        kinds = {kind for group in self._groups for kind in group.kind.split("+")}
        hashed = blocks.has_equal_pages and config.hash_block_size in {None, blocks.block_tokens}
        if not hashed or any(kind.startswith(("sliding", "chunked")) for kind in kinds):
            self.scheduler_side.counters.add("cache_not_published")
            _log.info(
                "prefix cache not published: sliding windows, chunked attention or pages of several sizes (kinds=%s)",
                sorted(kinds),
            )
            return None
        block_bytes = sum(spec.block_bytes for group in shards for spec in group)
        with unbound():
            watch = PrefixCacheWatch(
                self._options,
                chain,
                self._tables,
                make_block_hash_with_group_id,
                capacity_bytes=config.num_blocks // self._tables * block_bytes,
                block_bytes=block_bytes,
                counters=self.scheduler_side.counters,
            )
        self.scheduler_side.watch_cache(watch)
        return watch

    def _make_verdicts(self, spec: CacheSpec, block_tokens: int) -> Verdicts:
        """Return what decides whether found blocks are loaded or computed. Its estimates outlive changes of the weights."""
        options = self._options
        decisions = LoadDecisions(
            block_tokens,
            spec.shape.block_bytes,
            step_tokens=self._vllm_config.scheduler_config.max_num_batched_tokens,
            overlap=Overlap.LAYERS if options.load_mode == "layerwise" else Overlap.NONE,
            least_tokens=options.min_load_tokens,
            deadline_s=options.hook.load_deadline_s,
        )
        workers = self._vllm_config.parallel_config.world_size
        return Verdicts(decisions, self.scheduler_side.counters, workers, asks_planner=options.load_choice == "auto")

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:  # noqa: ANN401
        """Receive vLLM's block pool, in which pages are pinned while they are stored. vLLM calls this in the scheduler."""
        self.scheduler_side.bind_pool(gpu_block_pool)
        reset = gpu_block_pool.reset_prefix_cache

        @wraps(reset)
        def reset_prefix_cache() -> bool:
            used = gpu_block_pool.num_gpu_blocks - gpu_block_pool.get_num_free_blocks()
            if used == len(self.scheduler_side.pinned_pages) + _NULL_PAGES:  # nothing else is in the way
                self.scheduler_side.release_pins(self._page_release())
            done = bool(reset())
            if done:
                if self._cache_watch is not None:
                    self._cache_watch.clear()
                if self._observer is not None:
                    self._observer.events.announce_again()  # vLLM publishes that all blocks were cleared
            self._apply(self.scheduler_side.weights.reset_ended(cleared=done))  # a reset often belongs to a change of the weights
            return done

        gpu_block_pool.reset_prefix_cache = reset_prefix_cache  # vLLM lacks a hook before a reset, and pinned pages make it fail

    def _page_release(self) -> Callable[[], WorkerOutput] | None:
        """Return a function that cancels all stores of this engine at once; None: its workers are in other processes."""
        if self._vllm_config.parallel_config.world_size > 1 or not has_kv_transfer_group():
            return None
        connector = get_kv_transfer_group()
        if not isinstance(connector, KVStoreConnector):  # another connector holds ours
            return None
        return partial(connector.worker_side.release_pages, RESET_GRACE_S, _RESET_WAIT_S)

    # ---- scheduler ----
    def on_new_request(self, request: Any) -> None:  # noqa: ANN401
        """Start the lookup of a request that vLLM received."""
        self.scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401
        """Return how many more tokens can be loaded, and whether asynchronously; vLLM asks before it schedules a request."""
        return self.scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401
        """Record the pages that vLLM allocated for a request."""
        if num_external_tokens:
            self.scheduler_side.update_state_after_alloc(request, blocks.get_block_ids(), num_external_tokens)
        else:
            self.scheduler_side.computed_without_load(request.request_id)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:  # noqa: ANN401
        """Return the tokens of a hit by tier, according to the index, for vLLM's statistics."""
        if not num_external_tokens:
            return {}
        hits = self.scheduler_side.hits_by_tier(request, num_external_tokens)
        sources = {_SOURCES[tier]: tokens for tier, tokens in hits.items() if tier in _SOURCES}
        rest = num_external_tokens - sum(sources.values())
        return {**sources, CacheHitSource.EXTERNAL_UNSPECIFIED: rest} if rest else sources

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ANN401
        """Return the plan of a step, which vLLM sends to the workers."""
        self._apply(self.scheduler_side.weights.end_checks())  # late ones; during a check, no step has planned a load
        self.scheduler_side.adapters.mixing.step_planned(scheduler_output)
        state = scheduler_output.kv_connector_block_state
        plan = self.scheduler_side.build_step_plan(
            scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens, state.resolve_block_ids
        )
        return StepMetadata(plan)

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401
        """Apply the output of the workers. vLLM calls this in the scheduler after each step."""
        meta = connector_output.kv_connector_worker_meta
        self.scheduler_side.output_arrived(meta.answer if meta is not None else None)
        invalid, failed = connector_output.invalid_block_ids, connector_output.failed_recving
        if invalid or failed:
            self.scheduler_side.on_loads_failed(set(invalid or ()), set(failed or ()))
        if connector_output.finished_recving:
            self.scheduler_side.on_loads_finished(connector_output.finished_recving)
        if meta is not None:
            self.scheduler_side.on_worker_output(meta.answer)
        self._apply(self.scheduler_side.weights.end_checks())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ANN401
        """Forget a request that has ended. vLLM may free its pages at once, except pinned ones (single KV cache group)."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Any,  # noqa: ANN401
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request that has ended. vLLM may free its pages at once, except pinned ones (several KV cache groups)."""
        self.scheduler_side.request_finished(request)
        return False, None

    def has_pending_block_frees(self) -> bool:
        """Whether pinned pages will be free soon. vLLM then waits for them instead of preempting a request."""
        return self.scheduler_side.frees_pages_soon

    def has_pending_push_work(self) -> bool:
        """Whether pages are pinned or workers must be told something. vLLM then runs steps even without requests."""
        return self.scheduler_side.has_pins or self.scheduler_side.has_messages

    def reset_cache(self) -> bool | None:
        """Make lookups miss KV of earlier weights. vLLM calls this when its cache is reset; False: it kept its cache."""
        self._apply(self.scheduler_side.weights.renew())
        return not self.scheduler_side.weights.is_closed

    def _apply(self, decision: EpochDecision) -> None:
        """Do what follows from an event of the weights."""
        if decision in {EpochDecision.BEGIN, EpochDecision.CLOSE}:
            self._forget_weights()
        if decision is EpochDecision.BEGIN:
            try:
                self._connect_scheduler()
            except Exception:  # noqa: BLE001  # the edge to the engine; for example, no more threads
                _log.exception("weights epoch not begun")
                self._apply(self.scheduler_side.weights.begin_failed())

    def _forget_weights(self) -> None:
        """Give up what belongs to earlier weights, apart from what ``SchedulerConnector`` does itself."""

    @property
    def scheduler_side(self) -> SchedulerConnector:
        """The half that decides, in the instance of the scheduler."""
        assert self._scheduler is not None
        return self._scheduler

    # ---- worker ----
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step. vLLM passes the plan of the scheduler to each worker."""
        super().bind_connector_metadata(connector_metadata)
        self._raised_before = sys.exc_info()[1]
        self.worker_side.begin_step(self._plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Start the loads of a step. vLLM calls this before the forward pass."""
        with unbound() if self._plan.loads else nullcontext():
            self.worker_side.begin_loads(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for the loads of a layer. vLLM calls this before the attention of the layer."""
        self.worker_side.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Do nothing: blocks are stored when all layers are complete. vLLM calls this after the attention of a layer."""

    def wait_for_save(self) -> None:
        """Start the stores of a step. vLLM calls this after the forward pass, also if it raised an exception."""
        raised = sys.exc_info()[1]
        self.worker_side.end_forward(self._plan, computed=raised is None or raised is self._raised_before)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads have ended or failed. vLLM calls this after each step."""
        self._completions = self.worker_side.take_completions(self._plan, finished_req_ids)
        return KVConnectorTransferResults(
            finished_recving=self._completions.received,
            failed_recving=self._completions.failed if self._tables > 1 else set(),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the pages that were not loaded, which vLLM recomputes.

        With several groups, page ids are ambiguous, so ``get_transfer_results`` returns the requests instead.
        """
        return self._completions.missing if self._tables == 1 else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return the stores that have ended, which vLLM sends to the scheduler."""
        output = self.worker_side.take_output()
        return WorkerMetadata(output) if output is not None else None

    @property
    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.plan

    @property
    def worker_side(self) -> WorkerConnector:
        """The half that moves pages, in the instance of a worker whose KV cache is registered."""
        assert self._worker is not None
        return self._worker

    # ---- both ----
    def get_kv_connector_stats(self) -> StoreStats | None:
        """Return the counts since the last call, for vLLM's log line and metrics."""
        side = self._worker or self._scheduler
        if self._worker is not None:
            self._worker.count_device_copies()
        counts: dict[str, Any] = side.counters.take() if side is not None else {}
        if self._worker is not None and (rates := self._worker.copy_rates()) != self._shown_rates:
            counts[COPY_RATES] = self._shown_rates = rates
        if self._cache_watch is not None:
            cache = self._cache_watch.name, int(self._cache_watch.is_published)
            if counts or cache != self._shown_cache:
                counts[CACHE_INFO] = self._shown_cache = cache
        return StoreStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StoreStats | None:
        """Return counts that vLLM received from another process."""
        return StoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> StorePromMetrics:  # noqa: ANN401
        """Return the Prometheus metrics of the counts for vLLM's metrics endpoint."""
        return StorePromMetrics(*args, **kwargs)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether vLLM must split CUDA graphs per layer, because each layer waits for its load."""
        return bool(extra_config.get("load_mode") == "layerwise")

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:  # noqa: ANN401
        """Return the order that vLLM's KV cache should have; None: any. vLLM uses another one if the backend cannot have this."""
        options = cls.options_class.from_mapping(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        return options.required_layout(current_platform.device_type, current_platform.get_device_capability())

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether stores must not be lost. They may: a dropped store is only a later miss."""
        return False

    def take_events(self) -> Iterable[Any]:
        """Return KV events since the last call, for blocks that this engine stored. vLLM publishes them."""
        return () if self._observer is None else self._observer.take_events()

    def shutdown(self) -> None:
        """Close all connections. vLLM calls this when the engine stops."""
        with ExitStack() as ends:  # call all, also if one fails; the last one first
            if self._observer is not None:
                ends.callback(self._observer.events.close)
            if self._cache_watch is not None:
                ends.callback(self._cache_watch.close)
            if self._scheduler is not None:
                ends.callback(self._scheduler.close)
            if self._worker is not None:
                ends.callback(self._worker.close)
            if self._restore_allocator is not None:
                ends.callback(self._restore_allocator)
