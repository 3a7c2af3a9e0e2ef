"""Which copies of before a reset may still touch rows of host memory."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient.engines.vllm.tier.page_copies import PageCopies


def test_copies_of_before_a_reset_are_stale_until_all_report() -> None:
    copies = PageCopies(2)
    copies.planned([1, 2])
    copies.reported({1: 2, 2: 1})
    copies.reset()
    copies.planned([3])
    assert copies.stale, "one worker still copies into rows that vLLM has given away"
    copies.reported({2: 1})
    assert not copies.stale
    copies.reported({3: 2, 4: 1})
    assert not copies.stale


@pytest.mark.parametrize("workers", [1, 2, 3])
@given(steps=st.lists(st.one_of(st.just("plan"), st.just("reset"), st.integers(0, 5)), max_size=30))
def test_copies_are_stale_as_long_as_any_of_them_runs(workers: int, steps: list[str | int]) -> None:
    """A number lets one worker report the oldest copies that it has not reported, in the output of a step with others."""
    copies = PageCopies(workers)
    running: set[tuple[int, int]] = set()
    planned, before_reset = 0, 0
    for step in steps:
        if step == "plan":
            running |= {(planned, worker) for worker in range(workers)}
            copies.planned([planned])
            planned += 1
        elif step == "reset":
            before_reset = planned
            copies.reset()
        else:
            ended = sorted(running)[: int(step)]
            running -= set(ended)
            copies.reported(Counter(job_id for job_id, _ in ended))
        assert copies.stale == any(job_id < before_reset for job_id, _ in running)
