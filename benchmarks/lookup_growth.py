"""Measure whether lookups slow down as the index grows: p50 with 10,000,000 blocks against 10,000, and index bytes per block.

Two real metadata server processes serve the two indexes at the same time. Every answer is checked.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from harness import Figure, Reference, Target, interleave, options
from kvproto.v1.metadata_pb2 import GetStatsRequest
from kvproto.v1.metadata_pb2_grpc import MetadataStub
from kvstore.rpc.client import call
from rig.served_index import CHAIN, TIMEOUT_S, Client, Served, p50_ms


def main() -> None:
    """Measure both indexes."""
    opts = options("lookup_growth", __doc__)
    large, small = opts.pick(full=10_000_000, quick=1_000_000, smoke=4 * CHAIN), opts.pick(full=10_000, quick=10_000, smoke=CHAIN)
    calls = opts.pick(full=1_000, quick=300, smoke=10)
    with ExitStack() as stack:
        scratch = opts.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-lookup-")))
        few = stack.enter_context(Served(scratch / f"index-{small}", small, opts.seed))
        many = stack.enter_context(Served(scratch / f"index-{large}", large, opts.seed))
        on_few, on_many = Client.of(few.address, few.chains), Client.of(many.address, many.chains)
        samples = interleave(
            {"many": lambda: p50_ms(on_many.times_s(calls)), "few": lambda: p50_ms(on_few.times_s(calls))}, opts.repetitions
        )
        opts.keep(
            Figure("lookup_growth", "Lookup p50 in a large index", {"blocks": large, "keys": CHAIN}, "ms", lower_is_better=True),
            samples["many"],
            peer=Reference(f"the same with {small} blocks", samples["few"]),
            target=Target("peer", 1.5),
            transport="gRPC, loopback TCP",
        )
        stats = call(MetadataStub(on_many.channel).GetStats, GetStatsRequest(), TIMEOUT_S)
        opts.keep(
            Figure(
                "lookup_index_bytes", "Index bytes per block (two replicas)", {"blocks": large}, "bytes", lower_is_better=True
            ),
            [stats.index_bytes / stats.blocks],
            target=Target("value", 160),
        )
        on_few.channel.close()
        on_many.channel.close()


if __name__ == "__main__":
    main()
