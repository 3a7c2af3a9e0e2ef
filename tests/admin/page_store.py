"""A store under load, and the browser that shows its web page."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest
from admin_client import AdminHttp

from kvclient import CacheSpec, KVClient
from kvclient.load.paths import Paths
from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.rpc.client import call, connect
from support.node_stats import node_counter
from support.wait import wait_until

CHROMIUMS = ("chromium-headless-shell", "/usr/bin/chromium", "chromium")
"""Browsers, the best first. The shell without windows needs a sixth of the processor time, and draws the same."""
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
SPEC = CacheSpec(model="meta-llama/Llama-3.1-8B", block_tokens=32, layers=8, layer_block_bytes=16384, weights_epoch="2026-05-01")
OTHER = CacheSpec(model=HOSTILE, block_tokens=16, layers=4, layer_block_bytes=8192, tenant="</script><b>x</b>")
BLOCKS = 60
TOKENS = np.arange(BLOCKS * SPEC.block_tokens, dtype=np.uint32)
MORE = np.arange(180 * SPEC.block_tokens, dtype=np.uint32) + len(TOKENS)
"""Enough blocks that a slow check of the volume takes half a minute."""
PAUSE_S = 0.15
WAIT_S = 30.0


@dataclass
class Working:
    """Three hosts, of which two have volumes, under load until ``rest`` is called."""

    cluster: LocalCluster
    http: AdminHttp
    work: Future[None] = field(default_factory=Future)
    _resting: threading.Event = field(default_factory=threading.Event)

    def load(self, near: KVClient, far: KVClient) -> None:
        """Load local blocks, missing blocks and, now and then, blocks of another host."""
        keys = list(near.keys(TOKENS))
        unknown = list(near.keys(TOKENS[::-1].copy()))
        out = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
        turn = 0
        while not self._resting.wait(PAUSE_S):
            turn += 1
            near.lookup(unknown[: turn % 9])
            near.load(near.lookup(keys), out)
            if turn % 4 == 0:
                some = far.lookup(keys[: 20 + turn % 40])
                far.load(some, out[: some.hit_blocks], paths=Paths(decode_node="host-2"))
                self.http.post("/v1/volumes/host-2/dram/evict", {"to_percent": 0})

    def rest(self) -> None:
        """End the loads, and raise their error if there is one."""
        self._resting.set()
        self.work.result(WAIT_S)


def fill(client: KVClient, tokens: Any) -> None:
    keys = list(client.keys(tokens))
    data = np.random.default_rng(1).integers(0, 256, (len(keys), client.spec.block_bytes), np.uint8)
    assert client.store(keys, data, wait_visible=True, durable=True).held_blocks == len(keys)


def read_ahead(client: KVClient, cluster: LocalCluster, node: str) -> None:
    """Have a node read blocks of another one for a request that ends without a load."""
    ahead = client.read_ahead(client.lookup(list(client.keys(TOKENS))))
    assert ahead is not None
    size = BLOCKS * client.spec.block_bytes
    wait_until(lambda: node_counter(cluster, node, "node_read_ahead_bytes_total") == size, "read ahead")
    ahead.end()
    wait_until(lambda: node_counter(cluster, node, "node_read_ahead_unused_bytes_total") == size, "released")


def decide(cluster: LocalCluster) -> None:
    """Make a load decision over the storage links of two hosts."""
    wanted = metadata_pb2.PlanLoadRequest(
        operation_id=bytes(16), prefill_node="host-1", decode_node="host-2", blocks=640, block_bytes=1 << 20,
        block_tokens=32, budget_ms=60_000,
    )  # fmt: skip
    with connect(cluster.metadata_address) as channel:
        call(metadata_pb2_grpc.MetadataStub(channel).PlanLoad, wanted, WAIT_S)


@contextmanager
def working(folder: Path) -> Iterator[Working]:
    links = (("storage_bandwidth", "3GB"), ("compute_bandwidth", "12GB"))
    specs = [
        NodeSpec("host-1", roles=("prefill",), dram_bytes=48 << 20, nvme_bytes=64 << 20, settings=links),
        NodeSpec("host-2", roles=("decode",), dram_bytes=48 << 20, nvme_bytes=32 << 20, settings=links),
        NodeSpec("host-3", roles=("storage",), dram_bytes=16 << 20, settings=(*links, ("compute_cap", "9GB"))),
    ]
    with LocalCluster(specs, folder) as cluster:
        address = cluster.start_admin().address
        sockets = [cluster.node(f"host-{number}").local_socket for number in (1, 2)]
        with (
            KVClient.connect(cluster.metadata_address, SPEC, node=sockets[0]) as near,
            KVClient.connect(cluster.metadata_address, SPEC, node=sockets[1]) as far,
            KVClient.connect(cluster.metadata_address, OTHER, node=sockets[1]) as other,
        ):
            fill(near, TOKENS)
            fill(near, MORE)
            fill(other, np.arange(64, dtype=np.uint32))
            decide(cluster)
            read_ahead(far, cluster, "host-2")
            assert near.hints.keep("chat-7", list(near.keys(TOKENS)), keep_for_s=3600.0)
            assert other.hints.keep("chat-8", list(other.keys(np.arange(64, dtype=np.uint32))), keep_for_s=3600.0)
            assert near.hints.end("chat-9")
            made = Working(cluster, AdminHttp(address))
            with ThreadPoolExecutor(1) as pool:
                made.work = pool.submit(made.load, near, far)
                try:
                    yield made
                finally:
                    made.rest()


@contextmanager
def browsing() -> Iterator[Any]:
    """Return the best Chromium of this machine."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="NO PLAYWRIGHT HERE: THE WEB PAGE IS NOT TESTED (pip install playwright)"
    )
    found = next(filter(None, map(which, CHROMIUMS)), None)
    if found is None:
        pytest.skip("NO CHROMIUM HERE: THE WEB PAGE IS NOT TESTED (apt-get install chromium-headless-shell)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()
