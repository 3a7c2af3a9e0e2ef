"""Measure vLLM's time to first token with verdicts to load or to compute, against loading always and computing always.

One engine process runs alternately in three ways: with the connector detached (computing always), with the connector but without
verdicts (loading always), and with verdicts. Two processes of the same engine would differ by more than a verdict costs. Prompts
are a stored prefix and a new tail, and the engine's own prefix cache is emptied before each. The prefix is in the DRAM of this
host's node; or it is in the DRAM of another node, to which the engine has a link that a cap makes slow. The planner is never
asked: it is asked about blocks in storage only. A few prompts warm the estimates up and are not counted: a prompt that is loaded,
and some that are computed.

The figure is the time with verdicts; its peer is the better of the two other ways. The time to compute the tail varies by several
percent from prompt to prompt, so these two are measured in more rounds than the third.

The model is a Llama with random weights in float32: 8 layers, width 512, 16 KiB of KV per token. Run with an interpreter that has
vLLM (``make install-engines``).
"""

from __future__ import annotations

import argparse
import random
import secrets
import statistics
import tempfile
from collections import Counter
from contextlib import ExitStack
from functools import partial
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
WAYS = ("verdict", "load", "compute")
CLOSE_ROUNDS = 3
"""Rounds of verdicts and the better way alone, in relation to those of all three ways."""


class Contest:
    """An engine, and prompts for it.

    Args:
        tokens: length of the prompts.
        seed: of the prompts.
    """

    def __init__(self, tokens: int, seed: int) -> None:
        self._draw = random.Random(seed)
        known = int(tokens * HIT) // BLOCK * BLOCK
        self._prefix = self._draw.choices(range(32, 127), k=known)
        self._tail = tokens - known

    def ask(self, child: EngineChild) -> dict[str, Any]:
        """Serve a prompt with the prefix and a new tail."""
        child.ask("forget")
        child.ask("prompt", tokens=self._draw.choices(range(32, 127), k=16))  # after a reset, the weights are checked
        return child.ask("prompt", tokens=[*self._prefix, *self._draw.choices(range(32, 127), k=self._tail)])


def switch(child: EngineChild, way: str) -> None:
    """Have an engine always compute found blocks (``compute``), always load them (``load``), or decide (``verdict``)."""
    child.ask("connector", which="none" if way == "compute" else "own")
    child.ask("verdicts", on=way == "verdict")


def measure(options: Options, scratch: Path, model: Path, tokens: int, cap_mb_s: int) -> None:
    """Measure one link: 0 is the local node, else a remote one with this cap."""
    volume = tokens * SIZE.kv_bytes
    settings = (("compute_cap", str(cap_mb_s * 1_000_000)),) if cap_mb_s else ()
    node = NodeSpec("bench", dram_bytes=16 * volume + 64 * MIB, nvme_bytes=16 * volume + 64 * MIB, settings=settings)
    engine = {"max_model_len": tokens + 64, "max_num_seqs": 4, "kv_cache_memory_bytes": int(2.5 * volume) + 64 * MIB}
    folder = scratch / secrets.token_hex(4)
    contest = Contest(tokens, options.seed)
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster([node], folder / "store"))
        socket = cluster.node("bench").local_socket
        with EngineChild(model, store_transfer(cluster.metadata_address, socket), folder / "writer.log", **engine) as writer:
            contest.ask(writer)
            writer.ask("forget")
        reach = "none" if cap_mb_s else socket
        reader = store_transfer(cluster.metadata_address, reach, store=False, load_deadline_s=60.0, load_choice="auto")
        child = stack.enter_context(EngineChild(model, reader, folder / "engine.log", **engine))
        known = contest.ask(child)["cached"]
        if not known:
            raise RuntimeError("the prefix was not loaded")
        for length in (512, 256, 384):  # prompts that are computed, and measured
            child.ask("prompt", tokens=[random.Random(length).randrange(32, 127) for _ in range(length)])
        for _ in range(WARM_UP):
            contest.ask(child)
        cached: dict[str, list[int]] = {way: [] for way in WAYS}

        def first_token_ms(way: str) -> float:
            switch(child, way)
            answer = contest.ask(child)
            cached[way].append(answer["cached"])
            return float(answer["seconds"]) * 1e3

        samples = harness.interleave({way: partial(first_token_ms, way) for way in WAYS}, options.repetitions)
        better = min(("load", "compute"), key=lambda way: statistics.median(samples[way]))
        close = {way: partial(first_token_ms, way) for way in ("verdict", better)}
        for way, more in harness.interleave(close, CLOSE_ROUNDS * options.repetitions, warm_up=0).items():
            samples[way] += more
    if set(cached["load"]) != {known} or any(cached["compute"]):
        raise RuntimeError(f"prefixes were not always loaded, or not always computed: {cached}")
    other = {"load": "compute", "compute": "load"}[better]
    loaded = Counter(cached["verdict"][1:])
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
        notes="; ".join(f"{count} prompts loaded {tokens} of {known} tokens" for tokens, count in sorted(loaded.items())),
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
