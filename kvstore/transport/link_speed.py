"""How fast the link is that carries an address, as the kernel says: the prior of everything that is planned over it."""

from __future__ import annotations

import functools
import ipaddress
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

from kvstore.core.errors import Unsupported
from kvstore.transport.link_counters import interface_of, speed_of

RESOLVE_S = 1.0
"""How long the lookup of this host's own name may take."""
_NET = Path("/sys/class/net")
_STACKED = ("bond", "vlan")
"""Devices without hardware of their own, whose speed is that of what lies below."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """A link."""

    interface: str
    bytes_per_s: float


def link_speed(host: str, advertised: str | None = None) -> LinkSpeed | None:
    """The link by which others reach an address of this host.

    Args:
        host: the address listened on; one that means all of them is not asked.
        advertised: what others are told instead: an address, or a name that is looked up within a second.

    Returns:
        Interface and rate; None: the kernel does not say, or the interface is no hardware (loopback, veth).
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


def is_hardware(interface: str, net: Path = _NET) -> bool:
    """Whether an interface is a NIC, or lies on one: others report a speed that means nothing (a veth says 10 Gbit/s)."""
    folder = net / interface
    if (folder / "device").exists():
        return True
    try:
        lines = (folder / "uevent").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return False
    return any(line == f"DEVTYPE={kind}" for line in lines for kind in _STACKED)


def _address_of(name: str) -> str | None:
    """An address as it is; the first one of a name; None for one that means all addresses."""
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

    # getaddrinfo takes no deadline: a resolver that does not answer keeps this thread, and nobody else
    thread = threading.Thread(target=look, name="kvstore-resolve", daemon=True)
    thread.start()
    thread.join(RESOLVE_S)
    return found[0] if found else None
