"""The scheduler side of prefill/decode transfers. No vLLM types, and no waiting.

On the prefill engine, each step that completes blocks of such a prompt hands them over, the prefix that was loaded or cached
included, and a partial last block with the last step. The pages are pinned until then. Such a request is not stored here: its
blocks are on the decode host now, which makes them durable. If some of them cannot get there, the transfer is abandoned: the
decode host is notified and stops waiting.

On the decode engine a request goes through these stages:

1. AWAITED: its prompt is waited for, in memory of the node's; the engine has given nothing to it. Asked how much can be loaded,
   the answer is *ask again*.
2. ARRIVED: the prompt is complete. All of it but the last token, which the engine computes, can be loaded.
3. COPYING: pages exist, and are being filled.
4. ENDED: it is like any other request. If the prompt did not arrive or could not be copied, the request starts here: it is
   looked up, and the rest is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from kvclient import BlockKey, KeyChain
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.identity.adapters import Adapters, AdapterWeights
from kvclient.engines.vllm.identity.keys import RequestKeys, VllmRequest, request_extras
from kvclient.engines.vllm.pd.params import Role, Transfer
from kvclient.engines.vllm.pd.plan import AbandonJob, AwaitJob, CopyJob, PdPlan, PdWorkerOutput, SendJob
from kvclient.engines.vllm.plan import WorkerOutput
from kvclient.engines.vllm.scheduler.contracts import BlockPool
from kvclient.engines.vllm.scheduler.pinned_pages import PinnedPages
from kvstore.observe.limited_log import LimitedLog

_log = logging.getLogger(__name__)
_limited = LimitedLog(_log)
_SEND_FAILURES = 2
"""Handoffs of a request that may fail before no more of it is handed over."""


class TransferState(Enum):
    """State of an awaited prompt; see the docstring of the module."""

    AWAITED = auto()
    ARRIVED = auto()
    COPYING = auto()
    ENDED = auto()


@dataclass(slots=True)
class SentRequest:
    """A request that is prefilled here and decoded elsewhere."""

    request: VllmRequest
    transfer: Transfer
    keys: RequestKeys
    namespace: bytes
    """Of the chain of its keys."""
    adapter: AdapterWeights | None = None
    sent_blocks: int = 0
    """Number of leading full blocks that are handed over or in progress."""
    tail_sent: bool = False
    failures: int = 0
    abandoned: bool = False
    """The decode host is notified that the prompt will not arrive whole."""


@dataclass(slots=True)
class ReceivedRequest:
    """A request that is prefilled elsewhere and decoded here."""

    request: VllmRequest
    keys: RequestKeys
    job: AwaitJob
    adapter: AdapterWeights | None = None
    state: TransferState = TransferState.AWAITED
    answers: int = 0
    """Workers that have reported whether their part of the prompt arrived."""
    whole: bool = True
    """No worker has reported a part that did not arrive, or a copy of it into pages that failed."""
    pages: set[int] = field(default_factory=set)
    """Pages that the prompt is being copied to."""


@dataclass(slots=True)
class PromptPins:
    """Pages that a handoff reads, and the number of workers that have not reported its end."""

    request_id: str
    transfer: Transfer
    first: int
    blocks: list[Any]
    workers: int
    failed: bool = False


class PdScheduler:
    """Called by the scheduler's one thread.

    Args:
        block_tokens: tokens of a page.
        first_needed: by group: the first token that the attention of a token sees; see ``GroupView``.
        pinned_share: the part of the engine's pages that may wait to be handed over; one handoff may be larger.
        workers: how many workers answer each job.
        counters: the connector's counters.
        pinned: all pins of the connector; None: those of handoffs.
        adapters: those of the engine; None: new ones.
        null_block: id of the null page.
    """

    def __init__(
        self,
        block_tokens: int,
        first_needed: Sequence[Callable[[int], int]],
        pinned_share: float,
        counters: ConnectorCounters,
        *,
        workers: int = 1,
        pinned: PinnedPages | None = None,
        adapters: Adapters | None = None,
        null_block: int = 0,
    ) -> None:
        self._block_tokens = block_tokens
        self._first_needed = first_needed
        self._pinned_share = pinned_share
        self._counters = counters
        self._workers = workers
        self._pinned = pinned or PinnedPages()
        self._adapters = adapters or Adapters(counters)
        self._null_block = null_block
        self._pool: BlockPool | None = None
        self._sending: dict[str, SentRequest] = {}
        self._receiving: dict[str, ReceivedRequest] = {}
        self._plan = PdPlan()
        self._deferred: list[SendJob] = []
        """Pinned, and not planned before the step's loads are known to be whole."""
        self._pins: dict[int, PromptPins] = {}
        self._pinned_blocks = 0
        self._next_job = 0

    def bind_pool(self, pool: BlockPool) -> None:
        """The engine's block pool; without it nothing is handed over."""
        self._pool = pool

    # ---- arrival ----
    def on_new_request(
        self, request: VllmRequest, transfer: Transfer, chain: KeyChain, adapter: AdapterWeights | None = None
    ) -> None:
        """A request that is prefilled in one engine and decoded in another; ``adapter``: the weights of its adapter, if any.

        One that reads no prefix, since it wants logprobs of its prompt, awaits nothing: vLLM computes all of it. Nor does one
        whose prefill engine has pages of another namespace.
        """
        keys = RequestKeys(chain, request_extras(request, adapter, self._block_tokens))
        if transfer.role is Role.PREFILL:
            self._sending[request.request_id] = SentRequest(request, transfer, keys, chain.spec.namespace, adapter)
            return
        tokens = request.num_tokens
        packed = list(keys.upto(request.all_token_ids, tokens // self._block_tokens))
        if tokens % self._block_tokens:
            packed.append(_tail_key(request, transfer, keys))
        needed = [first(tokens - 1) // self._block_tokens for first in self._first_needed]  # of the last token, computed here
        job = AwaitJob(request.request_id, packed, needed, transfer.transfer_id)
        receiving = self._receiving[request.request_id] = ReceivedRequest(request, keys, job, adapter)
        fits = transfer.can_come_to(chain.spec.namespace)
        if not fits:
            self._counters.add("prompts_of_other_namespaces")
            _limited.warning(
                "prompts of another namespace are not awaited, but loaded or computed: the prefill engine has other weights,"
                " another tensor-parallel size or another page format"
            )
        if request.skip_reading_prefix_cache or not fits:
            receiving.state = TransferState.ENDED
        else:
            self._plan.awaits.append(job)

    def state(self, request_id: str) -> TransferState:
        """Return the state of a request's prompt; ENDED also if none is awaited."""
        receiving = self._receiving.get(request_id)
        return receiving.state if receiving is not None else TransferState.ENDED

    # ---- the decode engine ----
    def pop_given_up(self, request_id: str) -> bool:
        """Return whether a request's prompt will not arrive. True once per request, which is then served like any other."""
        receiving = self._receiving.get(request_id)
        if receiving is None or receiving.state is not TransferState.ENDED:
            return False
        del self._receiving[request_id]
        return True

    def get_num_new_matched_tokens(self, request: VllmRequest, computed_tokens: int) -> int:
        """Return how many tokens of an ARRIVED prompt can be copied beyond the computed ones.

        The last one does not count: vLLM computes it here. If it counted, vLLM would give no pages to what only its attention
        sees, i.e. the first token of its window, or all of a chunk that ends with it. If nothing is left to copy, or the
        engine may hold other weights of the adapter than when the request came, the prompt is dropped, and the request is served
        like any other.
        """
        receiving = self._receiving[request.request_id]
        tokens = max(0, request.num_prompt_tokens - 1 - computed_tokens)
        if receiving.adapter is not None and self._adapters.weights(request.lora_request) is not receiving.adapter:
            self._counters.add("prompts_failed")
            _log.warning("prompt dropped: request %s (its adapter has changed)", request.request_id)
            tokens = 0
        if not tokens:
            receiving.state = TransferState.ENDED
            self._plan.drops.append(request.request_id)
        return tokens

    def update_state_after_alloc(self, request: VllmRequest, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """Record the pages that vLLM allocated for an ARRIVED prompt."""
        receiving = self._receiving[request.request_id]
        copied = request.num_prompt_tokens - 1
        start = (copied - external_tokens) // self._block_tokens
        stop = -(-copied // self._block_tokens)
        first_blocks, pages = [], []
        for ids in block_ids:
            first = next((at for at in range(start, stop) if ids[at] != self._null_block), stop)
            first_blocks.append(first)
            pages.append(list(ids[first:stop]))
        receiving.state = TransferState.COPYING
        receiving.pages = {page for ids in pages for page in ids}
        self._plan.copies.append(CopyJob(request.request_id, first_blocks, pages))

    def pop_unread(self, request_id: str) -> bool:
        """Drop the ARRIVED prompt of a request that vLLM computes without it. False: it has none."""
        if self.state(request_id) is not TransferState.ARRIVED:
            return False
        del self._receiving[request_id]
        self._plan.drops.append(request_id)
        return True

    def on_copies_failed(self, invalid_blocks: set[int], failed_requests: set[str]) -> None:
        """Pages that were not filled, and requests of which any was not."""
        for request_id, receiving in self._receiving.items():
            if receiving.state is TransferState.COPYING and (
                request_id in failed_requests or not receiving.pages.isdisjoint(invalid_blocks)
            ):
                receiving.whole = False
                self._counters.add("prompts_failed")

    def on_copies_finished(self, request_ids: Iterable[str]) -> list[tuple[VllmRequest, int]]:
        """Copies that have ended: requests, and how many leading blocks of each the store holds for sure; none: it failed."""
        done = []
        for request_id in request_ids:
            receiving = self._receiving.get(request_id)
            if receiving is not None and receiving.state is TransferState.COPYING:
                del self._receiving[request_id]
                full = receiving.request.num_prompt_tokens // self._block_tokens
                done.append((receiving.request, full if receiving.whole else 0))
        return done

    # ---- the prefill engine ----
    def build_step_plan(
        self,
        scheduled: Mapping[str, int],
        drafts: Mapping[str, Sequence[int]],
        resolve: Callable[[str], Any],
        *,
        hold: bool = False,
    ) -> PdPlan:
        """Plan the transfers of a step; arguments as for ``SchedulerConnector.build_step_plan``.

        With ``hold`` the handoffs of this step go with the next one, unless ``drop_deferred`` is called before.
        """
        sends = list(self._completed(scheduled, drafts, resolve)) if self._pool is not None else []
        held, self._deferred = self._deferred, sends if hold else []
        self._plan.sends += held if hold else [*held, *sends]
        plan, self._plan = self._plan, PdPlan()
        return plan

    def _completed(
        self, scheduled: Mapping[str, int], drafts: Mapping[str, Sequence[int]], resolve: Callable[[str], Any]
    ) -> Iterator[SendJob]:
        for request_id, tokens in scheduled.items():
            sending = self._sending.get(request_id)
            if sending is None or sending.tail_sent or sending.abandoned:
                continue
            request = sending.request
            computed = request.num_computed_tokens + tokens - len(drafts.get(request_id, ()))
            if (job := self._plan_send(sending, min(computed, request.num_prompt_tokens), resolve)) is not None:
                yield job

    def _plan_send(self, sending: SentRequest, computed: int, resolve: Callable[[str], Any]) -> SendJob | None:
        """Pin the pages of a prompt that a step completes, and plan their handoff."""
        request, first = sending.request, sending.sent_blocks
        full = computed // self._block_tokens
        last = computed == request.num_prompt_tokens
        tail = last and computed % self._block_tokens > 0
        stop = full + tail
        if stop <= first:
            sending.tail_sent = last
            return None
        if not self._adapters.computes_as_keyed(request.lora_request, sending.adapter):
            self._counters.add("stores_unsure")
            self._abandon(sending)
            return None
        ids = [self._from_first_page(group[first:stop]) for group in resolve(request.request_id)]
        count = sum(map(len, ids))
        assert self._pool is not None
        # one may always: its pages are its request's as long as that runs, however large a part of the engine's they are
        if self._pinned_blocks and self._pinned_blocks + count > len(self._pool.blocks) * self._pinned_share:
            self._counters.add("handoffs_skipped")
            _log.warning("prompt not handed over: request %s (too many pages wait)", request.request_id)
            self._abandon(sending)
            return None
        keys = list(sending.keys.upto(request.all_token_ids, full))
        if tail:
            keys.append(_tail_key(request, sending.transfer, sending.keys))
        blocks = [self._pool.blocks[page] for group in ids for page in group]
        self._pinned.pin(self._pool, blocks)
        self._next_job += 1
        self._pins[self._next_job] = PromptPins(request.request_id, sending.transfer, first, blocks, self._workers)
        self._pinned_blocks += count
        sending.sent_blocks, sending.tail_sent = full, last
        self._counters.add("handoff_blocks", stop - first)
        parent = keys[first - 1] if first else None
        return SendJob(self._next_job, sending.transfer.decode_node, first, parent, keys[first:], tail, ids, sending.adapter)

    def _from_first_page(self, ids: Sequence[int]) -> list[int]:
        """Without the leading blocks that a sliding window has left behind."""
        first = next((at for at, page in enumerate(ids) if page != self._null_block), len(ids))
        return list(ids[first:])

    # ---- answers ----
    def drop_deferred(self) -> None:
        """Drop the deferred handoffs: their blocks may be wrong, since a load of their step failed."""
        held, self._deferred = self._deferred, []
        jobs = [job.job_id for job in held]
        self.on_worker_output(PdWorkerOutput(WorkerOutput(dict.fromkeys(jobs, self._workers), set(jobs))))

    def on_worker_output(self, answer: PdWorkerOutput) -> None:
        """Handle the workers' output about handoffs and prompts."""
        for job_id in answer.sent.stores_failed:
            pins = self._pins[job_id]
            if not pins.failed:
                pins.failed = True
                self._send_failed(pins)
        for job_id, workers in answer.sent.stores_done.items():
            pins = self._pins[job_id]
            pins.workers -= workers
            if pins.workers <= 0:
                del self._pins[job_id]
                self._pinned_blocks -= len(pins.blocks)
                assert self._pool is not None
                self._pinned.unpin(self._pool, pins.blocks)
        for request_id, workers in answer.known.items():
            receiving = self._receiving.get(request_id)
            if receiving is None or receiving.state is not TransferState.AWAITED:  # ended by a change of weights: it is dropped
                continue
            receiving.answers += workers
            receiving.whole &= request_id not in answer.incomplete
            if not receiving.whole or receiving.answers >= self._workers:
                self._on_prompt_known(receiving)

    def _on_prompt_known(self, receiving: ReceivedRequest) -> None:
        """Set the state of a prompt after all workers have it, or one of them reported that it is incomplete."""
        if receiving.whole:
            receiving.state = TransferState.ARRIVED
            return
        receiving.state = TransferState.ENDED
        request_id = receiving.request.request_id
        self._plan.drops.append(request_id)  # some workers may have it, or wait for it
        _log.warning("prompt incomplete: request %s (its blocks are loaded or computed here)", request_id)

    def _send_failed(self, pins: PromptPins) -> None:
        """The blocks are handed over once more with the next step, if there is one."""
        self._counters.add("handoffs_failed")
        sending = self._sending.get(pins.request_id)
        if sending is None:
            self._tell(pins.transfer)
            return
        sending.failures += 1
        sending.sent_blocks = min(sending.sent_blocks, pins.first)
        sending.tail_sent = False
        if sending.failures >= _SEND_FAILURES:
            self._abandon(sending)

    def _abandon(self, sending: SentRequest) -> None:
        """Some of a prompt will not get to its decode host."""
        if not sending.abandoned:
            sending.abandoned = True
            self._tell(sending.transfer)

    def _tell(self, transfer: Transfer) -> None:
        self._counters.add("transfers_abandoned")
        self._plan.abandons.append(AbandonJob(transfer.decode_node, transfer.transfer_id))

    # ---- ends ----
    def request_finished(self, request_id: str) -> dict[str, Any] | None:
        """Forget a request that has ended. If it was prefilled here, return the parameters for its decode engine."""
        receiving = self._receiving.pop(request_id, None)
        if receiving is not None and receiving.job in self._plan.awaits:  # no worker knows of it, and none shall
            self._plan.awaits.remove(receiving.job)
        elif receiving is not None and receiving.state in {TransferState.AWAITED, TransferState.ARRIVED}:
            self._plan.drops.append(request_id)
        sending = self._sending.pop(request_id, None)
        if sending is None:
            return None
        if not sending.tail_sent:
            self._abandon(sending)
        return sending.transfer.for_decode(None if sending.abandoned else sending.namespace)

    def forget(self) -> None:
        """Abandon all transfers, since the weights have changed."""
        self.drop_deferred()
        for request_id, receiving in self._receiving.items():
            if receiving.state in {TransferState.AWAITED, TransferState.ARRIVED}:
                receiving.state = TransferState.ENDED
                self._plan.drops.append(request_id)
        self._plan.awaits.clear()
        for sending in self._sending.values():
            self._abandon(sending)
        self._sending.clear()

    @property
    def has_pins(self) -> bool:
        """Whether pages wait to be handed over."""
        return bool(self._pins)

    @property
    def has_abandons(self) -> bool:
        """Whether the next step must notify decode hosts of abandoned prompts."""
        return bool(self._plan.abandons)


def _tail_key(request: VllmRequest, transfer: Transfer, keys: RequestKeys) -> BlockKey:
    """The key of a prompt's partial last block."""
    return transfer.tail_key(keys.tail(request.all_token_ids[: request.num_prompt_tokens]))
