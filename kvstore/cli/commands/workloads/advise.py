"""``kvstore advise``: recommend prefill and decode nodes and a path policy for a cluster and a workload."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvstore.cli.support import result
from kvstore.cli.support.help import Command
from kvstore.cli.support.result import CommandOutput
from kvstore.core.errors import InvalidArgument

if TYPE_CHECKING:
    from kvstore.simulate.advice import Advice, Option
    from kvstore.simulate.cluster import SimConfig

_COLUMNS = (
    "2P2D: 2 prefill and 2 decode nodes. TTFT: mean time to the first token. TPOT: mean time per further token. SNIC: use of all"
    " storage links. MFU: share of the peak FLOP/s of prefill GPUs. MBU: share of the HBM bandwidth of decode GPUs."
)
"""Meaning of the columns of the table."""
_REQUESTS = 600
"""Approximate number of simulated requests of a run: a fraction of a second to a few seconds."""


class ClusterDescription(BaseModel):
    """A cluster and its workload, as in the file; bandwidths in GB/s."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str = "ds-27b"
    nodes: int = Field(default=4, ge=2, le=512)
    gpu: str = "h100"
    decode_gpu: str | None = None
    gpus: int = Field(default=8, ge=1, le=64)
    snic: float = Field(default=50.0, gt=0)
    cnic: float = Field(default=50.0, gt=0)
    dram: float = Field(default=500.0, gt=0)
    storage: float | None = Field(default=None, gt=0)
    profile: str = "agentic-64k"
    agents: int = Field(default=256, ge=1, le=100_000)
    policies: list[str] = ["prefill_only", "shorter_queue", "split"]
    seed: int = Field(default=1, ge=0)


@click.command(cls=Command)
@click.option(
    "--file",
    "-f",
    "source",
    type=click.Path(dir_okay=False, path_type=Path),
    help="YAML file with any of model, nodes, gpu, decode_gpu, gpus, snic, cnic, dram, storage, profile, agents, seed and"
    " policies (a list); options override it.",
)
@click.option("--model", help="Model; 'kvstore simulate --list-models' names them (default: ds-27b).")
@click.option("--nodes", type=click.IntRange(2, 512), help="Prefill and decode nodes together (default: 4).")
@click.option("--gpu", help="GPU: a100, b200, h20, h100, h200 or l40s (default: h100).")
@click.option("--decode-gpu", help="GPU of the decode nodes, if it is another type.")
@click.option("--gpus", type=click.IntRange(1, 64), help="GPUs per node (default: 8).")
@click.option("--snic", type=click.FloatRange(0, min_open=True), help="Storage link of a node, GB/s (default: 50).")
@click.option("--cnic", type=click.FloatRange(0, min_open=True), help="Compute link of a GPU, GB/s (default: 50).")
@click.option("--dram", type=click.FloatRange(0, min_open=True), help="Memory bandwidth of a node, GB/s (default: 500).")
@click.option("--storage", type=click.FloatRange(0, min_open=True), help="All storage together, GB/s (default: no limit).")
@click.option("--profile", help="Workload: agentic-32k, -48k or -64k (default: agentic-64k).")
@click.option("--agents", type=click.IntRange(1, 100_000), help="Agents that run at once (default: 256).")
@click.option("--seed", type=click.IntRange(0), help="Seed of the workload (default: 1).")
@click.option(
    "--limit",
    type=click.FloatRange(1, 3600),
    default=15.0,
    show_default=True,
    help="Stop the search after this many seconds; the first run always ends.",
)
@result.prints
def advise(*, source: Path | None, limit: float, **options: object) -> CommandOutput:
    """Recommend the number of prefill and decode nodes, and the path policy.

    It divides the nodes in up to nine ways, simulates the workload on each with each policy, and recommends the division and the
    policy that serve the most requests per second. Among options within 3 % the one with the shortest TTFT wins. The engines of
    both roles may have different GPUs.

    Examples:
      kvstore advise --nodes 6 --model ds-27b --agents 512
      kvstore advise --nodes 4 --gpu h100 --decode-gpu h20 --snic 25
      kvstore advise -f cluster.yaml -o json
    """
    from rich.console import Console

    from kvstore.replay.progress import progress
    from kvstore.simulate.advice import advise as search
    from kvstore.simulate.advice import ratios
    from kvstore.simulate.cluster import POLICIES

    described = _described(source, options)
    unknown = [name for name in described.policies if name not in POLICIES or name == "oracle"]
    if unknown or not described.policies:
        raise InvalidArgument(
            f"policies: '{', '.join(unknown)}' is none of {', '.join(name for name in POLICIES if name != 'oracle')}"
        )
    began = time.monotonic()
    build, every = _builder(described)
    pairs = ratios(described.nodes)
    with progress("advise", len(pairs) * len(described.policies) + 1, unit="runs") as report:
        advice = search(
            build,
            pairs,
            described.policies,
            limit_s=limit - (time.monotonic() - began),
            on_run=lambda done, of, what: report(done, what, of),
        )

    def show() -> None:
        _show(advice, described, every, Console())

    return CommandOutput(_json(advice, described, every), show)


