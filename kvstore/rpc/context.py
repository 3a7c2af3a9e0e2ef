"""Metadata of a call that a server passes on when it calls another server for its caller."""

from __future__ import annotations

from typing import Any, Final

_OF_THE_CONNECTION: Final = ("user-agent", "grpc-", ":")
"""Beginnings of the metadata keys that each connection sets itself."""


def passed_on(context: Any) -> list[tuple[str, str | bytes]]:  # noqa: ANN401  # generic in gRPC's types
    """The metadata of a call without those of its connection: token, request id, trace."""
    return [(key, value) for key, value in context.invocation_metadata() or () if not key.startswith(_OF_THE_CONNECTION)]
