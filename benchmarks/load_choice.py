"""Measure verdicts to load or to recompute: their regret in a simulation, and the error of predicted load times in a real store.

Simulation: engines serve prompts of 1k to 64k tokens of an 8B model. The mean times of their steps and loads are known, and
samples of them have noise. Each engine has a link of another speed, over three orders of magnitude. The first half of a
prefix may be in DRAM and the rest beyond the link. Verdicts see only noisy samples of the steps and loads that followed from
them. In one figure, some samples stall. The offline best is the fastest of loading all, computing all and any cut, by the true
means. Regret is the true mean time of a verdict's choice over the best, less 1. The first requests of each engine warm its
estimates up and are not counted. A probe may cost up to the time of its verdict, so the largest regret is given with and without
probes.

Recorded: the loads of ``load_samples.json`` are predicted in their order. They were recorded by the part below, while tests kept
both processors of the machine busy, so some loads stall. All versions of the estimate see the same samples.

Prediction: chains of different length are loaded from DRAM and from NVMe, and each load is predicted before it is made. The peer
is the plain prediction: bytes at the mean rate of all earlier loads. The limit is the best line through the round's loads, drawn
afterwards: its error is the noise of the machine. ``--computed`` leaves this part out: the others need no quiet machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import harness
from harness import Figure, Options, Parameter, Reference, Target
from kvclient import KVClient, LoadResult
from kvstore.core.types import Tier
from kvstore.embedded.cluster import NodeSpec
from kvstore.recompute.decisions import LoadDecisions, Segment
from kvstore.recompute.fit import fit
from kvstore.recompute.load_estimate import SourceEstimate
from kvstore.recompute.prefill_estimate import pairs
from kvstore.recompute.verdict import Choice
from rig import OPTIONS, Chains, Deadline, NodeControl, cluster, found, loaded, space_for, spec, stored

BLOCK_TOKENS = 64
BLOCK_BYTES = BLOCK_TOKENS * 128 * 1024
"""KV of an 8B model with grouped queries, in 16 bits."""
STEP_TOKENS = 8_192
NOISE = 0.1
"""Standard deviation of the logarithm of a sample."""
STALL = 3.0, 12.0
"""Bounds of the factor by which a sample that stalls takes longer."""
STALLS = 0.05
"""Share of samples that stall, in the part of the simulation with stalls."""
WARM_UP = 8
"""Requests of an engine that are not counted."""
SLOWEST, FASTEST = 50e6, 50e9
DRAM_RATE = 40e9
BLOCK = 1 << 20
LAYERS = 32


@dataclass
class World:
    """Mean times of an engine and its link; verdicts see only samples with noise."""

    rate: float
    fixed_s: float = 1e-3
    token_s: float = 5e-5
    pair_s: float = 2e-10
    step_s: float = 5e-3

    def compute_s(self, cached: int, tokens: int) -> float:
        """Time to compute new tokens."""
        steps = -(-tokens // STEP_TOKENS)
        return steps * self.step_s + tokens * self.token_s + pairs(cached, tokens) * self.pair_s

    def load_s(self, near: int, blocks: int) -> float:
        """Time to load the first blocks of a prefix, of which ``near`` are in DRAM."""
        far = max(0, blocks - near)
        seconds = min(near, blocks) * BLOCK_BYTES / DRAM_RATE
        return seconds + far * BLOCK_BYTES / self.rate + (self.fixed_s if far else 2e-4 if blocks else 0.0)

    def total_s(self, near: int, blocks: int, tokens: int) -> float:
        """Time until a prompt is complete of which the first blocks are loaded."""
        cached = blocks * BLOCK_TOKENS
        return self.load_s(near, blocks) + self.compute_s(cached, tokens - cached)


class Engine:
    """An engine that follows verdicts and reports noisy samples."""

    def __init__(self, world: World, seed: int, stalls: float = 0.0) -> None:
        self.world = world
        self._stalls = stalls
        self.decisions = LoadDecisions(BLOCK_TOKENS, BLOCK_BYTES, step_tokens=STEP_TOKENS)
        self._random = random.Random(seed)

    def noisy(self, seconds: float) -> float:
        """Return a sample."""
        stalled = self._random.uniform(*STALL) if self._stalls and self._random.random() < self._stalls else 1.0
        return seconds * stalled * self._random.lognormvariate(0, NOISE)

    def serve(self) -> tuple[float, float, float, bool] | None:
        """Serve one request.

        Returns:
            Regret, that of loading always and that of computing always, and whether it was a probe; None: nothing was known.
        """
        world, draw = self.world, self._random
        tokens = int(2 ** draw.uniform(10, 16))
        found_blocks = max(1, int(tokens * draw.uniform(0.5, 0.99)) // BLOCK_TOKENS)
        near = draw.choice((0, 0, found_blocks // 2))
        segments = [Segment("dram", near), Segment("far", found_blocks - near)]
        verdict = self.decisions.decide([one for one in segments if one.blocks], 0, tokens)
        blocks = found_blocks if verdict is None else verdict.blocks
        limit_s = math.inf if verdict is None or verdict.limit_s is None else verdict.limit_s
        arrived = bisect_right(range(1, blocks + 1), limit_s, key=lambda cut: world.load_s(near, cut))
        if limit_s < math.inf:
            self.decisions.probe_ended(early=arrived < blocks)
        self._report(near, blocks, arrived, tokens)
        if verdict is None:
            return None
        best = min(world.total_s(near, cut, tokens) for cut in range(found_blocks + 1))
        all_, none = (world.total_s(near, cut, tokens) for cut in (found_blocks, 0))
        cached = arrived * BLOCK_TOKENS
        chosen = min(limit_s, world.load_s(near, blocks)) + world.compute_s(cached, tokens - cached)
        return chosen / best - 1, all_ / best - 1, none / best - 1, verdict.choice is Choice.PROBE

    def _report(self, near: int, blocks: int, arrived: int, tokens: int) -> None:
        if blocks and arrived == blocks:
            sizes = {"dram": min(near, blocks) * BLOCK_BYTES, "far": max(0, blocks - near) * BLOCK_BYTES}
            loaded_s = self.noisy(self.world.load_s(near, blocks))
            self.decisions.load_ended({source: size for source, size in sizes.items() if size}, loaded_s)
        cached = arrived * BLOCK_TOKENS
        while cached < tokens:
            step = min(STEP_TOKENS, tokens - cached)
            self.decisions.step_ended([(cached, step)], self.noisy(self.world.compute_s(cached, step)))
            cached += step


def simulate(seed: int, links: int, requests: int, stalls: float = 0.0) -> list[tuple[float, float, float, bool]]:
    """Serve requests over links of all speeds."""
    outcomes = []
    for link in range(links):
        engine = Engine(World(SLOWEST * (FASTEST / SLOWEST) ** (link / (links - 1))), seed * links + link, stalls)
        outcomes += [one for one in [engine.serve() for _ in range(requests)][WARM_UP:] if one is not None]
    return outcomes


def regret(options: Options) -> None:
    """Record the regret of verdicts."""
    links, requests = options.pick(full=(31, 60), quick=(11, 40), smoke=(5, 15))
    rounds = [simulate(options.seed + count, links, requests) for count in range(options.repetitions)]
    sizes: dict[str, Parameter] = {"links": links, "requests": requests, "noise": NOISE, "tokens": "1k-64k"}
    names = ("mean", "load", "compute", "max", "max_probes", "load_max", "compute_max")
    by_round: dict[str, list[float]] = {name: [] for name in names}
    for outcomes in rounds:
        ours, load, compute = (np.array([one[at] for one in outcomes]) * 100 for at in range(3))
        by_round["mean"].append(float(ours.mean()))
        by_round["load"].append(float(load.mean()))
        by_round["compute"].append(float(compute.mean()))
        by_round["max"].append(float(ours[[not one[3] for one in outcomes]].max()))
        by_round["max_probes"].append(float(ours.max()))
        by_round["load_max"].append(float(load.max()))
        by_round["compute_max"].append(float(compute.max()))
    probes = sum(one[3] for outcomes in rounds for one in outcomes)
    notes = f"{probes} probes in {sum(map(len, rounds))} requests"
    for name, title, bound in (
        ("mean", "Regret of verdicts, mean, with probes", 5.0),
        ("max", "Regret of a verdict, largest of a round, without probes", 15.0),
        ("max_probes", "Regret of a verdict, largest of a round, with probes", 15.0),
    ):
        tail = "" if name == "mean" else "_max"
        options.keep(
            Figure(f"verdict_regret_{name}", title, sizes, "%", lower_is_better=True),
            by_round[name],
            peer=Reference("load always", by_round[f"load{tail}"]),
            target=Target("value", bound),
            notes=f"{notes}; compute always: {statistics.median(by_round[f'compute{tail}']):.0f} %",
        )


def prediction(options: Options, folder: Path, tier: Tier) -> None:
    """Record the error of predicted times of loads from one tier."""
    total = options.pick(full=64 << 20, quick=32 << 20, smoke=8 << 20)
    cache, blocks = spec(BLOCK, LAYERS), total // BLOCK
    chains, draw = Chains(cache, blocks, options.seed), random.Random(options.seed)
    settings = (("cache_loads", "false"),) if tier is Tier.NVME else ()
    node = NodeSpec("bench", dram_bytes=3 * space_for(blocks, BLOCK), nvme_bytes=3 * space_for(blocks, BLOCK), settings=settings)
    buffer = np.zeros((blocks, BLOCK), np.uint8)
    loads = options.pick(full=40, quick=20, smoke=4)
    with (
        cluster(node, folder) as store,
        KVClient.connect(store.metadata_address, cache, node=store.node("bench").local_socket, options=OPTIONS) as client,
    ):
        control = NodeControl(store.node("bench").address)
        chain = chains.next()
        stored(client.store(chain.keys, chain.payload, durable=True))

        def timed() -> tuple[float | None, LoadResult]:
            count = max(1, int(blocks ** draw.random()))
            deadline = Deadline()
            while True:
                if tier is Tier.NVME:
                    control.evict(Tier.DRAM)
                lookup = found(client, chain.keys[:count])
                expected = client.context.predict_load(lookup)
                result = client.load(lookup, buffer[:count])
                loaded(result, None)
                if {tier} == set(result.bytes_by_tier) == {run.tier for run in lookup.runs} - ({Tier.NVME} - {tier}):
                    return expected, result
                deadline.wait(f"{count} blocks were not loaded from {tier.name} alone")

        where = harness.storage(folder, direct="O_DIRECT" in control.io_engines(), cache="cold in this system")
        for _ in range(5):
            timed()
        rounds = [errors(timed, loads) for _ in range(options.repetitions)]
        keep_errors(options, tier, rounds, {"block_bytes": BLOCK, "total_bytes": total, "loads": loads}, where)
        control.close()


@dataclass
class Errors:
    """Relative errors of one round's predictions, in %.

    Attributes:
        ours: of the client.
        plain: of the mean rate of earlier loads.
        afterwards: of the best line through all loads of the round.
    """

    ours: list[float]
    plain: list[float]
    afterwards: list[float]


def errors(load: Callable[[], tuple[float | None, LoadResult]], loads: int) -> Errors:
    """Predict and make some loads."""
    round_ = Errors([], [], [])
    moved = taken_s = 0.0
    samples = []
    for _ in range(loads):
        expected, result = load()
        assert expected is not None
        round_.ours.append(abs(expected / result.seconds - 1) * 100)
        if moved:
            round_.plain.append(abs(result.bytes_loaded * taken_s / moved / result.seconds - 1) * 100)
        moved += result.bytes_loaded
        taken_s += result.seconds
        samples.append((1 / result.seconds, result.bytes_loaded / result.seconds))
    line = fit(samples, [1.0] * loads, (0.0, 0.0))
    round_.afterwards = [abs(line[0] * one + line[1] * per - 1) * 100 for one, per in samples]
    return round_


def keep_errors(options: Options, tier: Tier, rounds: Sequence[Errors], sizes: dict[str, int], where: harness.Storage) -> None:
    """Record median and p95 of the errors."""
    for share, bound in ((50, 10.0), (95, 30.0)):
        ours, plain, afterwards = (
            [float(np.percentile(one, share)) for one in each]
            for each in ([one.ours for one in rounds], [one.plain for one in rounds], [one.afterwards for one in rounds])
        )
        options.keep(
            Figure(
                f"load_prediction_{tier.name.lower()}_p{share}",
                f"Error of predicted load times from {tier.name}, p{share}",
                dict(sizes),
                "%",
                lower_is_better=True,
            ),
            ours,
            limit=Reference("the best line, drawn afterwards", afterwards),
            peer=Reference("the mean rate of earlier loads", plain),
            target=Target("value", bound),
            storage=where if tier is Tier.NVME else None,
            transport="shared memory",
            verified=True,
        )


def regret_of_stalls(options: Options) -> None:
    """Record the regret of verdicts if some samples stall. The limit is the regret of the same requests without stalls."""
    links, requests = options.pick(full=(31, 60), quick=(11, 40), smoke=(5, 15))
    means: dict[float, list[float]] = {
        stalls: [
            float(np.mean([one[0] for one in simulate(options.seed + count, links, requests, stalls)])) * 100
            for count in range(options.repetitions)
        ]
        for stalls in (0.0, STALLS)
    }
    sizes: dict[str, Parameter] = {"links": links, "requests": requests, "noise": NOISE, "stalls": STALLS, "tokens": "1k-64k"}
    options.keep(
        Figure("verdict_regret_stalls", "Regret of verdicts, mean, 5 % of samples stall", sizes, "%", lower_is_better=True),
        means[STALLS],
        limit=Reference("without stalls", means[0.0]),
        target=Target("value", 5.0),
    )


def recorded(options: Options) -> None:
    """Record the error of predictions of recorded loads."""
    samples = json.loads((Path(__file__).parent / "load_samples.json").read_text())
    for tier, rounds in samples.items():
        ours: dict[int, list[float]] = {50: [], 95: []}
        afterwards: dict[int, list[float]] = {50: [], 95: []}
        estimate = SourceEstimate()
        for size, seconds in rounds[0][:5]:
            estimate.record(size, seconds)
        for loads in rounds:
            missed = []
            for size, seconds in loads:
                line = estimate.line()
                missed.append(abs((line.fixed_s + size * line.per_byte_s) / seconds - 1) * 100)
                estimate.record(size, seconds)
            rows = [(1 / seconds, size / seconds) for size, seconds in loads]
            best = fit(rows, [1.0] * len(rows), (0.0, 0.0))
            least = [abs(best[0] * one + best[1] * per - 1) * 100 for one, per in rows]
            for share in ours:
                ours[share].append(float(np.percentile(missed, share)))
                afterwards[share].append(float(np.percentile(least, share)))
        for share, bound in ((50, 10.0), (95, 30.0)):
            options.keep(
                Figure(
                    f"load_prediction_recorded_{tier.lower()}_p{share}",
                    f"Error of predicted load times, recorded loads from {tier}, p{share}",
                    {"loads": len(rounds[0]), "rounds": len(rounds)},
                    "%",
                    lower_is_better=True,
                ),
                ours[share],
                limit=Reference("the best line, drawn afterwards", afterwards[share]),
                target=Target("value", bound),
            )


def _add_computed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--computed", action="store_true", help="only regret and recorded loads, which need no quiet machine")


def main() -> None:
    """Measure regret and predictions."""
    options = harness.options("load_choice", __doc__, arguments=_add_computed)
    regret(options)
    regret_of_stalls(options)
    recorded(options)
    if options.extra.computed:
        return
    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=options.scratch))
    try:
        for tier in (Tier.DRAM, Tier.NVME):
            prediction(options, folder / tier.name.lower(), tier)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
