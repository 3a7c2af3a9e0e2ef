"""Write tables and literal text in Markdown, and read fenced blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

_SPECIAL: Final = re.compile(r"([\\*_<>\[\]{}|#])")
_MARKUP: Final = re.compile(r"(``.+?``|`[^`]+`|(?<![\w*])\*\w[\w -]*\*(?![\w*]))")
"""Code and emphasis."""
_FENCE: Final = re.compile(r"(?P<indent> *)(?P<ticks>```+)(?P<info>[^`\n]*)")
_TITLE: Final = re.compile(r'title="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Fence:
    """A fenced block.

    Attributes:
        language: the first word after the ticks.
        title: the caption; empty if there is none.
        text: the content, with a final line break.
        line: number of its first line in the file, from 1.
    """

    language: str
    title: str
    text: str
    line: int


def plain(text: str) -> str:
    """Escape text on one line, except code in backticks and emphasis."""
    return "".join(
        (part if part[0] == "*" else code(part.strip("`"))) if number % 2 else _SPECIAL.sub(r"\\\1", part)
        for number, part in enumerate(_MARKUP.split(" ".join(text.split())))
    )


def code(text: str) -> str:
    """Format text as code in a line or a cell."""
    ticks = "``" if "`" in text else "`"
    return f"{ticks}{text}{ticks}".replace("|", "\\|") if text else ""


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table. Cells are Markdown."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def fenced(text: str, language: str = "text") -> str:
    """Format a block of code."""
    return f"```{language}\n{text.rstrip()}\n```\n"


def fences(text: str) -> Iterator[Fence]:
    """Yield the fenced blocks of a page, in order.

    Raises:
        ValueError: a block is not closed.
    """
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        opened = _FENCE.fullmatch(line.rstrip())
        if opened is None:
            continue
        inside: list[str] = []
        for _, following in lines:
            if following.strip() == opened["ticks"]:
                break
            inside.append(following.removeprefix(opened["indent"]))
        else:
            raise ValueError(f"line {number}: the fenced block is not closed")
        language, _, rest = opened["info"].strip().partition(" ")
        title = _TITLE.search(rest)
        yield Fence(language, title[1] if title else "", "".join(f"{each}\n" for each in inside), number)


def outside_fences(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether it is outside of fenced blocks."""
    ticks = ""
    for line in text.splitlines(keepends=True):
        opened = _FENCE.fullmatch(line.rstrip())
        if ticks:
            yield line, False
            if line.strip() == ticks:
                ticks = ""
        elif opened is not None:
            ticks = opened["ticks"]
            yield line, False
        else:
            yield line, True
