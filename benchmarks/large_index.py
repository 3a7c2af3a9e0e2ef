"""Measure an index of many blocks in three Valkey shards: memory per block, lookups, a pass of anti-entropy, a sweep.

``--blocks`` sets the size. The machine needs 100 bytes of free memory per block, and 2 GiB more. The records are written straight
into the shards: a sample is published, too, and compared. Lookups go through gRPC to a real metadata server, in turn with lookups
in an index of a tenth of the blocks, or of a million. The shards use jemalloc if its library is on this machine (as Valkey's own
packages do), else the allocator of libc.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from ctypes.util import find_library
from pathlib import Path

import numpy as np

from harness import CpuMeter, Figure, Options, Reference, Target, interleave, options
from kvproto.v1.metadata_pb2 import CompareDigestsRequest
from kvproto.v1.metadata_pb2_grpc import MetadataStub
from kvstore.core.limits import DIGEST_RANGES
from kvstore.core.types import KEY_BYTES, BlockKey, NodeId, Tier, VolumeId
from kvstore.embedded.valkey import ValkeyServers
from kvstore.index.contract import PrefixIndex
from kvstore.index.valkey.keys import record_name
from kvstore.rpc.client import call
from rig.chain_writer import CHAINS_AT_ONCE, ChainWriter, available_bytes
from rig.served_index import (
    BOOT_ID,
    CHAIN,
    NODE_ID,
    SAMPLE_CHAINS,
    TIERS,
    TIMEOUT_S,
    Client,
    Served,
    open_valkey,
    p50_ms,
    publish_chain,
    register_volumes,
)

SHARDS = 3
NEEDED_BYTES = 100
"""Memory per block."""
SPARE_BYTES = 2 << 30
PASSES = 2
"""Passes of a sweep: a record may be written while the first one runs."""
PASS_S = 1_200.0
"""Deadline of one pass of anti-entropy."""
BESIDE_S = 0.05
"""Pause between two lookups beside a pass."""


class LargeIndex:
    """A cluster, its contents, and the metadata server that serves them."""

    def __init__(self, stack: ExitStack, folder: Path, blocks: int, seed: int) -> None:
        self.blocks = blocks // CHAIN * CHAIN
        jemalloc = find_library("jemalloc")
        self.allocator = "jemalloc" if jemalloc else "libc"
        env = {**os.environ, "LD_PRELOAD": jemalloc} if jemalloc else None
        self.cluster = stack.enter_context(ValkeyServers(folder / "valkey", shards=SHARDS, env=env))
        self._empty_bytes = self.memory("used_memory_rss")
        self.served = stack.enter_context(Served(folder / "server", blocks, seed, self.cluster.seeds, self._fill))
        self.client = Client.of(self.served.address, self.served.chains)
        stack.callback(self.client.channel.close)

    def memory(self, name: str) -> int:
        """The sum of one figure of ``INFO memory``."""
        found = 0
        for server in self.cluster.primaries:
            info = server.call("INFO", "memory")
            lines = info.decode().splitlines() if isinstance(info, bytes) else []
            found += next(int(line.split(":")[1]) for line in lines if line.startswith(f"{name}:"))
        return found

    def resident_bytes_per_block(self) -> float:
        """Resident memory of the shards per block, less that of empty shards."""
        return (self.memory("used_memory_rss") - self._empty_bytes) / self.blocks

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the shards."""
        return {f"shard {number}": one.process.pid for number, one in enumerate(self.cluster.primaries)}

    def _fill(self, index: PrefixIndex, blocks: int, seed: int) -> list[bytes]:
        dram, nvme = register_volumes(index, TIERS)
        sample = random.Random(seed).randbytes(KEY_BYTES * CHAIN)
        publish_chain(index, dram, nvme, sample)
        published = [self._record(sample[at : at + KEY_BYTES]) for at in range(0, len(sample), KEY_BYTES)]
        writer = ChainWriter(self.cluster, published[0])
        writer.check(sample, published)
        draw, chains = np.random.default_rng(seed), blocks // CHAIN - 1
        kept = set(random.Random(seed).sample(range(chains), min(chains, SAMPLE_CHAINS - 1)))
        samples = [sample]
        for first in range(0, chains, CHAINS_AT_ONCE):
            count = min(CHAINS_AT_ONCE, chains - first)
            keys = np.frombuffer(draw.bytes(count * CHAIN * KEY_BYTES), np.uint8).reshape(count, CHAIN, KEY_BYTES)
            writer.write(keys)
            samples += [keys[at - first].tobytes() for at in range(first, first + count) if at in kept]
        writer.close()
        return samples

    def _record(self, key: bytes) -> bytes:
        name = record_name(BlockKey(key))
        for server in self.cluster.primaries:
            reply = server.call("GET", name)
            if isinstance(reply, bytes):
                return reply
        sys.exit("a published block has no record")


def measure_size(large: LargeIndex, opts: Options) -> None:
    """Keep the figure of memory."""
    used, rss = large.memory("used_memory"), large.memory("used_memory_rss")
    opts.keep(
        Figure(
            "large_index_memory",
            "Index in Valkey: resident bytes per block",
            {"allocator": large.allocator, "blocks": large.blocks, "shards": SHARDS},
            "bytes",
            lower_is_better=True,
        ),
        [large.resident_bytes_per_block()],
        target=Target("value", NEEDED_BYTES),
        notes=f"used_memory {used / large.blocks:.1f} bytes per block, resident / used {rss / used:.3f}",
    )


