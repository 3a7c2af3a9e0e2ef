"""``kvstore bench``: the benchmarks of a source checkout."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

import kvstore
from kvstore.cli.support import output, result
from kvstore.cli.support.help import Command
from kvstore.cli.support.result import CommandOutput

_LIST_S: Final = 60.0
_STDERR: Final = 2
_VERDICTS: Final = {True: "met", False: "not met", None: ""}


@click.command(cls=Command, context_settings={"ignore_unknown_options": True})
@click.argument("names", nargs=-1)
@click.option("--list", "only_list", is_flag=True, help="List the benchmarks and run none.")
@click.option("--quick", is_flag=True, help="Fewer and smaller measurements.")
@result.prints
def bench(*, names: tuple[str, ...], only_list: bool, quick: bool) -> CommandOutput:
    """Run benchmarks by name, or without names those of the store itself, and build the table of their records.

    They are in benchmarks/ of a source checkout, not in the installed package. Progress goes to standard error, the measured
    figures to standard output. JSON: items, the records that the run added to benchmarks/results, or with --list the
    benchmarks, each with name and summary.

    Examples:
      kvstore bench --list
      kvstore bench --quick dram_hit tcp_load
      kvstore bench --quick dram_hit -o json | jq '.items[].median'
    """
    folder = benchmark_folder()
    known = benchmarks(folder)
    if only_list:
        items = [{"name": name, "summary": summary} for name, summary in known.items()]
        return result.table({"items": items}, ("benchmark", "measures"), list(known.items()))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.UsageError(f"no benchmark '{unknown[0]}'; there are: {', '.join(known)}")
    command = [sys.executable, str(folder / "run_all.py")]
    if names:
        command += ["--only", *names]
    if quick:
        command.append("--quick")
    output.note(_ahead(len(names), quick=quick, folder=folder))
    before = _sizes(folder)
    failed = subprocess.run(command, check=False, stdout=_STDERR).returncode != 0
    records = _added(folder, before)
    columns = ("figure", "parameters", "median", "unit", "target")
    shown = result.table({"items": records}, columns, map(_row, records))
    return replace(shown, exit_code=1, error="a benchmark failed") if failed else shown


def _sizes(folder: Path) -> dict[Path, int]:
    """Size of each file of records."""
    return {path: path.stat().st_size for path in sorted((folder / "results").glob("*.jsonl"))}


def _added(folder: Path, before: Mapping[Path, int]) -> list[dict[str, Any]]:
    """Read the records that were appended since the sizes were taken."""
    lines = []
    for path in _sizes(folder):
        with path.open(encoding="utf-8") as file:
            file.seek(before.get(path, 0))
            lines += file.read().splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def _row(record: Mapping[str, Any]) -> list[str]:
    parameters = " ".join(f"{name}={value}" for name, value in record["parameters"].items())
    return [record["figure"], parameters, f"{record['median']:.3f}", record["unit"], _VERDICTS[record["passed"]]]


def _ahead(count: int, *, quick: bool, folder: Path) -> str:
    """Message before the run: it takes minutes and writes files to the checkout."""
    if quick:
        takes = "--quick keeps each short"
    elif not count:
        takes = "they take up to 15 minutes on a machine of two cores, --quick is shorter"
    else:
        takes = "each takes from some seconds to several minutes, --quick is shorter"
    which = f"{count} benchmarks" if count else "the benchmarks of the store"
    return (
        f"Running {which}, one after the other: {takes}. Their records are added to {folder / 'results'}, and "
        "RESULTS.md beside it is regenerated. Ctrl-C stops."
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
