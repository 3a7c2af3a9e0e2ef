"""Measure a load over TCP from another process, through client and node, against bare sockets with the same bytes and streams.

The client has no local node: it looks keys up and reads over the data plane from the node that holds the blocks, directly into
the caller's buffer. Measured with checksum verification (the default) and without.
"""

from __future__ import annotations

from functools import partial

import numpy as np

import harness
from harness import Figure, Options, Reference, Target
from kvclient import KVClient
from kvclient.options import Verify
from kvstore.core.types import Tier
from kvstore.embedded.cluster import NodeSpec
from peers.sockets import Sockets
from rig import OPTIONS, Chains, cluster, found, loaded, space_for, spec, stored

LAYERS = 32


def measure(options: Options, block_bytes: int, total: int) -> None:
    """Measure one block size."""
    cache = spec(block_bytes, LAYERS)
    blocks = total // block_bytes
    chains = Chains(cache, blocks, options.seed)
    node = NodeSpec("bench", roles=("storage",), dram_bytes=space_for(blocks, block_bytes))
    buffer = np.zeros((blocks, block_bytes), np.uint8)
    with (
        cluster(node, options.scratch) as store,
        KVClient.connect(store.metadata_address, cache, node=None, options=OPTIONS) as client,
        Sockets(total, OPTIONS.tcp_streams) as sockets,
    ):
        chain = chains.next()
        stored(client.store(chain.keys, chain.payload))
        lookup = found(client, chain.keys)

        meters = {verify: harness.CpuMeter(node=store.node("bench").process.pid) for verify in ("auto", "never")}

        def load(verify: Verify) -> float:
            buffer.fill(0)
            rate = meters[verify].gigabytes_per_second(
                total, lambda: loaded(client.load(lookup, buffer, verify=verify), Tier.DRAM)
            )
            chains.check(chain, buffer)
            return rate

        samples = harness.interleave(
            {
                "verified": partial(load, "auto"),
                "sockets": lambda: harness.gigabytes_per_second(total, lambda: sockets.load(block_bytes)),
                "unverified": partial(load, "never"),
            },
            options.repetitions,
        )
    for name, verified, bound in (("verified", True, 0.95), ("unverified", False, 0.95)):
        parameters = {"block_bytes": block_bytes, "total_bytes": total, "layers": LAYERS, "streams": OPTIONS.tcp_streams}
        options.keep(
            Figure("tcp_load", "TCP load from another process", parameters | {"verify": verified}, "GB/s"),
            samples[name],
            peer=Reference("bare sockets", samples["sockets"]),
            target=Target("peer", bound),
            transport="tcp",
            verified=verified,
            cpu=meters["auto" if verified else "never"].cost(),
        )


def main() -> None:
    """Measure all block sizes."""
    options = harness.options("tcp_load", __doc__)
    for block_bytes in options.pick(full=(1 << 20, 4 << 20), quick=(1 << 20,), smoke=(1 << 20,)):
        measure(options, block_bytes, options.pick(full=1 << 30, quick=512 << 20, smoke=8 << 20))


if __name__ == "__main__":
    main()
