"""Measure the CPU time of verified loads, client and node together, against the same store with its kernel in Python.

The peer is a node and a client that run with ``KVSTORE_NATIVE=python``. Clients are processes of their own. The limit copies and
sums the same blocks in one call of the kernel (loads from this host's node), or moves them over bare sockets and sums them with
the kernel (loads over TCP).
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import numpy as np

from harness import CpuMeter, Figure, Options, Reference, Target, interleave, options
from kvstore.core.buffers import DenseBlocks
from kvstore.core.types import BlockShape
from kvstore.embedded.cluster import NodeSpec
from peers.bare_load import BareLoad
from peers.sockets import Sockets
from rig import OPTIONS, cluster, space_for
from rig.load_child import LoadChild, kernel_of_children

LAYERS = 32
KERNELS = {"native": "", "python": "python"}
GIB = 1 << 30


class Loads:
    """A store and a client of it, both with one kernel."""

    def __init__(self, stack: ExitStack, opts: Options, kernel: str, block_bytes: int, blocks: int, *, local: bool) -> None:
        node = NodeSpec("bench", roles=("storage",), dram_bytes=space_for(blocks, block_bytes))
        with kernel_of_children(KERNELS[kernel]):
            store = stack.enter_context(cluster(node, opts.scratch))
            bench = store.node("bench")
            at = bench.local_socket if local else None
            self.child = stack.enter_context(LoadChild(store.metadata_address, at, block_bytes, LAYERS, blocks, opts.seed))
        assert (self.child.kernel == "python") == (kernel == "python"), self.child.kernel
        self._total = blocks * block_bytes
        self._processes = {"client": self.child.pid, "node": bench.process.pid}
        self.meter = CpuMeter(**self._processes)

    def cpu_s(self) -> float:
        """CPU seconds per GiB of one load."""
        self.child.ask("fill")
        once = CpuMeter(**self._processes)
        self.meter.time(self._total / GIB, partial(once.time, self._total / GIB, partial(self.child.ask, "load")))
        self.child.ask("check")
        return sum(once.cost().seconds.values())


def least_cpu_s(stack: ExitStack, block_bytes: int, blocks: int, *, local: bool) -> partial[float]:
    """Return what measures the CPU seconds per GiB of the limit."""
    total = blocks * block_bytes
    layer_bytes = block_bytes // LAYERS
    if not local:
        sockets = stack.enter_context(Sockets(total, OPTIONS.tcp_streams, layer_bytes))
        return partial(_spent_s, total, partial(sockets.load, block_bytes), server=sockets.pid)
    keys = [bytes(16)] * blocks
    bare = stack.enter_context(BareLoad(BlockShape(LAYERS, layer_bytes), keys))
    buffer = DenseBlocks(np.zeros((blocks, LAYERS, layer_bytes), np.uint8))
    return partial(_spent_s, total, partial(bare.load, buffer, verify=True))


def _spent_s(total: int, work: partial[None], **others: int) -> float:
    meter = CpuMeter(**others)
    meter.time(total / GIB, work)
    return sum(meter.cost().seconds.values())


def measure(opts: Options, block_bytes: int, blocks: int, *, local: bool) -> None:
    """Measure loads from this host's node or over TCP."""
    with ExitStack() as stack:
        both = {kernel: Loads(stack, opts, kernel, block_bytes, blocks, local=local) for kernel in KERNELS}
        least = least_cpu_s(stack, block_bytes, blocks, local=local)
        samples = interleave({**{kernel: loads.cpu_s for kernel, loads in both.items()}, "limit": least}, opts.repetitions)
    opts.keep(
        Figure(
            "verified_cpu",
            "CPU time of a verified load, client and node",
            {
                "path": "local" if local else "tcp",
                "block_bytes": block_bytes,
                "layers": LAYERS,
                "blocks": blocks,
            },
            "s/GiB",
            lower_is_better=True,
        ),
        samples["native"],
        peer=Reference("the kernel in Python", samples["python"]),
        limit=Reference("call, copy and sums" if local else "bare sockets and sums", samples["limit"]),
        target=Target("peer", 0.5),
        transport="shared memory" if local else "tcp",
        verified=True,
        cpu=both["native"].meter.cost(),
    )


def main() -> None:
    """Measure both paths."""
    opts = options("verified_cpu", __doc__)
    for local in (True, False):
        measure(opts, 1 << 20, opts.pick(full=512, quick=256, smoke=8), local=local)


if __name__ == "__main__":
    main()
