"""The choice of a copy strategy per direction. Pure: measurements in, choice out.

1. If every candidate was measured or failed, the fastest is chosen. A strategy that occupies multiprocessors, which the model
   could use, must be faster than those that do not by ``MARGIN``.
2. If a measurement is missing, for example because time ran out, a rule decides: loads in pieces shorter than
   ``SMALL_PIECE_BYTES`` use ``direct``; everything else uses ``batched``, or ``staged`` if the driver lacks batched copies.
3. A candidate that failed in its trial is not chosen, except ``staged``, which is always possible.
4. Stores use ``batched``, or ``staged`` if that is impossible: SGLang saw illegal accesses with store kernels beside
   FlashAttention 3 on Hopper (#20611, #21631), and no long run has excluded them here. So faster kernels are only reported, and
   must be requested by name. Stores never use ``batched_ahead``, whose sources must be complete.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["load", "store"]
DIRECTIONS: tuple[Direction, ...] = ("load", "store")
ON_COPY_ENGINES = ("batched", "batched_ahead")
ON_MULTIPROCESSORS = ("staged", "direct")
"""Strategies that run kernels. Between equal rates, the earlier name in these tuples is chosen."""
CANDIDATES: Mapping[Direction, tuple[str, ...]] = {
    "load": (*ON_COPY_ENGINES, *ON_MULTIPROCESSORS),
    "store": ("batched", "staged"),
}
MARGIN = 0.2
"""A kernel must be faster than the copy engines by this share."""
SMALL_PIECE_BYTES = 28 << 10
"""In shorter pieces, overhead takes most of the time of a copy engine. vLLM switches to a kernel at the same length."""
LEAST_SAMPLES = 3
"""A median requires at least this many durations per size."""


@dataclass(frozen=True, slots=True)
class TrialResults:
    """Results of the trial copies of one direction.

    Attributes:
        rates: bytes per second by strategy.
        failed: error by strategy, of those that failed.
        gap: why a measurement is missing; empty: none is.
    """

    rates: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    gap: str = ""


@dataclass(frozen=True, slots=True)
class DirectionChoice:
    """The strategy of one direction.

    Attributes:
        strategy: its name.
        source: why: it was ``fixed`` by a setting, ``measured``, or chosen by the ``rule``.
        rates: measured bytes per second by strategy; empty: not measured.
        gap: why it was not measured, if it was to be.
    """

    strategy: str
    source: Literal["fixed", "measured", "rule"]
    rates: Mapping[str, float] = field(default_factory=dict)
    gap: str = ""


def candidates(direction: Direction, available: Collection[str]) -> tuple[str, ...]:
    """Return the strategies that are measured. ``auto`` uses one of them.

    Args:
        direction: loads or stores.
        available: strategies that the device, driver and installation support.
    """
    return tuple(name for name in CANDIDATES[direction] if name in available)


def combined_rate(samples: Mapping[int, Sequence[float]]) -> float | None:
    """Return bytes per second over one copy of each size, by the median duration of each size.

    Args:
        samples: durations in seconds, by size in bytes.

    Returns:
        None: too few samples, or durations that are not positive and finite.
    """
    if not samples or any(len(durations) < LEAST_SAMPLES for durations in samples.values()):
        return None
    seconds = sum(statistics.median(durations) for durations in samples.values())
    return sum(samples) / seconds if math.isfinite(seconds) and seconds > 0 else None


def by_rule(direction: Direction, available: Collection[str], piece_bytes: int) -> str:
    """Choose without measurements; see the module.

    Args:
        direction: loads or stores.
        available: strategies to choose from.
        piece_bytes: length of the contiguous pieces of this cache.
    """
    if direction == "load" and piece_bytes < SMALL_PIECE_BYTES and "direct" in available:
        return "direct"
    return "batched" if "batched" in available else "staged"


def by_rates(rates: Mapping[str, float]) -> str | None:
    """Return the best of the measured strategies; None: there is none.

    Args:
        rates: bytes per second by strategy.
    """
    engine = max((name for name in ON_COPY_ENGINES if name in rates), key=rates.__getitem__, default=None)
    kernel = max((name for name in ON_MULTIPROCESSORS if name in rates), key=rates.__getitem__, default=None)
    if engine is None or kernel is None:
        return engine or kernel
    return kernel if rates[kernel] > (1 + MARGIN) * rates[engine] else engine


def choose(direction: Direction, available: Collection[str], piece_bytes: int, measured: TrialResults) -> DirectionChoice:
    """Choose the strategy of a direction; see the module.

    Args:
        direction: loads or stores.
        available: strategies that the device, driver and installation support.
        piece_bytes: length of the contiguous pieces of this cache.
        measured: results of the trial copies.
    """
    wanted = candidates(direction, available)
    left = [name for name in wanted if name not in measured.failed]
    rates = {name: rate for name in left if math.isfinite(rate := measured.rates.get(name, math.nan)) and rate > 0}
    on_engines = {name: rate for name, rate in rates.items() if name in ON_COPY_ENGINES}
    usable = on_engines or rates if direction == "store" else rates
    best = by_rates(usable) if len(rates) == len(left) and not measured.gap else None
    if best is not None:
        return DirectionChoice(best, "measured", rates)
    gap = measured.gap or ("all trial copies failed" if not left else "a measurement is missing")
    return DirectionChoice(by_rule(direction, left, piece_bytes), "rule", rates, gap)
