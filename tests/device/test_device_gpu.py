"""The copies on a real GPU: bit-exact in every way, layout and direction, ordered by events under load, out of pinned memory."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import xxhash
from caches import LAYOUTS, block_bytes, make_cache, snapshot, token_groups

from kvclient.device.copier import DeviceCopier
from kvclient.device.driver import CudaDriver
from kvclient.device.int8 import Int8Codec
from kvclient.device.page_scatter import TorchScatter
from kvstore.embedded.cluster import LocalCluster, NodeSpec

pytestmark = pytest.mark.gpu

WAYS = ("staged", "batched", "direct")
SLOTS = 96


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    """An arena like that of a node."""
    fd = os.memfd_create("test-gpu-arena")
    os.ftruncate(fd, 256 << 20)
    mapped = mmap.mmap(fd, 256 << 20)
    os.close(fd)
    yield mapped
    mapped.close()


def make(way: str, cache: object, **choices: object) -> DeviceCopier:
    if way == "batched" and not CudaDriver(torch.cuda.current_device()).has_batch:  # the copier would refuse
        pytest.skip("this driver has no batched copies")
    return DeviceCopier(cache, strategy=way, **choices)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("pages_per_block", "chunk"), [(1, 1 << 30), (4, 1 << 20)])
def test_every_strategy_is_bit_exact_in_both_directions(
    memory: mmap.mmap, way: str, layout: str, pages_per_block: int, chunk: int
) -> None:
    rng = random.Random(7)
    cache = make_cache(layout, layers=5, pages=256, tokens=16, heads=4, dim=64, pages_per_block=pages_per_block, device="cuda")
    copier = make(way, cache, pin_chunk_bytes=chunk, staging_bytes=1 << 20)
    view = memoryview(memory)
    guard = copier.mapped(view)
    assert copier.wait_pinned(60)
    assert copier.pin_reports()[0].bytes_pinned == len(memory), copier.pin_reports()[0].refused
    size, count = copier.shape.block_bytes, 40
    slots = min(SLOTS, len(memory) // size)
    offsets = np.array(rng.sample(range(slots), count), np.uint64) * np.uint64(size)
    pages = rng.sample(range(cache.pages), count * pages_per_block)
    expected = block_bytes(cache, pages)
    np.frombuffer(view, np.uint8)[: slots * size] = 0xA5
    blocks = copier.blocks(pages)
    blocks.write_arena(view, offsets)
    blocks.drain()
    got = np.stack([np.frombuffer(view, np.uint8, size, offset) for offset in offsets.tolist()])
    assert np.array_equal(got, expected)
    taken = {int(offset) // size for offset in offsets}
    for slot in set(range(slots)) - taken:
        assert (np.frombuffer(view, np.uint8, size, slot * size) == 0xA5).all(), "a slot that is not ours has changed"

    targets = rng.sample(range(cache.pages), count * pages_per_block)
    before = snapshot(cache)
    blocks = copier.blocks(targets)
    blocks.read_arena(view, offsets, 0, 0, 2)
    blocks.read_arena(view, offsets, 0, 2, 3)
    blocks.drain()
    assert np.array_equal(block_bytes(cache, targets), expected)
    others = [page for page in range(cache.pages) if page not in targets]
    for layer, was in zip(cache.layers, before, strict=True):
        at = (slice(None), others) if cache.kind == "split" else (others,)
        assert torch.equal(layer.tensor[at].view(torch.int16), was[at].view(torch.int16)), "another page has changed"
    assert copier.stats().get("device_unpinned_bytes_total", 0) == 0
    assert guard.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_compiled_kernel_matches_torch_reference(layout: str, dtype: torch.dtype) -> None:
    from kvclient.device.triton_scatter import TritonScatter

    for pages_per_block, dim in ((1, 64), (3, 64), (1, 3)):
        shape = {"layers": 2, "pages": 60, "tokens": 5, "heads": 3, "dim": dim, "pages_per_block": pages_per_block}
        cache, other = (make_cache(layout, dtype=dtype, device="cuda", **shape) for _ in range(2))  # type: ignore[arg-type]
        ids = cache.check_pages(random.Random(1).sample(range(60), 12 * pages_per_block)).cuda()
        rows = torch.randint(0, 256, (12, cache.row_bytes), dtype=torch.uint8, device="cuda")
        TritonScatter(cache).to_pages(1, rows.unsqueeze(1), ids)
        TorchScatter(other).to_pages(1, rows.unsqueeze(1), ids)
        assert torch.equal(cache.layers[1].words(cache.word), other.layers[1].words(other.word))
        back = torch.zeros_like(rows)
        TritonScatter(cache).to_rows(1, ids, back.unsqueeze(1))
        assert torch.equal(back, rows)


@pytest.mark.parametrize("way", WAYS)
def test_load_layers_during_computation_are_ordered_by_events(memory: mmap.mmap, way: str) -> None:
    """The host never waits; each layer is read on the compute stream immediately after ``follow``, among matrix products."""
    cache = make_cache("flash_nhd", layers=16, pages=512, tokens=16, heads=8, dim=64, device="cuda")
    copier = make(way, cache)
    view = memoryview(memory)
    guard = copier.mapped(view)
    assert copier.wait_pinned(60)
    size, count = copier.shape.block_bytes, 200
    pages = random.Random(3).sample(range(512), count)
    offsets = np.random.default_rng(3).permutation(len(memory) // size)[:count].astype(np.uint64) * np.uint64(size)
    expected = [layer.tensor[:, pages].clone() for layer in cache.layers]
    source = copier.blocks(pages)
    source.write_arena(view, offsets)
    source.drain()
    for _ in range(5):
        for layer in cache.layers:
            layer.tensor.zero_()
        weights = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        blocks = copier.blocks(pages)
        blocks.read_arena(view, offsets, 0, 0, 16)
        seen = []
        for layer in range(16):
            weights = (weights @ weights).clamp_(-1, 1)
            blocks.wait_on_stream(layer)
            seen.append(cache.layers[layer].tensor[:, pages].clone())
        blocks.drain()
        torch.cuda.synchronize()
        for got, wanted in zip(seen, expected, strict=True):
            assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))
    assert guard.close()


def test_store_of_computed_pages_waits_for_computation(memory: mmap.mmap) -> None:
    cache = make_cache("flash_nhd", layers=4, pages=64, tokens=16, heads=8, dim=64, device="cuda")
    copier = DeviceCopier(cache)
    view = memoryview(memory)
    guard = copier.mapped(view)
    assert copier.wait_pinned(60)
    offsets = np.arange(64, dtype=np.uint64) * np.uint64(copier.shape.block_bytes)
    slow = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for number in range(3):
        for _ in range(20):
            slow = (slow @ slow).clamp_(-1, 1)
        for layer in cache.layers:
            layer.tensor.fill_(number + 1.0)  # after the products, on the current stream
        blocks = copier.blocks(range(64))
        blocks.write_arena(view, offsets)
        blocks.drain()
        stored = np.frombuffer(view, np.uint8, 64 * copier.shape.block_bytes)
        assert (torch.from_numpy(stored.copy()).view(torch.bfloat16) == number + 1.0).all()
        del stored
    assert guard.close()


def test_graph_capture_during_pinning_succeeds(memory: mmap.mmap) -> None:
    """Captures use the mode that restricts other threads most, like engines."""
    cache = make_cache("mla", layers=1, pages=8, tokens=16, dim=64, device="cuda")
    copier = DeviceCopier(cache, pin_chunk_bytes=1 << 20)
    view, number = memoryview(memory), torch.zeros(1, device="cuda")
    number.add_(0.0)
    torch.cuda.synchronize()
    guard = copier.mapped(view)
    done, captured = False, 0
    while not done:
        done = copier.pin_reports()[0].done
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            for _ in range(50):
                number.add_(1.0)
        graph.replay()
        captured += 1
        assert captured < 10_000
    torch.cuda.synchronize()
    assert number.item() == 50 * captured
    report = copier.pin_reports()[0]
    assert (report.bytes_pinned, report.refused) == (len(memory), "")
    assert guard.close()


def test_copy_streams_are_never_torch_streams(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[int] = []
    create = CudaDriver.stream

    def stream(driver: CudaDriver) -> int:
        handles.append(create(driver))
        return handles[-1]

    monkeypatch.setattr(CudaDriver, "stream", stream)
    cache = make_cache("mla", layers=1, pages=8, tokens=16, dim=64, device="cuda")
    copiers = [DeviceCopier(cache, pin=False) for _ in range(6)]
    for copier in copiers:
        blocks = copier.blocks(range(4))
        blocks.read_arena(memoryview(memory), np.arange(4, dtype=np.uint64) * np.uint64(copier.shape.block_bytes), 0, 0, 1)
        blocks.drain()
    assert len(set(handles)) == len(handles) == 2 * len(copiers), "one stream for copies and one for moves, at their first use"
    assert set(handles).isdisjoint(torch.cuda.Stream().cuda_stream for _ in range(64))


def test_unpinned_copies_are_correct_and_counted(memory: mmap.mmap) -> None:
    cache = make_cache("mla", layers=3, pages=64, tokens=16, dim=576, device="cuda")
    copier = DeviceCopier(cache, pin=False)
    view = memoryview(memory)
    guard = copier.mapped(view)
    offsets = np.arange(20, dtype=np.uint64) * np.uint64(copier.shape.block_bytes)
    expected = block_bytes(cache, range(20))
    blocks = copier.blocks(range(20))
    blocks.write_arena(view, offsets)
    blocks.drain()
    target = copier.blocks(range(40, 60))
    target.read_arena(view, offsets, 0, 0, 3)
    target.drain()
    assert np.array_equal(block_bytes(cache, range(40, 60)), expected)
    assert copier.stats()["device_unpinned_bytes_total"] == 2 * expected.nbytes
    assert guard.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checksums_of_pages_match_the_host(layout: str) -> None:
    from kvclient.device.triton_checksum import TritonChecksums

    cache = make_cache(layout, layers=3, pages=16, tokens=16, heads=4, dim=64, device="cuda")
    ids = cache.check_pages([5, 0, 9]).cuda()
    found = TritonChecksums(cache).of_pages(1, 2, ids).cpu().numpy().view(np.uint64)
    rows = torch.empty((3, 2, cache.row_bytes), dtype=torch.uint8, device="cuda")
    TorchScatter(cache).to_rows(1, ids, rows)
    expected = [[xxhash.xxh3_64_intdigest(row.numpy().tobytes()) for row in block] for block in rows.cpu()]
    assert found.tolist() == expected


@pytest.mark.parametrize("layout", ["flash_nhd", "mla"])
def test_int8_on_device_matches_host(layout: str) -> None:
    here = make_cache(layout, layers=1, pages=32, tokens=16, dim=64, seed=4)
    there = make_cache(layout, layers=1, pages=32, tokens=16, dim=64, seed=4, device="cuda")
    rows = torch.empty((32, here.row_bytes), dtype=torch.uint8)
    TorchScatter(here).to_rows(0, here.check_pages(range(32)), rows.unsqueeze(1))
    rows.view(torch.bfloat16)[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    rows[1] = 0
    one, other = (Int8Codec(cache, token_groups(layout, cache)) for cache in (here, there))
    coded, on_device = one.encode(rows), other.encode(rows.cuda())
    assert torch.equal(coded, on_device.cpu())
    assert torch.equal(other.encode(other.decode(on_device)), on_device)
    back, again = one.decode(coded).view(torch.bfloat16), other.decode(on_device).cpu().view(torch.bfloat16)
    assert bool(((back == again) | (torch.isnan(back) & torch.isnan(again))).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pages_per_block", [1, 4])
def test_pool_on_same_device_copies_without_host(layout: str, pages_per_block: int) -> None:
    from kvclient.call.execution import CallScope
    from kvclient.hbm import HbmPool
    from kvstore.core.buffers import DenseBlocks
    from kvstore.core.clock import MonotonicClock
    from kvstore.core.keys import KeyChain

    cache = make_cache(layout, layers=5, pages=256, tokens=16, heads=4, dim=64, pages_per_block=pages_per_block, device="cuda")
    copier = DeviceCopier(cache)
    spec = copier.spec("pool", 16 * pages_per_block)
    rng, count = random.Random(5), 30
    with HbmPool("cuda", capacity_bytes=64 << 20, demote=False) as pool:
        near = pool.attach(spec, lambda *_: False)
        keys = KeyChain(spec).keys(np.arange(count * spec.block_tokens, dtype=np.uint32))
        pages = rng.sample(range(256), count * pages_per_block)
        expected = block_bytes(cache, pages)
        slow = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        for end in (1, 2, count):  # after the computation
            slow = (slow @ slow).clamp_(-1, 1)
            near.insert(keys[:end], None, 0, copier.blocks(pages[: end * pages_per_block]).source(), None, checksums=False)
        rows = np.zeros((count, spec.layers, spec.layer_block_bytes), np.uint8)
        assert near.fetch(keys, DenseBlocks(rows), CallScope.after(60.0, MonotonicClock()), verify=False) == count
        assert np.array_equal(rows.reshape(count, -1), expected)
        target = rng.sample(range(256), count * pages_per_block)
        blocks = copier.blocks(target)
        assert near.fetch(keys, blocks, CallScope.after(60.0, MonotonicClock()), verify=False) == count
        assert np.array_equal(block_bytes(cache, target), expected)
        assert "device_loaded_bytes_total" not in copier.stats(), "bytes passed through host memory"
        assert "hbm_by_host_blocks_total" not in pool.stats()


@pytest.mark.parametrize("way", WAYS)
def test_client_load_from_real_node_fills_device(way: str) -> None:
    from kvclient import KVClient

    cache = make_cache("flash_hnd", layers=8, pages=128, tokens=16, heads=8, dim=64, device="cuda")
    copier = make(way, cache)
    with LocalCluster([NodeSpec("gpu", dram_bytes=256 << 20)]) as cluster:
        node = cluster.node("gpu").local_socket
        with KVClient.connect(cluster.metadata_address, copier.spec("gpu", 16), node=node, device=copier) as client:
            assert copier.wait_pinned(60)
            keys = client.keys(np.arange(50 * 16, dtype=np.uint32))
            expected = block_bytes(cache, range(50))
            assert client.store(keys, copier.blocks(range(50)), wait_visible=True).held_blocks == 50
            with client.start_load(client.lookup(keys), copier.blocks(range(64, 114)), verify="always") as handle:
                assert all(handle.wait_layer(layer) for layer in range(8))
                assert handle.result().hit_blocks == 50
            assert np.array_equal(block_bytes(cache, range(64, 114)), expected)
            assert copier.stats().get("device_unpinned_bytes_total", 0) == 0
    assert copier.pin_reports() == []


@pytest.mark.parametrize("layout", ["flash_nhd", "vllm_bhnc"])
def test_calibration_measures_every_strategy(layout: str) -> None:
    cache = make_cache(layout, layers=16, pages=512, tokens=16, heads=8, dim=64, device="cuda")
    before = snapshot(cache)
    copier = DeviceCopier(cache)
    choices = copier.calibrate()
    for direction, choice in choices.items():
        assert choice.source == "measured", (direction, choice.gap)
        print(direction, choice.strategy, {name: f"{rate / 1e9:.1f} GB/s" for name, rate in choice.rates.items()})
    assert copier.stats().get("device_trials_failed_total", 0) == 0
    for layer, was in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.tensor.view(torch.int16), was.view(torch.int16))
