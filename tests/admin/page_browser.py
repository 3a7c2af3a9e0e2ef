"""The web page in a browser: open it, move in it, and wait for its texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

SOON_MS = 20_000


def scripted(change: Callable[[Any], Any], route: Any) -> None:
    """Answer with the changed response. A node that only the script knows is answered as if no node was named."""
    answer = route.fetch()
    if not answer.ok:
        answer = route.fetch(url=route.request.url.partition("?")[0])
    route.fulfill(response=answer, json=change(answer.json()))


@contextmanager
def opened(
    browser: Any, address: str, *, quietly: bool = True, script: Mapping[str, Any] | None = None, **how: Any
) -> Iterator[Any]:
    """Open a page. On exit, check that it contacted only its origin and, if ``quietly``, logged nothing to the console.

    ``script`` changes responses of the server: functions of a response's JSON, by path.
    """
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **how})
    context.set_default_timeout(SOON_MS)
    page = context.new_page()
    asked: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    for path, change in (script or {}).items():
        page.route(re.compile(rf"{path}(\?.*)?$"), partial(scripted, change))
    try:
        page.goto(f"http://{address}/")
        yield page
        assert len(asked) > 1
        assert [url for url in asked if not url.startswith((f"http://{address}/", "data:"))] == []
        if quietly:
            assert complaints == []
    finally:
        page.unroute_all(behavior="ignoreErrors")  # a response may still be under way
        context.close()


def show_node(page: Any, node_id: str) -> None:
    """Open the view of a node by its link."""
    show_all_nodes(page)
    page.locator("#nodes").get_by_role("link", name=node_id, exact=True).click()
    page.locator(f"#node article[data-key={node_id}]").wait_for()


def show_all_nodes(page: Any) -> None:
    if page.locator("#one").is_visible():
        page.get_by_role("link", name="All nodes").click()
    page.locator("#nodes tbody tr").first.wait_for()


def said(page: Any, where: str, text: str) -> None:
    """Wait until an element shows a text. On a timeout, fail with the text that it shows."""
    from playwright.sync_api import TimeoutError as PlaywrightTimeoutError  # imported here, because playwright is optional

    try:
        page.locator(where).filter(has_text=text).first.wait_for()
    except PlaywrightTimeoutError:
        dialog = page.locator("dialog[open]").all_inner_texts()
        shown = page.locator("main").inner_text()
        pytest.fail(f"{where} says {page.locator(where).all_inner_texts()}, a dialog {dialog}, the page {shown}")


def focused(page: Any) -> str:
    """Return the label, the id or the text of the element that has the focus."""
    return str(page.evaluate("(e => e.getAttribute('aria-label') || e.id || e.textContent)(document.activeElement)"))
