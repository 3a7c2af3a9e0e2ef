"""A bed for dual-path loads: the real daemons on the hosts of a network lab, and an engine's client on each prefill host.

Storage hosts keep blocks on an NVMe volume and nothing of them in DRAM; prefill and decode nodes keep nothing either of what
passes through them, so that every load comes over storage links, as in the paper. Control and engine-to-engine traffic uses
the compute network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore.core.spec import CacheSpec
from kvstore.embedded.cluster import DaemonHost, LocalCluster, NodeSpec
from kvstore.embedded.valkey import ServerHost, ValkeyServers
from kvstore.netlab import netns
from kvstore.netlab.bed import METADATA_HOST, LabBed
from kvstore.netlab.lab import LabHost, NetLab
from kvstore.netlab.traffic import LinkRecorder
from netlab.workload import Workload

MIB = 1 << 20
_BENCHMARKS = str(Path(__file__).parent.parent)


@dataclass(frozen=True, slots=True)
class BedOptions:
    """Sizes that a scenario may choose.

    Attributes:
        arena_bytes: of each prefill and decode node, for blocks under way only.
        window_bytes: read-ahead of a node for one load.
        settings: further settings of prefill and decode nodes.
        servers: metadata servers. If there are several, their index is in a Valkey Cluster of three shards, on the same host.
    """

    arena_bytes: int = 384 * MIB
    window_bytes: int = 16 * MIB
    settings: Mapping[str, str] = field(default_factory=dict)
    servers: int = 1


@dataclass(frozen=True, slots=True)
class OneLoad:
    """Report of a driver on one load. Times in seconds of the monotonic clock."""

    load: int
    start_s: float
    end_s: float
    bytes: int
    wrong: int
    missed: int
    layer0_s: float | None = None
    paths: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None

    @property
    def seconds(self) -> float:
        """How long it took, its lookup included."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Batch:
    """Results of some loads."""

    loads: tuple[OneLoad, ...]
    began_s: float
    machine_cpu: float
    """Share of all cores of the machine that were busy during the loads, with any process."""
    counters: Mapping[str, int]
    """The clients' totals since they were made, added up."""

    @property
    def seconds(self) -> float:
        """From the first load's begin to the last one's end."""
        return max(load.end_s for load in self.loads) - self.began_s

    @property
    def bytes(self) -> int:
        """Brought."""
        return sum(load.bytes for load in self.loads)

    @property
    def rate(self) -> float:
        """Bytes a second, the run's start and end included."""
        return self.bytes / self.seconds

    def check(self) -> Self:
        """Every block came, with its own bytes, or the benchmark ends."""
        wrong, missed = sum(load.wrong for load in self.loads), sum(load.missed for load in self.loads)
        if wrong or missed:
            errors = sorted({load.error for load in self.loads if load.error})
            sys.exit(f"WRONG BYTES in {wrong} blocks, {missed} blocks did not come: {'; '.join(errors) or 'no error told'}")
        return self


class Driver:
    """An engine's client on one host; ``ask`` and ``answer`` come in pairs."""

    def __init__(self, host: LabHost, cluster: LocalCluster, spec: CacheSpec, workload: Path, log: Path) -> None:
        arguments = {
            "metadata": cluster.metadata_address,
            "node": cluster.node(host.name).local_socket,
            "workload": str(workload),
            "layers": str(spec.layers),
            "layer-block-bytes": str(spec.layer_block_bytes),
            "block-tokens": str(spec.block_tokens),
        }
        argv = [
            sys.executable,
            "-m",
            "netlab.driver",
            *(part for name, value in arguments.items() for part in (f"--{name}", value)),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (_BENCHMARKS, os.environ.get("PYTHONPATH"))))}
        self.host = host
        self._log = log
        with log.open("ab") as stderr:
            self._process = host.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment)
        self.answer()

    def ask(self, command: Mapping[str, Any]) -> None:
        """Sends a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Waits for the answer; the driver bounds how long that takes."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the driver on {self.host.name} ended: {self._log.read_text(errors='replace')[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends it."""
        with self._process:  # closes its pipes
            self._process.kill()


