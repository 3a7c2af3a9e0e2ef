"""Parts of other files of the repository in pages of the site, so that nothing is written twice.

A page says ``<!-- include: FILE -->`` for a whole file, or ``<!-- include: FILE ## Heading -->`` for what stands below a heading.
Links are made to fit the place where the text now stands: to the page that shows the file which a link names, to images, and
where the site does not show the file, its path is named.
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
"""Where images from outside of ``docs`` lie in the site."""
UNRUN: Final = "Checked, not run"
"""Stands above commands of included text: tests know that they exist, and do not run them."""
DIRECTIVE: Final = re.compile(r"^<!-- include: (?P<file>\S+?)(?: (?P<heading>#+ .+?))? -->$", re.MULTILINE)
_HEADING: Final = re.compile(r"(#+) (.+)")
_LINK: Final = re.compile(
    r"(?P<kept>^```.*?^```|``.+?``|`[^`\n]+`)|(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)
_OUTSIDE: Final = re.compile(r"[a-z][a-z0-9+.-]*:|#")
_BARE_FENCE: Final = re.compile(r"^```(sh|python|toml)$", re.MULTILINE)


def section(text: str, heading: str) -> str:
    """What stands below a heading, up to the next one that is not below it.

    Args:
        text: of a file.
        heading: with its marks: ``## Taking a node out``.

    Raises:
        LookupError: there is no such heading.
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
    """Files that a page includes, with the text that it takes of each."""
    for found in DIRECTIVE.finditer(page.read_text(encoding="utf-8")):
        yield PurePosixPath(found["file"]), taken(found)


def taken(directive: re.Match[str]) -> str:
    """The text that a directive names.

    Raises:
        FileNotFoundError, LookupError: there is no such file, or no such heading in it.
    """
    text = (REPOSITORY / directive["file"]).read_text(encoding="utf-8")
    return text if directive["heading"] is None else section(text, directive["heading"])


def whole_files() -> dict[PurePosixPath, PurePosixPath]:
    """Files that are shown whole -> the pages, below ``docs``, that show them."""
    return {
        PurePosixPath(found["file"]): PurePosixPath(page.relative_to(DOCS).as_posix())
        for page in sorted(DOCS.rglob("*.md"))
        for found in DIRECTIVE.finditer(page.read_text(encoding="utf-8"))
        if found["heading"] is None
    }


def figures() -> dict[str, Path]:
    """Images outside of ``docs`` that pages may show: place in the site -> file."""
    results = REPOSITORY / "benchmarks" / "results"
    return {f"{FIGURES}/{path.relative_to(results).as_posix()}": path for path in sorted(results.rglob("*.png"))}


def expand(markdown: str, page: PurePosixPath, needs: str = "") -> str:
    """A page with all that it includes, and with links that fit.

    Args:
        markdown: as the page is written.
        page: its path below ``docs``.
        needs: what commands of included text need to run, for a note below the title; empty: no note.
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
    """What a page of included commands says of them."""
    return (
        '!!! note "Commands on this page are checked, not run"\n'
        f"    They need {needs}. Tests hold every `kvstore` command, flag and setting shown to those that exist.\n"
    )


def relinked(text: str, source: PurePosixPath, page: PurePosixPath, shown: Mapping[PurePosixPath, PurePosixPath]) -> str:
    """Text of ``source`` with links that fit ``page``. Paths: of the repository, and below ``docs``."""
    return _LINK.sub(partial(_relink, source, page, shown), text)


def _relink(source: PurePosixPath, page: PurePosixPath, shown: Mapping[PurePosixPath, PurePosixPath], link: re.Match[str]) -> str:
    if link["kept"] is not None or _OUTSIDE.match(link["target"]):
        return link[0]
    place, mark, anchor = link["target"].partition("#")
    path = PurePosixPath(os.path.normpath(source.parent / place))
    if not (REPOSITORY / path).exists():
        raise FileNotFoundError(f"{source} links to {link['target']}, which is not there")
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
