"""What routers learn of the blocks that real engines stored: from the engine's own events and from those of the store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

pytest.importorskip("vllm")

from vllm_bed import BLOCK, SingleEngine, VllmDriver, text, tiny

from kvproto.v1 import node_pb2, node_pb2_grpc
from kvproto.v1.common_pb2 import Tier
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.testing.connector.driver import StoreAddress
from support.events_command import publishing
from support.llmd_rules import LlmdIndex, LlmdSubscriber
from support.wait import wait_until

MIB = 1 << 20
PROMPT = text(1, 300)
WHOLE = 300 // BLOCK * BLOCK
POD = "10.0.0.1:8000"
WAIT_S = 30.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    spec = NodeSpec("n", dram_bytes=64 * MIB, nvme_bytes=64 * MIB)
    with LocalCluster([spec], tmp_path_factory.mktemp("store")) as made:
        yield made


def evict(cluster: LocalCluster, tier: Tier) -> None:
    with grpc.insecure_channel(cluster.node("n").address) as channel:
        request = node_pb2.EvictRequest(operation_id=bytes(15) + bytes([tier]), tier=tier)
        node_pb2_grpc.NodeStub(channel).Evict(request, timeout=10)


def events_on() -> Any:
    from vllm.config import KVEventsConfig

    return KVEventsConfig(enable_kv_cache_events=True, publisher="null")


class Listener:
    """Takes the events of an engine as its publisher would, and applies them by llm-d's rules."""

    def __init__(self, connector: Any, model: str) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        self.index = LlmdIndex(BLOCK)
        self.seen: list[Any] = []
        self._take = connector.take_events
        self._topic = f"kv@{POD}@{model}"
        self._batch = KVEventBatch
        connector.take_events = self.take

    def take(self) -> list[Any]:
        events = list(self._take())
        self.seen += events
        if events:
            self.index.take(self._topic, msgspec.msgpack.encode(self._batch(ts=time.time(), events=events)))
        return events

    def prefix(self, prompt: list[int], model: str) -> dict[str, int]:
        self.take()
        return {medium: tokens for (_, medium), tokens in self.index.prefix(model, prompt).items()}


def test_engine_announces_tiers_and_evictions(cluster: LocalCluster, folder: Path) -> None:
    store, single = StoreAddress(cluster.metadata_address, cluster.node("n").local_socket), SingleEngine()
    try:
        engine = single.open(VllmDriver(tiny("llama", folder)), store, {"salt": "announced"}, kv_events_config=events_on())
        listener = Listener(engine.connector, "m")
        pages: list[Any] = []
        manager = engine.core.scheduler.kv_cache_manager
        take = manager.take_events
        manager.take_events = lambda: [pages.append(one) or one for one in take()]  # type: ignore[func-returns-value]
        engine.tokens([PROMPT])
        assert engine.flush()
        wait_until(lambda: listener.prefix(PROMPT, "m") == {"cpu": WHOLE, "storage": WHOLE}, lambda: str(listener.index.pods))
        own = {one: event for event in listener.seen for one in event.block_hashes}
        theirs = {one: event for event in pages if hasattr(event, "token_ids") for one in event.block_hashes}
        assert own.keys() <= theirs.keys()
        for one, event in own.items():
            assert (event.kv_cache_spec_kind, event.group_idx) == (theirs[one].kv_cache_spec_kind, theirs[one].group_idx)
        evict(cluster, Tier.TIER_DRAM)
        wait_until(lambda: listener.prefix(PROMPT, "m") == {"storage": WHOLE}, lambda: str(listener.seen[-2:]))
        evict(cluster, Tier.TIER_NVME)
        wait_until(lambda: listener.prefix(PROMPT, "m") == {}, lambda: str(listener.seen[-2:]))
        assert not +listener.index.dropped
        assert engine.counters().get("bugs", 0) == 0
    finally:
        single.close()


def test_engine_events_have_salt_in_extra_keys_as_vllm_has(cluster: LocalCluster, folder: Path) -> None:
    from vllm import SamplingParams

    store, single = StoreAddress(cluster.metadata_address, cluster.node("n").local_socket), SingleEngine()
    try:
        engine = single.open(VllmDriver(tiny("gemma3", folder)), store, {"salt": "extra"}, kv_events_config=events_on())
        listener = Listener(engine.connector, "m")
        pages: list[Any] = []
        manager = engine.core.scheduler.kv_cache_manager
        take = manager.take_events
        manager.take_events = lambda: [pages.append(one) or one for one in take()]  # type: ignore[func-returns-value]
        prompt = {"prompt_token_ids": PROMPT, "cache_salt": "a tenant"}
        engine.llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        assert engine.flush()
        listener.take()
        stored = [event for event in listener.seen if hasattr(event, "token_ids")]
        assert {event.kv_cache_spec_kind for event in stored} == {"sliding_window", "full_attention"}
        theirs = {(event.group_idx, one): event for event in pages if hasattr(event, "token_ids") for one in event.block_hashes}
        for event in stored:
            for at, one in enumerate(event.block_hashes):
                page = theirs.get((event.group_idx, one))
                if page is None:
                    continue  # a window has passed it
                index = page.block_hashes.index(one)
                assert event.kv_cache_spec_sliding_window == page.kv_cache_spec_sliding_window
                assert event.extra_keys[at] == (page.extra_keys[index] if page.extra_keys else None)
                if event.kv_cache_spec_kind == "sliding_window":
                    continue  # vLLM leaves out the hashes of pages that the window has passed, and not their tokens
                assert event.token_ids[at * BLOCK : (at + 1) * BLOCK] == list(page.token_ids[index * BLOCK : (index + 1) * BLOCK])
    finally:
        single.close()


def test_store_publishes_blocks_of_two_engines_with_tokens(
    cluster: LocalCluster, folder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two engines, one after the other, store two prompts; the router finds both prefixes, and loses one."""
    store, single = StoreAddress(cluster.metadata_address, cluster.node("n").local_socket), SingleEngine()
    other = text(2, 200)
    options = {"salt": "labelled", "block_labels": True, "model": "shared-model"}
    with publishing(tmp_path, cluster.metadata_address, model="shared-model", topic="") as publisher:
        index = LlmdIndex(BLOCK)
        router = LlmdSubscriber(index, publisher.endpoint, publisher.replay)

        def found(prompt: list[int]) -> dict[str, int]:
            router.read()
            return {medium: tokens for (_, medium), tokens in index.prefix("shared-model", prompt).items()}

        try:
            engine = single.open(VllmDriver(tiny("gemma3", folder)), store, options)
            engine.tokens([PROMPT])
            assert engine.flush()
            wait_until(lambda: found(PROMPT) == {"cpu": WHOLE, "storage": WHOLE}, lambda: publisher.metrics())
            single.close()
            engine = single.open(VllmDriver(tiny("gemma3", folder)), store, options)
            engine.tokens([PROMPT, other])
            assert engine.flush()
            wait_until(lambda: found(other).get("cpu") == 192, lambda: publisher.metrics())
            assert found(PROMPT)["cpu"] == WHOLE
            assert engine.counters()["labels_stored"] >= 2
            evict(cluster, Tier.TIER_DRAM)
            wait_until(lambda: found(other) == {"storage": 192}, lambda: publisher.metrics())
            evict(cluster, Tier.TIER_NVME)
            wait_until(lambda: found(other) == {} == found(PROMPT), lambda: publisher.metrics())
            assert not +index.dropped
        finally:
            router.close()
            single.close()