class LoadBed:
    """A running bed, its workload stored. A context manager.

    Args:
        bed: hosts and rates.
        spec: the namespace.
        workload: the stored and loaded blocks.
        options: sizes.
        scratch: folder for volumes; None: a temporary one.
    """

    def __init__(
        self, bed: LabBed, spec: CacheSpec, workload: Workload, options: BedOptions = BedOptions(), scratch: Path | None = None
    ) -> None:
        self.bed = bed
        self.spec = spec
        self.workload = workload
        self.options = options
        self._scratch = scratch
        self._stack = ExitStack()
        self.lab = NetLab(bed.hosts())
        self.engines: list[Driver] = []
        """One on each prefill host."""

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _build(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvstore-netlab-", dir=self._scratch))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self._stack.enter_context(self.lab)
        metadata = self.lab.host(METADATA_HOST)
        settings = [("engine", self._start_valkey(metadata))] if self.options.servers > 1 else []
        place = DaemonHost(metadata.compute_ip, metadata.popen)
        self.cluster = self._stack.enter_context(
            LocalCluster(self._nodes(), self.folder, settings, place, servers=self.options.servers)
        )
        path = self.folder / "workload.npz"
        self.workload.save(path)
        self._store(path)
        for name in self.bed.prefill_hosts:
            self.engines.append(self._driver(name, path))

    def _start_valkey(self, host: LabHost) -> str:
        """Starts a Valkey Cluster. Returns the setting ``metadata.engine``."""
        namespace = os.open(netns.NETNS_DIR / host.namespace, os.O_RDONLY | os.O_CLOEXEC)
        self._stack.callback(os.close, namespace)
        on_host = self._stack.enter_context(ThreadPoolExecutor(1, initializer=netns.enter, initargs=(namespace,)))
        place = ServerHost(host.compute_ip, host.popen)
        valkey = on_host.submit(lambda: ValkeyServers(self.folder / "valkey", shards=3, hosts=[place])).result()
        self._stack.callback(valkey.close)
        return valkey.url

    def _driver(self, name: str, workload: Path) -> Driver:
        driver = Driver(self.lab.host(name), self.cluster, self.spec, workload, self.folder / f"driver-{name}.log")
        self._stack.callback(driver.close)
        return driver

    def _store(self, workload: Path) -> None:
        """On the storage host itself, then with its DRAM emptied by a restart."""
        name = self.bed.storage_hosts[0]
        driver = self._driver(name, workload)
        driver.ask({"do": "store"})
        stored = driver.answer()["stored"]
        driver.close()
        if stored != len(self.workload.keys):
            sys.exit(f"{stored} of {len(self.workload.keys)} blocks were stored")
        self.cluster.stop(name)
        self.cluster.start_node(name)

    def _nodes(self) -> list[NodeSpec]:
        options = self.options
        slot = self.spec.block_bytes + 8192
        volume = int(len(self.workload.keys) * slot * 1.1) + 128 * MIB
        shared = {"load_window": str(options.window_bytes), "prefault": "false"}
        engines = {
            **shared,
            "cache_loads": "false",
            "prefill_buffer": str(options.arena_bytes * 3 // 4),
            "storage_bandwidth": str(int(self.bed.snic_mbit * 125_000)),
            "compute_bandwidth": str(int(self.bed.cnic_mbit * 125_000)),
            **options.settings,
        }
        nodes = []
        for number, name in enumerate(self.bed.storage_hosts):
            nodes.append(self._node(name, "storage", 256 * MIB, 0 if number else volume, shared))
        for role, names in (("prefill", self.bed.prefill_hosts), ("decode", self.bed.decode_hosts)):
            nodes += [self._node(name, role, options.arena_bytes, 0, engines) for name in names]
        return nodes

    def _node(self, name: str, role: str, dram: int, nvme: int, settings: Mapping[str, str]) -> NodeSpec:
        host = self.lab.host(name)
        more = {"storage_listen": f"{host.storage_ip}:0", **settings}
        return NodeSpec(name, (role,), dram, nvme, settings=tuple(more.items()), place=DaemonHost(host.compute_ip, host.popen))

    # ---------------------------------------------------------------- running
    def begin(
        self, engine: int, loads: Sequence[int], in_flight: int, paths: Mapping[str, Any], deadline_s: float = 60.0
    ) -> None:
        """Begins loads on one prefill host; ``end`` waits for them."""
        self.engines[engine].ask(
            {"do": "loads", "loads": list(loads), "in_flight": in_flight, "paths": dict(paths), "deadline_s": deadline_s}
        )

    def end(self, engines: Sequence[int], idle_before: tuple[float, float]) -> Batch:
        """Waits for what ``begin`` began."""
        answers = [self.engines[number].answer() for number in engines]
        busy, total = (now - then for now, then in zip(machine_times(), idle_before, strict=True))
        counters: dict[str, int] = {}
        for answer in answers:
            for name, value in answer["counters"].items():
                counters[name] = counters.get(name, 0) + value
        return Batch(
            tuple(OneLoad(**load) for answer in answers for load in answer["loads"]),
            min(answer["began_s"] for answer in answers),
            busy / total if total else 0.0,
            counters,
        )

    def run(self, loads: Sequence[int], in_flight: int, paths: Mapping[str, Any], deadline_s: float = 60.0) -> Batch:
        """Loads over all prefill hosts, dealt out in turn; ``in_flight`` on each."""
        before = machine_times()
        hosts = len(self.engines)
        used = [number for number in range(hosts) if loads[number::hosts]]
        for number in used:
            self.begin(number, loads[number::hosts], in_flight, paths, deadline_s)
        return self.end(used, before)

    def record(self) -> LinkRecorder:
        """Of every NIC; to be entered."""
        return self.lab.record()

    @property
    def readers(self) -> tuple[str, ...]:
        """Hosts whose storage links loads are read over."""
        return (*self.bed.prefill_hosts, *self.bed.decode_hosts)

    def paths(self, policy: str, *, layer_group: int = 0, relays: bool = True, stall_s: float = 1.0) -> dict[str, Any]:
        """A driver's choice of paths, decoding on the first decode host."""
        decode = self.bed.decode_hosts[0]
        return {"decode_node": decode, "policy": policy, "relays": relays, "layer_group": layer_group, "stall_s": stall_s}


def machine_times() -> tuple[float, float]:
    """(busy, all) seconds of all cores since boot, in ticks."""
    fields = [float(value) for value in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)
