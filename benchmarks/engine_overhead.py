"""What the connector costs an engine that has no hits: time per decoding step, and time to the first token of new prompts.

Two engines, each in a process of its own on the same core: one with the connector, which looks every prompt up and stores every
block, one without. Only one works at a time. The node writes what it gets to NVMe behind. Every prompt is new.

The model is a Llama with random weights in float32: 8 layers, width 512, 16 KiB of KV a token. Run with an interpreter that has
vLLM (``make install-engines``).
"""

from __future__ import annotations

import random
import tempfile
from contextlib import ExitStack
from pathlib import Path

import harness
from harness import Figure, Options, Reference, Target
from kvstore.testing.cluster import LocalCluster, NodeSpec
from kvstore.testing.engine_bed import store_transfer
from rig.engine_child import MIB, EngineChild, ModelSize, make_model

SIZE = ModelSize()
BATCH = 8
PROMPT = 256
TPOT_BOUND = 1.02
TTFT_BOUND = 1.03


def measure(options: Options, scratch: Path) -> None:
    """Both figures."""
    steps = options.pick(full=384, quick=256, smoke=32)
    tokens = options.pick(full=2_048, quick=2_048, smoke=512)
    model = make_model(scratch / "model", SIZE, tokens + 64)
    node = NodeSpec("bench", dram_bytes=512 * MIB, nvme_bytes=1_024 * MIB)
    engine = {"max_model_len": tokens + 64, "max_num_seqs": BATCH, "kv_cache_memory_bytes": 256 * MIB}
    draw = random.Random(options.seed)

    def prompt(length: int) -> list[int]:
        return draw.choices(range(32, 127), k=length)

    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster([node], scratch / "store"))
        store = store_transfer(cluster.metadata_address, cluster.node("bench").local_socket)
        children = {
            name: stack.enter_context(EngineChild(model, transfer, scratch / f"{name}.log", **engine))
            for name, transfer in {"with": store, "without": None}.items()
        }

        def step(name: str) -> float:
            prompts = [prompt(PROMPT) for _ in range(BATCH)]
            answer = children[name].ask("decode", prompts=prompts, max_tokens=steps)
            return float(answer["seconds"]) * 1e3

        def first_token(name: str) -> float:
            answer = children[name].ask("prompt", tokens=prompt(tokens))
            children[name].ask("forget")
            return float(answer["seconds"]) * 1e3

        tpot = harness.interleave({name: lambda name=name: step(name) for name in children}, options.repetitions)  # type: ignore[misc]
        ttft = harness.interleave(
            {name: lambda name=name: first_token(name) for name in children},  # type: ignore[misc]
            options.repetitions,
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
            samples["with"],
            peer=Reference("the engine without the connector", samples["without"]),
            target=Target("peer", bound),
        )


def main() -> None:
    """Measures."""
    options = harness.options("engine_overhead", __doc__, repetitions=15)
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="engine-overhead-") as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
