"""The page of LMCache's adapter, followed like a reader does, with a tiny model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("lmcache")

from page_session import Session, steps
from vllm_bed import tiny

import kvclient.engines.lmcache
from support.ports import free_ports

PAGE = Path(kvclient.engines.lmcache.__file__).with_name("README.md")
MODEL = "Qwen/Qwen3-0.6B"


def test_lmcache_page_can_be_followed(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    server, http, metrics = free_ports(3)
    page, text = tmp_path / "page.md", PAGE.read_text(encoding="utf-8")
    for shown, here in (
        (MODEL, str(tiny("llama", model_folder))),
        ("lmcache server", f"lmcache server --port {server} --http-port {http} --prometheus-port {metrics}"),
        (":8080/", f":{http}/"),
        ('kv_role="kv_both",', f'kv_role="kv_both", kv_connector_extra_config={{"lmcache.mp.port": {server}}},'),
    ):
        assert shown in text
        text = text.replace(shown, here)
    page.write_text(text, encoding="utf-8")
    with Session(tmp_path, foreign="lmcache") as session:
        for step in steps(page):
            session.follow(step)
