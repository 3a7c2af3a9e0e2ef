"""The peer of the data plane: bare TCP sockets between two processes on loopback, which only move bytes.

The server process sends blocks from its memory with ``sendall``; the client receives them with ``recv_into`` into one buffer,
over as many streams as asked for, a thread each. There are no keys, checksums or outcomes: the figure is the cost of the wire.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvstore.native import hash_parts

REQUEST = struct.Struct("<QQ")
"""Offset into the server's memory, bytes wanted."""

ANSWER_S = 60.0


def _tune(connection: socket.socket) -> None:
    connection.settimeout(ANSWER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def serve(nbytes: int) -> None:
    """Run the server process: print the port and answer requests until stdin closes."""
    memory = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8).data.cast("B")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=_accept, args=(listener, memory), daemon=True).start()
        sys.stdin.read()


def _accept(listener: socket.socket, memory: memoryview) -> None:
    while True:
        connection, _ = listener.accept()
        _tune(connection)
        threading.Thread(target=_answer, args=(connection, memory), daemon=True).start()


def _answer(connection: socket.socket, memory: memoryview) -> None:
    with connection:
        while len(request := connection.recv(REQUEST.size, socket.MSG_WAITALL)) == REQUEST.size:
            offset, length = REQUEST.unpack(request)
            connection.sendall(memory[offset : offset + length])


class Sockets:
    """A server process with ``nbytes`` of memory, and ``streams`` connections to it.

    ``load`` brings all of it, in blocks, each stream its share.

    Args:
        nbytes: bytes of a load.
        streams: connections, with a thread each.
        part_bytes: each block is summed in parts of this size by the native kernel; 0: it is not summed.
    """

    def __init__(self, nbytes: int, streams: int, part_bytes: int = 0) -> None:
        self._part_bytes = part_bytes
        self.memory: npt.NDArray[np.uint8] = np.zeros(nbytes, np.uint8)
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._server.stdout is not None
        port = int(self._server.stdout.readline())
        self._streams = [socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) for _ in range(streams)]
        for stream in self._streams:
            _tune(stream)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._server.pid

    def load(self, block_bytes: int) -> None:
        """Receive all blocks and wait for the last byte."""
        blocks = self.memory.nbytes // block_bytes
        count = len(self._streams)
        threads = [
            threading.Thread(
                target=self._receive, args=(stream, range(i * blocks // count, (i + 1) * blocks // count), block_bytes)
            )
            for i, stream in enumerate(self._streams)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _receive(self, stream: socket.socket, blocks: range, block_bytes: int) -> None:
        view = self.memory.data.cast("B")
        if blocks:  # one request for the whole share: the wire never waits for the client
            stream.sendall(REQUEST.pack(blocks.start * block_bytes, len(blocks) * block_bytes))
        for block in blocks:
            piece = view[block * block_bytes : (block + 1) * block_bytes]
            received = 0
            while received < block_bytes:
                got = stream.recv_into(piece[received:], 0, socket.MSG_WAITALL)
                if not got:
                    raise ConnectionError("the peer's server closed the stream")
                received += got
            if self._part_bytes:
                hash_parts(piece, self._part_bytes)

    def close(self) -> None:
        """Stop the server process."""
        for stream in self._streams:
            stream.close()
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=10)
        assert self._server.stdout is not None
        self._server.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
