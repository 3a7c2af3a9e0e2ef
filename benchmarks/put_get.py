"""Put and get of blocks in another process's memory over TCP, 16 a batch, against Mooncake Store in the same run.

Ours: a client without a node of its own stores a batch to, and looks up and loads it from, the DRAM of a node in another
process; checksums are made on the way in, and verified by the receiving side both ways. Mooncake Store: ``batch_put_from`` and
``batch_get_into`` of its client against the memory that another process lends, over its TCP transport, without checksums. Both
sides ask their metadata server for every get, keep the caller's memory apart from block to block, and compare what they got
with what they put, outside of the time. A batch is a chain of its own.

The limit is one bare socket pair that moves and sums as many bytes in as large batches, and knows nothing of blocks.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import numpy as np

import harness
from harness import Figure, Options, Reference, Target
from kvclient import KVClient
from kvstore.core.types import Tier
from kvstore.embedded.cluster import NodeSpec
from peers import PeerMissingError
from peers.mooncake import Mooncake
from peers.summed_sockets import SummedSockets
from rig import OPTIONS, Chain, Chains, NodeControl, cluster, found, loaded, room_for, spec, stored

LAYERS = 32
BATCH = 16

Measured = tuple[Callable[[], float], Callable[[], float]]
"""A put, and the get of what it put: GB/s."""


def ours(client: KVClient, control: NodeControl, chains: Chains, total: int, block_bytes: int) -> Measured:
    """Our side."""
    buffer = np.zeros((total // block_bytes, block_bytes), np.uint8)
    current: list[Chain] = []

    def put() -> float:
        control.evict(Tier.DRAM)
        current[:] = [chains.next()]
        [chain] = current

        def work() -> None:
            for at in range(0, len(chain.keys), BATCH):
                stored(client.store(chain.keys[at : at + BATCH], chain.payload[at : at + BATCH]))

        return harness.gigabytes_per_second(total, work)

    def get() -> float:
        [chain] = current
        for at in range(0, len(chain.keys), BATCH):
            found(client, chain.keys[at : at + BATCH])  # publishing is asynchronous
        buffer.fill(0)

        def work() -> None:
            for at in range(0, len(chain.keys), BATCH):
                loaded(client.load(client.lookup(chain.keys[at : at + BATCH]), buffer[at : at + BATCH]), Tier.DRAM)

        rate = harness.gigabytes_per_second(total, work)
        chains.check(chain, buffer)
        return rate

    return put, get


def theirs(mooncake: Mooncake, current: list[str], total: int, block_bytes: int) -> Measured:
    """Mooncake's side; its client compares the bytes. ``current`` names what it holds."""

    def put() -> float:
        if current:
            mooncake.remove(current)
        current[:] = [secrets.token_hex(16) for _ in range(total // block_bytes)]
        return total / mooncake.put(current, block_bytes, BATCH) / 1e9

    def get() -> float:
        return total / mooncake.get(current, block_bytes, BATCH) / 1e9

    return put, get


def measure(options: Options, mooncake: Mooncake | None, missing: str, block_bytes: int, total: int) -> None:
    """One block size."""
    held: list[str] = []
    cache = spec(block_bytes, LAYERS)
    blocks = total // block_bytes
    node = NodeSpec("bench", roles=("storage",), dram_bytes=room_for(blocks, block_bytes))
    with (
        cluster(node, options.scratch) as store,
        KVClient.connect(store.metadata_address, cache, node=None, options=OPTIONS) as client,
        SummedSockets(total, block_bytes // LAYERS) as bare,
    ):
        control = NodeControl(store.node("bench").address)
        sides = {
            "ours": ours(client, control, Chains(cache, blocks, options.seed, BATCH), total, block_bytes),
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
            target=Target("peer", 1.5),
            transport="tcp",
            verified=True,
            notes=missing or "our checksums are on; the peer has none",
        )


def main() -> None:
    """Command line."""
    options = harness.options("put_get", __doc__)
    total = options.pick(full=512 << 20, quick=256 << 20, smoke=32 << 20)
    mooncake, missing = None, ""
    if options.mode != "smoke":
        try:
            mooncake = Mooncake(4 * total)  # far from where it would begin to evict
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
