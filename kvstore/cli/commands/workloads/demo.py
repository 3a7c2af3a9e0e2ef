"""``kvstore demo``: run a small store for half a minute."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstore.cli.support import output
from kvstore.cli.support.config_options import refuse_unused, with_quiet_config
from kvstore.cli.support.help import Command
from kvstore.cli.support.result import CommandOutput, prints
from kvstore.cli.support.scale_options import describe_metadata, scale_options
from kvstore.cli.support.signals import orderly_exit
from kvstore.config.model import Config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from kvstore.replay.dual_demo import DualDemoPlan, PolicyResult


@click.command(cls=Command)
@click.option("--sessions", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Agent sessions.")
@click.option("--turns", type=click.IntRange(1, 10_000), default=60, show_default=True, help="Longest session, in turns.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Random seed.")
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path), help="Folder of the volumes (default: temporary).")
@scale_options
@click.option(
    "--dual-path",
    is_flag=True,
    help="Load one prompt over one storage link and over two, on emulated hosts; requires Linux, root and iproute2.",
)
@with_quiet_config
@prints
def demo(
    _config: Config,
    *,
    sessions: int,
    turns: int,
    seed: int,
    data_dir: Path | None,
    servers: int,
    shards: int,
    dual_path: bool,
) -> CommandOutput:
    """Start a small store, run an agentic workload on it and check every loaded byte.

    The store is real: a metadata server, a prefill host, a decode host and a storage host, each a separate process, with
    sockets, shared memory and files of this machine. The workload is generated from published statistics of production
    agents. Everything is removed at the end.

    Of the table, "prompt blocks" are the blocks of all prompts, and "hits" those that the store had, so that no engine would
    compute them. "hits, unlimited store" are those of a store that never evicts.

    With --shards, the index is in a Valkey Cluster of that many shards, each a primary and a replica. It requires the program
    valkey-server or redis-server.

    Examples:
      kvstore demo
      kvstore demo --sessions 50 -o json > demo.json
      kvstore demo --servers 2 --shards 3
      sudo .venv/bin/kvstore demo --dual-path

    Exit code 1: a byte was wrong, or the hits are impossible.
    """
    refuse_unused("a demo starts a store of its own", "log.")
    if dual_path:
        if servers > 1 or shards:
            raise click.UsageError("--servers and --shards have no effect with --dual-path")
        return _dual_path()
    from rich.console import Console

    from kvstore.replay.demo import DemoPlan, read_turns, run_demo
    from kvstore.replay.progress import progress
    from kvstore.replay.report import print_summary, tally_rows

    plan = DemoPlan(sessions=sessions, max_turns=turns, seed=seed, servers=servers, shards=shards)
    output.note(f"starting {describe_metadata(servers, shards)}, a prefill host, a decode host and a storage host …")
    with orderly_exit(), progress("demo", len(read_turns(plan)[0])) as report:
        result = run_demo(plan, data_dir, report)
    rows = tally_rows(result.tally, result.seconds)
    rows["hits, unlimited store"] = f"{result.possible_hits:,}, if nothing were evicted"
    if servers > 1 or shards:
        rows["index"] = describe_metadata(servers, shards)

    def show() -> None:
        print_summary("kvstore demo", rows, Console())
        if result.problem is None:
            click.echo("No wrong byte: each loaded byte was compared with the stored one. Next: kvstore up")

    return CommandOutput(result.to_json(), show, 0 if result.problem is None else 1, result.problem)


def _dual_path() -> CommandOutput:
    """Run three policies on emulated hosts. Show a table and the bandwidth of the links over time."""
    from rich.console import Console

    from kvstore.netlab.lab import available
    from kvstore.replay.dual_demo import DECODE, PREFILL, DualDemoPlan, loads_of, run_dual_demo, spark
    from kvstore.replay.progress import progress

    missing = available()
    if missing is not None:
        raise click.ClickException(
            f"{missing}\nThe demo puts real daemons on emulated hosts with two rate-limited links each: it needs Linux, root (or "
            "CAP_SYS_ADMIN and CAP_NET_ADMIN) and iproute2, e.g. `sudo .venv/bin/kvstore demo --dual-path`. "
            "`kvstore simulate` computes the same without them."
        )
    plan = DualDemoPlan()
    with orderly_exit(), progress("demo", loads_of(plan)) as report:
        results = run_dual_demo(plan, output.note, lambda done: report(done, ""))

    def show() -> None:
        console = Console(highlight=False)
        console.print(dual_table(plan, results))
        console.print("storage links while one prompt is loaded alone, over time:")
        for one in results:
            for host in (PREFILL, DECODE):
                console.print(f"  {one.policy:13s} {host:10s} {spark(one.links[host], plan.snic_mbit)}")

    problem = "wrong bytes were loaded" if any(one.wrong_bytes for one in results) else None
    return CommandOutput({"items": [asdict(one) for one in results]}, show, 0 if problem is None else 1, problem)


def dual_table(plan: DualDemoPlan, results: Sequence[PolicyResult]) -> Table:
    """Build a table that compares each policy with the first one. It fits 80 columns."""
    from rich.table import Table

    base = statistics.median(results[0].single_s)
    table = Table(
        title=f"one prompt of {plan.prompt_bytes >> 20} MiB, and {plan.in_flight} at once; storage links of "
        f"{plan.snic_mbit:g} Mbit/s"
    )
    for name in ("policy", "alone", "gain", f"{plan.in_flight} at once", "gain", "over\ndecode", "wrong\nbytes"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for one in results:
        alone = statistics.median(one.single_s)
        total = sum(one.paths.values())
        table.add_row(
            one.policy,
            f"{alone:.2f} s",
            f"{base / alone:.2f} ×",
            f"{one.busy_bytes_per_s / 1e6:.0f} MB/s",
            f"{one.busy_bytes_per_s / results[0].busy_bytes_per_s:.2f} ×",
            f"{one.paths.get('decode', 0) / total:.0%}",
            str(one.wrong_bytes),
        )
    return table
