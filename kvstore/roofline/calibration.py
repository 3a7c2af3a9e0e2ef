"""Step times of a real engine: a fit of measured forward passes, and the limits of the scheduler that follow from it.

A pass over ``tokens`` new tokens after ``context`` cached ones takes ``fixed_s + token_s * tokens + pair_s * pairs`` seconds.
Pairs of a new token and an earlier one are the work of attention: tokens * context + tokens * (tokens + 1) / 2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from kvstore.core.errors import InvalidArgument

ALPHA_S = 3.0
BETA_S = 5.0
"""Thresholds of the paper in seconds: a reading queue that takes longer than alpha is long, and an engine whose requests take
longer than beta is overloaded."""
MOST_SAMPLES = 100_000
MOST_TOKENS = 1 << 24
_LEAST_SAMPLES = 4


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
            raise InvalidArgument("step times are finite and not negative", **asdict(self))

    def seconds(self, tokens: int, context: int) -> float:
        """Return the seconds of a pass over one request."""
        return self.fixed_s + self.token_s * tokens + self.pair_s * pairs(tokens, context)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as ``step_times`` reads them."""
        return asdict(self)


def pairs(tokens: int, context: int) -> float:
    """Return the pairs of a new token and itself or an earlier one."""
    return float(tokens) * context + tokens * (tokens + 1) / 2


def step_times(data: object) -> StepTimes:
    """Read constants from plain values.

    Raises:
        InvalidArgument: names or values are not those of step times.
    """
    if not isinstance(data, dict) or not {"fixed_s", "token_s", "pair_s"} <= data.keys():
        raise InvalidArgument("a calibration has fixed_s, token_s and pair_s")
    values = {name: data.get(name, 0.0) for name in ("fixed_s", "token_s", "pair_s", "error")}
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values()):
        raise InvalidArgument("the values of a calibration are numbers")
    return StepTimes(**values)


def checked(tokens: object, context: object, seconds: object) -> StepSample:
    """Return a sample from values of a file or an engine.

    Raises:
        InvalidArgument: a value is no number, or out of bounds.
    """
    try:
        sample = StepSample(int(str(tokens)), int(str(context)), float(str(seconds)))
    except ValueError as error:
        raise InvalidArgument("a sample is tokens, context and seconds", tokens=str(tokens)[:40]) from error
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
            f"a fit requires samples of at least {_LEAST_SAMPLES} different sizes; measure more lengths", sizes=len(by_work)
        )
    seconds = np.array([float(np.median(found)) for found in by_work.values()])
    work = np.array([(1.0, tokens, pairs(tokens, context)) for tokens, context in by_work])
    relative = work / seconds[:, None]
    scale = relative.max(axis=0)
    best, least = np.zeros(3), math.inf
    # three constants: the best of all fits with some of them zero is the best fit without negative ones
    for count in (3, 2, 1):
        for columns in itertools.combinations(range(3), count):
            found, *_ = np.linalg.lstsq(relative[:, columns] / scale[list(columns)], np.ones(len(seconds)), rcond=None)
            if (found < 0).any():
                continue
            constants = np.zeros(3)
            constants[list(columns)] = found / scale[list(columns)]
            error = float(((relative @ constants - 1) ** 2).sum())
            if error < least - 1e-12:
                best, least = constants, error
    fixed_s, token_s, pair_s = (float(value) for value in best)
    return StepTimes(fixed_s, token_s, pair_s, float(np.median(np.abs(relative @ best - 1))))


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
        raise InvalidArgument("cached is less than the prompt, and rates are above zero", prompt=prompt, cached=cached)
    each = times.seconds(prompt - cached, cached)
    if not each > 0:
        raise InvalidArgument("the fitted engine computes in no time; measure longer prompts")
    return max(1, round(ALPHA_S * read_bytes_s / token_bytes)), max(1, round(BETA_S * prompt / each))
