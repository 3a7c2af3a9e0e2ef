"""Measure reads ahead: prefixes come from NVMe into DRAM while their requests wait in the queue of an engine.

The engine is a thread that serves one request after the other: it loads the prefix, and computes for as long as a cold load takes
(it sleeps). Requests arrive at random (Poisson), each with a prefix that is on NVMe only. The node caches nothing in DRAM
(``node.cache_loads`` is off), so every load that is not read ahead is cold. The peer is the same store without reads ahead: a
prefix is read when its request is served. The limit of a single load is one whose blocks are in DRAM.
"""

from __future__ import annotations

import queue
import random
import shutil
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

import harness
from harness import Figure, Options, Reference, Target
from kvclient import KVClient, Lookup, ReadAhead
from kvstore.core.types import BlockKey, Tier
from kvstore.embedded.cluster import NodeSpec
from rig import OPTIONS, Chains, Deadline, NodeControl, cluster, found, loaded, space_for, spec, stored

LAYERS = 32
BLOCK_BYTES = 1 << 20
AT_ONCE = 8
"""Requests that are read ahead at the same time, as by the vLLM connector."""
LOADS = (0.5, 0.9)
"""Share of the time in which the engine is busy, if nothing is read ahead."""


@dataclass
class Request:
    """A request in the queue."""

    lookup: Lookup
    arrived_s: float
    ahead: ReadAhead | None = None
    started: threading.Event = field(default_factory=threading.Event)


class Engine:
    """Serves requests one after the other.

    Args:
        client: loads.
        compute_s: time that a request is computed.
        reads_ahead: whether requests that wait are read ahead.
    """

    def __init__(self, client: KVClient, compute_s: float, buffer: np.ndarray, *, reads_ahead: bool) -> None:
        self._client = client
        self._compute_s = compute_s
        self._buffer = buffer
        self._reads_ahead = reads_ahead
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._waiting = 0
        self.latencies_s: list[float] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def arrive(self, lookup: Lookup) -> None:
        """A request arrives. It is read ahead if others are before it."""
        request = Request(lookup, time.perf_counter())
        if self._reads_ahead and 0 < self._waiting <= AT_ONCE:
            request.ahead = self._client.read_ahead(lookup)
        self._waiting += 1
        self._queue.put(request)

    def _serve(self) -> None:
        while (request := self._queue.get()) is not None:
            loaded(self._client.load(request.lookup, self._buffer), None)
            if request.ahead is not None:
                request.ahead.end()
            time.sleep(self._compute_s)
            self.latencies_s.append(time.perf_counter() - request.arrived_s)
            self._waiting -= 1

    def finish(self) -> list[float]:
        """Serve what waits. Returns the times from arrival to first token, in seconds."""
        self._queue.put(None)
        self._thread.join()
        return self.latencies_s


def arrivals(count: int, mean_s: float, seed: int) -> list[float]:
    """Times between arrivals."""
    draw = random.Random(seed)
    return [draw.expovariate(1 / mean_s) for _ in range(count)]


def on_nvme(client: KVClient, keys: list[BlockKey]) -> Lookup:
    """Look keys up until the index shows that they have left DRAM."""
    deadline = Deadline()
    while True:
        lookup = found(client, keys)
        if all(run.tier is not Tier.DRAM for run in lookup.runs):
            return lookup
        deadline.wait("blocks did not leave DRAM")


