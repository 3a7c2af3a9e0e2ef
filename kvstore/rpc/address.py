"""Addresses of gRPC servers: ``"host:port"`` (port 0: any free one), ``"[ipv6]:port"`` or ``"unix:/path"``."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from typing import Final

from kvstore.core import limits
from kvstore.core.errors import InvalidArgument, Unavailable

_TCP: Final = re.compile(r"(?P<host>[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.%]+\]):(?P<port>\d{1,5})")
_UNIX: Final = re.compile(r"unix:/[^\0]+")
_MAX_PORT: Final = 65_535


def check_address(address: str) -> str:
    """Returns the address unchanged if it is one.

    Raises:
        InvalidArgument: it is neither ``"host:port"`` nor ``"unix:/path"``.
    """
    tcp = _TCP.fullmatch(address)
    if len(address) > limits.MAX_NAME_BYTES or not (_UNIX.fullmatch(address) or (tcp and int(tcp["port"]) <= _MAX_PORT)):
        raise InvalidArgument('an address is "host:port" or "unix:/path"', address=address)
    return address


def check_metrics_address(address: str | None, *, allow_remote: bool) -> None:
    """Checks where ``/metrics`` is to be served: plain HTTP, so not beyond this host unless that is allowed. None: nowhere.

    Raises:
        InvalidArgument: it is no ``host:port``, or reaches beyond this host.
    """
    if address is None:
        return
    if is_unix(check_address(address)):
        raise InvalidArgument("metrics are served over TCP", metrics_listen=address)
    if not allow_remote and not stays_on_host(address):
        raise InvalidArgument(
            "metrics are plain HTTP: to show them beyond this host set allow_insecure_remote", metrics_listen=address
        )


def is_unix(address: str) -> bool:
    """Whether it is a unix socket."""
    return address.startswith("unix:")


def stays_on_host(address: str) -> bool:
    """Whether only processes of this host can reach it: a unix socket or a loopback address.

    A name other than ``localhost`` is not resolved: it counts as remote.

    Raises:
        InvalidArgument: it is no address.
    """
    check_address(address)
    if is_unix(address):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def cannot_listen(address: str, setting: str, error: OSError | None = None) -> Unavailable:
    """What to raise where an address cannot be listened on: why, and what to do about it.

    Args:
        address: the one.
        setting: which setting names it, e.g. ``metadata.listen``.
        error: how binding failed; None: that is found out by binding a socket of its own.
    """
    if error is None and not is_unix(address):
        error = _try(address)
    host, _, port = address.rpartition(":")
    if error is not None and error.errno == errno.EADDRINUSE and not is_unix(address):
        return Unavailable(
            f"port {port} of {host} is in use: `kvstore status` shows whether another store runs here; another port:"
            f" --set {setting}={host}:{int(port) + 100 if int(port) + 100 <= _MAX_PORT else 0}"
        )
    reason = "no reason was given" if error is None else error.strerror or str(error)
    return Unavailable(f"cannot listen on {address} ({setting}): {reason}")


def _try(address: str) -> OSError | None:
    """How binding to an address fails; None: it does not."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError as error:
        return error
    return None
