"""Measure an index in Valkey against the embedded one: lookups over gRPC from real metadata servers, and publishing in process.

Three metadata servers serve the same chains of 1,600 blocks with replicas on two volumes (as in ``lookup.py``): from LMDB, from a
Valkey Cluster of one shard, and from one of three shards. Clients look them up in turn, one call in flight. The limit is a gRPC
server that answers with a constant. The records also have the commands per lookup that the shards ran, and the CPU time of server
and shards. The notes say how much of it the shards use at rest. Publishing is compared with the same keys as plain ``SET``
commands in one pipeline.
"""

from __future__ import annotations

import os
import random
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import hiredis

from harness import CpuMeter, Figure, Options, Reference, Target, interleave, options
from kvproto.v1.metadata_pb2_grpc import MetadataStub
from kvstore.core.types import KEY_BYTES, BlockKey, BlockRun, BootId, NodeId, Tier, VolumeId
from kvstore.embedded.valkey import ValkeyServers
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.connection import pack
from kvstore.index.valkey.index import ValkeyIndex
from kvstore.index.valkey.keys import record_name
from kvstore.rpc.client import call
from peers.bare_grpc import BareGrpc
from rig.served_index import CHAIN, NAMESPACE, TIMEOUT_S, Client, Served, p50_ms

RUN_CHAINS = 8
"""Chains per publish: a batch of 12,800 keys."""


def commands(cluster: ValkeyServers) -> int:
    """Number of GET commands that all shards have run."""
    total = 0
    for server in cluster.primaries:
        info = server.call("INFO", "commandstats")
        lines = info.decode().splitlines() if isinstance(info, bytes) else []
        total += sum(int(line.split("calls=")[1].split(",")[0]) for line in lines if line.startswith("cmdstat_get:"))
    return total


def shards_cpu_s(cluster: ValkeyServers, work: Callable[[], object]) -> float:
    """CPU seconds of all shards during a call."""
    meter = CpuMeter(**{str(number): one.process.pid for number, one in enumerate(cluster.primaries)})
    meter.time(1, work)
    return sum(used_s for name, used_s in meter.cost("operation").seconds.items() if name != "client")


def measure_lookups(stack: ExitStack, opts: Options, scratch: Path) -> None:
    """Keep the figures of lookups."""
    blocks = opts.pick(full=400_000, quick=100_000, smoke=2 * CHAIN)
    calls = opts.pick(full=1_000, quick=300, smoke=10)
    clusters = {shards: stack.enter_context(ValkeyServers(scratch / f"valkey-{shards}", shards=shards)) for shards in (1, 3)}
    served = {
        0: stack.enter_context(Served(scratch / "lmdb", blocks, opts.seed)),
        **{
            shards: stack.enter_context(Served(scratch / f"server-{shards}", blocks, opts.seed, cluster.seeds))
            for shards, cluster in clusters.items()
        },
    }
    clients = {shards: Client.of(one.address, one.chains) for shards, one in served.items()}
    answer = call(MetadataStub(clients[0].channel).Lookup, clients[0].requests[0], TIMEOUT_S)
    bare = Client.of(stack.enter_context(BareGrpc(answer)).address, served[0].chains)
    for client in (*clients.values(), bare):
        stack.callback(client.channel.close)
    meters = {
        shards: CpuMeter(
            metadata=served[shards].pid,
            **{f"shard {number}": one.process.pid for number, one in enumerate(clusters[shards].primaries)} if shards else {},
        )
        for shards in served
    }
    ran = dict.fromkeys(clusters, 0)
    shards_us: dict[int, list[float]] = {shards: [] for shards in clusters}
    rest_s = opts.pick(full=10.0, quick=5.0, smoke=0.1)
    at_rest = {shards: shards_cpu_s(cluster, lambda: time.sleep(rest_s)) / rest_s for shards, cluster in clusters.items()}

    def p50_of(shards: int) -> float:
        times: list[float] = []
        before = commands(clusters[shards]) if shards else 0

        def work() -> None:
            meters[shards].time(calls, lambda: times.extend(clients[shards].times_s(calls)))

        if not shards:
            work()
            return p50_ms(times)
        shards_us[shards].append(shards_cpu_s(clusters[shards], work) / calls * 1e6)
        ran[shards] += commands(clusters[shards]) - before
        return p50_ms(times)

    contestants = {str(shards): lambda shards=shards: p50_of(shards) for shards in served}
    samples = interleave({**contestants, "bare": lambda: p50_ms(bare.times_s(calls))}, opts.repetitions)
    for shards in served:
        per_lookup = ran[shards] / calls / (opts.repetitions + 1) if shards else 0.0
        opts.keep(
            Figure(
                "sharded_lookup",
                "Lookup of a 1,600-key prefix over gRPC, p50; 0 shards: LMDB",
                {"blocks": blocks, "shards": shards},
                "ms",
                lower_is_better=True,
            ),
            samples[str(shards)],
            limit=Reference("bare gRPC", samples["bare"]),
            peer=Reference("LMDB", samples["0"]) if shards else None,
            target=Target("peer", 1.3) if shards == 3 else None,
            transport="gRPC, loopback TCP",
            cpu=meters[shards].cost("operation"),
            notes=f"{per_lookup:.1f} GET commands per lookup; shards at rest: {at_rest[shards] * 1e3:.1f} ms of CPU/s"
            if shards
            else "",
        )
    for shards, used_us in shards_us.items():
        opts.keep(
            Figure(
                "sharded_lookup_cpu",
                "Lookup of a 1,600-key prefix: CPU time of all shards",
                {"blocks": blocks, "shards": shards},
                "µs",
                lower_is_better=True,
            ),
            used_us[-opts.repetitions :],  # without the round that warms up
            target=Target("value", 60),
            transport="gRPC, loopback TCP",
        )


