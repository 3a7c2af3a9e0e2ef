"""A real store for end-to-end benchmarks: server processes, and blocks whose bytes are computed from their keys.

These functions prepare payloads, check them, empty tiers and wait for the index between the timed calls, so that figures do not
include this work. Every loaded byte is checked.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt

import kvclient
from kvproto.v1 import common_pb2, node_pb2, node_pb2_grpc
from kvstore.core.keys import KeyChain
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey, Outcome, StoreOutcome, Tier
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.rpc.client import call, connect
from kvstore.workload.payload import Payloads

Bytes = npt.NDArray[np.uint8]

BLOCK_TOKENS = 64
CALL_S = 60.0
_TIERS = {Tier.DRAM: common_pb2.TIER_DRAM, Tier.NVME: common_pb2.TIER_NVME}


def spec(block_bytes: int, layers: int) -> CacheSpec:
    """Specification of a namespace with blocks of one size."""
    return CacheSpec(model="benchmark", block_tokens=BLOCK_TOKENS, layers=layers, layer_block_bytes=block_bytes // layers)


@dataclass(frozen=True, slots=True)
class Chain:
    """Keys of one chain, or of several chains of equal length in sequence, and their payload."""

    keys: list[BlockKey]
    payload: Bytes
    """``[blocks, block_bytes]``."""


class Chains:
    """Generator of chains that no store contains yet. All chains share one payload buffer.

    Args:
        cache: their namespace.
        blocks: blocks per call of ``next``.
        seed: seed of their tokens.
        length: blocks per chain; None: one chain of all blocks.
    """

    def __init__(self, cache: CacheSpec, blocks: int, seed: int, length: int | None = None) -> None:
        self._keys = KeyChain(cache)
        self._blocks = blocks
        self._length = length or blocks
        self._random = np.random.default_rng(seed)
        self._payloads = Payloads(cache.block_bytes)
        self._payload = np.zeros((blocks, cache.block_bytes), np.uint8)

    def next(self) -> Chain:
        """Generate new chains. This overwrites the payload of the previous ones."""
        tokens = self._random.integers(0, 1 << 32, (self._blocks // self._length, self._length * BLOCK_TOKENS), np.uint32)
        keys = [key for row in tokens for key in self._keys.keys(row)]
        self._payloads.fill(keys, self._payload)
        return Chain(keys, self._payload)

    def check(self, chain: Chain, loaded: Bytes) -> None:
        """Check every byte against its key. A wrong byte ends the benchmark."""
        if wrong := self._payloads.wrong_blocks(chain.keys, loaded):
            sys.exit(f"WRONG BYTES in {len(wrong)} of {len(loaded)} blocks, the first at {wrong[0]}")


class Deadline:
    """Bound of a loop that polls: ``CALL_S`` from now."""

    def __init__(self) -> None:
        self._end_s = time.monotonic() + CALL_S

    def wait(self, failure: str) -> None:
        """Sleep until the next poll. After the deadline, end the benchmark with a message."""
        if time.monotonic() > self._end_s:
            sys.exit(f"{failure} within {CALL_S:g} s")
        time.sleep(0.005)


class NodeControl:
    """Administrative calls of a node that a benchmark needs in addition to the client."""

    def __init__(self, address: str) -> None:
        self._channel: grpc.Channel = connect(address)
        self._stub = node_pb2_grpc.NodeStub(self._channel)

    def evict(self, tier: Tier) -> int:
        """Evict all blocks of a tier and return their number."""
        request = node_pb2.EvictRequest(operation_id=secrets.token_bytes(16), tier=_TIERS[tier])
        return int(call(self._stub.Evict, request, CALL_S).evicted_blocks)

    def empty(self, tier: Tier, blocks: int) -> None:
        """Evict ``blocks`` blocks from a tier. Retries, because blocks being copied to another tier are pinned for a moment."""
        deadline = Deadline()
        while (blocks := blocks - self.evict(tier)) > 0:
            deadline.wait(f"{blocks} blocks were not evicted from {tier.name}")

    def counter(self, name: str) -> int:
        """Return a counter of the node."""
        answer = call(self._stub.GetNodeStats, node_pb2.GetNodeStatsRequest(), CALL_S)
        return int(answer.counters.get(name, 0))

    def io_engines(self) -> str:
        """I/O engines that the node uses."""
        return "; ".join(call(self._stub.GetNodeStats, node_pb2.GetNodeStatsRequest(), CALL_S).io_engines)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


def stored(result: kvclient.StoreResult) -> None:
    """Check that every block was stored. A skipped store would look fast, so it ends the benchmark."""
    if count := int(np.count_nonzero(result.outcomes != StoreOutcome.STORED)):
        sys.exit(f"{count} of {len(result.outcomes)} blocks were not stored: {result.error}")


def loaded(result: kvclient.LoadResult, tier: Tier | None) -> None:
    """Check that every block was a hit in the measured tier (None: in any). Any other outcome ends the benchmark."""
    if count := int(np.count_nonzero(result.outcomes != Outcome.HIT)):
        sys.exit(f"{count} of {len(result.outcomes)} blocks missed: {result.error}")
    if tier is not None and set(result.bytes_by_tier) != {tier}:
        sys.exit(f"loaded from {result.bytes_by_tier}, expected only {tier.name}")


def found(client: kvclient.KVClient, keys: list[BlockKey]) -> kvclient.Lookup:
    """Look keys up until the index finds all of them, because nodes publish asynchronously."""
    deadline = Deadline()
    while (lookup := client.lookup(keys)).hit_blocks < len(keys):
        deadline.wait(f"the index named only {lookup.hit_blocks} of {len(keys)} blocks ({lookup.error})")
    return lookup


def start_metadata_server(ready: Path, **settings: object) -> subprocess.Popen[bytes]:
    """Start ``kvstore metadata`` and wait until it is ready.

    The command, and not a function of this process: it chooses gRPC's I/O mode before anything imports gRPC.

    Args:
        ready: file that it writes when it is ready.
        settings: of the section ``metadata``.
    """
    ready.unlink(missing_ok=True)
    given = {"listen": "127.0.0.1:0", "ready_file": ready, **settings}
    command = [
        sys.executable,
        "-m",
        "kvstore.cli",
        "metadata",
        *(f"--set=metadata.{name}={value}" for name, value in given.items()),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline_s = time.monotonic() + CALL_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            sys.exit("the metadata server did not start")
        time.sleep(0.001)
    return process


OPTIONS = kvclient.ClientOptions(client_name="benchmark", default_deadline_s=CALL_S, strict=True)
"""Strict options: failures raise, because a benchmark must not measure misses."""


def cluster(node: NodeSpec, scratch: Path | None) -> LocalCluster:
    """Metadata server and one node as processes, with their volumes below ``scratch``."""
    return LocalCluster([node], scratch / f"store-{secrets.token_hex(4)}" if scratch else None)


def space_for(blocks: int, block_bytes: int) -> int:
    """Bytes of a tier for ``blocks`` blocks, with slack for headers and alignment."""
    return int(blocks * (block_bytes + (64 << 10)) * 1.2) + (64 << 20)
