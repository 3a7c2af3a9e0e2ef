"""The facade for engines that prefill for others, or decode what others have prefilled: ``KVStorePDConnector``.

It extends the connector by the ``kv_transfer_params`` of requests (``pd.params``). A request without them is served as by the
connector itself, so an engine may do both.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from kvclient import ClientOptions, InvalidArgument
from kvclient.engines.vllm.connector import KVStoreConnector, StepMetadata, WorkerMetadata
from kvclient.engines.vllm.identity.keys import is_hashable
from kvclient.engines.vllm.identity.kv_groups import check_handoffs
from kvclient.engines.vllm.pd.options import PdOptions
from kvclient.engines.vllm.pd.params import Role, Transfer, not_handed_over, read_transfer
from kvclient.engines.vllm.pd.plan import PdPlan, PdWorkerOutput
from kvclient.engines.vllm.pd.receiver import Receiver
from kvclient.engines.vllm.pd.scheduler import PdScheduler, TransferState
from kvclient.engines.vllm.pd.sender import Sender
from kvclient.engines.vllm.plan import WorkerOutput
from kvclient.engines.vllm.worker.cpu_affinity import unbound

_log = logging.getLogger(__name__)


@dataclass
class PdStepMetadata(StepMetadata):
    """The plan of a step, including handoffs."""

    pd: PdPlan = field(default_factory=PdPlan)


@dataclass
class PdWorkerMetadata(WorkerMetadata):
    """The output of a worker, including handoffs and received prompts."""

    pd: PdWorkerOutput = field(default_factory=PdWorkerOutput)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PdWorkerMetadata:
        """Merge the output of another worker. vLLM combines all workers before the scheduler gets the output."""
        assert isinstance(other, PdWorkerMetadata)
        self.answer.merge(other.answer)
        self.pd.merge(other.pd)
        return self


class KVStorePDConnector(KVStoreConnector):
    """vLLM's KV connector to the tiered store, with handoffs of prompts between engines."""

    options_class = PdOptions

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:  # noqa: ANN401
        """Create one side of the connector; see ``KVStoreConnector``."""
        super().__init__(vllm_config, role, kv_cache_config)
        if getattr(
            vllm_config.parallel_config, "use_ubatching", False
        ):  # each half of a batch would say that a layer is complete
            raise InvalidArgument("handoffs of engines that split their batches are not supported: leave out --enable-dbo")
        check_handoffs(self._groups)
        self._pd: PdScheduler | None = None
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._pd = PdScheduler(
                self._groups[0].block_tokens,
                [group.first_needed for group in self._groups],
                self._options.pinned_share,
                self.scheduler_side.counters,
                workers=vllm_config.parallel_config.world_size,
                pinned=self.scheduler_side.pinned,
                adapters=self.scheduler_side.adapters,
            )

    @property
    def _pd_options(self) -> PdOptions:
        assert isinstance(self._options, PdOptions)
        return self._options

    # ---- start ----
    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Connect to the store. vLLM calls this in a worker after it allocated the KV cache."""
        super().register_kv_caches(kv_caches)
        moves, options = self.worker_side, self._pd_options
        self._sender = Sender(moves.pages, moves.layer_positions, options.handoff_deadline_s, moves.counters)
        verify = self._worker_options().verify
        self._receiver = Receiver(moves.pages, options.prompt_deadline_s, moves.counters, verify=verify)

    def _worker_options(self) -> ClientOptions:
        """Return the client options of a worker, with a thread for each awaited prompt."""
        return replace(super()._worker_options(), prompt_workers=self._pd_options.max_prompts)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:  # noqa: ANN401
        """Receive vLLM's block pool, in which pages are pinned while they are stored or handed over."""
        super().bind_gpu_block_pool(gpu_block_pool)
        self._pd_side.bind_pool(gpu_block_pool)

    # ---- scheduler ----
    def on_new_request(self, request: Any) -> None:  # noqa: ANN401
        """Start a request that vLLM received. If another engine sends its prompt, it is looked up only if the prompt fails."""
        transfer = self._transfer_of(request)
        finder = self.scheduler_side.prefix_lookup
        if transfer is None or finder is None or self.scheduler_side.weights.is_closed:
            super().on_new_request(request)
            return
        adapter = self.scheduler_side.adapters.weights(request.lora_request) if request.lora_request is not None else None
        if not is_hashable(request, adapter, media_named=self.scheduler_side.media_named):
            super().on_new_request(request)
            return
        self._pd_side.on_new_request(request, transfer, finder.chain, adapter)
        if transfer.role is Role.PREFILL:
            super().on_new_request(request)
            self.scheduler_side.disable_store(request.request_id)

    def _transfer_of(self, request: Any) -> Transfer | None:  # noqa: ANN401
        try:
            return read_transfer(request.kv_transfer_params)
        except InvalidArgument as error:
            self.scheduler_side.counters.add("transfers_refused")
            _log.warning("request %s is served without a transfer: %s", request.request_id, error)
            return None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401
        """Return how many more tokens can be loaded, and whether asynchronously; vLLM asks before it schedules a request."""
        state = self._pd_side.state(request.request_id)
        weights = self.scheduler_side.weights
        if state is TransferState.AWAITED or weights.hold_back():
            return None, False
        arrived = state is TransferState.ARRIVED
        if arrived and (tokens := self._pd_side.get_num_new_matched_tokens(request, num_computed_tokens)):
            return tokens, True
        if self._pd_side.pop_given_up(request.request_id):
            super().on_new_request(request)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401
        """Record the pages that vLLM allocated for a request."""
        if self._pd_side.state(request.request_id) is TransferState.ARRIVED and num_external_tokens:
            self._pd_side.update_state_after_alloc(request, blocks.get_block_ids(), num_external_tokens)
            return
        if self._pd_side.pop_unread(request.request_id):  # vLLM's own cache holds as much
            super().on_new_request(request)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ANN401
        """Return the plan of a step, which vLLM sends to the workers."""
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, StepMetadata)
        pd = self._pd_side.build_step_plan(
            scheduler_output.num_scheduled_tokens if self.scheduler_side.weights.is_open else {},
            scheduler_output.scheduled_spec_decode_tokens,
            scheduler_output.kv_connector_block_state.resolve_block_ids,
            hold=self.scheduler_side.defers_stores(metadata.plan),
        )
        return PdStepMetadata(metadata.plan, pd)

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401
        """Apply the output of the workers. vLLM calls this in the scheduler after each step."""
        invalid, failed = connector_output.invalid_block_ids, connector_output.failed_recving
        if invalid or failed:
            self._pd_side.on_copies_failed(set(invalid or ()), set(failed or ()))
            self._pd_side.drop_deferred()
        for request, held_blocks in self._pd_side.on_copies_finished(connector_output.finished_recving or ()):
            self.scheduler_side.on_new_request(request, look_up=held_blocks == 0)
            self.scheduler_side.mark_stored(request.request_id, held_blocks)
        super().update_connector_output(connector_output)
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, PdWorkerMetadata):
            self._pd_side.on_worker_output(meta.pd)

    def request_finished_all_groups(
        self,
        request: Any,  # noqa: ANN401
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request that has ended. For a prefill, return the parameters for the decode engine."""
        delayed, params = super().request_finished_all_groups(request, block_ids)
        for_decode = self._pd_side.request_finished(request.request_id)
        if for_decode is None:
            for_decode = not_handed_over(request.kv_transfer_params)
        return delayed, for_decode if for_decode is not None else params

    def has_pending_push_work(self) -> bool:
        """Whether pins or abandoned transfers remain. vLLM then runs steps even without requests."""
        return super().has_pending_push_work() or self._pd_side.has_pins or self._pd_side.has_abandons

    def _forget_weights(self) -> None:
        """Abandon transfers, since they belong to the old weights."""
        self._pd_side.forget()

    @property
    def _pd_side(self) -> PdScheduler:
        assert self._pd is not None
        return self._pd

    # ---- worker ----
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the handoffs of a step, and wait for the prompts that it awaits."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, PdStepMetadata)
        plan, pd, moves = connector_metadata.plan, connector_metadata.pd, self.worker_side
        assert self._sender is not None
        assert self._receiver is not None
        self._sender.end_unfinished()
        if not pd:
            return
        with unbound():
            self._receiver.drop(pd.drops)
            self._receiver.begin(pd.awaits, plan.chain, moves.clients)
            self._receiver.take(pd.copies)
            self._sender.begin(pd.sends, plan.chain, moves.clients)
            self._sender.abandon(pd.abandons, moves.clients)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Hand over a layer. vLLM calls this after the attention of the layer."""
        assert self._sender is not None
        self._sender.layer(layer_name)

    def wait_for_save(self) -> None:
        """Start the stores, and complete the handoffs of a step. vLLM calls this after the forward pass."""
        super().wait_for_save()
        assert self._sender is not None
        self._sender.end_step(good=not self.worker_side.step_failed)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads or prompts have ended or failed. vLLM calls this after each step."""
        assert self._sender is not None
        assert self._receiver is not None
        if not self._plan.has_tokens:
            self._wait_idle()
        results = super().get_transfer_results(finished_req_ids)
        taken = self._receiver.take_completions()
        self._completions.missing |= taken.missing
        results.finished_recving = (results.finished_recving or set()) | taken.received
        if len(self._groups) > 1:
            results.failed_recving = (results.failed_recving or set()) | taken.failed
        return results

    def _wait_idle(self) -> None:
        """Wait briefly in a step without tokens, so that an idle engine does not spin."""
        assert self._sender is not None
        assert self._receiver is not None
        if self._receiver.is_busy:
            self._receiver.wait(self._options.idle_wait_s)
        elif self._sender.is_busy:
            self._sender.wait(self._options.idle_wait_s)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return the stores, handoffs and prompts that have ended, which vLLM sends to the scheduler."""
        assert self._sender is not None
        assert self._receiver is not None
        meta = super().build_connector_worker_meta()
        known, incomplete = self._receiver.take_known()
        pd = PdWorkerOutput(self._sender.take(), dict.fromkeys(known, 1), incomplete)
        if meta is None and not pd:
            return None
        assert meta is None or isinstance(meta, WorkerMetadata)
        return PdWorkerMetadata(meta.answer if meta is not None else WorkerOutput(), pd)

    def shutdown(self) -> None:
        """Close all connections. vLLM calls this when the engine stops."""
        with ExitStack() as ends:  # call all, also if one fails
            ends.callback(super().shutdown)
            if self._sender is not None and self._receiver is not None:
                ends.callback(self._receiver.close)
                ends.callback(self._sender.close)
