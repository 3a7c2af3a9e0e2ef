"""Runbook of the alert rules, one section per alert, served at the path of their ``runbook_url``."""

from __future__ import annotations

import html
from collections.abc import Iterator
from importlib.resources import files
from typing import Final

from starlette.responses import HTMLResponse, Response

RUNBOOK: Final = "/docs/how-to/alerts.md"
"""Path on the admin server; alert rules name it relative to a base that the operator configures."""
_HEADERS: Final = {"content-security-policy": "default-src 'none'", "cache-control": "private, max-age=3600"}


class Runbook:
    """The runbook as HTML, whose headings are targets of links. Its Markdown is otherwise shown as it is."""

    def __init__(self) -> None:
        text = (files(__package__) / "alerts.md").read_text(encoding="utf-8")
        self._document = '<!doctype html><meta charset="utf-8"><title>When an alert fires</title>\n' + "\n".join(_elements(text))

    async def show(self) -> Response:
        """Respond with the runbook."""
        return HTMLResponse(self._document, headers=_HEADERS)


def _elements(text: str) -> Iterator[str]:
    """Yield the HTML of each paragraph and heading."""
    for block in text.strip().split("\n\n"):
        shown = html.escape(block)
        marks, _, title = shown.partition(" ")
        if set(marks) == {"#"}:
            yield f'<h{len(marks)} id="{title.lower()}">{title}</h{len(marks)}>'
        else:
            yield f"<p>{shown}</p>"
