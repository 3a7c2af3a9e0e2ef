"""The client's side of a request: writes with a timeout per piece, so that a client that stops reading is disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from starlette.types import Message, Receive, Send

PIECE_BYTES: Final = 16 << 10
"""Largest write. Each has its own timeout, so that a client may read a long response slowly."""
RawHeaders = Iterable[tuple[bytes, bytes]]


class ClientStalledError(Exception):
    """The client stopped reading. Handled within the proxy; no response is possible."""


class ClientConnection:
    """Response to one client.

    Args:
        send: ASGI's send function.
        timeout_s: timeout of each write.
    """

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self.started = False
        """Whether status and headers were sent."""

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Send status and headers."""
        self.started = True
        await self._write({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, content: bytes, *, last: bool = False) -> None:
        """Send a part of the body."""
        for start in range(0, max(1, len(content)), PIECE_BYTES):
            piece, more = content[start : start + PIECE_BYTES], start + PIECE_BYTES < len(content)
            await self._write({"type": "http.response.body", "body": piece, "more_body": more or not last})

    async def respond(self, status: int, headers: RawHeaders, content: bytes) -> None:
        """Send a whole response."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(content))])
        await self.write(content, last=True)

    async def _write(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            raise ClientStalledError from None


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
