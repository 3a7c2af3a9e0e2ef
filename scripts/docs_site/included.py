"""Parts of other files of the repository in pages of the site, so that nothing is written twice.

``<!-- include: FILE -->`` includes a file, ``<!-- include: FILE ## Heading -->`` the section below a heading. Links in the
included text are rewritten: to the page that shows the linked file, or to the image. If no page shows a file, its path is shown.
A line ``In the repository: …`` below a directive tells readers of the repository where the text is. It is not on the site.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final

from docs_site.markdown import outside_fences

REPOSITORY: Final = Path(__file__).resolve().parents[2]
DOCS: Final = REPOSITORY / "docs"
FIGURES: Final = "figures"
"""Folder of the site for images from outside of ``docs``."""
UNRUN: Final = "Checked, not run"
"""Title of included commands that tests parse but do not run."""
PLACEHOLDER: Final = r"(?:\nIn the repository: [^\n]*)?$"
"""The line below a directive, for readers of the repository: the site has the text in its place."""
DIRECTIVE: Final = re.compile(r"^<!-- include: (?P<file>\S+?)(?: (?P<heading>#+ .+?))? -->" + PLACEHOLDER, re.MULTILINE)
_HEADING: Final = re.compile(r"(#+) (.+)")
_LINK: Final = re.compile(
    r"(?P<kept>^```.*?^```|``.+?``|`[^`\n]+`)|(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)
_OUTSIDE: Final = re.compile(r"[a-z][a-z0-9+.-]*:|#")
_BARE_FENCE: Final = re.compile(r"^```(sh|python|toml)$", re.MULTILINE)


def section(text: str, heading: str) -> str:
    """Return the text below a heading, up to the next heading of its level or above.

    Args:
        text: a Markdown file.
        heading: with its marks: ``## Draining a node``.

    Raises:
        LookupError: the heading does not exist.
    """
    depth = len(heading) - len(heading.lstrip("#"))
    found: list[str] | None = None
    for line, outside in outside_fences(text):
        mark = _HEADING.match(line) if outside else None
        if found is not None and mark is not None and len(mark[1]) <= depth:
            break
        if found is not None:
            found.append(line)
        elif mark is not None and line.strip() == heading:
            found = []
    if found is None:
        raise LookupError(f"no such heading: {heading}")
    return "".join(found).strip() + "\n"


def sources(page: Path) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield the files that a page includes, with the included text."""
    for found in DIRECTIVE.finditer(page.read_text(encoding="utf-8")):
        yield PurePosixPath(found["file"]), taken(found)


def taken(directive: re.Match[str]) -> str:
    """Return the text that a directive includes.

    Raises:
        FileNotFoundError, LookupError: the file or its heading does not exist.
    """
    text = (REPOSITORY / directive["file"]).read_text(encoding="utf-8")
    return text if directive["heading"] is None else section(text, directive["heading"])


def whole_files() -> dict[PurePosixPath, PurePosixPath]:
    """Map each completely included file to the page, below ``docs``, that shows it."""
    return {
        PurePosixPath(found["file"]): PurePosixPath(page.relative_to(DOCS).as_posix())
        for page in sorted(DOCS.rglob("*.md"))
        for found in DIRECTIVE.finditer(page.read_text(encoding="utf-8"))
        if found["heading"] is None
    }


def figures() -> dict[str, Path]:
    """Map site paths to images outside of ``docs``."""
    results = REPOSITORY / "benchmarks" / "results"
    return {f"{FIGURES}/{path.relative_to(results).as_posix()}": path for path in sorted(results.rglob("*.png"))}


def expand(markdown: str, page: PurePosixPath, needs: str = "") -> str:
    """Expand the includes of a page and rewrite their links.

    Args:
        markdown: source of the page.
        page: its path below ``docs``.
        needs: requirements of the included commands, for a note below the title; empty: no note.
    """
    shown = whole_files()

    def included(directive: re.Match[str]) -> str:
        text = _BARE_FENCE.sub(rf'```\1 title="{UNRUN}"', taken(directive))
        if needs and directive["heading"] is None:
            title, _, rest = text.partition("\n")
            text = f"{title}\n\n{note(needs)}\n{rest}"
        return relinked(text, PurePosixPath(directive["file"]), page, shown)

    pieces, end = [], 0
    for directive in DIRECTIVE.finditer(markdown):
        pieces += [relinked(markdown[end : directive.start()], "docs" / page, page, shown), included(directive)]
        end = directive.end()
    return "".join([*pieces, relinked(markdown[end:], "docs" / page, page, shown)])


def note(needs: str) -> str:
    """Return the note about included commands."""
    return (
        '!!! note "Commands on this page are checked, not run"\n'
        f"    They need {needs}. Tests hold every `kvstore` command, flag and setting shown to those that exist.\n"
    )


def relinked(text: str, source: PurePosixPath, page: PurePosixPath, shown: Mapping[PurePosixPath, PurePosixPath]) -> str:
    """Rewrite the links of ``source`` (a path in the repository) for ``page`` (a path below ``docs``)."""
    return _LINK.sub(partial(_relink, source, page, shown), text)


def _relink(source: PurePosixPath, page: PurePosixPath, shown: Mapping[PurePosixPath, PurePosixPath], link: re.Match[str]) -> str:
    if link["kept"] is not None or _OUTSIDE.match(link["target"]):
        return link[0]
    place, mark, anchor = link["target"].partition("#")
    path = PurePosixPath(os.path.normpath(source.parent / place))
    if not (REPOSITORY / path).exists():
        raise FileNotFoundError(f"{source} links to {link['target']}, which does not exist")
    if path.parts[0] == "docs":
        target = path.relative_to("docs")
    elif path in shown:
        target = shown[path]
    elif path.suffix == ".png":
        target = FIGURES / path.relative_to("benchmarks/results")
    else:
        name = f"`{path}`"
        return name if link["text"].strip("`/") in str(path) else f"{link['text']} ({name})"
    return f"{link['image']}[{link['text']}]({os.path.relpath(target, page.parent)}{mark}{anchor})"
