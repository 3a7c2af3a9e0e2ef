"""File descriptor limits of a server.

The default soft limit is 1,024 on most systems; a process may raise it to the hard limit. gRPC's connections on one address get
a share of the limit, so that idle connections cannot use up the descriptors for other addresses, files and outgoing connections.
"""

from __future__ import annotations

import logging
import resource
from typing import Final

log = logging.getLogger(__name__)

MAX_DESCRIPTORS: Final = 1 << 20
"""More are not useful. Systems without a limit report billions."""
CONNECTIONS_SHARE: Final = 4
"""Connections on one gRPC address may use this fraction (1/n) of the descriptors."""
MIN_CONNECTIONS: Final = 64


def raise_limit() -> int:
    """Raise the soft limit as far as allowed. Call it once when a daemon starts; its children inherit the limit.

    Returns:
        The limit in effect.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < target:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (OSError, ValueError) as error:  # a sandbox may forbid it
            log.warning("open file limit not raised: %s (limit=%d)", error, soft)
        else:
            log.info("open file limit raised: %d -> %d", soft, target)
    return limit()


def limit() -> int:
    """Number of descriptors that this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MAX_DESCRIPTORS)


def connections_allowed() -> int:
    """Number of connections that one gRPC address may have."""
    return max(MIN_CONNECTIONS, limit() // CONNECTIONS_SHARE)
