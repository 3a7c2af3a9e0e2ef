"""Traffic of the NICs of a node's data planes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvstore.core.errors import Unsupported
from kvstore.transport.addresses import interface_of

_RECEIVED, _SENT = 0, 8
"""Columns of /proc/net/dev."""
_NET_DEV: Final = Path("/proc/self/net/dev")


class Links:
    """The NICs with the addresses of a node's data planes.

    Args:
        networks: address of the data plane per network. Wildcard addresses, and those without a known interface, are left out.
    """

    def __init__(self, networks: Mapping[str, str]) -> None:
        self._interfaces: dict[str, str] = {}
        for network, address in networks.items():
            with suppress(Unsupported, ValueError):
                self._interfaces[network] = interface_of(address.rpartition(":")[0].strip("[]"))

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Return bytes received and sent per network since the host booted, of all traffic."""
        known = _interface_bytes() if self._interfaces else {}
        return {network: known[interface] for network, interface in self._interfaces.items() if interface in known}


def _interface_bytes() -> dict[str, tuple[int, int]]:
    """Return bytes received and sent per interface of this network namespace."""
    found = {}
    for line in _NET_DEV.read_text().splitlines():
        name, colon, fields = line.partition(":")
        if colon:
            numbers = fields.split()
            found[name.strip()] = int(numbers[_RECEIVED]), int(numbers[_SENT])
    return found
