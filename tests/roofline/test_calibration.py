"""The fit of step times recovers constants that made the samples."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.errors import InvalidArgument
from kvstore.roofline.calibration import StepSample, StepTimes, checked, fit, limits_of, step_times
from kvstore.roofline.engine_model import EngineModel, PrefillChunk
from kvstore.roofline.hardware import GPUS
from kvstore.roofline.models import model_named

SIZES = [(256, 0), (512, 0), (2048, 0), (8192, 0), (300, 20_000), (300, 60_000)]


@settings(max_examples=40)
@given(
    fixed=st.floats(0, 0.05),
    token=st.floats(1e-6, 1e-3),
    pair=st.floats(1e-11, 1e-8),
    seed=st.integers(0, 1000),
)
def test_calibration_fit_recovers_constants(fixed: float, token: float, pair: float, seed: int) -> None:
    true = StepTimes(fixed, token, pair)
    draw = random.Random(seed)
    samples = [StepSample(*size, true.seconds(*size) * draw.uniform(0.995, 1.005)) for size in SIZES for _ in range(5)]
    found = fit(samples)
    assert found.error < 0.01
    for tokens, context in SIZES:
        assert found.seconds(tokens, context) == pytest.approx(true.seconds(tokens, context), rel=0.02)


def test_calibration_outlier_changes_nothing() -> None:
    true = StepTimes(0.01, 1e-5, 1e-9)
    samples = [StepSample(*size, true.seconds(*size)) for size in SIZES for _ in range(3)]
    samples[0] = StepSample(*SIZES[0], 10.0)
    found = fit(samples)
    assert (found.fixed_s, found.token_s, found.pair_s) == pytest.approx((0.01, 1e-5, 1e-9), rel=1e-6)


def test_calibration_one_length_still_fits() -> None:
    """Samples of one length cannot tell the time of a pass from that of its tokens."""
    true = StepTimes(0.01, 1e-5, 1e-9)
    found = fit([StepSample(300, context, true.seconds(300, context)) for context in (0, 1_000, 20_000, 60_000)])
    assert found.error < 1e-6
    assert min(found.fixed_s, found.token_s, found.pair_s) >= 0


def test_calibration_few_sizes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="different sizes"):
        fit([StepSample(100, 0, 1.0)] * 50)


@pytest.mark.parametrize("values", [(0, 0, 1), (1, -1, 1), (1, 0, 0), (1, 0, "nan"), ("x", 0, 1), (None, 0, 1), (1 << 40, 0, 1)])
def test_calibration_bad_sample_is_refused(values: tuple[object, ...]) -> None:
    with pytest.raises(InvalidArgument):
        checked(*values)


@pytest.mark.parametrize(
    "data",
    [None, [], {"fixed_s": 1}, {"fixed_s": -1, "token_s": 0, "pair_s": 0}, dict.fromkeys(["fixed_s", "token_s", "pair_s"], True)],
)
def test_calibration_bad_constants_are_refused(data: object) -> None:
    with pytest.raises(InvalidArgument):
        step_times(data)


def test_calibration_limits_are_seconds_of_work() -> None:
    times = StepTimes(0.0, 1e-3, 0.0)
    assert limits_of(times, 10_000, 9_000, 1e9, 1e5) == (30_000, 50_000)
    with pytest.raises(InvalidArgument):
        limits_of(times, 10, 10, 1e9, 1e5)


def test_calibration_measured_times_replace_roofline() -> None:
    times = StepTimes(0.5, 1e-3, 1e-6)
    engine = EngineModel(model_named("llama-3-8b"), GPUS["h100"], measured=step_times(times.to_json()))
    assert engine.prefill_seconds([PrefillChunk(100, 10)]) == pytest.approx(times.seconds(10, 100))
    assert engine.attention_seconds(PrefillChunk(100, 10)) == pytest.approx(1e-6 * 1055)
    assert engine.prefill_seconds([]) == 0
