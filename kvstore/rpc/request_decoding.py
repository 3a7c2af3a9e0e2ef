"""Decoding of request messages. Undecodable bytes are rejected as an invalid argument.

gRPC alone would respond with ``UNKNOWN`` and log a traceback for each such request.
"""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.message import DecodeError

from kvstore.core.errors import InvalidArgument


class UnreadableRequest(InvalidArgument):
    """The bytes of a request are not a valid message. Sent as an ordinary ``InvalidArgument``."""


def decoder(deserialize: Callable[[bytes], object], *, streamed: bool) -> Callable[[bytes], object]:
    """A deserializer for a handler that the server's error interceptor wraps.

    Args:
        deserialize: the method's deserializer.
        streamed: whether the method has a stream of requests. The handler reads a stream, so the error is raised there and ends
            the handler. gRPC decodes a single request before the handler begins, so the error is returned in its place.
    """

    def decode(data: bytes) -> object:
        try:
            return deserialize(data)
        except DecodeError as error:
            refused = UnreadableRequest("the request is not a valid message of this method", request_bytes=len(data))
            if streamed:
                raise refused from error
            return refused

    return decode


def check_decoded(request: object) -> None:
    """Check a request before its handler begins.

    Raises:
        UnreadableRequest: the request could not be decoded.
    """
    if isinstance(request, UnreadableRequest):
        raise request
