r"""Output of commands: tables on a terminal, plain aligned lines elsewhere.

Names of nodes, namespaces and models are untrusted. Unprintable characters are shown as escapes (``\x1b``), so that no name
reaches the terminal as a control sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Final

import click

from kvstore.health.quantities import show_size

NOTHING: Final = "-"
"""Placeholder of an empty cell, so that every line has the same number of columns."""
_LONGEST_CELL: Final = 40


def clean(text: str) -> str:
    """Convert a text to one line, with unprintable characters as escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def short(text: str) -> str:
    """Cut a name that is too long for a column."""
    return text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows below a heading.

    On a terminal, print a table whose cells wrap. Elsewhere, print one uncut line per row without colours, with at least two
    spaces between columns.

    Args:
        columns: names of the columns.
        rows: one cell per column; empty cells are shown as ``-``.
    """
    cells = [[clean(cell) or NOTHING for cell in row] for row in rows]
    if sys.stdout.isatty():
        _rich_table(columns, cells)
        return
    for line in aligned([[name.upper().replace(" ", "_") for name in columns], *cells]):
        click.echo(line)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines with at least two spaces between columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def facts(pairs: Iterable[tuple[str, str]]) -> None:
    """Print the properties of one object, one per line."""
    known = [(name, clean(value) or NOTHING) for name, value in pairs]
    width = max(len(name) for name, _ in known)
    for name, value in known:
        shown = click.style(f"{name:<{width}}", bold=True) if sys.stdout.isatty() else f"{name:<{width}}"
        click.echo(f"{shown}  {value}")


def line(text: str) -> None:
    """Print a line."""
    click.echo(clean(text))


def note(text: str) -> None:
    """Print a note on a listing to standard error."""
    click.echo(clean(text), err=True)


def size(count: float) -> str:
    """Format a number of bytes, rounded, without a space so that columns can be split."""
    return show_size(count, space=False)


def rate(bytes_per_s: float) -> str:
    """Format a bandwidth with decimal units, as in names of links."""
    for unit in ("B/s", "kB/s", "MB/s", "GB/s"):
        if bytes_per_s < 1000:
            return f"{bytes_per_s:.0f}{unit}" if unit == "B/s" else f"{bytes_per_s:.1f}{unit}"
        bytes_per_s /= 1000
    return f"{bytes_per_s:.2f}TB/s"


def duration(seconds: float) -> str:
    """Format a duration, rounded."""
    if seconds < 1:
        return f"{seconds * 1000:.1f}ms"
    if seconds < 120:
        return f"{seconds:.1f}s"
    if seconds < 7_200:
        return f"{seconds / 60:.0f}min"
    return f"{seconds / 3_600:.0f}h" if seconds < 172_800 else f"{seconds / 86_400:.0f}d"


def share(part: float, whole: float) -> str:
    """Format a percentage; empty if the total is 0."""
    return f"{100 * part / whole:.0f}%" if whole else ""


def _rich_table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(show_edge=False, pad_edge=False, box=None, header_style="bold")
    for name in columns:
        made.add_column(name, overflow="fold")
    for row in cells:
        made.add_row(*(Text(cell) for cell in row))
    Console().print(made)
