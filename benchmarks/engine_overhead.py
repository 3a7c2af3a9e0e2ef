"""Measure the connector's cost to an engine without cache hits: time per decoding step and time to first token of new prompts.

Steps are measured in two ways. The share of a step that vLLM's thread spends in calls of the connector is reproducible. The step
times with and without the connector also include the CPU time of the connector's threads, but contain the noise of a machine
whose core speed changes within seconds.

One engine process runs alternately with the connector, which looks up every prompt and stores every block, with the connector
detached, and with one that does nothing, which is the least that vLLM's interface costs. Two processes of the same engine would
differ by more than the cost to be measured. The node writes back to NVMe and finishes this before the next measurement. Every
prompt is new.

The model is a Llama with random weights in float32: 8 layers, width 512, 16 KiB of KV per token. Run with an interpreter that has
vLLM (``make install-engines``).
"""

from __future__ import annotations

import random
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc

import harness
from harness import Figure, Options, Reference, Target
from kvproto.v1 import node_pb2, node_pb2_grpc
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.lab.engine_bed import store_transfer
from rig.engine_child import MIB, EngineChild, ModelSize, make_model

SIZE = ModelSize()
BATCH = 8
PROMPT = 256
TPOT_BOUND = 1.01
TTFT_BOUND = 1.03
INSIDE_BOUND = 0.02
TPOT_ROUNDS = 3
TTFT_ROUNDS = 2
"""Batches and prompts per round. Short rounds reduce drift of the machine between the two sides of a pair."""


def measure(options: Options, scratch: Path) -> None:
    """Measure both figures."""
    steps = options.pick(full=192, quick=160, smoke=32)
    tokens = options.pick(full=2_048, quick=2_048, smoke=512)
    model = make_model(scratch / "model", SIZE, tokens + 64)
    node = NodeSpec("bench", dram_bytes=512 * MIB, nvme_bytes=1_024 * MIB)
    engine = {"max_model_len": tokens + 64, "max_num_seqs": BATCH, "kv_cache_memory_bytes": 256 * MIB}
    draw = random.Random(options.seed)

    def prompt(length: int) -> list[int]:
        return draw.choices(range(32, 127), k=length)

    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster([node], scratch / "store"))
        stub = node_pb2_grpc.NodeStub(stack.enter_context(grpc.insecure_channel(cluster.node("bench").address)))
        store = store_transfer(cluster.metadata_address, cluster.node("bench").local_socket)
        child = stack.enter_context(EngineChild(model, store, scratch / "engine.log", **engine))

        def prepare(name: str) -> None:
            """Attach a connector or none, and wait for pending writes to disk."""
            child.ask("connector", which=name)
            stub.Flush(node_pb2.FlushRequest(timeout_ms=10_000), timeout=12)

        shares: list[float] = []

        def step(name: str) -> float:
            prepare(name)
            prompts = [prompt(PROMPT) for _ in range(BATCH)]
            answer = child.ask("decode", prompts=prompts, max_tokens=steps)
            if name == "own":
                shares.append(float(answer["inside"]) / float(answer["seconds"]))
            return float(answer["seconds"]) * 1e3

        def first_token(name: str) -> float:
            prepare(name)
            answer = child.ask("prompt", tokens=prompt(tokens))
            return float(answer["seconds"]) * 1e3

        variants = ("own", "none", "idle")
        tpot = harness.interleave({name: partial(step, name) for name in variants}, TPOT_ROUNDS * options.repetitions)
        ttft = harness.interleave({name: partial(first_token, name) for name in variants}, TTFT_ROUNDS * options.repetitions)
    options.keep(
        Figure(
            "engine_step_inside",
            "share of a decoding step that vLLM's thread spends in the connector, no hits",
            {"batch": BATCH, "prompt": PROMPT, "steps": steps, "kv_bytes_token": SIZE.kv_bytes},
            "",
            lower_is_better=True,
        ),
        shares[1:],  # the first round is a warm-up
        target=Target("value", INSIDE_BOUND),
    )
    for name, title, parameters, samples, bound in (
        (
            "engine_tpot",
            "step of a decoding batch, no hits",
            {"batch": BATCH, "prompt": PROMPT, "steps": steps},
            tpot,
            TPOT_BOUND,
        ),
        ("engine_ttft_miss", "TTFT, no hits", {"tokens": tokens}, ttft, TTFT_BOUND),
    ):
        options.keep(
            Figure(name, title, {**parameters, "kv_bytes_token": SIZE.kv_bytes}, "ms", lower_is_better=True),
            samples["own"],
            peer=Reference("the same engine without its connector", samples["none"]),
            limit=Reference("a connector that does nothing", samples["idle"]),
            target=Target("peer", bound),
        )


def main() -> None:
    """Measure in a scratch folder."""
    options = harness.options("engine_overhead", __doc__, repetitions=11)
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="engine-overhead-") as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
