"""MkDocs hooks (``mkdocs.yml``) that fill pages with parts of other files and with generated tables."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from docs_site import command_line, configuration, diagrams, errors, included, metrics, models, protocol, python_sdk, rest
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from kvstore import __version__

GENERATED: Final[Mapping[str, Callable[[], str]]] = {
    "command line": command_line.pages,
    "configuration": configuration.pages,
    "errors": errors.pages,
    "metrics": metrics.pages,
    "models": models.pages,
    "protocol": protocol.pages,
    "python": python_sdk.client,
    "python beside": python_sdk.beside,
    "rest": rest.pages,
}
"""Generators of ``<!-- generated: NAME -->``."""
_DIRECTIVE: Final = re.compile(r"^<!-- generated: (.+?) -->" + included.PLACEHOLDER, re.MULTILINE)
_TITLE: Final = re.compile(r"^# .+$", re.MULTILINE)


_DESCRIBED: Final = (
    "kvstore/__init__.py",
    "kvstore/core",
    "kvstore/process",
    *(
        f"clients/kvclient/{name}"
        for name in ("*.py", "call", "device", "events", "gds", "hbm", "load", "memory", "nodes", "scheduling", "store")
    ),
)
"""Packages with public names. Parsing all packages would double the time of a build."""
_sources = tempfile.TemporaryDirectory(prefix="kvstore-docs-")


@event_priority(100)  # before mkdocstrings reads the configuration
def on_config(config: MkDocsConfig) -> None:
    """Show the version below each page, and let mkdocstrings parse only the described packages, through a folder of links."""
    config.copyright = f"kvstore {__version__} · Apache-2.0"
    for pattern in _DESCRIBED:
        for path in included.REPOSITORY.glob(pattern):
            link = Path(_sources.name) / path.relative_to(included.REPOSITORY).as_posix().removeprefix("clients/")
            link.parent.mkdir(exist_ok=True)
            if not link.exists():  # `mkdocs serve` builds again
                link.symlink_to(path)
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [_sources.name]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the plots of the benchmarks."""
    for place, path in included.figures().items():
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001  # as MkDocs calls it
    """Expand a page: included files, diagrams and generated tables.

    Raises:
        PluginError: the page names a file, heading or diagram that does not exist.
    """
    needs = str(page.meta.get("needs", ""))
    try:
        text = included.expand(markdown, PurePosixPath(page.file.src_uri), needs)
        if rows := models.engine_rows(PurePosixPath(page.file.src_uri)):
            text = _TITLE.sub(lambda found: f"{found[0]}\n\n{rows}", text, count=1)
        text = diagrams.as_images(text, PurePosixPath(page.file.src_uri))
        return _DIRECTIVE.sub(lambda found: GENERATED[found[1]](), text)
    except (LookupError, OSError) as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error
