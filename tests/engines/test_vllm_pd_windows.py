"""A prefill and a decode engine of a model with sliding windows: several KV cache groups, each handed over for itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from pd_bed import BLOCK, Oracle, PdBed, pd_bed, text, transfer_id
from vllm_bed import tiny

from kvstore.lab.engine_bed import token_ids_of
from support.wait import wait_until

WINDOW = 96
"""Of the tiny model: three blocks."""
WAIT_S = 60.0


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[PdBed]:
    """The decode host's buffer holds two of the prompts below at once; deadlines are none that busy cores miss."""
    folder, model = tmp_path_factory.mktemp("pd"), tiny("gemma3", model_folder)
    with pd_bed(folder, model, decode_buffer="2MiB", prompt_deadline_s=WAIT_S, handoff_deadline_s=WAIT_S) as made:
        yield made


@pytest.fixture(scope="module")
def oracle(bed: PdBed) -> Oracle:
    return Oracle(bed.model)


@pytest.mark.parametrize("tokens", [BLOCK + 1, WINDOW, 127, 333, 2100])
def test_prompts_of_all_lengths(bed: PdBed, oracle: Oracle, tokens: int) -> None:
    """Shorter and longer than the window; 2,100 tokens are computed in two steps."""
    before = bed.counts(bed.decode).get("prompts", 0)
    prompt = text(("length", tokens), tokens)
    assert bed.ask(prompt) == oracle.says(prompt, 16)
    wait_until(lambda: bed.counts(bed.decode).get("prompts", 0) == before + 1)  # the counts of a step follow its tokens


def test_a_session_is_loaded_over_both_paths(bed: PdBed, oracle: Oracle) -> None:
    history = text("session", 900)
    first = bed.counts(bed.prefill)
    stored = 0
    for turn in range(3):
        before = bed.counts(bed.prefill)
        answer = bed.ask(history, 48)
        assert answer == oracle.says(history, 48)
        assert bed.counts(bed.prefill).get("load_tokens", 0) - before.get("load_tokens", 0) == stored
        stored = (len(history) + 47) // BLOCK * BLOCK  # the last token lacks KV
        history = history + answer + text(("turn", turn), 60)
        bed.only_in_storage()
    last = bed.counts(bed.prefill)
    for path in ("prefill", "decode"):
        assert last[f"load_{path}_path_bytes"] > first.get(f"load_{path}_path_bytes", 0)


def test_more_prompts_than_the_decode_buffer_holds(bed: PdBed, oracle: Oracle) -> None:
    """The parts of a prompt take space one by one: none waits for another prompt that waits for it."""
    before = bed.counts(bed.decode)
    prompts = [text(("large", number), 1600) for number in range(8)]
    transfers = [bed.begin(prompt, 4, transfer_id()) for prompt in prompts]
    for prompt, (_, answer) in zip(prompts, transfers, strict=True):
        assert token_ids_of(answer.result(WAIT_S)) == oracle.says(prompt, 4)
    after = bed.counts(bed.decode)
    assert after.get("prompts_incomplete", 0) == before.get("prompts_incomplete", 0)
    assert after["prompts"] == before["prompts"] + len(prompts)
