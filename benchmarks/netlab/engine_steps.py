"""The gain of each step towards loads over both paths, in beds with space for that gain, and the cost of the scheduler's RPCs."""

from __future__ import annotations

import dataclasses
import itertools
import statistics

from harness import Figure, Options, Reference
from kvstore.netlab.bed import LabBed
from netlab.agents import trajectories
from netlab.coordinator import LADDER, ORACLE
from netlab.engine_bed import EngineSettings
from netlab.engine_rounds import GROUPS, PROFILE, facts_of, notes_of, parameters_of, ratios, rounds_of

BED = LabBed(1, 2, 1, snic_mbit=160.0, cnic_mbit=1280.0, storage_mbit=1920.0)
APPEND = 32.0
BY_SERVER = "+ split, by server"


def run_steps(options: Options) -> None:
    """Few requests at once on 1P2D: with many, the steps after the second path only change who waits for links that are full.

    What is appended requires a good part of the time to compute that one link takes to load what hits, so that an engine gains by
    doing both at once; layer-wise variants read storage in groups of layers. Two decode hosts, so that there is a choice. One
    turn an agent: a next one would find blocks in transit from the decode host to storage, and some of them in neither place.
    """
    agents, at_once = options.pick(full=(12, 3), quick=(6, 3), smoke=(2, 2))
    made = trajectories(PROFILE, agents, 1, options.seed, append_factor=APPEND, out_factor=0.25)
    settings = EngineSettings()
    steps = [dataclasses.replace(one, layer_group=GROUPS if one.layerwise else 0) for one in LADDER]
    by_server = dataclasses.replace(steps[-1], name=BY_SERVER, by_server=True)
    runs = rounds_of(options, BED, made, settings, (*steps, by_server, ORACLE), at_once=at_once)
    facts = facts_of(made, settings, BED)
    print(f"{BED.describe()}\n{facts}", flush=True)
    shared = {**parameters_of(settings, agents, 1, "1P2D"), "append": f"x{APPEND:g}", "at_once": at_once}
    names = [one.name for one in steps]
    for before, after in itertools.pairwise(names):
        figure = Figure("engines_step_gain", "Gain of a step over the one before", {**shared, "step": after}, "x")
        first = statistics.median(ratios(runs[names[0]], runs[after]))
        notes = f"{first:.2f} x {names[0]}; {notes_of(runs[after], facts)}"
        options.keep(figure, ratios(runs[before], runs[after]), verified=True, notes=notes)
    oracle = Reference("oracle", [run.jct_s for run in runs[ORACLE.name]])
    figure = Figure("engines_steps_jct", "All steps, few requests at once: job completion", shared, "s", lower_is_better=True)
    options.keep(figure, [run.jct_s for run in runs[names[-1]]], peer=oracle, verified=True, notes=facts)
    figure = Figure("engines_by_server", "Scheduled over the metadata server's RPCs: job completion", shared, "s", True)
    direct = Reference("the rules alone", [run.jct_s for run in runs[names[-1]]])
    waits_s = [run.times["assign"]["p50"] for run in runs[BY_SERVER]]
    notes = f"a request waits for its engines for {statistics.median(waits_s) * 1e3:.0f} ms (p50); {facts}"
    options.keep(figure, [run.jct_s for run in runs[BY_SERVER]], peer=direct, verified=True, notes=notes)
