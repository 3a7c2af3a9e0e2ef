"""The program of the page on your own engine runs unchanged and does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from kvclient import CacheSpec, KVClient
from kvstore.embedded.cluster import LocalCluster, NodeSpec

REPOSITORY = Path(__file__).resolve().parents[2]
OWN_ENGINE = REPOSITORY / "docs" / "how-to" / "own-engine.md"


def snippets(page: Path) -> list[str]:
    """The Python programs of a page."""
    return re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_own_engine_page_hands_over_whole_prompt(tmp_path: Path) -> None:
    spec = CacheSpec(model="readme", block_tokens=16, layers=3, layer_block_bytes=1024)
    tokens = np.arange(40, dtype=np.uint32)  # two blocks and a half
    layer = np.random.default_rng(1).integers(0, 256, (3, spec.layer_block_bytes), np.uint8)
    whole = np.tile(layer, spec.layers)
    nodes = [NodeSpec("host-1", ("prefill",), dram_bytes=16 << 20), NodeSpec("host-2", ("decode",), dram_bytes=16 << 20)]
    with (
        LocalCluster(nodes, tmp_path) as cluster,
        KVClient.connect(cluster.metadata_address, spec, node=cluster.node("host-1").local_socket) as client,
        KVClient.connect(cluster.metadata_address, spec, node=cluster.node("host-2").local_socket) as decode,
    ):
        keys = client.keys(tokens)
        assert client.store(keys[:1], whole[:1], wait_visible=True).held_blocks == 1
        buffer = np.zeros_like(whole[:1])
        names = {"client": client, "spec": spec, "tokens": tokens, "keys": keys, "buffer": buffer, "kv_of_this_layer": layer}
        load_and_hand_over, hint = snippets(OWN_ENGINE)
        with decode.await_prompt([*keys, client.tail_key(tokens[32:], keys[-1])], deadline_s=30) as awaited:
            exec(compile(load_and_hand_over, OWN_ENGINE.name, "exec"), names)
            assert (buffer == whole[:1]).all()
            assert awaited.wait()
            taken = np.zeros_like(whole)
            assert awaited.take(taken).hit_blocks == 3
        assert (taken == whole).all()
        exec(compile(hint, OWN_ENGINE.name, "exec"), names)
        assert client.stats()["client_hints_total"] == 2
