"""What a host's link carries, and what of it is KV: the NIC's byte counters, and those of every socket that bears the mark.

Sockets are asked of the kernel (``NETLINK_SOCK_DIAG``), which needs no privilege and shows those of all processes in the network
namespace: an engine's reads and its node's writes are KV to each other, not foreign.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvstore.core.errors import Unsupported

_TIMEOUT_S = 1.0
_READ_BYTES = 1 << 18
_NLMSG = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST_DUMP = 0x301
_ATTRIBUTE = struct.Struct("=HH")

_ROUTE, _SOCK_DIAG = 0, 4
_GET_ADDRESSES = 22
_IFADDR = struct.Struct("=BBBBI")
_IFA_ADDRESS, _IFA_LOCAL = 1, 2

_BY_FAMILY = 20
_DIAG_BYTES = 72
_WANT_INFO, _WANT_TOS, _WANT_TCLASS = 1 << 1, 1 << 4, 1 << 5
_INFO, _TOS, _TCLASS = 2, 5, 6
_STATES = sum(1 << state for state in (1, 4, 5, 8, 9, 11))
"""Connected, or about to end; not the thousands that may rest in TIME_WAIT."""
_RECEIVED, _SEGMENTS, _SENT = 128, 136, 200
"""Offsets in ``struct tcp_info``: bytes received, segments out and in, bytes sent."""
_HEADER_BYTES = 66
"""Ethernet, IPv4 and TCP with time stamps."""


class LinkTotals(NamedTuple):
    """Bytes of both directions."""

    received: int
    sent: int


def interface_of(address: str) -> str:
    """The interface that holds an address.

    Raises:
        Unsupported: none does, or the kernel cannot be asked.
    """
    wanted = ipaddress.ip_address(address).packed
    try:
        for message in _dump(_ROUTE, _GET_ADDRESSES, _IFADDR.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
            attributes = dict(_attributes(message[_IFADDR.size :]))
            if attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS)) == wanted:
                return socket.if_indextoname(_IFADDR.unpack_from(message)[4])
    except OSError as error:
        raise Unsupported("the kernel does not tell interfaces", error=error) from error
    raise Unsupported("no interface holds this address", address=address)


def speed_of(interface: str) -> float | None:
    """Bytes a second of an interface, as its driver says; None: it does not."""
    try:
        mbit = int(Path(f"/sys/class/net/{interface}/speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return mbit * 125_000.0 if mbit > 0 else None


class LinkCounters:
    """Counters of the link that holds an address. One thread at a time.

    Args:
        address: of this host, on that link.
        dscp: the mark of KV sockets.

    Raises:
        Unsupported: the kernel does not tell what is needed.
    """

    def __init__(self, address: str, dscp: int) -> None:
        self.interface = interface_of(address)
        self._address = ipaddress.ip_address(address)
        self._tos = dscp << 2
        self._kv = LinkTotals(0, 0)
        self._sockets: dict[bytes, LinkTotals] = {}
        self._dev = os.open("/proc/thread-self/net/dev", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.read()
        except OSError as error:
            self.close()
            raise Unsupported("the kernel does not tell the bytes of sockets", error=error) from error

    def read(self) -> tuple[LinkTotals, LinkTotals]:
        """Totals of the NIC since it came up, and of KV since this object was made.

        Raises:
            OSError: the kernel does not say, or the interface is gone.
        """
        sockets = dict(self._kv_sockets())
        received, sent = self._kv
        for cookie, totals in sockets.items():
            # sockets are only ever seen alive: what one moved after the last look and before its end is missed
            before = self._sockets.get(cookie, LinkTotals(0, 0))
            received += totals.received - before.received
            sent += totals.sent - before.sent
        self._sockets, self._kv = sockets, LinkTotals(received, sent)
        return self._nic(), self._kv

    def close(self) -> None:
        """Lets go of the file."""
        os.close(self._dev)

    def _nic(self) -> LinkTotals:
        text = b""
        while piece := os.pread(self._dev, _READ_BYTES, len(text)):
            text += piece
        for line in text.splitlines():
            name, _, fields = line.partition(b":")
            if name.strip() == self.interface.encode():
                numbers = fields.split()
                return LinkTotals(int(numbers[0]), int(numbers[8]))
        raise OSError(f"interface {self.interface} is gone")

    def _kv_sockets(self) -> Iterator[tuple[bytes, LinkTotals]]:
        """Cookie and bytes of each marked socket on this link, headers included."""
        local = self._address.packed
        six = self._address.version == 6
        family = socket.AF_INET6 if six else socket.AF_INET
        wants = _WANT_INFO | _WANT_TOS | _WANT_TCLASS
        request = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, wants, 0, _STATES)
        for message in _dump(_SOCK_DIAG, _BY_FAMILY, request):
            if message[8 : 8 + len(local)] != local:
                continue
            attributes = dict(_attributes(message[_DIAG_BYTES:]))
            info = attributes.get(_INFO, b"")
            tos = attributes.get(_TCLASS if six else _TOS, b"\0")[0]
            if tos & 0xFC != self._tos or len(info) < _SENT + 8:
                continue
            (received,) = struct.unpack_from("=Q", info, _RECEIVED)
            segments_out, segments_in = struct.unpack_from("=II", info, _SEGMENTS)
            (sent,) = struct.unpack_from("=Q", info, _SENT)
            yield message[44:52], LinkTotals(received + segments_in * _HEADER_BYTES, sent + segments_out * _HEADER_BYTES)


def _dump(protocol: int, kind: int, payload: bytes) -> Iterator[bytes]:
    """Asks the kernel for all of something; the bodies of its answers."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol) as netlink:
        netlink.settimeout(_TIMEOUT_S)
        netlink.sendto(_NLMSG.pack(_NLMSG.size + len(payload), kind, _REQUEST_DUMP, 1, 0) + payload, (0, 0))
        while True:
            data = netlink.recv(_READ_BYTES)
            at = 0
            while at + _NLMSG.size <= len(data):
                length, found = _NLMSG.unpack_from(data, at)[:2]
                body = data[at + _NLMSG.size : at + length]
                if found == _NLMSG_DONE:
                    return
                if found == _NLMSG_ERROR:
                    raise OSError(-struct.unpack_from("=i", body)[0], "netlink refused")
                yield body
                at += max(_NLMSG.size, (length + 3) & ~3)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            return
        yield kind, data[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
