"""The scenarios: busy runs of a trace, one load alone, layer groups, faults in the middle of a load."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import harness
from harness import REPOSITORY, Figure, Options, Reference, Target
from kvstore.core.spec import CacheSpec
from kvstore.netlab.bed import LabBed
from kvstore.netlab.lab import available
from kvstore.netlab.traffic import LabNic, LinkRecorder, Network
from netlab import plots
from netlab.bed import MIB, Batch, BedOptions, LoadBed, machine_times
from netlab.workload import Workload, from_trace, made_up

TRACE = "weka_agentic_64k.rle.jsonl.zst"
BLOCK_TOKENS = 64
LAYERS = 16
ASKED_GROUP = LAYERS // 8
"""Layers a group of which something is asked, of time and of cost alike; larger groups are shown beside it."""
MBIT = 125_000.0
"""Bytes a second."""
TRANSPORT = "tcp over shaped veth links"
CNIC_TIMES = 8
"""Compute link over storage link, as in the paper's hosts."""
STORAGE_SLACK = 1.3
"""Rate of all storage hosts relative to the rate at which all others can receive."""
WINDOW_BYTES = 4 * MIB
"""Small against a load, as production's 64 MiB are against gigabytes."""
BALANCE_WINDOW_S = 0.5
FEW = 3
"""Loads in flight at which policies differ in how evenly they use the links. With more, every policy keeps all links full."""
FAULT_AT = 0.35
"""Share of a load that has arrived when something breaks."""


@dataclass(slots=True)
class Run:
    """One measured batch, and the traffic of the links during it."""

    batch: Batch
    recording: LinkRecorder


@dataclass(slots=True)
class Runs:
    """All measured batches of one bed, by contestant."""

    bed: LoadBed
    kept: dict[str, list[Run]] = field(default_factory=dict)

    def once(self, name: str, loads: Sequence[int], in_flight: int, paths: Mapping[str, Any]) -> Run:
        """One batch, recorded and checked."""
        with self.bed.record() as recording:
            batch = self.bed.run(loads, in_flight, paths)
        run = Run(batch.check(), recording)
        self.kept.setdefault(name, []).append(run)
        return run

    def notes(self, name: str) -> str:
        """CPU, and the traffic of the storage links relative to the requested bytes."""
        runs = self.kept[name]
        hosts = self.bed.readers
        wire = [sum(run.recording.series(host, "storage").total_bytes("rx") for host in hosts) / run.batch.bytes for run in runs]
        cpu = statistics.median(run.batch.machine_cpu for run in runs)
        return f"CPU of the whole machine busy {cpu:.0%}; bytes over storage links / bytes loaded {statistics.median(wire):.3f}"


