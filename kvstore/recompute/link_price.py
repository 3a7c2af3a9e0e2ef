"""Prices of loads over storage links: predictions of the planner, corrected by the durations of earlier loads.

The planner knows from its queues how busy links are. The durations of an engine's own loads do not show that. The planner does
not know the other costs of a load: calls, copies and checksums. Measured loads show them.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import NamedTuple

from kvstore.recompute.load_estimate import CHANGED, LoadLine, changed_loads

WINDOW = 9
"""Priced loads that correct the next price."""


class LinkPrice(NamedTuple):
    """The planner's prediction for blocks over storage links.

    Attributes:
        first_s: time until one block arrives.
        seconds: time until all arrive.
        blocks: number of blocks.
    """

    first_s: float
    seconds: float
    blocks: int

    @property
    def line(self) -> LoadLine:
        """The price as a fixed cost and a cost per block."""
        if self.blocks < 2 or self.seconds <= self.first_s:
            return LoadLine(self.first_s, 0.0)
        block_s = (self.seconds - self.first_s) / (self.blocks - 1)
        if block_s > self.first_s:
            return LoadLine(0.0, self.seconds / self.blocks)
        return LoadLine(self.first_s - block_s, block_s)

    def of(self, blocks: int) -> float:
        """Return the price of the first blocks."""
        fixed_s, block_s = self.line
        return fixed_s + blocks * block_s


class PriceCorrection:
    """How measured loads relate to their prices.

    Loads that take less than their price make later prices cheaper by a factor. Loads that take more cost a fixed time more: the
    time that a load takes besides reading. Loads that show that prices have become wrong (``changed_loads``) replace all
    earlier ones: one is enough if prices are wrong by a large factor.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._factors: deque[float] = deque(maxlen=len(CHANGED))
        """Times of the last loads in relation to their corrected prices, since prices have become wrong."""
        self._factor, self._extra_s = 1.0, 0.0

    def record(self, price_s: float, seconds: float) -> None:
        """Record a measured load. Samples without price or time are ignored."""
        if not 0 < price_s < math.inf or not 0 < seconds < math.inf:
            return
        if self._samples:
            self._factors.append(seconds / self.seconds(price_s))
        self._samples.append((price_s, seconds))
        if loads := changed_loads(self._factors):
            self._samples = deque(list(self._samples)[-loads:], WINDOW)
            self._factors.clear()
        self._factor = min(1.0, median(taken / price for price, taken in self._samples))
        self._extra_s = max(0.0, median(taken - self._factor * price for price, taken in self._samples))

    def seconds(self, price_s: float) -> float:
        """Return the corrected price."""
        return self._extra_s + self._factor * price_s

    def line(self, price: LinkPrice) -> LoadLine:
        """Return the corrected price as a fixed cost and a cost per block."""
        fixed_s, block_s = price.line
        return LoadLine(self.seconds(fixed_s), self._factor * block_s)
