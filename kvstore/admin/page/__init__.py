"""The web page of the admin server: one document with its styles and scripts in it, put together when the server starts.

It asks the REST of its own server and nothing else, as its Content-Security-Policy has browsers see to: they run no script and
take no style but those whose digests it names, and make no markup of strings (Trusted Types), whatever the store's names hold.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Final

from starlette.responses import Response

PATH: Final = "/"
_SCRIPTS: Final = (
    "dom.js", "figures.js", "charts.js", "server.js", "cluster.js", "lists.js", "explorer.js", "dialogs.js", "checks.js",
    "orders.js", "tenants.js", "main.js",
)  # fmt: skip
"""In order: each uses what is declared in those before it, and all run as one."""


class WebPage:
    """The document, and what goes with it."""

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
        """The answer to a browser."""
        return Response(self._document, headers=self._headers, media_type="text/html")


def _digest(text: str) -> str:
    """As the policy names an inline script or style."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
