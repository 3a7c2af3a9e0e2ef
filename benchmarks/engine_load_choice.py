"""Measure vLLM's time to first token with verdicts to load or to compute, against loading always and computing always.

Three engine processes on one core, of which one works at a time: without a connector, with ``load_choice`` ``always``, and with
``auto``. Prompts are a stored prefix and a new tail, and the engines' own prefix caches are emptied before each. The prefix is in
the DRAM of this host's node; or it is in the DRAM of another node, to which the engines have a link that a cap makes slow.
A few prompts warm the estimates up and are not counted: a prompt that is loaded, and some that are computed. The figure is the
time with verdicts; its peer is the better of the two others in the same round.

The model is a Llama with random weights in float32: 8 layers, width 512, 16 KiB of KV per token. Run with an interpreter that has
vLLM (``make install-engines``).
"""

from __future__ import annotations

import argparse
import random
import secrets
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness
from harness import Figure, Options, Reference, Target
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.lab.engine_bed import store_transfer
from rig.engine_child import MIB, EngineChild, ModelSize, make_model

SIZE = ModelSize()
BLOCK = 128
HIT = 0.95
WARM_UP = 5


class Contest:
    """The engines of one link, and prompts for them.

    Args:
        tokens: length of the prompts.
        seed: of the prompts.
        children: by name.
    """

    def __init__(self, tokens: int, seed: int, children: dict[str, EngineChild]) -> None:
        self._draw = random.Random(seed)
        known = int(tokens * HIT) // BLOCK * BLOCK
        self._prefix = self._draw.choices(range(32, 127), k=known)
        self._tail = tokens - known
        self._children = children

    def ask(self, name: str) -> dict[str, Any]:
        """Serve a prompt with the prefix and a new tail."""
        child = self._children[name]
        child.ask("forget")
        child.ask("prompt", tokens=self._draw.choices(range(32, 127), k=16))  # after a reset, the weights are checked
        return child.ask("prompt", tokens=[*self._prefix, *self._draw.choices(range(32, 127), k=self._tail)])

    def first_token_ms(self, name: str) -> float:
        """Time to first token of one prompt."""
        return float(self.ask(name)["seconds"]) * 1e3


def measure(options: Options, scratch: Path, model: Path, tokens: int, cap_mb_s: int) -> None:
    """Measure one link: 0 is the local node, else a remote one with this cap."""
    volume = tokens * SIZE.kv_bytes
    settings = (("compute_cap", str(cap_mb_s * 1_000_000)),) if cap_mb_s else ()
    node = NodeSpec("bench", dram_bytes=16 * volume + 64 * MIB, nvme_bytes=16 * volume + 64 * MIB, settings=settings)
    engine = {"max_model_len": tokens + 64, "max_num_seqs": 4, "kv_cache_memory_bytes": int(2.5 * volume) + 64 * MIB}
    folder = scratch / secrets.token_hex(4)
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster([node], folder / "store"))
        socket = cluster.node("bench").local_socket
        reach = "none" if cap_mb_s else socket
        transfers = {
            "writer": store_transfer(cluster.metadata_address, socket),
            "compute": None,
            "load": store_transfer(cluster.metadata_address, reach, store=False, load_deadline_s=60.0),
            "verdict": store_transfer(cluster.metadata_address, reach, store=False, load_deadline_s=60.0, load_choice="auto"),
        }
        children: dict[str, EngineChild] = {}
        contest = Contest(tokens, options.seed, children)
        with EngineChild(model, transfers.pop("writer"), folder / "writer.log", **engine) as writer:
            children["writer"] = writer
            contest.ask("writer")
            writer.ask("forget")
        for name, transfer in transfers.items():
            children[name] = stack.enter_context(EngineChild(model, transfer, folder / f"{name}.log", **engine))
        known = contest.ask("load")["cached"]
        if not known:
            raise RuntimeError("the prefix was not loaded")
        for length in (512, 256, 384):  # prompts that are computed, and measured
            children["verdict"].ask("prompt", tokens=[random.Random(length).randrange(32, 127) for _ in range(length)])
        for _ in range(WARM_UP):
            contest.ask("verdict")
        cached: list[int] = []

        def with_verdict() -> float:
            answer = contest.ask("verdict")
            cached.append(answer["cached"])
            return float(answer["seconds"]) * 1e3

        samples = harness.interleave(
            {
                "verdict": with_verdict,
                "load": lambda: contest.first_token_ms("load"),
                "compute": lambda: contest.first_token_ms("compute"),
            },
            options.repetitions,
        )
    better = min(("load", "compute"), key=lambda name: statistics.median(samples[name]))
    other = {"load": "compute", "compute": "load"}[better]
    options.keep(
        Figure(
            "engine_load_choice",
            "TTFT with verdicts, 95 % hit",
            {"tokens": tokens, "kv_bytes_token": SIZE.kv_bytes, "cap_mb_s": cap_mb_s},
            "ms",
            lower_is_better=True,
        ),
        samples["verdict"],
        peer=Reference(f"{better} always", samples[better]),
        limit=Reference(f"{other} always", samples[other]),
        target=Target("peer", 1.02),
        verified=True,
        notes=f"loaded tokens of each prompt: {cached[1:]}, of {known}",
    )


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cap", type=int, action="append", help="link in MB/s, 0: the local node; may be repeated")


def main() -> None:
    """Measure all links."""
    options = harness.options("engine_load_choice", __doc__, arguments=_arguments)
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="engine-choice-") as made:
        scratch = Path(made)
        tokens = options.pick(full=4_096, quick=2_048, smoke=1_024)
        model = make_model(scratch / "model", SIZE, tokens + 64)
        for cap_mb_s in options.extra.cap or options.pick(full=(0, 400, 40, 4), quick=(0, 40, 4), smoke=(0,)):
            measure(options, scratch, model, tokens, cap_mb_s)


if __name__ == "__main__":
    main()
