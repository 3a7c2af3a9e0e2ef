"""The search for a cluster ends in time and recommends the best option that ran."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import InvalidArgument
from kvstore.roofline.hardware import GPUS
from kvstore.roofline.models import model_named
from kvstore.simulate.advice import CLOSE, MOST_RATIOS, Advice, Option, advise, ratios
from kvstore.simulate.cluster import SimConfig, uniform
from kvstore.simulate.result import SimResult
from kvstore.simulate.sessions import AgentSession, SessionTurn

SESSIONS = tuple(AgentSession(0.0, (SessionTurn(64 * (40 + i), 200, 8),) * 2) for i in range(24))


def build(prefill: int, decode: int) -> SimConfig:
    return uniform(model_named("ds-27b"), GPUS["h100"], SESSIONS, prefill_nodes=prefill, decode_nodes=decode, snic=1e9)


def option(prefill: int, decode: int, policy: str, requests_s: float, ttft_s: float) -> Option:
    result = SimpleNamespace(requests_per_s=requests_s, ttft=SimpleNamespace(mean=ttft_s))
    return Option(prefill, decode, policy, build(1, 1), cast("SimResult", result))


@given(st.integers(2, 512))
def test_advice_ratios_use_all_nodes(nodes: int) -> None:
    found = ratios(nodes)
    assert len(set(found)) == len(found) == min(MOST_RATIOS, nodes - 1)
    assert all(prefill + decode == nodes and min(prefill, decode) >= 1 for prefill, decode in found)


def test_advice_best_has_highest_rate() -> None:
    found = advise(build, ratios(3), ["prefill_only", "split"], limit_s=600)
    assert found.left_out == 0
    assert len(found.options) == 4
    assert found.best is found.options[0]
    assert found.best.requests_s >= max(option.requests_s for option in found.options) * (1 - CLOSE)
    assert found.ceiling is not None
    assert found.ceiling.requests_s >= found.best.requests_s * (1 - CLOSE)
    assert found.reasons


def test_advice_lower_rate_is_explained() -> None:
    best = option(2, 2, "shorter_queue", 98.0, 1.0)
    advice = Advice(best, None, (best, option(1, 3, "split", 100.0, 3.0), option(2, 2, "split", 97.0, 2.0)), {}, 0)
    cluster, policy, rule = advice.reasons
    assert cluster == "2P2D serves 0.98 times the requests of the next best cluster, 1P3D (TTFT: 1.000 s and 3.000 s)."
    assert policy == "shorter_queue serves 1.01 times the requests of split, the default policy (TTFT: 1.000 s and 2.000 s)."
    assert rule.startswith("Rates within 3% of the highest count as equal")


def test_advice_without_time_has_one_run() -> None:
    found = advise(build, ratios(3), ["prefill_only", "split"], limit_s=0)
    assert len(found.options) == 1
    assert found.ceiling is None
    assert found.left_out == 4


def test_advice_model_that_fits_nowhere_is_refused() -> None:
    def large(prefill: int, decode: int) -> SimConfig:
        return uniform(model_named("ds-660b"), GPUS["h100"], (), prefill_nodes=prefill, decode_nodes=decode)

    with pytest.raises(InvalidArgument, match="fits none"):
        advise(large, ratios(2), ["split"])
