"""Measure the lookup of a 1,600-key prefix with its replicas, over gRPC on loopback, from a real metadata server process.

The index contains chains of 1,600 blocks with replicas on two volumes: the first three quarters in DRAM, all blocks on NVMe. The
server process starts with this index. Figures: sequential lookups (p50, p99, keys/s), four in flight, index bytes per block, time
from start to first answer, and a large index against a small one, both served at the same time. Every answer is checked.

The peer in the same run is Mooncake Store's ``batch_is_exist`` with the same number of keys (``.venv-bench`` or
``--peer-python``). The limit is a gRPC server that answers with a constant.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from harness import Figure, Reference, Target, interleave, options
from kvproto.v1.common_pb2 import NodeInfo, VolumeInfo
from kvproto.v1.metadata_pb2 import GetStatsRequest, LookupRequest, LookupResponse
from kvproto.v1.metadata_pb2_grpc import MetadataStub
from kvstore.core.types import BlockKey, BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.index.lmdb import LmdbIndex
from kvstore.metadata.indexing.index_mutations import register_node
from kvstore.rpc.client import call, connect
from kvstore.rpc.codec import tier_to_proto
from peers import PeerMissingError
from peers.bare_grpc import BareGrpc
from peers.mooncake import Mooncake
from rig import start_metadata_server

if TYPE_CHECKING:
    import grpc

CHAIN = 1_600
DRAM_SHARE = 1_200
NAMESPACE = NamespaceId(b"benchmark-lookup")
SAMPLE_CHAINS = 64
"""Number of chains to look up, drawn from the whole index."""
IN_FLIGHT = 4
TIMEOUT_S = 10.0
TTL_S = 3_600
"""Grace period after a start. It must cover the whole run, because no node sends heartbeats."""


def fill(path: Path, blocks: int, seed: int) -> list[bytes]:
    """Create an index of ``blocks`` blocks and return a sample of its chains, packed."""
    index = LmdbIndex.open(path)
    tiers = {VolumeId("host-1/dram"): Tier.DRAM, VolumeId("host-1/nvme0"): Tier.NVME}
    boot_id = BootId(secrets.token_bytes(16))
    volumes = [VolumeInfo(volume_id=name, tier=tier_to_proto(tier), capacity_bytes=1 << 40) for name, tier in tiers.items()]
    node = NodeInfo(
        node_id="host-1",
        boot_id=boot_id,
        roles=["prefill"],
        control_address="127.0.0.1:1",
        data_address="127.0.0.1:2",
        volumes=volumes,
    )
    register_node(index, node)
    dram, nvme = [index.open_volume_epoch(name, NodeId("host-1"), tier, boot_id) for name, tier in tiers.items()]
    draw = random.Random(seed)
    chains = blocks // CHAIN
    kept = set(draw.sample(range(chains), min(chains, SAMPLE_CHAINS)))
    sample = []
    for number in range(chains):
        packed = draw.randbytes(16 * CHAIN)
        keys = tuple(BlockKey(packed[at : at + 16]) for at in range(0, len(packed), 16))
        index.publish(nvme, [BlockRun(NAMESPACE, None, 0, keys)], [])
        index.publish(dram, [BlockRun(NAMESPACE, None, 0, keys[:DRAM_SHARE])], [])
        if number in kept:
            sample.append(packed)
    index.close()
    return sample


class Served:
    """An index, the real server process that serves it, and a client that looks up its chains in rotation."""

    def __init__(self, path: Path, blocks: int, seed: int) -> None:
        self.path, self.blocks = path, blocks
        self.chains = fill(path, blocks, seed)
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""
        self.start()

    def start(self) -> None:
        """Start the server and wait until it is ready."""
        ready = self.path.with_suffix(".ready")
        self._process = start_metadata_server(ready, index_path=self.path, node_ttl=f"{TTL_S}s")
        self.address = json.loads(ready.read_text(encoding="utf-8"))["address"]

    def stop(self) -> None:
        """Stop the server."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=30)
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


