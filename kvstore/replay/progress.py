"""Progress for people: a bar on a terminal, a line now and then elsewhere."""

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

    def __call__(self, done: int, note: str) -> None:
        """``done`` requests are through; ``note`` is what they showed so far."""


def silent(done: int, note: str) -> None:
    """Reports nothing."""


@contextmanager
def progress(title: str, total: int, console: Console | None = None) -> Iterator[Report]:
    """Shows progress on standard error while inside."""
    console = console or Console(file=sys.stderr)
    if console.is_terminal:
        with _bar(title, total, console) as report:
            yield report
    else:
        yield _lines(title, total, console)


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
        yield lambda done, note: bar.update(task, completed=done, note=note)


def _lines(title: str, total: int, console: Console) -> Report:
    next_s = time.monotonic() + _LINE_EVERY_S

    def report(done: int, note: str) -> None:
        nonlocal next_s
        now_s = time.monotonic()
        if now_s >= next_s or done == total:
            next_s = now_s + _LINE_EVERY_S
            console.print(f"{title}: {done:,} of {total:,} requests, {note}", highlight=False, markup=False, soft_wrap=True)

    return report
