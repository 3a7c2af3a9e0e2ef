"""Measure the effect of 200 requests per second to the admin server on lookups: p50 and p99 with and without, in the same run.

The store consists of the processes of ``kvstore up``: metadata server, node and admin server. A client looks up chains of 1,600
blocks one after the other and checks every answer. In every other round a load generator sends requests to the admin server at a
fixed rate (open loop), from two seconds before the lookups: the requests of the web page and dashboards, and single blocks and
chains. ``/v1/namespaces/ID/usage`` is excluded because nodes count all their blocks for it. The notes contain the CPU use of each
process.

The limit is the effect of the processors that the requests use: in further rounds, a process that has nothing to do with the
store computes at the same rate, for as long per request as all processes of the store and the load generator did.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import harness
from harness import Figure, Reference, Target
from kvclient import KVClient
from kvstore.core.types import BlockKey
from kvstore.embedded.cluster import NodeSpec
from peers.periodic_work import PeriodicWork
from rig import OPTIONS, Chains, cluster, found, space_for, spec, stored
from rig.rest_load import Asked, Outcome, RestLoad

CHAIN = 1_600
CHAINS = 8
BLOCK_BYTES = 4_096
RATE = 200.0
SETTLED_S = 2.0
"""Seconds of requests before lookups are timed. The first requests of each kind are not cached, for about a second."""
REACHED = 0.99
"""Required share of the rate. Below it the load was too low to count."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def processor_s(pid: int) -> float:
    """Read the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def requests(namespace_id: str, keys: list[BlockKey], seed: int) -> list[Asked]:
    """Requests in the mix of the web page, dashboards and scripts, with six requests per second for a block or chain."""
    draw = random.Random(seed)
    looks = [
        *("/v1/overview", "/v1/cluster", "/v1/nodes", "/v1/volumes", "/v1/activity", "/v1/namespaces", "/v1/loads/slow"),
        *("/v1/decisions", "/v1/plans", "/v1/queues", "/v1/index", "/v1/config", "/v1/path-policy", "/metrics", "/readyz"),
        *("/v1/nodes/bench", "/v1/nodes/bench/config", "/v1/volumes/bench/dram", "/v1/volumes/bench/nvme0"),
        f"/v1/namespaces/{namespace_id}",
    ]
    mix = [Asked("GET", path) for path in looks * 20]
    mix += [Asked("GET", f"/v1/blocks/{draw.choice(keys).hex()}") for _ in range(len(mix) // 50)]
    short = json.dumps({"namespace_id": namespace_id, "keys": [key.hex() for key in keys[:16]]})
    mix += [Asked("POST", "/v1/blocks/lookup", short) for _ in range(len(mix) // 100)]
    draw.shuffle(mix)
    return mix


class Bed:
    """The store, its client, and the load generator of the admin server."""

    def __init__(self, stack: ExitStack, options: harness.Options) -> None:
        cache = spec(BLOCK_BYTES, 4)
        space = space_for(CHAINS * CHAIN, BLOCK_BYTES)
        # volumes and index are in the folder of --scratch, or in a temporary one
        scratch = options.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-rest-")))
        node = NodeSpec("bench", roles=("prefill", "decode", "storage"), dram_bytes=space, nvme_bytes=space)
        store = stack.enter_context(cluster(node, scratch))
        admin = store.start_admin()
        self.pids = {name: store.node(name).process.pid for name in ("metadata", "bench", "admin")}
        client = KVClient.connect(store.metadata_address, cache, node=store.node("bench").local_socket, options=OPTIONS)
        self.client = stack.enter_context(client)
        chains = Chains(cache, CHAIN, options.seed)
        self.chains: list[list[BlockKey]] = []
        for _ in range(CHAINS):
            chain = chains.next()
            stored(self.client.store(chain.keys, chain.payload))
            self.chains.append(chain.keys)
        for keys in self.chains:
            found(self.client, keys)
        every = [key for keys in self.chains for key in keys]
        mix = requests(self.client.spec.namespace.hex(), every, options.seed)
        self.load = stack.enter_context(RestLoad(admin.address, mix, RATE))
        self.pids |= {"load generator": self.load.pid, "client": os.getpid()}

    def lookups_ms(self, count: int) -> list[float]:
        """Measure sequential lookups."""
        times = []
        for number in range(count):
            keys = self.chains[number % CHAINS]
            start = time.perf_counter()
            answer = self.client.lookup(keys)
            times.append((time.perf_counter() - start) * 1e3)
            if answer.hit_blocks != CHAIN:
                sys.exit(f"a lookup found {answer.hit_blocks} of {CHAIN} blocks: {answer.error}")
        return times


def p99(times: list[float]) -> float:
    """Compute the 99th percentile."""
    return float(np.percentile(times, 99))


def main() -> None:
    """Measure both figures."""
    options = harness.options("rest_cost", __doc__, repetitions=7)
    lookups = options.pick(full=3_000, quick=1_500, smoke=50)
    settled_s = options.pick(full=SETTLED_S, quick=SETTLED_S, smoke=0.1)
    with ExitStack() as stack:
        bed = Bed(stack, options)
        meters = {name: harness.CpuMeter(**bed.pids) for name in ("with", "without", "work")}
        times: dict[str, list[list[float]]] = {"with": [], "without": [], "work": []}
        outcomes: list[Outcome] = []
        shares: dict[str, dict[str, list[float]]] = {name: {process: [] for process in bed.pids} for name in times}

        def look(name: str) -> float:
            before, start = {process: processor_s(pid) for process, pid in bed.pids.items()}, time.perf_counter()
            meters[name].time(lookups, lambda: times[name].append(bed.lookups_ms(lookups)))
            seconds = time.perf_counter() - start
            for process, pid in bed.pids.items():
                shares[name][process].append((processor_s(pid) - before[process]) / seconds)
            return p99(times[name][-1])

        def asked() -> float:
            bed.load.begin()
            time.sleep(settled_s)
            try:
                return look("with")
            finally:
                outcomes.append(bed.load.end())

        def worked() -> float:
            """Look up beside a process that computes as long per request as the requests of the rounds so far cost."""
            extra = sum(
                statistics.median(shares["with"][process]) - statistics.median(shares["without"][process])
                for process in bed.pids
                if process not in {"client", "metadata"}  # they do less while they wait for a processor
            )
            with PeriodicWork(RATE, extra / RATE):
                time.sleep(settled_s)
                return look("work")

        samples = harness.interleave({"with": asked, "without": lambda: look("without"), "work": worked}, options.repetitions)
    outcomes = outcomes[-options.repetitions :]
    rates = [len(one.latencies_s) / one.seconds for one in outcomes]
    failed = sum(one.failed for one in outcomes)
    answers_ms = [latency_s * 1e3 for one in outcomes for latency_s in one.latencies_s]
    if failed or (options.mode != "smoke" and min(rates) < REACHED * RATE):
        sys.exit(f"this was no load of {RATE:g} requests/s: {rates} reached, {failed} failed: {outcomes[-1].statuses}")
    busy = {name: {process: statistics.median(some) for process, some in found.items()} for name, found in shares.items()}
    used = ", ".join(f"{process} {busy['with'][process]:.2f} ({busy['without'][process]:.2f})" for process in bed.pids)
    told = (
        f"{statistics.median(rates):.0f} requests/s were answered (least {min(rates):.0f} in a round), {failed} failed,"
        f" p50 {statistics.median(answers_ms):.1f} ms, p99 {p99(answers_ms):.1f} ms;"
        f" processors used, with (and without) requests: {used}"
    )
    print(told)
    parameters = {"requests_s": RATE, "keys": CHAIN, "lookups": lookups, "in_flight": 1}
    quiet = {name: some[-options.repetitions :] for name, some in times.items()}
    options.keep(
        Figure("rest_lookup_p99", "Lookup p99 under REST load", parameters, "ms", lower_is_better=True),
        samples["with"],
        peer=Reference("nobody asks", samples["without"]),
        limit=Reference("unrelated work", samples["work"]),
        target=Target("peer", 1.05),
        transport="gRPC, loopback TCP",
        cpu=meters["with"].cost("operation"),
        notes=told,
    )
    options.keep(
        Figure("rest_lookup_p50", "Lookup p50 under REST load", parameters, "ms", lower_is_better=True),
        [statistics.median(some) for some in quiet["with"]],
        peer=Reference("nobody asks", [statistics.median(some) for some in quiet["without"]]),
        limit=Reference("unrelated work", [statistics.median(some) for some in quiet["work"]]),
        transport="gRPC, loopback TCP",
        cpu=meters["with"].cost("operation"),
    )


if __name__ == "__main__":
    main()
