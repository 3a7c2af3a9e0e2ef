"""Show with the simulator when ``split`` is faster than taking turns: the lab's bed of timed engines, with few agents and many.

Prints the table of ``docs/explanation/dualpath.md``. Nothing is measured, so that no record is kept.
"""

from __future__ import annotations

from kvstore.simulate.result import SimResult
from kvstore.simulate.run import simulate
from netlab.agents import trajectories
from netlab.coordinator import LADDER
from netlab.engine_bed import EngineSettings
from netlab.engine_rounds import PROFILE
from netlab.engine_runs import BED
from netlab.simulated import sim_config

AGENTS = (1, 2, 4, 8, 11, 16)
SEEDS = (1, 2, 3, 4, 5)
STEPS = (LADDER[2], LADDER[3], LADDER[4])
"""Both paths by round robin, by the shorter queue, and split."""


def results(agents: int, seed: int) -> list[SimResult]:
    """Simulate the bed of the ablation with this number of agents, step by step."""
    made = trajectories(PROFILE, agents, 2, seed)
    return [simulate(sim_config(BED, EngineSettings(), made, variant)) for variant in STEPS]


def main() -> None:
    """Print the table."""
    turns, columns = "round robin", ("load, {} / split", "JCT, {} / shorter queue", "JCT, {} / split")
    print(f"| agents | links busy, {turns} | {' | '.join(column.format(turns) for column in columns)} |")
    print("|---|---|---|---|---|")
    for agents in AGENTS:
        rounds = [results(agents, seed) for seed in SEEDS]
        busy = sorted(base.snic_use for base, _, _ in rounds)
        loads = sorted(base.load.mean / split.load.mean for base, _, split in rounds)
        queue = sorted(base.seconds / shorter.seconds for base, shorter, _ in rounds)
        split = sorted(base.seconds / split.seconds for base, _, split in rounds)
        cells = [f"{found[2]:.2f} ({found[0]:.2f} … {found[-1]:.2f})" for found in (loads, queue, split)]
        print(f"| {agents} | {busy[2]:.0%} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
