"""The README's Python snippets run as they stand, and do what the text around them says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvclient import CacheSpec, KVClient
from kvstore.embedded.cluster import LocalCluster, NodeSpec

README = Path(__file__).resolve().parent.parent / "README.md"


def snippets() -> list[str]:
    """The tour, and the hand-over of a prompt."""
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_a_prompt_is_handed_over_to_its_last_token(tmp_path: Path) -> None:
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
        with decode.await_prompt([*keys, client.tail_key(tokens[32:], keys[-1])], deadline_s=30) as awaited:
            exec(compile(snippets()[1], "README", "exec"), names)
            assert (buffer == whole[:1]).all()
            assert awaited.wait()
            taken = np.zeros_like(whole)
            assert awaited.take(taken).hit_blocks == 3
        assert (taken == whole).all()


def test_the_tour_stores_then_loads_also_after_a_restart(tmp_path: Path) -> None:
    snippet, _ = snippets()

    def run(address: str) -> list[str]:
        program = snippet.replace("127.0.0.1:7400", address)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    with LocalCluster([NodeSpec("tour", dram_bytes=64 << 20, nvme_bytes=256 << 20)], tmp_path) as cluster:
        assert run(cluster.metadata_address) == ["0 of 156 blocks loaded, 0 MiB, by tier {}", "19 MiB stored, durable: True"]
        assert run(cluster.metadata_address)[0] == "156 of 156 blocks loaded, 19 MiB, by tier {'DRAM': 20447232}"
        cluster.kill("tour")
        cluster.start_node("tour")
        assert run(cluster.metadata_address)[0] == "156 of 156 blocks loaded, 19 MiB, by tier {'NVME': 20447232}"
