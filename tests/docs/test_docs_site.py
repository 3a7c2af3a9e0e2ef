"""The site of ``make docs`` builds without warnings, is complete and loads nothing from other addresses."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import click
import pytest
from reference_texts import rest_operations

import kvclient
from kvstore.cli.app import root
from kvstore.config.model import Config
from kvstore.config.sources import leaves
from kvstore.core.errors import ErrorKind
from kvstore.observe.metric_definitions import METRICS

REPOSITORY = Path(__file__).resolve().parents[2]
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src", "object": "data"}
"""Elements that a browser loads automatically, with the attribute that has the address."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "--quiet", "build", "--site-dir", str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


class Page(HTMLParser):
    """Addresses that a browser loads automatically for a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.asks: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in LOADED and (address := given.get(LOADED[tag])):
            self.asks.append(address)


def words(site: Path, page: str) -> str:
    """Extract the text of a page."""
    return html.unescape(re.sub(r"<[^>]+>", "", (site / page).read_text(encoding="utf-8")))


def test_site_loads_nothing_from_other_addresses(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        for address in Page(page).asks:
            assert not re.match(r"[a-z]+:|//", address), f"{page.name} asks {address}"
            assert (page.parent / address.partition("#")[0].partition("?")[0]).exists() or page.name == "404.html", (
                f"{page}: {address}"
            )
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)\"']*", styles) == []


def test_site_has_no_unprocessed_directive(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not re.search(r"<!-- (?:include|generated):|<p>:::", page.read_text(encoding="utf-8")), page


def test_site_reference_is_complete(site: Path) -> None:
    python = words(site, "reference/python.html")
    assert [name for name in kvclient.__all__ if name not in python] == []
    commands = words(site, "reference/command-line.html")
    assert [name for name in root.list_commands(click.Context(root)) if f"kvstore {name}" not in commands] == []
    settings = words(site, "reference/configuration.html")
    assert [leaf.key for leaf in leaves(Config(), {}) if leaf.key not in settings] == []
    metrics = words(site, "reference/metrics.html")
    assert [name for name in METRICS if name not in metrics] == []
    assert [kind for kind in ErrorKind if kind not in words(site, "reference/errors.html")] == []
    for service, call in (("Metadata", "WatchBlocks"), ("Node", "Prepare"), ("NodeAdmin", "EvictBlocks")):
        assert f"{service}.{call}" in words(site, "reference/protocol.html")
    assert "/v1/nodes/{node_id}/drain" in words(site, "reference/rest.html")


# ---------------------------------------------------------------- search
@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, str]:
    """Title and text that the search of the site sees, in lower case, by page and heading."""
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    return {
        entry["location"]: html.unescape(re.sub(r"<[^>]+>", "", f"{entry['title']} {entry['text']}")).lower() for entry in entries
    }


@pytest.mark.parametrize(
    ("asked", "page"),
    [
        ("troubleshooting", "how-to/troubleshooting.html"),
        ("glossary", "reference/glossary.html"),
        ("backup", "how-to/backup.html"),
        ("disaster recovery", "how-to/backup.html"),
        ("upgrade", "how-to/upgrade.html"),
        ("roll back", "how-to/upgrade.html"),
        ("high availability", "explanation/high-availability.html"),
        ("concepts", "explanation/concepts.html"),
        ("versions", "reference/stability.html"),
        ("lmcache", "explanation/faq.html#lmcache"),
        ("mooncake", "explanation/faq.html#mooncake-store"),
        ("redis", "explanation/faq.html#redis"),
        ("offloading", "explanation/faq.html#vllms-own-offloading"),
        ("metrics and alerts", "how-to/three-hosts.html#metrics-and-alerts"),
        ("memory of a node", "how-to/size-a-cluster.html#memory-of-a-node-and-of-the-metadata-server"),
    ],
)
def test_search_finds_page(pages: dict[str, str], asked: str, page: str) -> None:
    first_words = pages[page][: len(asked) + 40]
    assert asked in first_words, "the words must be in the title, which the search ranks first"


def test_search_finds_every_reference_name(pages: dict[str, str]) -> None:
    def missing(page: str, names: list[str]) -> list[str]:
        text = " ".join(found for location, found in pages.items() if location.startswith(f"reference/{page}.html"))
        return [name for name in names if name.lower() not in text]

    assert missing("configuration", [leaf.key for leaf in leaves(Config(), {})]) == []
    assert missing("metrics", list(METRICS)) == []
    assert missing("errors", [kind.value for kind in ErrorKind]) == []
    operations = [f"{method} {path}" for method, path, _ in rest_operations()]
    assert missing("rest", operations) == []


def test_glossary_has_every_term_once(pages: dict[str, str]) -> None:
    rows = re.findall(r"^\| ([^|]+?) \| ", (REPOSITORY / "docs/reference/glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    terms = [term.strip("`").lower() for row in rows[2:] for term in row.split(", ")]
    assert terms, "the table is not read"
    assert sorted(set(terms)) == sorted(terms)
    assert [row.strip("`").lower() for row in rows[2:]] == sorted(row.strip("`").lower() for row in rows[2:])
    assert {"namespace", "block", "volume epoch", "cascade", "range digest", "admission gate", "cancel scope"} <= set(terms)
