"""Web page of the admin server: one document that contains its styles and scripts, assembled when the server starts.

The page sends requests to the REST API of this server only. Its Content-Security-Policy enforces this: browsers run only the
scripts and apply only the styles whose digests it names, and never parse strings as markup (Trusted Types). Names in the store
therefore cannot inject markup.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from kvstore.health.codes import CODES

PATH: Final = "/"
HEALTH_PAGES: Final = {f"/{code.docs}": code.page for code in CODES.values()}
"""Path -> text of the documentation of each health code, to which findings link. Published documentation does not exist yet."""
_SCRIPTS: Final = (
    "base/dom.js", "base/figures.js", "base/charts.js", "base/server.js", "base/history.js", "actions/dialogs.js",
    "views/namespaces.js", "views/nodes.js", "views/shards.js", "views/health.js", "views/node.js", "views/history.js",
    "views/loads.js", "views/tenants.js", "views/explorer.js", "actions/checks.js", "actions/orders.js", "main.js",
)  # fmt: skip
"""Script files in load order: each uses declarations of the previous ones. They run as one script."""


class WebPage:
    """The page's document and its response headers."""

    def __init__(self) -> None:
        folder = files(__package__)
        style = (folder / "page.css").read_text(encoding="utf-8")
        parts = "\n".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
        script = f'(() => {{\n"use strict";\n{parts}\n}})();\n'
        assert "</" not in script.replace("</svg>", "")
        assert "</" not in style
        body = (folder / "page.html").read_text(encoding="utf-8")
        self._document = body.replace("/* styles */", style, 1).replace("/* scripts */", script, 1)
        self._headers = {
            "content-security-policy": "; ".join(
                (
                    "default-src 'none'",
                    f"script-src {_digest(script)}",
                    f"style-src {_digest(style)}",
                    "connect-src 'self'",
                    "img-src data:",
                    "base-uri 'none'",
                    "form-action 'none'",
                    "frame-ancestors 'none'",
                    "require-trusted-types-for 'script'",
                    "trusted-types 'none'",
                )
            ),
            "cross-origin-opener-policy": "same-origin",
            "referrer-policy": "no-referrer",
        }

    async def show(self) -> Response:
        """Respond with the document."""
        return Response(self._document, headers=self._headers, media_type="text/html")


async def show_health_page(request: Request) -> Response:
    """Respond with the documentation of a health code, as Markdown."""
    return PlainTextResponse(HEALTH_PAGES[request.url.path], headers={"cache-control": "private, max-age=3600"})


def _digest(text: str) -> str:
    """Return the source expression of an inline script or style for the Content-Security-Policy."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
