"""The page of LMCache's adapter, followed like a reader does: another server hits what the first stored, with right tokens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

pytest.importorskip("vllm")
pytest.importorskip("lmcache")

from lmcache_bed import STARTED_S, WAIT_S, adapter_status
from page_session import Session, Stop, steps
from vllm_bed import tiny

import kvclient.engines.lmcache
from support.ports import free_ports

PAGE = Path(kvclient.engines.lmcache.__file__).with_name("README.md")
MODEL = "Qwen/Qwen3-0.6B"
CONNECTOR = ", kv_transfer_config=connector"
CHUNKS = 2
ANSWER = re.compile(r"answer (\[.+\]): (\d+) of 700 tokens were cached")


def here(model: Path, server: int, http: int, metrics: int) -> str:
    """The page with a tiny model and free ports."""
    text = PAGE.read_text(encoding="utf-8")
    for shown, replacement in (
        (MODEL, str(model)),
        ("lmcache server", f"lmcache server --port {server} --http-port {http} --prometheus-port {metrics}"),
        (":8080/", f":{http}/"),
        ('kv_role="kv_both",', f'kv_role="kv_both", kv_connector_extra_config={{"lmcache.mp.port": {server}}},'),
    ):
        assert shown in text
        text = text.replace(shown, replacement)
    return text


def answer(printed: str | None) -> tuple[str, int] | None:
    """Tokens and the number of cached tokens that the page's program printed."""
    found = ANSWER.search(printed or "")
    return None if found is None else (found[1], int(found[2]))


@pytest.mark.thorough
def test_lmcache_server_hits_what_another_stored(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    server, http, metrics = free_ports(3)
    address, page = f"http://127.0.0.1:{http}", tmp_path / "page.md"
    page.write_text(here(tiny("llama", model_folder), server, http, metrics), encoding="utf-8")
    answers: list[tuple[str, int]] = []
    with Session(tmp_path, foreign="lmcache") as session:
        for step in steps(page):
            if isinstance(step, Stop):
                with urlopen(f"{address}/cache/objects?tier=l2", timeout=WAIT_S) as listed:
                    assert len(json.load(listed)["entries"]) == CHUNKS
            session.follow(step)
            if (said := answer(session.printed)) is not None and said not in answers:
                answers.append(said)
        counters = adapter_status(address)["counters"]
        assert counters["loaded_objects"] == CHUNKS
        assert not counters["bugs"]
        assert not counters["load_missing_objects"]
    program = (tmp_path / "ask.py").read_text(encoding="utf-8")
    assert CONNECTOR in program
    command = [sys.executable, "-c", program.replace(CONNECTOR, "")]
    alone = answer(subprocess.run(command, capture_output=True, text=True, timeout=STARTED_S, check=True).stdout)
    assert alone is not None
    assert answers == [alone, (alone[0], CHUNKS * 256)]
