"""The decisions: which blocks of which request are loaded and stored in each step. No vLLM types, and no waiting for a server.

Life of a request, as seen here:

1. ``on_new_request``: a lookup begins in the background.
2. ``get_num_new_matched_tokens``: the tokens that can be loaded, or None (ask again) until the lookup has ended.
3. ``update_state_after_alloc``: pages for them exist. The load is planned for this step.
4. ``build_step_plan``: plans to store the blocks that fill in this step. They are pinned in the engine's block pool, as another
   request with the same prefix would pin them, so that no preemption, end of the request or sliding window frees the pages before
   they are read. ``on_worker_output`` unpins them after all workers have finished.

A load that failed is remembered: the request is not offered its prefix again, so it is computed and not loaded again.
The engine enters the pages of a layer-wise load into its prefix cache before they are loaded, and with the policy ``recompute``
leaves them there. So the connector evicts them, and all pages that the step computed after them, before another request hits.

Where several workers compute a step together, a layer-wise load that fails in one corrupts the results of all: hidden states
are mixed. A worker knows only its own loads. So the blocks of such a step wait for the output of all workers, and go with
the next step's plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, Final

from kvclient import Tier
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.identity.adapters import Adapters
from kvclient.engines.vllm.identity.keys import RequestKeys, VllmRequest, is_hashable, request_extras
from kvclient.engines.vllm.identity.kv_groups import GroupBlocks
from kvclient.engines.vllm.identity.weights_epoch import WeightsEpoch
from kvclient.engines.vllm.options import ConnectorOptions
from kvclient.engines.vllm.plan import GroupLoad, LoadJob, StepPlan, StoreJob, WorkerOutput
from kvclient.engines.vllm.request_paths import request_paths
from kvclient.engines.vllm.scheduler.contracts import BlockPool, CacheWatch, StoreObserver
from kvclient.engines.vllm.scheduler.pinned_pages import PinnedPages
from kvclient.engines.vllm.scheduler.prefix_lookup import NOTHING, BackgroundLookup, PrefixMatch
from kvclient.engines.vllm.scheduler.reads_ahead import ReadsAhead
from kvclient.engines.vllm.scheduler.request_state import Pins, RequestState
from kvclient.engines.vllm.scheduler.session_hints import SessionHintQueue
from kvclient.engines.vllm.scheduler.verdicts import Verdicts

_log = logging.getLogger(__name__)
_STORE_FAILURES = 2
"""Stores of a request that may fail before nothing more of it is stored."""
_NEVER: Final = 1 << 62
"""More tokens than any request has."""


class SchedulerConnector:
    """The connector's half in the scheduler. Called by one thread.

    Args:
        options: choices.
        blocks: how the pages of the groups divide a request.
        workers: how many workers answer each job.
        observer: receives which blocks are stored; None: nobody.
        counters: receive the counts; None: new ones.
        weights: what is known of the engine's weights; None: they do not change.
        null_block: id of the null page.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        blocks: GroupBlocks,
        *,
        workers: int = 1,
        observer: StoreObserver | None = None,
        counters: ConnectorCounters | None = None,
        weights: WeightsEpoch | None = None,
        null_block: int = 0,
    ) -> None:
        self.counters = counters or ConnectorCounters()
        self.adapters = Adapters(self.counters)
        self.weights = weights or WeightsEpoch(options)
        self.media_named = True
        """See ``engine_facts.are_media_named``."""
        self.keeps_drafts = False
        """See ``engine_facts.keeps_drafts``."""
        self._options = options
        self._blocks = blocks
        self._block_tokens = blocks.block_tokens
        self._workers = workers
        self._observer = observer
        self._null_block = null_block
        self._prefix_lookup: BackgroundLookup | None = None
        self._pool: BlockPool | None = None
        self._cache: CacheWatch | None = None
        self._requests: dict[str, RequestState] = {}
        self._loads: list[LoadJob] = []
        self.pinned = PinnedPages()
        self._pins: dict[int, Pins] = {}
        self._pinned_blocks = 0
        self._next_job = 0
        self._deferred: list[StoreJob] = []
        """Pinned, and not planned before the step's loads are known to be whole."""
        self._wait_left_s = options.lookup_wait_s
        self._pending: dict[str, Future[PrefixMatch]] = {}
        """Lookups that the scheduler asked for in this step and that are not answered."""
        self._ahead = ReadsAhead(options.read_ahead_requests)
        self._hints = SessionHintQueue(self.counters)
        self._layerwise = options.load_mode == "layerwise"
        self._verdicts: Verdicts | None = None
        self._step_pages: list[Sequence[Sequence[int]]] = []
        """By request of a step with layer-wise loads: its pages, by group."""
        self._epoch = 0
        self._weights_epoch = ""
        self._cancel_stores = False

    def connect(self, finder: BackgroundLookup, epoch: int, weights_epoch: str) -> None:
        """Look up in these namespaces from now on, after start or after a change of the weights.

        Requests that hold KV of other weights are no longer loaded or stored; the others are looked up again.
        """
        self._drop_deferred()
        old, self._prefix_lookup = self._prefix_lookup, finder
        self._epoch, self._weights_epoch = epoch, weights_epoch
        self._loads = []
        self._ahead.clear()
        self._hints.clear()
        states, self._requests, self._pending = self._requests, {}, {}
        if old is not None:
            old.close()
        for state in states.values():
            if state.request.num_computed_tokens == 0:
                self.on_new_request(state.request)

    def use_blocks(self, blocks: GroupBlocks) -> None:
        """Divide requests into pages in this way, as the workers do. Before ``connect``."""
        self._blocks = blocks

    @property
    def prefix_lookup(self) -> BackgroundLookup | None:
        """The prefix lookup; None: not connected yet."""
        return self._prefix_lookup

    @property
    def verdicts(self) -> Verdicts | None:
        """The verdicts in use; None: all found blocks are loaded."""
        return self._verdicts

    def use_verdicts(self, verdicts: Verdicts | None) -> None:
        """Decide for each request whether its blocks are loaded; None: all are."""
        self._verdicts = verdicts

    def bind_pool(self, pool: BlockPool) -> None:
        """Receive the engine's block pool. Without it, nothing is stored."""
        self._pool = pool
        if self._cache is not None:
            self._cache.bind_pool(pool)

    def watch_cache(self, cache: CacheWatch) -> None:
        """Report what the engine's own prefix cache holds."""
        self._cache = cache
        if self._pool is not None:
            cache.bind_pool(self._pool)

    # ---- arrival and match ----
    def on_new_request(self, request: VllmRequest, *, look_up: bool = True) -> None:
        """Start the lookup of a new request, unless ``look_up`` is False."""
        if self._prefix_lookup is None:
            return
        adapter = self.adapters.of_request(request.lora_request) if request.lora_request is not None else None
        if not is_hashable(request, adapter, media_named=self.media_named):
            if not self.media_named and request.mm_features:
                self.counters.add("media_unnamed")
            return
        keys = RequestKeys(self._prefix_lookup.chain, request_extras(request, adapter, self._blocks.key_tokens))
        state = self._requests[request.request_id] = RequestState(request, keys, adapter)
        state.features = len(request.mm_features)
        state.store_ended = request.resumable and self.keeps_drafts
        state.preemptions = request.num_preemptions
        if self._options.hook.load and look_up:
            self._begin_lookup(state)

    def mark_stored(self, request_id: str, blocks: int) -> None:
        """Record that the store holds the leading blocks of a request."""
        state = self._requests.get(request_id)
        if state is not None:
            state.stored_blocks = max(state.stored_blocks, blocks)

    def disable_store(self, request_id: str) -> None:
        """Store nothing of a request: another engine does."""
        state = self._requests.get(request_id)
        if state is not None:
            state.store_ended = True

    def _begin_lookup(self, state: RequestState) -> None:
        assert self._prefix_lookup is not None
        request = state.request
        self._add_features(state)
        state.preemptions = request.num_preemptions
        state.found, state.loading, state.verdict = NOTHING, {}, None
        blocks = (request.num_tokens - 1) // self._block_tokens  # at least one token is computed
        state.lookup = None
        if blocks:
            paths = request_paths(request, self._options.hook)
            query = self._verdicts.price_query(paths) if self._verdicts is not None else None
            state.lookup = self._prefix_lookup.begin(state.keys, list(request.all_token_ids), blocks, query)
            self._ahead.arrived(request.request_id)

    def _add_features(self, state: RequestState) -> None:
        """Add images that a later part of a streamed input brought. They follow all blocks whose keys are known."""
        if len(state.request.mm_features) != state.features:
            state.features = len(state.request.mm_features)
            state.keys.renew_extras(request_extras(state.request, state.adapter, self._blocks.key_tokens))

    def _holds_adapter(self, state: RequestState) -> bool:
        """Whether the engine still computes a request with the adapter that its keys name."""
        return state.adapter is None or self.adapters.holds(state.request.lora_request, state.adapter)

    def get_num_new_matched_tokens(self, request: VllmRequest, computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond those computed (None: not known yet), and whether asynchronously."""
        state = self._requests.get(request.request_id)
        if state is None or not self._options.hook.load:
            return 0, False
        if self.weights.hold_back():
            return None, False
        if not self.weights.is_open or not self._holds_adapter(state):
            return 0, False
        if self._layerwise and self._shares_a_load(state, computed_tokens):
            self.counters.add("waits_for_shared_loads")
            return None, False
        if state.load_failed:
            return 0, False
        if request.num_preemptions != state.preemptions:  # by now there is more of it in the store
            self._begin_lookup(state)
        if state.lookup is not None:
            if not self._is_answered(state.lookup):
                self.counters.add("lookups_asked_again")
                self._pending[request.request_id] = state.lookup
                return None, False
            state.found = state.lookup.result()
            state.lookup = None
            state.stored_blocks = max(state.stored_blocks, state.found.hit_blocks)
            if self._observer is not None and state.found.hit_blocks:
                self._observer.found(request, state.keys.upto(request.all_token_ids, state.found.hit_blocks))
        tokens = state.found.hit_blocks * self._block_tokens - computed_tokens
        if tokens <= 0 or tokens < self._options.min_load_tokens or computed_tokens % self._block_tokens:
            state.verdict = computed_tokens, 0
            return 0, False
        state.first_offered = computed_tokens // self._block_tokens
        tokens = self._tokens_to_load(state, computed_tokens, tokens)
        return tokens, bool(tokens) and not self._loads_by_layer(request.request_id)

    def _tokens_to_load(self, state: RequestState, computed_tokens: int, found_tokens: int) -> int:
        """Return how many of the found tokens are loaded. One verdict per request: vLLM asks again if it has no pages yet."""
        if self._verdicts is None:
            return found_tokens
        if state.verdict is None or state.verdict[0] != computed_tokens:
            found, name, ahead = state.found.lookup, state.request.request_id, self._ahead.blocks(state.request.request_id)
            blocks = self._verdicts.blocks_to_load(
                name, found, state.first_offered, computed_tokens, state.request.num_tokens, state.found.price, ahead
            )
            state.verdict = computed_tokens, blocks * self._block_tokens
        return state.verdict[1]

    def _loads_by_layer(self, request_id: str) -> bool:
        """Whether the load of a request is waited for in its step. A probe is not: a step that lacks blocks is computed again."""
        return self._layerwise and (self._verdicts is None or self._verdicts.probe_limit_s(request_id) is None)

    def _shares_a_load(self, state: RequestState, computed_tokens: int) -> bool:
        """Whether tokens that the engine regards as computed are still being loaded, layer by layer, in this step.

        If such a load fails, the engine has one of the requests that share it compute it, and treats it as valid in all, even if
        that one computes it in pieces, or ends. So the others wait one step, until the result of the load is known.
        """
        for load in self._loads:
            first = min((part.first_page for part in load.groups), default=0)  # one group: a page is a block
            other = self._requests.get(load.request_id)
            if other is not None and other is not state and computed_tokens > first * self._block_tokens:
                mine, theirs = (each.keys.upto(each.request.all_token_ids, first + 1) for each in (state, other))
                if mine[first:] == theirs[first:]:
                    return True
        return False

    def _is_answered(self, lookup: Future[PrefixMatch]) -> bool:
        """Whether a lookup has ended, after a wait that all lookups of a step share."""
        if not lookup.done() and self._wait_left_s > 0:
            began_s = time.monotonic()
            wait((lookup,), self._wait_left_s)
            self._wait_left_s -= time.monotonic() - began_s
        return lookup.done()

    # ---- loads ----
    def update_state_after_alloc(self, request: VllmRequest, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """Plan the load of ``external_tokens`` matched tokens into the request's pages."""
        state = self._requests.get(request.request_id)
        if state is None or external_tokens == 0:
            return
        self._ahead.left(request.request_id, loads=True)
        limit_s = None
        if self._verdicts is not None:
            self._verdicts.load_planned(request.request_id)
            limit_s = self._verdicts.probe_limit_s(request.request_id)
        start, found = state.first_offered, state.found
        stop = start + external_tokens // self._block_tokens
        parts = []
        for group, by_namespace in enumerate(found.by_group):
            ids = self._blocks.pages(group, block_ids, start, stop)
            # windows and chunks of the context have pages at the end only
            skipped = next((at for at, page in enumerate(ids) if page != self._null_block), len(ids))
            if skipped < len(ids):
                each = self._blocks.pages_per_block(group)
                first, behind = start * each + skipped, self._blocks.pages(group, block_ids, stop, None)
                lookups = {name: lookup.part(first, stop * each) for name, lookup in by_namespace.items()}
                parts.append(GroupLoad(group, ids[skipped:], first, lookups, behind))
        state.loading = {part.group: part.block_ids for part in parts}
        paths = request_paths(request, self._options.hook)
        self._loads.append(LoadJob(request.request_id, parts, self._loads_by_layer(request.request_id), paths, limit_s))
        self.counters.add("loads")
        self.counters.add("load_tokens", external_tokens)

    def computed_without_load(self, request_id: str) -> None:
        """Record that a request has pages and is computed: nothing more is loaded."""
        self._ahead.left(request_id)

    def hits_by_tier(self, request: VllmRequest, tokens: int) -> Mapping[Tier, int]:
        """Count the tokens of a load by tier, as far as the index knows it."""
        state = self._requests.get(request.request_id)
        if state is None or not state.found.by_group:
            return {}
        page_tokens = self._blocks.page_tokens[0]
        start = state.first_offered * self._blocks.pages_per_block(0)
        stop = start + tokens // page_tokens
        nearest: dict[int, Tier] = {}
        lookup = next(iter(state.found.by_group[0].values()))
        for run in sorted(lookup.runs, key=lambda run: run.tier, reverse=True):
            nearest.update(dict.fromkeys(range(max(start, run.start), min(stop, run.end)), run.tier))
        counts: dict[Tier, int] = {}
        for tier in nearest.values():
            counts[tier] = counts.get(tier, 0) + page_tokens
        return counts

    # ---- stores ----
    def build_step_plan(
        self, scheduled: Mapping[str, int], drafts: Mapping[str, Sequence[int]], resolve: Callable[[str], Any]
    ) -> StepPlan:
        """Plan the loads and stores of a step.

        1. Take what was collected since the last step: loads, deferred stores, hints and reads ahead (``_take_collected``).
        2. Begin to collect for the next step.
        3. Plan to store the blocks that this step fills (``_plan_stores``), and report them to the watch of the prefix cache.

        Args:
            scheduled: by request: tokens that this step computes.
            drafts: by request: those among them that may be rejected.
            resolve: gives the pages of a request, by group.
        """
        if not scheduled and self._pending and not self._loads:  # nothing else to do: rather than spin
            wait(self._pending.values(), self._options.idle_wait_s, FIRST_COMPLETED)
        plan = self._take_collected(scheduled)
        stores = self._deferred if self.defers_stores(plan) else plan.stores
        if self._verdicts is not None:
            plan.step = self._verdicts.step_planned(self._chunks(scheduled, plan))
        self._step_pages = [resolve(request_id) for request_id in scheduled] if self._layerwise and self._loads else []
        self._loads, self._pending = [], {}
        self._wait_left_s = self._options.lookup_wait_s
        filled = self._plan_stores(scheduled, drafts, resolve, stores)
        if self._cache is not None:
            self._watch(self._cache, filled)
        for state, _ in filled:
            self._plan_idle(state)
        return plan

    def _take_collected(self, scheduled: Mapping[str, int]) -> StepPlan:
        """Begin the plan of a step with what was collected for it."""
        computes = bool(scheduled)
        namespace = self._prefix_lookup.chain.spec.namespace if self._prefix_lookup is not None else b""
        held, self._deferred = self._deferred, []
        plan = StepPlan(self._epoch, self._weights_epoch, namespace, self._loads, held, computes)
        plan.cancel_stores, self._cancel_stores = self._cancel_stores, False
        plan.weights_check = self.weights.plan_check(computes=computes)
        plan.hints = self._hints.take()
        plan.ahead, plan.ahead_ended = self._ahead.plan(self._loadable, time.monotonic())
        for ahead in plan.ahead:
            ahead.paths = request_paths(self._requests[ahead.request_id].request, self._options.hook)
        return plan

    def _plan_stores(
        self,
        scheduled: Mapping[str, int],
        drafts: Mapping[str, Sequence[int]],
        resolve: Callable[[str], Any],
        stores: list[StoreJob],
    ) -> list[tuple[RequestState, int]]:
        """Plan to store the blocks that a step fills, and append the jobs to ``stores``.

        Args:
            scheduled: see ``build_step_plan``, as ``drafts`` and ``resolve``.
            drafts: tokens that may be rejected.
            resolve: gives the pages of a request.
            stores: gets the jobs.

        Returns:
            The requests that may fill a block, each with the number of its full blocks after the step.
        """
        filled: list[tuple[RequestState, int]] = []
        storing = self._pool is not None and self._options.hook.store and self.weights.is_open
        if not storing and self._cache is None:
            return filled
        for request_id, tokens in scheduled.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            before = state.request.num_computed_tokens
            if state.idle_from <= before and before + tokens < state.idle_until:
                continue  # nearly every step of a request that decodes
            self._add_features(state)
            computed = min(before + tokens - len(drafts.get(request_id, ())), state.request.num_tokens)
            full = computed // self._block_tokens
            filled.append((state, full))
            wanted = storing and not state.store_ended and full > state.stored_blocks
            if wanted and self._settled(state) and full > state.stored_blocks:  # the lookup may have found more stored blocks
                job = self._plan_store(state, full, resolve(request_id))
                if job is not None:
                    stores.append(job)
        return filled

    def _watch(self, cache: CacheWatch, filled: Iterable[tuple[RequestState, int]]) -> None:
        """Report filled blocks of the engine's prefix cache. If that fails, the cache is not published any more."""
        try:
            for state, full in filled:
                self._report_computed(cache, state, full)
            cache.step()
        except Exception:  # noqa: BLE001  # edge: the engine's internals may differ from the tested ones
            self.counters.add("bugs")
            _log.exception("the engine's own prefix cache is no longer published: unexpected error")
            self._cache = None
            cache.abandon()

    def _report_computed(self, cache: CacheWatch, state: RequestState, full: int) -> None:
        """Report the blocks that a request fills in this step. The engine has entered them into its prefix cache already."""
        request = state.request
        state.watched_blocks = min(state.watched_blocks, request.num_computed_tokens // self._block_tokens)  # it was preempted
        known = state.watched_blocks
        if full <= known or (state.lookup is not None and not state.lookup.done()):  # its thread still makes the keys
            return
        keys = state.keys.upto(request.all_token_ids, full)
        parent = keys[known - 1] if known else None
        state.watched_blocks += cache.computed(request, known, parent, keys[known:])

    def _plan_idle(self, state: RequestState) -> None:
        """Set the range of computed tokens in which a request has nothing to store and nothing to report."""
        block, store, watched = self._block_tokens, _NEVER, _NEVER
        if self._options.hook.store and not state.store_ended:
            store = (state.stored_blocks + 1) * block
        if self._cache is not None:
            watched = (state.watched_blocks + 1) * block
        state.idle_from = 0 if self._cache is None else state.watched_blocks * block
        state.idle_until = min(store, watched)

    def _chunks(self, scheduled: Mapping[str, int], plan: StepPlan) -> list[tuple[int, int]] | None:
        """Return the tokens that a step computes: by request, those in the cache and the new ones.

        None: the step also loads by layer, or checks weights.
        """
        if plan.weights_check or any(job.layerwise for job in plan.loads):
            return None
        states = [(self._requests.get(request_id), tokens) for request_id, tokens in scheduled.items()]
        chunks = [(state.request.num_computed_tokens, tokens) for state, tokens in states if state is not None]
        return chunks if len(chunks) == len(states) else None

    def output_arrived(self, answer: WorkerOutput | None) -> None:
        """Record the output of a step; None: the workers report nothing."""
        if self._verdicts is not None:
            self._verdicts.output_arrived(answer)

    def _loadable(self, request_id: str) -> PrefixMatch | None:
        """Return what a request would load, by its verdict or a forecast of it; None: the lookup is not answered."""
        state = self._requests.get(request_id)
        if state is None or state.load_failed:
            return NOTHING
        if state.lookup is not None:
            if not state.lookup.done():
                return None
            found = state.lookup.result()
        else:
            found = state.found
        tokens = found.hit_blocks * self._block_tokens
        if not tokens or tokens < self._options.min_load_tokens:
            return NOTHING
        blocks = found.hit_blocks
        if state.verdict is not None:
            computed_tokens, to_load = state.verdict
            blocks = min(blocks, (computed_tokens + to_load) // self._block_tokens) if to_load else 0
        elif self._verdicts is not None:
            blocks = self._verdicts.blocks_to_read_ahead(found.lookup, state.request.num_tokens, found.price)
        return replace(found, hit_blocks=blocks)

    def defers_stores(self, plan: StepPlan) -> bool:
        """Whether the stores of a step must wait for the outcome of its loads in all workers."""
        return self._workers > 1 and any(job.layerwise for job in plan.loads)

    def _drop_deferred(self) -> None:
        """Drop the deferred stores: their pages may be wrong, or belong to other weights."""
        held, self._deferred = self._deferred, []
        jobs = [job.job_id for job in held]
        self.on_worker_output(WorkerOutput(dict.fromkeys(jobs, self._workers), set(jobs)))

    def _settled(self, state: RequestState) -> bool:
        """Whether the lookup of a request has ended. Until then, later steps store what this one computes.

        vLLM computes a request that reads no prefix (one that wants logprobs of its prompt) without waiting for the lookup.
        """
        if state.lookup is not None and state.lookup.done():
            state.stored_blocks = max(state.stored_blocks, state.lookup.result().hit_blocks)
            state.lookup = None
        return state.lookup is None

    def _plan_store(self, state: RequestState, full: int, block_ids: Sequence[Sequence[int]]) -> StoreJob | None:
        """Pin the blocks ``[stored_blocks, full)`` of a request, and plan their store."""
        first = state.stored_blocks
        ids = [self._blocks.pages(part, block_ids, first, full) for part in range(len(self._blocks.page_tokens))]
        assert self._pool is not None
        by_table = dict(zip(self._blocks.tables, ids, strict=True))  # parts of one group have the same pages
        count = sum(map(len, by_table.values()))
        whole = (full - first) * self._block_tokens
        if any(
            self._null_block in pages or len(pages) * tokens != whole
            for pages, tokens in zip(ids, self._blocks.page_tokens, strict=True)
        ):
            self._end_store(state, "stores_broken")  # a sliding window has passed blocks that the store lacks
            return None
        if not self.adapters.computes_as_keyed(state.request.lora_request, state.adapter):
            self._end_store(state, "stores_unsure")
            return None
        if self._pinned_blocks + count > len(self._pool.blocks) * self._options.pinned_share:
            self._end_store(state, "stores_skipped")
            return None
        each = self._blocks.keys_per_block
        keys = state.keys.upto(state.request.all_token_ids, full * each)
        blocks = [self._pool.blocks[page] for pages in by_table.values() for page in pages]
        self.pinned.pin(self._pool, blocks)
        self._next_job += 1
        observed = self._observer.planned(state.request, first, keys[first:full]) if self._observer is not None else None
        self._pins[self._next_job] = Pins(state.request, first, full, blocks, self._workers, observed)
        self._pinned_blocks += count
        state.stored_blocks = full
        self.counters.add("store_blocks", full - first)
        parent = keys[first * each - 1] if first else None
        return StoreJob(self._next_job, state.request.request_id, first, parent, keys[first * each :], ids, state.adapter)

    def _end_store(self, state: RequestState, counter: str) -> None:
        state.store_ended = True
        self.counters.add(counter)
        _log.info("no more blocks of request %s are stored (counter=%s)", state.request.request_id, counter)

    # ---- answers ----
    def on_worker_output(self, answer: WorkerOutput) -> None:
        """Unpin the pages of stores that have ended in all workers."""
        if self._verdicts is not None:
            self._verdicts.loads_ended(answer.loads)
        self.weights.answered(answer.weights)
        for job_id in sorted(answer.stores_failed & self._pins.keys()):
            self._store_failed(job_id, self._pins[job_id])
        for job_id, workers in answer.stores_done.items():
            if (pins := self._pins.get(job_id)) is None:
                self.counters.add("bugs")
                _log.error("store answered twice (job=%d)", job_id)
                continue
            pins.workers -= workers
            if pins.workers > 0:
                continue
            del self._pins[job_id]
            self._pinned_blocks -= len(pins.blocks)
            assert self._pool is not None
            self.pinned.unpin(self._pool, pins.blocks)
            if self._observer is not None and pins.stop > pins.first:
                self._observer.stored(pins.observed)

    def _store_failed(self, job_id: int, pins: Pins) -> None:
        """Plan failed blocks again, together with the next ones, which need them as parents.

        Jobs that were planned before a failure was known fail as well, for want of a parent: they are no failures of their own.
        """
        pins.stop = pins.first  # no event
        self.counters.add("stores_failed")
        state = self._requests.get(pins.request.request_id)
        if state is None:
            return
        state.stored_blocks = min(state.stored_blocks, pins.first)
        state.idle_until = 0
        if job_id <= state.failed_up_to:
            return
        state.failed_up_to = self._next_job
        state.store_failures += 1
        if state.store_failures == _STORE_FAILURES:
            self._end_store(state, "stores_given_up")

    def on_loads_failed(self, invalid_blocks: set[int], failed_requests: set[str]) -> set[str]:
        """Have requests computed whose load failed. Their prefix is not offered again.

        Args:
            invalid_blocks: pages that were not loaded.
            failed_requests: requests of which a page was not loaded.

        Returns:
            The requests that are computed.
        """
        self._uncache(invalid_blocks)
        self._drop_deferred()
        computed = set()
        for request_id, state in self._requests.items():
            if state.loading and (
                request_id in failed_requests or any(not invalid_blocks.isdisjoint(ids) for ids in state.loading.values())
            ):
                state.load_failed = True
                state.loading = {}
                state.stored_blocks = 0  # blocks are missing in the store: offer all again, it skips those that it holds
                state.idle_until = 0
                if self._verdicts is None or self._verdicts.probe_limit_s(request_id) is None:
                    self.counters.add("loads_failed")
                computed.add(request_id)
        return computed

    def _uncache(self, invalid_blocks: set[int]) -> None:
        """Evict the pages that a layer-wise load did not fill, and those computed after them, from the engine's prefix cache."""
        spoiled: set[int] = set()
        for groups in self._step_pages:
            for pages in groups:
                first = next((at for at, page in enumerate(pages) if page in invalid_blocks), len(pages))
                spoiled.update(pages[first:])
        spoiled.discard(self._null_block)
        if spoiled and self._pool is not None:
            self.counters.add("pages_uncached", len(spoiled))
            self._pool.evict_blocks(spoiled)

    def on_loads_finished(self, request_ids: Iterable[str]) -> None:
        """Record that asynchronous loads of these requests have ended, successfully or not."""
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                state.loading = {}

    # ---- ends ----
    def request_finished(self, request: VllmRequest) -> None:
        """Forget a request that has ended."""
        self._ahead.left(request.request_id)
        if self._verdicts is not None:
            self._verdicts.request_left(request.request_id)
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            blocks = state.stored_blocks * self._blocks.keys_per_block
            self._hints.ended(request, lambda: state.keys.upto(request.all_token_ids, blocks))

    @property
    def has_messages(self) -> bool:
        """Whether the next step must tell the workers about hints or ended reads ahead."""
        return bool(self._hints) or self._ahead.has_ended

    def release_pins(self, release_pages: Callable[[], WorkerOutput] | None) -> None:
        """Give pinned pages back to the engine.

        Args:
            release_pages: cancels the stores and returns the output; None: workers in other processes cancel with the next step.
        """
        self._drop_deferred()
        if not self._pins:
            return
        if release_pages is None:
            self._cancel_stores = True
        else:
            self.on_worker_output(release_pages())

    @property
    def pinned_pages(self) -> set[int]:
        """Ids of the pages that wait to be stored."""
        return {block.block_id for pins in self._pins.values() for block in pins.blocks}

    @property
    def frees_pages_soon(self) -> bool:
        """Whether the engine should wait for pinned pages rather than preempt a request; see ``PinnedPages.frees_soon``."""
        return self._pool is not None and self.pinned.frees_soon(self._pool)

    @property
    def has_pins(self) -> bool:
        """Whether pages wait to be stored. The engine runs steps until they are stored."""
        return bool(self._pins)

    def close(self) -> None:
        """Close the prefix lookup."""
        if self._prefix_lookup is not None:
            self._prefix_lookup.close()
