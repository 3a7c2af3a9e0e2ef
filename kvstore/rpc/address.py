"""Addresses of gRPC servers: ``"host:port"`` (port 0: any free port), ``"[ipv6]:port"`` or ``"unix:/path"``."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import Final

from kvstore.core import limits
from kvstore.core.errors import InvalidArgument, Unavailable

_TCP: Final = re.compile(r"(?P<host>[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.%]+\]):(?P<port>\d{1,5})")
_UNIX: Final = re.compile(r"unix:/[^\0]+")
_MAX_PORT: Final = 65_535
_ALL_INTERFACES: Final = frozenset({"0.0.0.0", "[::]"})  # noqa: S104  # compared with, not bound


def check_address(address: str) -> str:
    """Return a valid address unchanged.

    Raises:
        InvalidArgument: the address is neither ``"host:port"`` nor ``"unix:/path"``.
    """
    if not is_address(address):
        raise InvalidArgument('an address must be "host:port", with its port, or "unix:/path"', address=address)
    return address


def is_address(text: str) -> bool:
    """Whether the text is ``"host:port"`` or ``"unix:/path"``."""
    tcp = _TCP.fullmatch(text)
    return len(text) <= limits.MAX_NAME_BYTES and bool(_UNIX.fullmatch(text) or (tcp and int(tcp["port"]) <= _MAX_PORT))


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of a TCP address; the host of ``"[ipv6]:port"`` without its brackets.

    Raises:
        InvalidArgument: the address is not ``"host:port"``.
    """
    if is_unix(check_address(address)):
        raise InvalidArgument('the address must be "host:port", not a unix socket', address=address)
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def check_listen_address(address: str, prefix: str, *, tls: bool, allow_insecure: bool) -> None:
    """Check the address of a server: other hosts may reach it only over TLS, or if that was allowed explicitly.

    Args:
        address: the address that the server will be bound to.
        prefix: prefix of its settings in the error, e.g. ``node.``.
        tls: whether the server has a certificate.
        allow_insecure: whether the server may be reachable without TLS.

    Raises:
        InvalidArgument: the address is invalid, or reachable from other hosts without TLS.
    """
    if not tls and not allow_insecure and not stays_on_host(address):
        raise InvalidArgument(
            f"listening on a remote address requires TLS; set {prefix}tls, or {prefix}allow_insecure_remote", address=address
        )


def check_metrics_address(address: str | None, *, allow_remote: bool) -> None:
    """Check the address of ``/metrics``. It is plain HTTP, so a non-loopback address must be allowed explicitly.

    Raises:
        InvalidArgument: the address is not ``host:port``, or is reachable from other hosts.
    """
    if address is None:
        return
    if is_unix(check_address(address)):
        raise InvalidArgument("metrics_listen must be host:port, not a unix socket", metrics_listen=address)
    if not allow_remote and not stays_on_host(address):
        raise InvalidArgument(
            "metrics are plain HTTP; set allow_insecure_metrics to expose them to other hosts", metrics_listen=address
        )


def is_unix(address: str) -> bool:
    """Whether the address is a unix socket."""
    return address.startswith("unix:")


def stays_on_host(address: str) -> bool:
    """Whether only processes of this host can reach the address: a unix socket or a loopback address.

    Names other than ``localhost`` are not resolved and count as remote.

    Raises:
        InvalidArgument: the address is invalid.
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


def reachable_address(bound: str, peers: Sequence[str]) -> str:
    """The address at which other hosts reach a server of this host. May wait for DNS.

    Args:
        bound: the address that the server is bound to.
        peers: addresses that the other hosts can reach, too. If the server is bound to all interfaces, its host is the address
            that this host uses towards the first peer that it finds a route to.

    Raises:
        Unavailable: there is no route to any peer.
    """
    host, _, port = bound.rpartition(":")
    if host not in _ALL_INTERFACES:
        return bound
    for peer in peers:
        with contextlib.suppress(OSError):
            family, kind, protocol, _, endpoint = socket.getaddrinfo(*host_and_port(peer), type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(endpoint)  # sends nothing
                own: str = probe.getsockname()[0]
                return f"[{own}]:{port}" if family == socket.AF_INET6 else f"{own}:{port}"
    raise Unavailable("this host has no address that others can reach", bound=bound, peers=", ".join(peers))


def cannot_listen(address: str, setting: str, error: OSError | None = None) -> Unavailable:
    """The error for an address that cannot be bound, with its cause and a remedy.

    Args:
        address: the address.
        setting: the setting that has it, e.g. ``metadata.listen``.
        error: error of the bind; None: bind a socket here to find out.
    """
    if error is None and not is_unix(address):
        error = _bind_error(address)
    host, _, port = address.rpartition(":")
    if error is not None and error.errno == errno.EADDRINUSE and not is_unix(address):
        return Unavailable(
            f"port {port} of {host} is in use; `kvstore status` shows whether another store runs here. Set another port:"
            f" --set {setting}={host}:{int(port) + 100 if int(port) + 100 <= _MAX_PORT else 0}"
        )
    reason = "unknown reason" if error is None else error.strerror or str(error)
    return Unavailable(f"cannot listen on {address} ({setting}): {reason}")


def _bind_error(address: str) -> OSError | None:
    """Error of binding to the address; None: it can be bound."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, endpoint = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(endpoint)
    except OSError as error:
        return error
    return None
