"""Verdicts of one engine: samples of its loads and steps in, verdicts on its requests out.

A source that is not loaded from is not measured. So each verdict against loading earns a small share of its price, and once that
pays for it, a few blocks are loaded as a probe: a link that has become fast again is found, and the probes together cost at most
that share.

One load that hung may have made the estimate of its source many times too high. So the first probe of a source is charged the
price of its verdict at most: it comes after about ``1 / PROBE_SHARE`` verdicts, even if it should take much longer. That bound
and the blocks of a probe double with each probe, until the source has recovered. So a source that is really slow costs a few
probes more than the share.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from kvstore.recompute.link_price import LinkPrice, PriceCorrection
from kvstore.recompute.load_estimate import MOST_SOURCES, LoadEstimates
from kvstore.recompute.prefill_estimate import PrefillEstimate
from kvstore.recompute.verdict import Choice, FoundPrefix, LoadVerdict, Overlap, Piece, judge

PROBE_SHARE = 0.02
"""Share of the time of verdicts against loading that may be spent on probes."""

DELAYS = 9
"""Loads whose delays give the estimate of the next one."""

_MOST_DOUBLINGS = 32

_RECOVERED = 0.5
"""A source has recovered if its price is less than this part of the price at its last probe."""
_NOT_PROBED = (0, 0.0, 0)

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
        self._probe_s = 0.0
        """Time that probes may take."""
        self._probed: dict[Hashable, tuple[int, float, int]] = {}
        """By source: blocks found there at the last probe, their price then, and the number of probes since it has recovered."""
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
    ) -> LoadVerdict | None:
        """Return the verdict on a request; None: too little was measured, so its blocks should be loaded.

        Args:
            segments: the found blocks beyond the cached ones.
            cached: tokens that the engine has.
            tokens: all tokens of the request.
            prices: of sources that the planner has priced; the durations of earlier loads then do not count.
        """
        found = [self._piece(segment, prices.get(segment.source)) for segment in segments]
        if not self.prefill.is_known or not any(found):
            return None
        # a source without estimate is tried as if it were fast, and measured by that
        pieces = [piece or Piece(segment.blocks, self.delay_s, 0.0) for piece, segment in zip(found, segments, strict=True)]
        self._forget_recovered(segments, pieces)
        prompt = FoundPrefix(pieces, self._block_tokens, cached, tokens)
        verdict = judge(
            prompt,
            self.prefill.seconds,
            overlap=self._overlap,
            least_blocks=self._least_blocks,
            deadline_s=self._deadline_s,
        )
        if verdict.blocks == prompt.blocks:
            return verdict
        self._probe_s += PROBE_SHARE * verdict.seconds
        ends = list(accumulate(piece.blocks for piece in pieces))
        probed = bisect_right(ends, verdict.blocks)
        source, piece = segments[probed].source, pieces[probed]
        _, _, probes = self._probed.get(source, _NOT_PROBED)
        blocks = self._probe_blocks(prompt, verdict, probes)
        load_s = prompt.load_seconds(blocks)
        if min(load_s - verdict.load_s, verdict.seconds * 2.0**probes) > self._probe_s:
            return verdict
        self._probe_s = 0.0
        price_s = piece.fixed_s + piece.blocks * piece.block_s
        self._probed[source] = piece.blocks, price_s, min(probes + 1, _MOST_DOUBLINGS)
        if len(self._probed) > MOST_SOURCES:
            del self._probed[next(iter(self._probed))]
        return replace(verdict, choice=Choice.PROBE, blocks=blocks, load_s=load_s)

    def _probe_blocks(self, prompt: FoundPrefix, verdict: LoadVerdict, probes: int) -> int:
        """Return how many blocks a probe loads: twice as many as the one before, which may have been too few to show the rate.

        Beyond the first block, a probe should take no longer than the request without it.
        """
        first = min(prompt.blocks, max(verdict.blocks + 1, self._least_blocks))
        most = min(prompt.blocks, max(first, verdict.blocks + 2**probes))
        more = range(first + 1, most + 1)
        return first + bisect_left(more, True, key=lambda k: prompt.load_seconds(k) - verdict.load_s > verdict.seconds)

    def _forget_recovered(self, segments: Sequence[Segment], pieces: Sequence[Piece]) -> None:
        """Forget the probes of sources that have become faster since."""
        if not self._probed:
            return
        for segment, piece in zip(segments, pieces, strict=True):
            blocks, price_s, _ = self._probed.get(segment.source, _NOT_PROBED)
            if piece.fixed_s + blocks * piece.block_s < price_s * _RECOVERED:
                del self._probed[segment.source]

    def _piece(self, segment: Segment, price: LinkPrice | None) -> Piece | None:
        """Return the time to load a segment; None: nothing is known about its source."""
        if price is not None:
            fixed_s, block_s = self.prices.line(price)
        elif (line := self.loads.line(segment.source)) is not None:
            fixed_s, block_s = line.fixed_s, line.per_byte_s * self.block_bytes
        else:
            return None
        return Piece(segment.blocks, fixed_s + self.delay_s, block_s)
