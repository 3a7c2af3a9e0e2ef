"""Show with the simulator when ``split`` is faster than taking turns: the lab's bed of timed engines, with few agents and many.

Keeps one figure per number of agents and question, with one sample per workload: the table of ``docs/explanation/dualpath.md``.
"""

from __future__ import annotations

import statistics

import harness
from harness import Figure, Parameter
from kvstore.simulate.result import SimResult
from kvstore.simulate.run import simulate
from netlab.agents import trajectories
from netlab.coordinator import LADDER
from netlab.engine_bed import EngineSettings
from netlab.engine_rounds import PROFILE
from netlab.engine_runs import BED
from netlab.simulated import sim_config

AGENTS = (1, 2, 4, 8, 11, 16)
TITLES = {
    "simulated_load_gain": "Mean load with split",
    "simulated_shorter_queue_gain": "JCT with the shorter queue",
    "simulated_split_gain": "JCT with split",
}
STEPS = (LADDER[2], LADDER[3], LADDER[4])
"""Both paths by round robin, by the shorter queue, and split."""


def results(agents: int, seed: int) -> list[SimResult]:
    """Simulate the bed of the ablation with this number of agents, step by step."""
    made = trajectories(PROFILE, agents, 2, seed)
    return [simulate(sim_config(BED, EngineSettings(), made, variant)) for variant in STEPS]


def main() -> None:
    """Run the simulations."""
    options = harness.options("simulate_split", __doc__)
    for agents in options.pick(full=AGENTS, quick=(1, 11), smoke=(1,)):
        rounds = [results(agents, options.seed + round_number) for round_number in range(options.repetitions)]
        busy = statistics.median(base.snic_use for base, _, _ in rounds)
        shared: dict[str, Parameter] = {"bed": "1P1D", "agents": agents}
        gains = {
            "simulated_load_gain": [base.load.mean / split.load.mean for base, _, split in rounds],
            "simulated_shorter_queue_gain": [base.seconds / shorter.seconds for base, shorter, _ in rounds],
            "simulated_split_gain": [base.seconds / split.seconds for base, _, split in rounds],
        }
        for name, found in gains.items():
            notes = f"samples are workloads; links busy with round robin for {busy:.0%} of the run; nothing is measured"
            options.keep(Figure(name, f"{TITLES[name]}, round robin as a multiple, simulated", shared, "x"), found, notes=notes)


if __name__ == "__main__":
    main()
