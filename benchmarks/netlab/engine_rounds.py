"""Rounds of offline runs on a bed of timed engines, and the facts that their figures share."""

from __future__ import annotations

from collections.abc import Sequence

from harness import Options, Parameter
from kvstore.netlab.bed import LabBed
from kvstore.roofline.engine_model import PrefillChunk
from netlab.agents import Trajectory
from netlab.coordinator import Coordinator, Variant
from netlab.engine_bed import EngineBed, EngineSettings
from netlab.engine_report import Summary, summarize

PROFILE = "agentic-64k"
GROUPS = 8
"""Layers of a group, of 32, if computing dominates: it starts when the first group is loaded."""


def rounds_of(
    options: Options,
    bed: LabBed,
    made: Sequence[Trajectory],
    settings: EngineSettings,
    variants: Sequence[Variant],
    growth: int = 8192,
    at_once: int | None = None,
) -> dict[str, list[Summary]]:
    """Offline runs, by variant: all agents begin at once, every variant in turn, a round after the other.

    Args:
        options: rounds, seed and scratch.
        bed: hosts and links.
        made: the agents.
        settings: the engines.
        variants: in the order of the first round.
        growth: blocks of space in storage for the blocks that runs add.
        at_once: maximum number of concurrent agents.
    """
    runs: dict[str, list[Summary]] = {variant.name: [] for variant in variants}
    with EngineBed(bed, settings, made, seed=options.seed, growth_blocks=growth, scratch=options.scratch) as running:
        coordinator = Coordinator(running, made)
        order = list(variants)
        for number in range(options.repetitions):
            for variant in order:
                run = summarize(coordinator.run(variant, [0.0] * len(made), at_once), bed, settings.dilation)
                runs[variant.name].append(run)
                print(f"  round {number}: {variant.name:14} {run.jct_s:6.2f} s, cpu {run.cpu:.0%}, {run.counts}", flush=True)
            order.append(order.pop(0))
    return runs


def ratios(slow: Sequence[Summary], fast: Sequence[Summary]) -> list[float]:
    """JCT of one as a multiple of the other's, round by round."""
    return [one.jct_s / other.jct_s for one, other in zip(slow, fast, strict=True)]


def read_s_of(made: Sequence[Trajectory], settings: EngineSettings, bed: LabBed) -> float:
    """Seconds (of the lab) in which one storage link reads all that hits."""
    tokens = sum(one.known(turn) for one in made for turn in range(len(one.turns)))
    return tokens * settings.engine(bed).model.token_bytes / settings.snic_bytes_per_s * settings.dilation


def facts_of(made: Sequence[Trajectory], settings: EngineSettings, bed: LabBed) -> str:
    """Bottleneck of the bed: seconds of reading and of computing per turn."""
    engine = settings.engine(bed)
    chunks = [(one.known(turn), one.prompt(turn) - one.known(turn)) for one in made for turn in range(len(one.turns))]
    compute_s = sum(engine.prefill_seconds([PrefillChunk(*chunk)]) for chunk in chunks) / len(chunks)
    read_s = read_s_of(made, settings, bed) / len(chunks)
    link = settings.snic_bytes_per_s * 8e-9
    return (
        f"{settings.model} on {settings.gpus} {settings.gpu} a host with one {link:g} Gb/s storage link; "
        f"bytes x {engine.scale.bytes:.2g}, time x {settings.dilation:g}; "
        f"a turn reads for {read_s:.3f} s over one link and {read_s / 2:.3f} s over two, "
        f"and computes for {compute_s:.3f} s; {bed.verdict().sentence}"
    )


def parameters_of(settings: EngineSettings, agents: int, turns: int, bed: str = "1P1D") -> dict[str, Parameter]:
    """Facts of the runs that every figure records."""
    return {"bed": bed, "model": settings.model, "dilation": settings.dilation, "agents": agents, "turns": turns}


def notes_of(runs: Sequence[Summary], facts: str) -> str:
    """Percentiles of the median run, and bytes by link."""
    run = sorted(runs, key=lambda one: one.jct_s)[len(runs) // 2]
    times = ", ".join(
        f"{name} p50 {run.times[name]['p50']:.3f} p90 {run.times[name]['p90']:.3f} s" for name in ("ttft", "ttst", "tpot")
    )
    megabytes = {host: round(size / 1e6) for host, size in run.snic_bytes.items()}
    return f"{times}; SNIC MB {megabytes}; cpu {run.cpu:.0%}; blocks {dict(run.counts)}; {facts}"
