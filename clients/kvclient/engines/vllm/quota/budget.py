"""How many prompt tokens a step may compute within a bound on attention. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvstore.recompute.prefill_estimate import pairs


def most_tokens(cached: int, left: float) -> int:
    """Return the largest number of tokens after ``cached`` ones whose pairs are at most ``left``."""
    if left <= 0:
        return 0
    half = cached + 0.5
    tokens = max(0, int(math.sqrt(half * half + 2 * left) - half))
    while tokens and pairs(cached, tokens) > left:  # rounding
        tokens -= 1
    return tokens


def prompt_tokens(known: Iterable[tuple[int, int]], waiting: Sequence[int], most_pairs: float, least: int) -> int:
    """Return how many prompt tokens a step computes: requests in order, the last one cut at the end of the quota.

    Args:
        known: (cached, remaining) tokens of prompts whose cached tokens are known.
        waiting: prompt tokens of the requests after those. Their hits are not known yet, so each token counts as if it were the
            last one of the longest prompt.
        most_pairs: the quota.
        least: tokens of a step even if they exceed the quota, so that prompts make progress.
    """
    total, left = 0, most_pairs
    for cached, remaining in known:
        tokens = min(remaining, most_tokens(cached, left))
        total += tokens
        left -= pairs(cached, tokens)
        if tokens < remaining:
            return max(total, least)
    if waiting:
        total += min(sum(waiting), int(left / max(waiting)))
    return max(total, least)
