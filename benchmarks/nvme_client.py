"""Measure NVMe through the whole store: cold loads against fio's reads, durable stores against fio's writes and fsync.

A store writes a new chain and waits until it is durable. A load empties the DRAM tier, and reads the newest chain from NVMe with
O_DIRECT and checksum verification. fio moves the same bytes in blocks of the same size on a file of the same filesystem, with one
request in flight per I/O thread of the volume. Caches below O_DIRECT (of the disk or hypervisor) serve both sides equally.

The limit is the same number of threads that copy, sum, read and write the same bytes without any notion of blocks. On few cores a
store is bound by checksums and copies, which fio does not make.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import numpy as np

import harness
from harness import Figure, Options, Reference, Target
from kvclient import KVClient
from kvstore.core.types import Tier
from kvstore.embedded.cluster import NodeSpec
from peers import PeerMissingError
from peers.fio import NOTE, Fio
from peers.summed_file import SummedFile
from rig import OPTIONS, Chain, Chains, NodeControl, cluster, found, loaded, space_for, spec, stored

LAYERS = 32
IO_THREADS = 8


def measure(options: Options, folder: Path, block_bytes: int, total: int) -> None:
    """Measure one block size."""
    cache = spec(block_bytes, LAYERS)
    blocks = total // block_bytes
    chains = Chains(cache, blocks, options.seed)
    space = space_for(blocks, block_bytes)
    node = NodeSpec("bench", dram_bytes=space, nvme_bytes=2 * space, settings=(("io_threads", str(IO_THREADS)),))
    buffer = np.zeros((blocks, block_bytes), np.uint8)
    fio = Fio(folder / "fio", total)
    missing = ""
    try:
        fio.prepare()
    except PeerMissingError as error:
        missing = str(error)
    with (
        cluster(node, folder) as store,
        KVClient.connect(store.metadata_address, cache, node=store.node("bench").local_socket, options=OPTIONS) as client,
        SummedFile(folder / "bare", total, block_bytes // LAYERS, IO_THREADS) as bare,
    ):
        control = NodeControl(store.node("bench").address)
        current: list[Chain] = []
        meters = {act: harness.CpuMeter(node=store.node("bench").process.pid) for act in ("load", "store")}

        def store_durable() -> float:
            control.evict(
                Tier.DRAM
            )  # this order matters: blocks evicted from NVMe first would stay dirty in DRAM and be written again
            control.evict(Tier.NVME)
            chain = chains.next()
            current[:] = [chain]

            def work() -> None:
                result = client.store(chain.keys, chain.payload, durable=True)
                stored(result)
                if not result.durable:
                    raise SystemExit(f"the store did not become durable: {result.error}")

            return meters["store"].gigabytes_per_second(total, work)

        def load_cold() -> float:
            [chain] = current
            lookup = found(client, chain.keys)
            control.empty(Tier.DRAM, blocks)
            buffer.fill(0)
            rate = meters["load"].gigabytes_per_second(total, lambda: loaded(client.load(lookup, buffer), Tier.NVME))
            chains.check(chain, buffer)
            return rate

        contestants = {
            "store": store_durable,
            "load": load_cold,
            "bare write": lambda: harness.gigabytes_per_second(total, lambda: bare.write_durable(block_bytes)),
            "bare read": lambda: harness.gigabytes_per_second(total, lambda: bare.read(block_bytes)),
        }
        if not missing:
            seeds = itertools.count(options.seed)
            contestants["fio write"] = lambda: fio.write_durable(total, block_bytes, IO_THREADS)
            contestants["fio read"] = lambda: fio.read(total, block_bytes, IO_THREADS, next(seeds))
        rounds = harness.interleave(contestants, options.repetitions)
        engine = control.io_engines()
        control.close()
    parameters = {"block_bytes": block_bytes, "total_bytes": total, "layers": LAYERS, "depth": IO_THREADS}
    where = harness.storage(folder, direct="O_DIRECT" in engine and "refused" not in engine, cache="cold in this system")
    for ours, limit, peer, name, title, bound in (
        ("load", "bare read", "fio read", "nvme_load", "NVMe load, cold, through the client", 0.97),
        ("store", "bare write", "fio write", "nvme_store_durable", "NVMe store made durable, through the client", 0.92),
    ):
        options.keep(
            Figure(name, title, parameters, "GB/s"),
            rounds[ours],
            limit=Reference("bare files, summed", rounds[limit]),
            peer=None if missing else Reference("fio io_uring", rounds[peer]),
            target=Target("peer", bound),
            storage=where,
            transport="shared memory",
            io_engine=engine,
            verified=True,
            notes=missing or NOTE,
            cpu=meters[ours].cost(),
        )


def main() -> None:
    """Measure all block sizes."""
    options = harness.options("nvme_client", __doc__)
    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=options.scratch))
    try:
        for block_bytes in options.pick(full=(1 << 20, 4 << 20), quick=(1 << 20,), smoke=(1 << 20,)):
            measure(options, folder, block_bytes, options.pick(full=512 << 20, quick=256 << 20, smoke=8 << 20))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
