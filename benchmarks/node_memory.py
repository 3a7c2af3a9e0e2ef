"""Measure memory per block: anonymous memory of a node, and of the metadata server with its index file.

A node process with a small arena and an NVMe volume of tiny slots is filled in steps through the client. After each step, once
all blocks are durable and published, the anonymous memory (``RssAnon``) of both processes is read. The figure is the slope of a
linear fit, so that the memory of an empty process does not count. Then the node is restarted with its full volume
("recovered"). In a second store, whose volume holds a fraction of the blocks, eviction runs until the eviction policy remembers
its maximum of evicted keys ("churned"); that figure is the memory beyond that of an empty process, per block held.

``--breakdown`` fills a block table in this process, without a node, and prints the bytes by source line (``tracemalloc``).
"""

from __future__ import annotations

import argparse
import gc
import shutil
import tempfile
import time
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import harness
from harness import Figure, Options, Target
from kvclient import KVClient
from kvproto.v1 import metadata_pb2, metadata_pb2_grpc, node_pb2, node_pb2_grpc
from kvstore.embedded.cluster import Daemon, LocalCluster, NodeSpec
from kvstore.lab.filled_table import FilledTable
from kvstore.rpc.client import call, connect
from kvstore.tiers.nvme.slot_header import slot_bytes
from rig import CALL_S, OPTIONS, Chains, cluster, found, spec, stored

LAYERS = 32
BLOCK_BYTES = 4096
CHAIN_BLOCKS = 32
BATCH_BLOCKS, FEW_BLOCKS = 4096, 512
DRAM_BYTES = 64 << 20
CHURN_FACTOR = 6
"""Blocks stored per block that the churned volume holds: the volume itself, four evicted keys per block, and a margin."""
WANTED_BYTES = 400.0
SETTLE_S = 1.0
SHOWN_LINES = 25


