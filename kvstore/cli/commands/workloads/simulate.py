"""``kvstore simulate``: estimate the gain of dual-path loading on a cluster."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstore.cli.support import output, param_types, result
from kvstore.cli.support.help import Command
from kvstore.cli.support.result import CommandOutput

if TYPE_CHECKING:
    from kvstore.replay.progress import Report
    from kvstore.roofline.calibration import StepTimes
    from kvstore.simulate.cluster import SimConfig
    from kvstore.simulate.result import SimResult
    from kvstore.simulate.sessions import AgentSession

_DEFAULT_POLICIES = "prefill_only,shorter_queue,split,oracle"
_LADDER = "ladder"
_REQUESTS = 6_000
"""Approximate number of simulated requests by default; a few seconds per policy."""


def _variants(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    from kvstore.simulate.cluster import LADDER, VARIANTS

    names = [name.strip() for name in value.split(",")]
    if names == [_LADDER]:
        return list(LADDER)
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise click.BadParameter(f"'{unknown[0]}' is none of {', '.join([*VARIANTS, _LADDER])}", ctx, param)
    return names


def _clusters(ctx: click.Context, param: click.Parameter, value: str | None) -> list[tuple[int, int]]:
    """Parse P:D ratios, such as ``1:1,1:2``."""
    if value is None:
        return []
    try:
        pairs = [tuple(int(part) for part in entry.split(":")) for entry in value.split(",")]
    except ValueError:
        pairs = []
    if not pairs or any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
        raise click.BadParameter("clusters look like 1:1,1:2,2:1", ctx, param)
    return [(pair[0], pair[1]) for pair in pairs]


@dataclass(frozen=True, slots=True)
class _Options:
    """Options of the command line by name."""

    model: str
    gpu: str
    decode_gpu: str | None
    prefill: int | None
    decode: int | None
    gpus: int
    snic: float
    cnic: float
    dram: float
    storage: float | None
    stage: int | None
    trace: Path | None
    profile: str
    agents: int
    every: int | None
    seed: int
    policies: list[str]
    layer_groups: int
    sweep_pd: list[tuple[int, int]]
    online: bool
    plot_file: Path | None
    calibration: Path | None


@click.command(cls=Command)
@click.option("--model", default="ds-660b", show_default=True, help="Model: --list-models names them.")
@click.option("--gpu", default="h100", show_default=True, help="GPU: a100, b200, h20, h100, h200 or l40s.")
@click.option("--decode-gpu", help="GPU of the decode nodes (default: as --gpu).")
@click.option("--prefill", type=click.IntRange(1, 512), metavar="P", help="Prefill nodes (default: the model's).")
@click.option("--decode", type=click.IntRange(1, 512), metavar="D", help="Decode nodes (default: the model's).")
@click.option("--gpus", type=click.IntRange(1, 64), default=8, show_default=True, help="GPUs per node, each with its own CNIC.")
@click.option(
    "--snic", type=click.FloatRange(0, min_open=True), default=50.0, show_default=True, help="Storage link of each node, GB/s."
)
@click.option(
    "--cnic", type=click.FloatRange(0, min_open=True), default=50.0, show_default=True, help="Compute link of each GPU, GB/s."
)
@click.option(
    "--dram", type=click.FloatRange(0, min_open=True), default=500.0, show_default=True, help="Memory of each node, GB/s."
)
@click.option("--storage", type=click.FloatRange(0, min_open=True), help="All storage together, GB/s (default: no limit).")
@click.option(
    "--stage",
    callback=param_types.some_size,
    metavar="SIZE",
    help="Size of the prefill and of the decode buffer per node (default: the model's).",
)
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="A recorded workload (default: generated agents).")
@click.option("--profile", default="agentic-64k", show_default=True, help="Generated agents: agentic-32k, -48k or -64k.")
@click.option("--agents", type=click.IntRange(1, 100_000), default=1024, show_default=True, help="Agents that run at once.")
@click.option(
    "--every", type=click.IntRange(1), help="Simulate one of this many turns (default: such that about 6,000 requests remain)."
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Seed of all random choices.")
@click.option(
    "--policies",
    callback=_variants,
    default=_DEFAULT_POLICIES,
    show_default=True,
    help="What to compare; 'ladder': step by step.",
)
@click.option(
    "--layer-groups",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Parts in which storage is read, first layers first.",
)
@click.option(
    "--sweep-pd", callback=_clusters, metavar="P:D,…", help="Compare clusters of P prefill and D decode nodes, e.g. 1:1,1:2,2:1."
)
@click.option(
    "--online", is_flag=True, help="Find the highest rate of agents per second with TTFT <= 4 s and TPOT <= 50 ms instead."
)
@click.option(
    "--plot",
    "plot_file",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=param_types.result_file,
    help="Write a PNG (requires the extra 'plots').",
)
@click.option(
    "--calibration",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON of 'kvstore calibrate -o json': measured step times replace the roofline of prefill engines.",
)
@click.option(
    "--list-models",
    is_flag=True,
    help="Names models and what they ask of storage at a prompt of 32K and 429 new tokens, and ends.",
)
@result.prints
def simulate(*, list_models: bool, **options: object) -> CommandOutput:
    """Simulate a cluster that serves agents, with one path to storage and with two.

    It estimates the gain from loading over the storage links of decode nodes too, and the best P:D ratio. It runs the planner and
    scheduler of the store. Links are shared fairly, and a roofline model gives compute times. All policies are compared with
    the first one.

    Policies:
      prefill_only    every prefill node loads over its own storage link (the baseline)
      round_robin     prefill and decode side alternate
      shorter_queue   the side with less to read (the DualPath paper)
      split           one request over both sides and idle nodes, so that all parts end together
      oracle          loads finish at once: the upper bound
      ladder          basic, +layerwise, +both paths, +scheduler, +split, each added to those before it

    If 'oracle' is hardly faster, compute is the limit: buy prefill nodes. If 'split' is far from 'oracle', the storage links are
    the limit: buy prefill or decode nodes. Runs simulate a sample of the turns of each agent (--every) at the same load; times
    in tables are scaled back. Gains compare the times until 95 % of the requests are done, because a few very
    long sessions end last on any cluster.

    Examples:
      kvstore simulate
      kvstore simulate --model qwen2.5-32b --gpu h200 --prefill 1 --decode 2 --agents 256
      kvstore simulate --model ds-27b --sweep-pd 1:1,1:2,2:1 --plot gain.png
      kvstore simulate --snic 12.5 --policies ladder -o json > ladder.json
      kvstore simulate --online --policies prefill_only,split
      kvstore simulate --model ds-27b --gpu h100 --decode-gpu h20 --policies split
    """
    if list_models:
        return _list_models()
    return _simulate(_Options(**options))  # type: ignore[arg-type]  # click made them what they are declared to be


def _list_models() -> CommandOutput:
    from kvstore.roofline.models import MODELS

    items = [
        {
            "model": model.name,
            "token_bytes": model.token_bytes,
            "bytes_per_pflop": model.bytes_per_pflop(32_768, 429),
            "prefill_nodes": model.prefill_nodes,
            "decode_nodes": model.decode_nodes,
        }
        for model in MODELS.values()
    ]
    rows = [
        (
            model.name,
            f"{model.token_bytes:,}",
            f"{model.bytes_per_pflop(32_768, 429) / 1e9:.1f}",
            f"{model.prefill_nodes}P{model.decode_nodes}D",
        )
        for model in MODELS.values()
    ]
    columns = ("model", "KV bytes/token", "GB/PFLOP", "default cluster")
    return result.table({"items": items}, columns, rows)


def _simulate(options: _Options) -> CommandOutput:
    from rich.console import Console

    from kvstore.simulate.reports.plot import plot, require_matplotlib
    from kvstore.simulate.reports.table import bound_sentence, print_results, print_sweep, sweep_json

    if options.plot_file is not None:
        require_matplotlib()
    sessions, every, name = _workload(options)
    config = _cluster(options, sessions, options.prefill, options.decode)
    requests = sum(len(session.turns) for session in sessions)
    thinned = f", one turn in {every}" if every > 1 else ""
    output.note(f"{name}: {len(sessions):,} sessions, {requests:,} requests{thinned}")
    bound = bound_sentence(config)
    if options.online:
        return _online(options, config, every, bound)
    results = _run_all(config, options.policies)
    swept: dict[str, list[SimResult]] = {}
    nodes: dict[str, int] = {}
    for prefill, decode in options.sweep_pd:
        other = _cluster(options, sessions, prefill, decode)
        swept[_name(other)] = _run_all(other, options.policies)
        nodes[_name(other)] = prefill + decode
    if options.plot_file is not None:
        plot(results, config, {key: [one.most_done_s for one in found] for key, found in swept.items()}, options.plot_file)

    def show() -> None:
        console = Console()
        console.print(bound, highlight=False)
        print_results(results, every, f"{options.model} on {_name(config)}", console)
        if swept:
            print_sweep(swept, nodes, every, console)

    data = {
        "cluster": _name(config),
        "every": every,
        "bound": bound,
        "results": [one.to_json() for one in results],
        "sweep": sweep_json(swept),
    }
    return CommandOutput(data, show)


def _online(options: _Options, config: SimConfig, every: int, bound: str) -> CommandOutput:
    from rich.console import Console

    from kvstore.replay.progress import progress
    from kvstore.simulate.capacity import MOST_RATES, Point, capacity
    from kvstore.simulate.cluster import VARIANTS
    from kvstore.simulate.reports.table import print_capacity

    found = []
    for name in options.policies:
        with progress(name, MOST_RATES, unit="rates") as report:
            tried: list[Point] = []

            def note(point: Point, tried: list[Point] = tried, report: Report = report) -> None:
                tried.append(point)
                report(len(tried), f"{point.agents_s:.3f} agents/s: TTFT {point.ttft_s:.2f} s")

            variant = config.but(variant=VARIANTS[name])
            found.append(capacity(variant, config.sessions, every=every, seed=options.seed, tried=note))

    def show() -> None:
        console = Console()
        console.print(bound, highlight=False)
        print_capacity(found, console)

    data = {
        "cluster": _name(config),
        "every": every,
        "bound": bound,
        "capacity": [asdict(one) for one in found],
    }
    return CommandOutput(data, show)


def _workload(options: _Options) -> tuple[tuple[AgentSession, ...], int, str]:
    """Sessions that begin at once, the sampling interval of their turns, and a name."""
    from kvstore.simulate.sessions import at_once, sessions_of, thinned
    from kvstore.workload.generator import PROFILES, AgentWorkload
    from kvstore.workload.traces import open_trace

    if options.trace is not None:
        source = open_trace(options.trace)
        found, name = sessions_of(source, source.info.block_tokens)[: options.agents], source.info.name
    elif options.profile in PROFILES:
        workload = AgentWorkload(PROFILES[options.profile], options.agents, seed=options.seed)
        found, name = sessions_of(workload, workload.block_tokens), options.profile
    else:
        raise click.UsageError(f"no profile '{options.profile}'; there are: {', '.join(PROFILES)}")
    every = options.every or max(1, sum(len(session.turns) for session in found) // _REQUESTS)
    return at_once(thinned(found, every)), every, name


def _cluster(options: _Options, sessions: tuple[AgentSession, ...], prefill: int | None, decode: int | None) -> SimConfig:
    from kvstore.roofline.hardware import gpu_named
    from kvstore.roofline.models import model_named
    from kvstore.simulate.cluster import uniform

    config = uniform(
        model_named(options.model),
        gpu_named(options.gpu),
        sessions,
        decode_gpu=gpu_named(options.decode_gpu) if options.decode_gpu else None,
        prefill_nodes=prefill,
        decode_nodes=decode,
        gpus_per_node=options.gpus,
        snic=options.snic * 1e9,
        cnic=options.cnic * 1e9,
        dram=options.dram * 1e9,
        stage_bytes=options.stage,
    )
    config = config.but(layer_groups=options.layer_groups)
    if options.calibration is not None:
        config = config.but(prefill=replace(config.prefill, measured=_step_times(options.calibration)))
    return config if options.storage is None else config.but(storage=options.storage * 1e9)


def _step_times(file: Path) -> StepTimes:
    import json

    from kvstore.core.errors import InvalidArgument
    from kvstore.roofline.calibration import step_times

    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{file} is not valid JSON: {error}") from error
    return step_times(data.get("step_times") if isinstance(data, dict) else None)


def _run_all(config: SimConfig, policies: list[str]) -> list[SimResult]:
    from kvstore.replay.progress import progress
    from kvstore.simulate.cluster import VARIANTS
    from kvstore.simulate.run import simulate as run

    total = sum(len(session.turns) for session in config.sessions)
    results = []
    for name in policies:
        with progress(f"{_name(config)} {name}", total) as report:
            results.append(run(config.but(variant=VARIANTS[name]), lambda done, of: report(done, "", of)))
    return results


def _name(config: SimConfig) -> str:
    from kvstore.dualpath.groups import EngineKind

    return f"{len(config.of(EngineKind.PREFILL))}P{len(config.of(EngineKind.DECODE))}D"
