"""The limit of a pass over an index in Valkey: the same commands in a bare loop, over one blocking socket per shard.

Names of ranges are listed, and their records are read and dropped. No metadata server, digest or retry is involved.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import hiredis

from kvstore.core.limits import DIGEST_RANGES
from kvstore.index.valkey.connection import pack
from kvstore.index.valkey.keys import RANGE_SLOTS
from kvstore.index.valkey.records import list_commands, listed_names, read_names_command

ANSWER_S = 60.0
LISTED_AT_ONCE = 64
NAMES_PER_READ = 256
READS_AT_ONCE = 128
RECEIVED_BYTES = 1 << 20


class BareValkey:
    """A connection to each primary; a context manager that closes them.

    Args:
        primaries: addresses of all primaries, ``host:port``.
    """

    def __init__(self, primaries: Sequence[str]) -> None:
        self._connections = []
        for address in primaries:
            host, _, port = address.rpartition(":")
            self._connections.append(_Connection(host, int(port)))
        self._ranges: list[list[int]] = []
        for connection in self._connections:
            me = connection.ask([pack("CLUSTER", "MYID")])[0]
            slots = connection.ask([pack("CLUSTER", "SLOTS")])[0]
            mine = {slot for first, last, primary, *_ in slots if primary[2] == me for slot in range(first, last + 1)}
            self._ranges.append([at for at in range(DIGEST_RANGES) if RANGE_SLOTS[at] in mine])
        assert sum(map(len, self._ranges)) == DIGEST_RANGES

    def run(self) -> int:
        """Read all records once. Returns their number."""
        count = 0
        for connection, ranges in zip(self._connections, self._ranges, strict=True):
            for first in range(0, len(ranges), LISTED_AT_ONCE):
                some = ranges[first : first + LISTED_AT_ONCE]
                answers = connection.ask([packed for _, packed in list_commands(some)])
                reads = []
                for at, listing, nothing in zip(some, answers[::2], answers[1::2], strict=True):
                    names = listed_names(at, listing, nothing)
                    assert names is not None
                    count += len(names)
                    reads += [
                        read_names_command(RANGE_SLOTS[at], names[start : start + NAMES_PER_READ])[1]
                        for start in range(0, len(names), NAMES_PER_READ)
                    ]
                for start in range(0, len(reads), READS_AT_ONCE):
                    connection.ask(reads[start : start + READS_AT_ONCE])
        return count

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Connection:
    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=ANSWER_S)
        self._reader = hiredis.Reader(notEnoughData=self)

    def ask(self, commands: Sequence[bytes]) -> list[Any]:
        """Send commands at once and wait for their replies."""
        self._socket.sendall(b"".join(commands))
        replies: list[Any] = []
        while len(replies) < len(commands):
            if (reply := self._reader.gets()) is self:
                if not (received := self._socket.recv(RECEIVED_BYTES)):
                    raise ConnectionError("the server closed the connection")
                self._reader.feed(received)
            else:
                replies.append(reply)
        return replies

    def close(self) -> None:
        self._socket.close()
