"""Contract: a source of block events for subscribers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Final

from kvproto.v1 import metadata_pb2 as pb


class EventSource(ABC):
    """Serves subscribers. Use on one event loop.

    Args:
        max_subscribers: maximum number of subscribers.
    """

    def __init__(self, max_subscribers: int) -> None:
        self.max_subscribers: Final = max_subscribers
        """Maximum number of subscribers."""

    @property
    @abstractmethod
    def subscribers(self) -> int:
        """Number of subscribers."""

    @abstractmethod
    def subscribe(self, request: pb.WatchBlocksRequest) -> AsyncGenerator[pb.WatchBlocksResponse, None]:
        """Messages, as long as the caller takes them.

        Raises:
            InvalidArgument: the request is malformed (raised by the call itself).
            CapacityExceeded: too many subscribers.
            Unavailable: the server is stopping, or the index does not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """End all subscriptions."""
