"""Measure how well loads and stores keep a device busy, with a device whose copies take a scripted time. No figure of a GPU.

Client, node and calls are real; the device takes the time of its scripted rate and moves no byte. The limit is that rate. The
peer moves one piece at a time (``pieces_in_flight=1``), as the store did before.

    python benchmarks/device_pipeline.py [--quick]
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

import numpy as np
import torch

import harness
from harness import Figure, Options, Reference
from kvclient import BlockKey, KVClient, Lookup
from kvstore.core.types import Tier
from kvstore.embedded.cluster import NodeSpec
from rig import OPTIONS, NodeControl, cluster, found, loaded, space_for, stored
from rig.gpu_bed import LLAMA, TINY, Case
from rig.timed_device import TimedCopier, TimedDevice

RATES = (50e9, 25e9)
"""Bytes per second of the scripted bus: about PCIe 5 and 4 with 16 lanes."""
MANY = OPTIONS.pieces_in_flight
HASH_RATE = 200e9
"""Bytes per second at which the scripted device computes checksums."""
_NOTES = "SCRIPTED DEVICE, no figure of a GPU: copies take the time of their rate and move no byte; calls and node are real"


class Bench:
    """A store, and clients of one process whose devices are scripted.

    Args:
        stack: ends them.
        options: of the run.
        case: the engine's cache.
        blocks: blocks of a load or store.
        rate: of the bus.
        hash_rate: of the device's checksums; 0: the host computes them.
    """

    def __init__(self, stack: ExitStack, options: Options, case: Case, blocks: int, rate: float, hash_rate: float = 0.0) -> None:
        self.case, self.blocks, self.nbytes = case, blocks, blocks * case.block_bytes
        self.copier = TimedCopier(case.cache(blocks, torch.device("cpu")), TimedDevice(rate), hash_rate)
        # a layer-wise load may hold a quarter of the arena; no page of it is touched, unless the host hashes blocks
        space = 4 * space_for(blocks, case.block_bytes)
        node = NodeSpec("bench", dram_bytes=space, settings=(("prefault", "false"),))
        store = stack.enter_context(cluster(node, options.scratch))
        self._control = NodeControl(store.node("bench").address)
        stack.callback(self._control.close)
        self.clients = {
            pieces: stack.enter_context(
                KVClient.connect(
                    store.metadata_address,
                    self.copier.spec("benchmark", case.tokens),
                    node=store.node("bench").local_socket,
                    options=dataclasses.replace(OPTIONS, pieces_in_flight=pieces),
                    device=self.copier,
                )
            )
            for pieces in (1, MANY)
        }
        self._random = np.random.default_rng(options.seed)
        self._pages = self._random.permutation(blocks).tolist()
        self._held = 0

    def store(self, pieces: int) -> tuple[list[BlockKey], float]:
        """Store new blocks. Return their keys and the seconds."""
        self._control.empty(Tier.DRAM, self._held)
        client = self.clients[pieces]
        keys = client.keys(self._random.integers(0, 1 << 32, self.blocks * self.case.tokens, np.uint32))
        pages = self.copier.blocks(self._pages)
        elapsed_s = harness.seconds(lambda: stored(client.start_store(keys, pages).result()))
        self._held = self.blocks
        return keys, elapsed_s

    def load(self, pieces: int, lookup: Lookup) -> float:
        """Load the blocks as an engine does outside of a batch. Return the seconds."""
        client, buffer = self.clients[pieces], self.copier.blocks(self._pages)
        return harness.seconds(lambda: loaded(client.start_load(lookup, buffer, layerwise=False).result(), Tier.DRAM))

    def first_layer(self, lookup: Lookup) -> float:
        """Load the blocks layer by layer. Return the seconds until the first layer is on the device."""
        buffer = self.copier.blocks(self._pages)
        with self.clients[MANY].start_load(lookup, buffer) as handle:
            elapsed_s = harness.seconds(lambda: handle.wait_layer(0))
            loaded(handle.result(), Tier.DRAM)
        return elapsed_s


def loads(options: Options, case: Case) -> None:
    """Measure loads of several calls, and the first layer of a layer-wise load."""
    blocks = options.pick(full=3 << 30, quick=3 << 30, smoke=1 << 20) // case.block_bytes
    for rate in RATES:
        with ExitStack() as stack:
            bench = Bench(stack, options, case, blocks, rate, HASH_RATE)
            lookup = found(bench.clients[MANY], bench.store(MANY)[0])
            size = bench.nbytes / 1e9
            samples = harness.interleave(
                {
                    "ahead": lambda: size / bench.load(MANY, lookup),  # noqa: B023
                    "one": lambda: size / bench.load(1, lookup),  # noqa: B023
                    "first": lambda: 1e3 * bench.first_layer(lookup),  # noqa: B023
                    "all": lambda: 1e3 * bench.load(MANY, lookup),  # noqa: B023
                },
                options.repetitions,
            )
        parameters = {**case.parameters, "blocks": blocks, "bus_gb_per_s": rate / 1e9}
        options.keep(
            Figure("pipeline_load", "load of several calls to a scripted device", parameters, "GB/s"),
            samples["ahead"],
            limit=Reference("the scripted rate", [rate / 1e9]),
            peer=Reference("one call at a time", samples["one"]),
            notes=_NOTES,
        )
        options.keep(
            Figure("pipeline_first_layer", "first layer of a load on a scripted device", parameters, "ms", lower_is_better=True),
            samples["first"],
            limit=Reference("one layer at the scripted rate", [1e3 * bench.nbytes / case.model.layers / rate]),
            peer=Reference("the whole load", samples["all"]),
            notes=_NOTES,
        )


def stores(options: Options, case: Case) -> None:
    """Measure stores whose checksums the device or the host computes."""
    blocks = options.pick(full=1 << 30, quick=1 << 30, smoke=1 << 20) // case.block_bytes
    for rate in RATES:
        for hasher, hash_rate in (("device", HASH_RATE), ("host", 0.0)):
            with ExitStack() as stack:
                bench = Bench(stack, options, case, blocks, rate, hash_rate)
                size = bench.nbytes / 1e9
                samples = harness.interleave(
                    {"ahead": lambda: size / bench.store(MANY)[1], "one": lambda: size / bench.store(1)[1]},  # noqa: B023
                    options.repetitions,
                )
            parameters = {**case.parameters, "blocks": blocks, "bus_gb_per_s": rate / 1e9, "checksums": hasher}
            options.keep(
                Figure("pipeline_store", "store from a scripted device", parameters, "GB/s"),
                samples["ahead"],
                limit=Reference("the scripted rate", [rate / 1e9]),
                peer=Reference("one piece at a time", samples["one"]),
                notes=_NOTES,
            )


def main() -> None:
    """Measure loads and stores."""
    options = harness.options("device_pipeline", __doc__)
    for case in [Case(TINY, "page")] if options.mode == "smoke" else [Case(LLAMA, "page"), Case(LLAMA, "page", ranks=8)]:
        loads(options, case)
        stores(options, case)


if __name__ == "__main__":
    main()
