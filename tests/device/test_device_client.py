"""A client whose engine keeps its KV cache on a device, with a real store: daemons, an arena, and streams that run late."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from caches import ANY_GROUPS, INT8_SHARE, block_bytes, make_cache, token_groups
from deferred import DeferredDevice, FakePinning
from int8_error import error_bound

from kvclient import BlockKey, ClientOptions, InvalidArgument, KVClient, Outcome
from kvclient.device import DeviceCopier
from kvclient.hbm import HbmPool
from kvclient.results import PATH_HBM, PATH_LOCAL, PATH_PREFILL
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import Internal
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from samples import sample
from support.client_parts import session_of
from support.node_stats import node_stats
from support.wait import wait_until

PAGES = 24
BLOCKS = 8

Connect = Callable[..., KVClient]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    nodes = [
        NodeSpec("prefill", dram_bytes=16 << 20, nvme_bytes=64 << 20, settings=(("prefault", "true"),)),
        NodeSpec("decode", roles=("decode",), dram_bytes=16 << 20, settings=(("prefault", "true"),)),
    ]
    with LocalCluster(nodes) as cluster:
        yield cluster


class Engine:
    """A KV cache, a device, and their copier."""

    def __init__(self, seed: int, *, device: DeferredDevice | None = None, **choices: object) -> None:
        self.cache = make_cache("flash_nhd", layers=4, pages=PAGES, tokens=16, heads=2, dim=32, seed=seed)
        self.device = device or DeferredDevice(seed, FakePinning())
        self.copier = DeviceCopier(self.cache, device=self.device, pin_chunk_bytes=1 << 20, **choices)  # type: ignore[arg-type]
        self.rng = random.Random(seed)

    def pages(self, count: int) -> list[int]:
        return self.rng.sample(range(PAGES), count)

    def bytes(self, pages: list[int]) -> np.ndarray:
        return block_bytes(self.cache, pages)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def connect(cluster: LocalCluster, stack: ExitStack) -> Connect:
    def make(engine: Engine, node: str | None = "prefill", **settings: object) -> KVClient:
        spec = engine.copier.spec("device", 16)
        address = cluster.node(node).local_socket if node is not None else None
        options = ClientOptions(**{"reopen_pause_s": 0.05, "default_deadline_s": 20.0, **settings})  # type: ignore[arg-type]
        return stack.enter_context(
            KVClient.connect(cluster.metadata_address, spec, node=address, options=options, device=engine.copier)
        )

    return make


def keys_of(client: KVClient, seed: int, blocks: int = BLOCKS) -> list[BlockKey]:
    return client.keys(np.random.default_rng(seed).integers(0, 1 << 17, blocks * 16, dtype=np.uint32))


def fill(connect: Connect, seed: int) -> tuple[list[BlockKey], np.ndarray]:
    """Blocks in the store's DRAM, and their bytes."""
    engine = Engine(seed)
    client = connect(engine)
    pages = engine.pages(BLOCKS)
    keys = keys_of(client, seed)
    stored = client.store(keys, engine.copier.blocks(pages), wait_visible=True)
    assert (stored.held_blocks, stored.error) == (BLOCKS, None)
    return keys, engine.bytes(pages)


@pytest.mark.parametrize("strategy", ["staged", "batched"])
@pytest.mark.parametrize(("node", "path"), [("prefill", PATH_LOCAL), ("decode", PATH_PREFILL), (None, PATH_PREFILL)])
def test_load_on_other_device_returns_stored_bytes(connect: Connect, strategy: str, node: str | None, path: str) -> None:
    seed = 10 * ["staged", "batched"].index(strategy) + {"prefill": 1, "decode": 2, None: 3}[node]
    writer = Engine(seed, strategy=strategy)
    client = connect(writer)
    assert writer.copier.wait_pinned(10)
    pages = writer.pages(BLOCKS)
    keys = keys_of(client, seed)
    assert client.store(keys, writer.copier.blocks(pages), wait_visible=True).held_blocks == BLOCKS
    expected = writer.bytes(pages)

    reader = Engine(seed + 100, strategy=strategy)
    client = connect(reader, node, verify="always")
    for layerwise in (False, True):
        pages = reader.pages(BLOCKS)
        blocks = reader.copier.blocks(pages)
        if not layerwise:
            result = client.load(client.lookup(keys), blocks)
        else:
            row = reader.cache.row_bytes
            with client.start_load(client.lookup(keys), blocks) as handle:
                for layer in range(4):
                    assert handle.wait_layer(layer)
                    got = reader.bytes(pages)[:, layer * row : (layer + 1) * row]
                    assert np.array_equal(got, expected[:, layer * row : (layer + 1) * row])
                result = handle.result()
        assert (result.hit_blocks, result.error) == (BLOCKS, None)
        assert layerwise or path in result.bytes_by_path  # a node keeps what it has read for an engine
        assert np.array_equal(reader.bytes(pages), expected)
    assert not any(stream.work for stream in reader.device.streams), "work of a load that has ended"


