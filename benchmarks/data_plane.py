"""Measure the data plane alone: blocks from one process's memory into another's, against bare sockets.

There is no client, node or index: a ``TcpServer`` serves views of one array, and a ``TcpPeer`` reads them by layers, with and
without checksum verification. The peer moves the same bytes over the same number of streams. ``tcp_load`` measures the whole
store.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np

import harness
from harness import Figure, Options, Reference, Target
from kvstore.core.buffers import DenseBlocks
from kvstore.core.checksum import block_checksums
from kvstore.core.types import BlockKey, BlockShape, NamespaceId, Outcome, StoreOutcome, Tier
from kvstore.transport.contract import BlockProvider, Checksums, ReadPart, ReadRequest, WriteGrant, WriteRequest
from kvstore.transport.tcp.peer import TcpPeer
from kvstore.transport.tcp.server import TcpServer
from peers.sockets import Sockets

NAMESPACE = NamespaceId(b"data-plane-bench")
CALL_S = 60.0


def key_of(number: int) -> BlockKey:
    """Key of block ``number``."""
    return BlockKey(number.to_bytes(16, "little"))


class ArrayProvider(BlockProvider):
    """Provider of read-only views of the blocks of one array."""

    def __init__(self, count: int, shape: BlockShape) -> None:
        self._shape = shape
        self.blocks = np.random.default_rng(1).integers(0, 256, (count, shape.layers, shape.layer_block_bytes), np.uint8)
        self._checksums = block_checksums(DenseBlocks(self.blocks), range(count))
        self._views = [memoryview(block.reshape(-1)) for block in self.blocks]

    def shape(self, namespace: NamespaceId) -> BlockShape | None:
        return self._shape if namespace == NAMESPACE else None

    def read(self, request: ReadRequest) -> Iterator[ReadPart]:
        numbers = [int.from_bytes(key, "little") for key in request.keys]
        views = [self._views[number] for number in numbers]
        yield ReadPart(0, [Outcome.HIT] * len(numbers), views, self._checksums[numbers], Tier.DRAM, lambda: None)

    def write(self, request: WriteRequest) -> WriteGrant:
        return _NoSpace(request)


class _NoSpace(WriteGrant):
    def __init__(self, request: WriteRequest) -> None:
        self.outcomes = [StoreOutcome.SKIPPED] * len(request.run.keys)
        self.views = []

    def commit(self, checksums: Checksums, good: Sequence[bool]) -> list[StoreOutcome]:
        assert len(checksums) == len(good) == 0
        return []

    def abort(self) -> None:
        """Nothing to release, because nothing was granted."""


class DataPlane:
    """A server process that holds ``count`` blocks, and a peer that reads all of them."""

    def __init__(self, count: int, shape: BlockShape, streams: int, memory: np.ndarray) -> None:
        command = [sys.executable, __file__, "--serve", str(count), str(shape.layers), str(shape.layer_block_bytes)]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        self._peer = TcpPeer(self._server.stdout.readline().strip(), streams=streams)
        self._keys = [key_of(number) for number in range(count)]
        self._blocks = DenseBlocks(memory.reshape(count, shape.layers, shape.layer_block_bytes))

    @property
    def pid(self) -> int:
        """Process of the server."""
        return self._server.pid

    def load(self, *, verify: bool) -> None:
        """Read all blocks and check that each is a hit."""
        shape = self._blocks.shape
        request = ReadRequest(NAMESPACE, self._keys, 0, shape.layers, 0, time.monotonic() + CALL_S)
        result = self._peer.read(request, self._blocks, verify=verify)
        assert result.outcomes.count(Outcome.HIT) == len(self._keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._peer.close()
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=10)
        assert self._server.stdout is not None
        self._server.stdout.close()


def serve(count: int, shape: BlockShape) -> None:
    """Run the server process: print the address and serve until stdin closes."""
    server = TcpServer(ArrayProvider(count, shape))
    server.start()
    print(server.address, flush=True)
    sys.stdin.read()
    server.stop()


def measure(options: Options, shape: BlockShape, total: int, streams: int) -> None:
    """Measure one block size and number of streams."""
    count = total // shape.block_bytes
    with Sockets(total, streams) as sockets, DataPlane(count, shape, streams, sockets.memory) as plane:  # the same memory
        meters = {name: harness.CpuMeter(server=plane.pid) for name in ("verified", "unverified")}
        samples = harness.interleave(
            {
                "verified": partial(meters["verified"].gigabytes_per_second, total, partial(plane.load, verify=True)),
                "sockets": partial(harness.gigabytes_per_second, total, partial(sockets.load, shape.block_bytes)),
                "unverified": partial(meters["unverified"].gigabytes_per_second, total, partial(plane.load, verify=False)),
            },
            options.repetitions,
        )
    parameters = {"block_bytes": shape.block_bytes, "layers": shape.layers, "total_bytes": total, "streams": streams}
    for name, verified, bound in (("verified", True, 0.75), ("unverified", False, 0.85)):
        options.keep(
            Figure("data_plane", "Blocks between two processes over TCP", parameters | {"verify": verified}, "GB/s"),
            samples[name],
            peer=Reference("bare sockets", samples["sockets"]),
            target=Target("peer", bound),
            transport="tcp",
            verified=verified,
            cpu=meters[name].cost(),
        )


def main() -> None:
    """Measure all sizes."""
    if sys.argv[1:2] == ["--serve"]:
        count, layers, layer_block_bytes = map(int, sys.argv[2:])
        serve(count, BlockShape(layers, layer_block_bytes))
        return
    options = harness.options("data_plane", __doc__)
    shapes = {"64K": BlockShape(4, 16 << 10), "1M": BlockShape(32, 32 << 10), "4M": BlockShape(32, 128 << 10)}
    for name in options.pick(full=("64K", "1M", "4M"), quick=("1M",), smoke=("1M",)):
        for streams in options.pick(full=(1, 2, 4), quick=(2,), smoke=(2,)):
            measure(options, shapes[name], options.pick(full=512 << 20, quick=256 << 20, smoke=8 << 20), streams)


if __name__ == "__main__":
    main()
