"""A prefix index that a real metadata server serves, and a client that looks up its chains."""

from __future__ import annotations

import json
import random
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvproto.v1.common_pb2 import NodeInfo, VolumeInfo
from kvproto.v1.metadata_pb2 import LookupRequest, LookupResponse
from kvproto.v1.metadata_pb2_grpc import MetadataStub
from kvstore.core.types import BlockKey, BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.index.contract import PrefixIndex, VolumeEpoch
from kvstore.index.lmdb import LmdbIndex
from kvstore.metadata.indexing.index_mutations import register_node
from kvstore.rpc.client import call, connect
from kvstore.rpc.codec import tier_to_proto
from rig import start_metadata_server

if TYPE_CHECKING:
    import grpc

CHAIN = 1_600
DRAM_SHARE = 1_200
NAMESPACE = NamespaceId(b"benchmark-lookup")
NODE_ID = NodeId("host-1")
BOOT_ID = BootId(secrets.token_bytes(16))
TIERS = {VolumeId("host-1/dram"): Tier.DRAM, VolumeId("host-1/nvme0"): Tier.NVME}
SAMPLE_CHAINS = 64
"""Number of chains to look up, drawn from the whole index."""
IN_FLIGHT = 4
TIMEOUT_S = 10.0
TTL_S = 3_600
"""Grace period after a start. It must cover the whole run, because no node sends heartbeats."""


def register_volumes(index: PrefixIndex, tiers: Mapping[VolumeId, Tier]) -> list[VolumeEpoch]:
    """Register a node with volumes, and open their volume epochs."""
    volumes = [VolumeInfo(volume_id=name, tier=tier_to_proto(tier), capacity_bytes=1 << 40) for name, tier in tiers.items()]
    node = NodeInfo(
        node_id=NODE_ID,
        boot_id=BOOT_ID,
        roles=["prefill"],
        control_address="127.0.0.1:1",
        data_address="127.0.0.1:2",
        volumes=volumes,
    )
    register_node(index, node)
    return [index.open_volume_epoch(name, NODE_ID, tier, BOOT_ID) for name, tier in tiers.items()]


def publish_chain(index: PrefixIndex, dram: VolumeEpoch, nvme: VolumeEpoch, packed: bytes) -> None:
    """Publish a chain: all blocks on NVMe, the first ones in DRAM too."""
    keys = tuple(BlockKey(packed[at : at + 16]) for at in range(0, len(packed), 16))
    index.publish(nvme, [BlockRun(NAMESPACE, None, 0, keys)], [])
    index.publish(dram, [BlockRun(NAMESPACE, None, 0, keys[:DRAM_SHARE])], [])


def fill(index: PrefixIndex, blocks: int, seed: int) -> list[bytes]:
    """Fill an empty index with ``blocks`` blocks and return a sample of its chains, packed."""
    dram, nvme = register_volumes(index, TIERS)
    draw = random.Random(seed)
    chains = blocks // CHAIN
    kept = set(draw.sample(range(chains), min(chains, SAMPLE_CHAINS)))
    sample = []
    for number in range(chains):
        packed = draw.randbytes(16 * CHAIN)
        publish_chain(index, dram, nvme, packed)
        if number in kept:
            sample.append(packed)
    return sample


def sweep_new_epoch(index: PrefixIndex) -> None:
    """Sweep the index, as a new epoch in Valkey requires once, so that the server does not do that beside measurements."""
    while not index.sweep(1 << 16):
        pass


def open_valkey(servers: tuple[str, ...]) -> PrefixIndex:
    """Open an index in Valkey. Its time to wait is long, because filling keeps the machine busy."""
    from kvstore.index.valkey.address import ValkeyAddress
    from kvstore.index.valkey.index import ValkeyIndex

    return ValkeyIndex.open(ValkeyAddress(servers), lookup_budget_s=1.0)


class Served:
    """An index and the real server process that serves it.

    Args:
        path: folder of the index.
        blocks: size of the index.
        seed: keys of the chains.
        valkey: servers of an empty Valkey Cluster that hold the index; empty: LMDB in the folder.
        filled_by: fills the empty index, and returns a sample of its chains.
    """

    def __init__(
        self,
        path: Path,
        blocks: int,
        seed: int,
        valkey: tuple[str, ...] = (),
        filled_by: Callable[[PrefixIndex, int, int], list[bytes]] = fill,
    ) -> None:
        self.path, self.blocks = path, blocks
        self._engine = f"valkey://{','.join(valkey)}" if valkey else "lmdb"
        index = open_valkey(valkey) if valkey else LmdbIndex.open(path)
        self.chains = filled_by(index, blocks, seed)
        sweep_new_epoch(index)
        index.close()
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""
        self.start()

    def start(self) -> None:
        """Start the server and wait until it is ready."""
        ready = self.path.with_suffix(".ready")
        self._process = start_metadata_server(
            ready, index_path=self.path, engine=self._engine, node_ttl=f"{TTL_S}s", metrics_listen="none"
        )
        self.address = json.loads(ready.read_text(encoding="utf-8"))["address"]

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None
        return self._process.pid

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
        return cls.on(connect(address, own_connection=True), chains)

    @classmethod
    def on(cls, channel: grpc.Channel, chains: list[bytes]) -> Self:
        """Use a channel."""
        return cls(channel, [LookupRequest(namespace_id=NAMESPACE, keys=keys) for keys in chains])

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
