"""Measure vLLM's time to first token with 95 % of the prompt in the store, against computing it and against vLLM's fs tier.

Each contestant is an engine process on one core; only one works at a time. Every prompt is a known prefix and a new tail. The
engines' own prefix caches are emptied before each measurement, so the prefix is loaded from the DRAM of this host's node, or from
its NVMe with O_DIRECT after the arena was emptied.

Two more engines use vLLM's own offloading, with the store or vLLM's ``fs`` tier as its secondary tier. Its host memory holds one
prefix, and two prefixes take turns. The files of the fs tier may be in the page cache, and it computes no checksums.

A short prompt follows each reset of the caches: after a reset, the store's connectors check whether the weights were changed.

The limit is an engine that finds the prefix in its own cache: it computes the tail, and loads nothing.

The model is a Llama with random weights in float32: 8 layers, width 512, 16 KiB of KV per token. Run with an interpreter that has
vLLM (``make install-engines``).
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

import harness
from harness import Figure, Options, Reference, Target
from kvproto.v1 import node_pb2, node_pb2_grpc
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.lab.engine_bed import store_transfer, tier_transfer
from rig.engine_child import MIB, EngineChild, ModelSize, make_model

SIZE = ModelSize()
BLOCK = 128
HIT = 0.95
PREFIXES = 2


def prompts(tokens: int, seed: int) -> tuple[list[list[int]], Iterator[list[int]]]:
    """Source of stored prefixes and of new tails."""
    known = int(tokens * HIT) // BLOCK * BLOCK
    draw = random.Random(seed)
    prefixes = [draw.choices(range(32, 127), k=known) for _ in range(PREFIXES)]
    return prefixes, iter(lambda: draw.choices(range(32, 127), k=tokens - known), None)


def measure(options: Options, scratch: Path, model: Path, tokens: int) -> None:
    """Measure one prompt length."""
    prefixes, tails = prompts(tokens, options.seed)
    volume = len(prefixes[0]) * SIZE.kv_bytes
    node = NodeSpec("bench", dram_bytes=6 * volume + 64 * MIB, nvme_bytes=12 * volume + 64 * MIB)  # KV of the tier, and tails
    engine = {"max_model_len": tokens + 64, "max_num_seqs": 4, "kv_cache_memory_bytes": int(2.5 * volume) + 64 * MIB}
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster([node], scratch / f"store-{tokens}"))
        where = cluster.metadata_address, cluster.node("bench").local_socket
        store, layerwise = store_transfer(*where), store_transfer(*where, load_mode="layerwise")
        primary_bytes = int(1.2 * volume)
        tier, fs = tier_transfer(*where, primary_bytes), fs_transfer(scratch / f"fs-{tokens}", primary_bytes)
        transfers = {"recompute": None, "store": store, "layerwise": layerwise, "tier": tier, "fs": fs}
        children = {
            name: stack.enter_context(EngineChild(model, transfer, scratch / f"{name}-{tokens}.log", **engine))
            for name, transfer in transfers.items()
        }
        for name, child in children.items():
            for prefix in prefixes:  # store the prefix once and warm up the path
                child.ask("prompt", tokens=[*prefix, *next(tails)])
                child.ask("forget")
            assert name == "recompute" or child.ask("prompt", tokens=[*prefixes[0], *next(tails)])["cached"] == len(prefixes[0])
        turn = 0
        waited_ms: dict[str, list[float]] = {}

        def first_token(name: str, *, cold: bool = False) -> float:
            nonlocal turn
            turn += 1
            child = children["recompute" if name == "resident" else name]
            prompt = [*prefixes[turn % PREFIXES], *next(tails)]
            if name in {"tier", "fs"}:  # the other prefix takes this one's place in host memory
                child.ask("forget")
                child.ask("prompt", tokens=[*prefixes[(turn + 1) % PREFIXES], *next(tails)])
            child.ask("forget")
            if name == "resident":
                child.ask("prompt", tokens=[*prefixes[turn % PREFIXES], *next(tails)])
            else:
                child.ask("prompt", tokens=next(tails)[:16])
            settle(cluster, cold=cold)
            answer = child.ask("prompt", tokens=prompt)
            expected = 0 if name == "recompute" else len(prefixes[0])
            if answer["cached"] != expected:
                raise RuntimeError(f"{name}: {answer['cached']} tokens were cached, {expected} should be")
            waited_ms.setdefault({"store": "nvme" if cold else "dram"}.get(name, name), []).append(
                float(answer["waited_s"]) * 1e3
            )
            return float(answer["seconds"]) * 1e3

        samples = harness.interleave(
            {
                "dram": lambda: first_token("store"),
                "recompute": lambda: first_token("recompute"),
                "nvme": lambda: first_token("store", cold=True),
                "layerwise": lambda: first_token("layerwise"),
                "tier": lambda: first_token("tier"),
                "fs": lambda: first_token("fs"),
                "resident": lambda: first_token("resident"),
            },
            options.repetitions,
        )
    report(options, tokens, samples)
    report_waits(options, tokens, {name: values[-options.repetitions :] for name, values in waited_ms.items()})


def fs_transfer(folder: Path, primary_bytes: int) -> dict[str, Any]:
    """Return ``kv_transfer_config`` for vLLM's own offloading with its fs tier, which keeps files under ``folder``."""
    return {
        "kv_connector": "PausingOffloadingConnector",
        "kv_connector_module_path": "peers.fs_tier",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "kvclient.engines.vllm.tier",
            "cpu_bytes_to_use": primary_bytes,
            "secondary_tiers": [{"type": "fs", "root_dir": str(folder), "n_read_threads": 2, "n_write_threads": 2}],
        },
    }


