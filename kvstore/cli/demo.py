"""``kvstore demo``: the store at work, in half a minute."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kvstore.cli import parameters
from kvstore.cli.help import Command
from kvstore.cli.options import with_quiet_config
from kvstore.cli.signals import orderly_exit
from kvstore.core.config import Config


@click.command(cls=Command)
@click.option("--sessions", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Agent sessions.")
@click.option("--turns", type=click.IntRange(1, 10_000), default=60, show_default=True, help="Longest session, in turns.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Of everything drawn.")
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path), help="Where volumes go (default: temporary).")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=parameters.result_file,
    help="Writes the result; - is stdout.",
)
@with_quiet_config
def demo(_config: Config, *, sessions: int, turns: int, seed: int, data_dir: Path | None, json_file: Path | None) -> None:
    """Starts a small store, runs an agentic workload on it, and checks every loaded byte.

    The store is real: a metadata server, a prefill host, a decode host and a storage host, each a process of its own, over
    sockets, shared memory and files of this machine. The workload is generated from published statistics of production
    agents. Everything is removed at the end.

    Examples:
      kvstore demo
      kvstore demo --sessions 50 --json -

    Exits with 1 if any byte was wrong, or if hits are impossible.
    """
    from rich.console import Console

    from kvstore.replay.demo import DemoPlan, read_turns, run_demo
    from kvstore.replay.progress import progress
    from kvstore.replay.report import print_summary, tally_rows

    plan = DemoPlan(sessions=sessions, max_turns=turns, seed=seed)
    to_stdout = json_file == Path("-")
    console = Console(stderr=to_stdout)
    console.print("starting a metadata server, a prefill host, a decode host and a storage host …", highlight=False)
    with orderly_exit(), progress("demo", len(read_turns(plan)[0])) as report:
        result = run_demo(plan, data_dir, report)
    rows = tally_rows(result.tally, result.seconds)
    rows["hits, unlimited store"] = f"{result.possible_hits:,}"
    print_summary("kvstore demo", rows, console)
    if json_file is not None:
        text = json.dumps(result.to_json(), indent=2)
        if to_stdout:
            click.echo(text)
        else:
            json_file.write_text(text + "\n")
    if result.problem is not None:
        raise click.ClickException(result.problem)