@dataclass(slots=True)
class Client:
    """One channel to a server, and requests to send."""

    channel: grpc.Channel
    requests: list[LookupRequest]
    at: int = 0

    @classmethod
    def of(cls, address: str, chains: list[bytes]) -> Self:
        """Open the channel."""
        return cls(connect(address, own_connection=True), [LookupRequest(namespace_id=NAMESPACE, keys=keys) for keys in chains])

    def times_s(self, count: int) -> list[float]:
        """Measure the durations of sequential lookups."""
        lookup = MetadataStub(self.channel).Lookup
        times = []
        for request in self._next(count):
            start = time.perf_counter()
            answer = call(lookup, request, TIMEOUT_S)
            times.append(time.perf_counter() - start)
            _check(answer)
        return times

    def rate(self, count: int) -> float:
        """Measure the lookups per second with four in flight."""
        lookup = MetadataStub(self.channel).Lookup

        def work() -> None:
            for request in self._next(count // IN_FLIGHT):
                _check(call(lookup, request, TIMEOUT_S))

        threads = [threading.Thread(target=work) for _ in range(IN_FLIGHT)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return count // IN_FLIGHT * IN_FLIGHT / (time.perf_counter() - start)

    def _next(self, count: int) -> Iterator[LookupRequest]:
        for _ in range(count):
            self.at = (self.at + 1) % len(self.requests)
            yield self.requests[self.at]


def _check(answer: LookupResponse) -> None:
    if answer.hit_blocks != CHAIN:
        sys.exit(f"a lookup found {answer.hit_blocks} of {CHAIN} blocks")


def p50_ms(times_s: list[float]) -> float:
    """Compute the median in milliseconds."""
    return statistics.median(times_s) * 1e3


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
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--peer-python", type=Path, help="interpreter that has Mooncake Store")
    chosen, rest = own.parse_known_args()
    command, sys.argv = sys.argv, [sys.argv[0], *rest]
    opts = options("lookup", __doc__)
    sys.argv = command
    blocks = opts.pick(full=1_000_000, quick=200_000, smoke=2 * CHAIN)
    large, small = opts.pick(full=10_000_000, quick=1_000_000, smoke=4 * CHAIN), opts.pick(full=10_000, quick=10_000, smoke=CHAIN)
    calls = opts.pick(full=1_000, quick=300, smoke=10)
    with ExitStack() as stack:
        scratch = opts.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-lookup-")))
        one = stack.enter_context(Served(scratch / f"index-{blocks}", blocks, opts.seed))
        client = Client.of(one.address, one.chains)
        stack.callback(client.channel.close)
        answer = call(MetadataStub(client.channel).Lookup, client.requests[0], TIMEOUT_S)
        bare = Client.of(stack.enter_context(BareGrpc(answer)).address, one.chains)
        stack.callback(bare.channel.close)
        exist, missing = open_mooncake(stack, chosen.peer_python)

        times: dict[str, list[list[float]]] = {"ours": [], "bare": [], "peer": []}

        def timed(name: str, measure: Callable[[int], list[float]]) -> Callable[[], float]:
            def once() -> float:
                times[name].append(measure(calls))
                return p50_ms(times[name][-1])

            return once

        contestants = {"ours": timed("ours", client.times_s), "bare": timed("bare", bare.times_s)}
        if exist is not None:
            contestants["peer"] = timed("peer", exist)
        samples = interleave(contestants, opts.repetitions)
        parameters = {"blocks": blocks, "keys": CHAIN, "in_flight": 1}
        bound = Reference("bare gRPC", samples["bare"])
        opts.keep(
            Figure("lookup_p50", "Lookup of a 1,600-key prefix, p50", parameters, "ms", lower_is_better=True),
            samples["ours"],
            limit=bound,
            target=Target("value", 0.8),
            transport="gRPC, loopback TCP",
        )
        opts.keep(
            Figure("lookup_p99", "Lookup of a 1,600-key prefix, p99", parameters, "ms", lower_is_better=True),
            [p99_ms(round_s) for round_s in times["ours"][-opts.repetitions :]],
            limit=Reference("bare gRPC", [p99_ms(round_s) for round_s in times["bare"][-opts.repetitions :]]),
            transport="gRPC, loopback TCP",
        )

        def keys_per_s(p50s_ms: list[float]) -> list[float]:
            return [CHAIN / p50 / 1e3 for p50 in p50s_ms]

        opts.keep(
            Figure("lookup_keys", "Keys looked up, one call in flight", parameters, "M keys/s"),
            keys_per_s(samples["ours"]),
            limit=Reference("bare gRPC", keys_per_s(samples["bare"])),
            peer=Reference("Mooncake batch_is_exist", keys_per_s(samples["peer"])) if "peer" in samples else None,
            target=Target("peer", 2.0),
            transport="gRPC, loopback TCP",
            notes=missing,
        )
        rates = interleave({"ours": lambda: client.rate(calls), "bare": lambda: bare.rate(calls)}, opts.repetitions)
        opts.keep(
            Figure("lookup_rate", "Lookups, four in flight", {**parameters, "in_flight": IN_FLIGHT}, "lookups/s"),
            rates["ours"],
            limit=Reference("bare gRPC", rates["bare"]),
            target=Target("value", 4_500),
            transport="gRPC, loopback TCP",
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
        one.stop()
        few = stack.enter_context(Served(scratch / f"index-{small}", small, opts.seed))
        many = stack.enter_context(Served(scratch / f"index-{large}", large, opts.seed))
        on_few, on_many = Client.of(few.address, few.chains), Client.of(many.address, many.chains)
        samples = interleave(
            {"many": lambda: p50_ms(on_many.times_s(calls)), "few": lambda: p50_ms(on_few.times_s(calls))}, opts.repetitions
        )
        opts.keep(
            Figure("lookup_growth", "Lookup p50 in a large index", {"blocks": large, "keys": CHAIN}, "ms", lower_is_better=True),
            samples["many"],
            peer=Reference(f"the same with {small} blocks", samples["few"]),
            target=Target("peer", 1.5),
            transport="gRPC, loopback TCP",
        )
        stats = call(MetadataStub(on_many.channel).GetStats, GetStatsRequest(), TIMEOUT_S)
        opts.keep(
            Figure(
                "lookup_index_bytes", "Index bytes per block (two replicas)", {"blocks": large}, "bytes", lower_is_better=True
            ),
            [stats.index_bytes / stats.blocks],
            target=Target("value", 160),
        )
        on_few.channel.close()
        on_many.channel.close()


if __name__ == "__main__":
    main()
