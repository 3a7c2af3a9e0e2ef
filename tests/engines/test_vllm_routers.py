"""Routers find blocks that real engines stored: by the engine's own events, and by those of the store."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm")

import tier_bed
from vllm_bed import BLOCK, SingleEngine, VllmDriver, text, tiny

from kvclient import CacheSpec, KVClient
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.announcements.announcer import Announcement
from kvclient.engines.vllm.announcements.engine_run import EngineRun
from kvclient.engines.vllm.tier.chunks import Chunk, ChunkStore
from kvclient.engines.vllm.tier.counters import TierCounters
from kvclient.engines.vllm.tier.facts import TierGroup
from kvclient.engines.vllm.tier.options import TierOptions
from kvclient.events.block_groups import GroupBlockId
from kvstore.core.types import Tier
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.testing.connector.driver import StoreAddress
from support.events_command import publishing
from support.llmd_rules import LlmdIndex, LlmdSubscriber
from support.node_stats import evict
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


def events_on() -> Any:
    from vllm.config import KVEventsConfig

    return KVEventsConfig(enable_kv_cache_events=True, publisher="null")


class Listener:
    """Takes the events of an engine as its publisher would, and applies those of the store by llm-d's rules."""

    def __init__(self, connector: Any, model: str) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        self.index = LlmdIndex(BLOCK)
        self.seen: list[Any] = []
        self._take = connector.take_events
        self._topic = f"kv@{POD}@{model}"
        self._batch = KVEventBatch
        connector.take_events = self.take

    def take(self) -> list[Any]:
        every = list(self._take())
        events = [one for one in every if one.ownership == "kvstore"]  # the others tell of vLLM's own host memory
        self.seen += events
        if events:
            self.index.take(self._topic, msgspec.msgpack.encode(self._batch(ts=time.time(), events=events)))
        return every

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
        evict(cluster, "n", Tier.DRAM)
        wait_until(lambda: listener.prefix(PROMPT, "m") == {"storage": WHOLE}, lambda: str(listener.seen[-2:]))
        evict(cluster, "n", Tier.NVME)
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
            evict(cluster, "n", Tier.DRAM)
            wait_until(lambda: found(other) == {"storage": 192}, lambda: publisher.metrics())
            evict(cluster, "n", Tier.NVME)
            wait_until(lambda: found(other) == {} == found(PROMPT), lambda: publisher.metrics())
            assert not +index.dropped
        finally:
            router.close()
            single.close()


def test_block_stored_again_in_a_step_is_published_last() -> None:
    from kvclient.engines.vllm.announcements.messages import kv_events

    dram, nvme = 1 << 2, 1 << 3
    run = EngineRun(0, (GroupBlockId(bytes(16)),), (b"h" * 32,), b"", array("I", range(4)))
    moved, removed, stored = Announcement(run, 0, nvme, dram), Announcement(run, 0, 0, nvme), Announcement(run, 0, nvme, 0)

    def order(*announcements: Announcement) -> list[tuple[str, str]]:
        events = kv_events(announcements, [("full_attention", None)], 4, None)
        return [(type(event).__name__, event.medium) for event in events]

    assert order(moved) == [("BlockStored", "STORAGE"), ("BlockRemoved", "CPU")]
    assert order(removed, stored) == [("BlockRemoved", "STORAGE"), ("BlockStored", "STORAGE")]


def test_engine_hash_name_has_algorithm_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvclient.engines.vllm.announcements.messages import engine_hash_name

    def name(algorithm: str) -> str:
        return engine_hash_name(SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm)))

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert [name(one) for one in ("sha256", "sha256_cbor", "xxhash")] == ["sha256", "sha256_cbor", ""]
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    first = [name(one) for one in ("sha256", "xxhash")]
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert len({*first, name("sha256"), name("xxhash"), "sha256", ""}) == 6


# ---- the tier
CHUNK = 2 * BLOCK


def test_tier_announces_and_labels_chunks(cluster: LocalCluster, folder: Path, tmp_path: Path) -> None:
    """Chunks of two pages, in a model with windows: tiers, evictions, a reset, and prefixes by token ids."""
    store, model = StoreAddress(cluster.metadata_address, cluster.node("n").local_socket), "tier-model"
    options = {"salt": "tier", "block_labels": True, "model": model}
    how = {"kv_events_config": events_on(), "extra": {"self_describing_kv_events": True, "blocks_per_chunk": 2}}
    whole, other = len(PROMPT) // CHUNK * CHUNK, text(3, 200)
    with (
        publishing(tmp_path, cluster.metadata_address, model=model, topic="") as publisher,
        tier_bed.engine(tiny("gemma3", folder), store, options, **how) as served,
    ):
        index, listener = LlmdIndex(BLOCK), Listener(served.connector, "m")
        router = LlmdSubscriber(index, publisher.endpoint, publisher.replay)

        def found(prompt: list[int]) -> dict[str, int]:
            router.read()
            return {medium: tokens for (_, medium), tokens in index.prefix(model, prompt).items()}

        def announced(prompt: list[int], **tiers: int) -> None:
            wait_until(lambda: listener.prefix(prompt, "m") == tiers, lambda: str(listener.seen[-2:]))

        try:
            served.answers([PROMPT])
            served.settle()
            announced(PROMPT, cpu=whole, storage=whole)
            wait_until(lambda: found(PROMPT) == {"cpu": whole, "storage": whole}, lambda: publisher.metrics())
            assert served.llm.reset_prefix_cache()
            listener.index.clear(POD)  # as vLLM's own event says
            announced(PROMPT, cpu=whole, storage=whole)
            evict(cluster, "n", Tier.DRAM)
            announced(PROMPT, storage=whole)
            evict(cluster, "n", Tier.NVME)
            announced(PROMPT)
            wait_until(lambda: found(PROMPT) == {}, lambda: publisher.metrics())
            served.answers([other])
            served.settle()
            announced(other, cpu=192, storage=192)
            served.tier.close_stores()  # as at a reset of the connector
            announced(other)
            assert not +index.dropped
            counts = served.tier.counters.totals()
            assert counts["labels_stored"]
            assert not any(counts[name] for name in ("bugs", "labels_failed", "labels_dropped", "events_refused"))
        finally:
            router.close()


