"""The token bound of a step keeps attention within the quota, however hits turn out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvclient.engines.vllm.quota.budget import most_tokens, prompt_tokens
from kvstore.recompute.prefill_estimate import pairs

SIZES = st.integers(1, 60_000)


@given(st.integers(0, 1 << 20), st.floats(0, 1e15))
def test_quota_most_tokens_is_exact(cached: int, left: float) -> None:
    tokens = most_tokens(cached, left)
    assert pairs(cached, tokens) <= left
    assert pairs(cached, tokens + 2) > left


@given(
    st.lists(st.tuples(st.integers(0, 60_000), SIZES), max_size=5),
    st.lists(st.tuples(SIZES, st.floats(0, 1)), max_size=5),
    st.floats(1, 1e10),
)
def test_quota_is_kept_whatever_hits(known: list[tuple[int, int]], waiting: list[tuple[int, float]], most: float) -> None:
    budget = prompt_tokens(known, [tokens for tokens, _ in waiting], most, 0)
    work, left = 0.0, budget
    for cached, remaining in [*known, *((int(tokens * hit), tokens - int(tokens * hit)) for tokens, hit in waiting)]:
        tokens = min(left, remaining)
        work += pairs(cached, tokens)
        left -= tokens
    assert work <= most * (1 + 1e-9)


def test_quota_always_leaves_progress() -> None:
    assert prompt_tokens([(1 << 20, 500)], [], 10.0, 16) == 16
    assert prompt_tokens([], [100, 200], 1e12, 16) == 300
