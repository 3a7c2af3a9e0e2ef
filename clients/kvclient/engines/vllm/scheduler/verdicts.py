"""Load or recompute: decides for each request whether its found blocks are loaded, by the durations of earlier loads and steps.

Models with one KV cache group only: of others, a load reads some of the found pages, and which ones is known when the engine
gives the request its pages. Until loads from a request's sources and some steps were measured, its blocks are loaded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvclient import Lookup, NodeRef, Paths, Run, Tier
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.plan import LoadSample, WorkerOutput
from kvclient.engines.vllm.scheduler.load_prices import PriceQuery, QuotedPrice
from kvclient.load.accounting import STORAGE_LINKS, bytes_by_source, nearest_segments
from kvclient.load.planned import blocks_beyond
from kvstore.core.types import NodeId, VolumeId
from kvstore.recompute.decisions import LoadDecisions, Segment
from kvstore.recompute.link_price import LinkPrice
from kvstore.recompute.prefill_estimate import pairs
from kvstore.recompute.verdict import Choice, LoadVerdict

PRICE_VALID_S = 2.0
"""A request may wait in the queue after its lookup: an older price does not count."""
_TIMED_TOKENS = 32
"""A step is timed if a request computes at least this many tokens in it."""
_STEPS_IN_FLIGHT = 16
_COUNTERS = {
    Choice.LOAD: "verdicts_load",
    Choice.CUT: "verdicts_cut",
    Choice.COMPUTE: "verdicts_compute",
    Choice.PROBE: "verdicts_probe",
}


@dataclass(slots=True)
class _ExpectedLoad:
    """A load to come or under way.

    Attributes:
        sizes: bytes by source. Blocks that are read ahead are to come from the DRAM of this host.
        named_sizes: bytes by source, as the lookup named them. A load that brings nothing counts against these: a hung disk also
            ends a read ahead.
        load_s: how long it should take; None: not known, or no prediction that can be compared.
        price_s: the planner's price of its part over storage links; None: not known.
        limit_s: time after which it ends, since it is a probe; None: it is not.
        planned_s: when it was planned; 0: not yet.
        sample: the load in the workers that have ended it; None: in none.
    """

    sizes: dict[Hashable, int]
    named_sizes: dict[Hashable, int]
    load_s: float | None
    price_s: float | None = None
    limit_s: float | None = None
    planned_s: float = 0.0
    sample: LoadSample | None = None


def _bytes_by_tier(sources: Mapping[Hashable, int]) -> dict[Hashable, int]:
    """Return the bytes by tier. The nodes do not count: ``sources_of`` divides bytes among them in proportion."""
    sizes: dict[Hashable, int] = {}
    for source, nbytes in sources.items():
        tier = source[1] if isinstance(source, tuple) else source
        sizes[tier] = sizes.get(tier, 0) + nbytes
    return sizes


def _prices(quoted: QuotedPrice | None) -> dict[Hashable, LinkPrice]:
    """Return the planner's prices by source, if they are not too old."""
    if quoted is None or time.monotonic() - quoted.asked_s > PRICE_VALID_S:
        return {}
    return {STORAGE_LINKS: quoted.price}


