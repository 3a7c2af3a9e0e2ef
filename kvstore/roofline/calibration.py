"""Step times of a real engine: a fit of measured forward passes, and the limits of the scheduler that follow from it.

A pass over ``tokens`` new tokens after ``context`` cached ones takes ``fixed_s + token_s * tokens + pair_s * pairs`` seconds.
Pairs of a new token and an earlier one are the work of attention: tokens * context + tokens * (tokens + 1) / 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from kvstore.core.errors import InvalidArgument
from kvstore.recompute.fit import fit as relative_fit
from kvstore.recompute.prefill_estimate import pairs

ALPHA_S = 3.0
BETA_S = 5.0
"""Thresholds of the paper in seconds: a reading queue that takes longer than alpha is long, and an engine whose requests take
longer than beta is overloaded."""
MOST_SAMPLES = 100_000
MOST_TOKENS = 1 << 24
_LEAST_SAMPLES = 4
_RIDGE = 1e-9
"""Just enough that samples which cannot tell two constants apart have a fit."""


class StepSample(NamedTuple):
    """One measured forward pass."""

    tokens: int
    """New tokens that were computed."""
    context: int
    """Cached tokens before them."""
    seconds: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Fitted constants of an engine.

    Attributes:
        fixed_s: seconds of a pass, whatever is in it.
        token_s: seconds per new token.
        pair_s: seconds per pair of a new token and an earlier one, over all layers.
        error: median difference between fit and samples, as a share of the sample.
    """

    fixed_s: float
    token_s: float
    pair_s: float
    error: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= value < math.inf for value in (self.fixed_s, self.token_s, self.pair_s, self.error)):
            raise InvalidArgument("step times must be finite and not negative", **asdict(self))

    def seconds(self, tokens: int, context: int) -> float:
        """Return the seconds of a pass over one request."""
        return self.fixed_s + self.token_s * tokens + self.pair_s * pairs(context, tokens)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as ``step_times`` reads them."""
        return asdict(self)


def step_times(data: object) -> StepTimes:
    """Read constants from plain values.

    Raises:
        InvalidArgument: names or values are not those of step times.
    """
    if not isinstance(data, dict) or not {"fixed_s", "token_s", "pair_s"} <= data.keys():
        raise InvalidArgument("a calibration must have fixed_s, token_s and pair_s")
    values = {name: data.get(name, 0.0) for name in ("fixed_s", "token_s", "pair_s", "error")}
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values()):
        raise InvalidArgument("the values of a calibration must be numbers")
    return StepTimes(**values)


def checked(tokens: object, context: object, seconds: object) -> StepSample:
    """Return a sample from values of a file or an engine.

    Raises:
        InvalidArgument: a value is no number, or out of bounds.
    """
    try:
        sample = StepSample(int(str(tokens)), int(str(context)), float(str(seconds)))
    except ValueError as error:
        raise InvalidArgument("a sample must be tokens, context and seconds", tokens=str(tokens)[:40]) from error
    if not (1 <= sample.tokens <= MOST_TOKENS and 0 <= sample.context <= MOST_TOKENS and 0 < sample.seconds < 86_400):
        raise InvalidArgument("sample out of bounds", tokens=sample.tokens, context=sample.context, seconds=sample.seconds)
    return sample


def fit(samples: Sequence[StepSample]) -> StepTimes:
    """Fit the constants so that relative errors are least; no constant is negative.

    Samples of equal tokens and context count as one with their median time, so that single slow passes do not matter.

    Raises:
        InvalidArgument: too few different samples.
    """
    if len(samples) > MOST_SAMPLES:
        raise InvalidArgument(f"at most {MOST_SAMPLES} samples can be fitted", samples=len(samples))
    by_work: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        by_work.setdefault((sample.tokens, sample.context), []).append(sample.seconds)
    if len(by_work) < _LEAST_SAMPLES:
        raise InvalidArgument(
            f"a fit requires samples of at least {_LEAST_SAMPLES} different sizes; measure more lengths, or raise the limits of"
            " tokens and time (--most-tokens, --limit)",
            sizes=len(by_work),
        )
    samples = [StepSample(*size, median(found)) for size, found in by_work.items()]
    rows = [(1 / taken, tokens / taken, pairs(context, tokens) / taken) for tokens, context, taken in samples]
    fixed_s, token_s, pair_s = relative_fit(rows, [1.0] * len(rows), [_RIDGE] * 3, rounds=1)
    times = StepTimes(fixed_s, token_s, pair_s)
    return replace(times, error=median(abs(times.seconds(tokens, context) / taken - 1) for tokens, context, taken in samples))


def limits_of(times: StepTimes, prompt: int, cached: int, read_bytes_s: float, token_bytes: float) -> tuple[int, int]:
    """Return ``metadata.alpha_tokens`` and ``metadata.beta_tokens``.

    Args:
        times: of one engine.
        prompt: tokens of a usual prompt.
        cached: of these, tokens that hit.
        read_bytes_s: what one storage link reads under load, bytes/s.
        token_bytes: KV bytes per token.

    Raises:
        InvalidArgument: a value is out of bounds.
    """
    if not (0 <= cached < prompt <= MOST_TOKENS) or not (0 < read_bytes_s < math.inf and 0 < token_bytes < math.inf):
        raise InvalidArgument("cached must be less than the prompt, and rates must be above zero", prompt=prompt, cached=cached)
    each = times.seconds(prompt - cached, cached)
    if not each > 0:
        raise InvalidArgument("the fitted engine computes in no time; measure longer prompts")
    return max(1, round(ALPHA_S * read_bytes_s / token_bytes)), max(1, round(BETA_S * prompt / each))
