"""A prefill and a decode engine of a model with attention within chunks of the context: groups that may need none of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from pd_bed import BLOCK, Oracle, PdBed, pd_bed, text
from vllm_bed import tiny

CHUNK = 96
"""Of the tiny model: three blocks."""
WAIT_S = 60.0


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[PdBed]:
    folder, model = tmp_path_factory.mktemp("pd"), tiny("llama4", model_folder)
    with pd_bed(folder, model, prompt_deadline_s=WAIT_S, handoff_deadline_s=WAIT_S) as made:
        yield made


@pytest.fixture(scope="module")
def oracle(bed: PdBed) -> Oracle:
    return Oracle(bed.model)


@pytest.mark.parametrize("tokens", [BLOCK + 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + BLOCK, 333, 700])
def test_chunked_prompt_handed_over_decodes_the_same(bed: PdBed, oracle: Oracle, tokens: int) -> None:
    """The decode engine computes the last token: for a prompt that ends with a chunk, it needs that whole chunk."""
    before = bed.counts(bed.decode).get("prompts", 0)
    prompt = text(("length", tokens), tokens)
    assert bed.ask(prompt) == oracle.says(prompt, 16)
    assert bed.counts(bed.decode)["prompts"] == before + 1
