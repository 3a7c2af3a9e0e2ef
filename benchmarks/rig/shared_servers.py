"""Several metadata servers over one Valkey Cluster, with the CPU time of each component and the commands that the cluster ran."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from kvstore.embedded.valkey import ValkeyServer, ValkeyServers
from kvstore.rpc.client import connect
from rig import start_metadata_server
from rig.served_index import TTL_S

REPLICATION = frozenset({"psync", "replconf", "replicaof"})
"""Commands of replication itself."""
SETTLE_S = 4.0
"""Time after which a started server has read all markers and taken its roles."""


class Components:
    """CPU time of a store, by component: the sum over the processes of each.

    Args:
        pids: process ids by component. ``client`` is this process.
    """

    def __init__(self, pids: Mapping[str, Sequence[int]]) -> None:
        # the CPU clock of another process, as clock_getcpuclockid(3) makes it: the kernel's sum over its tasks
        of_all = {"client": [os.getpid()], **pids}
        self._clocks = {name: [(~pid << 3) | 2 for pid in some] for name, some in of_all.items()}

    def seconds(self) -> dict[str, float]:
        """CPU seconds of each component until now."""
        return {name: sum(map(time.clock_gettime, clocks)) for name, clocks in self._clocks.items()}

    def rates(self, work: Callable[[], object]) -> tuple[dict[str, float], float]:
        """CPU seconds per second of each component while a function runs, and the seconds that it ran."""
        before, began_s = self.seconds(), time.perf_counter()
        work()
        elapsed_s = time.perf_counter() - began_s
        return {name: (used - before[name]) / elapsed_s for name, used in self.seconds().items()}, elapsed_s


def commands_run(servers: Sequence[ValkeyServer]) -> Counter[str]:
    """Commands that servers have run, by name, without those of replication."""
    found: Counter[str] = Counter()
    for server in servers:
        info = server.call("INFO", "commandstats")
        for line in info.decode().splitlines() if isinstance(info, bytes) else []:
            if line.startswith("cmdstat_"):
                name, figures = line.removeprefix("cmdstat_").split(":", 1)
                if name not in REPLICATION:
                    found[name] += int(figures.split("calls=")[1].split(",")[0])
    return found


class SharedServers:
    """Metadata servers that share the index of a cluster, and a channel to each. A context manager."""

    def __init__(self, folder: Path, cluster: ValkeyServers, count: int) -> None:
        self._stack = ExitStack()
        self._cluster = cluster
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[grpc.Channel] = []
        self.addresses: list[str] = []
        try:
            for number in range(count):  # a busy machine must not shorten hits: these benchmarks measure no latencies
                ready = folder / f"ready-{count}-{number}"
                settings = {"engine": cluster.url, "lookup_shard": "2s", "index_path": folder / f"server-{count}-{number}"}
                process = start_metadata_server(ready, metrics_listen="none", node_ttl=f"{TTL_S}s", **settings)
                self._stack.callback(process.wait, 30)
                self._stack.callback(process.terminate)
                self.processes.append(process)
                self.addresses.append(json.loads(ready.read_text(encoding="utf-8"))["address"])
                channel = connect(self.addresses[-1], own_connection=True)
                self._stack.callback(channel.close)
                self.channels.append(channel)
        except BaseException:
            self._stack.close()
            raise

    def components(self) -> Components:
        """The components of this store."""
        replicas = {"replicas": [one.process.pid for one in self._cluster.replicas]} if self._cluster.replicas else {}
        return Components(
            {
                "metadata": [process.pid for process in self.processes],
                "primaries": [one.process.pid for one in self._cluster.primaries],
                **replicas,
            }
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()


def offer(callers: Sequence[Callable[[], object]], rate: float, count: int) -> None:
    """Make ``count`` calls at a fixed rate, by all callers in turn, each in its own thread. Raises a caller's error."""
    interval_s = len(callers) / rate

    def work(number: int, caller: Callable[[], object]) -> None:
        due_s = time.monotonic() + interval_s * number / len(callers)
        for _ in range(count // len(callers)):
            time.sleep(max(0.0, due_s - time.monotonic()))
            caller()
            due_s += interval_s

    with ThreadPoolExecutor(len(callers)) as pool:
        for done in [pool.submit(work, number, caller) for number, caller in enumerate(callers)]:
            done.result()