def _described(source: Path | None, options: dict[str, object]) -> ClusterDescription:
    import yaml

    given: dict[str, Any] = {}
    if source is not None:
        try:
            read = yaml.safe_load(source.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise InvalidArgument(f"{source} is not valid YAML: {error}") from error
        if read is not None and not isinstance(read, dict):
            raise InvalidArgument(f"{source} must have one setting per line, such as 'nodes: 4'")
        given = read or {}
        known = ClusterDescription.model_fields
        if unknown := [str(name) for name in given if name not in known]:
            raise InvalidArgument(f"{source}: unknown setting '{unknown[0][:80]}'; there are: {', '.join(known)}")
    given.update({name: value for name, value in options.items() if value is not None})
    try:
        return ClusterDescription(**given)
    except (ValidationError, TypeError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": ("file",), "msg": str(error)}
        raise InvalidArgument(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _builder(described: ClusterDescription) -> tuple[Any, int]:
    """Return the function that builds a cluster, and the sampling interval of turns."""
    from kvstore.roofline.hardware import gpu_named
    from kvstore.roofline.models import model_named
    from kvstore.simulate.cluster import uniform
    from kvstore.simulate.sessions import at_once, sessions_of, thinned
    from kvstore.workload.generator import PROFILES, AgentWorkload

    if described.profile not in PROFILES:
        raise InvalidArgument(f"no profile '{described.profile}'; there are: {', '.join(PROFILES)}")
    workload = AgentWorkload(PROFILES[described.profile], min(described.agents, 128), seed=described.seed)
    whole = sessions_of(workload, workload.block_tokens)
    repeated = [whole[index % len(whole)] for index in range(described.agents)]
    every = max(1, sum(len(session.turns) for session in repeated) // max(_REQUESTS, 2 * described.agents))
    sessions = at_once(thinned(repeated, every))
    model, gpu = model_named(described.model), gpu_named(described.gpu)
    decode_gpu = gpu_named(described.decode_gpu) if described.decode_gpu else None

    def build(prefill: int, decode: int) -> SimConfig:
        config = uniform(
            model,
            gpu,
            sessions,
            decode_gpu=decode_gpu,
            prefill_nodes=prefill,
            decode_nodes=decode,
            gpus_per_node=described.gpus,
            snic=described.snic * 1e9,
            cnic=described.cnic * 1e9,
            dram=described.dram * 1e9,
        )
        return config if described.storage is None else config.but(storage=described.storage * 1e9)

    return build, every


def _row(option: Option, every: int) -> dict[str, Any]:
    used = option.result
    return {
        "cluster": option.name,
        "prefill_nodes": option.prefill,
        "decode_nodes": option.decode,
        "policy": option.policy,
        "requests_s": option.requests_s,
        "most_done_s": used.most_done_s * every,
        "ttft_s": used.ttft.mean,
        "tpot_s": used.tpot.mean,
        "snic_use": used.snic_use,
        "prefill_mfu": used.prefill_gpus.mfu,
        "decode_mbu": used.decode_gpus.mbu,
    }


def _json(advice: Advice, described: ClusterDescription, every: int) -> dict[str, Any]:
    return {
        "description": described.model_dump(),
        "every": every,
        "recommended": _row(advice.best, every),
        "reasons": advice.reasons,
        "options": [_row(option, every) for option in advice.options],
        "skipped": advice.skipped,
        "left_out": advice.left_out,
    }


def _assumptions(described: ClusterDescription) -> str:
    """Return the assumptions of the answer, including settings that were not given."""
    gpus = described.gpu if described.decode_gpu is None else f"{described.gpu} (decode: {described.decode_gpu})"
    storage = "no limit on all storage together" if described.storage is None else f"all storage {described.storage:g} GB/s"
    return (
        f"Assumed: model {described.model}; {described.nodes} nodes with {described.gpus} {gpus} GPUs each; storage link"
        f" {described.snic:g} GB/s per node, compute link {described.cnic:g} GB/s per GPU, memory {described.dram:g} GB/s,"
        f" {storage}; {described.agents} agents at once, {described.profile}, seed {described.seed}. Each has an option."
    )


def _show(advice: Advice, described: ClusterDescription, every: int, console: Any) -> None:  # noqa: ANN401  # rich
    from rich.table import Table

    from kvstore.simulate.reports.table import bound_sentence

    console.print(_assumptions(described), highlight=False)
    table = Table(title="simulated: the recommended option, then the others by requests/s")
    for name in ("cluster", "policy", "requests/s", "TTFT s", "TPOT ms", "SNIC", "MFU", "MBU"):
        table.add_column(name, justify="left" if name in ("cluster", "policy") else "right", no_wrap=True)
    for option in advice.options:
        row = _row(option, every)
        table.add_row(
            row["cluster"],
            row["policy"],
            f"{row['requests_s']:.1f}",
            f"{row['ttft_s']:.2f}",
            f"{row['tpot_s'] * 1000:.1f}",
            *(f"{row[name]:.0%}" for name in ("snic_use", "prefill_mfu", "decode_mbu")),
        )
    console.print(table)
    console.print(_COLUMNS, style="dim", highlight=False)
    best = advice.best
    console.print(f"Recommended: {best.name} with {best.policy} (metadata.path_policy).", highlight=False)
    for reason in (*advice.reasons, bound_sentence(best.config)):
        console.print(reason, highlight=False)
    for name, reason in advice.skipped.items():
        console.print(f"{name} was not tried: {reason}", style="dim", highlight=False)
    if advice.left_out:
        console.print(
            f"The time ended before {advice.left_out} runs: raise --limit to try them.", style="yellow", highlight=False
        )
