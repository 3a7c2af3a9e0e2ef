"""Framing of server-sent events: pure. Splits a stream into complete events, so that an error event can follow at any time."""

from __future__ import annotations

import re
from typing import Final

MAX_EVENT_BYTES: Final = 64 << 20
"""Largest event. An incomplete event is held in memory."""
_DONE: Final = re.compile(rb"^data: ?\[DONE\]\s*$", re.MULTILINE)
"""Last event of OpenAI's streams."""
_SEPARATORS: Final = (b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r\r")


class EventTooLongError(Exception):
    """An event exceeds ``MAX_EVENT_BYTES``."""


class EventStream:
    r"""Collects pieces of a stream and returns complete events.

    Example:
        >>> events = EventStream()
        >>> events.feed(b"data: 1")
        b''
        >>> events.feed(b"\n\ndata: [DO")
        b'data: 1\n\n'
        >>> events.feed(b"NE]\n\n"), events.terminated
        (b'data: [DONE]\n\n', True)
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self._done = False

    @property
    def terminated(self) -> bool:
        """Whether the last event arrived, with the empty line after it."""
        return self._done

    @property
    def may_end(self) -> bool:
        """Whether the stream may end here: the last event arrived, perhaps without the empty line after it."""
        return self._done or _DONE.search(self._held) is not None

    def feed(self, piece: bytes) -> bytes:
        """Add a piece of the stream.

        Returns:
            All events and comments that are complete now.

        Raises:
            EventTooLongError: the incomplete event is too long.
        """
        held = self._held
        seam = max(0, len(held) - 3)  # a separator may span two pieces
        held += piece
        end = max(at + len(mark) if (at := held.rfind(mark, seam)) >= 0 else 0 for mark in _SEPARATORS)
        ready = bytearray(held[:end])
        del held[:end]
        self._done = self._done or _DONE.search(ready) is not None
        while held[:1] == b":" and (line := held.find(b"\n") + 1):  # a comment keeps the connection alive; it needs no event
            ready += held[:line]
            del held[:line]
        if len(held) > MAX_EVENT_BYTES:
            raise EventTooLongError
        return bytes(ready)

    def rest(self) -> bytes:
        """Return the bytes after the last complete event."""
        return bytes(self._held)
