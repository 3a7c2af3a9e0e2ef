"""A router prefers the engine whose published cache holds a prompt over one whose host has it in DRAM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from router_bed import FIRST_CHECK_ONLY, Bed, Make

from kvclient import CacheSpec, KVClient
from kvclient.engine_cache.cache_namespace import cache_spec
from kvclient.engine_cache.publication import CachePublication
from kvclient.engine_cache.tracker import CacheOffer, CacheSpace, CacheTracker
from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.router.prompts import prefix_lookup
from support.wait import wait_until_async

SPEC = CacheSpec(model="m", block_tokens=16, layers=2, layer_block_bytes=4096, layout="vllm=test")
BLOCKS = 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster([NodeSpec("node-e0", dram_bytes=32 << 20)], tmp_path) as cluster:
        yield cluster


@pytest.fixture
def client(store: LocalCluster) -> Iterator[KVClient]:
    with KVClient.connect(store.metadata_address, SPEC, node=store.node("node-e0").local_socket) as client:
        yield client


class Cache:
    """The cache of one engine, which holds all that is offered until it is cleared."""

    def __init__(self, store: LocalCluster) -> None:
        self.tracker = CacheTracker(CacheSpace(SPEC.namespace, cache_spec(SPEC).namespace), 1_000, lambda name: (name,))
        self.publication = CachePublication(
            "cache-e1",
            store.metadata_address,
            capacity_bytes=1 << 20,
            block_bytes=SPEC.block_bytes,
            take_changes=self.tracker.take_changes,
        )

    def hold(self, client: KVClient, prompt: list[int]) -> None:
        keys = client.keys(prompt)
        self.tracker.offer(CacheOffer(0, None, keys, keys))
        self.tracker.step(lambda _blocks: [], 0.0)


@pytest.fixture
def cache(store: LocalCluster) -> Iterator[Cache]:
    made = Cache(store)
    made.publication.start()
    yield made
    made.publication.close()


def prompt_of(number: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(number).integers(1, 30_000, BLOCKS * SPEC.block_tokens + 3)]


async def chosen(router: Bed, prompt: list[int]) -> str:
    answer = await router.http.post("/v1/completions", json={"model": "m", "prompt": prompt})
    return answer.headers["x-kvstore-engine"]


async def test_router_prefers_the_cache_of_an_engine(bed: Make, store: LocalCluster, client: KVClient, cache: Cache) -> None:
    prompts = [prompt_of(number) for number in range(6)]
    for prompt in prompts:
        await asyncio.to_thread(
            client.store, client.keys(prompt), np.zeros((BLOCKS, SPEC.block_bytes), np.uint8), wait_visible=True
        )
    for prompt in prompts[:3]:
        cache.hold(client, prompt)
    waiting = await bed("e0", "e1", metadata=store.metadata_address, **FIRST_CHECK_ONLY)
    waiting["e1"].cache = "cache-e1"
    router = await bed.beside(waiting, metadata=store.metadata_address, **FIRST_CHECK_ONLY)
    number = 100

    async def looks_up_caches() -> bool:
        nonlocal number
        number += 1
        await asyncio.to_thread(cache.hold, client, prompt_of(number))
        await chosen(router, prompt_of(number - 1))
        return await router.counter("router_lookup_cache_tokens_total") > 0

    await wait_until_async(looks_up_caches, "the namespace and the cache are known")
    assert [await chosen(router, prompt) for prompt in prompts[:3]] == ["e1"] * 3
    assert [await chosen(router, prompt) for prompt in prompts[3:]] == ["e0"] * 3, "only their host has them"


async def test_router_counts_namespaces_left_out(
    bed: Make, store: LocalCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefix_lookup, "_REFRESH_INTERVAL_S", 0.05)
    for epoch in range(prefix_lookup.MAX_NAMESPACES + 2):
        with KVClient.connect(store.metadata_address, replace(SPEC, weights_epoch=f"w{epoch}"), node=None):
            pass
    router = await bed("e0", metadata=store.metadata_address)

    async def counted() -> bool:
        return await router.counter("router_namespaces_left_out_total") >= 2

    await wait_until_async(counted)
    assert "2 older namespaces of model m are not looked up (limit=4)" in caplog.text


@pytest.mark.parametrize("error", [Unavailable, DeadlineExceeded])
async def test_router_keeps_the_store_hit_if_caches_fail(
    bed: Make, store: LocalCluster, client: KVClient, monkeypatch: pytest.MonkeyPatch, error: type[KVStoreError]
) -> None:
    prompt, call_aio = prompt_of(1), prefix_lookup.call_aio
    await asyncio.to_thread(client.store, client.keys(prompt), np.zeros((BLOCKS, SPEC.block_bytes), np.uint8), wait_visible=True)

    async def fail_lookup(method: Any, request: Any, timeout_s: float) -> Any:
        if not isinstance(request, pb.LookupRequest):
            return await call_aio(method, request, timeout_s)
        if error is DeadlineExceeded:
            await asyncio.sleep(timeout_s)
        raise error("the caches cannot be looked up")

    monkeypatch.setattr(prefix_lookup, "call_aio", fail_lookup)
    monkeypatch.setattr(prefix_lookup, "TIMEOUT_S", 2.0)  # a busy machine has time for the lookup in the store
    waiting = await bed("e0", "e1", metadata=None)
    waiting["e1"].cache = "cache-e1"
    router = await bed.beside(waiting, metadata=store.metadata_address, **FIRST_CHECK_ONLY)
    number = 100

    async def looks_up() -> bool:
        nonlocal number
        number += 1
        await chosen(router, prompt_of(number))
        return await router.counter("router_cache_lookups_failed_total") > 0

    await wait_until_async(looks_up, "the namespace and the cache are known")
    assert await chosen(router, prompt) == "e0"
    assert await router.counter("router_lookup_hit_tokens_total") == BLOCKS * SPEC.block_tokens
    assert await router.counter("router_lookups_failed_total") == 0
