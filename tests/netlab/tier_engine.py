"""Chunks of vLLM's secondary tier, stored or loaded by a process on a host of a lab: one chain, and heads of separate chains."""

from __future__ import annotations

import json
import sys
import time
from hashlib import sha256

import grpc
import numpy as np

from kvclient import CacheSpec, ClientOptions, KVClient, Paths
from kvclient.engines.vllm.tier.chunks import Chunk, ChunkStore
from kvproto.v1 import common_pb2, node_pb2, node_pb2_grpc

SPEC = CacheSpec(model="lab-tier", block_tokens=16, layers=1, layer_block_bytes=512 << 10)
CHUNKS = 32
"""16 MiB of each kind: 0.45 s over one link of 300 Mbit/s."""
DEADLINE_S = 20.0


def chunks_of(kind: str, rows: np.ndarray) -> list[Chunk]:
    """Chunks with these rows."""
    hashes = [sha256(f"{kind} {at}".encode()).digest() for at in range(CHUNKS)]
    positions = list(range(CHUNKS)) if kind == "chain" else [None] * CHUNKS
    return [Chunk(one + bytes(4), one, position, row) for one, position, row in zip(hashes, positions, rows, strict=True)]


def content(kind: str) -> np.ndarray:
    """Bytes of all chunks, different in each."""
    return np.random.default_rng(len(kind)).integers(0, 256, (CHUNKS, SPEC.layer_block_bytes), np.uint8)


def put(store: ChunkStore, node: str) -> dict[str, int]:
    """Store all chunks, and leave them on disk only."""
    stored = {}
    for kind in ("chain", "heads"):
        chunks = chunks_of(kind, content(kind))
        held, *_ = store.store(chunks, [one.block_hash for one in chunks], time.monotonic() + DEADLINE_S)
        stored[kind] = len(held)
    with grpc.insecure_channel(node) as channel:
        stub = node_pb2_grpc.NodeStub(channel)
        assert stub.Flush(node_pb2.FlushRequest(timeout_ms=int(DEADLINE_S * 1000)), timeout=DEADLINE_S + 1).complete
        stub.Evict(node_pb2.EvictRequest(operation_id=bytes(16), tier=common_pb2.TIER_DRAM), timeout=DEADLINE_S)
    return stored


def get(store: ChunkStore) -> dict[str, dict[str, int]]:
    """Load all chunks as the tier does, and compare them."""
    told = {}
    for kind in ("chain", "heads"):
        rows, wanted = np.zeros((CHUNKS, SPEC.layer_block_bytes), np.uint8), content(kind)
        chunks = chunks_of(kind, rows)
        chain = [one.block_hash for one in chunks] if kind == "chain" else []
        held, found, _ = store.find({one.key: one.position for one in chunks}, chain)
        began_s = time.monotonic()
        arrived, sizes, _ = store.load(chunks, chain, found, began_s + DEADLINE_S)
        wrong = sum(not np.array_equal(row, one) for row, one in zip(rows, wanted, strict=True))
        told[kind] = {"held": sum(held.values()), "arrived": len(arrived), "wrong": wrong, **sizes}
    return told


def main(what: str, metadata: str, local: str, argument: str) -> None:
    """Store or load, and print what happened."""
    paths = Paths(policy=argument) if what == "get" else None
    with KVClient.connect(metadata, SPEC, node=local, options=ClientOptions(client_name=what, paths=paths)) as client:
        store = ChunkStore(client)
        print(json.dumps(put(store, argument) if what == "put" else get(store)))


if __name__ == "__main__":
    main(*sys.argv[1:])
