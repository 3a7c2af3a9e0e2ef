"""A TCP proxy with network faults: delay, rate limit, disconnect, stall, and a flipped byte at a chosen position.

For tests: two threads per connection, all stopped by ``stop``. Faults may change while connections are open. They apply to all
connections, in bytes since the start of each.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.transport.addresses import format_address, parse_address

_CHUNK_BYTES = 64 << 10


@dataclass(slots=True)
class Faults:
    """Faults of one direction.

    Attributes:
        delay_s: delay of each chunk.
        bytes_per_s: rate limit; None: none.
        cut_after: bytes after which a connection is closed, both ways; None: never.
        stall_after: bytes after which nothing is forwarded, with the connection left open; None: never.
        flips: positions (bytes since the start of the connection) whose byte is changed.
    """

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    cut_after: int | None = None
    stall_after: int | None = None
    flips: frozenset[int] = field(default_factory=frozenset)


class FaultProxy:
    """Proxy between clients and ``target``.

    Args:
        target: ``host:port`` of the server.
    """

    def __init__(self, target: str) -> None:
        self._target = parse_address(target)
        self.to_server = Faults()
        self.to_client = Faults()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = format_address(*self._listener.getsockname()[:2])
        self._start(self._accept)

    def cut(self) -> None:
        """Close every connection now; new connections are accepted."""
        with self._lock:
            sockets = list(self._sockets)
        for sock in sockets:
            _shut(sock)

    def stop(self) -> None:
        """Close all connections and stop."""
        self._stopping.set()
        _shut(self._listener)
        self.cut()
        for thread in list(self._threads):
            thread.join(10.0)
        self._listener.close()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="fault-proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=10.0)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                self._sockets |= {client, server}
            if self._stopping.is_set():
                self.cut()
            alive = _Alive(2)
            self._start(self._pump, client, server, self.to_server, alive)
            self._start(self._pump, server, client, self.to_client, alive)

    def _pump(self, source: socket.socket, sink: socket.socket, faults: Faults, alive: _Alive) -> None:
        """Forward one direction until either side ends or a fault closes it."""
        passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(_CHUNK_BYTES)):
                for place in faults.flips:
                    if passed <= place < passed + len(data):
                        data[place - passed] ^= 0x10
                ends = [end for end in (faults.cut_after, faults.stall_after) if end is not None]
                end = min(ends, default=passed + len(data))
                sink.sendall(data[: max(0, end - passed)])
                passed += len(data)
                if faults.cut_after is not None and passed >= faults.cut_after:
                    break
                if faults.stall_after is not None and passed >= faults.stall_after:
                    while not self._stopping.is_set() and source.recv(_CHUNK_BYTES):
                        pass  # swallowed
                    break
                pause_s = faults.delay_s + (len(data) / faults.bytes_per_s if faults.bytes_per_s is not None else 0.0)
                if pause_s and self._stopping.wait(pause_s):
                    break
        _shut(source)
        _shut(sink)
        if alive.last():
            with self._lock:
                self._sockets -= {source, sink}
            source.close()
            sink.close()


class _Alive:
    """Counts threads and reports to the last one that it is the last."""

    def __init__(self, threads: int) -> None:
        self._left = threads
        self._lock = threading.Lock()

    def last(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left == 0


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
