"""Markdown made and read: tables, text that is meant literally, fenced blocks."""

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
        language: the first word behind the ticks.
        title: what stands above it; empty: nothing does.
        text: what is in it, with a line break at its end.
        line: number of its first line in the file, from 1.
    """

    language: str
    title: str
    text: str
    line: int


def plain(text: str) -> str:
    """Text as it is, on one line: nothing in it is markup but code in backticks and emphasis."""
    return "".join(
        (part if part[0] == "*" else code(part.strip("`"))) if number % 2 else _SPECIAL.sub(r"\\\1", part)
        for number, part in enumerate(_MARKUP.split(" ".join(text.split())))
    )


def code(text: str) -> str:
    """Text as code in a line or a cell."""
    ticks = "``" if "`" in text else "`"
    return f"{ticks}{text}{ticks}".replace("|", "\\|") if text else ""


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are markup already."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def fenced(text: str, language: str = "text") -> str:
    """A block of code."""
    return f"```{language}\n{text.rstrip()}\n```\n"


def fences(text: str) -> Iterator[Fence]:
    """The fenced blocks of a page, in their order.

    Raises:
        ValueError: one has no end.
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
            raise ValueError(f"line {number}: a fenced block without an end")
        language, _, rest = opened["info"].strip().partition(" ")
        title = _TITLE.search(rest)
        yield Fence(language, title[1] if title else "", "".join(f"{each}\n" for each in inside), number)


def outside_fences(text: str) -> Iterator[tuple[str, bool]]:
    """Each line with its line break, and whether it stands outside of fenced blocks."""
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
