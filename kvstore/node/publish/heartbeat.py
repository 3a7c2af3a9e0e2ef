"""The contract of parts of a node that exchange state with the metadata server by heartbeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvproto.v1.metadata_pb2 import DrainNodeRequest, HeartbeatRequest, HeartbeatResponse, RegisterNodeResponse


class HeartbeatListener(Protocol):
    """A part that adds its state to heartbeats, and applies orders in responses. One thread at a time calls its methods."""

    def report(self, heartbeat: HeartbeatRequest) -> None:
        """Add the part's state to a heartbeat."""

    def on_heartbeat(self, response: HeartbeatResponse) -> None:
        """Apply the response to a heartbeat. Not called if the node must register again."""

    def on_registered(self, response: RegisterNodeResponse, *, new_index: bool) -> Sequence[DrainNodeRequest]:
        """Apply the response to a registration.

        Args:
            response: of the metadata server.
            new_index: the index was created after the last registration: the server has forgotten its orders.

        Returns:
            Orders to be repeated to the metadata server.
        """
