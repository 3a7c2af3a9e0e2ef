"""Load times by source, estimated from measured loads: a fixed cost, and bytes at a rate.

A source is a tier of a node. Recent loads count more than old ones. If a source has become slower or faster, all earlier samples
are scaled by the same factor, so they still say how the fixed cost and the rate relate. A load that stalls looks like a change.
So the smaller the factor, the more loads in a row must show it (``CHANGED``): one load is enough if the link is 100 times slower.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from kvstore.recompute.fit import fit

WINDOW = 16
"""Samples kept per source."""
AGEING = 0.85
"""Weight of a sample in relation to the next one."""
CHANGED = (16.0, 4.0, 2.5, 1.6)
"""A source has changed if the last load differs from its estimate by more than the first factor, or the last two loads by more
than the second one, and so on, all in the same direction."""
EXPLAINED = 1.3
"""A source has not changed if a line through all samples differs from the load by less: then only its size was new."""
MOST_SOURCES = 256
_RIDGE = (1e-2, 1e-4)
_UNCERTAIN = 0.3
"""Share of the estimate of other sources of a load that may be wrong."""
_EXPLAINED_SHARE = 0.5
"""Share of a load's time that known sources must explain, or an unknown one explains the rest."""


class LoadLine(NamedTuple):
    """Estimated time of a load from one source: ``fixed_s + nbytes * per_byte_s``."""

    fixed_s: float
    per_byte_s: float


class SourceEstimate:
    """Estimate of one source."""

    __slots__ = ("_factors", "_line", "_samples")

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._line: LoadLine | None = None
        self._factors: deque[float] = deque(maxlen=len(CHANGED))
        """Times of the last loads in relation to their estimates, since the source has changed."""

    def record(self, nbytes: int, seconds: float) -> None:
        """Record a measured load. Samples without bytes or time are ignored."""
        if nbytes <= 0 or not 0 < seconds < math.inf:
            return
        if self._samples:
            line = self.line()
            self._factors.append(seconds / (line.fixed_s + nbytes * line.per_byte_s))
        self._samples.append((nbytes, seconds))
        self._line = None
        loads = changed_loads(self._factors)
        if loads and not _agrees(self.line(), nbytes, seconds):
            factor = math.prod(list(self._factors)[-loads:]) ** (1 / loads)
            before = len(self._samples) - loads
            scaled = [(size, taken * factor if at < before else taken) for at, (size, taken) in enumerate(self._samples)]
            self._samples = deque(scaled, WINDOW)
            self._line = None
            self._factors.clear()

    def line(self) -> LoadLine:
        """Return the estimate. At least one load must have been recorded."""
        if self._line is None:
            self._line = _line_of(self._samples)
        return self._line


def changed_loads(factors: Sequence[float]) -> int:
    """Return how many of the last loads show that their source has changed; 0: it has not.

    Args:
        factors: times of loads in relation to their estimates, the last one at the end.
    """
    for loads, bound in enumerate(CHANGED, 1):
        last = list(factors)[-loads:]
        if len(last) == loads and (min(last) > bound or max(last) < 1 / bound):
            return loads
    return 0


def _line_of(samples: Sequence[tuple[int, float]]) -> LoadLine:
    rows = [(1 / seconds, nbytes / seconds) for nbytes, seconds in samples]
    return LoadLine(*fit(rows, [AGEING**age for age in reversed(range(len(rows)))], _RIDGE))


def _agrees(line: LoadLine, nbytes: int, seconds: float) -> bool:
    """Whether an estimate explains a measured load."""
    return 1 / EXPLAINED <= seconds / (line.fixed_s + nbytes * line.per_byte_s) <= EXPLAINED


class LoadEstimates:
    """Estimates of all sources. A load may have several: their times add up, and the largest fixed cost counts once."""

    def __init__(self) -> None:
        self._sources: dict[Hashable, SourceEstimate] = {}

    def line(self, source: Hashable) -> LoadLine | None:
        """Return the estimate of a source; None: nothing was loaded from it yet."""
        known = self._sources.get(source)
        return None if known is None else known.line()

    def seconds(self, sources: Mapping[Hashable, int]) -> float | None:
        """Return the estimated time of a load with these bytes by source; None: nothing is known about one of them."""
        fixed_s = total_s = 0.0
        for source, nbytes in sources.items():
            if (line := self.line(source)) is None:
                return None
            fixed_s = max(fixed_s, line.fixed_s)
            total_s += nbytes * line.per_byte_s
        return fixed_s + total_s

    def record(self, sources: Mapping[Hashable, int], seconds: float) -> None:
        """Record a measured load. Of several sources, one explains the time that the others should not have taken.

        It is the one that should take longest or, if that leaves most of the time unexplained, the furthest of which nothing is
        known.

        Args:
            sources: bytes by source, the nearest first.
            seconds: duration.
        """
        if not sources:
            return
        expected = {source: self.seconds({source: nbytes}) for source, nbytes in sources.items()}
        unknown = [source for source, one in expected.items() if one is None]
        explains = max(sources, key=lambda source: expected[source] or 0.0)
        if unknown and sum(one or 0.0 for one in expected.values()) < seconds * _EXPLAINED_SHARE:
            explains = unknown[-1]
        others = sum(one or 0.0 for source, one in expected.items() if source != explains)
        self._of(explains).record(sources[explains], max(seconds - others, others * _UNCERTAIN))

    def _of(self, source: Hashable) -> SourceEstimate:
        """Return the estimate of a source, the last of those that may be forgotten."""
        known = self._sources.pop(source, None) or SourceEstimate()
        self._sources[source] = known
        if len(self._sources) > MOST_SOURCES:
            del self._sources[next(iter(self._sources))]
        return known
