"""Steps with requests with and without an adapter, which vLLM mixes up on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvclient.engines.vllm.identity import adapter_mixing
from kvclient.engines.vllm.identity.adapter_mixing import AdapterMixing

LORA = SimpleNamespace(lora_config=object())
ADAPTER = object()


@pytest.fixture(autouse=True)
def platform(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The platform, as vLLM describes it."""
    said = SimpleNamespace(is_cpu=True)
    monkeypatch.setattr(adapter_mixing, "_is_cpu", lambda: said.is_cpu)
    return said


def step(scheduled: str, new: str = "", adapted: str = "", finished: str = "") -> SimpleNamespace:
    """A step of requests with one letter each."""
    arrived = [SimpleNamespace(req_id=name, lora_request=ADAPTER if name in adapted else None) for name in new]
    return SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(scheduled, 1), scheduled_new_reqs=arrived, finished_req_ids=set(finished)
    )


@pytest.mark.parametrize(
    ("steps", "happens"),
    [
        ([step("ab", "ab")], False),
        ([step("ab", "ab", "ab")], False),
        ([step("ab", "ab", "a")], True),
        ([step("a", "a", "a"), step("b", "b")], False),
        ([step("a", "a", "a"), step("b", "b"), step("ab")], True),
        ([step("a", "a", "a"), step("b", "b", finished="a"), step("ab", "a")], False),
        ([step("")], False),
    ],
)
def test_mixing_is_a_step_with_both_kinds(steps: list[SimpleNamespace], happens: bool, caplog: pytest.LogCaptureFixture) -> None:
    mixing = AdapterMixing(LORA)
    for one in steps:
        mixing.step_planned(one)
    assert mixing.happened == happens
    assert len(caplog.messages) == happens
    mixing.step_planned(step("c", "c"))
    assert mixing.happened == happens, "it lasts"


@pytest.mark.parametrize(("config", "is_cpu"), [(SimpleNamespace(lora_config=None), True), (LORA, False), (None, True)])
def test_mixing_is_impossible_without_adapters_or_cpu(
    config: SimpleNamespace | None, is_cpu: bool, platform: SimpleNamespace
) -> None:
    platform.is_cpu = is_cpu
    mixing = AdapterMixing(config)
    mixing.step_planned(step("ab", "ab", "a"))
    assert not mixing.happened
