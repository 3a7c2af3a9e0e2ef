"""The facade that vLLM talks to. Everything is decided in ``scheduler_side`` and moved in ``worker_side``; here it is handed on.

Loaded out of tree: ``kv_connector`` is ``KVStoreConnector``, ``kv_connector_module_path`` this module. vLLM makes two instances:
one in each worker, one in the scheduler's process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvclient import CacheSpec
from kvclient.engines.vllm.engine_view import group_facts, has_replica_of_lower_rank, read_groups
from kvclient.engines.vllm.lookups import Finder
from kvclient.engines.vllm.namespaces import group_spec
from kvclient.engines.vllm.options import ConnectorOptions
from kvclient.engines.vllm.pages import GroupPages
from kvclient.engines.vllm.plan import StepAnswer, StepPlan
from kvclient.engines.vllm.scheduler_side import SchedulerSide
from kvclient.engines.vllm.worker_side import Arrivals, WorkerSide

_log = logging.getLogger(__name__)


@dataclass
class StepMetadata(KVConnectorMetadata):
    """A step's plan, as vLLM carries it to the workers."""

    plan: StepPlan


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """A worker's answer, as vLLM carries it back."""

    answer: StepAnswer

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Another worker's, added."""
        self.answer.merge(other.answer)
        return self


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler at start: the namespaces of its pages, a group each."""

    specs: list[CacheSpec]


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector to the tiered store."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:  # noqa: ANN401
        """Made by vLLM.

        Raises:
            InvalidArgument: an impossible option, or a model or way of running it that the connector cannot serve.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = ConnectorOptions.from_mapping(self._kv_transfer_config.kv_connector_extra_config or {})
        self._groups = read_groups(vllm_config, kv_cache_config)
        self._specs: list[CacheSpec] = []
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            parallel = vllm_config.parallel_config
            self._scheduler = SchedulerSide(
                self._options, self._groups[0].block_tokens, len(self._groups), workers=parallel.world_size
            )

    # ---- start: worker, then scheduler ----
    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """The worker's pages exist: their namespaces are known, and clients are made."""
        config = self._kv_cache_config
        pages = [GroupPages([kv_caches[name] for name in group.layers], config.num_blocks) for group in self._groups]
        facts = group_facts(self._vllm_config, config, self._groups, pages, kv_caches)
        hook = self._options.hook
        self._specs = [group_spec(hook, one) for one in facts]
        for spec in self._specs:
            _log.info("namespace %s: %s %s", spec.namespace.hex(), spec.model, spec.layout)
        options = replace(hook.client_options(), client_name="vllm-worker", max_pending=_MAX_PENDING)
        clients = [hook.connect(spec, options) for spec in self._specs]
        layers = [group.layers for group in self._groups]
        self._worker = WorkerSide(self._options, clients, pages, layers, stores=not has_replica_of_lower_rank(config))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """For the scheduler."""
        return Handshake(self._specs)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """All workers have said which namespaces they have. Ranks with the same pages name the same."""
        groups: list[list[CacheSpec]] = [[] for _ in self._groups]
        for _, handshake in sorted(metadata.items()):
            for shards, spec in zip(groups, handshake.specs, strict=True):
                if spec not in shards:
                    shards.append(spec)
        assert self._scheduler is not None
        self._scheduler.connect(Finder(self._options.hook, groups))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:  # noqa: ANN401
        """Where pages are pinned while they are read."""
        assert self._scheduler is not None
        self._scheduler.bind_pool(gpu_block_pool)

    # ---- scheduler ----
    def on_new_request(self, request: Any) -> None:  # noqa: ANN401
        """A request arrived."""
        self._side.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401
        """How many tokens of it can be loaded."""
        return self._side.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401
        """Pages for it exist."""
        self._side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ANN401
        """What the workers are to do in this step."""
        state = scheduler_output.kv_connector_block_state
        plan = self._side.plan_step(
            scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens, state.resolve_block_ids
        )
        return StepMetadata(plan)

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401
        """What the workers have done."""
        invalid, failed = connector_output.invalid_block_ids, connector_output.failed_recving
        if invalid or failed:
            self._side.loads_failed(set(invalid or ()), set(failed or ()))
        if connector_output.finished_recving:
            self._side.loads_done(connector_output.finished_recving)
        meta = connector_output.kv_connector_worker_meta
        if meta is not None:
            self._side.answered(meta.answer)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ANN401
        """The end of a request; its pages may go, but for those that are pinned."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Any,  # noqa: ANN401
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, with several groups."""
        self._side.finished(request)
        return False, None

    def has_pending_block_frees(self) -> bool:
        """Whether waiting is better than preempting: pinned pages will be free soon."""
        return self._side.has_pins

    def has_pending_push_work(self) -> bool:
        """Whether steps go on without requests, so that pins are given back."""
        return self._side.has_pins

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    # ---- worker ----
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """The loads of this step begin."""
        self._moves.begin_loads(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A layer is about to be used."""
        self._moves.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """A layer of this step is complete: blocks are stored when all are."""

    def wait_for_save(self) -> None:
        """The forward pass is over."""
        self._moves.end_forward(self._plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended."""
        arrivals = self._moves.arrivals(self._plan, finished_req_ids)
        self._arrivals = arrivals
        several = len(self._groups) > 1
        return KVConnectorTransferResults(
            finished_recving=arrivals.received, failed_recving=arrivals.failed if several else set()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that were not loaded. With several groups page ids say nothing: requests are named instead."""
        return self._arrivals.missing if len(self._groups) == 1 else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Stores that have ended."""
        answer = self._moves.answer()
        return WorkerMetadata(answer) if answer is not None else None

    @property
    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.plan

    @property
    def _moves(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    # ---- both ----
    def take_events(self) -> Iterable[Any]:
        """Events of the store's: none."""
        return ()

    def shutdown(self) -> None:
        """The end of the engine."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    _arrivals = Arrivals()


_MAX_PENDING = 1_024
"""Loads of one group that may wait or run at once: about as many requests as an engine has."""
