"""The simulator against the lab, on the same small beds: the figures of both for a run, row by row, as table and plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import simulate_parts

BOUND = {"storage": "storage-bound", "compute": "compute-bound"}

INTRODUCTION = """
Made by `benchmarks/simulate_lab.py`; do not edit. The same agents, engines, links, policies and scheduler, once with every byte
moved by real clients and daemons between network namespaces (`benchmarks/netlab`), once simulated. Nothing in the simulator was
set by what the lab had shown, and nothing differs from row to row but what the row names.

"JCT" is the time from the beginning, when all agents ask at once, to the last token; "TTFT" the mean over requests. Lab figures
are medians over rounds, with least and most; "gain" is `prefill_only`'s JCT as a multiple of the row's.
"""

WHY = """
What the simulator leaves out, and so may lie behind differences: processor time of clients and daemons (lookups, checksums,
copies), TCP and its sharing of a link among connections, reads in windows that are complete before they go on, the moment of a
plan (the simulator plans when engines are found, a client when its turn to load has come), bounds on requests that a prefill
engine holds. What it has and the lab has not: cached KV that streams into the engine while it computes, over the compute link.
Runs are short, so that which request happens to come last weighs in both.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One bed, bound and policy.

    Attributes:
        bed: as ``1P2D``.
        bound: the link that bounds the load: ``storage`` or ``compute``.
        policy: of paths.
        jct_s: of the lab's rounds.
        ttft_s: mean over requests, of each round.
        sim_jct_s: simulated.
        sim_ttft_s: simulated, mean.
        cpu: share of the machine that was busy in the lab's rounds.
    """

    bed: str
    bound: str
    policy: str
    jct_s: Sequence[float]
    ttft_s: Sequence[float]
    sim_jct_s: float
    sim_ttft_s: float
    cpu: Sequence[float]

    @property
    def error(self) -> float:
        """By how much the simulated JCT differs from the lab's; a share of it."""
        return self.sim_jct_s / statistics.median(self.jct_s) - 1

    @property
    def ttft_error(self) -> float:
        """The same of the mean TTFT."""
        return self.sim_ttft_s / statistics.median(self.ttft_s) - 1


def gains(rows: Sequence[Row]) -> dict[tuple[str, str, str], tuple[float, float]]:
    """By bed, bound and policy: gain over ``prefill_only`` in the lab (median of rounds) and simulated."""
    base = {(row.bed, row.bound): row for row in rows if row.policy == "prefill_only"}
    found = {}
    for row in rows:
        first = base[row.bed, row.bound]
        lab = statistics.median(slow / fast for slow, fast in zip(first.jct_s, row.jct_s, strict=True))
        found[row.bed, row.bound, row.policy] = lab, first.sim_jct_s / row.sim_jct_s
    return found


def write_section(rows: Sequence[Row], facts: Mapping[str, str]) -> None:
    """Puts the table into ``simulate.md``."""
    gain = gains(rows)
    lines = [simulate_parts.LAB, INTRODUCTION]
    for bound, title in BOUND.items():
        lines += [f"## {title.capitalize()}", "", facts[bound], ""]
        lines += [
            "| bed | policy | lab JCT | simulated | error | lab TTFT | simulated | error | lab gain | simulated | CPU |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in (one for one in rows if one.bound == bound):
            lab, simulated = gain[row.bed, row.bound, row.policy]
            jct, ttft = statistics.median(row.jct_s), statistics.median(row.ttft_s)
            lines.append(
                f"| {row.bed} | {row.policy} | {jct:.2f} s ({min(row.jct_s):.2f} … {max(row.jct_s):.2f}) | "
                f"{row.sim_jct_s:.2f} s | {row.error:+.0%} | {ttft:.2f} s | {row.sim_ttft_s:.2f} s | {row.ttft_error:+.0%} | "
                f"{lab:.2f}x | {simulated:.2f}x | {statistics.median(row.cpu):.0%} |"
            )
        lines.append("")
    errors = [abs(row.error) for row in rows]
    apart = [abs(simulated / lab - 1) for (_, _, policy), (lab, simulated) in gain.items() if policy != "prefill_only"]
    lines += [
        f"Simulated JCT is off by {statistics.fmean(errors):.0%} on average and {max(errors):.0%} at most, gains by "
        f"{statistics.fmean(apart):.0%} and {max(apart):.0%}; mean TTFT by "
        f"{statistics.fmean(abs(row.ttft_error) for row in rows):.0%} on average."
    ]
    simulate_parts.write("lab", "\n".join(lines) + "\n" + WHY)


def plot(rows: Sequence[Row], file: Path) -> None:
    """Gain by P:D in the lab and simulated, and simulated against measured JCT; nothing where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    gain = gains(rows)
    beds = list(dict.fromkeys(row.bed for row in rows))
    policies = [policy for policy in dict.fromkeys(row.policy for row in rows) if policy != "prefill_only"]
    figure, panels = plt.subplots(1, 3, figsize=(16, 4.5))
    for panel, (bound, title) in zip(panels, BOUND.items(), strict=False):
        for number, policy in enumerate(policies):
            at = [index + (number - (len(policies) - 1) / 2) * 0.35 for index in range(len(beds))]
            found = [gain[bed, bound, policy] for bed in beds]
            panel.bar(at, [lab for lab, _ in found], 0.33, label=f"{policy}: lab")
            panel.plot(at, [simulated for _, simulated in found], "k_", markersize=18, label=None if number else "simulated")
        panel.axhline(1.0, color="gray", linestyle=":")
        panel.set_xticks(range(len(beds)), beds)
        panel.set(title=f"gain over prefill_only by P:D, {title}", ylabel="times as fast")
        panel.set_ylim(0, 1.35 * max(panel.get_ylim()[1] / 1.05, 1.0))  # space for the legend
        panel.legend(fontsize="small", loc="upper left", ncols=3)
    longest = max(max(row.sim_jct_s, *row.jct_s) for row in rows) * 1.05
    panels[2].plot([0, longest], [0, longest], color="gray", linestyle=":")
    for policy in ("prefill_only", *policies):
        mine = [row for row in rows if row.policy == policy]
        panels[2].plot([statistics.median(row.jct_s) for row in mine], [row.sim_jct_s for row in mine], "o", label=policy)
    panels[2].set(
        title="job completion", xlabel="lab, seconds", ylabel="simulated, seconds", xlim=(0, longest), ylim=(0, longest)
    )
    panels[2].legend(fontsize="small")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100, metadata={"Software": None})
    plt.close(figure)
