"""Compute quota: the parts of waiting prompts in one forward batch (section 6.4 of the paper)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.core.errors import InvalidArgument

QUOTA_S = 0.3
"""Default quota of a batch in seconds: the value of the paper."""


class AttentionModel(Protocol):
    """Predicts the attention time of a batch: sums the theoretical work of its chunks, and converts the sum to seconds."""

    def work(self, cached: int, tokens: int) -> float:
        """Return the work (e.g. FLOPs) of ``tokens`` new tokens after ``cached`` ones. Must not fall as either grows."""
        ...

    def seconds(self, work: float) -> float:
        """Return the time of a batch with this work. Must not fall as the work grows."""
        ...


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens of one request to compute in one batch.

    Attributes:
        cached: tokens before the chunk, whose KV is already loaded.
        tokens: number of tokens in the chunk.
    """

    cached: int
    tokens: int

    def __post_init__(self) -> None:
        if self.cached < 0 or self.tokens < 1:
            raise InvalidArgument("chunk out of bounds", cached=self.cached, tokens=self.tokens)


def fill_batch(
    waiting: Sequence[PromptChunk], model: AttentionModel, quota_s: float = QUOTA_S, granule: int = 1
) -> list[PromptChunk]:
    """Take requests in order of arrival while the predicted attention time is within the quota.

    The first request that does not fit is cut: a binary search finds the largest part that fits, and this part ends the batch.

    Args:
        waiting: the requests, in order.
        model: model of the attention time.
        quota_s: seconds.
        granule: a request is cut only at a multiple of this number of tokens.

    Returns:
        One chunk per request in the batch, in order; all are whole except perhaps the last. Not empty unless ``waiting`` is: if
            not even one granule of the first request fits, it gets one granule, or it would never run.
    """
    if granule < 1 or not quota_s > 0:
        raise InvalidArgument("quota out of bounds", quota_s=quota_s, granule=granule)
    batch: list[PromptChunk] = []
    total = 0.0
    for request in waiting:
        work = total + model.work(request.cached, request.tokens)
        if model.seconds(work) <= quota_s:
            batch.append(request)
            total = work
            continue
        fits, too_many = 0, -(-request.tokens // granule)  # in granules; the whole request is known not to fit
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if model.seconds(total + model.work(request.cached, middle * granule)) <= quota_s:
                fits = middle
            else:
                too_many = middle
        tokens = min(request.tokens, max(fits, 0 if batch else 1) * granule)
        if tokens:
            batch.append(PromptChunk(request.cached, tokens))
        break
    return batch
