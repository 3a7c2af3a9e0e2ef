"""Pages and a pool on the same device: copies between them bypass host memory and pin their blocks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from caches import ANY_GROUPS, LAYOUTS, block_bytes, make_cache, snapshot
from deferred import DeferredDevice, FakePinning
from hypothesis import given
from hypothesis import strategies as st

from kvclient import BlockKey, InvalidArgument, KVClient, Tier
from kvclient.call.execution import CallScope
from kvclient.device.blocks import DeviceBlocks
from kvclient.device.copier import DeviceCopier
from kvclient.device.layouts import PagedCache
from kvclient.hbm import HbmPool, memory
from kvclient.hbm.namespace_view import NamespaceView
from kvclient.memory.device_buffer import PoolMemory
from kvclient.results import PATH_HBM, PATH_LOCAL
from kvproto.v1 import node_pb2
from kvstore.core.buffers import DenseBlocks
from kvstore.core.clock import MonotonicClock
from kvstore.core.keys import KeyChain
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.rpc.client import call
from support.client_parts import context_of, session_of

WAIT_S = 20.0
BLOCKS = 8


def in_time() -> CallScope:
    return CallScope.after(60.0, MonotonicClock())


class Bed:
    """An engine's pages, a device whose streams run late, and one namespace in a pool beside them."""

    def __init__(self, pool: HbmPool, cache: PagedCache, seed: int = 0, **choices: object) -> None:
        self.cache = cache
        self.device = DeferredDevice(seed)
        self.copier = DeviceCopier(cache, device=self.device, **choices)  # type: ignore[arg-type]
        self.spec = self.copier.spec("pool", 16)
        self.near: NamespaceView = pool.attach(self.spec, lambda *_: False)
        self.rng = random.Random(seed)

    def keys(self, blocks: int, seed: int) -> list[BlockKey]:
        tokens = np.random.default_rng(seed).integers(0, 1 << 17, blocks * 16, dtype=np.uint32)
        return KeyChain(self.spec).keys(tokens)

    def pages(self, blocks: int) -> list[int]:
        return self.rng.sample(range(self.cache.pages), blocks * self.cache.pages_per_block)

    def insert(self, keys: Sequence[BlockKey], pages: Sequence[int]) -> int:
        before = self.bytes_through_host()
        kept = self.near.insert(keys, None, 0, self.copier.blocks(pages).source(), None, checksums=False)
        assert self.bytes_through_host() == before, "bytes were fetched into host memory"
        return kept

    def fetch(self, keys: Sequence[BlockKey], target: DeviceBlocks, operation: CallScope | None = None) -> int:
        before = self.bytes_through_host()
        found = self.near.fetch(keys, target, operation or in_time(), verify=False)
        assert self.bytes_through_host() == before, "bytes passed through host memory"
        return found

    def bytes_through_host(self) -> int:
        """Bytes copied between pages and host memory until now."""
        totals = self.copier.stats()
        return totals.get("device_loaded_bytes_total", 0) + totals.get("device_stored_bytes_total", 0)

    def in_pool(self, keys: Sequence[BlockKey]) -> np.ndarray:
        """Blocks in the pool, read through host memory."""
        rows = np.zeros((len(keys), self.spec.layers, self.spec.layer_block_bytes), np.uint8)
        assert self.near.fetch(keys, DenseBlocks(rows), in_time(), verify=False) == len(keys)
        return rows.reshape(len(keys), -1)

    def waiting(self, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
        """Set when a thread waits for copies."""
        waits, wait = threading.Event(), self.copier.wait

        def told(events: Sequence[object]) -> None:
            waits.set()
            wait(events)  # type: ignore[arg-type]

        monkeypatch.setattr(self.copier, "wait", told)
        return waits


@pytest.fixture(scope="module")
def one_pool() -> Iterator[HbmPool]:
    with HbmPool("cpu", capacity_bytes=8 << 20, space_wait_s=0.0, demote=False) as pool:
        yield pool


@pytest.fixture
def pool() -> Iterator[HbmPool]:
    with HbmPool("cpu", capacity_bytes=8 << 20, space_wait_s=0.0, demote=False) as pool:
        yield pool


@pytest.fixture
def bed(pool: HbmPool) -> Bed:
    return Bed(pool, make_cache("flash_nhd", layers=4, pages=40, tokens=16, heads=2, dim=32, seed=3), 3)


@pytest.fixture
def thread() -> Iterator[Callable[..., Future[int]]]:
    with ThreadPoolExecutor(4) as threads:
        yield threads.submit


@given(
    layout=st.sampled_from(LAYOUTS),
    pages_per_block=st.sampled_from([1, 2, 3]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]),
    dims=st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 3, 8])),
    layers=st.integers(1, 4),
    scattered=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_pool_pages_round_trip_is_bit_exact(
    one_pool: HbmPool,
    layout: str,
    pages_per_block: int,
    dtype: torch.dtype,
    dims: tuple[int, int, int],
    layers: int,
    scattered: bool,
    seed: int,
) -> None:
    tokens, heads, dim = dims
    cache = make_cache(
        layout,
        layers=layers,
        pages=24,
        tokens=tokens,
        heads=heads,
        dim=dim,
        dtype=dtype,
        pages_per_block=pages_per_block,
        seed=seed,
    )
    one_pool.evict(demote=False)
    bed = Bed(one_pool, cache, seed)
    count = bed.rng.randint(1, cache.pages // pages_per_block)
    keys, pages = bed.keys(count, seed), bed.pages(count)
    expected = block_bytes(cache, pages)
    if scattered:  # slots of two chains alternate
        others = bed.keys(count, seed + 1)
        for end in range(1, count + 1):
            assert bed.insert(keys[:end], pages[: end * pages_per_block]) == 1
            assert bed.insert(others[:end], pages[: end * pages_per_block]) == 1
    else:
        assert bed.insert(keys, pages) == count
    assert np.array_equal(bed.in_pool(keys), expected)

    target = bed.pages(count)
    before = snapshot(cache)
    assert bed.fetch(keys, bed.copier.blocks(target)) == count
    assert np.array_equal(block_bytes(cache, target), expected)
    rest = [page for page in range(cache.pages) if page not in target]
    for layer, was in zip(cache.layers, before, strict=True):
        at = (slice(None), rest) if cache.kind == "split" else (rest,)
        now, then = (tensor[at].reshape(-1, 1).contiguous().view(torch.uint8) for tensor in (layer.tensor, was))
        assert torch.equal(now, then), "another page has changed"
    assert not any(stream.work for stream in bed.device.streams)
    moved = bed.copier.stats()
    assert moved["device_pool_loaded_bytes_total"] == expected.nbytes
    assert moved["device_pool_stored_bytes_total"] == expected.nbytes * (1 + scattered)
    assert "hbm_by_host_blocks_total" not in one_pool.stats()


def test_picked_blocks_use_one_launch(bed: Bed) -> None:
    keys, pages = bed.keys(BLOCKS, 1), bed.pages(BLOCKS)
    expected = block_bytes(bed.cache, pages)
    assert bed.insert(keys[:3], pages[:3]) == 3
    source = bed.copier.blocks(pages).source()
    assert bed.near.insert(keys, None, 0, source.pick(range(BLOCKS)), None, checksums=False) == BLOCKS - 3
    target = bed.pages(BLOCKS)
    launched = sum(stream.launches for stream in bed.device.streams)
    which = [5, 0, 7]
    assert bed.near.fetch(keys[:3], bed.copier.blocks(target).pick(which), in_time(), verify=False) == 3
    assert np.array_equal(block_bytes(bed.cache, [target[at] for at in which]), expected[:3])
    assert sum(stream.launches for stream in bed.device.streams) - launched == 2, "the numbers, and all layers"


def test_pool_blocks_are_pinned_until_copies_end(
    bed: Bed, pool: HbmPool, thread: Callable[..., Future[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = 20
    keys, pages = bed.keys(few, 1), bed.pages(few)
    expected = block_bytes(bed.cache, pages)
    assert pool.resize(few * bed.spec.block_bytes)  # space for only these
    assert bed.insert(keys, pages) == few
    waits = bed.waiting(monkeypatch)
    bed.device.paused = True
    target = bed.pages(few)
    reading = thread(bed.fetch, keys, bed.copier.blocks(target))
    assert waits.wait(WAIT_S)
    assert pool.evict(demote=False) == 0
    other = np.full((few, bed.spec.layers, bed.spec.layer_block_bytes), 0xEE, np.uint8)
    assert bed.near.insert(bed.keys(few, 2), None, 0, DenseBlocks(other), None, checksums=False) == 0
    assert not pool.resize(1 << 20, timeout_s=0.0)
    assert not reading.done()
    bed.device.paused = False
    assert reading.result(WAIT_S) == few
    assert np.array_equal(block_bytes(bed.cache, target), expected)
    pool.evict(demote=False)
    assert pool.usage().blocks == 0


def test_pool_blocks_are_visible_only_after_copies(
    bed: Bed, thread: Callable[..., Future[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, pages = bed.keys(BLOCKS, 1), bed.pages(BLOCKS)
    expected = block_bytes(bed.cache, pages)
    waits = bed.waiting(monkeypatch)
    bed.device.paused = True
    keeping = thread(bed.insert, keys, pages)
    assert waits.wait(WAIT_S)
    with bed.near.pinned(keys) as found:
        assert len(found) == 0
    bed.device.paused = False
    assert keeping.result(WAIT_S) == BLOCKS
    assert np.array_equal(bed.in_pool(keys), expected)


def test_drain_by_other_thread_keeps_pins(
    bed: Bed, pool: HbmPool, thread: Callable[..., Future[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, pages = bed.keys(BLOCKS, 1), bed.pages(BLOCKS)
    assert bed.insert(keys, pages) == BLOCKS
    waits = bed.waiting(monkeypatch)
    bed.device.paused = True
    blocks = bed.copier.blocks(bed.pages(BLOCKS))
    reading = thread(bed.fetch, keys, blocks)
    assert waits.wait(WAIT_S)
    blocks.drain()  # as parts of a planned load do: nothing is left to wait for
    assert pool.evict(demote=False) == 0
    assert not reading.done()
    bed.device.paused = False
    assert reading.result(WAIT_S) == BLOCKS


def test_cancelled_load_ends_its_begun_copies(
    bed: Bed, pool: HbmPool, thread: Callable[..., Future[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, pages = bed.keys(BLOCKS, 1), bed.pages(BLOCKS)
    assert bed.insert(keys, pages) == BLOCKS
    operation = in_time()
    operation.cancellable = True
    waits = bed.waiting(monkeypatch)
    bed.device.paused = True
    reading = thread(bed.fetch, keys, bed.copier.blocks(bed.pages(BLOCKS)), operation)
    assert waits.wait(WAIT_S)
    operation.cancel()
    assert pool.evict(demote=False) == 0, "pins ended before the copies"
    bed.device.paused = False
    assert reading.result(WAIT_S) == BLOCKS
    before = snapshot(bed.cache)
    assert bed.fetch(keys, bed.copier.blocks(bed.pages(BLOCKS)), operation) == 0
    assert all(torch.equal(now.tensor, was) for now, was in zip(bed.cache.layers, before, strict=True))


def test_interrupted_thread_leaves_no_copy_in_flight(bed: Bed, pool: HbmPool, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, pages = bed.keys(BLOCKS, 1), bed.pages(BLOCKS)
    wait, interrupts = bed.copier.wait, iter([True, False, True, False])

    def interrupted(events: Sequence[object]) -> None:
        if next(interrupts):
            raise KeyboardInterrupt
        wait(events)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(bed.copier, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bed.insert(keys, pages)
        assert not any(stream.work for stream in bed.device.streams), "slots were given back under a running copy"
        assert pool.usage().blocks == 0
    assert bed.insert(keys, pages) == BLOCKS
    with monkeypatch.context() as patched:
        patched.setattr(bed.copier, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bed.fetch(keys, bed.copier.blocks(bed.pages(BLOCKS)))
        assert not any(stream.work for stream in bed.device.streams)
    assert pool.evict(demote=False) == BLOCKS, "a pin was never given back"


@pytest.mark.parametrize("after", [0, 1])
def test_device_refusal_is_a_miss_with_no_copy_in_flight(bed: Bed, pool: HbmPool, after: int) -> None:
    keys, pages = bed.keys(BLOCKS, 1), bed.pages(BLOCKS)
    expected = block_bytes(bed.cache, pages)
    bed.device.work_after = after
    assert bed.insert(keys, pages) == 0
    assert (pool.usage().blocks, any(stream.work for stream in bed.device.streams)) == (0, False)
    bed.device.work_after = None
    assert bed.insert(keys, pages) == BLOCKS
    bed.device.work_after = after
    assert bed.fetch(keys, bed.copier.blocks(bed.pages(BLOCKS))) == 0
    assert not any(stream.work for stream in bed.device.streams)
    bed.device.work_after = None
    target = bed.pages(BLOCKS)
    assert bed.fetch(keys, bed.copier.blocks(target)) == BLOCKS
    assert np.array_equal(block_bytes(bed.cache, target), expected)
    assert (pool.stats()["hbm_lost"], pool.stats()["hbm_failed_operations_total"]) == (0, 2)


@pytest.mark.parametrize("direction", ["in", "out"])
def test_hung_device_ends_pool_and_keeps_its_memory(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    monkeypatch.setattr("kvclient.device.copier.DRAIN_S", 0.05)
    monkeypatch.setattr("kvclient.hbm.pool._STOP_S", 0.05)
    monkeypatch.setattr(memory, "kept", [])
    with HbmPool("cpu", capacity_bytes=1 << 20, demote=False) as pool:
        bed = Bed(pool, make_cache("mla", layers=3, tokens=16), 1)
        keys, pages = bed.keys(4, 1), bed.pages(4)
        if direction == "out":
            assert bed.insert(keys, pages) == 4
        held = pool.state.volume.memory
        bed.device.paused = True
        if direction == "in":
            assert bed.insert(keys, pages) == 0
            assert pool.usage().blocks == 4, "slots that a device may still write to were given back"
        else:
            assert bed.fetch(keys, bed.copier.blocks(bed.pages(4))) == 0
        assert (pool.stats()["hbm_lost"], pool.stats()["hbm_device_errors_total"]) == (1, 1)
        assert any(held is one for one in memory.kept)
        bed.device.paused = False
        bed.device.run_all()
        assert bed.fetch(keys, bed.copier.blocks(bed.pages(4))) == 0


def test_int8_and_checksums_pass_through_host_and_are_counted(pool: HbmPool) -> None:
    bed = Bed(pool, make_cache("flash_hnd", layers=2, tokens=16, dim=32), int8=ANY_GROUPS)
    keys = bed.keys(4, 1)
    source = bed.copier.blocks([0, 1, 2, 3]).source()
    assert bed.near.insert(keys, None, 0, source, None, checksums=False) == 4
    assert pool.stats()["hbm_by_host_blocks_total"] == 4
    assert np.array_equal(bed.in_pool(keys), bed.copier.blocks([0, 1, 2, 3]).gather())
    target = bed.copier.blocks([4, 5, 6, 7])
    assert bed.near.fetch(keys, target, in_time(), verify=False) == 4
    target.host_copy_ready(np.arange(4), 0, 2)
    target.drain()
    coded, size, codec = bed.in_pool(keys), bed.spec.layer_block_bytes, bed.copier.codec
    assert codec is not None
    rows = [codec.decode(torch.from_numpy(coded[:, layer * size : (layer + 1) * size].copy())).numpy() for layer in range(2)]
    assert np.array_equal(block_bytes(bed.cache, [4, 5, 6, 7]), np.concatenate(rows, 1))
    assert pool.stats()["hbm_by_host_blocks_total"] == 8

    plain = Bed(pool, make_cache("mla", layers=2, tokens=16))
    keys = plain.keys(4, 2)
    source = plain.copier.blocks([0, 1, 2, 3]).source()
    assert plain.near.insert(keys, None, 0, source, None, checksums=True) == 4
    target = plain.copier.blocks([4, 5, 6, 7])
    assert plain.near.fetch(keys, target, in_time(), verify=True) == 4
    assert pool.stats()["hbm_by_host_blocks_total"] == 16
    assert plain.copier.stats().get("device_pool_loaded_bytes_total", 0) == 0


def test_unreachable_pool_memory_is_rejected(bed: Bed) -> None:
    blocks = bed.copier.blocks([0, 1])
    size = bed.spec.block_bytes
    space = torch.zeros(2 * size, dtype=torch.uint8)
    assert blocks.pool_gap(PoolMemory("cpu", space)) == ""
    assert "cuda:1" in blocks.pool_gap(PoolMemory("cuda:1", space))
    with pytest.raises(InvalidArgument, match="cuda:1"):
        blocks.read_pool(PoolMemory("cuda:1", space), np.array([0, size]), 0)
    for wrong in ([0, size + 1], [-1, 0]):
        with pytest.raises(InvalidArgument, match="outside the pool"):
            blocks.read_pool(PoolMemory("cpu", space), np.array(wrong), 0)
        with pytest.raises(InvalidArgument, match="outside the pool"):
            blocks.write_pool(PoolMemory("cpu", space), np.array(wrong))
    for torn in (space.view(torch.int16), space[1:], space[::2], space.view(2, -1), space.numpy()):
        with pytest.raises(InvalidArgument, match="cannot copy from this pool memory"):
            blocks.read_pool(PoolMemory("cpu", torn), np.array([0]), 0)
    assert not any(stream.work for stream in bed.device.streams)


def test_concurrent_evictions_never_return_wrong_bytes(thread: Callable[..., Future[int]]) -> None:
    """Four chains in a pool for half of them; a read returns the bytes of its chain, or a miss."""
    chains, blocks, rounds = 4, 6, 25
    cache = make_cache("block_first_nhd", layers=2, pages=2 * chains * blocks, tokens=16, dim=16, seed=9)
    size = cache.row_bytes * 2
    with HbmPool("cpu", capacity_bytes=chains * blocks // 2 * max(size, 4096), space_wait_s=0.0, demote=False) as pool:
        bed = Bed(pool, cache, 9)
        done = threading.Event()

        def work(chain: int) -> int:
            keys = bed.keys(blocks, chain)
            source = list(range(chain * blocks, (chain + 1) * blocks))
            target = [page + chains * blocks for page in source]
            expected = block_bytes(cache, source)
            hits = 0
            for _ in range(rounds):
                bed.insert(keys, source)
                found = bed.fetch(keys, bed.copier.blocks(target))
                assert np.array_equal(block_bytes(cache, target[:found]), expected[:found])
                hits += found
            return hits

        def evict() -> int:
            left = 0
            while not done.is_set():
                left += pool.evict(demote=False)
            return left

        with ThreadPoolExecutor(1) as evictor:
            evicting = evictor.submit(evict)
            try:
                hits = [work.result(60) for work in [thread(work, chain) for chain in range(chains)]]
            finally:
                done.set()
            assert evicting.result(WAIT_S) > 0
        assert sum(hits) > 0
        with bed.near.pinned(bed.keys(blocks, 0)):
            pass
        pool.evict(demote=False)
        assert pool.usage().blocks == 0, "a pin was never given back"
        assert pool.stats()["hbm_lost"] == 0


@pytest.mark.parametrize("layerwise", [False, True])
def test_client_pool_round_trip_avoids_host_memory(layerwise: bool) -> None:
    cache = make_cache("flash_nhd", layers=4, pages=40, tokens=16, heads=2, dim=32, seed=5)
    device = DeferredDevice(5, FakePinning())
    copier = DeviceCopier(cache, device=device, pin_chunk_bytes=1 << 20)
    rng = random.Random(5)
    with (
        LocalCluster([NodeSpec("prefill", dram_bytes=16 << 20, settings=(("prefault", "true"),))]) as cluster,
        HbmPool("cpu", capacity_bytes=8 << 20) as pool,
        KVClient.connect(
            cluster.metadata_address,
            copier.spec("device", 16),
            node=cluster.node("prefill").local_socket,
            hbm=pool,
            device=copier,
        ) as client,
    ):
        assert copier.wait_pinned(WAIT_S)
        keys = client.keys(np.arange(BLOCKS * 16, dtype=np.uint32))
        pages = rng.sample(range(40), BLOCKS)
        expected = block_bytes(cache, pages)
        assert client.store(keys, copier.blocks(pages), wait_visible=True).held_blocks == BLOCKS
        for path in (PATH_HBM, PATH_LOCAL, PATH_HBM):  # blocks from the arena are kept in the pool again
            if path == PATH_LOCAL:
                pool.evict(demote=False)
            target = rng.sample(range(40), BLOCKS)
            blocks = copier.blocks(target)
            with client.start_load(client.lookup(keys), blocks, layerwise=layerwise) as handle:
                if layerwise:
                    assert all(handle.wait_layer(layer) for layer in range(4))
                    assert np.array_equal(block_bytes(cache, target), expected)
                result = handle.result()
            assert (result.hit_blocks, result.error, list(result.bytes_by_path)) == (BLOCKS, None, [path])
            assert np.array_equal(block_bytes(cache, target), expected)
        assert "hbm_by_host_blocks_total" not in pool.stats()
        copied = copier.stats()
        assert "device_unpinned_bytes_total" not in copied, "bytes passed through host memory that is not the arena"
        assert copied["device_loaded_bytes_total"] == expected.nbytes, "from the arena"
        assert copied["device_pool_stored_bytes_total"] == 2 * expected.nbytes
        assert copied["device_pool_loaded_bytes_total"] == 2 * expected.nbytes


def test_disk_blocks_reach_pages_through_the_pool() -> None:
    """The copy from the pool to the pages uses neither the node's arena nor host memory of the engine."""
    cache = make_cache("flash_nhd", layers=4, pages=40, tokens=16, heads=2, dim=32, seed=6)
    copier = DeviceCopier(cache, device=DeferredDevice(6, FakePinning()), pin_chunk_bytes=1 << 20)
    rng = random.Random(6)
    with (
        LocalCluster(
            [NodeSpec("prefill", dram_bytes=16 << 20, nvme_bytes=32 << 20, settings=(("prefault", "true"),))]
        ) as cluster,
        HbmPool("cpu", capacity_bytes=8 << 20, gds="forced", demote=False) as pool,
        KVClient.connect(
            cluster.metadata_address,
            copier.spec("device", 16),
            node=cluster.node("prefill").local_socket,
            hbm=pool,
            device=copier,
        ) as client,
    ):
        keys = client.keys(np.arange(BLOCKS * 16, dtype=np.uint32))
        pages = rng.sample(range(40), BLOCKS)
        expected = block_bytes(cache, pages)
        assert client.store(keys, copier.blocks(pages), durable=True).durable
        near, session = context_of(client).pool, session_of(client)
        assert near is not None
        end = time.monotonic() + WAIT_S
        while not near.reads_disks(session.volumes) or {run.tier for run in client.lookup(keys).runs} != {Tier.NVME}:
            assert time.monotonic() < end
            call(session.stub.Evict, node_pb2.EvictRequest(operation_id=bytes(16), tier=int(Tier.DRAM)), WAIT_S)  # type: ignore[arg-type]
            time.sleep(0.02)
        pool.evict(demote=False)
        for path in (PATH_LOCAL, PATH_HBM):
            target = rng.sample(range(40), BLOCKS)
            blocks = copier.blocks(target)
            with client.start_load(client.lookup(keys), blocks) as handle:
                assert all(handle.wait_layer(layer) for layer in range(4))
                assert np.array_equal(block_bytes(cache, target), expected)
                result = handle.result()
            assert (result.hit_blocks, result.error, list(result.bytes_by_path)) == (BLOCKS, None, [path])
            assert "device_loaded_bytes_total" not in copier.stats(), "bytes passed through host memory"
        assert pool.stats()["hbm_disk_blocks_total"] == BLOCKS
        assert "hbm_by_host_blocks_total" not in pool.stats()
