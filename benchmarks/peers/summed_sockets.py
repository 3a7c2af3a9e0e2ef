"""The limit of put and get: one bare TCP stream between two processes that moves batches and sums them, and does nothing else.

A put sums each piece of the client's memory and sends it; the other process receives and sums it, and answers one byte a batch.
A get asks for a batch; the other process sends it, and the client sums what it receives. Stretches are as long as in the store's
own data plane. No keys, slots, index or outcomes, and the sums are compared with nothing: the figure is the cost of the wire and
the sums.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from types import TracebackType
from typing import Self

import numpy as np
import xxhash

REQUEST = struct.Struct("<QQQ")
"""1: put, 0: get; offset into the server's memory; bytes."""
ANSWER_S = 60.0
SENT_BYTES = 1 << 20
RECEIVED_BYTES = 192 << 10


def _sum(view: memoryview, piece_bytes: int) -> None:
    for at in range(0, len(view), piece_bytes):
        xxhash.xxh3_64_intdigest(view[at : at + piece_bytes])


def _receive(connection: socket.socket, view: memoryview, piece_bytes: int) -> None:
    step = max(1, RECEIVED_BYTES // piece_bytes) * piece_bytes
    for start in range(0, len(view), step):
        stretch = view[start : start + step]
        received = 0
        while received < len(stretch):
            got = connection.recv_into(stretch[received:], 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionError("the other side closed the stream")
            received += got
        _sum(stretch, piece_bytes)


def serve(nbytes: int, piece_bytes: int) -> None:
    """Server process: prints its port, then answers one client until that leaves."""
    memory = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8).data.cast("B")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while len(request := connection.recv(REQUEST.size, socket.MSG_WAITALL)) == REQUEST.size:
            put, offset, length = REQUEST.unpack(request)
            view = memory[offset : offset + length]
            if put:
                _receive(connection, view, piece_bytes)
                connection.sendall(b"\1")
            else:
                connection.sendall(view)


class SummedSockets:
    """A server process with ``nbytes`` of memory, one connection to it, and as much memory here.

    Args:
        nbytes: of each side.
        piece_bytes: bytes per sum, one layer block.
    """

    def __init__(self, nbytes: int, piece_bytes: int) -> None:
        self._memory = np.random.default_rng(2).integers(0, 256, nbytes, np.uint8).data.cast("B")
        self._piece_bytes = piece_bytes
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(nbytes), str(piece_bytes)], stdout=subprocess.PIPE, text=True
        )
        assert self._server.stdout is not None
        self._stream = socket.create_connection(("127.0.0.1", int(self._server.stdout.readline())), timeout=ANSWER_S)
        self._stream.settimeout(None)
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, batch_bytes: int) -> None:
        """Sends all memory, a batch after the other."""
        for start in range(0, len(self._memory), batch_bytes):
            batch = self._memory[start : start + batch_bytes]
            self._stream.sendall(REQUEST.pack(1, start, len(batch)))
            for at in range(0, len(batch), SENT_BYTES):
                stretch = batch[at : at + SENT_BYTES]
                _sum(stretch, self._piece_bytes)
                self._stream.sendall(stretch)
            if self._stream.recv(1) != b"\1":
                raise ConnectionError("the other side closed the stream")

    def get(self, batch_bytes: int) -> None:
        """Receives all memory, a batch after the other."""
        for start in range(0, len(self._memory), batch_bytes):
            batch = self._memory[start : start + batch_bytes]
            self._stream.sendall(REQUEST.pack(0, start, len(batch)))
            _receive(self._stream, batch, self._piece_bytes)

    def close(self) -> None:
        """Stop the server process."""
        self._stream.close()
        self._server.wait(timeout=10)
        assert self._server.stdout is not None
        self._server.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
