"""Measure whether N metadata servers and N shards do N times the work: CPU time per lookup, per published key and per plan.

The offered load is the same for 1, 2 and 4 metadata servers over three shards, and for two servers over 1, 3 and 6 shards. Each
shard has a replica. If the CPU time per operation does not grow, N times the processors do N times the work. That can be measured
on a machine with few processors; a rate cannot. The CPU time at rest is measured before each load, and subtracted. Lookups and
publishing are spread evenly over the servers; plans go where the failover of clients sends them.

The figure is the largest growth among the components (metadata servers, primaries, replicas, client), against one server or one
shard in the same round. Components that use less than a twentieth of the CPU time in both are left out. The records have the CPU
time of each.
"""

from __future__ import annotations

import queue
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import grpc

from harness import CpuCost, Figure, Options, Target, options
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import BlockRun, NodeInfo, VolumeInfo
from kvproto.v1.metadata_pb2_grpc import MetadataStub
from kvstore.core.types import KEY_BYTES, Tier
from kvstore.embedded.valkey import ValkeyServers
from kvstore.rpc.client import call
from kvstore.rpc.codec import tier_to_proto
from kvstore.rpc.failover.connect import connect_metadata
from rig.served_index import CHAIN, NAMESPACE, NODE_ID, TIMEOUT_S, Client, fill, open_valkey, sweep_new_epoch
from rig.shared_servers import SETTLE_S, SharedServers, offer

