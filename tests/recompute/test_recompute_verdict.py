"""Verdicts: never worse than loading or computing everything, and as good as trying every cut."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.recompute.decisions import PROBE_SHARE, PROBE_TIME, LoadDecisions, Segment
from kvstore.recompute.prefill_estimate import pairs
from kvstore.recompute.verdict import DEADLINE_SHARE, LEAST_GAIN_S, MARGIN, Choice, FoundPrefix, Overlap, Piece, judge

BLOCK = 16
PIECES = st.lists(st.builds(Piece, st.integers(1, 12), st.floats(0, 0.5), st.floats(1e-4, 0.5)), min_size=1, max_size=4)


class Engine:
    """Computes: a time per token, and one per pair."""

    def __init__(self, token_s: float, pair_s: float) -> None:
        self.token_s = token_s
        self.pair_s = pair_s

    def __call__(self, cached: int, tokens: int) -> float:
        return tokens * self.token_s + pairs(cached, tokens) * self.pair_s


ENGINES = st.builds(Engine, st.floats(1e-5, 1e-2), st.floats(0, 1e-4))


def prefix(pieces: list[Piece], cached_blocks: int = 0, tail: int = 5) -> FoundPrefix:
    blocks = cached_blocks + sum(piece.blocks for piece in pieces)
    return FoundPrefix(pieces, BLOCK, cached_blocks * BLOCK, blocks * BLOCK + tail)


def price(found: FoundPrefix, engine: Engine, overlap: Overlap, k: int) -> float:
    cached = found.cached + k * BLOCK
    load_s, rest_s = found.load_seconds(k), engine(cached, found.tokens - cached)
    return max(load_s, rest_s) if overlap is Overlap.LAYERS else load_s + rest_s


@given(st.lists(st.builds(Piece, st.integers(0, 12), st.floats(0, 0.5), st.floats(1e-4, 0.5)), max_size=6), st.data())
def test_load_seconds_of_sources_add_up(pieces: list[Piece], data: st.DataObject) -> None:
    found = prefix(pieces)
    blocks = data.draw(st.integers(0, found.blocks + 2))
    loaded = [piece for piece in pieces for _ in range(piece.blocks)][:blocks]
    expected = max((piece.fixed_s for piece in loaded), default=0.0) + sum(piece.block_s for piece in loaded)
    assert found.load_seconds(blocks) == pytest.approx(expected)


@given(PIECES, ENGINES, st.integers(0, 20), st.integers(1, 60), st.sampled_from([Overlap.NONE, Overlap.LAYERS]))
def test_verdict_is_the_best_cut(pieces: list[Piece], engine: Engine, cached: int, tail: int, overlap: Overlap) -> None:
    found = prefix(pieces, cached, tail)
    verdict = judge(found, engine, overlap=overlap)
    best = min(price(found, engine, overlap, k) for k in range(1, found.blocks + 1))
    best = min(best, engine(found.cached, found.tokens - found.cached))
    assert verdict.seconds <= best * (1 + MARGIN) + LEAST_GAIN_S
    expected = price(found, engine, overlap, verdict.blocks) if verdict.blocks else verdict.compute_s
    assert verdict.seconds == pytest.approx(expected)
    assert verdict.choice is (
        Choice.COMPUTE if not verdict.blocks else Choice.LOAD if verdict.blocks == found.blocks else Choice.CUT
    )


@given(PIECES, ENGINES, st.integers(1, 10), st.floats(0.01, 5))
def test_verdict_keeps_floor_and_deadline(pieces: list[Piece], engine: Engine, least: int, deadline_s: float) -> None:
    found = prefix(pieces)
    verdict = judge(found, engine, least_blocks=least, deadline_s=deadline_s)
    assert verdict.blocks == 0 or verdict.blocks >= least
    assert verdict.load_s <= deadline_s * DEADLINE_SHARE


def test_verdict_two_sources_are_cut_between_them() -> None:
    found = prefix([Piece(10, 0.0, 1e-4), Piece(10, 0.0, 1.0)])
    verdict = judge(found, Engine(1e-3, 0.0))
    assert (verdict.choice, verdict.blocks) == (Choice.CUT, 10)
    assert verdict.load_all_s > verdict.compute_s > verdict.seconds


def measured(load_s: float, token_s: float = 1e-3) -> LoadDecisions:
    """One second per block of loads at ``load_s`` 1; a token takes ``token_s``."""
    decisions = LoadDecisions(BLOCK, 1000, step_tokens=1024)
    for blocks in (1, 4, 16):
        decisions.load_ended({"n": blocks * 1000}, blocks * load_s)
    for tokens in (100, 200, 400):
        decisions.step_ended([(0, tokens)], tokens * token_s)
    return decisions


def test_decisions_without_samples_are_none() -> None:
    decisions = LoadDecisions(BLOCK, 1000, step_tokens=1024)
    assert decisions.decide([Segment("n", 4)], 0, 100) is None
    for tokens in (100, 200, 400):
        decisions.step_ended([(0, tokens)], tokens * 1e-3)
    assert decisions.decide([Segment("n", 4)], 0, 100) is None, "nothing was loaded"
    decisions.load_ended({"n": 1000}, 1e-6)
    verdict = decisions.decide([Segment("n", 4)], 0, 100)
    assert verdict is not None
    assert verdict.choice is Choice.LOAD


def test_decisions_try_a_source_that_is_not_known() -> None:
    decisions = measured(10.0)
    verdict = decisions.decide([Segment("new", 8), Segment("n", 8)], 0, 300)
    assert verdict is not None
    assert (verdict.choice, verdict.blocks) == (Choice.CUT, 8)


@given(st.floats(-2, 3), st.lists(st.integers(1, 64), min_size=1, max_size=8), st.floats(0, 1))
def test_decisions_probes_cost_their_share_at_most(load: float, sizes: list[int], delay_s: float) -> None:
    """However slow the source is, and however long the engine takes to notice the end of a probe."""
    decisions = measured(10**load)
    decisions.load_noticed(delay_s)
    spent_s = verdicts_s = 0.0
    for request in range(300):
        blocks = sizes[request % len(sizes)]
        verdict = decisions.decide([Segment("n", blocks)], 0, blocks * BLOCK + 10)
        assert verdict is not None
        if verdict.choice is Choice.LOAD:
            assert verdict.limit_s is None
            continue
        verdicts_s += verdict.seconds
        if verdict.choice is Choice.PROBE:
            assert 0 < verdict.blocks <= blocks
            assert verdict.limit_s is not None
            spent_s += verdict.limit_s - (verdict.seconds - verdict.compute_s) + delay_s
            decisions.probe_ended(early=True)
    assert spent_s <= PROBE_SHARE * verdicts_s + 1e-6


def test_decisions_probe_finds_recovery() -> None:
    decisions = measured(0.1)
    tokens, choices = 16 * BLOCK + 10, []
    for _ in range(round(2 / PROBE_SHARE)):
        verdict = decisions.decide([Segment("n", 16)], 0, tokens)
        assert verdict is not None
        choices.append(verdict.choice)
        if verdict.choice is Choice.PROBE:
            decisions.load_ended({"n": verdict.blocks * 1000}, verdict.blocks * 1e-6)
    assert choices.index(Choice.PROBE) == pytest.approx(PROBE_TIME / PROBE_SHARE, abs=1)
    assert set(choices[choices.index(Choice.PROBE) + 1 :]) == {Choice.LOAD}


def test_decisions_forecast_is_no_probe_and_earns_none() -> None:
    decisions = measured(0.1)
    segments, tokens = [Segment("n", 16)], 16 * BLOCK + 10
    forecasts = [decisions.decide(segments, 0, tokens, probes=False) for _ in range(round(2 / PROBE_SHARE))]
    assert {forecast.choice for forecast in forecasts if forecast is not None} == {Choice.COMPUTE}
    verdict = decisions.decide(segments, 0, tokens)
    assert verdict is not None
    assert verdict.choice is Choice.COMPUTE


@pytest.mark.parametrize("fixed", [0.1, 0.3, 0.6])
def test_decisions_probe_finds_source_with_fixed_cost(fixed: float) -> None:
    """The source takes this share of the time of computing, however few blocks are loaded."""
    decisions = measured(0.1)
    tokens, probes, verdicts = 16 * BLOCK + 10, 0, 0
    while (verdict := decisions.decide([Segment("n", 16)], 0, tokens)) is not None and verdict.choice is not Choice.LOAD:
        verdicts += 1
        assert verdicts < 200
        if verdict.limit_s is not None:
            probes += 1
            needed_s = fixed * verdict.compute_s + verdict.blocks * 1e-6
            decisions.probe_ended(early=needed_s > verdict.limit_s)
            if needed_s <= verdict.limit_s:
                decisions.load_ended({"n": verdict.blocks * 1000}, needed_s)
    assert 1 <= probes <= 6


def test_decisions_hung_load_counts_and_a_refused_one_not() -> None:
    decisions = measured(1e-5)
    decisions.load_failed({"n": 16_000}, 1e-6)
    verdict = decisions.decide([Segment("n", 16)], 0, 300)
    assert verdict is not None
    assert verdict.choice is Choice.LOAD
    decisions.load_failed({"n": 16_000}, 10.0)
    verdict = decisions.decide([Segment("n", 16)], 0, 300)
    assert verdict is not None
    assert verdict.choice is not Choice.LOAD


def test_decisions_delay_is_part_of_the_price() -> None:
    decisions = measured(1e-5)
    for delay_s in (5.0, 0.0, 5.0):
        decisions.load_noticed(delay_s)
    assert decisions.delay_s == 5.0
    verdict = decisions.decide([Segment("n", 16)], 0, 300)
    assert verdict is not None
    assert verdict.choice is Choice.COMPUTE


@given(st.integers(0, 10_000), st.floats(-4, 0), st.floats(-5, -2))
def test_decisions_regret_is_small_after_warm_up(seed: int, load: float, token: float) -> None:
    draw = random.Random(seed)
    block_s, token_s = 10**load, 10**token
    decisions = measured(block_s, token_s)
    for _ in range(20):
        tokens, blocks = draw.randrange(300, 4000), draw.randrange(1, 18)
        verdict = decisions.decide([Segment("n", blocks)], 0, tokens)
        assert verdict is not None
        loaded = verdict.blocks * block_s + (tokens - verdict.blocks * BLOCK) * token_s
        best = min(blocks * block_s + (tokens - blocks * BLOCK) * token_s, tokens * token_s)
        probe = verdict.choice is Choice.PROBE
        assert probe or loaded <= best * 1.15 + 2 * LEAST_GAIN_S
        noise = draw.lognormvariate(0, 0.05)
        if verdict.blocks:
            decisions.load_ended({"n": verdict.blocks * 1000}, verdict.blocks * block_s * noise)
        decisions.step_ended([(verdict.blocks * BLOCK, 500)], 500 * token_s * draw.lognormvariate(0, 0.05))
