"""The two parts of ``simulate.md``. A separate script writes each part and keeps the other."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

TABLE: Final = Path(__file__).resolve().parent / "simulate.md"
LAB: Final = "# The simulator against the network lab"
"""First line of the second part; no other line has this text."""


def write(part: Literal["paper", "lab"], text: str) -> None:
    """Replace one part of the file.

    Args:
        part: name of the part; the paper's part comes first.
        text: new text; that of the lab starts with ``LAB``.
    """
    before, _, after = (TABLE.read_text(encoding="utf-8") if TABLE.exists() else "").partition(LAB)
    paper, lab = (text, LAB + after if after else "") if part == "paper" else (before, text)
    TABLE.write_text("\n\n".join(one.strip("\n") for one in (paper, lab) if one) + "\n", encoding="utf-8")
