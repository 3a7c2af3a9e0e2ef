"""Requests that are none: bytes that gRPC cannot take for the message of a method are refused as any wrong argument is.

Left to gRPC, each would be an ``UNKNOWN`` and a traceback in the log, as often as a stranger likes.
"""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.message import DecodeError

from kvstore.core.errors import InvalidArgument


class UnreadableRequest(InvalidArgument):
    """A request's bytes are not its message. On the wire it is an ``InvalidArgument`` as any other."""


def reading(deserialize: Callable[[bytes], object], *, streamed: bool) -> Callable[[bytes], object]:
    """A deserializer as a method's, for handlers that are guarded by the server's error interceptor.

    Args:
        deserialize: the method's.
        streamed: whether requests are a stream, which a handler reads: there the error is raised, and ends the handler. A single
            request is read before its handler begins, where errors are gRPC's: the error takes the request's place.
    """

    def read(data: bytes) -> object:
        try:
            return deserialize(data)
        except DecodeError as error:
            refused = UnreadableRequest("the request cannot be read: it is not this method's message", request_bytes=len(data))
            if streamed:
                raise refused from error
            return refused

    return read


def check_read(request: object) -> None:
    """For a handler's guard, before the handler.

    Raises:
        UnreadableRequest: what came could not be read.
    """
    if isinstance(request, UnreadableRequest):
        raise request
