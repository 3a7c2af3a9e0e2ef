"""Measure puts and gets of blocks in another process's memory over TCP, 16 blocks per batch, against Mooncake Store.

kvstore: a client without a local node stores each batch to the DRAM of a node in another process, then looks it up and loads it.
The client computes checksums on a put, and the receiving side verifies them in both directions. Mooncake Store: its client's
``batch_put_from`` and ``batch_get_into`` use another process's memory over its TCP transport, without checksums. Both sides
query their metadata server for every get, use separate caller memory per block, and compare the bytes outside the measured time.
Each batch is one chain.

The limit is one bare socket pair that moves and sums the same bytes in batches of the same size.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import numpy as np

import harness
from harness import CpuMeter, Figure, Options, Reference, Target
from kvclient import KVClient
from kvstore.core.types import Tier
from kvstore.embedded.cluster import NodeSpec
from peers import PeerMissingError
from peers.mooncake import Mooncake
from peers.summed_sockets import SummedSockets
from rig import OPTIONS, Chain, Chains, NodeControl, cluster, found, loaded, space_for, spec, stored

LAYERS = 32
BATCH = 16

Measured = tuple[Callable[[], float], Callable[[], float]]
"""GB/s of a put, and of the get of the same blocks."""


def ours(
    client: KVClient, control: NodeControl, chains: Chains, total: int, block_bytes: int, meters: Mapping[str, CpuMeter]
) -> Measured:
    """The side of kvstore."""
    buffer = np.zeros((total // block_bytes, block_bytes), np.uint8)
    current: list[Chain] = []

    def put() -> float:
        control.evict(Tier.DRAM)
        current[:] = [chains.next()]
        [chain] = current

        def work() -> None:
            for at in range(0, len(chain.keys), BATCH):
                stored(client.store(chain.keys[at : at + BATCH], chain.payload[at : at + BATCH]))

        return meters["put"].gigabytes_per_second(total, work)

    def get() -> float:
        [chain] = current
        for at in range(0, len(chain.keys), BATCH):
            found(client, chain.keys[at : at + BATCH])  # publishing is asynchronous
        buffer.fill(0)

        def work() -> None:
            for at in range(0, len(chain.keys), BATCH):
                loaded(client.load(client.lookup(chain.keys[at : at + BATCH]), buffer[at : at + BATCH]), Tier.DRAM)

        rate = meters["get"].gigabytes_per_second(total, work)
        chains.check(chain, buffer)
        return rate

    return put, get


def theirs(mooncake: Mooncake, current: list[str], total: int, block_bytes: int) -> Measured:
    """The side of Mooncake Store, whose driver compares the bytes. ``current`` is the number of the stored batch."""

    def put() -> float:
        if current:
            mooncake.remove(current)
        current[:] = [secrets.token_hex(16) for _ in range(total // block_bytes)]
        return total / mooncake.put(current, block_bytes, BATCH) / 1e9

    def get() -> float:
        return total / mooncake.get(current, block_bytes, BATCH) / 1e9

    return put, get


def measure(options: Options, mooncake: Mooncake | None, missing: str, block_bytes: int, total: int) -> None:
    """Measure one block size."""
    held: list[str] = []
    cache = spec(block_bytes, LAYERS)
    blocks = total // block_bytes
    node = NodeSpec("bench", roles=("storage",), dram_bytes=space_for(blocks, block_bytes))
    with (
        cluster(node, options.scratch) as store,
        KVClient.connect(store.metadata_address, cache, node=None, options=OPTIONS) as client,
        SummedSockets(total, block_bytes // LAYERS) as bare,
    ):
        control = NodeControl(store.node("bench").address)
        servers = {"node": store.node("bench").process.pid, "metadata": store.node("metadata").process.pid}
        meters = {act: CpuMeter(**servers) for act in ("put", "get")}
        sides = {
            "ours": ours(client, control, Chains(cache, blocks, options.seed, BATCH), total, block_bytes, meters),
            "limit": (
                lambda: harness.gigabytes_per_second(total, lambda: bare.put(BATCH * block_bytes)),
                lambda: harness.gigabytes_per_second(total, lambda: bare.get(BATCH * block_bytes)),
            ),
        }
        if mooncake is not None:
            mooncake.buffer(total, options.seed)
            sides["theirs"] = theirs(mooncake, held, total, block_bytes)
        rounds: dict[str, list[float]] = {f"{side} {act}": [] for side in sides for act in ("put", "get")}
        order = list(sides)
        for count in range(-1, options.repetitions):
            for side in order:
                put, get = sides[side]
                values = {f"{side} put": put(), f"{side} get": get()}
                if count >= 0:
                    for name, value in values.items():
                        rounds[name].append(value)
            order.reverse()
        if mooncake is not None:
            mooncake.remove(held)
        control.close()
    for act in ("put", "get"):
        options.keep(
            Figure(
                act,
                f"{act.capitalize()} to another process's memory",
                {"block_bytes": block_bytes, "batch": BATCH, "layers": LAYERS},
                "GB/s",
            ),
            rounds[f"ours {act}"],
            limit=Reference("bare sockets, summed", rounds[f"limit {act}"]),
            peer=Reference("Mooncake Store", rounds[f"theirs {act}"]) if mooncake is not None else None,
            target=Target("peer", 1.6 if block_bytes < 8 << 20 else 2.0),
            transport="tcp",
            verified=True,
            notes=missing or "our checksums are on; the peer has none",
            cpu=meters[act].cost(),
        )


def main() -> None:
    """Measure all block sizes."""
    options = harness.options("put_get", __doc__)
    total = options.pick(full=512 << 20, quick=256 << 20, smoke=32 << 20)
    mooncake, missing = None, ""
    if options.mode != "smoke":
        try:
            mooncake = Mooncake(4 * total)  # large enough to avoid eviction
        except PeerMissingError as error:
            missing = str(error).splitlines()[0]
            print(f"WARNING: {error}", flush=True)
    try:
        for block_bytes in options.pick(full=(1 << 20, 8 << 20), quick=(1 << 20, 8 << 20), smoke=(1 << 20,)):
            measure(options, mooncake, missing, block_bytes, total)
    finally:
        if mooncake is not None:
            mooncake.close()


if __name__ == "__main__":
    main()
