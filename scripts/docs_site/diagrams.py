"""Mermaid diagrams of the documentation: GitHub draws them from their source, the site shows committed images.

A diagram is a fenced ``mermaid`` block whose first line is a comment (``%% ...``): the text for readers who do not see it. Its
image is named by a digest of the source, so that a changed diagram without a new image fails the build.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from docs_site.included import REPOSITORY

FOLDER: Final = PurePosixPath("images/diagrams")
_FENCE: Final = re.compile(r"^```mermaid\n%% ([^\n]+)\n(.+?)^```$", re.MULTILINE | re.DOTALL)


def image_name(source: str) -> str:
    """The file name of a diagram's image."""
    return f"{hashlib.sha256(source.encode()).hexdigest()[:12]}.svg"


def sources() -> Iterator[tuple[Path, str]]:
    """Each page with the source of each of its diagrams."""
    for page in sorted([REPOSITORY / "ARCHITECTURE.md", REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]):
        for found in _FENCE.finditer(page.read_text(encoding="utf-8")):
            yield page, found[2]


def as_images(markdown: str, page: PurePosixPath) -> str:
    """The page with an image in place of each diagram.

    Raises:
        LookupError: the image of a diagram is missing.
    """

    def image(found: re.Match[str]) -> str:
        name = image_name(found[2])
        if not (REPOSITORY / "docs" / FOLDER / name).exists():
            raise LookupError(f"the image of the diagram '{found[1]}' is missing: run python scripts/draw_diagrams.py")
        return f"![{found[1]}]({'../' * (len(page.parts) - 1)}{FOLDER / name}){{.diagram}}"

    return _FENCE.sub(image, markdown)