def test_node_shows_how_a_connected_engine_copies(cluster: LocalCluster, connect: Connect) -> None:
    engine = Engine(3, strategy="staged")
    expected = "engine shown, copies on cpu: load staged (fixed), store staged (fixed)"
    with connect(engine, client_name="shown"), connect(Engine(4), client_name="shown\n, copies on x"):
        assert [line for line in node_stats(cluster, "prefill").io_engines if "shown" in line] == [expected]
    wait_until(lambda: expected not in node_stats(cluster, "prefill").io_engines, "the session ends")


def test_store_without_local_node_succeeds(connect: Connect) -> None:
    engine = Engine(31)
    client = connect(engine, None)
    pages = engine.pages(BLOCKS)
    keys = keys_of(client, 31)
    assert client.store(keys, engine.copier.blocks(pages)).held_blocks == BLOCKS
    expected = engine.bytes(pages)
    target = engine.pages(BLOCKS)
    assert connect(engine).load(keys, engine.copier.blocks(target)).hit_blocks == BLOCKS
    assert np.array_equal(engine.bytes(target), expected)


def test_store_layer_by_layer_is_loadable(connect: Connect) -> None:
    engine = Engine(41)
    client = connect(engine)
    pages = engine.pages(BLOCKS)
    keys = keys_of(client, 41)
    with client.begin_store(keys) as handle:
        for layer in range(4):
            handle.put_layer(layer, engine.copier.blocks(pages, layer=layer))
        assert handle.commit(wait_visible=True).held_blocks == BLOCKS
    expected = engine.bytes(pages)
    target = engine.pages(BLOCKS)
    assert client.load(client.lookup(keys), engine.copier.blocks(target), verify="always").hit_blocks == BLOCKS
    assert np.array_equal(engine.bytes(target), expected)


@pytest.mark.parametrize("seed", range(sample(10, 120)))
def test_pieces_in_flight_any_order_no_wrong_byte(connect: Connect, seed: int) -> None:
    """Stores and loads of several pieces, some of them cancelled: right bytes, and nothing is written afterwards."""
    rng = random.Random(seed)
    seed += 6000
    engine = Engine(seed, strategy=rng.choice(["staged", "batched"]))
    size = engine.copier.shape.block_bytes
    client = connect(
        engine,
        pieces_in_flight=rng.randint(1, 3),
        store_chunk_bytes=rng.randint(1, 4) * size,
        copy_chunk_bytes=rng.randint(1, 2) * size,
        load_chunk_bytes=rng.randint(1, 4) * size,
    )
    pages, keys = engine.pages(BLOCKS), keys_of(client, seed)
    expected = engine.bytes(pages)
    assert client.store(keys, engine.copier.blocks(pages), wait_visible=True).held_blocks == BLOCKS
    lookup = client.lookup(keys)
    for _ in range(3):
        cancelled, layerwise = rng.random() < 0.5, rng.random() < 0.5
        pages = engine.pages(BLOCKS)
        handle = client.start_load(
            lookup, engine.copier.blocks(pages), layerwise=layerwise, verify=rng.choice(["auto", "always"])
        )
        if cancelled:
            time.sleep(rng.random() * 0.02)
            handle.request_cancel()
        result = handle.result()
        assert cancelled or (result.hit_blocks, result.error) == (BLOCKS, None)
        hits = result.outcomes == Outcome.HIT
        assert np.array_equal(engine.bytes(pages)[hits], expected[hits])
        assert not any(stream.work for stream in engine.device.streams), "work of a load that has ended"
    others = keys_of(client, seed + 3000)
    handle = client.start_store(others, engine.copier.blocks(pages))
    time.sleep(rng.random() * 0.02)
    handle.request_cancel()
    held = handle.result().held_blocks
    assert not any(stream.work for stream in engine.device.streams), "work of a store that has ended"
    expected, target = engine.bytes(pages), engine.pages(BLOCKS)
    hits = client.load(others, engine.copier.blocks(target)).outcomes == Outcome.HIT
    assert hits[:held].all()
    assert np.array_equal(engine.bytes(target)[hits], expected[hits])