class Verdicts:
    """Verdicts of one engine. Called by the scheduler's one thread.

    Args:
        decisions: estimates and decisions.
        counters: receive the counts.
        workers: number of workers, which all load their part of a block. A load has ended when all have ended it.
        asks_planner: whether the planner is asked how busy storage links are.
    """

    def __init__(
        self, decisions: LoadDecisions, counters: ConnectorCounters, workers: int, *, asks_planner: bool = False
    ) -> None:
        self._workers = workers
        self._asks_planner = asks_planner
        self._decisions = decisions
        self._counters = counters
        self._loads: dict[str, _ExpectedLoad] = {}
        """By request with a load to come or under way."""
        self._steps: deque[tuple[int, float, list[tuple[int, int]]]] = deque(maxlen=_STEPS_IN_FLIGHT)
        """Timed steps without output: number, time of the plan, tokens by request."""
        self._next_step = 0
        self._last_output_s = 0.0
        self._own_node = ""
        """The node of the workers' host; empty: none, or it is not known yet."""

    # ---- decisions ----
    def price_query(self, paths: Paths | None) -> PriceQuery | None:
        """Return the question to the planner about a request; None: it is not asked. The first load shows the workers' node.

        Args:
            paths: the storage links that the request names; None: the client's.
        """
        return PriceQuery(self._own_node, paths) if self._asks_planner and self._own_node else None

    def blocks_to_read_ahead(self, lookup: Lookup, tokens: int, quoted: QuotedPrice | None = None) -> int:
        """Return how many of the found blocks a request would load for which the engine has nothing: a forecast, not a verdict.

        Args:
            lookup: as in ``blocks_to_load``.
            tokens: as in ``blocks_to_load``.
            quoted: as in ``blocks_to_load``.
        """
        segments = self._segments(lookup, 0)
        verdict = self._decisions.decide(segments, 0, tokens, _prices(quoted), probes=False) if segments is not None else None
        return lookup.hit_blocks if verdict is None else verdict.blocks

    def blocks_to_load(
        self,
        request_id: str,
        lookup: Lookup,
        first: int,
        cached: int,
        tokens: int,
        quoted: QuotedPrice | None = None,
        ahead: int = 0,
    ) -> int:
        """Return how many of the found blocks of a request to load, from block ``first`` on.

        Args:
            request_id: the request.
            lookup: the blocks of it that the store has.
            first: the first block that the engine lacks.
            cached: tokens that the engine has.
            tokens: all tokens of the request.
            quoted: the planner's price of a load over storage links; None: it was not asked or did not answer.
            ahead: leading blocks that are read ahead. They cost as much as blocks in the DRAM of this host, wherever the lookup
                found them, even if their read has not ended: the forecast that chose them saw their old price.
        """
        segments = self._segments(lookup, first, ahead)
        prices = _prices(quoted)
        verdict = self._decisions.decide(segments, cached, tokens, prices) if segments is not None else None
        blocks = lookup.hit_blocks - first if verdict is None else verdict.blocks
        self._counters.add("verdicts_unmeasured" if verdict is None else _COUNTERS[verdict.choice])
        if verdict is not None:
            self._count(verdict)
            if prices.keys() & {segment.source for segment in segments or ()}:
                self._counters.add("verdicts_priced")
        if blocks:
            sizes = bytes_by_source(segments or (), blocks, self._decisions.block_bytes)
            load_s = None if verdict is None else verdict.load_s - self._decisions.delay_s
            if ahead and blocks_beyond(lookup.runs, lookup.hit_blocks, self._own_node)[first:ahead].any():
                load_s = None  # read ahead by plan: they come out of the DRAM of several hosts
            limit_s = None if verdict is None else verdict.limit_s
            named = self._segments(lookup, first) if ahead else segments
            named_sizes = bytes_by_source(named or (), blocks, self._decisions.block_bytes)
            self._loads[request_id] = _ExpectedLoad(sizes, named_sizes, load_s, self._price_of(sizes, prices), limit_s)
        return blocks

    def _segments(self, lookup: Lookup, first: int, ahead: int = 0) -> list[Segment] | None:
        """Return the sources of the found blocks from ``first`` on; None: some block has none."""
        runs = lookup.runs
        if ahead and self._own_node:
            own = NodeRef(NodeId(self._own_node), "", "")
            runs = (*runs, Run(0, ahead, own, Tier.DRAM, VolumeId("")))
        return nearest_segments(runs, first, lookup.hit_blocks, self._decisions.loads, self._own_node)

    def _price_of(self, sizes: Mapping[Hashable, int], prices: Mapping[Hashable, LinkPrice]) -> float | None:
        """Return the planner's price of the bytes over storage links; None: there are none, or there is no price."""
        price, nbytes = prices.get(STORAGE_LINKS), sizes.get(STORAGE_LINKS)
        return price.of(nbytes // self._decisions.block_bytes) if price is not None and nbytes else None

    def _count(self, verdict: LoadVerdict) -> None:
        if verdict.choice is Choice.LOAD:
            return
        self._counters.add("verdict_saved_seconds", max(0.0, verdict.load_all_s - verdict.seconds))

    # ---- loads ----
    def probe_limit_s(self, request_id: str) -> float | None:
        """Return after which time the load of a request ends, since it is a probe; None: it is not."""
        load = self._loads.get(request_id)
        return None if load is None else load.limit_s

    def load_planned(self, request_id: str) -> None:
        """Record that the load of a request goes to the workers with this step."""
        if (load := self._loads.get(request_id)) is not None:
            load.planned_s = time.monotonic()

    def loads_ended(self, samples: Mapping[str, LoadSample]) -> None:
        """Record loads that have ended in some workers. The estimates follow the slowest worker, as requests do."""
        for request_id, ended in samples.items():
            self._own_node = ended.own_node
            if (expected := self._loads.get(request_id)) is None:  # the request has left
                continue
            sample = expected.sample = ended.merged(expected.sample)
            if sample.workers < self._workers:
                continue
            del self._loads[request_id]
            if expected.limit_s is not None:
                early = sum(sample.sources.values()) < sum(expected.sizes.values())
                self._decisions.probe_ended(early=early)
                if early:
                    continue
            if not sample.sources:
                if expected.named_sizes:
                    self._decisions.load_failed(expected.named_sizes, sample.seconds)
                if expected.price_s is not None and sample.seconds > expected.price_s:  # a hung link
                    self._decisions.priced_load_ended(STORAGE_LINKS, expected.price_s, expected.sizes, sample.seconds)
                continue
            if expected.price_s is not None and sample.sources.get(STORAGE_LINKS) == expected.sizes[STORAGE_LINKS]:
                self._decisions.priced_load_ended(STORAGE_LINKS, expected.price_s, sample.sources, sample.seconds)
            self._decisions.load_ended(sample.sources, sample.seconds)
            if expected.planned_s and not sample.layerwise and expected.limit_s is None:
                self._decisions.load_noticed(time.monotonic() - expected.planned_s - sample.seconds)
            if expected.load_s is not None and _bytes_by_tier(sample.sources) == _bytes_by_tier(expected.sizes):
                self._counters.add("load_predictions")
                self._counters.add("load_predicted_seconds", expected.load_s)
                self._counters.add("load_prediction_error_seconds", abs(expected.load_s - sample.seconds))

    def request_left(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._loads.pop(request_id, None)

    # ---- steps ----
    def step_planned(self, chunks: Sequence[tuple[int, int]] | None) -> int:
        """Record a step that is given to the workers.

        Args:
            chunks: by request: tokens in the cache, and new tokens; None: the step does more than compute, or it is unknown what.

        Returns:
            The number under which its output is reported; 0: it is not timed.
        """
        if chunks is None or max((new for _, new in chunks), default=0) < _TIMED_TOKENS:
            return 0
        self._next_step += 1
        self._steps.append((self._next_step, time.monotonic(), list(chunks)))
        return self._next_step

    def output_arrived(self, answer: WorkerOutput | None) -> None:
        """Record the output of a step. Workers begin a step when the one before is done, even if its plan was made earlier."""
        now_s, before_s = time.monotonic(), self._last_output_s
        self._last_output_s = now_s
        number = answer.step if answer is not None else 0
        while number and self._steps and self._steps[0][0] <= number:
            planned, began_s, chunks = self._steps.popleft()
            if planned == number:
                self._step_ended(chunks, now_s - max(began_s, before_s))

    def _step_ended(self, chunks: Iterable[tuple[int, int]], seconds: float) -> None:
        chunks = list(chunks)
        prefill = self._decisions.prefill
        if prefill.is_known:
            tokens, work = sum(new for _, new in chunks), sum(pairs(cached, new) for cached, new in chunks)
            expected_s = prefill.step_seconds(1, tokens, work)
            self._counters.add("step_predictions")
            self._counters.add("step_predicted_seconds", expected_s)
            self._counters.add("step_prediction_error_seconds", abs(expected_s - seconds))
        self._decisions.step_ended(chunks, seconds)
