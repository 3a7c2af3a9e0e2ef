"""Interface between a server connection and a one-sided transport (NIXL): the server side of ATTACH and FETCH."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from kvstore.core.errors import Unsupported
from kvstore.observe.counters import Counters
from kvstore.transport.contract import ReadPart
from kvstore.transport.tcp.frames import ReadFrame
from kvstore.transport.wire import PlainWire

SendPart = Callable[[int, ReadFrame, ReadPart, float], None]
"""``send_part(request_id, frame, part, deadline_s)``: sends one part of a read. The part may be released afterwards."""


class OneSidedFailed(Unsupported):
    """A one-sided transfer failed; the same blocks can be read over TCP. Late bytes may arrive until the fence."""


class OneSidedResponder(ABC):
    """The one-sided transfers of one server connection. All methods run in the connection's thread."""

    @abstractmethod
    def attach(self, request_id: int, header: bytes) -> bytes:
        """Return the answer to an ATTACH frame.

        Raises:
            BadFrame: the header is malformed.
            Unsupported: one-sided transfers with this reader are not possible.
        """

    @abstractmethod
    def fetch(self, header: bytes) -> tuple[ReadFrame, SendPart]:
        """Decode a FETCH frame: the read, and the function that sends its parts.

        ``SendPart`` raises ``OneSidedFailed`` if a transfer failed while both sides are in step, else as ``Wire``.

        Raises:
            BadFrame: the header is malformed.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what the connection used. Never raises."""


OneSidedFactory = Callable[[PlainWire, Counters], OneSidedResponder]
"""Makes the responder of one connection."""
