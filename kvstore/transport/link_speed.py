"""The speed of the link that carries an address, as the kernel reports it. The planner starts from this figure."""

from __future__ import annotations

import functools
import ipaddress
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

from kvstore.core.errors import Unsupported
from kvstore.transport.addresses import interface_of

RESOLVE_S = 1.0
"""How long the lookup of this host's own name may take."""
_NET = Path("/sys/class/net")
_STACKED = ("bond", "vlan")
"""Stacked devices: they report the speed of the NICs below them."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """A link."""

    interface: str
    bytes_per_s: float


def link_speed(host: str, advertised: str | None = None) -> LinkSpeed | None:
    """Find the link by which other hosts reach an address of this host.

    Args:
        host: the address listened on; a wildcard address is skipped.
        advertised: the advertised address, or a name. A name is resolved within one second.

    Returns:
        Interface and rate; None if the kernel does not report a speed, or the interface is virtual (loopback, veth).
    """
    for name in (host, advertised):
        address = None if name is None else _address_of(name)
        if address is None:
            continue
        try:
            interface = interface_of(address)
        except (Unsupported, ValueError):
            continue
        speed = speed_of(interface) if is_hardware(interface) else None
        return None if speed is None else LinkSpeed(interface, speed)
    return None


def speed_of(interface: str, net: Path = _NET) -> float | None:
    """Bytes per second of an interface, as its driver reports it; None: it does not."""
    try:
        mbit = int((net / interface / "speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return mbit * 125_000.0 if mbit > 0 else None


def is_hardware(interface: str, net: Path = _NET) -> bool:
    """Whether an interface is a NIC or is stacked on one. Virtual interfaces report a meaningless speed (a veth: 10 Gbit/s)."""
    folder = net / interface
    if (folder / "device").exists():
        return True
    try:
        lines = (folder / "uevent").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return False
    return any(line == f"DEVTYPE={kind}" for line in lines for kind in _STACKED)


def _address_of(name: str) -> str | None:
    """Resolve a host to one address; None for a wildcard address or an unknown name."""
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return _resolved(name)
    return None if address.is_unspecified else str(address)


@functools.lru_cache(maxsize=16)
def _resolved(name: str) -> str | None:
    found: list[str] = []

    def look() -> None:
        try:
            found.extend(str(answer[4][0]) for answer in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError):
            return

    # getaddrinfo has no deadline: a resolver that does not answer blocks this thread only
    thread = threading.Thread(target=look, name="kvstore-resolve", daemon=True)
    thread.start()
    thread.join(RESOLVE_S)
    return found[0] if found else None
