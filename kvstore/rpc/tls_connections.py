"""Detection of failed TLS handshakes: connections at a TLS port that never make a call are counted and logged with their peer.

gRPC does not report failed handshakes to a server. But it asks for the server's certificate at the start of each handshake, and
at that moment the kernel lists the connections of the port. A peer without a call ``CALL_S`` later failed its handshake, or is a
probe.

The kernel's list is read at most every ``SCAN_INTERVAL_S``, so some of many short connections are not seen; a client that retries
is. Only the client knows why its handshake failed: kvstore's clients log the reason (``kvstore.rpc.diagnosis``).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote

from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import common as common_metrics
from kvstore.observe.metrics import Event

_limited = LimitedLog(logging.getLogger(__name__))

CALL_S: Final = 11.0
"""Time limit until the first call. gRPC's limit of a handshake is 10 s."""
SCAN_INTERVAL_S: Final = 0.5
"""The list has all connections of the host; reading thousands takes several milliseconds."""
MAX_PENDING: Final = 1_024
_TABLES: Final = (("/proc/self/net/tcp", socket.AF_INET), ("/proc/self/net/tcp6", socket.AF_INET6))
_OPEN: Final = frozenset({"01", "08"})
"""Connection states in the kernel's list: established, and half-closed by the peer."""
_MAPPED: Final = "::ffff:"

Peer = tuple[str, int]


class TlsConnections:
    """Connections of one server's TLS port. ``begun`` is thread-safe; all other methods run on the server's event loop.

    Args:
        count: counts a connection without a call.
        call_s: time limit until the first call of a connection.
    """

    def __init__(self, count: Callable[[Event], None], call_s: float = CALL_S) -> None:
        self._count = count
        self._call_s = call_s
        self._loop = asyncio.get_running_loop()
        self._port = 0
        self._lock = threading.Lock()
        self._scanned_s = float("-inf")
        self._seen: tuple[frozenset[Peer], frozenset[Peer]] = (frozenset(), frozenset())
        """Peers in the last two scans. One scan may miss an open connection."""
        self._waiting: dict[Peer, float] = {}
        """Peers that began a handshake and made no call yet, with the time of the scan."""
        self._blind = False
        """Whether a handshake began since the last scan. Its peer may make calls before the next one."""
        self._called: set[Peer] = set()
        """Peers that made calls since the last scan."""

    def watch(self, port: int) -> None:
        """Begin to watch a port."""
        self._port = port

    def begun(self) -> None:
        """Record a handshake. gRPC calls this for a certificate; the result None keeps the current one."""
        if not self._port:
            return
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._scanned_s < SCAN_INTERVAL_S:
                self._blind = True
                return
            self._scanned_s = now_s
            peers = frozenset(peers_of_port(self._port))
            fresh = peers.difference(*self._seen)
            self._seen = peers, self._seen[0]
        with suppress(RuntimeError):  # the loop, and with it the server, has ended
            self._loop.call_soon_threadsafe(self._wait_for, fresh, now_s)

    def called(self, context: Any) -> None:  # noqa: ANN401  # a servicer's context
        """Record a call."""
        if not (self._waiting or self._blind):  # fast path: no handshake is pending
            return
        peer = parse_peer(context.peer())
        self._waiting.pop(peer, None)
        if self._blind and len(self._called) < MAX_PENDING:
            self._called.add(peer)

    def _wait_for(self, fresh: frozenset[Peer], now_s: float) -> None:
        if len(self._called) < MAX_PENDING:  # else the set of callers is incomplete
            for peer in fresh - self._called:
                if len(self._waiting) < MAX_PENDING:
                    self._waiting[peer] = now_s
            self._loop.call_later(self._call_s, self._report_silent)
        self._blind = False
        self._called.clear()

    def _report_silent(self) -> None:
        oldest_s = time.monotonic() - self._call_s
        for (host, port), seen_s in list(self._waiting.items()):
            if seen_s <= oldest_s:
                del self._waiting[host, port]
                self._count(common_metrics.RPC_TLS_CONNECTIONS_WITHOUT_CALL)
                _limited.warning(
                    "TLS connection without a call: failed handshake or probe (peer=%s:%d, port=%d)",
                    host,
                    port,
                    self._port,
                )


def peers_of_port(port: int) -> Iterator[Peer]:
    """Peers of the connections of a local port, from the kernel's list."""
    wanted = f":{port:04X}"
    for table, family in _TABLES:
        try:
            with open(table, encoding="ascii") as lines:
                next(lines, None)
                for line in lines:
                    _, local, remote, state, *_ = line.split(maxsplit=4)
                    if local.endswith(wanted) and state in _OPEN:
                        yield _address(remote, family)
        except (OSError, ValueError):
            continue  # missing table or unknown format: detection is off


def _address(text: str, family: int) -> Peer:
    """Parse an address of the kernel's list: hexadecimal words in the host's byte order."""
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    address = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
    return address.removeprefix(_MAPPED), int(port, 16)


def parse_peer(peer: str) -> Peer:
    """Parse gRPC's ``ipv4:127.0.0.1:4711`` or ``ipv6:%5B::1%5D:4711``."""
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return host.strip("[]").removeprefix(_MAPPED), int(port) if port.isdecimal() else 0
