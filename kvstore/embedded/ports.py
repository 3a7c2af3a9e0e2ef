"""Free ports of this machine."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final

LOOPBACK = "127.0.0.1"
TRIED_PORTS: Final = 100
_MOST_PORT: Final = 65_535


def free_port(host: str = LOOPBACK) -> int:
    """Find a port that no process listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def port_after(port: int, host: str = LOOPBACK) -> int:
    """Find the first port after ``port`` that no process listens on. Returns 0 if the next ``TRIED_PORTS`` are taken."""
    for candidate in range(port + 1, min(port + TRIED_PORTS, _MOST_PORT) + 1):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not block a port, as for a server
            probe.bind((host, candidate))
            return candidate
    return 0
