"""``kvstore bench``: the benchmarks of a source checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

import kvstore
from kvstore.cli.support.help import Command

_LIST_S = 60.0


@click.command(cls=Command, context_settings={"ignore_unknown_options": True})
@click.argument("names", nargs=-1)
@click.option("--list", "only_list", is_flag=True, help="List the benchmarks and run none.")
@click.option("--quick", is_flag=True, help="Fewer and smaller measurements.")
def bench(*, names: tuple[str, ...], only_list: bool, quick: bool) -> None:
    """Run benchmarks by name, or all of them, and build the table of their records.

    They are in benchmarks/ of a source checkout, not in the installed package.

    Examples:
      kvstore bench --list
      kvstore bench --quick dram_hit tcp_load
    """
    folder = benchmark_folder()
    known = benchmarks(folder)
    if only_list:
        width = max((len(name) for name in known), default=0)
        for name, summary in known.items():
            click.echo(f"{name:<{width}}  {summary}")
        return
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.UsageError(f"no benchmark '{unknown[0]}'; there are: {', '.join(known)}")
    command = [sys.executable, str(folder / "run_all.py")]
    if names:
        command += ["--only", *names]
    if quick:
        command.append("--quick")
    click.echo(_ahead(len(names) or len(known), whole=not names, quick=quick, folder=folder))
    if subprocess.run(command, check=False).returncode:
        raise click.ClickException("a benchmark failed")


def _ahead(count: int, *, whole: bool, quick: bool, folder: Path) -> str:
    """Message before the run: the suite runs for minutes and writes files to the checkout."""
    if quick:
        takes = "--quick keeps each short"
    elif whole:
        takes = "all of them take 15 to 30 minutes on a machine of two cores, --quick is shorter"
    else:
        takes = "each takes from some seconds to several minutes, --quick is shorter"
    return (
        f"Running {count} benchmarks, one after the other: {takes}. Their records are added to {folder / 'results'}, and "
        "RESULTS.md beside it is written anew. Ctrl-C stops."
    )


def benchmark_folder() -> Path:
    """Find the folder of the benchmarks.

    Raises:
        click.ClickException: not a source checkout.
    """
    folder = Path(kvstore.__file__).resolve().parent.parent / "benchmarks"
    if not (folder / "run_all.py").is_file():
        raise click.ClickException("benchmarks come with a source checkout, not with the installed package")
    return folder


def benchmarks(folder: Path) -> dict[str, str]:
    """List the scripts with the first line of their docstrings, as ``run_all.py --list`` does."""
    command = [sys.executable, str(folder / "run_all.py"), "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LIST_S)
    return dict(line.split("\t", 1) for line in listed.stdout.splitlines())
