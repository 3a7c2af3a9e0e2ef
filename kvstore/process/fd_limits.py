"""File descriptors: what a server that anybody may connect to runs out of first.

A process is lent few by default (1,024 on most systems), and may take more for itself. Of what it has, gRPC's connections on one
address get a share: whoever opens idle ones without end must leave enough for the other doors, for files and for the store's
own connections.
"""

from __future__ import annotations

import logging
import resource
from typing import Final

log = logging.getLogger(__name__)

MOST: Final = 1 << 20
"""More is of no use, and systems without a limit would have us ask for billions."""
SHARE: Final = 4
"""Connections on one gRPC address take at most this fraction (1/n) of the process's descriptors."""
LEAST_CONNECTIONS: Final = 64


def raise_limit() -> int:
    """Takes as many descriptors as this process may have. Called once at the start of a daemon; its children inherit it.

    Returns:
        How many it may open now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # a sandbox may forbid it: the daemon works with what it has
            log.warning("the limit of open files stays at %d: %s", soft, error)
        else:
            log.info("raised the limit of open files from %d to %d", soft, wanted)
    return limit()


def limit() -> int:
    """Descriptors that this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)


def connections_allowed() -> int:
    """Connections that one gRPC address may have."""
    return max(LEAST_CONNECTIONS, limit() // SHARE)
