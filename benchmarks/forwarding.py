"""Measure planning calls at a metadata server that forwards them to the one that plans, against calls to that server.

Two metadata servers share an index in Valkey; the first one plans. A client plans a load and reports its end, in turn at both
servers, one call in flight. A third client knows both servers and prefers the one that forwards: it looks for the planning one.
The records also have the CPU time of both servers per call.
"""

from __future__ import annotations

import itertools
import json
import secrets
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import grpc

from harness import CpuMeter, Figure, Options, Reference, interleave, options
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import NodeInfo
from kvproto.v1.metadata_pb2_grpc import MetadataStub
from kvstore.embedded.valkey import ValkeyServers
from kvstore.rpc.client import call, connect
from kvstore.rpc.failover.connect import connect_metadata
from kvstore.rpc.failover.selection import ranked
from rig import start_metadata_server
from rig.served_index import TIMEOUT_S, p50_ms

PLAN_S = 0.9
"""Timeout of planning calls: a load waits for its plan."""
NODE = NodeInfo(
    node_id="host-1",
    boot_id=secrets.token_bytes(16),
    roles=["prefill"],
    control_address="127.0.0.1:1",
    data_address="127.0.0.1:2",
)


def plan_times_s(channel: grpc.Channel, count: int) -> list[float]:
    """Seconds of each PlanLoad call. Each plan is reported as finished, outside the measurement."""
    stub = MetadataStub(channel)
    times: list[float] = []
    for _ in range(count):
        request = pb.PlanLoadRequest(
            operation_id=secrets.token_bytes(16),
            prefill_node=NODE.node_id,
            blocks=1_600,
            block_bytes=1 << 20,
            block_tokens=64,
            budget_ms=60_000,
        )
        begun_s = time.perf_counter()
        plan = call(stub.PlanLoad, request, PLAN_S)
        times.append(time.perf_counter() - begun_s)
        finished = pb.ReportLoadsRequest(loads=[pb.LoadReport(plan_id=plan.plan_id, finished=True)])
        call(stub.ReportLoads, finished, PLAN_S)
    return times


def measure(stack: ExitStack, opts: Options, scratch: Path) -> None:
    """Keep the figures at both servers."""
    calls = opts.pick(full=1_000, quick=300, smoke=10)
    cluster = stack.enter_context(ValkeyServers(scratch / "valkey", shards=1))
    engine = f"valkey://{','.join(cluster.seeds)}"
    channels: list[grpc.Channel] = []
    processes, addresses = [], []
    for name in ("planning", "forwarding"):
        ready = scratch / f"ready-{name}"
        settings = {"engine": engine, "index_path": scratch / name, "metrics_listen": "none", "node_ttl": "1h"}
        process = start_metadata_server(ready, **settings)
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)
        addresses.append(json.loads(ready.read_text(encoding="utf-8"))["address"])
        channel = connect(addresses[-1])
        stack.callback(channel.close)
        call(MetadataStub(channel).RegisterNode, pb.RegisterNodeRequest(operation_id=bytes(16), node=NODE), TIMEOUT_S)
        channels.append(channel)
        processes.append(process.pid)
    caller = next(name for name in map(str, itertools.count()) if ranked(addresses, name)[0] == addresses[1])
    channels.append(connect_metadata(",".join(addresses), caller=caller))
    stack.callback(channels[-1].close)
    meters = [CpuMeter(planning=processes[0], forwarding=processes[1]) for _ in channels]

    def p50_at(number: int) -> float:
        times: list[float] = []
        meters[number].time(calls, lambda: times.extend(plan_times_s(channels[number], calls)))
        return p50_ms(times)

    ways = {"direct": lambda: p50_at(0), "forwarded": lambda: p50_at(1), "found": lambda: p50_at(2)}
    samples = interleave(ways, opts.repetitions)
    for number, way in enumerate(samples):
        opts.keep(
            Figure("forwarded_plan", "PlanLoad over gRPC, p50", {"way": way}, "ms", lower_is_better=True),
            samples[way],
            peer=Reference("direct", samples["direct"]) if number else None,
            transport="gRPC, loopback TCP",
            cpu=meters[number].cost("operation"),
        )


def main() -> None:
    """Measure all figures."""
    opts = options("forwarding", __doc__)
    with ExitStack() as stack:
        measure(stack, opts, opts.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-forwarding-"))))


if __name__ == "__main__":
    main()