@pytest.mark.parametrize("layerwise", [False, True])
def test_lease_is_held_until_device_copies_end(connect: Connect, layerwise: bool) -> None:
    seed = 50 + layerwise
    keys, _ = fill(connect, seed)
    engine = Engine(seed + 100)
    client = connect(engine)
    session = session_of(client)
    given_back: list[int] = []
    release = session.releaser.release

    def watch(lease_ids: list[int], nbytes: int) -> None:
        given_back.append(sum(len(stream.work) for stream in engine.device.streams))
        release(lease_ids, nbytes)

    session.releaser.release = watch  # type: ignore[method-assign]
    engine.device.paused = True
    handle = client.start_load(client.lookup(keys), engine.copier.blocks(engine.pages(BLOCKS)), layerwise=layerwise)
    if layerwise:  # all layers are in flight before the first arrives
        engine.device.wait_event = lambda event: None  # type: ignore[method-assign]
        assert handle.wait_layer(3, 10)
    assert not handle.done
    assert given_back == []
    engine.device.paused = False
    assert handle.result().hit_blocks == BLOCKS
    assert given_back == [0]


@pytest.mark.parametrize("layerwise", [False, True])
def test_lease_expired_during_copy_is_a_miss(connect: Connect, monkeypatch: pytest.MonkeyPatch, layerwise: bool) -> None:
    seed = 60 + layerwise
    keys, _ = fill(connect, seed)
    late_s = 0.0

    class LateClock(MonotonicClock):
        def now_s(self) -> float:
            return super().now_s() + late_s

    monkeypatch.setattr("kvclient.client.MonotonicClock", LateClock)
    engine = Engine(seed + 100)
    client = connect(engine, default_deadline_s=5000.0)
    step = engine.device.run_next

    def slow() -> bool:
        nonlocal late_s
        late_s += 100.0
        return step()

    lookup = client.lookup(keys)
    engine.device.run_next = slow  # type: ignore[method-assign]
    with client.start_load(lookup, engine.copier.blocks(engine.pages(BLOCKS)), layerwise=layerwise) as handle:
        result = handle.result()
    assert result.hit_blocks == 0
    assert client.stats()["client_lease_expired_blocks_total"] >= BLOCKS


@pytest.mark.parametrize("after", [0, 2, 9])
def test_failed_device_is_a_miss_and_returns_leases(connect: Connect, after: int) -> None:
    keys, expected = fill(connect, 70 + after)
    engine = Engine(170 + after, strategy="batched")
    client = connect(engine)
    assert engine.copier.wait_pinned(10), "unpinned memory is copied in fewer copies"
    lookup = client.lookup(keys)
    blocks = engine.copier.blocks(engine.pages(BLOCKS))
    engine.device.fail_after = after
    result = client.load(lookup, blocks)
    assert result.hit_blocks == 0
    assert isinstance(result.error, Internal)
    assert not any(stream.work for stream in engine.device.streams)
    assert client.store(keys_of(client, 7), engine.copier.blocks(engine.pages(BLOCKS))).held_blocks == 0
    engine.device.fail_after = None  # for example, too little memory
    pages = engine.pages(BLOCKS)
    assert client.load(lookup, engine.copier.blocks(pages)).hit_blocks == BLOCKS
    assert np.array_equal(engine.bytes(pages), expected)


def test_flipped_bit_in_arena_is_found_if_verified(connect: Connect) -> None:
    keys, _ = fill(connect, 80)
    engine = Engine(180)
    client = connect(engine)
    session = session_of(client)
    copied = session.arena.begin_copy_out

    def flip(offsets: np.ndarray, *place: object) -> object:
        (block,) = session.arena.blocks(offsets[2:3], client.spec.shape).segments(0, 0, client.spec.layers)
        block[5] ^= 1
        return copied(offsets, *place)  # type: ignore[arg-type]

    session.arena.begin_copy_out = flip  # type: ignore[method-assign]
    result = client.load(client.lookup(keys), engine.copier.blocks(engine.pages(BLOCKS)), verify="always")
    assert result.outcomes[2] == Outcome.CORRUPT
    assert result.hit_blocks == 2