def settle(cluster: LocalCluster, *, cold: bool) -> None:
    """Wait for pending writes to disk; with ``cold``, also empty the node's DRAM.

    Contestants share a file system and its journal, so pending writes of one would delay the other.
    """
    os.sync()
    with grpc.insecure_channel(cluster.node("bench").address) as channel:
        stub = node_pb2_grpc.NodeStub(channel)
        stub.Flush(node_pb2.FlushRequest(timeout_ms=10_000), timeout=12)
        if cold:
            stub.Evict(node_pb2.EvictRequest(operation_id=bytes(16), tier=2), timeout=10)  # type: ignore[arg-type]


def figure(name: str, title: str, tokens: int) -> Figure:
    """Return a figure in milliseconds for one prompt length."""
    return Figure(name, title, {"tokens": tokens, "kv_bytes_token": SIZE.kv_bytes, "hit": HIT}, "ms", lower_is_better=True)


def report(options: Options, tokens: int, samples: dict[str, list[float]]) -> None:
    """Record the figures of the store against computing, and of the ways to attach it against each other and the fs tier."""
    limit = Reference("the prefix in the engine's own cache", samples["resident"])
    for name, what, peer, called, bound in (
        ("tier", "DRAM, by vLLM's offloading", "dram", "the connector", 1.1),
        ("dram", "DRAM", "fs", "vLLM's fs tier", 0.8),
        ("nvme", "NVMe", "fs", "vLLM's fs tier", 1.0),
        ("tier", "DRAM, by vLLM's offloading", "fs", "vLLM's fs tier", 1.0),
    ):
        options.keep(
            figure(f"engine_ttft_{name}_{peer}", f"TTFT, 95 % hit out of {what}", tokens),
            samples[name],
            peer=Reference(called, samples[peer]),
            limit=limit,
            target=Target("peer", bound),
            verified=True,
        )
    for name, what in (("dram", "DRAM"), ("nvme", "NVMe"), ("layerwise", "DRAM, layer by layer")):
        options.keep(
            figure(f"engine_ttft_{name}_recompute", f"TTFT, 95 % hit out of {what}", tokens),
            samples[name],
            peer=Reference("computing the prompt", samples["recompute"]),
            limit=limit,
            target=Target("peer", 1.0),
            verified=True,
        )


def report_waits(options: Options, tokens: int, waited_ms: dict[str, list[float]]) -> None:
    """Record how much of the time to first token passes before the step that computes it: lookups, loads and empty steps."""
    for name, what in (("dram", "DRAM"), ("nvme", "NVMe"), ("tier", "DRAM, by vLLM's offloading")):
        options.keep(
            figure(f"engine_ttft_wait_{name}", f"Part of the TTFT before the step that computes, 95 % hit out of {what}", tokens),
            waited_ms[name],
            peer=Reference("vLLM's fs tier", waited_ms["fs"]),
            limit=Reference("the prefix in the engine's own cache", waited_ms["resident"]),
            verified=True,
        )


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, action="append", help="prompt length in tokens; may be repeated")


def main() -> None:
    """Measure all prompt lengths."""
    options = harness.options("engine_ttft", __doc__, arguments=_arguments)
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="engine-ttft-") as folder:
        scratch = Path(folder)
        lengths = options.extra.tokens or options.pick(full=(2_048, 8_192), quick=(2_048,), smoke=(1_024,))
        model = make_model(scratch / "model", SIZE, max(lengths) + 64)
        for tokens in lengths:
            measure(options, scratch, model, tokens)


if __name__ == "__main__":
    main()
