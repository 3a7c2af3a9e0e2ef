"""What MkDocs calls while it builds the site (``mkdocs.yml``): fills pages with parts of other files and generated tables."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from docs_site import command_line, configuration, diagrams, errors, included, metrics, protocol, python_sdk, rest
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

GENERATED: Final[Mapping[str, Callable[[], str]]] = {
    "command line": command_line.pages,
    "configuration": configuration.pages,
    "errors": errors.pages,
    "metrics": metrics.pages,
    "protocol": protocol.pages,
    "python": python_sdk.client,
    "python beside": python_sdk.beside,
    "rest": rest.pages,
}
"""What ``<!-- generated: NAME -->`` stands for."""
_DIRECTIVE: Final = re.compile(r"^<!-- generated: (.+?) -->$", re.MULTILINE)


_DESCRIBED: Final = (
    "kvstore/__init__.py",
    "kvstore/core",
    "kvstore/process",
    *(
        f"clients/kvclient/{name}"
        for name in ("*.py", "device", "events", "hbm", "load", "memory", "nodes", "scheduling", "store")
    ),
)
"""Packages with public names. Parsing all packages would take as long as all the rest."""
_sources = tempfile.TemporaryDirectory(prefix="kvstore-docs-")


@event_priority(100)  # before mkdocstrings reads it
def on_config(config: MkDocsConfig) -> None:
    """Has the described packages parsed alone, out of a folder with links to them."""
    for pattern in _DESCRIBED:
        for path in included.REPOSITORY.glob(pattern):
            link = Path(_sources.name) / path.relative_to(included.REPOSITORY).as_posix().removeprefix("clients/")
            link.parent.mkdir(exist_ok=True)
            if not link.exists():  # built again, while somebody looks (``mkdocs serve``)
                link.symlink_to(path)
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [_sources.name]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the plots of the benchmarks."""
    for place, path in included.figures().items():
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001  # as MkDocs calls it
    """The page with what it includes and what is generated for it.

    Raises:
        PluginError: it names what does not exist.
    """
    needs = str(page.meta.get("needs", ""))
    try:
        text = included.expand(markdown, PurePosixPath(page.file.src_uri), needs)
        text = diagrams.as_images(text, PurePosixPath(page.file.src_uri))
        return _DIRECTIVE.sub(lambda found: GENERATED[found[1]](), text)
    except (LookupError, OSError) as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error
