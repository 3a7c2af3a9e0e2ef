"""The parts of ``simulate.md``: each is made by a script of its own and leaves the other as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

TABLE: Final = Path(__file__).resolve().parent / "simulate.md"
LAB: Final = "# The simulator against the network lab"
"""Begins the second part, and the file's only line of this text."""


def write(part: Literal["paper", "lab"], text: str) -> None:
    """Puts a part in the place of what it was.

    Args:
        part: which; the one of the paper comes first.
        text: that of the lab begins with ``LAB``.
    """
    before, _, after = (TABLE.read_text(encoding="utf-8") if TABLE.exists() else "").partition(LAB)
    paper, lab = (text, LAB + after if after else "") if part == "paper" else (before, text)
    TABLE.write_text("\n\n".join(one.strip("\n") for one in (paper, lab) if one) + "\n", encoding="utf-8")