CALLERS = 4
BATCH_KEYS = 512
RATES = {"lookup": 300.0, "published key": 40.0 * BATCH_KEYS, "plan": 100.0}
"""Operations per second."""
PLAN_TIMEOUT_S = 1.0
"""As that of a client: calls with a longer timeout can be cancelled, which costs a thread each."""
MOST_GROWTH = 1.15
LEAST_SHARE = 0.05
"""Share of the CPU time from which a component counts."""
Varied = Literal["servers", "shards"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Numbers of metadata servers and shards."""

    servers: int
    shards: int


SERIES: dict[Varied, list[Setting]] = {
    "servers": [Setting(1, 3), Setting(2, 3), Setting(4, 3)],
    "shards": [Setting(2, 1), Setting(2, 3), Setting(2, 6)],
}
"""The first of each is what the others are compared with."""
SMOKE_SERIES: dict[Varied, list[Setting]] = {
    "servers": [Setting(1, 1), Setting(2, 1)],
    "shards": [Setting(1, 1), Setting(1, 2)],
}


@dataclass(slots=True)
class Costs:
    """CPU seconds per operation by component, in each round."""

    rounds: list[dict[str, float]] = field(default_factory=list)

    def median(self) -> dict[str, float]:
        """The median of each component."""
        return {name: statistics.median(cost[name] for cost in self.rounds) for name in self.rounds[0]}


class PublishingNode:
    """A registered node that publishes batches of new keys over one stream, and waits for each acknowledgement."""

    def __init__(self, channel: grpc.Channel, name: str, seed: int) -> None:
        self._draw = random.Random(seed)
        self._sequence = 0
        self._node = NodeInfo(
            node_id=name,
            boot_id=secrets.token_bytes(16),
            roles=["prefill"],
            control_address="127.0.0.1:1",
            data_address="127.0.0.1:2",
            volumes=[VolumeInfo(volume_id=f"{name}/nvme0", tier=tier_to_proto(Tier.NVME), capacity_bytes=1 << 40)],
        )
        stub = MetadataStub(channel)
        call(stub.RegisterNode, pb.RegisterNodeRequest(operation_id=secrets.token_bytes(16), node=self._node), TIMEOUT_S)
        self._batches: queue.Queue[pb.PublishRequest | None] = queue.Queue(1)
        self._answers = stub.Publish(iter(self._batches.get, None))

    def publish(self) -> None:
        """Publish one batch."""
        self._sequence += 1
        keys = self._draw.randbytes(BATCH_KEYS * KEY_BYTES)
        self._batches.put(
            pb.PublishRequest(
                node_id=self._node.node_id,
                boot_id=self._node.boot_id,
                sequence=self._sequence,
                volume_id=self._node.volumes[0].volume_id,
                stored=[BlockRun(namespace_id=NAMESPACE, depth=0, keys=keys)],
            )
        )
        if next(self._answers).sequence != self._sequence:
            sys.exit("a batch was not acknowledged")

    def close(self) -> None:
        """End the stream."""
        self._batches.put(None)
        for _ in self._answers:
            pass


def planner(channel: grpc.Channel, node_id: str) -> Callable[[], None]:
    """Return a function that plans a load, and reports its end."""
    stub = MetadataStub(channel)

    def plan() -> None:
        request = pb.PlanLoadRequest(
            operation_id=secrets.token_bytes(16),
            prefill_node=node_id,
            blocks=CHAIN,
            block_bytes=1 << 20,
            block_tokens=64,
            budget_ms=60_000,
        )
        made = call(stub.PlanLoad, request, PLAN_TIMEOUT_S)
        finished = pb.LoadReport(plan_id=made.plan_id, finished=True)
        call(stub.ReportLoads, pb.ReportLoadsRequest(loads=[finished]), PLAN_TIMEOUT_S)

    return plan


class Bed:
    """Clusters with the same contents, by number of shards."""

    def __init__(self, stack: ExitStack, opts: Options, scratch: Path, settings: Sequence[Setting]) -> None:
        self._scratch = scratch
        self._seconds = opts.pick(full=5.0, quick=3.0, smoke=0.1)
        self._settle_s = opts.pick(full=SETTLE_S, quick=SETTLE_S, smoke=0.1)
        self._clusters: dict[int, ValkeyServers] = {}
        self._chains: dict[int, list[bytes]] = {}
        self._node = 0
        for shards in sorted({setting.shards for setting in settings}):
            cluster = stack.enter_context(ValkeyServers(scratch / f"valkey-{shards}", shards=shards, replicas=1))
            index = open_valkey(cluster.seeds)
            self._chains[shards] = fill(index, opts.pick(full=100_000, quick=50_000, smoke=4 * CHAIN), opts.seed)
            sweep_new_epoch(index)
            index.close()
            self._clusters[shards] = cluster

    def measure(self, setting: Setting) -> Iterator[tuple[str, dict[str, float]]]:
        """Measure each kind of work once. Yields its name and its CPU seconds per operation, by component."""
        folder = self._scratch / f"run-{self._node}"
        folder.mkdir()
        with SharedServers(folder, self._clusters[setting.shards], setting.servers) as servers, ExitStack() as stack:
            channels = [servers.channels[number % setting.servers] for number in range(CALLERS)]
            looking = [Client.on(channel, self._chains[setting.shards]) for channel in channels]
            nodes, any_server = [], []
            for number, channel in enumerate(channels):
                any_server.append(connect_metadata(",".join(servers.addresses), caller=f"caller-{number}", own_connection=True))
                stack.callback(any_server[-1].close)
                self._node += 1
                nodes.append(PublishingNode(channel, f"publisher-{self._node}", self._node))
                stack.callback(nodes[-1].close)
            work: dict[str, list[Callable[[], object]]] = {
                "lookup": [lambda one=one: one.times_s(1) for one in looking],  # type: ignore[misc]
                "published key": [one.publish for one in nodes],
                "plan": [planner(channel, NODE_ID) for channel in any_server],
            }
            components = servers.components()
            time.sleep(self._settle_s)
            for name, callers in work.items():
                each = BATCH_KEYS if name == "published key" else 1
                rate = RATES[name] / each
                for caller in callers:  # connections, guesses of run ends
                    for _ in range(16):
                        caller()
                count = int(rate * self._seconds) // CALLERS * CALLERS
                rest, _ = components.rates(lambda: time.sleep(self._seconds))
                busy, elapsed_s = components.rates(lambda: offer(callers, rate, count))  # noqa: B023  # called at once
                yield name, {of: max(busy[of] - rest[of], 0.0) * elapsed_s / (count * each) for of in busy}


def growth(costs: dict[str, float], first: dict[str, float]) -> dict[str, float]:
    """Growth of each component that counts in one of both."""
    shares = {name: max(one[name] / sum(one.values()) for one in (costs, first)) for name in first}
    return {name: costs[name] / first[name] for name in first if shares[name] >= LEAST_SHARE and first[name] > 0}


def main() -> None:
    """Measure all settings."""
    opts = options("server_scaling", __doc__, repetitions=3)
    by_varied = opts.pick(full=SERIES, quick=SERIES, smoke=SMOKE_SERIES)
    settings = list(dict.fromkeys(setting for series in by_varied.values() for setting in series))
    costs = {name: {setting: Costs() for setting in settings} for name in RATES}
    with ExitStack() as stack:
        scratch = opts.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-scaling-")))
        bed = Bed(stack, opts, scratch, settings)
        for number in range(opts.repetitions):
            for setting in settings[number % len(settings) :] + settings[: number % len(settings)]:
                for name, cost in bed.measure(setting):
                    costs[name][setting].rounds.append(cost)
    for name, by_setting in costs.items():
        for varied, series in by_varied.items():
            first = by_setting[series[0]]
            for setting in series:
                now = by_setting[setting]
                grown = [growth(cost, other) for cost, other in zip(now.rounds, first.rounds, strict=True)]
                named = {of: statistics.median(one[of] for one in grown if of in one) for of in grown[0]}
                opts.keep(
                    Figure(
                        "server_scaling",
                        "CPU time per operation: largest growth of a component",
                        {"what": name, "varied": varied, "servers": setting.servers, "shards": setting.shards},
                        "×",
                        lower_is_better=True,
                    ),
                    [max(one.values()) for one in grown],
                    target=Target("value", MOST_GROWTH),
                    transport="gRPC, loopback TCP",
                    cpu=CpuCost("operation", now.median()),
                    notes=f"per {name}, {varied}: {', '.join(f'{of} {ratio:.2f}' for of, ratio in named.items())}",
                )


if __name__ == "__main__":
    main()