def spec(block_bytes: int) -> CacheSpec:
    """The namespace of a bed."""
    return CacheSpec(model="netlab", block_tokens=BLOCK_TOKENS, layers=LAYERS, layer_block_bytes=block_bytes // LAYERS)


def bed_of(options: Options, decode: int) -> LabBed:
    """One prefill host, some decode hosts, and storage that outruns them."""
    snic = options.extra.snic_mbit
    return LabBed(1, decode, 1, snic, snic * CNIC_TIMES, snic * (1 + decode) * STORAGE_SLACK)


def parameters(bed: LabBed, **more: Any) -> dict[str, Any]:  # noqa: ANN401  # harness.Parameter
    """Facts of the bed in every figure."""
    return {"bed": f"{bed.prefill}P{bed.decode}D", "snic_mbit": bed.snic_mbit, "cnic_mbit": bed.cnic_mbit, **more}


def started(options: Options, bed: LabBed, workload: Workload, block_bytes: int, servers: int = 1) -> LoadBed:
    """The bed, told to the reader."""
    total = len(workload.keys) * block_bytes / 1e6
    print(f"{bed.describe()}\n  {workload.name}: {len(workload.keys)} blocks, {total:.0f} MB stored", flush=True)
    return LoadBed(bed, spec(block_bytes), workload, BedOptions(window_bytes=WINDOW_BYTES, servers=servers), options.scratch)


# ---------------------------------------------------------------- busy runs
def busy(options: Options, decode: int, bound: Mapping[str, float], most_in_flight: int | None = None, servers: int = 1) -> None:
    """Bytes a second of a slice of the trace, and how even the storage links were used, by policy.

    Args:
        options: of the command line.
        decode: decode hosts.
        bound: required rate of a policy, relative to ``prefill_only``.
        most_in_flight: loads at once; None: enough to keep all links busy whatever the policy.
        servers: metadata servers.
    """
    path: Path = options.extra.traces / TRACE
    if not path.exists():
        print(f"SKIPPED: no trace at {path}; name its folder with --traces", flush=True)
        return
    block_bytes = options.pick(full=32 << 10, quick=32 << 10, smoke=16 << 10)
    count = options.pick(full=12 + 24 * decode, quick=36, smoke=6)
    in_flight = most_in_flight or options.pick(full=4 + 4 * decode, quick=8, smoke=4)
    workload = from_trace(path, spec(block_bytes), max(in_flight * 2, count // 3), count)
    bed = bed_of(options, decode)
    with started(options, bed, workload, block_bytes, servers) as running:
        runs = Runs(running)
        loads = range(len(workload.loads))
        running.run(loads[: len(loads) // 4], in_flight, running.paths("split")).check()

        def once(policy: str) -> float:
            return runs.once(policy, loads, in_flight, running.paths(policy)).batch.rate / 1e6

        policies = ("prefill_only", "split", "shorter_queue", "round_robin")
        samples = harness.interleave({policy: partial(once, policy) for policy in policies}, options.repetitions, warm_up=0)
        shared = parameters(bed, trace=workload.name, loads=count, in_flight=in_flight, block_bytes=block_bytes)
        shared |= {"metadata_servers": servers} if servers > 1 else {}
        where = harness.storage(
            running.folder, direct=True, cache="storage host's DRAM; nothing kept on prefill and decode hosts"
        )
        for policy in policies:
            hosts = bed.prefill if policy == "prefill_only" else bed.prefill + bed.decode
            target = Target("peer", bound[policy]) if policy in bound else None
            options.keep(
                Figure("netlab_rate", "Loads of a trace over both storage links", shared | {"policy": policy}, "MB/s"),
                samples[policy],
                peer=None if policy == "prefill_only" else Reference("prefill_only", samples["prefill_only"]),
                limit=Reference("links", [hosts * bed.snic_mbit * MBIT / 1e6]),
                target=target,
                storage=where,
                transport=TRANSPORT,
                verified=True,
                notes=runs.notes(policy),
            )
        for policy in ("split", "shorter_queue", "round_robin"):
            figure = Figure("netlab_balance", "Busiest storage link over the average", shared | {"policy": policy}, "×", True)
            options.keep(
                figure,
                [run.recording.max_over_avg("storage", running.readers, window_s=BALANCE_WINDOW_S) for run in runs.kept[policy]],
                target=Target("value", 1.08) if policy == "split" else None,
                transport=TRANSPORT,
                verified=True,
            )
        if options.results is not None:
            name = f"busy_{bed.prefill}p{bed.decode}d_{in_flight}_in_flight" + (f"_{servers}_servers" if servers > 1 else "")
            _plot(options.results / "netlab", name, runs, workload.name)


def _plot(folder: Path, name: str, runs: Runs, trace: str) -> None:
    """Links over time of two policies' last runs, and the times of all loads."""
    bed = runs.bed.bed
    links: dict[str, dict[str, dict[str, list[float]]]] = {}
    for policy in ("prefill_only", "split"):
        recording = runs.kept[policy][-1].recording
        links[policy] = {}
        for host in runs.bed.readers:
            times, rates = recording.series(host, "storage").mbit("rx")
            links[policy][host] = {"s": [round(value, 3) for value in times], "mbit": [round(value, 1) for value in rates]}
    seconds = {policy: [round(load.seconds, 4) for run in kept for load in run.batch.loads] for policy, kept in runs.kept.items()}
    title = f"{bed.prefill}P{bed.decode}D, storage links of {bed.snic_mbit:g} Mbit/s, {trace}"
    plots.keep(folder, name, {"title": title, "links": links, "limit_mbit": bed.snic_mbit, "seconds": seconds})


# ---------------------------------------------------------------- one load alone
def single(options: Options, decode: int) -> None:
    """Time of one load on an idle bed, by policy; then in layer groups."""
    block_bytes = options.pick(full=64 << 10, quick=64 << 10, smoke=16 << 10)
    size = options.pick(full=128 * MIB, quick=64 * MIB, smoke=8 * MIB)
    blocks = size // block_bytes
    workload = made_up(spec(block_bytes), blocks, 1, 1, options.seed)
    bed = bed_of(options, decode)
    with started(options, bed, workload, block_bytes) as running:
        runs = Runs(running)
        running.run([0], 1, running.paths("split")).check()

        def once(policy: str, layer_group: int = 0) -> float:
            run = runs.once(f"{policy}:{layer_group}", [0], 1, running.paths(policy, layer_group=layer_group))
            return run.batch.loads[0].seconds

        groups = (LAYERS // 2, LAYERS // 4, ASKED_GROUP)
        contestants: dict[str, Callable[[], float]] = {
            policy: partial(once, policy) for policy in ("prefill_only", "shorter_queue", "split")
        }
        contestants |= {f"split:{group}": partial(once, "split", group) for group in groups}
        samples = harness.interleave(contestants, options.repetitions, warm_up=0)
        shared = parameters(bed, load_bytes=size, block_bytes=block_bytes)
        for peer in ("prefill_only", "shorter_queue"):
            options.keep(
                Figure("netlab_single", f"One load alone, split against {peer}", shared | {"against": peer}, "s", True),
                samples["split"],
                peer=Reference(peer, samples[peer]),
                limit=Reference("links", [size / ((1 + decode) * bed.snic_mbit * MBIT)]),
                target=Target("peer", 0.55),
                transport=TRANSPORT,
                verified=True,
                notes=runs.notes("split:0"),
            )
        for group in groups:
            kept = [run.batch.loads[0] for run in runs.kept[f"split:{group}"]]
            options.keep(
                Figure(
                    "netlab_layer0", "Layer 0 of one load alone, share of its time", shared | {"layer_group": group}, "×", True
                ),
                [(load.layer0_s or load.seconds) / load.seconds for load in kept],
                target=Target("value", 0.3) if group == ASKED_GROUP else None,
                transport=TRANSPORT,
                verified=True,
                notes=f"of {LAYERS} layers; whole load {statistics.median(load.seconds for load in kept):.2f} s, "
                f"in whole blocks {statistics.median(samples['split']):.2f} s",
            )


def layer_groups(options: Options) -> None:
    """Cost of layer groups in throughput."""
    block_bytes = options.pick(full=64 << 10, quick=64 << 10, smoke=16 << 10)
    in_flight = 4
    blocks = options.pick(full=512, quick=512, smoke=128)
    workload = made_up(spec(block_bytes), blocks, in_flight * 2, in_flight * options.pick(full=5, quick=4, smoke=2), options.seed)
    bed = bed_of(options, 1)
    with started(options, bed, workload, block_bytes) as running:
        runs = Runs(running)
        loads = range(len(workload.loads))
        running.run(loads[: in_flight * 2], in_flight, running.paths("split")).check()

        def once(group: int) -> float:
            paths = running.paths("split", layer_group=group)
            return runs.once(str(group), loads, in_flight, paths).batch.rate / 1e6

        groups = (0, LAYERS // 2, LAYERS // 4, ASKED_GROUP)
        samples = harness.interleave({str(group): partial(once, group) for group in groups}, options.repetitions, warm_up=0)
        shared = parameters(bed, load_bytes=blocks * block_bytes, in_flight=in_flight, block_bytes=block_bytes)
        for group in groups[1:]:
            options.keep(
                Figure("netlab_layer_cost", "Rate in layer groups, busy", shared | {"layer_group": group}, "MB/s"),
                samples[str(group)],
                peer=Reference("whole blocks", samples["0"]),
                limit=Reference("links", [2 * bed.snic_mbit * MBIT / 1e6]),
                target=Target("peer", 0.95) if group == ASKED_GROUP else None,
                transport=TRANSPORT,
                verified=True,
                notes=f"of {LAYERS} layers; {runs.notes(str(group))}",
            )


# ---------------------------------------------------------------- faults
def faults(options: Options) -> None:
    """The decode node is killed, or its storage link cut, in the middle of a load: how much later it ends than it must."""
    block_bytes = options.pick(full=64 << 10, quick=64 << 10, smoke=16 << 10)
    size = options.pick(full=128 * MIB, quick=64 * MIB, smoke=16 * MIB)
    workload = made_up(spec(block_bytes), size // block_bytes, 1, 1, options.seed)
    bed = bed_of(options, 1)
    with started(options, bed, workload, block_bytes) as running:
        for name, breaks, mends in (
            ("kill", lambda: running.cluster.kill("decode-0"), lambda: running.cluster.start_node("decode-0")),
            (
                "cut",
                lambda: running.lab.host("decode-0").cut("storage"),
                lambda: running.lab.host("decode-0").restore("storage"),
            ),
        ):
            samples = [_broken(running, size, breaks, mends) for _ in range(options.repetitions)]
            what = {"kill": "decode node killed", "cut": "decode host's storage link cut"}[name]
            options.keep(
                Figure(
                    "netlab_fault",
                    f"Load that ends although {what}: beyond what is left to transfer",
                    parameters(bed, load_bytes=size, block_bytes=block_bytes, fault=name),
                    "s",
                    True,
                ),
                samples,
                target=Target("value", 2.0),
                transport=TRANSPORT,
                verified=True,
                notes="every byte of every load was checked: none was wrong, none missing",
            )


def _broken(running: LoadBed, size: int, breaks: Callable[[], object], mends: Callable[[], object]) -> float:
    """Seconds from the fault to the end of the load, less the time that the missing bytes take over the prefill host's link."""
    _whole(running)
    sources: list[tuple[str, Network]] = [("prefill-0", "storage"), ("prefill-0", "compute")]
    before = running.lab.sample()

    def arrived() -> int:
        now = running.lab.sample()
        return sum(now[LabNic(*one)].rx_bytes - before[LabNic(*one)].rx_bytes for one in sources)

    idle = machine_times()
    running.begin(0, [0], 1, running.paths("split"))
    until_s = time.monotonic() + 20
    while arrived() < FAULT_AT * size and time.monotonic() < until_s:
        time.sleep(0.002)
    here, fault_s = arrived(), time.monotonic()
    breaks()
    batch = running.end([0], idle).check()
    mends()
    return batch.loads[0].end_s - fault_s - (size - here) / (running.bed.snic_mbit * MBIT)


def _whole(running: LoadBed) -> None:
    """Waits until loads go over both links again."""
    until_s = time.monotonic() + 30
    while time.monotonic() < until_s:
        [load] = running.run([0], 1, running.paths("split")).loads
        if not load.missed and load.paths.get("decode", 0) > 0.3 * load.bytes:
            return
    sys.exit("the decode path did not come back")


# ---------------------------------------------------------------- all of it
ROWS: dict[str, Callable[[Options], None]] = {
    "1p1d": lambda options: busy(options, 1, {"split": 1.9, "shorter_queue": 1.75}),
    "1p2d": lambda options: busy(options, 2, {"split": 2.75}),
    "servers": lambda options: busy(options, 1, {"split": 1.9}, servers=2),
    "balance": lambda options: busy(options, 1, {}, FEW),
    "single": lambda options: single(options, 1),
    "layers": layer_groups,
    "faults": faults,
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="which scenarios (default: all; two of them with --smoke)")
    parser.add_argument(
        "--snic-mbit", type=float, default=300.0, help="storage link of each prefill and decode host (default 300)"
    )
    parser.add_argument(
        "--traces",
        type=Path,
        default=REPOSITORY.parent / "shared" / "traces",
        help="folder of recorded traces (default ../shared/traces)",
    )


def main(description: str | None) -> None:
    """Command line."""
    options = harness.options("netlab_loads", description, arguments=_arguments)
    reason = available()
    if reason is not None:
        print(f"SKIPPED: NO NETWORK LAB CAN RUN HERE: {reason}", flush=True)
        return
    every = list(ROWS)
    for name in options.extra.rows or options.pick(full=every, quick=every, smoke=["1p1d", "single"]):
        print(f"-- {name}", flush=True)
        ROWS[name](options)