def measure_lookups(large: LargeIndex, small: LargeIndex, opts: Options) -> None:
    """Keep the figure of lookups."""
    calls = opts.pick(full=1_000, quick=300, smoke=10)
    meter = CpuMeter(metadata=large.served.pid, **large.pids)

    def in_large() -> float:
        times: list[float] = []
        meter.time(calls, lambda: times.extend(large.client.times_s(calls)))
        return p50_ms(times)

    samples = interleave({"large": in_large, "small": lambda: p50_ms(small.client.times_s(calls))}, opts.repetitions)
    opts.keep(
        Figure(
            "large_index_lookup",
            "Lookup p50 in a large index in Valkey",
            {"blocks": large.blocks, "keys": CHAIN, "shards": SHARDS},
            "ms",
            lower_is_better=True,
        ),
        samples["large"],
        peer=Reference(f"the same with {small.blocks} blocks", samples["small"]),
        target=Target("peer", 1.3),
        transport="gRPC, loopback TCP",
        cpu=meter.cost("operation"),
    )


def measure_pass(large: LargeIndex, opts: Options) -> None:
    """Keep the figure of one pass of anti-entropy, with lookups beside it."""
    meter = CpuMeter(metadata=large.served.pid, **large.pids)
    stub = MetadataStub(large.client.channel)
    request = CompareDigestsRequest(
        node_id=NODE_ID, boot_id=BOOT_ID, volume_id="host-1/nvme0", digests=[0] * DIGEST_RANGES, counts=[0] * DIGEST_RANGES
    )
    times: list[float] = []
    hits: list[int] = []
    finished = threading.Event()

    def look_up() -> None:
        while not (hits and finished.wait(BESIDE_S)):
            begun_s = time.perf_counter()
            answer = call(stub.Lookup, large.client.requests[len(times) % len(large.client.requests)], TIMEOUT_S)
            times.append(time.perf_counter() - begun_s)
            hits.append(answer.hit_blocks)

    answers = []
    beside = threading.Thread(target=look_up)
    beside.start()
    try:
        elapsed_s = meter.time(large.blocks / 1e6, lambda: answers.append(call(stub.CompareDigests, request, PASS_S)))
    finally:
        finished.set()
        beside.join()
    if len(answers[0].differing_ranges) != DIGEST_RANGES and opts.mode != "smoke":
        sys.exit(f"a pass read {len(answers[0].differing_ranges)} of {DIGEST_RANGES} ranges")
    cost = meter.cost("operation")
    short = sum(hit < CHAIN for hit in hits)
    opts.keep(
        Figure(
            "large_index_pass",
            "Anti-entropy: one pass over an index in Valkey, CPU time per million records",
            {"blocks": large.blocks, "shards": SHARDS},
            "s",
            lower_is_better=True,
        ),
        [sum(used for name, used in cost.seconds.items() if name != "client")],
        target=Target("value", 1.0),
        cpu=cost,
        notes=(
            f"{elapsed_s:.1f} s; {len(times)} lookups beside it: p50 {p50_ms(times):.2f} ms, p99"
            f" {sorted(times)[len(times) * 99 // 100] * 1e3:.1f} ms, {short} with a hit that is too short"
        ),
    )


def measure_sweep(large: LargeIndex, opts: Options) -> None:
    """Keep the figure of one sweep that finds nothing to remove. It reads all records twice."""
    large.served.stop()  # it would sweep, too
    index = open_valkey(large.cluster.seeds)
    meter = CpuMeter(**large.pids)
    closed = index.open_volume_epoch(VolumeId("host-2/dram"), NodeId("host-2"), Tier.DRAM, BOOT_ID)
    index.close_volume_epoch(closed)

    def sweep() -> None:
        while not index.sweep(1_024):
            pass

    elapsed_s = meter.time(PASSES * large.blocks / 1e6, sweep)
    index.close()
    cost = meter.cost("operation")
    opts.keep(
        Figure(
            "large_index_sweep",
            "Sweep: CPU time per million records and pass over an index in Valkey",
            {"blocks": large.blocks, "shards": SHARDS},
            "s",
            lower_is_better=True,
        ),
        [sum(cost.seconds.values())],
        cpu=cost,
        target=Target("value", 1.0),
        notes=f"{elapsed_s:.1f} s for {PASSES} passes; the closed volume epoch held no blocks",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this script."""
    parser.add_argument("--blocks", type=int, help="blocks of the large index (default 1000000)")


def main() -> None:
    """Measure all figures."""
    opts = options("large_index", __doc__, arguments=add_arguments)
    blocks = opts.extra.blocks or opts.pick(full=1_000_000, quick=200_000, smoke=40 * CHAIN)
    fewer = min(1_000_000, blocks // 10)
    if available_bytes() < (needed := blocks * NEEDED_BYTES + SPARE_BYTES):
        sys.exit(f"{blocks} blocks need {needed >> 20} MiB of free memory, and {available_bytes() >> 20} MiB are available")
    with ExitStack() as stack:
        scratch = opts.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-large-")))
        began_s = time.perf_counter()
        large = LargeIndex(stack, scratch / "large", blocks, opts.seed)
        print(f"filled {large.blocks} blocks in {time.perf_counter() - began_s:.0f} s", flush=True)
        small = LargeIndex(stack, scratch / "small", fewer, opts.seed)
        measure_size(large, opts)
        measure_lookups(large, small, opts)
        measure_pass(large, opts)
        measure_sweep(large, opts)


if __name__ == "__main__":
    main()
