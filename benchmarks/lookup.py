"""Measure the lookup of a 1,600-key prefix with its replicas, over gRPC on loopback, from a real metadata server process.

The index contains chains of 1,600 blocks with replicas on two volumes: the first three quarters in DRAM, all blocks on NVMe. The
server process starts with this index. Figures: sequential lookups (p50, p99, keys/s), four in flight, index bytes per block, and
time from start to first answer. Every answer is checked.

The peer in the same run is Mooncake Store's ``batch_is_exist`` with the same number of keys (``.venv-bench`` or
``--peer-python``). The limit is a gRPC server that answers with a constant.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from harness import CpuMeter, Figure, Reference, Target, interleave, options
from kvproto.v1.metadata_pb2 import GetStatsRequest
from kvproto.v1.metadata_pb2_grpc import MetadataStub
from kvstore.rpc.client import call
from peers import PeerMissingError
from peers.bare_grpc import BareGrpc
from peers.mooncake import Mooncake
from rig.served_index import CHAIN, IN_FLIGHT, TIMEOUT_S, Client, Served, p50_ms


def p99_ms(times_s: list[float]) -> float:
    """Compute the 99th percentile in milliseconds."""
    return sorted(times_s)[len(times_s) * 99 // 100] * 1e3


def open_mooncake(stack: ExitStack, python: Path | None) -> tuple[Callable[[int], list[float]] | None, str]:
    """Start the peer with one small object per key. Returns None and the reason if the peer is missing."""
    try:
        store = stack.enter_context(Mooncake(512 << 20, python))
        names = [f"{number:032x}" for number in range(CHAIN)]  # the length of a hexadecimal key
        store.buffer(CHAIN * 4096, 1)
        store.put(names, 4096, 64)
    except PeerMissingError as error:
        return None, f"peer missing: {str(error).splitlines()[0]}"
    return lambda count: store.exist(names, count), ""


def main() -> None:
    """Measure all figures."""

    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--peer-python", type=Path, help="interpreter that has Mooncake Store")

    opts = options("lookup", __doc__, arguments=own)
    blocks = opts.pick(full=1_000_000, quick=200_000, smoke=2 * CHAIN)
    calls = opts.pick(full=1_000, quick=300, smoke=10)
    with ExitStack() as stack:
        scratch = opts.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-lookup-")))
        one = stack.enter_context(Served(scratch / f"index-{blocks}", blocks, opts.seed))
        client = Client.of(one.address, one.chains)
        stack.callback(client.channel.close)
        answer = call(MetadataStub(client.channel).Lookup, client.requests[0], TIMEOUT_S)
        bare = Client.of(stack.enter_context(BareGrpc(answer)).address, one.chains)
        stack.callback(bare.channel.close)
        exist, missing = open_mooncake(stack, opts.extra.peer_python)

        times: dict[str, list[list[float]]] = {"ours": [], "bare": [], "peer": []}

        def timed(name: str, measure: Callable[[int], list[float]]) -> Callable[[], float]:
            def once() -> float:
                times[name].append(measure(calls))
                return p50_ms(times[name][-1])

            return once

        meter = CpuMeter(metadata=one.pid)

        def ours(count: int) -> list[float]:
            measured: list[float] = []
            meter.time(count, lambda: measured.extend(client.times_s(count)))
            return measured

        contestants = {"ours": timed("ours", ours), "bare": timed("bare", bare.times_s)}
        if exist is not None:
            contestants["peer"] = timed("peer", exist)
        samples = interleave(contestants, opts.repetitions)
        parameters = {"blocks": blocks, "keys": CHAIN, "in_flight": 1}
        bound = Reference("bare gRPC", samples["bare"])
        opts.keep(
            Figure("lookup_p50", "Lookup of a 1,600-key prefix, p50", parameters, "ms", lower_is_better=True),
            samples["ours"],
            limit=bound,
            target=Target("limit", 1.5),
            transport="gRPC, loopback TCP",
            cpu=meter.cost("operation"),
        )
        opts.keep(
            Figure("lookup_p99", "Lookup of a 1,600-key prefix, p99", parameters, "ms", lower_is_better=True),
            [p99_ms(round_s) for round_s in times["ours"][-opts.repetitions :]],
            limit=Reference("bare gRPC", [p99_ms(round_s) for round_s in times["bare"][-opts.repetitions :]]),
            transport="gRPC, loopback TCP",
            cpu=meter.cost("operation"),
        )

        def keys_per_s(p50s_ms: list[float]) -> list[float]:
            return [CHAIN / p50 / 1e3 for p50 in p50s_ms]

        opts.keep(
            Figure("lookup_keys", "Keys looked up, one call in flight", parameters, "M keys/s"),
            keys_per_s(samples["ours"]),
            limit=Reference("bare gRPC", keys_per_s(samples["bare"])),
            peer=Reference("Mooncake batch_is_exist", keys_per_s(samples["peer"])) if "peer" in samples else None,
            target=Target("peer", 2.5),
            transport="gRPC, loopback TCP",
            notes=missing,
            cpu=meter.cost("operation"),
        )
        busy = CpuMeter(metadata=one.pid)

        def rate() -> float:
            found: list[float] = []
            busy.time(calls, lambda: found.append(client.rate(calls)))
            return found[0]

        rates = interleave({"ours": rate, "bare": lambda: bare.rate(calls)}, opts.repetitions)
        opts.keep(
            Figure("lookup_rate", "Lookups, four in flight", {**parameters, "in_flight": IN_FLIGHT}, "lookups/s"),
            rates["ours"],
            limit=Reference("bare gRPC", rates["bare"]),
            target=Target("value", 4_500),
            transport="gRPC, loopback TCP",
            cpu=busy.cost("operation"),
        )
        stats = call(MetadataStub(client.channel).GetStats, GetStatsRequest(), TIMEOUT_S)
        opts.keep(
            Figure(
                "lookup_index_bytes", "Index bytes per block (two replicas)", {"blocks": blocks}, "bytes", lower_is_better=True
            ),
            [stats.index_bytes / stats.blocks],
            target=Target("value", 160),
        )

        def restart_s() -> float:
            one.stop()
            start = time.perf_counter()
            one.start()
            fresh = Client.of(one.address, one.chains)
            fresh.times_s(1)
            elapsed = time.perf_counter() - start
            fresh.channel.close()
            return elapsed

        opts.keep(
            Figure("lookup_restart", "Server start to first answer", {"blocks": blocks}, "s", lower_is_better=True),
            interleave({"ours": restart_s}, opts.repetitions, warm_up=0)["ours"],
            target=Target("value", 2.0),
        )


if __name__ == "__main__":
    main()
