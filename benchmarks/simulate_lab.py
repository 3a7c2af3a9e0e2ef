"""Compare the simulator with the network lab: the same beds, agents, policies and scheduler, with the error of each row.

Small beds of timed engines (1P1D to 2P2D) run offline: all agents start together. One workload is bound by storage links, the
other one, with longer appends, by computing. Requires root and iproute2, and reports if they are missing. Writes the table to
``simulate.md`` and the data and plot to ``results/netlab``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

import harness
from harness import Figure, Options, Reference
from kvstore.netlab.bed import LabBed
from kvstore.netlab.lab import available
from netlab.against_lab import BOUND, Row, plot, write_section
from netlab.agents import trajectories
from netlab.coordinator import Variant
from netlab.engine_bed import EngineSettings
from netlab.engine_rounds import GROUPS, PROFILE, facts_of, rounds_of
from netlab.simulated import simulated

BEDS = ((1, 1), (1, 2), (2, 1), (2, 2))
POLICIES = ("prefill_only", "shorter_queue", "split")
SNIC_MBIT, CNIC_TIMES, STORAGE_MBIT = 120.0, 8, 1920.0
"""Slow links and dilated time, so that two cores can keep eight links busy."""
OUT = 0.25
"""Factor of the generated tokens. It is small because nothing overlaps with the last answer of a short run."""
APPEND = {"storage": 1.0, "compute": 64.0}


def settings_of(options: Options, bound: str) -> EngineSettings:
    """Settings of the engines."""
    return EngineSettings(dilation=options.pick(full=1.5, quick=1.5, smoke=0.1), in_flight=6 if bound == "compute" else 4)


def measure(options: Options, prefill: int, decode: int, bound: str, agents: int) -> tuple[list[Row], str]:
    """Measure one bed with one workload. Returns rows by policy, and the description of the bottleneck."""
    bed = LabBed(prefill, decode, 1, SNIC_MBIT, SNIC_MBIT * CNIC_TIMES, STORAGE_MBIT)
    settings = settings_of(options, bound)
    made = trajectories(PROFILE, agents * prefill, 2, options.seed, append_factor=APPEND[bound], out_factor=OUT)
    group = GROUPS if bound == "compute" else 0
    variants = [Variant(policy, policy, layer_group=group) for policy in POLICIES]
    runs = rounds_of(options, bed, made, settings, variants, growth=1400 * len(made) if bound == "compute" else 8192)
    rows = []
    for variant in variants:
        said, found = simulated(bed, settings, made, variant), runs[variant.name]
        jct_s, ttft_s = [run.jct_s for run in found], [run.times["ttft"]["mean"] for run in found]
        row = Row(
            f"{prefill}P{decode}D", bound, variant.name, jct_s, ttft_s, said.seconds, said.ttft.mean, [run.cpu for run in found]
        )
        rows.append(row)
        parameters: dict[str, harness.Parameter] = {"bed": row.bed, "bound": bound, "policy": row.policy, "agents": len(made)}
        options.keep(
            Figure("simulate_lab_jct", "Lab's offline JCT, the simulator's beside it", parameters, "s", lower_is_better=True),
            jct_s,
            limit=Reference("simulated", [said.seconds]),
            verified=True,
            notes=f"simulated {row.error:+.0%}, mean TTFT {row.ttft_error:+.0%}",
        )
    return rows, facts_of(made, settings, bed)


def main() -> None:
    """Measure the selected beds."""

    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--bounds", nargs="+", choices=list(BOUND), default=list(BOUND), help="workloads (default: both)")
        parser.add_argument("--beds", nargs="+", help="beds, for example 1P2D (default: all)")

    options = harness.options("simulate_lab", __doc__, repetitions=3, arguments=arguments)
    reason = available()
    if reason is not None:
        sys.exit(f"no network lab can run here: {reason}")
    agents = options.pick(full=6, quick=4, smoke=1)
    kept: list[Row] = []
    facts: dict[str, str] = {}
    file = None if options.results is None else options.results / "netlab" / "simulate_lab.json"
    if file is not None and file.exists():
        data = json.loads(file.read_text(encoding="utf-8"))
        kept, facts = [Row(**row) for row in data["rows"]], data["facts"]
    for bound in options.extra.bounds if options.mode != "smoke" else options.extra.bounds[:1]:
        for prefill, decode in BEDS if options.mode != "smoke" else BEDS[:1]:
            name = f"{prefill}P{decode}D"
            if options.extra.beds and name not in options.extra.beds:
                continue
            rows, told = measure(options, prefill, decode, bound, agents)
            if (prefill, decode) == BEDS[0]:
                facts[bound] = told
            kept = [row for row in kept if (row.bed, row.bound) != (name, bound)] + rows
    kept.sort(key=lambda row: (list(BOUND).index(row.bound), row.bed, POLICIES.index(row.policy)))
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    data = {"facts": facts, "rows": [dataclasses.asdict(row) for row in kept]}
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if set(facts) == set(BOUND) and len(kept) == len(BOUND) * len(BEDS) * len(POLICIES):
        plot(kept, file.with_suffix(".png"))
        if options.mode == "full":
            write_section(kept, facts)


if __name__ == "__main__":
    main()
