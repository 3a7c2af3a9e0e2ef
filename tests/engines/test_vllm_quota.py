"""vLLM with the attention quota: steps are cut, answers are the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_bed import SingleEngine, VllmDriver, text, tiny

from kvclient import InvalidArgument
from kvstore.recompute.prefill_estimate import pairs

PROMPTS = [text(1, 700), text(2, 620), text(3, 128), text(4, 31)]
QUOTA_MS, PAIR_PS = 30.0, 1e6
MOST_PAIRS = QUOTA_MS * 1e9 / PAIR_PS


@pytest.fixture
def single() -> Iterator[SingleEngine]:
    engine = SingleEngine()
    yield engine
    engine.close()


def test_vllm_quota_cuts_steps_and_keeps_tokens(folder: Path, single: SingleEngine, caplog: pytest.LogCaptureFixture) -> None:
    driver = VllmDriver(tiny("llama", folder))
    plain = single.open(driver, None, {}).tokens(PROMPTS)
    engine = single.open(
        driver,
        None,
        {},
        scheduler_cls="kvclient.engines.vllm.quota.scheduler.AsyncQuotaScheduler",
        additional_config={"kvstore_attention_quota_ms": QUOTA_MS, "kvstore_attention_pair_ps": PAIR_PS},
    )
    scheduler = engine.core.scheduler
    work: list[float] = []
    schedule = scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        before = {name: request.num_computed_tokens for name, request in scheduler.requests.items()}
        output = schedule(*args, **kwargs)
        sizes = [(before.get(name, 0), tokens) for name, tokens in output.num_scheduled_tokens.items()]
        work.append(sum(pairs(cached, tokens) for cached, tokens in sizes if tokens > 1))
        return output

    scheduler.schedule = watched
    with caplog.at_level(logging.INFO, "kvclient.engines.vllm.quota.scheduler"):
        assert engine.tokens(PROMPTS) == plain
    assert "steps cut by the attention quota (total=1, " in caplog.text
    assert scheduler.quota_cut_steps > 0
    assert 0 < max(work) <= MOST_PAIRS + pairs(max(map(len, PROMPTS)), scheduler.block_size)


@pytest.mark.parametrize("name", ["QuotaScheduler", "AsyncQuotaScheduler"])
def test_vllm_quota_without_chunked_prefill_is_refused(name: str) -> None:
    """vLLM admits no prompt that is longer than the bound of a step, and nothing behind it."""
    from kvclient.engines.vllm.quota import scheduler

    settings = {"kvstore_attention_quota_ms": QUOTA_MS, "kvstore_attention_pair_ps": PAIR_PS}
    config = SimpleNamespace(additional_config=settings, scheduler_config=SimpleNamespace(enable_chunked_prefill=False))
    with pytest.raises(InvalidArgument, match="requires chunked prefill"):
        getattr(scheduler, name)(vllm_config=config)
