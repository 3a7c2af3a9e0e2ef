"""Measure loads of few blocks from this host's DRAM, as the latency of one load: 1 and 20 blocks of 1 MiB.

The limit is one gRPC call whose handler returns a constant, and the copy of the same blocks out of shared memory. The peer copies
the same bytes with one ``memcpy``. All bytes are checked.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from harness import CpuMeter, Figure, Options, Reference, interleave, options
from kvclient import KVClient
from kvstore.core.buffers import DenseBlocks
from kvstore.core.types import BlockShape, Tier
from kvstore.embedded.cluster import NodeSpec
from peers.bare_load import BareLoad
from peers.memory import SharedCopy
from rig import OPTIONS, Chains, cluster, found, loaded, space_for, spec, stored

LAYERS = 32
BLOCK_BYTES = 1 << 20


def measure(opts: Options, blocks: int, loads: int) -> None:
    """Measure one number of blocks."""
    cache = spec(BLOCK_BYTES, LAYERS)
    shape = BlockShape(LAYERS, BLOCK_BYTES // LAYERS)
    chains = Chains(cache, blocks, opts.seed)
    buffer = np.zeros((blocks, BLOCK_BYTES), np.uint8)
    destination = DenseBlocks(buffer.reshape(blocks, shape.layers, shape.layer_block_bytes))
    node = NodeSpec("bench", dram_bytes=space_for(blocks, BLOCK_BYTES))
    with ExitStack() as stack:
        store = stack.enter_context(cluster(node, opts.scratch))
        bench = store.node("bench")
        client = stack.enter_context(KVClient.connect(store.metadata_address, cache, node=bench.local_socket, options=OPTIONS))
        chain = chains.next()
        stored(client.store(chain.keys, chain.payload))
        lookup = found(client, chain.keys)
        bare = stack.enter_context(BareLoad(shape, chain.keys))
        memory = stack.enter_context(SharedCopy(blocks * BLOCK_BYTES))
        meter = CpuMeter(node=bench.process.pid)

        def ours() -> float:
            times: list[float] = []
            buffer.fill(0)
            meter.time(loads, lambda: times.append(p50_ms(lambda: loaded(client.load(lookup, buffer), Tier.DRAM), loads)))
            chains.check(chain, buffer)
            return times[0]

        samples = interleave(
            {
                "ours": ours,
                "limit": lambda: p50_ms(lambda: bare.load(destination, verify=False), loads),
                "peer": lambda: p50_ms(lambda: memory.copy_into(buffer), loads),
            },
            opts.repetitions,
        )
    opts.keep(
        Figure(
            "small_load",
            "Load of few blocks from this host's DRAM, p50",
            {"blocks": blocks, "block_bytes": BLOCK_BYTES, "layers": LAYERS},
            "ms",
            lower_is_better=True,
        ),
        samples["ours"],
        limit=Reference("call and copy, 2 threads", samples["limit"]),
        peer=Reference("one memcpy", samples["peer"]),
        transport="shared memory",
        cpu=meter.cost("operation"),
    )


def p50_ms(work: Callable[[], object], count: int) -> float:
    """Median duration of some calls, in milliseconds."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    """Measure both."""
    opts = options("small_loads", __doc__)
    for blocks in (1, 20):
        measure(opts, blocks, opts.pick(full=500, quick=200, smoke=5))


if __name__ == "__main__":
    main()