def test_slots_of_hung_copies_are_not_released(cluster: LocalCluster, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvclient.device.copier.DRAIN_S", 0.05)
    engine = Engine(90)
    client = connect(engine)
    session = session_of(client)
    aborted: list[bytes] = []
    session.releaser.abort = aborted.append  # type: ignore[method-assign]
    engine.device.paused = True
    stored = client.store(keys_of(client, 90), engine.copier.blocks(engine.pages(BLOCKS)))
    assert stored.held_blocks == 0
    assert isinstance(stored.error, Internal)
    assert session.arena.stuck
    assert aborted == []
    client.close()
    assert session.arena.alive, "the arena is unmapped under a device that writes to it"
    engine.device.paused = False
    engine.device.run_all()
    session.arena.close()
    assert not session.arena.alive


def test_close_unpins_before_unmapping(connect: Connect) -> None:
    pinning = FakePinning()
    engine = Engine(95, device=DeferredDevice(0, pinning))
    client = connect(engine)
    assert engine.copier.wait_pinned(10)
    assert sum(pinning.pinned.values()) == engine.copier.stats()["device_pinned_bytes"] == 16 << 20
    client.close()
    assert pinning.pinned == {}
    assert engine.copier.pin_reports() == []


def test_load_from_unpinned_arena_succeeds_and_is_counted(connect: Connect) -> None:
    keys, expected = fill(connect, 96)
    engine = Engine(196, device=DeferredDevice(0, FakePinning(refuse_from=0)))
    client = connect(engine)
    assert engine.copier.wait_pinned(10)
    pages = engine.pages(BLOCKS)
    assert client.load(client.lookup(keys), engine.copier.blocks(pages)).hit_blocks == BLOCKS
    assert np.array_equal(engine.bytes(pages), expected)
    stats = engine.copier.stats()
    assert stats["device_unpinned_bytes_total"] == expected.nbytes
    assert stats["device_pin_refused_total"] == 1


def test_connect_with_namespace_of_other_cache_is_rejected(cluster: LocalCluster) -> None:
    engine, other = Engine(1), Engine(2, int8=ANY_GROUPS)
    with pytest.raises(InvalidArgument, match="does not match this KV cache"):
        KVClient.connect(cluster.metadata_address, engine.copier.spec("device", 16), device=other.copier)
    with pytest.raises(InvalidArgument, match="another type"):
        KVClient.connect(cluster.metadata_address, engine.copier.spec("device", 16), device=engine.cache)  # type: ignore[arg-type]


@pytest.mark.parametrize("with_device", [True, False])
def test_pages_of_other_layout_and_equal_size_are_rejected(cluster: LocalCluster, connect: Connect, with_device: bool) -> None:
    keys, expected = fill(connect, 7701)
    engine = Engine(7702)
    sizes = {"layers": 4, "pages": PAGES, "heads": 2, "dim": 32}
    others = [
        make_cache("flash_nhd", tokens=16, dtype=torch.float16, **sizes),  # type: ignore[arg-type]
        make_cache("flash_hnd", tokens=16, **sizes),  # type: ignore[arg-type]
        make_cache("flash_nhd", tokens=8, pages_per_block=2, **sizes),  # type: ignore[arg-type]
    ]
    with KVClient.connect(
        cluster.metadata_address,
        engine.copier.spec("device", 16),
        node=cluster.node("prefill").local_socket,
        device=engine.copier if with_device else None,
    ) as client:
        found = client.lookup(keys)
        for cache in others:
            other = DeviceCopier(cache)
            assert other.shape == engine.copier.shape
            before = [layer.tensor.clone() for layer in cache.layers]
            pages = range(BLOCKS * cache.pages_per_block)
            for blocks in (other.blocks(pages), other.blocks(pages).pick(range(BLOCKS))):
                with pytest.raises(InvalidArgument, match="does not match this KV cache"):
                    client.load(found, blocks)
                with pytest.raises(InvalidArgument, match="does not match this KV cache"):
                    client.store(keys_of(client, 7703), blocks)
            handle = client.begin_store(keys_of(client, 7703))
            with pytest.raises(InvalidArgument, match="does not match this KV cache"):
                handle.put_layer(0, other.blocks(pages, layer=0))
            handle.abort()
            for layer, was in zip(cache.layers, before, strict=True):
                assert torch.equal(layer.tensor, was)
        assert not client.lookup(keys_of(client, 7703)).hit_blocks
        target = engine.pages(BLOCKS)
        assert client.load(found, engine.copier.blocks(target)).hit_blocks == BLOCKS
        assert np.array_equal(engine.bytes(target), expected)


def test_cpu_cache_is_stored_as_int8(cluster: LocalCluster) -> None:
    cache = make_cache("flash_hnd", layers=4, pages=PAGES, tokens=16, heads=2, dim=32, seed=5)
    copier = DeviceCopier(cache, int8=token_groups("flash_hnd", cache))  # a separate device, like that of an engine on a CPU
    with KVClient.connect(
        cluster.metadata_address, copier.spec("device", 16), node=cluster.node("prefill").local_socket, device=copier
    ) as client:
        keys = keys_of(client, 5)
        was = [layer.tensor.clone() for layer in cache.layers]
        stored = client.store(keys, copier.blocks(range(BLOCKS)), wait_visible=True)
        assert (stored.held_blocks, stored.bytes_stored) == (BLOCKS, BLOCKS * copier.shape.block_bytes)
        assert stored.bytes_stored == INT8_SHARE * BLOCKS * 4 * cache.row_bytes
        assert client.load(client.lookup(keys), copier.blocks(range(8, 8 + BLOCKS))).hit_blocks == BLOCKS
        for layer, before in zip(cache.layers, was, strict=True):
            now, then = layer.tensor[:, 8 : 8 + BLOCKS], before[:, :BLOCKS]
            largest = then.abs().amax(3, keepdim=True).expand_as(then).clone()  # of a channel's tokens
            largest[1] = then[1].abs().amax(3, keepdim=True)  # of a token's channels
            assert bool(((now.float() - then.float()).abs() <= error_bound(then, largest)).all())
            assert torch.equal(layer.tensor[:, :BLOCKS], before[:, :BLOCKS])


def test_int8_blocks_of_two_engines_never_conflict(cluster: LocalCluster) -> None:
    """Engines compute slightly different numbers of one prompt: the first writer wins, and nothing counts as corrupt."""
    caches = [make_cache("flash_hnd", layers=4, pages=PAGES, tokens=16, heads=2, dim=32, seed=seed) for seed in (6, 7)]
    copiers = [DeviceCopier(cache, int8=token_groups("flash_hnd", cache)) for cache in caches]
    pages, others = range(BLOCKS), range(8, 8 + BLOCKS)
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(
                KVClient.connect(
                    cluster.metadata_address,
                    copier.spec("device-conflict", 16),
                    node=cluster.node("prefill").local_socket,
                    device=copier,
                    options=ClientOptions(verify="always"),
                )
            )
            for copier in copiers
        )
        keys = keys_of(one, 6)
        first = copiers[0].blocks(pages).gather()
        assert one.store(keys, copiers[0].blocks(pages), wait_visible=True).held_blocks == BLOCKS
        stored = two.store(keys, copiers[1].blocks(pages))
        assert (stored.held_blocks, stored.bytes_stored) == (BLOCKS, 0)
        assert two.load(two.lookup(keys), copiers[1].blocks(others)).hit_blocks == BLOCKS
        assert np.array_equal(copiers[1].blocks(others).gather(), first), "a loaded block is encoded to the bytes of the store"
        assert not any(count for name, count in {**one.stats(), **two.stats()}.items() if "corrupt" in name)


