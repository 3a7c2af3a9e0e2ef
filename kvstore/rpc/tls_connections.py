"""Connections at a TLS port that never made a call: counted, and logged with their peers' addresses.

gRPC does not tell a server that a TLS handshake failed, nor why, nor whose it was. Two other things are known. gRPC asks for the
server's certificate at the start of each handshake, so that the certificate may be exchanged, and the kernel lists the
connections of the port at that moment. A peer that has made no call ``CALL_S`` later failed its handshake, or is a probe.

Limits: the kernel's list is read at most every ``LOOK_S``, so that some of many connections that fail sooner are not seen. A
client that fails again and again is. The reason is known to the client alone: our clients log it (``kvstore.rpc.diagnosis``).
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

_limited = LimitedLog(logging.getLogger(__name__))

CALL_S: Final = 11.0
"""A handshake may take 10 seconds; the first call comes at once after it."""
LOOK_S: Final = 0.5
"""The list holds all connections of the host: some milliseconds where there are thousands."""
MOST_WAITED_FOR: Final = 1_024
_TABLES: Final = (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6))
_OPEN: Final = frozenset({"01", "08"})
"""States of the kernel's list: established, and closed by the other side alone."""
_MAPPED: Final = "::ffff:"

Peer = tuple[str, int]


class TlsConnections:
    """Of one server. ``begun`` from any thread, all else on the event loop that the server runs on.

    Args:
        count: counts an event.
        call_s: how long a connection may take until its first call.
    """

    def __init__(self, count: Callable[[str], None], call_s: float = CALL_S) -> None:
        self._count = count
        self._call_s = call_s
        self._loop = asyncio.get_running_loop()
        self._port = 0
        self._lock = threading.Lock()
        self._looked_s = float("-inf")
        self._seen: tuple[frozenset[Peer], frozenset[Peer]] = (frozenset(), frozenset())
        """Peers with a connection at the last two looks: the kernel's list may lack one that is there all the time."""
        self._waiting: dict[Peer, float] = {}
        """Peers that began a handshake and made no call yet, and when they were seen."""
        self._blind = False
        """Whether a handshake began since the last look: its peer may make calls before it is seen."""
        self._called: set[Peer] = set()
        """Peers that made calls meanwhile."""

    def watch(self, port: int) -> None:
        """Looks at the connections of a port from now on."""
        self._port = port

    def begun(self) -> None:
        """A handshake begins, as gRPC tells by asking for a certificate. Its answer, None, means that the certificate stays."""
        if not self._port:
            return
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._looked_s < LOOK_S:
                self._blind = True
                return
            self._looked_s = now_s
            there = frozenset(_peers_of(self._port))
            fresh = there.difference(*self._seen)
            self._seen = there, self._seen[0]
        with suppress(RuntimeError):  # the loop has ended, and the server with it
            self._loop.call_soon_threadsafe(self._wait_for, fresh, now_s)

    def called(self, context: Any) -> None:  # noqa: ANN401  # a servicer's context
        """A call has come."""
        if not (self._waiting or self._blind):  # of most calls nobody asks whose they are
            return
        peer = _as_peer(context.peer())
        self._waiting.pop(peer, None)
        if self._blind and len(self._called) < MOST_WAITED_FOR:
            self._called.add(peer)

    def _wait_for(self, fresh: frozenset[Peer], now_s: float) -> None:
        if len(self._called) < MOST_WAITED_FOR:  # else nobody knows who has called
            for peer in fresh - self._called:
                if len(self._waiting) < MOST_WAITED_FOR:
                    self._waiting[peer] = now_s
            self._loop.call_later(self._call_s, self._judge)
        self._blind = False
        self._called.clear()

    def _judge(self) -> None:
        oldest_s = time.monotonic() - self._call_s
        for (host, port), seen_s in list(self._waiting.items()):
            if seen_s <= oldest_s:
                del self._waiting[host, port]
                self._count("rpc_tls_connections_without_call_total")
                _limited.warning(
                    "a TLS connection made no call: its handshake failed, or it was a probe (peer=%s:%d, port=%d)",
                    host,
                    port,
                    self._port,
                )


def _peers_of(port: int) -> Iterator[Peer]:
    """Peers of the connections that this host's kernel has at a local port."""
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
            continue  # no such table, or of another shape: nothing is seen, and all else goes on


def _address(text: str, family: int) -> Peer:
    """An address of the kernel's list: words in the host's byte order, in hexadecimal."""
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    shown = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
    return shown.removeprefix(_MAPPED), int(port, 16)


def _as_peer(peer: str) -> Peer:
    """``ipv4:127.0.0.1:4711`` and ``ipv6:%5B::1%5D:4711`` as a pair."""
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return host.strip("[]").removeprefix(_MAPPED), int(port) if port.isdecimal() else 0
