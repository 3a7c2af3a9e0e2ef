"""Ports for daemons that a test starts on addresses of its choice."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Sequence

BELOW_EPHEMERAL = range(20_000, 32_000)
"""The kernel gives none of these to an outgoing connection between the choice of a port and the daemon's start."""


BUS_OFFSET = 10_000
"""A Valkey server opens a second port for the other servers of its cluster, by default this far above its own."""


def free_valkey_ports(count: int) -> list[int]:
    """Choose ports of this machine for Valkey servers, whose second ports are free too."""
    found: set[int] = set()
    while len(found) < count:
        (port,) = free_ports(1)
        if port + BUS_OFFSET < BELOW_EPHEMERAL.stop:
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + BUS_OFFSET)):
                found.add(port)
    return sorted(found)


def free_ports(count: int, hosts: Sequence[str] = ("127.0.0.1",)) -> list[int]:
    """Choose ports that are free on all of the hosts."""
    found: set[int] = set()
    while len(found) < count:
        port = random.choice(BELOW_EPHEMERAL)
        with contextlib.suppress(OSError), contextlib.ExitStack() as taken:
            for host in hosts:
                taken.enter_context(socket.create_server((host, port)))
            found.add(port)
    return sorted(found)
