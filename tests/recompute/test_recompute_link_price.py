"""Prices of the planner and their correction: priced loads in, corrected prices out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.recompute.decisions import PROBE_SHARE, PROBE_TIME, LoadDecisions, Segment
from kvstore.recompute.link_price import LinkPrice, PriceCorrection
from kvstore.recompute.verdict import Choice

SECONDS = st.floats(1e-4, 1e2)


@given(SECONDS, SECONDS, st.integers(1, 10_000))
def test_price_line_meets_the_price(first_s: float, more_s: float, blocks: int) -> None:
    price = LinkPrice(first_s, first_s + more_s, blocks)
    fixed_s, block_s = price.line
    assert fixed_s >= 0
    assert block_s >= 0
    assert price.of(blocks) == pytest.approx(price.seconds if blocks > 1 else first_s)


@given(st.lists(SECONDS, min_size=1, max_size=20), st.floats(0.3, 1.0))
def test_price_of_pessimistic_planner_is_scaled(prices: list[float], factor: float) -> None:
    correction = PriceCorrection()
    for price_s in prices:
        correction.record(price_s, price_s * factor)
    assert correction.seconds(1.0) == pytest.approx(factor, rel=0.01)


def test_price_lacks_a_fixed_cost_that_is_added() -> None:
    correction = PriceCorrection()
    for price_s in (1e-3, 2e-3, 5e-3, 1e-3):
        correction.record(price_s, price_s + 0.01)
    assert correction.seconds(1e-3) == pytest.approx(0.011)
    assert correction.seconds(10.0) == pytest.approx(10.01)


@given(st.lists(SECONDS, max_size=20), SECONDS, st.floats(20, 1000), st.booleans())
def test_price_suddenly_wrong_is_learnt_by_one_load(prices: list[float], price_s: float, factor: float, slower: bool) -> None:
    correction = PriceCorrection()
    for one in prices:
        correction.record(one, one)
    taken = price_s * factor if slower else price_s / factor
    correction.record(price_s, taken)
    assert correction.seconds(price_s) == pytest.approx(taken, rel=0.01)


@pytest.mark.parametrize(("price_s", "seconds"), [(0.0, 1.0), (1.0, 0.0), (math.inf, 1.0), (1.0, math.nan)])
def test_price_impossible_sample_is_ignored(price_s: float, seconds: float) -> None:
    correction = PriceCorrection()
    correction.record(price_s, seconds)
    assert correction.seconds(2.0) == 2.0


@given(SECONDS, st.integers(1, 200))
def test_decision_loads_if_and_only_if_the_price_is_lower(price_s: float, blocks: int) -> None:
    decisions = LoadDecisions(16, 1000, step_tokens=8192)
    for _ in range(3):
        decisions.step_ended([(0, 1000)], 1.0)
    verdict = decisions.decide([Segment("far", blocks)], 0, blocks * 16 + 1, {"far": LinkPrice(price_s, price_s, blocks)})
    assert verdict is not None
    compute_s = blocks * 16 * 1e-3
    if price_s < compute_s * 0.9:
        assert verdict.choice is Choice.LOAD
    elif price_s > compute_s * 1.1 + 0.01:
        assert verdict.choice in {Choice.COMPUTE, Choice.PROBE}


@pytest.mark.parametrize("hung_s", [2.5, 10.0, 30.0])
@pytest.mark.parametrize("priced", [True, False])
def test_decision_one_hung_load_is_forgotten_soon(hung_s: float, priced: bool) -> None:
    decisions = LoadDecisions(16, 1_000_000, step_tokens=8192, deadline_s=30)
    prices = {"far": LinkPrice(0.001, 0.08, 250)}
    found = [Segment("far", 250)]

    def loaded(blocks: int, seconds: float) -> None:
        sizes = {"far": blocks * 1_000_000}
        decisions.priced_load_ended("far", prices["far"].of(blocks), sizes, seconds)
        decisions.load_ended(sizes, seconds)

    for _ in range(12):
        decisions.step_ended([(0, 4096)], 0.4)
        loaded(250, 0.1)
    for _ in range(3):  # each hang, not only the first
        loaded(250, hung_s)
        choices = []
        while not choices or (choices[-1] is not Choice.LOAD and len(choices) < 200):
            verdict = decisions.decide(found, 0, 4100, prices if priced else {})
            assert verdict is not None
            choices.append(verdict.choice)
            if verdict.blocks:
                loaded(verdict.blocks, 0.02 + verdict.blocks * 3.2e-4)
        assert choices[-1] is Choice.LOAD
        assert len(choices) <= (1.3 if priced else 2.2) * PROBE_TIME / PROBE_SHARE
        for _ in range(9):
            loaded(250, 0.1)