def test_engine_pool_keeps_and_returns_pages(cluster: LocalCluster) -> None:
    keys_seed = 99
    engine = Engine(keys_seed)
    spec = engine.copier.spec("device", 16)
    with (
        HbmPool("cpu", capacity_bytes=8 << 20) as pool,
        KVClient.connect(
            cluster.metadata_address,
            spec,
            node=cluster.node("prefill").local_socket,
            hbm=pool,
            device=engine.copier,
            options=ClientOptions(verify="always"),
        ) as client,
    ):
        keys = keys_of(client, keys_seed)
        pages = engine.pages(BLOCKS)
        expected = engine.bytes(pages)
        assert client.store(keys, engine.copier.blocks(pages), wait_visible=True).held_blocks == BLOCKS
        for path in (PATH_HBM, PATH_LOCAL, PATH_HBM):  # blocks from the arena are kept in the pool again
            if path == PATH_LOCAL:
                pool.evict(demote=False)
            for layerwise in (False, True)[: 1 if path == PATH_LOCAL else 2]:
                target = engine.pages(BLOCKS)
                handle = client.start_load(
                    client.lookup(keys), engine.copier.blocks(target), layerwise=layerwise, verify="always"
                )
                assert handle.wait_layer(3)
                result = handle.result()
                assert (result.hit_blocks, result.error, list(result.bytes_by_path)) == (BLOCKS, None, [path])
                assert np.array_equal(engine.bytes(target), expected)
