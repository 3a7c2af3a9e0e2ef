"""``host:port`` as people write it: names, IPv4, and IPv6 in brackets."""

from __future__ import annotations

from kvstore.core.errors import InvalidArgument


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[ipv6]:port``.

    Raises:
        InvalidArgument: it is not one.
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
        raise InvalidArgument("an address is host:port or [ipv6]:port", address=address)
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """The other way round."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