def rss_anon(daemon: Daemon) -> int:
    """Read the anonymous memory of a process in bytes: its heap without mapped files and the shared arena."""
    lines = Path(f"/proc/{daemon.process.pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


@dataclass(slots=True)
class Steps:
    """Memory at each number of blocks."""

    blocks: list[int] = field(default_factory=list)
    node: list[int] = field(default_factory=list)
    metadata: list[int] = field(default_factory=list)
    index: list[int] = field(default_factory=list)

    def slope(self, values: list[int]) -> float:
        """Slope of the fit in bytes per block."""
        return float(np.polyfit(self.blocks, values, 1)[0])


class Bed:
    """A store that is filled in steps, and the calls that observe it."""

    def __init__(self, store: LocalCluster) -> None:
        self._store = store
        self._metadata = metadata_pb2_grpc.MetadataStub(connect(store.metadata_address))

    def durable_blocks(self) -> int:
        """Number of blocks on the volume."""
        stub = node_pb2_grpc.NodeStub(connect(self._store.node("bench").address))
        tiers = call(stub.GetNodeStats, node_pb2.GetNodeStatsRequest(), CALL_S).tiers
        return next(int(tier.blocks) for tier in tiers if "nvme" in tier.volume_id)

    def fill(self, client: KVClient, chains: Chains, blocks: int) -> None:
        """Store at least ``blocks`` blocks, make them durable, and wait until the index contains them."""
        last, filled = None, 0
        while filled < blocks:
            last = chains.next()
            filled += len(last.keys)
            for at in range(0, len(last.keys), CHAIN_BLOCKS):
                stored(client.store(last.keys[at : at + CHAIN_BLOCKS], last.payload[at : at + CHAIN_BLOCKS]))
        assert last is not None
        result = client.store(last.keys[-CHAIN_BLOCKS:], last.payload[-CHAIN_BLOCKS:], durable=True)
        if not result.durable:
            raise SystemExit(f"the blocks did not become durable: {result.error}")
        found(client, last.keys[-CHAIN_BLOCKS:])
        time.sleep(SETTLE_S)

    def read(self, steps: Steps) -> None:
        """Add a point to the fit."""
        stats = call(self._metadata.GetStats, metadata_pb2.GetStatsRequest(), CALL_S)
        steps.blocks.append(self.durable_blocks())
        steps.node.append(rss_anon(self._store.node("bench")))
        steps.metadata.append(rss_anon(self._store.node("metadata")))
        steps.index.append(int(stats.index_bytes))


def _node(blocks: int) -> NodeSpec:
    space = blocks * slot_bytes(spec(BLOCK_BYTES, LAYERS).shape) * 21 // 20 + (64 << 20)
    return NodeSpec("bench", dram_bytes=DRAM_BYTES, nvme_bytes=space)


def measure_filled(options: Options, folder: Path, sizes: list[int]) -> None:
    """Measure with a volume that holds all blocks."""
    cache = spec(BLOCK_BYTES, LAYERS)
    batch = options.pick(full=BATCH_BLOCKS, quick=BATCH_BLOCKS, smoke=FEW_BLOCKS)
    chains = Chains(cache, batch, options.seed, CHAIN_BLOCKS)
    steps = Steps()
    with cluster(_node(sizes[-1] + 2 * batch), folder) as store:
        empty = rss_anon(store.node("bench"))
        bed = Bed(store)
        with KVClient.connect(store.metadata_address, cache, node=store.node("bench").local_socket, options=OPTIONS) as client:
            for before, size in zip([0, *sizes], sizes, strict=False):
                bed.fill(client, chains, size - before)
                bed.read(steps)
        keep(options, "node_memory", "Node: memory per block", "filled", steps.slope(steps.node), sizes[-1], WANTED_BYTES)
        keep(options, "metadata_memory", "Metadata server: memory per block", "filled", steps.slope(steps.metadata), sizes[-1])
        keep(options, "metadata_index", "Metadata server: index file per block", "filled", steps.slope(steps.index), sizes[-1])
        print(f"  node of no blocks {empty / 1e6:.0f} MB; at {steps.blocks} blocks: node {steps.node}, metadata {steps.metadata}")
        store.stop("bench")
        store.start_node("bench")
        time.sleep(3 * SETTLE_S)  # the node has sent its inventory
        recovered = (rss_anon(store.node("bench")) - empty) / bed.durable_blocks()
    keep(options, "node_memory", "Node: memory per block", "recovered", recovered, sizes[-1], WANTED_BYTES)


def measure_churned(options: Options, folder: Path, blocks: int) -> None:
    """Measure with a volume that evicts."""
    cache = spec(BLOCK_BYTES, LAYERS)
    batch = options.pick(full=BATCH_BLOCKS, quick=BATCH_BLOCKS, smoke=FEW_BLOCKS)
    chains = Chains(cache, batch, options.seed, CHAIN_BLOCKS)
    with cluster(_node(blocks), folder) as store:
        empty = rss_anon(store.node("bench"))
        bed = Bed(store)
        with KVClient.connect(store.metadata_address, cache, node=store.node("bench").local_socket, options=OPTIONS) as client:
            bed.fill(client, chains, CHURN_FACTOR * blocks)
            held = bed.durable_blocks()
            beyond = (rss_anon(store.node("bench")) - empty) / held
    keep(options, "node_memory", "Node: memory per block", "churned", beyond, held)


def keep(options: Options, name: str, title: str, state: str, value: float, blocks: int, bound: float | None = None) -> None:
    """Record one figure."""
    parameters: dict[str, str | int | float | bool] = {
        "state": state,
        "blocks": blocks,
        "layers": LAYERS,
        "chain_blocks": CHAIN_BLOCKS,
    }
    target = None if bound is None else Target("value", bound)
    options.keep(Figure(name, title, parameters, "bytes", lower_is_better=True), [value], target=target)


def break_down(blocks: int) -> None:
    """Print the bytes of a block table by source line."""
    gc.collect()
    tracemalloc.start(1)
    before = tracemalloc.take_snapshot()
    table = FilledTable(layers=LAYERS, chain_blocks=CHAIN_BLOCKS)
    table.fill(blocks)
    gc.collect()
    after = tracemalloc.take_snapshot()
    total = 0
    for line in after.compare_to(before, "lineno"):
        total += line.size_diff
    for line in after.compare_to(before, "lineno")[:SHOWN_LINES]:
        frame = line.traceback[0]
        size, objects = line.size_diff / blocks, line.count_diff / blocks
        print(f"{size:8.1f} bytes per block  {objects:5.2f} objects  {frame.filename}:{frame.lineno}")
    print(f"{total / blocks:8.1f} bytes per block in all")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--breakdown", action="store_true", help="print the bytes by source line and exit")


def main() -> None:
    """Measure all figures."""
    options = harness.options("node_memory", __doc__, arguments=_arguments)
    if options.extra.breakdown:
        break_down(100_000)
        return
    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=options.scratch))
    try:
        sizes = options.pick(full=[50_000, 100_000, 200_000], quick=[30_000, 60_000], smoke=[1_024, 2_048])
        measure_filled(options, folder, sizes)
        measure_churned(options, folder, options.pick(full=40_000, quick=20_000, smoke=1_024))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
