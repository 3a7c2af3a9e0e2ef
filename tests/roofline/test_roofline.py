"""The roofline against published figures, and its own laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import InvalidArgument, NotFound
from kvstore.roofline.engine_model import EngineModel, PrefillChunk, Scale
from kvstore.roofline.hardware import GPUS, exchange_seconds, gpu_named
from kvstore.roofline.models import MODELS, model_named

H100 = GPUS["h100"]
K = 1024
APPEND = 429


@pytest.mark.parametrize(
    ("name", "low", "high", "slack"),
    [
        ("qwen2.5-32b", 117e9, 267e9, 0.02),
        ("qwen3-235b", 39e9, 60e9, 0.02),
        ("ds-660b", 13e9, 36e9, 0.06),
        ("ds-v3", 4.8e9, 5.8e9, 0.12),
    ],
)
def test_roofline_bytes_per_pflop_match_published_values(name: str, low: float, high: float, slack: float) -> None:
    """DualPath, Table 1: 429 new tokens after 16K to 64K cached ones, KV of one byte an element (Qwen2.5: two)."""
    model = model_named(name)
    assert model.bytes_per_pflop(16 * K, APPEND) == pytest.approx(low, rel=slack)
    assert model.bytes_per_pflop(64 * K, APPEND) == pytest.approx(high, rel=slack)
    assert low <= model.bytes_per_pflop(48 * K, APPEND) * (1 + slack)
    assert model.bytes_per_pflop(32_700, APPEND) <= high


def test_roofline_mean_turn_needs_22_gb_per_pflop() -> None:
    assert model_named("ds-660b").bytes_per_pflop(32_700, APPEND) == pytest.approx(22e9, rel=0.1)


def test_roofline_prefill_matches_published_rate() -> None:
    """DeepSeek's overview: 73.7 thousand tokens/s a node of eight with 56.3 % cached, four nodes a unit."""
    engine = EngineModel(model_named("ds-v3"), H100, group_gpus=32)
    rate = 8 * 4000 / engine.prefill_seconds([PrefillChunk(0, 1000)] * 4)
    assert rate == pytest.approx(73_700 * (1 - 0.563), rel=0.2)


def test_roofline_decode_matches_published_speed() -> None:
    """The same: 14.8 thousand tokens/s a node of eight at 20 to 22 a user, 18 nodes a unit, about 5,000 tokens of context."""
    engine = EngineModel(model_named("ds-v3"), H100, group_gpus=144)
    sequences = 14_800 / 8 / 21
    step = engine.decode_seconds(sequences, sequences * 5000, sequences * 144)
    assert 1 / step == pytest.approx(21, rel=0.2)


@given(
    cached=st.integers(0, 60_000),
    new=st.integers(1, 8_000),
    name=st.sampled_from(sorted(MODELS)),
    gpu=st.sampled_from(sorted(GPUS)),
)
def test_roofline_time_is_monotonic_in_work(cached: int, new: int, name: str, gpu: str) -> None:
    engine = EngineModel(model_named(name), gpu_named(gpu), group_gpus=16)
    one = engine.prefill_seconds([PrefillChunk(cached, new)])
    assert 0 < one <= engine.prefill_seconds([PrefillChunk(cached, new + 1)])
    assert one <= engine.prefill_seconds([PrefillChunk(cached + 64, new)])
    assert (
        one
        <= engine.prefill_seconds([PrefillChunk(cached, new), PrefillChunk(0, 1)])
        <= one + engine.prefill_seconds([PrefillChunk(0, 1)]) * 1.01
    )
    assert engine.decode_seconds(1, cached) <= engine.decode_seconds(2, 2 * cached)


def test_roofline_empty_batch_takes_no_time() -> None:
    engine = EngineModel(model_named("llama-3-8b"), H100)
    assert engine.prefill_seconds([]) == 0
    assert engine.decode_seconds(0, 0) == 0
    assert exchange_seconds(1) == 0
    assert exchange_seconds(10_000) == exchange_seconds(128)


def test_roofline_8b_model_matches_measurements() -> None:
    """A few hundred tokens/s a stream at most, tens of thousands of prompt tokens a second."""
    engine = EngineModel(model_named("llama-3-8b"), H100)
    assert 1 / engine.decode_seconds(1, 1000) == pytest.approx(125, rel=0.1)
    assert 8000 / engine.prefill_seconds([PrefillChunk(0, 8000)]) == pytest.approx(30_000, rel=0.2)
    assert engine.token_bytes == 131_072


@given(dilation=st.floats(0.01, 100), byte_scale=st.floats(1e-6, 10))
def test_roofline_scale_keeps_every_ratio(dilation: float, byte_scale: float) -> None:
    scale = Scale(dilation, byte_scale)
    real = EngineModel(model_named("ds-660b"), H100, group_gpus=16)
    small = EngineModel(real.model, H100, group_gpus=16, scale=scale)
    snic = 50e9
    chunk = PrefillChunk(32_000, 429)
    load = real.token_bytes * chunk.cached / snic
    scaled_load = small.token_bytes * chunk.cached / scale.rate(snic)
    assert scaled_load / small.prefill_seconds([chunk]) == pytest.approx(load / real.prefill_seconds([chunk]))
    assert small.decode_seconds(8, 8000) == pytest.approx(real.decode_seconds(8, 8000) * dilation)
    assert small.kv_space_bytes / small.token_bytes == pytest.approx(real.kv_space_bytes / real.token_bytes)
    again = Scale.for_link(snic, scale.rate(snic), dilation)
    assert again.bytes == pytest.approx(byte_scale)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_fits_its_default_cluster(name: str) -> None:
    model = model_named(name)
    for nodes in (model.prefill_nodes, model.decode_nodes):
        group = 8 * nodes if model.expert_parallel else model.tensor_parallel
        engine = EngineModel(model, H100, model.tensor_parallel, group)
        assert engine.kv_space_bytes > 2 * 64 * K * engine.token_bytes or model.layer_token_bytes > 2000


def test_unknown_model_or_gpu_is_named() -> None:
    with pytest.raises(NotFound, match="llama-3-8b"):
        model_named("gpt")
    with pytest.raises(NotFound, match="h200"):
        gpu_named("tpu")
    with pytest.raises(InvalidArgument):
        Scale(0, 1)
    with pytest.raises(InvalidArgument):
        Scale.for_link(1, 0)
    with pytest.raises(InvalidArgument):
        EngineModel(model_named("ds-27b"), H100, 2, 1)
