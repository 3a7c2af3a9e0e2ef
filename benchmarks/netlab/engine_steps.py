"""The gain of each step towards loads over both paths, in beds with space for that gain, and the cost of the scheduler's RPCs."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from dataclasses import dataclass

from harness import Figure, Options, Reference, Target
from kvstore.netlab.bed import LabBed
from netlab.agents import trajectories
from netlab.coordinator import LADDER, ORACLE
from netlab.engine_bed import EngineSettings
from netlab.engine_rounds import GROUPS, PROFILE, facts_of, notes_of, parameters_of, ratios, rounds_of

APPEND = 32.0
BY_SERVER = "+ split, by server"
PREFILL_ONLY, WHOLE = LADDER[1].name, LADDER[-1].name


@dataclass(frozen=True)
class StepBed:
    """A bed on which the steps are compared.

    Attributes:
        label: hosts that prefill and decode.
        links: hosts and links.
        agents: number of agents in a full, a quick and a smoke run.
        at_once: concurrent agents in a full, a quick and a smoke run; None: all.
        append: factor of the tokens that a turn appends.
        layer_group: layers that layer-wise variants read together.
        least_gain: target of the whole over loads over prefill hosts alone; None: no target.
    """

    label: str
    links: LabBed
    agents: tuple[int, int, int]
    at_once: tuple[int, int, int] | None
    append: float
    layer_group: int
    least_gain: float | None


FEW = StepBed("1P2D", LabBed(1, 2, 1, 160.0, 1280.0, 1920.0), (12, 6, 2), (3, 3, 2), APPEND, GROUPS, None)
"""Few requests at once: with many, the steps after the second path only change who waits for links that are full.

Computing the appended tokens lasts a good part of the time in which one link loads the hit, so that an engine gains by doing both
at once; layer-wise variants read storage in groups of layers. Two decode hosts, so that there is a choice.
"""
PAIRS = StepBed("2P2D", LabBed(2, 2, 1, 60.0, 480.0, 960.0), (48, 16, 4), None, 1.0, 0, 1.8)
"""Bound by storage links, with a choice among engines of both kinds, and more requests than are served at once.

Links are so slow that two cores are enough: at twice the rate they were busy at 95 % without the second path. The first and the
last requests leave links idle for a second, so the job is long. Loads twice as fast gain at most 2."""


def run_steps(options: Options, bed: StepBed) -> None:
    """Run all steps on one bed.

    One turn an agent: a next one would find blocks in transit from the decode host to storage, and some of them in neither place.
    """
    agents = options.pick(full=bed.agents[0], quick=bed.agents[1], smoke=bed.agents[2])
    at_once = None if bed.at_once is None else options.pick(full=bed.at_once[0], quick=bed.at_once[1], smoke=bed.at_once[2])
    made = trajectories(PROFILE, agents, 1, options.seed, append_factor=bed.append, out_factor=0.25)
    settings = EngineSettings()
    steps = [dataclasses.replace(one, layer_group=bed.layer_group if one.layerwise else 0) for one in LADDER]
    by_server = dataclasses.replace(steps[-1], name=BY_SERVER, by_server=True)
    runs = rounds_of(options, bed.links, made, settings, (*steps, by_server, ORACLE), at_once=at_once)
    facts = facts_of(made, settings, bed.links)
    print(f"{bed.links.describe()}\n{facts}", flush=True)
    shared = {**parameters_of(settings, agents, 1, bed.label), "append": f"x{bed.append:g}", "at_once": at_once or agents}
    names = [one.name for one in steps]
    for before, after in itertools.pairwise(names):
        figure = Figure("engines_step_gain", "Gain of a step over the one before", {**shared, "step": after}, "x")
        first = statistics.median(ratios(runs[names[0]], runs[after]))
        notes = f"{first:.2f} x {names[0]}; {notes_of(runs[after], facts)}"
        options.keep(figure, ratios(runs[before], runs[after]), verified=True, notes=notes)
    figure = Figure("engines_steps_gain", "All steps over loads over prefill hosts alone", shared, "x")
    target = Target("value", bed.least_gain) if bed.least_gain is not None and options.mode != "smoke" else None
    options.keep(figure, ratios(runs[PREFILL_ONLY], runs[WHOLE]), target=target, verified=True, notes=facts)
    oracle = Reference("oracle", [run.jct_s for run in runs[ORACLE.name]])
    figure = Figure("engines_steps_jct", "All steps: job completion", shared, "s", lower_is_better=True)
    options.keep(figure, [run.jct_s for run in runs[WHOLE]], peer=oracle, verified=True, notes=facts)
    figure = Figure("engines_by_server", "Scheduled over the metadata server's RPCs: job completion", shared, "s", True)
    direct = Reference("the rules alone", [run.jct_s for run in runs[WHOLE]])
    waits_s = [run.times["assign"]["p50"] for run in runs[BY_SERVER]]
    notes = f"a request waits for its engines for {statistics.median(waits_s) * 1e3:.0f} ms (p50); {facts}"
    options.keep(figure, [run.jct_s for run in runs[BY_SERVER]], peer=direct, verified=True, notes=notes)
