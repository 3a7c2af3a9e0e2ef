"""The time in which an engine computes a prompt, estimated from its measured steps.

A step costs a fixed time, a time per token, and a time per pair of tokens that attention compares. All three are fitted to
measured steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from kvstore.core.errors import InvalidArgument
from kvstore.recompute.fit import fit

WINDOW = 48
"""Steps kept."""
REFIT_SHARE = 1 / 8
"""Share of the kept steps that must be new before the estimate is made again."""
LEAST_STEPS = 3
"""Steps that must be measured before there is an estimate: the first ones warm the engine up."""
AGEING = 0.95
"""Weight of a step in relation to the next one."""
_RIDGE = (3e-3, 1e-4, 1e-3)


def pairs(cached: int, tokens: int) -> float:
    """Return the number of pairs of tokens that attention compares for ``tokens`` new tokens after ``cached`` ones."""
    return tokens * (cached + (tokens + 1) / 2)


class PrefillEstimate:
    """Estimate of one engine.

    Args:
        step_tokens: tokens that a step computes at most; a longer prompt needs several steps.
    """

    def __init__(self, step_tokens: int) -> None:
        if step_tokens < 1:
            raise InvalidArgument("step_tokens must be at least 1", step_tokens=step_tokens)
        self._step_tokens = step_tokens
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=WINDOW)
        self._costs = 0.0, 0.0, 0.0
        self._new = 0
        """Steps since the estimate was made."""

    def record(self, chunks: Iterable[tuple[int, int]], seconds: float) -> None:
        """Record a measured step.

        Args:
            chunks: by request of the step: tokens in its cache, and new tokens.
            seconds: duration of the step.
        """
        tokens, work = 0, 0.0
        for cached, new in chunks:
            tokens += new
            work += pairs(cached, new)
        if tokens and 0 < seconds < math.inf:
            self._steps.append((tokens, work, seconds))
            self._new += 1

    @property
    def is_known(self) -> bool:
        """Whether enough steps were measured."""
        return len(self._steps) >= LEAST_STEPS

    def seconds(self, cached: int, tokens: int) -> float:
        """Return the estimated time of ``tokens`` new tokens after ``cached`` ones. It must be known."""
        if tokens <= 0:
            return 0.0
        return self.step_seconds(-(-tokens // self._step_tokens), tokens, pairs(cached, tokens))

    def step_seconds(self, steps: int, tokens: int, work: float) -> float:
        """Return the estimated time of some steps with this many tokens and pairs. It must be known."""
        if self._new > REFIT_SHARE * len(self._steps):
            self._new = 0
            rows = [(1 / taken, count / taken, compared / taken) for count, compared, taken in self._steps]
            weights = [AGEING**age for age in reversed(range(len(rows)))]
            step_s, token_s, pair_s = fit(rows, weights, _RIDGE)
            self._costs = step_s, token_s, pair_s
        step_s, token_s, pair_s = self._costs
        return steps * step_s + tokens * token_s + work * pair_s
