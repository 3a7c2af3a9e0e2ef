"""The web page of a store without nodes, and of one node without load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from page_browser import opened, said, show_node
from page_store import browsing

from kvstore.embedded.cluster import LocalCluster, NodeSpec

WIDTHS = [360, 1280]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as made:
        yield made


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalCluster([], tmp_path_factory.mktemp("empty")) as cluster:
        yield cluster.start_admin().address


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalCluster([NodeSpec("host-1", dram_bytes=8 << 20)], tmp_path_factory.mktemp("single")) as cluster:
        yield cluster.start_admin().address


@pytest.mark.parametrize("width", WIDTHS)
def test_page_of_an_empty_store_says_what_is_missing(browser: Any, empty: str, width: int) -> None:
    with opened(browser, empty, viewport={"width": width, "height": 900}) as page:
        said(page, "#problems", "NO_NODES")
        said(page, "#nodes", "Start one on each host with `kvstore node`")
        said(page, "#ratio", "the ratio appears here within 10 s")
        said(page, "#lookup", "appears here within 10 s")
        said(page, "#throughput", "appear here within 10 s")
        said(page, "#evictions", "appears here within 10 s")
        said(page, "#slow", "No loads in the last minute")
        said(page, "#namespaces", "No namespace")
        said(page, "#tenants", "No tenant")
        assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("width", WIDTHS)
def test_page_of_one_idle_node_shows_no_load(browser: Any, single: str, width: int) -> None:
    with opened(browser, single, viewport={"width": width, "height": 900}) as page:
        said(page, "#problems", "No problems: 1 node answers")
        assert page.locator("#nodes td[data-label='p99 load']").all_inner_texts() == ["—"]
        assert page.evaluate("document.documentElement.scrollWidth") == width
        show_node(page, "host-1")
        said(page, "#node .head", "active")
        assert page.evaluate("document.documentElement.scrollWidth") == width
