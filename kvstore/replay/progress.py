"""Progress for people: a bar on a terminal, otherwise occasional lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINE_EVERY_S = 5.0


class Report(Protocol):
    """Called after each request."""

    def __call__(self, done: int, note: str, total: int | None = None) -> None:
        """Report that ``done`` of ``total`` (None: unchanged) requests are finished; ``note`` describes the results to date."""


def silent(done: int, note: str, total: int | None = None) -> None:
    """Report nothing."""


@contextmanager
def progress(title: str, total: int, console: Console | None = None, unit: str = "requests") -> Iterator[Report]:
    """Show progress on standard error within the context."""
    console = console or Console(file=sys.stderr)
    if console.is_terminal:
        with _bar(title, total, console) as report:
            yield report
    else:
        yield _lines(title, total, console, unit)


@contextmanager
def _bar(title: str, total: int, console: Console) -> Iterator[Report]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=5) as bar:
        task = bar.add_task(title, total=total, note="")

        def report(done: int, note: str, total: int | None = None) -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield report


def _lines(title: str, first_total: int, console: Console, unit: str) -> Report:
    next_s = time.monotonic() + _LINE_EVERY_S
    shown = ""

    def report(done: int, note: str, total: int | None = None) -> None:
        nonlocal next_s, shown
        total = first_total if total is None else total
        now_s = time.monotonic()
        if now_s >= next_s or done == total:
            next_s = now_s + _LINE_EVERY_S
            text = f"{title}: {done:,} of {total:,} {unit}{note and f', {note}'}"
            if text != shown:
                shown = text
                console.print(text, highlight=False, markup=False, soft_wrap=True)

    return report