def measure(options: Options, folder: Path, total: int, prefixes: int, requests: int) -> None:
    """Measure one size of prefixes."""
    cache = spec(BLOCK_BYTES, LAYERS)
    blocks = total // BLOCK_BYTES
    chains = Chains(cache, blocks, options.seed)
    space = space_for(blocks, BLOCK_BYTES)
    settings = (("cache_loads", "false"), ("read_ahead", str(AT_ONCE * space)))
    node = NodeSpec("bench", dram_bytes=(AT_ONCE + 4) * space, nvme_bytes=(prefixes + 1) * space, settings=settings)
    buffer = np.zeros((blocks, BLOCK_BYTES), np.uint8)
    with (
        cluster(node, folder) as store,
        KVClient.connect(store.metadata_address, cache, node=store.node("bench").local_socket, options=OPTIONS) as client,
    ):
        control = NodeControl(store.node("bench").address)
        keys = []
        for _ in range(prefixes):
            chain = chains.next()
            stored(client.store(chain.keys, chain.payload, durable=True))
            keys.append(chain.keys)
        lookups = [on_nvme(client, one) for one in keys]
        turn = iter(range(1 << 30))

        def next_lookup() -> Lookup:
            return lookups[next(turn) % prefixes]

        def timed_load(lookup: Lookup, tier: Tier) -> float:
            return harness.seconds(lambda: loaded(client.load(lookup, buffer), tier)) * 1e3

        def cold() -> float:
            return timed_load(next_lookup(), Tier.NVME)

        def after_wait(loads: int = 1) -> float:
            """Read a prefix ahead to its end, load it, and return the time of the last load."""
            lookup = next_lookup()
            before = control.counter("node_read_ahead_bytes_total")
            ahead = client.read_ahead(lookup)
            assert ahead is not None
            deadline = Deadline()
            while (read := control.counter("node_read_ahead_bytes_total") - before) < total:
                deadline.wait(f"only {read} of {total} bytes were read ahead")
            took = [timed_load(lookup, Tier.DRAM) for _ in range(loads)]
            ahead.end()
            return took[-1]

        single = harness.interleave({"cold": cold, "after": after_wait, "dram": lambda: after_wait(loads=2)}, options.repetitions)
        compute_s = statistics.median(single["cold"]) / 1e3
        begun = {name: control.counter(f"node_read_ahead_{name}_total") for name in ("bytes", "unused_bytes")}
        latencies: dict[tuple[float, bool], list[float]] = {(load, ahead): [] for load in LOADS for ahead in (False, True)}
        for count in range(options.repetitions):
            for load in LOADS:
                gaps = arrivals(requests, 2 * compute_s / load, options.seed + count)
                for ahead in (False, True) if count % 2 else (True, False):
                    engine = Engine(client, compute_s, buffer, reads_ahead=ahead)
                    for gap_s in gaps:
                        time.sleep(gap_s)
                        engine.arrive(next_lookup())
                    latencies[load, ahead].append(float(np.percentile(engine.finish(), 99)) * 1e3)
        read, unused = (control.counter(f"node_read_ahead_{name}_total") - begun[name] for name in ("bytes", "unused_bytes"))
        io_engine = control.io_engines()
        control.close()
    where = harness.storage(folder, direct="O_DIRECT" in io_engine and "refused" not in io_engine, cache="cold in this system")
    sizes = {"block_bytes": BLOCK_BYTES, "total_bytes": total, "layers": LAYERS}
    keep = partial(options.keep, storage=where, transport="shared memory", io_engine=io_engine, verified=True)
    hidden = [(cold - after) / cold for cold, after in zip(single["cold"], single["after"], strict=True)]
    keep(
        Figure("read_ahead_load", "Load out of NVMe after a wait, read ahead", sizes, "ms", lower_is_better=True),
        single["after"],
        limit=Reference("a load out of DRAM", single["dram"]),
        peer=Reference("the load without a read ahead", single["cold"]),
    )
    keep(
        Figure("read_ahead_hidden", "Share of a load's time that the wait hides", sizes, "share"),
        hidden,
        target=Target("value", 0.7),
    )
    for load, bound in zip(LOADS, (1.02, 0.7), strict=True):
        keep(
            Figure(
                "read_ahead_ttft",
                "TTFT of requests that wait, p99",
                {**sizes, "load": load, "requests": requests},
                "ms",
                lower_is_better=True,
            ),
            latencies[load, True],
            peer=Reference("reads when a request is served", latencies[load, False]),
            target=Target("peer", bound),
        )
    keep(
        Figure("read_ahead_in_vain", "Bytes read ahead that no load asked for", sizes, "share", lower_is_better=True),
        [unused / read if read else 0.0],
        target=Target("value", 0.05),
    )


def main() -> None:
    """Measure."""
    options = harness.options("read_ahead", __doc__)
    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=options.scratch))
    try:
        total = options.pick(full=64 << 20, quick=64 << 20, smoke=4 << 20)
        measure(options, folder, total, options.pick(full=16, quick=16, smoke=4), options.pick(full=60, quick=30, smoke=4))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