def plain_sets(port: int, keys: list[BlockKey]) -> float:
    """Keys per second as plain SET commands in one pipeline."""
    packed = b"".join([pack("SET", record_name(key), bytes(16)) for key in keys])
    reader = hiredis.Reader(notEnoughData=Ellipsis)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        start = time.perf_counter()
        connection.sendall(packed)
        replies = 0
        while replies < len(keys):
            reader.feed(connection.recv(1 << 20))
            while reader.gets() is not Ellipsis:
                replies += 1
        return len(keys) / (time.perf_counter() - start)


def measure_publishing(stack: ExitStack, opts: Options, scratch: Path) -> None:
    """Keep the figures of publishing into one shard."""
    cluster = stack.enter_context(ValkeyServers(scratch / "published", shards=1))
    index = ValkeyIndex.open(ValkeyAddress(cluster.seeds))
    stack.callback(index.close)
    volume_epoch = index.open_volume_epoch(VolumeId("v"), NodeId("n"), Tier.NVME, BootId(os.urandom(KEY_BYTES)))
    draw = random.Random(opts.seed)
    batches = opts.pick(full=8, quick=4, smoke=1)
    meter = CpuMeter(shard=cluster.primaries[0].process.pid)

    def fresh() -> list[list[BlockKey]]:
        return [[BlockKey(draw.randbytes(KEY_BYTES)) for _ in range(CHAIN)] for _ in range(RUN_CHAINS)]

    def ours() -> float:
        published = [[BlockRun(NAMESPACE, None, 0, tuple(keys)) for keys in fresh()] for _ in range(batches)]
        count = batches * RUN_CHAINS * CHAIN

        def work() -> None:
            for runs in published:
                index.publish(volume_epoch, runs, ())

        return count / meter.time(count, work)

    port = cluster.primaries[0].port
    samples = interleave(
        {"ours": ours, "plain": lambda: plain_sets(port, [key for keys in fresh() for key in keys])}, opts.repetitions
    )
    opts.keep(
        Figure("sharded_publish", "Publishing chains of 1,600 keys into one shard", {"batch": RUN_CHAINS * CHAIN}, "keys/s"),
        samples["ours"],
        limit=Reference("plain SET, one pipeline", samples["plain"]),
        target=Target("value", 150_000),
        transport="loopback TCP",
        cpu=meter.cost("operation"),
    )


def main() -> None:
    """Measure all figures."""
    opts = options("sharded_index", __doc__)
    with ExitStack() as stack:
        scratch = opts.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-sharded-")))
        measure_lookups(stack, opts, scratch)
        measure_publishing(stack, opts, scratch)


if __name__ == "__main__":
    main()
