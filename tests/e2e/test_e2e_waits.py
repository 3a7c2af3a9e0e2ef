"""Calls that wait for an event that never happens do not delay other calls."""

from __future__ import annotations

import secrets
from pathlib import Path

import grpc
import numpy as np

from kvclient import CacheSpec, ClientOptions, KVClient
from kvproto.v1 import common_pb2, node_pb2, node_pb2_grpc
from kvstore.core.types import StoreOutcome
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.rpc.client import call
from support.client_parts import session_of

CALL_S, LONG_S = 10.0, 120.0
BLOCKS, WAITING = 8, 12
SPEC = CacheSpec(model="m", block_tokens=16, layers=2, layer_block_bytes=4096)


def test_loads_of_unwritten_block_delay_no_others(tmp_path: Path) -> None:
    """There are more such loads than threads. At the same time stores wait for space, and loads read from disk."""
    node = NodeSpec("a", dram_bytes=16 << 20, nvme_bytes=32 << 20, settings=(("load_threads", "2"),))
    options = ClientOptions(default_deadline_s=CALL_S)
    with (
        LocalCluster([node], tmp_path) as cluster,
        KVClient.connect(cluster.metadata_address, SPEC, node=cluster.node("a").local_socket, options=options) as client,
        grpc.insecure_channel(cluster.node("a").local_socket) as channel,
    ):
        stub = node_pb2_grpc.NodeStub(channel)
        keys = list(client.keys(np.arange(BLOCKS * 16, dtype=np.uint32)))
        data = np.random.default_rng(1).integers(0, 256, (BLOCKS, SPEC.block_bytes), np.uint8)
        assert client.store(keys, data, durable=True).durable
        assert call(stub.Evict, node_pb2.EvictRequest(operation_id=bytes(16), tier=common_pb2.TIER_DRAM), CALL_S).evicted_blocks
        session = session_of(client)
        run = common_pb2.BlockRun(namespace_id=SPEC.namespace, keys=secrets.token_bytes(16))
        asked = node_pb2.PrepareRequest(session_id=session.session_id, operation_id=secrets.token_bytes(16), blocks=run)
        assert list(call(stub.Prepare, asked, CALL_S).outcomes) == [StoreOutcome.STORED]
        request = node_pb2.LoadRequest(session_id=session.session_id, keys=run.keys)
        waiting = [stub.Load(request, timeout=LONG_S) for _ in range(WAITING)]
        assert [len(next(stream).runs) for stream in waiting] == [0] * len(waiting), "signs of life"
        out = np.zeros_like(data)
        loaded = client.load(keys, out)
        assert loaded.hit_blocks == BLOCKS, loaded.error
        assert np.array_equal(out, data)
        more = list(client.keys(np.arange(1, BLOCKS * 16 + 1, dtype=np.uint32)))
        assert client.store(more, data).held_blocks == BLOCKS
        assert client.flush(CALL_S)
        for stream in waiting:
            stream.cancel()
