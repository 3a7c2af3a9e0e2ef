"""The dual-path demo: the same prompt, loaded over one storage link and over both, on emulated hosts with real daemons."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.core.errors import Internal
from kvstore.embedded.cluster import DaemonHost, LocalCluster, NodeSpec
from kvstore.embedded.temp_dirs import TempDir
from kvstore.netlab.bed import METADATA_HOST, LabBed
from kvstore.netlab.lab import LabHost, NetLab

MIB = 1 << 20
POLICIES = ("prefill_only", "shorter_queue", "split")
"""The usual policy; the paper's, which sends whole requests over either side; and ours, which divides a request."""
PREFILL, DECODE, STORAGE = "prefill-0", "decode-0", "storage-0"
SPARKS = " ▁▂▃▄▅▆▇█"
_SPARK_COLUMNS = 48
_WORKER_S = 60.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DualDemoPlan:
    """Sizes of the demo. Rates are far below the capacity of two cores, so that the links are the limit."""

    snic_mbit: float = 250.0
    blocks: int = 256
    layers: int = 32
    block_bytes: int = 256 << 10
    rounds: int = 3
    in_flight: int = 4
    """Concurrent requests in the busy part."""

    @property
    def bed(self) -> LabBed:
        """One prefill, one decode, one storage host."""
        return LabBed(snic_mbit=self.snic_mbit, cnic_mbit=8 * self.snic_mbit, storage_mbit=8 * self.snic_mbit)

    def introduce(self) -> str:
        """Introduction for readers who do not know dual-path loading."""
        return (
            "A prompt that was seen before lies on a storage host, and the prefill host needs it. Usually it comes "
            f"over the prefill host's own storage link ({self.snic_mbit:g} Mbit/s here), while the decode host's "
            "storage link is idle. Dual-path uses both: what the decode host reads, it passes on to the prefill host "
            "over the compute network, which is faster. Two links instead of one: twice as fast at best. Three "
            "policies are compared: prefill_only (as usual), shorter_queue (a whole prompt over the link with less to "
            "do: of no use to one prompt alone) and split (each prompt over both). The next lines say which hosts "
            "there are, and whether both storage links can be kept full (P/D: prefill hosts for each decode host; "
            "CNIC, SNIC: links to the compute and the storage network).\n"
        )

    @property
    def prompt_bytes(self) -> int:
        """Bytes of one prompt."""
        return self.blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """Measurements of one policy.

    Attributes:
        policy: its name.
        single_s: seconds for one prompt alone, per round.
        busy_bytes_per_s: throughput of several prompts at once.
        paths: bytes by path, of all loads.
        wrong_bytes: number of wrong loaded bytes; must be 0.
        links: bandwidth of each host's storage link during one single load, Mbit/s over time.
    """

    policy: str
    single_s: tuple[float, ...]
    busy_bytes_per_s: float
    paths: dict[str, int]
    wrong_bytes: int
    links: dict[str, list[float]]


def run_dual_demo(plan: DualDemoPlan, tell: Tell, report: Callable[[int], None]) -> list[PolicyResult]:
    """Start the hosts, store prompts on the storage host, and load them with each policy.

    Args:
        plan: sizes.
        tell: called with lines of text for people.
        report: called with the number of finished loads.

    Raises:
        KVStoreError: the lab cannot be built, or one of its processes ended.
    """
    bed = plan.bed
    tell(plan.introduce())
    tell(bed.describe())
    with ExitStack() as stack:
        lab = stack.enter_context(NetLab(bed.hosts()))
        scratch = TempDir("kvstore-dual-")
        stack.callback(scratch.close)
        metadata = lab.host(METADATA_HOST)
        cluster = stack.enter_context(
            LocalCluster(_nodes(plan, lab), scratch.path, metadata_host=DaemonHost(metadata.compute_ip, metadata.popen))
        )
        tell("storing prompts on the storage host …")
        with _worker(plan, lab.host(STORAGE), cluster) as ask:
            ask({"do": "store"})
        cluster.stop(STORAGE)  # empties the DRAM, so that loads read the volume
        cluster.start_node(STORAGE)
        results = []
        done = 0
        with _worker(plan, lab.host(PREFILL), cluster) as ask:
            for policy in POLICIES:
                singles, paths, wrong = [], dict[str, int](), 0
                links: dict[str, list[float]] = {}
                for round_ in range(plan.rounds):
                    with lab.record() as recording:
                        answer = ask({"do": "load", "policy": policy, "chains": [round_ % plan.in_flight]})
                    singles.append(answer["seconds"])
                    links = {host: recording.series(host, "storage").mbit("rx")[1].tolist() for host in (PREFILL, DECODE)}
                    wrong += _add(paths, answer)
                    report(done := done + 1)
                answer = ask({"do": "load", "policy": policy, "chains": list(range(plan.in_flight))})
                wrong += _add(paths, answer)
                report(done := done + 1)
                rate = plan.in_flight * plan.prompt_bytes / answer["seconds"]
                results.append(PolicyResult(policy, tuple(singles), rate, paths, wrong, links))
        return results


