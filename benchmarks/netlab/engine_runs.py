"""The timed engine benchmark: offline runs of every variant in turn, with few agents and many, and the search for agents/s."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import numpy as np

import harness
from harness import Figure, Options, Parameter, Reference, Target
from kvstore.netlab.bed import LabBed
from kvstore.netlab.lab import available
from netlab.agents import trajectories
from netlab.coordinator import LADDER, ORACLE, Coordinator, Variant
from netlab.engine_bed import EngineBed, EngineSettings
from netlab.engine_report import TPOT_S, TTFT_S, Summary, plot, summarize
from netlab.engine_rounds import GROUPS, PROFILE, facts_of, notes_of, parameters_of, ratios, read_s_of, rounds_of
from netlab.engine_steps import FEW, PAIRS, run_steps

BED = LabBed(1, 1, 1, snic_mbit=240.0, cnic_mbit=1920.0, storage_mbit=1920.0)
"""A compute link is eight storage links, as in the paper."""
BASE, DUAL = LADDER[1], LADDER[-1]
"""Prefill-only loads, with everything but the second path; and ours."""
GOOD_SHARE = 0.9
"""Of the requests must meet the objective for a rate to count."""
RATES = tuple(round(0.7 * 1.1**step, 3) for step in range(7))
"""Tried online, as shares of what the storage links can carry."""


def main(description: str | None) -> None:
    """Command line."""
    parts = ("offline", "compute", "steps", "pairs", "online")

    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="what to run (default: all; smoke: offline)")

    options = harness.options("netlab_engines", description, arguments=arguments)
    reason = available()
    if reason is not None:
        sys.exit(f"no network lab can run here: {reason}")
    chosen = ["offline"] if options.mode == "smoke" else options.extra.parts
    made: dict[str, object] = {}
    if "offline" in chosen:
        made["offline"] = {name: [dataclasses.asdict(run) for run in runs] for name, runs in run_offline(options).items()}
    if "compute" in chosen:
        run_compute_bound(options)
    if "steps" in chosen:
        run_steps(options, FEW)
    if "pairs" in chosen:
        run_steps(options, PAIRS)
    if "online" in chosen:
        made["online"] = run_online(options)
    if options.results is not None:
        _keep_data(options.results, made)


def _keep_data(folder: Path, made: dict[str, object]) -> None:
    """Runs in numbers, beside what earlier runs of other parts left, and the plot of all of it."""
    file = folder / "netlab_engines.json"
    data = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    data.update(json.loads(json.dumps(made), parse_float=lambda text: round(float(text), 4)))
    file.write_text(json.dumps(data) + "\n", encoding="utf-8")
    offline = {name: [Summary(**run) for run in runs] for name, runs in data.get("offline", {}).items()}
    plot(offline, data.get("online", []), folder / "netlab_engines.png")


# ---- offline ----
def run_offline(options: Options) -> dict[str, list[Summary]]:
    """All agents begin at once; every variant in turn, a round after the other."""
    agents, turns = options.pick(full=(11, 2), quick=(8, 2), smoke=(2, 2))
    made = trajectories(PROFILE, agents, turns, options.seed, out_factor=options.pick(full=1.0, quick=1.0, smoke=0.1))
    settings = EngineSettings(dilation=options.pick(full=1.0, quick=0.5, smoke=0.1))
    variants = (*LADDER, ORACLE) if options.mode != "smoke" else (BASE, DUAL, ORACLE)
    runs = rounds_of(options, BED, made, settings, variants)
    facts = facts_of(made, settings, BED)
    print(f"{BED.describe()}\n{facts}", flush=True)
    parameters = parameters_of(settings, agents, turns)
    oracle = Reference("oracle", [run.jct_s for run in runs["oracle"]])
    for name, found in runs.items():
        figure = Figure(
            "engines_offline_jct", "Offline, agents at once: job completion", {**parameters, "variant": name}, "s", True
        )
        options.keep(figure, [run.jct_s for run in found], peer=oracle, verified=True, notes=notes_of(found, facts))
    _gains(options, runs, parameters, facts)
    return runs


def _gains(options: Options, runs: dict[str, list[Summary]], parameters: dict[str, Parameter], facts: str) -> None:
    """The whole against prefill-only, and against the engine that does one after the other; how even the links were used."""
    gain = ratios(runs[BASE.name], runs[DUAL.name])
    target = Target("value", 1.8) if options.mode != "smoke" else None
    title = "Offline JCT against loads over prefill hosts alone, storage-bound"
    options.keep(Figure("engines_offline_gain", title, parameters, "x"), gain, target=target, verified=True, notes=facts)
    if LADDER[0].name in runs:
        title = "Offline JCT against an engine that loads, computes and hands over one after the other"
        gain = ratios(runs[LADDER[0].name], runs[DUAL.name])
        options.keep(Figure("engines_offline_gain_over_basic", title, parameters, "x"), gain, verified=True, notes=facts)
    balance = [run.snic_max_over_avg for run in runs[DUAL.name]]
    beside = [run.snic_max_over_avg for run in runs.get(LADDER[2].name, runs[DUAL.name])]
    figure = Figure(
        "engines_snic_balance", "Storage links, max/avg over seconds of the run", parameters, "", lower_is_better=True
    )
    options.keep(
        figure, balance, peer=Reference("round robin", beside), verified=True, notes="from first to last token, tail included"
    )


def run_compute_bound(options: Options) -> None:
    """Appends so long that computing takes longer than loading over both paths: how near is the oracle?

    Until the first layers are there nothing computes, and a late request's answer has nothing to hide behind: in a short run both
    weigh, more than in one of hours. So there are as many agents as keep the engines busy for a while. More requests are under
    way than load, since one that is loaded and waits to be computed must not keep the links idle.
    """
    agents, turns = options.pick(full=(22, 2), quick=(6, 2), smoke=(2, 1))
    made = trajectories(PROFILE, agents, turns, options.seed, append_factor=64.0)
    settings = EngineSettings(dilation=2.0, in_flight=12)
    dual = dataclasses.replace(DUAL, layer_group=GROUPS)
    runs = rounds_of(options, BED, made, settings, (dual, ORACLE), growth=1400 * agents)
    parameters = {**parameters_of(settings, agents, turns), "append": "x64"}
    facts = facts_of(made, settings, BED)
    print(facts, flush=True)
    share = ratios(runs[ORACLE.name], runs[DUAL.name])
    title = "Offline JCT, compute-bound: the oracle's as a share of ours"
    notes = (
        f"prefill idle between its first and last work for {runs[DUAL.name][-1].idle_s:.2f} s; {notes_of(runs[DUAL.name], facts)}"
    )
    options.keep(
        Figure("engines_of_oracle", title, parameters, ""), share, target=Target("value", 0.9), verified=True, notes=notes
    )


# ---- online ----
def run_online(options: Options) -> list[dict[str, float | str]]:
    """Agents arrive as a Poisson process: the highest rate at which most requests meet the objective, by bisection."""
    settings = EngineSettings(dilation=0.5)
    turns, window_s = 2, options.pick(full=12.0, quick=10.0, smoke=1.0)
    per_agent_s = read_s_of(trajectories(PROFILE, 100, turns, options.seed), settings, BED) / 100
    most = int(RATES[-1] * 2 / per_agent_s * window_s * 1.5)
    made = trajectories(PROFILE, most, turns, options.seed)
    trials: list[dict[str, float | str]] = []
    found: dict[str, list[float]] = {BASE.name: [], DUAL.name: []}
    with EngineBed(BED, settings, made, seed=options.seed, scratch=options.scratch) as bed:
        coordinator = Coordinator(bed, made)
        for number in range(options.repetitions):
            gaps = np.random.default_rng([options.seed, number]).exponential(1.0, most).cumsum()
            for variant, links in ((BASE, 1), (DUAL, 2)):
                capacity = links / per_agent_s
                found[variant.name].append(_highest(coordinator, variant, gaps, capacity, window_s, number, trials, settings))
    parameters: dict[str, Parameter] = {**parameters_of(settings, most, turns), "window_s": window_s}
    parameters.pop("agents")
    slo = f"TTFT <= {TTFT_S:g} s and TPOT <= {TPOT_S * 1e3:g} ms (real time) in {GOOD_SHARE:.0%} of the requests"
    figure = Figure("engines_online_capacity", f"Online, agents/s of the lab within {slo}", parameters, "1/s")
    notes = "rates tried a tenth apart; each trial lasts only so long, so that a small overload is not seen, in neither variant"
    base = Reference("prefill-only", found[BASE.name])
    options.keep(figure, found[DUAL.name], peer=base, target=Target("peer", 1.9), verified=True, notes=notes)
    return trials


def _highest(
    coordinator: Coordinator,
    variant: Variant,
    gaps: np.ndarray[tuple[int], np.dtype[np.float64]],
    capacity: float,
    window_s: float,
    number: int,
    trials: list[dict[str, float | str]],
    settings: EngineSettings,
) -> float:
    """The highest of ``RATES`` that is good; agents a second. Where none is, a step below the lowest, which is not tried."""
    low, high = -1, len(RATES)
    while high - low > 1:
        middle = (low + high) // 2
        rate = RATES[middle] * capacity
        arrivals = [float(at) for at in gaps / rate if at < window_s]
        run = summarize(coordinator.run(variant, arrivals), BED, settings.dilation)
        trials.append({"variant": variant.name, "round": number, "rate": rate, "good": run.good, "agents": len(arrivals)})
        trials[-1] |= {name: run.times[name]["p50"] for name in ("ttft", "ttst", "tpot")} | {"cpu": run.cpu}
        print(f"  {variant.name:14} {rate:5.2f} agents/s: {run.good:4.0%} good, cpu {run.cpu:.0%}, {run.counts}", flush=True)
        if run.good >= GOOD_SHARE:
            low = middle
        else:
            high = middle
    return (RATES[low] if low >= 0 else RATES[0] / 1.1) * capacity
