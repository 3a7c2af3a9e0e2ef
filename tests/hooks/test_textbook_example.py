"""The worked example computes correct attention, and its second run loads the KV that its first run stored."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvclient.engines.transformers.example import Decoder, Shape
from kvstore.embedded.cluster import LocalCluster, NodeSpec


def test_example_single_tokens_match_whole_prompt() -> None:
    model = Decoder(Shape(layers=2, heads=2, head_dim=8, positions=64)).eval()
    ids = torch.arange(20).view(1, 20)
    whole, all_at_once = model(ids, [])
    cache: list[tuple[torch.Tensor, torch.Tensor]] = []
    for token in ids[0]:
        logits, cache = model(token.view(1, 1), cache)
    torch.testing.assert_close(logits, whole)
    torch.testing.assert_close(cache, all_at_once)


@pytest.mark.slow
def test_example_second_process_loads_stored_kv(tmp_path: Path) -> None:
    with LocalCluster([NodeSpec("n0", dram_bytes=32 << 20)], tmp_path) as cluster:
        command = [sys.executable, "-m", "kvclient.engines.transformers.example", "--tokens", "300"]
        command += ["--metadata", cluster.metadata_address, "--node", cluster.node("n0").local_socket]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout for _ in range(2)]
    loaded = [int(re.findall(r"store: +(\d+) of 9 blocks loaded", run)[0]) for run in runs]
    assert loaded == [0, 9]
    assert "[1, 4, 300, 32]" in runs[0]
    assert runs[0].splitlines()[-1] == runs[1].splitlines()[-1]
