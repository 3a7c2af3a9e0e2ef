"""Measure a hit in this host's DRAM: 512 blocks through the client into a caller's buffer, against one memcpy of the same bytes.

The peer copies the same number of bytes from shared memory of the same pages into the same buffer with one ``memmove``. The limit
copies the blocks as the client does, with two threads, after one gRPC call. The client does not verify checksums again, because
they were verified when the bytes entered DRAM; ``verify="always"`` does and is measured as well.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import numpy as np

import harness
from harness import Figure, Options, Reference, Target
from kvclient import KVClient
from kvclient.options import Verify
from kvstore.core.buffers import DenseBlocks
from kvstore.core.types import BlockShape, Tier
from kvstore.embedded.cluster import NodeSpec
from peers.bare_load import BareLoad
from peers.memory import SharedCopy
from rig import OPTIONS, Chains, NodeControl, cluster, found, loaded, space_for, spec, stored

LAYERS = 32


def measure(options: Options, block_bytes: int, blocks: int) -> None:
    """Measure one block size."""
    cache = spec(block_bytes, LAYERS)
    total = blocks * block_bytes
    chains = Chains(cache, blocks, options.seed)
    node = NodeSpec("bench", dram_bytes=space_for(blocks, block_bytes))
    buffer = np.zeros((blocks, block_bytes), np.uint8)
    shape = BlockShape(LAYERS, block_bytes // LAYERS)
    destination = DenseBlocks(buffer.reshape(blocks, shape.layers, shape.layer_block_bytes))
    with (
        ExitStack() as held,
        cluster(node, options.scratch) as store,
        KVClient.connect(store.metadata_address, cache, node=store.node("bench").local_socket, options=OPTIONS) as client,
        SharedCopy(total) as memory,
    ):
        chain = chains.next()
        bare = held.enter_context(BareLoad(shape, chain.keys))
        stored(client.store(chain.keys, chain.payload))
        lookup = found(client, chain.keys)
        meters = {verify: harness.CpuMeter(node=store.node("bench").process.pid) for verify in ("auto", "always")}

        def load(verify: Verify) -> float:
            buffer.fill(0)
            rate = meters[verify].gigabytes_per_second(
                total, lambda: loaded(client.load(lookup, buffer, verify=verify), Tier.DRAM)
            )
            chains.check(chain, buffer)
            return rate

        def memcpy() -> float:
            buffer.fill(0)  # as before a load: both find the buffer in the same state of the caches
            return harness.gigabytes_per_second(total, lambda: memory.copy_into(buffer))

        def least(*, verify: bool) -> float:
            buffer.fill(0)
            return harness.gigabytes_per_second(total, lambda: bare.load(destination, verify=verify))

        samples = harness.interleave(
            {
                "load": partial(load, "auto"),
                "memcpy": memcpy,
                "bare": partial(least, verify=False),
                "summed": partial(load, "always"),
                "bare, summed": partial(least, verify=True),
            },
            options.repetitions,
        )
        pages = f"peer and limit copy from {memory.memory.pages}"
        control = NodeControl(store.node("bench").address)
        engine = control.io_engines()  # names the pages of the arena
        control.close()
    peer = Reference("one memcpy", samples["memcpy"])
    parameters = {"blocks": blocks, "block_bytes": block_bytes, "layers": LAYERS}
    options.keep(
        Figure("dram_hit", "DRAM hit on the same host", parameters | {"verify": "auto"}, "GB/s"),
        samples["load"],
        peer=peer,
        limit=Reference("call and copy, 2 threads", samples["bare"]),
        target=Target("peer", 1.5 if block_bytes >= 1 << 20 else 1.3),
        transport="shared memory",
        io_engine=engine,
        notes=f"bytes in DRAM were verified on arrival and are not summed again on a local load; {pages}",
        cpu=meters["auto"].cost(),
    )
    options.keep(
        Figure("dram_hit", "DRAM hit on the same host", parameters | {"verify": "always"}, "GB/s"),
        samples["summed"],
        peer=peer,
        limit=Reference("call, copy and sums, 2 threads", samples["bare, summed"]),
        target=Target("peer", 1.1 if block_bytes >= 1 << 20 else 1.0),
        transport="shared memory",
        io_engine=engine,
        verified=True,
        notes=pages,
        cpu=meters["always"].cost(),
    )


def main() -> None:
    """Measure all block sizes."""
    options = harness.options("dram_hit", __doc__)
    for block_bytes in options.pick(full=(64 << 10, 1 << 20, 4 << 20), quick=(64 << 10, 1 << 20), smoke=(64 << 10,)):
        measure(options, block_bytes, options.pick(full=512, quick=256, smoke=16))


if __name__ == "__main__":
    main()
