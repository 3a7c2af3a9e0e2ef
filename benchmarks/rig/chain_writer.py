"""Writes the records of many chains into the shards of a Valkey Cluster, faster than by publishing them.

A record is what publishing writes: ``check`` publishes a chain and compares. All chains belong to one namespace, are held by one
NVMe volume, and their first blocks by one DRAM volume too, as those of ``rig.served_index.fill``.
"""

from __future__ import annotations

import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.core.types import KEY_BYTES, BlockKey
from kvstore.embedded.valkey import ValkeyServers
from kvstore.index.valkey.keys import RANGE_SLOTS, TAG_BYTES, TAGS, record_name
from rig.served_index import CHAIN, DRAM_SHARE

Bytes = npt.NDArray[np.uint8]

CHAINS_AT_ONCE = 160
MIN_FREE_BYTES = 2 << 30
"""The benchmark ends before the machine has less memory available."""
_SET = b"*3\r\n$3\r\nSET\r\n$%d\r\n" % (TAG_BYTES + KEY_BYTES)
_OK = b"+OK\r\n"
_TIMEOUT_S = 60.0


def available_bytes() -> int:
    """Memory of the machine that processes can still take."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) << 10


class ChainWriter:
    """Writes chains with the numbers that a published record names.

    Args:
        cluster: the cluster, without replicas.
        long_record: record of a published block that both volumes hold; its depth is ignored.
    """

    def __init__(self, cluster: ValkeyServers, long_record: bytes) -> None:
        ordinal, _, nvme, nvme_start, dram, dram_start = struct.unpack("<6I", long_record)
        self._templates = [
            (0, DRAM_SHARE, struct.pack("<6I", ordinal, 0, nvme, nvme_start, dram, dram_start)),
            (DRAM_SHARE, CHAIN, struct.pack("<4I", ordinal, 0, nvme, nvme_start)),
        ]
        self._tags = np.frombuffer(b"".join(TAGS), np.uint8).reshape(-1, TAG_BYTES)
        shards = len(cluster.primaries)
        borders = [16_384 * (number + 1) // shards for number in range(shards)]
        self._shard_of_range = np.searchsorted(np.array(borders), np.array(RANGE_SLOTS), side="right")
        self._cluster = cluster
        self._connections = [socket.create_connection(("127.0.0.1", one.port), _TIMEOUT_S) for one in cluster.primaries]
        self._pool = ThreadPoolExecutor(shards)

    def commands(self, keys: Bytes) -> list[bytes]:
        """Commands that write chains, per shard.

        Args:
            keys: ``[chains, CHAIN, KEY_BYTES]``.
        """
        parts: list[list[bytes]] = [[] for _ in self._connections]
        for start, end, value in self._templates:
            part = keys[:, start:end].reshape(-1, KEY_BYTES)
            ranges = part[:, 0].astype(np.int64) << 4 | part[:, 1] >> 4
            row = _SET + bytes(TAG_BYTES + KEY_BYTES) + b"\r\n$%d\r\n" % len(value) + value + b"\r\n"
            rows = np.tile(np.frombuffer(row, np.uint8), (len(part), 1))
            name = len(_SET)
            rows[:, name : name + TAG_BYTES] = self._tags[ranges]
            rows[:, name + TAG_BYTES : name + TAG_BYTES + KEY_BYTES] = part
            depths = np.tile(np.arange(start, end, dtype="<u4"), len(keys))
            at = len(row) - 2 - len(value) + 4  # the depth is the second number of a record
            rows[:, at : at + 4] = depths.view(np.uint8).reshape(-1, 4)
            shards = self._shard_of_range[ranges]
            for number, chosen in enumerate(parts):
                chosen.append(rows[shards == number].tobytes())
        return [b"".join(chosen) for chosen in parts]

    def write(self, keys: Bytes) -> None:
        """Write chains and wait for all replies."""
        if available_bytes() < MIN_FREE_BYTES:
            sys.exit("the machine has no memory left for so many blocks")
        list(self._pool.map(_exchange, self._connections, self.commands(keys)))

    def check(self, chain: bytes, published: list[bytes]) -> None:
        """Check that the commands for a chain write the records that publishing it wrote."""
        keys = np.frombuffer(chain, np.uint8).reshape(1, CHAIN, KEY_BYTES)
        expected: set[bytes] = set()
        for at, record in enumerate(published):
            name = record_name(BlockKey(chain[at * KEY_BYTES : (at + 1) * KEY_BYTES]))
            expected.add(_SET + name + b"\r\n$%d\r\n%b\r\n" % (len(record), record))
        written = b"".join(self.commands(keys))
        if len(written) != sum(map(len, expected)) or any(command not in written for command in expected):
            sys.exit("the writer's records are not those that publishing writes")

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown()
        for connection in self._connections:
            connection.close()


def _exchange(connection: socket.socket, packed: bytes) -> None:
    connection.sendall(packed)
    left = packed.count(_SET) * len(_OK)  # no record contains the beginning of a command
    while left:
        received = connection.recv(min(left, 1 << 20))
        if not received or b"-" in received:
            sys.exit(f"Valkey rejected a record: {received[:200]!r}")
        left -= len(received)