def test_tier_chunk_enters_a_medium_before_it_leaves() -> None:
    """Otherwise vLLM drops the tokens of a chunk that moves."""
    from kvclient.engines.vllm.announcements.chunk_observer import offloading_events

    dram, nvme = 1 << 2, 1 << 3
    run = EngineRun(0, tuple(GroupBlockId(bytes([at]) * 16) for at in range(4)), keys=(b"0", b"1", b"2", b"3"))
    changes = [
        Announcement(run, 0, dram, 0),
        Announcement(run, 1, dram, 0),
        Announcement(run, 2, nvme, dram),
        Announcement(run, 3, 0, dram | nvme),
        Announcement(run, 0, 0, dram),
    ]
    told = [(one.keys, one.medium.value, one.removed) for one in offloading_events(changes, None)]
    assert told == [
        ([b"0", b"1"], "CPU", False),
        ([b"2"], "STORAGE", False),
        ([b"2"], "CPU", True),
        ([b"3"], "CPU", True),
        ([b"3"], "STORAGE", True),
        ([b"0"], "CPU", True),
    ]
    assert all(one.removal_expected != one.removed and one.ownership == "kvstore" for one in offloading_events(changes, None))


def test_tier_observer_follows_only_chunks_that_are_held(cluster: LocalCluster) -> None:
    """Chunks of a chain and of a window; two of a job are not stored. Those of the chain get labels. A new epoch retracts all."""
    from kvclient.engines.vllm.announcements.chunk_observer import ChunkObserver

    hashes = [sha256(bytes([at])).digest() for at in range(8)]
    request: Any = SimpleNamespace(
        block_hashes=hashes, all_token_ids=array("I", range(8 * 16)), lora_request=None, mm_features=[], cache_salt=None
    )
    groups = {0: TierGroup(0, 32, 2, True, 1, "full_attention"), 2: TierGroup(2, 32, 2, False, 1, "sliding_window")}
    rows = np.ones((4, 4096), np.uint8)
    chunks = {
        group: [
            Chunk(hashes[2 * at + 1] + group.to_bytes(4, "big"), hashes[2 * at + 1], at if one.chained else None, rows[at])
            for at in range(4)
        ]
        for group, one in groups.items()
    }
    options, counters = TierOptions(HookOptions(metadata=cluster.metadata_address), block_labels=True), TierCounters()
    observer = ChunkObserver(options, announce=True, counters=counters)
    specs = {group: CacheSpec("observed", 32, 1, 4096, layout=f"group={group}") for group in groups}
    observer.connect(specs, groups, "sha256")
    told: dict[tuple[bytes, str], bool] = {}

    def held(medium: str) -> set[bytes]:
        for event in observer.take_events(None):
            told.update({(key, event.medium.value): not event.removed for key in event.keys})
        return {key for (key, where), is_held in told.items() if where == medium and is_held}

    stores = {
        group: ChunkStore(KVClient.connect(cluster.metadata_address, spec, node=cluster.node("n").local_socket))
        for group, spec in specs.items()
    }
    try:
        observer.planned(7, request, chunks)
        kept = {group: [of[0], of[1]] for group, of in chunks.items()}
        arrived = [
            key for group, store in stores.items() for key in store.store(kept[group], hashes[1::2], time.monotonic() + WAIT_S)[0]
        ]
        assert len(arrived) == 4
        observer.ended(7, arrived)
        assert held("CPU") == set(arrived)
        wait_until(lambda: counters.totals()["labels_stored"] == 2, lambda: str(counters.totals()))
        observer.found(request, chunks)
        wait_until(lambda: counters.totals()["labels_stored"] == 4, lambda: str(counters.totals()))
        wait_until(lambda: held("STORAGE") == set(arrived), lambda: str(told))
        evict(cluster, "n", Tier.DRAM)
        wait_until(lambda: not held("CPU"), lambda: str(told))
        assert held("STORAGE") == set(arrived)
        observer.connect(specs, groups, "sha256")
        assert not held("STORAGE")
    finally:
        observer.close()
        for store in stores.values():
            store.close()
