"""A latency-critical flow beside KV on one compute link: the latency of the flow, and the throughput of KV.

The KV traffic is real: an engine on the prefill host repeatedly loads blocks from the DRAM of the decode host. Its node fetches
them over the compute network and keeps none. Beside it a second flow runs between the same hosts: one message per millisecond,
each answered, like small collectives. There are three cases: an unchanged link, a class for the mark of KV in the queues of the
hosts and the switch, and an unchanged link while the nodes cap KV. The daemons of all cases run at once on the same hosts; those
of one case work at a time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

import harness
from harness import Figure, Options, Reference, Target
from kvclient import CacheSpec, ClientOptions, KVClient
from kvstore.core.types import Outcome
from kvstore.embedded.cluster import DaemonHost, LocalCluster, NodeSpec
from kvstore.netlab.lab import HostSpec, LabHost, NetLab, available
from kvstore.workload.payload import Payloads

MIB = 1 << 20
SPEC = CacheSpec(model="traffic-class", block_tokens=16, layers=8, layer_block_bytes=32 << 10)
CHAIN_BLOCKS = 64
CHAINS = 4
"""Loaded at once, each 16 MiB."""
MESSAGE_BYTES = 4 << 10
PAUSE_S = 0.001
DSCP = 8
CAP_SHARE = 0.8
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Case:
    """One way to treat KV traffic.

    Attributes:
        name: for records.
        settings: of both nodes.
        classified: whether the hosts' and the switch's queues have a class for the mark.
    """

    name: str
    settings: Mapping[str, str]
    classified: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """Results of one run of a case. Round trips in milliseconds; KV in bytes per second, 0 if none ran."""

    p50_ms: float
    p99_ms: float
    round_trips: int
    kv_bytes_per_s: float


def cases(mbit: float) -> tuple[Case, ...]:
    """All ways, on a link of this rate in Mbit/s."""
    link = int(mbit * 125_000)
    return (
        Case("nothing", {"kv_dscp": "0"}),
        Case("class", {"kv_dscp": str(DSCP)}, classified=True),
        Case("cap", {"kv_dscp": str(DSCP), "compute_cap": str(int(link * CAP_SHARE))}),
    )


class TrafficBed:
    """A prefill and a decode host with one compute link each, and a store of every case on them. A context manager.

    Args:
        mbit: of each compute link.
        chosen: the cases.
    """

    def __init__(self, mbit: float, chosen: tuple[Case, ...]) -> None:
        self._cases = {case.name: case for case in chosen}
        self._stack = ExitStack()
        self.lab = NetLab([HostSpec("metadata"), HostSpec("prefill-0", None, mbit), HostSpec("decode-0", None, mbit)])
        self._engines: dict[str, Talker] = {}

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
        self._stack.enter_context(self.lab)
        self._prefill, self._decode = self.lab.host("prefill-0"), self.lab.host("decode-0")
        for case in self._cases.values():
            self._engines[case.name] = self._store(case)
        self._echo = self._talker(self._prefill, "echo", self._prefill.compute_ip)
        self._port = self._echo.answer()["port"]

    def _store(self, case: Case) -> Talker:
        """The daemons of a case, its blocks in the decode host's DRAM, and its engine on the prefill host."""
        folder = Path(tempfile.mkdtemp(prefix="kvstore-traffic-"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        metadata = self.lab.host("metadata")
        settings = tuple({"cache_loads": "false", "prefault": "false", **case.settings}.items())
        nodes = [
            NodeSpec(host.name, (role,), dram, settings=settings, place=DaemonHost(host.compute_ip, host.popen))
            for host, role, dram in ((self._prefill, "prefill", 128 * MIB), (self._decode, "decode", 128 * MIB))
        ]
        place = DaemonHost(metadata.compute_ip, metadata.popen)
        cluster = self._stack.enter_context(LocalCluster(nodes, folder, metadata_host=place))
        stores = self._talker(self._decode, "engine", cluster.metadata_address, cluster.node("decode-0").local_socket)
        stores.ask("store")
        stores.answer()
        stores.close()
        return self._talker(self._prefill, "engine", cluster.metadata_address, cluster.node("prefill-0").local_socket)

    def _talker(self, host: LabHost, *arguments: str) -> Talker:
        talker = Talker(host, *arguments)
        self._stack.callback(talker.close)
        return talker

    def alone(self, seconds: float) -> Seen:
        """The flow without KV."""
        return self._ping(seconds, 0.0)

    def run(self, name: str, seconds: float) -> Seen:
        """The flow beside KV of one case. Every loaded byte is checked: a wrong one ends the benchmark."""
        if self._cases[name].classified:
            for host in (self._prefill, self._decode):
                host.classify("compute", kv_dscp=DSCP)
        engine = self._engines[name]
        try:
            engine.ask("begin")
            engine.answer()
            seen = self._ping(seconds, 0.0)
            engine.ask("end")
            answer = engine.answer()
        finally:
            for host in (self._prefill, self._decode):
                host.unclassify("compute")
        if answer["wrong"] or answer["missed"]:
            sys.exit(f"WRONG BYTES in {answer['wrong']} blocks, {answer['missed']} blocks did not come")
        return Seen(seen.p50_ms, seen.p99_ms, seen.round_trips, answer["bytes"] / answer["seconds"])

    def _ping(self, seconds: float, kv: float) -> Seen:
        # from the decode host: its messages stand in the queue that KV fills
        ping = self._talker(self._decode, "ping", self._prefill.compute_ip, str(self._port), str(seconds))
        times_ms = ping.answer()["times_ms"]
        ping.close()
        p50, p99 = np.percentile(times_ms, (50, 99))
        return Seen(float(p50), float(p99), len(times_ms), kv)


class Talker:
    """A process of this file on a host; commands are words, answers JSON lines."""

    def __init__(self, host: LabHost, *arguments: str) -> None:
        argv = [sys.executable, "-m", "netlab.traffic_class", *arguments]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = host.popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, cwd=Path(__file__).parent.parent
        )

    def ask(self, command: str) -> None:
        """Sends a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(command.encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Waits for the answer; the process bounds how long that takes."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            sys.exit(f"a process of the benchmark ended: {self._log.read()[-3000:].decode(errors='replace')}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends it. Idempotent."""
        self._process.kill()
        self._process.communicate(timeout=TIMEOUT_S)
        self._log.close()


# ---------------------------------------------------------------- on the hosts
def say(value: dict[str, Any]) -> None:
    """One answer."""
    print(json.dumps(value), flush=True)


def engine(metadata: str, local: str) -> None:
    """``store`` the chains; ``begin`` to load them again and again, until ``end``."""
    payloads = Payloads(SPEC.block_bytes)
    with KVClient.connect(metadata, SPEC, node=local, options=ClientOptions(client_name="engine", workers=CHAINS)) as client:
        tokens = np.arange(CHAINS * CHAIN_BLOCKS * SPEC.block_tokens, dtype=np.uint32).reshape(CHAINS, -1)
        chains = [client.keys(row) for row in tokens]
        buffers = [np.zeros((CHAIN_BLOCKS, SPEC.block_bytes), np.uint8) for _ in chains]
        stop, began_s = threading.Event(), 0.0

        def take_time() -> None:  # before any thread goes on: its bytes would else be counted in a time that began later
            nonlocal began_s
            began_s = time.monotonic()

        begun = threading.Barrier(CHAINS + 1, action=take_time)
        totals = {"bytes": 0, "wrong": 0, "missed": 0}
        lock = threading.Lock()

        def load(number: int, *, counts: bool) -> None:
            keys, buffer = chains[number], buffers[number]
            result = client.load(keys, buffer, deadline_s=TIMEOUT_S)
            hits = np.flatnonzero(result.outcomes == Outcome.HIT)
            # a part, in turn: checking all would take the cores from the links
            some = hits[:: max(1, len(hits) // 8)]
            wrong = payloads.wrong_blocks([keys[at] for at in some.tolist()], buffer[some])
            buffer[:, :64] = 0xA5  # what the next load does not bring must not look right
            with lock:
                totals["bytes"] += len(hits) * SPEC.block_bytes if counts else 0
                totals["wrong"] += len(wrong)
                totals["missed"] += len(keys) - len(hits)

        def work(number: int) -> None:
            for _ in range(2):
                load(number, counts=False)
            begun.wait(TIMEOUT_S)
            while not stop.is_set():
                load(number, counts=True)

        threads: list[threading.Thread] = []
        for line in sys.stdin:
            if line.strip() == "store":
                for keys, buffer in zip(chains, buffers, strict=True):
                    payloads.fill(keys, buffer)
                    client.store(keys, buffer, wait_visible=True)
                say({"stored": CHAINS * CHAIN_BLOCKS})
            elif line.strip() == "begin":
                stop.clear()
                totals |= dict.fromkeys(totals, 0)
                threads = [threading.Thread(target=work, args=(number,)) for number in range(CHAINS)]
                for thread in threads:
                    thread.start()
                begun.wait(TIMEOUT_S)
                say({"begun": True})
            else:
                stop.set()
                for thread in threads:
                    thread.join()
                say({**totals, "seconds": time.monotonic() - began_s})


def echo(ip: str) -> None:
    """Answers messages, one connection after the other."""
    with socket.create_server((ip, 0)) as server:
        say({"port": server.getsockname()[1]})
        while True:
            connection, _ = server.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while message := connection.recv(MESSAGE_BYTES, socket.MSG_WAITALL):
                    connection.sendall(message)


def ping(ip: str, port: int, seconds: float) -> None:
    """Round trips, each after a pause; says all their times."""
    times_ms = []
    message = bytes(MESSAGE_BYTES)
    with socket.create_connection((ip, port), timeout=TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        until_s = time.monotonic() + seconds
        while (begin_s := time.monotonic()) < until_s:
            connection.sendall(message)
            left = MESSAGE_BYTES
            while left:
                left -= len(connection.recv(left))
            times_ms.append((time.monotonic() - begin_s) * 1e3)
            time.sleep(PAUSE_S)
    say({"times_ms": times_ms})


# ---------------------------------------------------------------- the benchmark
def measure(options: Options, mbit: float) -> None:
    """All cases in turn, as often as asked for."""
    seconds = options.pick(full=1.5, quick=1.0, smoke=0.5)
    chosen = cases(mbit)[: options.pick(full=3, quick=3, smoke=2)]
    seen: dict[str, list[Seen]] = {"alone": [], **{case.name: [] for case in chosen}}
    with TrafficBed(mbit, chosen) as bed:
        names = list(seen)
        for number in range(options.repetitions):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                seen[name].append(bed.alone(seconds) if name == "alone" else bed.run(name, seconds))
    link = mbit * 125_000 / 1e6
    shared = {"link_mbit": mbit, "message_bytes": MESSAGE_BYTES}
    for name, found in seen.items():
        notes = f"{min(one.round_trips for one in found)} round trips a run at least"
        for what in ("p50", "p99"):
            options.keep(
                Figure("traffic_class_latency", "Round trip beside KV", {**shared, "case": name, "of": what}, "ms", True),
                [getattr(one, f"{what}_ms") for one in found],
                peer=None if name == "nothing" else Reference("nothing", [getattr(one, f"{what}_ms") for one in seen["nothing"]]),
                target=Target("peer", 0.5) if name != "nothing" and what == "p99" else None,
                transport="tcp over shaped veth links",
                notes=notes,
            )
        if name != "alone":
            options.keep(
                Figure("traffic_class_kv", "KV beside a latency-critical flow", {**shared, "case": name}, "MB/s"),
                [one.kv_bytes_per_s / 1e6 for one in found],
                limit=Reference("link", [link]),
                peer=None if name == "nothing" else Reference("nothing", [one.kv_bytes_per_s / 1e6 for one in seen["nothing"]]),
                transport="tcp over shaped veth links",
                verified=True,
            )


def main(description: str | None) -> None:
    """Command line."""

    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--link-mbit", type=float, default=1000.0, help="rate of the compute links (default 1000)")

    options = harness.options("netlab_traffic_class", description, arguments=arguments)
    reason = available()
    if reason is not None:
        print(f"SKIPPED: NO NETWORK LAB CAN RUN HERE: {reason}", flush=True)
        return
    measure(options, options.extra.link_mbit)


if __name__ == "__main__":
    parts: dict[str, Callable[..., object]] = {
        "engine": engine,
        "echo": echo,
        "ping": lambda ip, port, seconds: ping(ip, int(port), float(seconds)),
    }
    parts[sys.argv[1]](*sys.argv[2:])
