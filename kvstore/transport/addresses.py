"""Network addresses: parse and format ``host:port``, and find the network interface that holds an address."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvstore.core.errors import InvalidArgument, Unsupported

_SIOCGIFCONF = 0x8912
_IFCONF = struct.Struct("@iP")  # size and address of the buffer
_IFREQ = struct.Struct("@16sH2x4s16x")  # interface name, address family, port, IPv4 address
_MAX_ADDRESSES = 4_096
_IPV6_ADDRESSES = Path("/proc/self/net/if_inet6")


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[ipv6]:port``.

    Raises:
        InvalidArgument: the address has another form.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if (
        not colon
        or not host
        or set("[]") & set(host)
        or (":" in host) != bracketed
        or not port.isascii()
        or not port.isdigit()
        or int(port) > 65_535
    ):
        raise InvalidArgument("an address must be host:port or [ipv6]:port", address=address)
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def interface_of(address: str) -> str:
    """Return the name of the network interface that holds an IPv4 or IPv6 address of this host.

    Raises:
        ValueError: not an IP address.
        Unsupported: no interface holds it.
    """
    packed = ipaddress.ip_address(address).packed
    addresses = _ipv4_addresses() if len(packed) == 4 else _ipv6_addresses()
    with suppress(OSError):
        for name, found in addresses:
            if found == packed:
                return name
    raise Unsupported("no network interface holds this address", address=address)


def _ipv4_addresses() -> Iterator[tuple[str, bytes]]:
    buffer = array.array("B", bytes(_MAX_ADDRESSES * _IFREQ.size))
    address, _ = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFCONF, _IFCONF.pack(len(buffer), address))
    size, _ = _IFCONF.unpack(answer)
    for label, _, packed in _IFREQ.iter_unpack(buffer.tobytes()[:size]):
        # a second address of an interface may have its own label: "eth0:1"
        yield label.rstrip(b"\0").decode().partition(":")[0], packed


def _ipv6_addresses() -> Iterator[tuple[str, bytes]]:
    for line in _IPV6_ADDRESSES.read_text(encoding="ascii").splitlines():
        fields = line.split()
        yield fields[-1], bytes.fromhex(fields[0])
