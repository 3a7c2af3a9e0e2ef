"""Measure the transport ``nixl`` against a bare NIXL loop over the same memory and descriptors, and against ``tcp``.

Two processes on this host use UCX's TCP (the server pushes) and CMA (the reader pulls). The store's transport finds keys, pins
blocks, answers with outcomes and verifies every checksum. The bare loop only moves bytes, or moves and sums them. ``tcp`` is the
framed TCP connection. Without an RDMA device the figures show the store's overhead over NIXL, not the gain of RDMA.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np

import harness
from data_plane import CALL_S, NAMESPACE, ArrayProvider, key_of
from harness import Figure, Options, Parameter, Reference, Target
from kvstore.core.buffers import DenseBlocks
from kvstore.core.errors import Unsupported
from kvstore.core.types import BlockShape, Outcome
from kvstore.observe.counters import Counters
from kvstore.transport.contract import ReadRequest
from kvstore.transport.nixl.agent import NixlAgent, NixlOptions, Region
from kvstore.transport.nixl.peer import NixlPeer
from kvstore.transport.nixl.responder import NixlResponder
from kvstore.transport.tcp.peer import TcpPeer
from kvstore.transport.tcp.server import TcpServer
from peers.bare_nixl import BareNixl, Way, address_of


class NixlPlane:
    """A server process that holds ``count`` blocks in registered memory, and peers that read all of them."""

    def __init__(self, memory: np.ndarray, shape: BlockShape, transports: str, way: Way) -> None:
        count = memory.nbytes // shape.block_bytes
        command = [sys.executable, __file__, "--serve", str(count), str(shape.layers), str(shape.layer_block_bytes)]
        self._server = subprocess.Popen(
            [*command, transports or "auto"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._server.stdout is not None
        address = self._server.stdout.readline().strip()
        self.counters = Counters()
        options = NixlOptions(transports=transports, mode=way)
        self._ports = [
            NixlAgent(options, name="registered", regions=[Region(address_of(memory), memory.nbytes)]),
            NixlAgent(options, name="unregistered"),
        ]
        self._registered, self._unregistered = (NixlPeer(address, port, counters=self.counters) for port in self._ports)
        self._tcp = TcpPeer(address)
        self._keys = [key_of(number) for number in range(count)]
        self._blocks = DenseBlocks(memory.reshape(count, shape.layers, shape.layer_block_bytes))
        self.total = memory.nbytes

    @property
    def pid(self) -> int:
        """Process of the server."""
        return self._server.pid

    def load(self, peer: str, *, verify: bool = True) -> None:
        """Read all blocks with one of the peers and check that every block is a hit with the right bytes and transport."""
        request = ReadRequest(NAMESPACE, self._keys, 0, self._blocks.shape.layers, 0, time.monotonic() + CALL_S)
        before = self.counters.get("transport_nixl_bytes_received_total")
        chosen = {"registered": self._registered, "unregistered": self._unregistered, "tcp": self._tcp}[peer]
        result = chosen.read(request, self._blocks, verify=verify)
        assert result.outcomes.count(Outcome.HIT) == len(self._keys)
        assert self.counters.get("transport_nixl_bytes_received_total") - before == (0 if peer == "tcp" else self.total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for peer in (self._registered, self._unregistered, self._tcp):
            peer.close()
        for port in self._ports:
            port.close()
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=10)
        assert self._server.stdout is not None
        self._server.stdout.close()


def serve(count: int, shape: BlockShape, transports: str) -> None:
    """Run the server process: print the address and serve until stdin closes."""
    provider = ArrayProvider(count, shape)
    port = NixlAgent(NixlOptions(transports=transports), regions=[Region(address_of(provider.blocks), provider.blocks.nbytes)])
    server = TcpServer(provider, one_sided=partial(NixlResponder, port))
    server.start()
    print(server.address, flush=True)
    sys.stdin.read()
    server.stop()
    port.close()


def measure(options: Options, shape: BlockShape, total: int, transports: str, way: Way) -> None:
    """Measure one block size over one of UCX's transports."""
    memory = np.zeros(total, np.uint8)
    with BareNixl(memory, shape.block_bytes, transports, way) as bare, NixlPlane(memory, shape, transports, way) as plane:
        work: dict[str, Callable[[], object]] = {
            "registered": partial(plane.load, "registered"),
            "bare": bare.load,
            "summed": partial(bare.load, shape.layer_block_bytes),
            "unverified": partial(plane.load, "registered", verify=False),
            "unregistered": partial(plane.load, "unregistered"),
            "tcp": partial(plane.load, "tcp"),
        }
        meters = {name: harness.CpuMeter(server=plane.pid) for name in work}
        samples = harness.interleave(
            {name: partial(meters[name].gigabytes_per_second, total, load) for name, load in work.items()}, options.repetitions
        )
    name = f"{'UCX tcp' if transports else 'UCX cma'}, {way}"
    parameters: dict[str, Parameter] = {"over": name, "block_bytes": shape.block_bytes, "total_bytes": total}
    title = "Blocks between two processes by NIXL"
    for contestant in ("registered", "unverified", "unregistered", "tcp"):
        options.keep(
            Figure("nixl_transport", title, parameters | {"ours": contestant}, "GB/s"),
            samples[contestant],
            limit=Reference("bare NIXL and the sums", samples["summed"]) if contestant != "unverified" else None,
            peer=Reference("bare NIXL", samples["bare"]),
            target=Target("peer", 0.9) if contestant in ("registered", "unverified") else None,
            transport="tcp" if contestant == "tcp" else "nixl",
            verified=contestant != "unverified",
            notes="the destination is not registered: through bounce memory" if contestant == "unregistered" else "",
            cpu=meters[contestant].cost(),
        )


def main() -> None:
    """Measure all sizes and transports."""
    if sys.argv[1:2] == ["--serve"]:
        count, layers, layer_block_bytes = map(int, sys.argv[2:5])
        serve(count, BlockShape(layers, layer_block_bytes), "" if sys.argv[5] == "auto" else sys.argv[5])
        return
    options = harness.options("nixl_transport", __doc__)
    try:
        NixlAgent(NixlOptions()).open()
    except Unsupported as error:
        print(f"left out: {error}", file=sys.stderr)
        return
    shapes = {"128K": BlockShape(8, 16 << 10), "1M": BlockShape(32, 32 << 10)}
    total = options.pick(full=512 << 20, quick=256 << 20, smoke=16 << 20)
    for block in options.pick(full=("128K", "1M"), quick=("1M",), smoke=("1M",)):
        measure(options, shapes[block], total, "", "pull")
        measure(options, shapes[block], total, "tcp", "push")


if __name__ == "__main__":
    main()
