r"""What commands print: tables on a terminal, plain aligned lines elsewhere, JSON where it is asked for.

Names come from outside: whatever cannot be printed is shown as its escape (``\x1b``), so that nothing that a node, a namespace
or a model is called reaches the terminal as a control sequence.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from pydantic import BaseModel

NOTHING: Final = "-"
"""In a column that has nothing to say, so that every line has as many columns."""
_LONGEST_CELL: Final = 40
_UNITS: Final = ("B", "KiB", "MiB", "GiB")


def clean(text: str) -> str:
    """A text of one line, with everything that is no printable character shown as its escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def short(text: str) -> str:
    """A name, cut where it would make every row of a table as wide as itself."""
    return text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…"


def as_json(found: BaseModel | dict[str, object]) -> None:
    """Prints an answer as the REST gives it, or plain data."""
    data = found if isinstance(found, dict) else found.model_dump(mode="json")
    click.echo(json.dumps(data, indent=2).replace("\x7f", "\\u007f"))  # the one control character that JSON lets through


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints rows below a heading.

    On a terminal a table whose cells wrap; elsewhere a line each, columns apart by two spaces or more, nothing cut, no colours.

    Args:
        columns: their names.
        rows: cells, as many in each as there are columns; empty ones are shown as ``-``.
    """
    cells = [[clean(cell) or NOTHING for cell in row] for row in rows]
    if sys.stdout.isatty():
        _rich_table(columns, cells)
        return
    for line in aligned([[name.upper().replace(" ", "_") for name in columns], *cells]):
        click.echo(line)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, columns apart by two spaces or more."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def facts(pairs: Iterable[tuple[str, str]]) -> None:
    """Prints what is known of one thing: a line each."""
    known = [(name, clean(value) or NOTHING) for name, value in pairs]
    width = max(len(name) for name, _ in known)
    for name, value in known:
        shown = click.style(f"{name:<{width}}", bold=True) if sys.stdout.isatty() else f"{name:<{width}}"
        click.echo(f"{shown}  {value}")


def line(text: str) -> None:
    """Prints a line."""
    click.echo(clean(text))


def note(text: str) -> None:
    """What goes with a listing, and is no line of it."""
    click.echo(clean(text), err=True)


def size(count: float) -> str:
    """A number of bytes, rounded for people; in one word, so that columns stay apart."""
    for unit in _UNITS:
        if count < 1024:
            return f"{count:.0f}{unit}" if unit == "B" else f"{count:.1f}{unit}"
        count /= 1024
    return f"{count:.2f}TiB"


def rate(bytes_per_s: float) -> str:
    """A bandwidth, as links are named: powers of ten."""
    for unit in ("B/s", "kB/s", "MB/s", "GB/s"):
        if bytes_per_s < 1000:
            return f"{bytes_per_s:.0f}{unit}" if unit == "B/s" else f"{bytes_per_s:.1f}{unit}"
        bytes_per_s /= 1000
    return f"{bytes_per_s:.2f}TB/s"


def duration(seconds: float) -> str:
    """A time, rounded for people."""
    if seconds < 1:
        return f"{seconds * 1000:.1f}ms"
    if seconds < 120:
        return f"{seconds:.1f}s"
    if seconds < 7_200:
        return f"{seconds / 60:.0f}min"
    return f"{seconds / 3_600:.0f}h" if seconds < 172_800 else f"{seconds / 86_400:.0f}d"


def share(part: float, whole: float) -> str:
    """Percent; nothing where there is no whole."""
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
