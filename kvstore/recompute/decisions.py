"""Verdicts of one engine: samples of its loads and steps in, verdicts on its requests out.

A source that is not loaded from is not measured, and one load that hung may have made its estimate many times too high. So each
verdict against loading earns a small share of its price, and once that pays for a probe, a part of the prefix is loaded. The load
ends after the time it was paid for, whether its blocks have arrived or not: a source that is really slow costs only that share.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from kvstore.recompute.link_price import LinkPrice, PriceCorrection
from kvstore.recompute.load_estimate import LoadEstimates
from kvstore.recompute.prefill_estimate import PrefillEstimate
from kvstore.recompute.verdict import Choice, FoundPrefix, LoadVerdict, Overlap, Piece, judge

PROBE_SHARE = 0.02
"""Share of the time of verdicts against loading that may be spent on probes."""
PROBE_TIME = 0.2
"""Share of the time of its verdict that a probe may take: at first, one verdict in ten is a probe. It doubles with each probe
that ends early, up to the whole time and one verdict in 50, so that sources with a long fixed cost are found, too."""
PROBE_BLOCKS = 0.5
"""Share of the refused blocks that a probe loads, in relation to its share of the time. Without fixed cost, a source that is
worth loading from brings them in half of the probe's time."""

DELAYS = 9
"""Loads whose delays give the estimate of the next one."""

_LEAST_SHARE = 0.3
"""Share of the time of a load that its priced source explains at least."""


class Segment(NamedTuple):
    """Consecutive found blocks and their source."""

    source: Hashable
    blocks: int


class LoadDecisions:
    """Estimates of one engine, and its verdicts. Not thread-safe.

    Args:
        block_tokens: tokens of a block.
        block_bytes: bytes of a block that one worker loads.
        step_tokens: tokens that the engine computes in one step at most.
        overlap: computation during a load.
        least_tokens: fewer tokens are not loaded.
        deadline_s: bound of a load.
    """

    def __init__(
        self,
        block_tokens: int,
        block_bytes: int,
        *,
        step_tokens: int,
        overlap: Overlap = Overlap.NONE,
        least_tokens: int = 0,
        deadline_s: float = float("inf"),
    ) -> None:
        self._block_tokens = block_tokens
        self.block_bytes = block_bytes
        self._overlap = overlap
        self._least_blocks = max(1, -(-least_tokens // block_tokens))
        self._deadline_s = deadline_s
        self._probe_s = self._probe_share = 0.0
        """Budget of the next probe: in seconds, and as a multiple of its verdict's time. The smaller one applies."""
        self._probe_time = PROBE_TIME
        """Share of its verdict's time that the next probe may take."""
        self._delays_s: deque[float] = deque(maxlen=DELAYS)
        self.loads = LoadEstimates()
        self.prices = PriceCorrection()
        self.prefill = PrefillEstimate(step_tokens)

    def load_ended(self, sources: Mapping[Hashable, int], seconds: float) -> None:
        """Record a load: its bytes by source, and its duration."""
        self.loads.record(sources, seconds)

    def load_failed(self, sources: Mapping[Hashable, int], seconds: float) -> None:
        """Record a load that brought nothing. It counts if it took at least as long as it should have: a hung link."""
        expected = self.loads.seconds(sources)
        if expected is None or seconds >= expected:
            self.loads.record(sources, seconds)

    def priced_load_ended(self, source: Hashable, price_s: float, sources: Mapping[Hashable, int], seconds: float) -> None:
        """Record a load, also one that failed, of which one source had a price from the planner.

        Args:
            source: the source with the price.
            price_s: the price of the blocks that were to be loaded from it.
            sources: bytes by source.
            seconds: duration.
        """
        others = {other: nbytes for other, nbytes in sources.items() if other != source}
        self.prices.record(price_s, max(seconds - (self.loads.seconds(others) or 0.0), seconds * _LEAST_SHARE))

    def probe_ended(self, *, early: bool) -> None:
        """Record whether a probe ended before its blocks had arrived. If so, its source is slow, as estimated: no sample."""
        self._probe_time = min(1.0, 2 * self._probe_time) if early else PROBE_TIME

    def load_noticed(self, delay_s: float) -> None:
        """Record how much longer than the load itself it took until the engine could go on with a request."""
        self._delays_s.append(max(0.0, delay_s))

    @property
    def delay_s(self) -> float:
        """Estimated delay of a load: a median, since a load that ends during a long step is noticed late."""
        return median(self._delays_s) if self._delays_s else 0.0

    def step_ended(self, chunks: Iterable[tuple[int, int]], seconds: float) -> None:
        """Record a step: by request, the cached and the new tokens, and the duration."""
        self.prefill.record(chunks, seconds)

    def decide(
        self,
        segments: Sequence[Segment],
        cached: int,
        tokens: int,
        prices: Mapping[Hashable, LinkPrice] = MappingProxyType({}),
        *,
        probes: bool = True,
    ) -> LoadVerdict | None:
        """Return the verdict on a request; None: too little was measured, so its blocks should be loaded.

        Args:
            segments: the found blocks beyond the cached ones.
            cached: tokens that the engine has.
            tokens: all tokens of the request.
            prices: of sources that the planner has priced; the durations of earlier loads then do not count.
            probes: the verdict may be a probe. False: it is a forecast, which earns nothing for one either.
        """
        found = [self._piece(segment, prices.get(segment.source)) for segment in segments]
        if not self.prefill.is_known or not any(found):
            return None
        # a source without estimate is tried as if it were fast, and measured by that
        pieces = [piece or Piece(segment.blocks, self.delay_s, 0.0) for piece, segment in zip(found, segments, strict=True)]
        prompt = FoundPrefix(pieces, self._block_tokens, cached, tokens)
        verdict = judge(
            prompt,
            self.prefill.seconds,
            overlap=self._overlap,
            least_blocks=self._least_blocks,
            deadline_s=self._deadline_s,
        )
        return verdict if verdict.blocks == prompt.blocks or not probes else self._probed(prompt, verdict)

    def _probed(self, prompt: FoundPrefix, verdict: LoadVerdict) -> LoadVerdict:
        """Return a verdict that refuses blocks, or a probe of them instead."""
        self._probe_s += PROBE_SHARE * verdict.seconds
        self._probe_share += PROBE_SHARE
        limit_s = self._probe_time * verdict.seconds
        if limit_s + self.delay_s > min(self._probe_s, self._probe_share * verdict.seconds):
            return verdict
        self._probe_s = self._probe_share = 0.0
        more = math.ceil(PROBE_BLOCKS * self._probe_time * (prompt.blocks - verdict.blocks))
        blocks = min(prompt.blocks, max(verdict.blocks + more, self._least_blocks))
        load_s = prompt.load_seconds(blocks)
        return replace(verdict, choice=Choice.PROBE, blocks=blocks, load_s=load_s, limit_s=verdict.load_s + limit_s)

    def _piece(self, segment: Segment, price: LinkPrice | None) -> Piece | None:
        """Return the time to load a segment; None: nothing is known about its source."""
        if price is not None:
            fixed_s, block_s = self.prices.line(price)
        elif (line := self.loads.line(segment.source)) is not None:
            fixed_s, block_s = line.fixed_s, line.per_byte_s * self.block_bytes
        else:
            return None
        return Piece(segment.blocks, fixed_s + self.delay_s, block_s)