def loads_of(plan: DualDemoPlan) -> int:
    """Number of loads that ``run_dual_demo`` reports."""
    return len(POLICIES) * (plan.rounds + 1)


def _add(paths: dict[str, int], answer: dict[str, Any]) -> int:
    for path, size in answer["paths"].items():
        paths[path] = paths.get(path, 0) + size
    return int(answer["wrong_bytes"])


def _nodes(plan: DualDemoPlan, lab: NetLab) -> list[NodeSpec]:
    stored = plan.in_flight * plan.blocks * (plan.block_bytes + 8192)
    staging = (
        ("cache_loads", "false"),
        ("load_window", "4MiB"),
        ("prefault", "false"),
        ("storage_bandwidth", str(int(plan.bed.snic_mbit * 125_000))),
        ("compute_bandwidth", str(int(plan.bed.cnic_mbit * 125_000))),
    )
    arena = max(256 * MIB, 2 * plan.in_flight * plan.prompt_bytes)
    sizes = {STORAGE: (256 * MIB, int(stored * 1.2) + 128 * MIB), PREFILL: (arena, 0), DECODE: (arena, 0)}
    nodes = []
    for name, (dram, nvme) in sizes.items():
        host = lab.host(name)
        settings = (("storage_listen", f"{host.storage_ip}:0"), *(staging if name != STORAGE else ()))
        place = DaemonHost(host.compute_ip, host.popen)
        nodes.append(NodeSpec(name, (name.partition("-")[0],), dram, nvme, settings=settings, place=place))
    return nodes


@contextmanager
def _worker(plan: DualDemoPlan, host: LabHost, cluster: LocalCluster) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Start an engine's process on a host; its commands are JSON lines."""
    sizes = [str(number) for number in (plan.in_flight, plan.blocks, plan.layers, plan.block_bytes)]
    argv = [sys.executable, "-m", "kvstore.replay.dual_worker"]
    argv += [cluster.metadata_address, cluster.node(host.spec.name).local_socket, DECODE, *sizes]
    process = host.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ))
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def ask(command: dict[str, Any]) -> dict[str, Any]:
        stdin.write(json.dumps(command).encode() + b"\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise Internal("an engine of the demo ended; its error is above", host=host.spec.name)
        answer: dict[str, Any] = json.loads(line)
        return answer

    try:
        yield ask
        stdin.close()
        process.wait(_WORKER_S)
    finally:
        process.kill()
        process.wait(_WORKER_S)
        stdin.close()
        stdout.close()


def spark(values: Sequence[float], top: float) -> str:
    """Draw a series as a line of bars; ``top`` is a full bar."""
    if not len(values):
        return ""
    parts = np.array_split(np.asarray(values, float), min(_SPARK_COLUMNS, len(values)))
    levels = [min(len(SPARKS) - 1, round(float(part.mean()) / top * (len(SPARKS) - 1))) for part in parts]
    return "".join(SPARKS[max(0, level)] for level in levels)
