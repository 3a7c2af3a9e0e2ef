"""Checks of the figures that a process reports. Nothing proves that a registered address is the node's."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

from kvproto.v1 import admin_pb2 as pb
from kvstore.core.errors import Unavailable
from kvstore.core.limits import MAX_NAME_BYTES
from kvstore.observe.history import POINTS

MAX_COUNTERS: Final = 1_024
MAX_LEVELS: Final = 64
MAX_HISTOGRAMS: Final = 16
MAX_BUCKETS: Final = 64
_MAX_LEVEL: Final = float(1 << 63)


def check_figures(found: pb.DescribeHistoryResponse, step_s: int) -> pb.DescribeHistoryResponse:
    """Return valid figures unchanged. The checks bound the memory and time that a report can cost.

    Args:
        found: figures of one process.
        step_s: requested length of an interval.

    Raises:
        Unavailable: the figures are invalid.
    """
    reason = _reason(found, step_s)
    if reason:
        raise Unavailable(f"it reports invalid figures of the last hour: {reason}")
    return found


def _reason(found: pb.DescribeHistoryResponse, step_s: int) -> str:
    """Return the first error in the figures; empty: they are valid."""
    points = len(found.at_seconds)
    if points > POINTS + 1 or len(found.lengths_seconds) != points:
        return "wrong number of points"
    if any(at_s % step_s for at_s in found.at_seconds) or any(a >= b for a, b in pairwise(found.at_seconds)):
        return "wrong times of points"
    if len(found.counts) > MAX_COUNTERS or len(found.levels) > MAX_LEVELS or len(found.durations) > MAX_HISTOGRAMS:
        return "too many series"
    names = [*(one.name for one in found.counts), *(one.name for one in found.levels), *(one.name for one in found.durations)]
    if any(len(name) > MAX_NAME_BYTES for name in names):
        return "a name is too long"
    if any(len(one.values) != points for one in found.counts) or any(len(one.values) != points for one in found.levels):
        return "wrong number of values"
    if not all(math.isnan(value) or 0 <= value <= _MAX_LEVEL for level in found.levels for value in level.values):
        return "wrong levels"
    for timed in found.durations:
        bounds = timed.bounds_seconds
        if len(bounds) >= MAX_BUCKETS or len(timed.counts) != points * (len(bounds) + 1):
            return "wrong number of buckets"
        if not all(0 <= bound < math.inf for bound in bounds) or any(a >= b for a, b in pairwise(bounds)):
            return "wrong bounds of buckets"
    return ""
