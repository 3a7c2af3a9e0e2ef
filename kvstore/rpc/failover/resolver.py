"""Resolution of DNS names to the addresses of metadata servers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from kvstore.rpc.address import host_and_port
from kvstore.rpc.failover.addresses import MAX_SERVERS

Resolver = Callable[[str, int], Sequence[str]]
"""``resolver(host, port)``: IP addresses of a host. May block; raises ``OSError`` if there are none."""


def system_resolver(host: str, port: int) -> Sequence[str]:
    """Ask the system's resolver for the IP addresses of a host.

    Raises:
        OSError: the name is unknown, or the resolver does not answer.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [str(entry[4][0]) for entry in found]


def resolve(name: str, resolver: Resolver) -> list[str]:
    """Return the addresses of a ``host:port``, sorted, at most 16.

    Raises:
        OSError: see ``Resolver``.
    """
    host, port = host_and_port(name)
    return sorted({f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in resolver(host, port)})[:MAX_SERVERS]
