"""Verdicts to load or to compute, with a real engine: its steps and loads are measured, and all choices give the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm_bed import BLOCK, SingleEngine, VllmDriver, VllmEngine, text, tiny

from kvclient.engines.vllm.plan import WorkerOutput
from kvstore.recompute.decisions import LoadDecisions
from kvstore.testing.connector.driver import StoreAddress

PROMPT = text(1, 700)
HIT = len(PROMPT) // BLOCK * BLOCK


@pytest.fixture
def engine(folder: Path, store: StoreAddress) -> Iterator[VllmEngine]:
    single = SingleEngine()
    yield single.open(VllmDriver(tiny("llama", folder)), store, {"load_choice": "auto"}, max_num_seqs=2)
    single.close()


def test_load_choice_follows_the_link(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads take as long as the test says: a busy machine does not decide."""
    monkeypatch.setattr(LoadDecisions, "load_noticed", lambda *_: None)
    ended, link_s = engine.scheduler_side.on_worker_output, [0.0001]

    def on_worker_output(output: WorkerOutput) -> None:
        for sample in output.loads.values():
            sample.seconds = link_s[0]
        ended(output)

    engine.scheduler_side.on_worker_output = on_worker_output  # type: ignore[method-assign]
    (computed,) = engine.tokens([PROMPT])
    engine.forget()
    loaded = engine.one_by_one([text(9, 8), PROMPT])[1]
    assert (loaded.tokens, loaded.loaded_tokens) == (computed, HIT)
    engine.one_by_one([text(seed, 300) for seed in (2, 3, 4)])  # these steps are measured
    engine.forget()
    link_s[0] = 1_000.0
    assert engine.one_by_one([text(9, 8), PROMPT])[1].loaded_tokens == HIT
    engine.forget()
    again = engine.one_by_one([text(9, 8), PROMPT])[1]
    assert (again.tokens, again.loaded_tokens) == (computed, 0)
    counts = engine.counters()
    assert counts["verdicts_unmeasured"] == counts["verdicts_compute"] == 1
    assert counts["load_predictions"] == 1
    assert counts["step_predictions"] >= 1
