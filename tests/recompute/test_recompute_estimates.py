"""Estimates of loads and of prefills: samples in, predictions out."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import InvalidArgument
from kvstore.recompute.fit import fit
from kvstore.recompute.load_estimate import CHANGED, MOST_SOURCES, LoadEstimates, SourceEstimate, changed_loads
from kvstore.recompute.prefill_estimate import LEAST_STEPS, PrefillEstimate, pairs

FIXED = st.floats(1e-4, 1e-2)
PER_BYTE = st.floats(1e-10, 1e-7)
SIZES = st.lists(st.integers(100_000, 1_000_000_000), min_size=1, max_size=30)


def predicted(estimate: SourceEstimate, nbytes: int) -> float:
    line = estimate.line()
    return line.fixed_s + nbytes * line.per_byte_s


def learnt(fixed_s: float, per_byte_s: float, sizes: list[int], noise: float = 0.0, seed: int = 0) -> SourceEstimate:
    estimate, draw = SourceEstimate(), random.Random(seed)
    for size in sizes:
        estimate.record(size, (fixed_s + size * per_byte_s) * draw.lognormvariate(0, noise))
    return estimate


@given(FIXED, PER_BYTE, SIZES)
def test_load_exact_samples_predict_known_sizes(fixed_s: float, per_byte_s: float, sizes: list[int]) -> None:
    estimate = learnt(fixed_s, per_byte_s, sizes)
    assert predicted(estimate, sizes[-1]) == pytest.approx(fixed_s + sizes[-1] * per_byte_s, rel=0.3)


@given(FIXED, PER_BYTE, st.integers(0, 1000))
def test_load_noisy_samples_predict_other_sizes(fixed_s: float, per_byte_s: float, seed: int) -> None:
    draw = random.Random(seed)
    sizes = [int(10 ** draw.uniform(6, 9)) for _ in range(30)]
    estimate = learnt(fixed_s, per_byte_s, sizes, 0.1, seed)
    errors = sorted(abs(predicted(estimate, size) / (fixed_s + size * per_byte_s) - 1) for size in sizes)
    assert errors[len(errors) // 2] < 0.25


@given(FIXED, PER_BYTE, SIZES, st.integers(100_000, 1_000_000_000), st.floats(25, 1000), st.booleans())
def test_load_link_change_is_learnt_by_one_load(
    fixed_s: float, per_byte_s: float, sizes: list[int], nbytes: int, factor: float, slower: bool
) -> None:
    estimate = learnt(fixed_s, per_byte_s, sizes)
    seconds = predicted(estimate, nbytes) * (factor if slower else 1 / factor)
    estimate.record(nbytes, seconds)
    assert 0.65 < predicted(estimate, nbytes) / seconds < 1.55


@given(FIXED, PER_BYTE, st.integers(100_000, 1_000_000_000), st.floats(1.8, 15), st.booleans())
def test_load_small_change_is_learnt_by_four_loads(
    fixed_s: float, per_byte_s: float, nbytes: int, factor: float, slower: bool
) -> None:
    estimate = learnt(fixed_s, per_byte_s, [nbytes] * 10)
    seconds = (fixed_s + nbytes * per_byte_s) * (factor if slower else 1 / factor)
    for _ in range(2 if factor > 6 else 3 if factor > 4 else 4):
        estimate.record(nbytes, seconds)
    assert predicted(estimate, nbytes) == pytest.approx(seconds, rel=0.35)


@given(st.floats(1.5, 15), st.integers(10**6, 10**8))
def test_load_that_stalls_once_is_forgiven(factor: float, nbytes: int) -> None:
    sizes = [10**6, 10**7, 10**8] * 4
    estimate = learnt(1e-3, 1e-9, sizes)
    estimate.record(nbytes, (1e-3 + nbytes * 1e-9) * factor)
    for size in sizes:
        assert predicted(estimate, size) == pytest.approx(1e-3 + size * 1e-9, rel=0.35)


@given(st.floats(0.01, 100), st.integers(0, 6))
def test_change_needs_fewer_loads_the_larger_it_is(factor: float, loads: int) -> None:
    shown = changed_loads([factor] * loads)
    size = max(factor, 1 / factor)
    least = 1 + sum(size <= bound for bound in CHANGED)
    assert shown == (least if least <= min(loads, len(CHANGED)) else 0)
    assert changed_loads([factor, 1 / factor, factor]) in {0, 1}, "in different directions"


@given(FIXED, PER_BYTE, SIZES)
def test_load_estimate_never_falls_with_size(fixed_s: float, per_byte_s: float, sizes: list[int]) -> None:
    line = learnt(fixed_s, per_byte_s, sizes, 0.5).line()
    assert line.fixed_s >= 0
    assert line.per_byte_s >= 0
    assert line.fixed_s + line.per_byte_s > 0


@pytest.mark.parametrize(("nbytes", "seconds"), [(0, 1.0), (1, 0.0), (1, math.inf), (1, math.nan), (-1, 1.0)])
def test_load_impossible_sample_is_ignored(nbytes: int, seconds: float) -> None:
    estimate = learnt(1e-3, 1e-9, [10_000_000])
    before = estimate.line()
    estimate.record(nbytes, seconds)
    assert estimate.line() == before


def test_loads_sources_add_up_and_unknown_is_none() -> None:
    loads = LoadEstimates()
    assert loads.seconds({"a": 1}) is None
    for size in (10**6, 10**7, 10**8):
        loads.record({"a": size}, size * 1e-9)
        loads.record({"b": size}, size * 1e-8)
    assert loads.seconds({"a": 10**7, "b": 10**7}) == pytest.approx(0.11, rel=0.05)
    assert loads.seconds({"a": 1, "c": 1}) is None
    loads.record({}, 1.0)


def test_loads_mixed_sample_explains_the_slow_source() -> None:
    loads = LoadEstimates()
    for size in (10**6, 10**7, 10**8):
        loads.record({"near": size}, size * 1e-10)
        loads.record({"far": size}, size * 1e-8)
    loads.record({"near": 10**7, "far": 10**7}, 10.0)
    assert loads.seconds({"near": 10**7}) == pytest.approx(1e-3, rel=0.05)
    assert loads.seconds({"far": 10**7}) == pytest.approx(10.0, rel=0.3)


def test_loads_first_mixed_sample_is_of_the_furthest() -> None:
    loads = LoadEstimates()
    loads.record({"near": 10**8, "far": 10**6}, 1.0)
    assert loads.line("near") is None
    assert loads.line("far") is not None


def test_loads_oldest_source_is_forgotten() -> None:
    loads = LoadEstimates()
    for number in range(MOST_SOURCES + 1):
        loads.record({number: 1}, 1.0)
    assert loads.line(0) is None
    assert loads.line(1) is not None


@given(st.floats(0, 1e-2), st.floats(1e-6, 1e-3), st.floats(0, 1e-7), st.integers(0, 1000))
def test_prefill_steps_predict_prompts(step_s: float, token_s: float, pair_s: float, seed: int) -> None:
    draw, estimate = random.Random(seed), PrefillEstimate(2048)
    for _ in range(40):
        chunk = draw.randrange(8192), draw.randrange(32, 2049)
        estimate.record([chunk], (step_s + chunk[1] * token_s + pairs(*chunk) * pair_s) * draw.lognormvariate(0, 0.05))
    true = 4 * step_s + 8192 * token_s + pairs(0, 8192) * pair_s
    assert estimate.seconds(0, 8192) == pytest.approx(true, rel=0.3)


def test_prefill_slow_first_steps_do_not_mislead() -> None:
    estimate = PrefillEstimate(1024)
    for count, seconds in enumerate((30.0, 2.0, *[0.1] * 8)):
        assert estimate.is_known == (count >= LEAST_STEPS)
        estimate.record([(0, 1000)], seconds)
    assert estimate.seconds(0, 1000) == pytest.approx(0.1, rel=0.2)
    assert estimate.seconds(0, 0) == 0.0


def test_prefill_pairs_of_chunks_add_up() -> None:
    assert pairs(0, 100) == pairs(0, 40) + pairs(40, 60)
    with pytest.raises(InvalidArgument):
        PrefillEstimate(0)


@given(st.lists(st.lists(st.floats(0.01, 100), min_size=3, max_size=3), min_size=1, max_size=40))
def test_fit_is_not_negative_and_finite(rows: list[list[float]]) -> None:
    found = fit(rows, [1.0] * len(rows), (1e-3, 1e-4, 1e-3))
    assert all(0 <= one < math.inf for one in found)
    assert any(found)
