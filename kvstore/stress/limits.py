"""Limits of this host without a store: a copy in memory, and bytes over a loopback connection.

Samples are taken between the loads of a client, so that loads and samples meet the same load of the host.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress
from typing import Protocol

import numpy as np


class HostLimit(Protocol):
    """A way to move bytes on this host."""

    def sample(self) -> float:
        """Move the bytes of one request; return the seconds."""

    def close(self) -> None:
        """Release the buffers of the measurement."""


class MemcpyLimit:
    """One copy between two buffers of this process.

    Args:
        size: bytes of a sample.
    """

    def __init__(self, size: int) -> None:
        self._source = np.ones(size, np.uint8)
        self._target = np.zeros(size, np.uint8)
        np.copyto(self._target, self._source)  # faults the pages in

    def sample(self) -> float:
        """Copy one sample; return the seconds."""
        started_s = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - started_s

    def close(self) -> None:
        """Nothing to end."""


class SocketLimit:
    """One TCP connection over loopback; a thread sends.

    Args:
        size: bytes of a sample.
    """

    def __init__(self, size: int) -> None:
        self._source = bytes(size)
        self._target = memoryview(bytearray(size))
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._sender = socket.create_connection(server.getsockname())
            self._receiver, _ = server.accept()
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def sample(self) -> float:
        """Send and receive."""
        started_s = time.perf_counter()
        self._wanted.put(True)
        received = 0
        while received < len(self._target):
            received += self._receiver.recv_into(self._target[received:])
        return time.perf_counter() - started_s

    def close(self) -> None:
        """End the thread and the connection."""
        self._wanted.put(False)
        self._thread.join()
        self._sender.close()
        self._receiver.close()

    def _send(self) -> None:
        with suppress(OSError):
            while self._wanted.get():
                self._sender.sendall(self._source)
