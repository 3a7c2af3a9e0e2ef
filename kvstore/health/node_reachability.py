"""Result of the probe of a silent node."""

from __future__ import annotations

from enum import Enum


class Reachability(Enum):
    """Result of connecting to a node whose heartbeats do not arrive."""

    NOT_PROBED = "not probed"
    """No probe has ended yet, or its address cannot be probed."""
    REFUSED = "refused"
    """The host answers, and nothing listens on the node's port."""
    NO_ANSWER = "no answer"
    """The connection is accepted, and the process does not respond."""
    UNREACHABLE = "unreachable"
    """The host does not answer, or cannot be routed to."""
    ANSWERS = "answers"
    """The process responds."""
