"""The page of the secondary tier, followed like a reader does: a second process hits what the first stored, with right tokens."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import page_session
from page_session import Session, steps
from vllm_bed import tiny

import kvclient.engines.vllm.tier

PAGE = Path(kvclient.engines.vllm.tier.__file__).with_name("README.md")
MODEL = "Qwen/Qwen3-0.6B"
ANSWER = re.compile(r"answer (\[.+\]): (\d+) of 700 tokens were cached")
STEP_S = 180.0


@pytest.mark.thorough
def test_tier_page_second_process_hits(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(page_session, "WAIT_S", STEP_S)
    text = PAGE.read_text(encoding="utf-8")
    assert MODEL in text
    page = tmp_path / "page.md"
    page.write_text(text.replace(MODEL, str(tiny("llama", model_folder))), encoding="utf-8")
    answers = []
    with Session(tmp_path) as session:
        for step in steps(page):
            session.follow(step)
            found = ANSWER.search(session.printed or "")
            if found and found.groups() not in answers:
                answers.append(found.groups())
    (computed, none), (loaded, most) = answers
    assert (none, most) == ("0", "640")
    assert computed == loaded
