"""An engine of the dual-path demo, as a separate process on an emulated host.

``python -m kvstore.replay.dual_worker METADATA NODE DECODE_NODE PROMPTS BLOCKS LAYERS BLOCK_BYTES``; commands are JSON lines on
standard input, each answered by one line on standard output.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvclient import CacheSpec, ClientOptions, KVClient, Outcome, Paths
from kvstore.workload.payload import Payloads

_DEADLINE_S = 60.0
_OPTIONS = ClientOptions(client_name="dual-demo", default_deadline_s=_DEADLINE_S, lookup_deadline_s=10.0)


class Worker:
    """Stores prompts whose bytes are derived from their keys, and loads them again."""

    def __init__(self, client: KVClient, decode_node: str, prompts: int, blocks: int) -> None:
        self._client = client
        self._decode_node = decode_node
        spec = client.spec
        self._payloads = Payloads(spec.block_bytes)
        seeds = np.random.default_rng(7)
        tokens = [seeds.integers(0, 50_000, blocks * spec.block_tokens, dtype=np.uint32) for _ in range(prompts)]
        self._prompts = [client.keys(one) for one in tokens]
        self._memory = np.zeros((prompts, blocks, spec.block_bytes), np.uint8)

    def store(self) -> dict[str, Any]:
        """Store all prompts durably."""
        for keys, memory in zip(self._prompts, self._memory, strict=True):
            self._payloads.fill(keys, memory)
            result = self._client.store(keys, memory, durable=True, wait_visible=True)
            if not result.durable:
                raise SystemExit(f"a prompt was not stored: {result.error}")
        return {}

    def load(self, policy: str, chains: Sequence[int]) -> dict[str, Any]:
        """Load prompts concurrently and check every byte."""
        paths = Paths(decode_node=self._decode_node, policy=policy)
        for chain in chains:
            self._memory[chain].fill(0)
        began_s = time.perf_counter()
        handles = [
            self._client.start_load(
                self._client.lookup(self._prompts[chain]),
                self._memory[chain],
                layerwise=False,
                deadline_s=_DEADLINE_S,
                paths=paths,
            )
            for chain in chains
        ]
        results = [handle.result() for handle in handles]
        seconds = time.perf_counter() - began_s
        by_path: dict[str, int] = {}
        wrong = 0
        for chain, result in zip(chains, results, strict=True):
            if result.count(Outcome.HIT) != len(self._prompts[chain]):
                raise SystemExit(f"a prompt was not loaded completely: {result.error}")
            wrong += len(self._payloads.wrong_blocks(self._prompts[chain], self._memory[chain])) * self._payloads.block_bytes
            for path, size in result.bytes_by_path.items():
                by_path[path] = by_path.get(path, 0) + size
        return {"seconds": seconds, "paths": by_path, "wrong_bytes": wrong}


def main(arguments: Sequence[str]) -> None:
    """Serve commands until standard input ends."""
    metadata, node, decode_node, *sizes = arguments
    prompts, blocks, layers, block_bytes = map(int, sizes)
    spec = CacheSpec(model="dual-demo", block_tokens=64, layers=layers, layer_block_bytes=block_bytes // layers, dtype="uint8")
    with KVClient.connect(metadata, spec, node=node, options=_OPTIONS) as client:
        worker = Worker(client, decode_node, prompts, blocks)
        for line in sys.stdin:
            command = json.loads(line)
            answer = worker.store() if command["do"] == "store" else worker.load(command["policy"], command["chains"])
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
