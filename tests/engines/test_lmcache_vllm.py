"""vLLM with a whole LMCache server over the store: another server and engine hit what the first stored, with the same tokens."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import pytest

pytest.importorskip("vllm")
pytest.importorskip("lmcache")

from lmcache_bed import CHUNK_TOKENS, WAIT_S, adapter_status, ask, lmcache_server
from vllm_bed import text, tiny

from kvstore.testing.connector.driver import StoreAddress
from support.ports import free_ports
from support.wait import wait_until

PROMPTS = [text(1, 300), text(2, 200)]
FULL = [len(prompt) // CHUNK_TOKENS for prompt in PROMPTS]


def test_lmcache_server_hits_what_another_stored(model_folder: Path, store: StoreAddress, tmp_path: Path) -> None:
    model, prompts = tiny("llama", model_folder), tmp_path / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    ports = list(free_ports(6))
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(ask, model, None, prompts)
        with lmcache_server(store, ports[:3], tmp_path / "first.log") as first:
            right = [tokens for tokens, _ in alone.result()]
            assert [tokens for tokens, _ in ask(model, ports[0], prompts)] == right
            wait_until(lambda: adapter_status(first)["counters"]["stored_objects"] == sum(FULL), "LMCache stores the chunks")
            with urlopen(f"{first}/cache/objects?tier=l2", timeout=WAIT_S) as listed:
                assert len(json.load(listed)["entries"]) == sum(FULL)
    with lmcache_server(store, ports[3:], tmp_path / "second.log") as second:
        assert ask(model, ports[3], prompts) == list(zip(right, [chunks * CHUNK_TOKENS for chunks in FULL], strict=True))
        counters = adapter_status(second)["counters"]
        assert counters["loaded_objects"] == sum(FULL)
        assert not counters["bugs"]
        assert not counters["load_missing_objects"]
