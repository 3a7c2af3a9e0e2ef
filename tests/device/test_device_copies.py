"""Copies between pages and host memory, held against the oracle: every way, layout and direction, on streams that run late."""

from __future__ import annotations

import contextlib
import itertools
import operator
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from caches import LAYOUTS, block_bytes, make_cache, snapshot
from deferred import DeferredDevice, DeferredStream, FakePinning, bytes_of
from hypothesis import given
from hypothesis import strategies as st

from kvclient import InvalidArgument
from kvclient.device.copier import DeviceCopier
from kvclient.device.copy_plan import layer_groups, staging_plan
from kvclient.device.copy_strategies import CopyRequest, HostMemory, StagedCopy
from kvclient.device.page_scatter import TorchScatter
from kvclient.device.streams import CpuDevice, Event
from kvclient.memory.device_buffer import DeviceBuffer
from kvstore.core.errors import Internal

WAYS = ("staged", "batched")


class Arena:
    """Host memory with slots for blocks at an arbitrary offset."""

    def __init__(self, copier: DeviceCopier, slots: int, seed: int) -> None:
        size = copier.shape.block_bytes
        self.size = size
        self.memory = bytes_of(slots * size + 3 * 4096, seed)
        start = -self.memory.ctypes.data % 4096  # aligned like mappings
        self.array = self.memory[start : start + slots * size + 4096]
        self.view = memoryview(self.array)
        self.slots = slots

    def offsets(self, count: int, rng: random.Random) -> np.ndarray:
        """Slots, some of them neighbours."""
        chosen = rng.sample(range(self.slots), count)
        if rng.random() < 0.5:
            chosen.sort()
        return np.array(chosen, np.uint64) * np.uint64(self.size)

    def block(self, offset: int) -> np.ndarray:
        return self.array[int(offset) : int(offset) + self.size]


def same_bits(some: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(tensor.reshape(-1, 1).contiguous().view(torch.uint8) for tensor in (some, other)))


@given(
    layout=st.sampled_from(LAYOUTS),
    way=st.sampled_from(WAYS),
    pages_per_block=st.sampled_from([1, 2, 3]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]),
    dims=st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 3, 8])),
    layers=st.integers(1, 4),
    staging=st.sampled_from([1, 700, 1 << 20]),
    pinned=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_loads_and_stores_match_oracle(
    layout: str,
    way: str,
    pages_per_block: int,
    dtype: torch.dtype,
    dims: tuple[int, int, int],
    layers: int,
    staging: int,
    pinned: bool,
    seed: int,
) -> None:
    rng = random.Random(seed)
    tokens, heads, dim = dims
    cache = make_cache(
        layout, layers=layers, tokens=tokens, heads=heads, dim=dim, dtype=dtype, pages_per_block=pages_per_block, seed=seed
    )
    pinning = FakePinning() if pinned else None
    device = DeferredDevice(seed, pinning)
    copier = DeviceCopier(cache, strategy=way, staging_bytes=staging, pin_chunk_bytes=4096, device=device)  # type: ignore[arg-type]
    count = rng.randint(0, cache.pages // pages_per_block)
    page_ids = rng.sample(range(cache.pages), count * pages_per_block)
    arena = Arena(copier, 2 * cache.pages, seed)
    guard = copier.mapped(arena.view)
    assert copier.wait_pinned(10)

    # out of the pages
    expected = block_bytes(cache, page_ids)
    offsets = arena.offsets(count, rng)
    before = arena.array.copy()
    blocks = copier.blocks(page_ids)
    blocks.write_arena(arena.view, offsets)
    blocks.drain()
    for position, offset in enumerate(offsets.tolist()):
        assert np.array_equal(arena.block(offset), expected[position])
        before[offset : offset + arena.size] = expected[position]
    assert np.array_equal(arena.array, before), "bytes beside the slots have changed"

    # into other pages, in pieces, with the layers in groups
    targets = rng.sample(range(cache.pages), count * pages_per_block)
    untouched = snapshot(cache)
    target = copier.blocks(targets)
    cuts = sorted(rng.sample(range(1, layers), rng.randint(0, layers - 1)))
    for first, last in zip([0, *cuts], [*cuts, layers], strict=True):
        half = count // 2
        target.read_arena(arena.view, offsets[:half], 0, first, last - first)
        target.read_arena(arena.view, offsets[half:], half, first, last - first)
    for layer in range(layers):
        target.wait_on_stream(layer)
        if count:
            row = cache.row_bytes
            got = block_bytes(cache, targets)[:, layer * row : (layer + 1) * row]
            assert np.array_equal(got, expected[:, layer * row : (layer + 1) * row]), "a layer is followed before it is there"
    target.drain()
    others = [page for page in range(cache.pages) if page not in targets]
    for layer, was in zip(cache.layers, untouched, strict=True):
        at = (slice(None), others) if cache.kind == "split" else (others,)
        assert same_bits(layer.tensor[at], was[at]), "another page has changed"
    device.run_all()
    assert guard.close()
    assert pinning is None or not pinning.pinned


@given(seed=st.integers(0, 10**6), pages_per_block=st.sampled_from([1, 2]), layout=st.sampled_from(LAYOUTS))
def test_host_bytes_reach_pages_after_landed(seed: int, pages_per_block: int, layout: str) -> None:
    rng = random.Random(seed)
    cache = make_cache(layout, pages_per_block=pages_per_block, seed=seed)
    copier = DeviceCopier(cache, strategy=rng.choice(WAYS), device=DeferredDevice(seed))  # type: ignore[arg-type]
    count, layers, row = 5, copier.shape.layers, copier.shape.layer_block_bytes
    pages = rng.sample(range(cache.pages), count * pages_per_block)
    arena = Arena(copier, count, seed)
    target = copier.blocks(pages)
    wanted = bytes_of(count * copier.shape.block_bytes, seed + 1).reshape(count, -1)
    by_host = sorted(rng.sample(range(count), 3))
    other = [block for block in range(count) if block not in by_host]
    for block in by_host:  # a first attempt delivers garbage and is given up
        target.segments(block, 0, layers)[0][:] = bytes(layers * row)
    target.host_copy_ready(np.array(by_host[:1]), 0, 1)
    for block in other:  # a load may request memory for a block that the arena then delivers
        target.segments(block, 0, layers)
    for block in other:
        arena.array[block * arena.size : (block + 1) * arena.size] = wanted[block]
        target.read_arena(arena.view, np.array([block * arena.size], np.uint64), block, 0, layers)
    picked = target.pick(by_host)
    for layer in range(layers):
        for at, block in enumerate(by_host):
            picked.segments(at, layer, 1)[0][:] = wanted[block, layer * row : (layer + 1) * row].tobytes()
        if rng.random() < 0.7:
            picked.host_copy_ready(np.arange(3), layer, 1)
    target.host_copy_ready(np.arange(count), 0, layers)
    target.drain()
    assert np.array_equal(block_bytes(cache, pages), wanted)


def test_source_segments_return_page_bytes() -> None:
    cache = make_cache("flash_nhd")
    copier = DeviceCopier(cache, device=DeferredDevice())
    blocks = copier.blocks([3, 1, 7]).source()
    expected = block_bytes(cache, [3, 1, 7])
    for block in range(3):
        assert bytes(blocks.segments(block, 0, 3)[0]) == expected[block].tobytes()
    picked = blocks.pick([2, 0])
    assert bytes(picked.segments(0, 1, 1)[0]) == expected[2].reshape(3, -1)[1].tobytes()
    with pytest.raises(InvalidArgument, match="a source"):
        blocks.read_arena(memoryview(bytearray(10)), np.zeros(1, np.uint64), 0, 0, 1)


def test_store_of_one_layer_writes_its_part_of_slots() -> None:
    cache = make_cache("flash_hnd")
    copier = DeviceCopier(cache, device=DeferredDevice(), strategy="staged")
    arena = Arena(copier, 4, 0)
    expected = block_bytes(cache, [5, 2])
    offsets = np.array([3, 2], np.uint64) * np.uint64(arena.size)
    for layer in range(3):
        rows = copier.blocks([5, 2], layer=layer)
        assert rows.shape.layers == 1
        rows.write_arena(arena.view, offsets + np.uint64(layer * cache.row_bytes))
        rows.drain()
    assert np.array_equal(arena.block(int(offsets[0])), expected[0])
    assert np.array_equal(arena.block(int(offsets[1])), expected[1])


@given(
    blocks=st.integers(0, 3000),
    layers=st.integers(1, 100),
    row=st.sampled_from([1, 700, 8192, 65536, 1 << 20]),
    space=st.integers(1, 1 << 26),
)
def test_staging_plan_covers_all_in_few_steps(blocks: int, layers: int, row: int, space: int) -> None:
    space = max(space, row)
    steps = list(itertools.islice(staging_plan(blocks, layers, row, space), 20_000))
    assert all(len(some) * len(group) * row <= space for group, some in steps)
    firsts = [group.start for group, _ in steps]
    assert firsts == sorted(firsts), "layers in order"
    if len(steps) < 20_000:
        assert sum(len(some) * len(group) for group, some in steps) == blocks * layers
        if 2 * row <= space:  # each step of a group but its last fills more than half of the buffer
            assert len(steps) <= 4 * (blocks * layers * row // space) + 2 * layers + 1
    if 0 < blocks * layers * row <= space:
        assert len(steps) == 1


@given(layers=st.integers(1, 300), per_layer=st.integers(0, 5000), enough=st.integers(1, 5000))
def test_layer_groups_are_few_and_in_order(layers: int, per_layer: int, enough: int) -> None:
    groups = layer_groups(layers, per_layer, enough)
    assert [layer for group in groups for layer in group] == list(range(layers))
    assert len(groups) <= 32
    assert all(len(group) * per_layer >= enough for group in groups[:-1] if per_layer)


def test_device_failure_waits_for_begun_copies() -> None:
    cache = make_cache("flash_nhd", pages=8)
    device = DeferredDevice()
    copier = DeviceCopier(cache, strategy="staged", staging_bytes=1, device=device)
    arena = Arena(copier, 8, 0)
    device.fail_after = 5
    blocks = copier.blocks(range(8))
    with pytest.raises(Internal, match="device failed"):
        blocks.read_arena(arena.view, np.arange(8, dtype=np.uint64) * np.uint64(arena.size), 0, 0, 3)
    blocks.drain()
    assert not any(stream.work for stream in device.streams)
    assert copier.stats()["device_errors_total"] == 1


def begin(blocks: DeviceBuffer, arena: Arena, offsets: np.ndarray, *, store: bool) -> None:
    if store:
        blocks.write_arena(arena.view, offsets)
    else:
        blocks.read_arena(arena.view, offsets, 0, 0, 3)


@pytest.mark.parametrize("store", [False, True])
def test_staging_buffer_of_failed_copies_is_not_reused_early(store: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, ahead in itertools.product(range(2, 11), (0, -1)):  # one of the streams is always ahead of the other
        rng = random.Random(seed)
        cache = make_cache("flash_nhd", pages=12, seed=seed)
        device = DeferredDevice()
        monkeypatch.setattr(device.random, "choice", operator.itemgetter(ahead))
        copier = DeviceCopier(cache, strategy="staged", staging_bytes=3 * cache.row_bytes, device=device)
        arena = Arena(copier, 24, seed)
        before, pages = arena.array.copy(), block_bytes(cache, range(12))
        offsets = np.array(rng.sample(range(0, 24, 2), 12), np.uint64) * np.uint64(arena.size)  # never two at once
        first, second = copier.blocks(range(6)), copier.blocks(range(6, 12))
        device.work_after = seed
        with pytest.raises(Internal, match="rejects work"):
            begin(first, arena, offsets[:6], store=store)
        device.work_after = None
        begin(second, arena, offsets[6:], store=store)
        second.drain()
        device.run_all()
        whole = [before[int(at) : int(at) + arena.size] for at in offsets]
        after = block_bytes(cache, range(12))
        row = cache.row_bytes
        for block in range(12):
            got, was, new = (
                (arena.block(offsets[block]), whole[block], pages[block]) if store else (after[block], pages[block], whole[block])
            )
            for layer in range(3):
                here = slice(layer * row, (layer + 1) * row)
                moved = np.array_equal(got[here], new[here])
                assert moved or (block < 6 and np.array_equal(got[here], was[here])), "bytes of another copy"


def test_pages_of_copies_without_known_end_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device accepted copies and rejected the event after them: zeros cannot be ordered after these copies."""
    device = DeferredDevice(1)
    copier = DeviceCopier(make_cache("flash_nhd"), device=device)
    arena = Arena(copier, 2, 1)

    def reject(_: DeferredStream) -> None:
        raise Internal("the CUDA device rejects work")

    blocks = copier.blocks([3, 4])
    with monkeypatch.context() as patch:
        patch.setattr(DeferredStream, "record", reject)
        with pytest.raises(Internal, match="rejects work"):
            begin(blocks, arena, np.array([0, 1]) * arena.size, store=False)
    with pytest.raises(Internal, match="unknown"):
        blocks.drain()
    with pytest.raises(Internal, match="restart the engine"):
        copier.clear([3, 4])
    device.run_all()


@pytest.mark.parametrize("taken", [0, 2])
def test_unsupported_batched_copies_fall_back_to_staged(taken: int, caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache("flash_nhd")
    device = DeferredDevice(taken)
    copier = DeviceCopier(cache, device=device)
    assert copier.strategy == "batched"
    arena = Arena(copier, 12, 3)
    offsets = np.arange(12, dtype=np.uint64) * np.uint64(arena.size)
    device.batches_left = taken
    for _ in range(2):
        target = copier.blocks(range(12))
        target.read_arena(arena.view, offsets, 0, 0, 3)
        for layer in range(3):
            target.wait_on_stream(layer)
        target.drain()
        expected = np.stack([arena.block(offset) for offset in offsets])
        assert np.array_equal(block_bytes(cache, range(12)), expected)
        arena.array[:] = bytes_of(len(arena.array), 4)
    source = copier.blocks(range(12))
    source.write_arena(arena.view, offsets)
    source.drain()
    assert np.array_equal(np.stack([arena.block(offset) for offset in offsets]), block_bytes(cache, range(12)))
    stats = copier.stats()
    assert (copier.strategy, stats["device_batch_refused_total"], stats.get("device_errors_total", 0)) == ("staged", 1, 0)
    assert sum("batched copies rejected" in record.message for record in caplog.records) == 1


def test_hung_copies_lose_device_and_keep_arena_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvclient.device.copier.DRAIN_S", 0.05)
    device = DeferredDevice()
    device.step = lambda: False  # type: ignore[method-assign]
    copier = DeviceCopier(make_cache("mla"), device=device)
    arena = Arena(copier, 2, 0)
    guard = copier.mapped(arena.view)
    blocks = copier.blocks([0])
    blocks.read_arena(arena.view, np.zeros(1, np.uint64), 0, 0, 3)
    with pytest.raises(Internal, match="did not end in time"):
        blocks.drain()
    assert not guard.close()
    with pytest.raises(Internal, match="lost"):
        copier.blocks([1]).read_arena(arena.view, np.zeros(1, np.uint64), 0, 0, 3)
    assert copier.stats()["device_lost_total"] == 1


def test_failed_copies_fail_every_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planned load drains once per part: the end of copies that failed is unknown for every part."""
    monkeypatch.setattr("kvclient.device.copier.DRAIN_S", 0.05)
    device = DeferredDevice()
    copier = DeviceCopier(make_cache("mla"), device=device)
    arena = Arena(copier, 2, 0)
    blocks = copier.blocks([0])
    device.paused = True
    blocks.read_arena(arena.view, np.zeros(1, np.uint64), 0, 0, 3)
    for _ in range(2):
        with pytest.raises(Internal, match="did not end in time"):
            blocks.drain()
    device.paused = False
    device.run_all()
    blocks.drain()
    assert not blocks.begun()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("fails_too", [True, False])
def test_copies_without_an_event_keep_arena_mapped(
    way: str, direction: str, fails_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device accepts copies, but no event: their end is unknown, so the arena and its slots are never reused."""
    device = DeferredDevice(1)
    copier = DeviceCopier(make_cache("mla"), strategy=way, device=device)  # type: ignore[arg-type]
    arena = Arena(copier, 2, 0)
    guard = copier.mapped(arena.view)

    def refuse(_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("deferred.DeferredStream.record", refuse)
    if fails_too:
        monkeypatch.setattr("deferred.DeferredStream.copy_batch", lambda *_: refuse(None))
    blocks = copier.blocks([0, 1])
    offsets = np.array([0, 1], np.uint64) * np.uint64(arena.size)
    with contextlib.suppress(Internal):
        if direction == "load":
            blocks.read_arena(arena.view, offsets, 0, 0, 3)
        else:
            blocks.write_arena(arena.view, offsets)
    with pytest.raises(Internal, match="unknown"):
        blocks.drain()
    monkeypatch.undo()
    with pytest.raises(Internal, match="lost"):
        blocks.write_arena(arena.view, offsets)
    device.run_all()
    assert not guard.close()


def test_staging_buffer_without_an_event_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = DeferredDevice(1)
    strategy = StagedCopy(device, cache := make_cache("mla"), TorchScatter(cache), None, 1 << 20)
    memory = bytes_of(4 * cache.row_bytes, 1)
    base = memory.ctypes.data
    request = CopyRequest(
        HostMemory(base, None), np.array([base]), 3 * cache.row_bytes, cache.check_pages([0]), 0, 3, 0, device.mark()
    )
    records: list[None] = []

    def refuse_second(stream: DeferredStream) -> object:
        records.append(None)
        if len(records) == 2:
            raise Internal("the CUDA device rejects work")
        return record(stream)

    record = DeferredStream.record
    monkeypatch.setattr("deferred.DeferredStream.record", refuse_second)
    with pytest.raises(Internal, match="rejects work"):
        strategy.store(request)
    strategy.store(request)  # the other buffer
    with pytest.raises(Internal, match="staging buffer is lost"):
        strategy.store(request)


def test_addresses_outside_arena_or_cache_are_rejected() -> None:
    copier = DeviceCopier(make_cache("mla", pages_per_block=2), device=DeferredDevice())
    arena = Arena(copier, 2, 0)
    blocks = copier.blocks([0, 1])
    for offset in (len(arena.view), len(arena.view) - copier.shape.block_bytes + 1, 2**63 + 5):
        with pytest.raises(InvalidArgument, match="outside the arena"):
            blocks.read_arena(arena.view, np.array([offset], np.uint64), 0, 0, 3)
    with pytest.raises(InvalidArgument, match="layers out of range"):
        blocks.read_arena(arena.view, np.zeros(1, np.uint64), 0, 2, 2)
    for pages, message in (
        ([0, 12], "page out of range"),
        ([-1, 0], "page out of range"),
        ([3, 3], "twice"),
        ([1], "multiple of pages_per_block"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            copier.blocks(pages)
    for layer in (3, -1, 1.5, True, "0"):
        with pytest.raises(InvalidArgument, match="layer out of range"):
            copier.blocks([0, 1], layer=layer)  # type: ignore[arg-type]


# ---- pieces ----
@given(way=st.sampled_from(WAYS), seed=st.integers(0, 10**6))
def test_drain_of_a_piece_waits_for_that_piece(way: str, seed: int) -> None:
    rng = random.Random(seed)
    cache = make_cache("flash_nhd", seed=seed)
    copier = DeviceCopier(cache, strategy=way, staging_bytes=700, device=DeferredDevice(seed))  # type: ignore[arg-type]
    arena, count = Arena(copier, 24, seed), 9
    page_ids, offsets = rng.sample(range(cache.pages), count), arena.offsets(count, rng)
    blocks = copier.blocks(page_ids)
    cuts = [0, *sorted(rng.sample(range(1, count), 3)), count]
    pieces = []
    for first, last in itertools.pairwise(cuts):
        blocks.read_arena(arena.view, offsets[first:last], first, 0, len(cache.layers))
        pieces.append((last, blocks.begun()))
    for last, begun in pieces:
        blocks.drain(begun)
        got = block_bytes(cache, page_ids[:last])
        assert all(np.array_equal(got[at], arena.block(offsets[at])) for at in range(last))
    assert not blocks.begun()


def test_drain_beside_another_drain_waits_too() -> None:
    """Parts of a planned load share a buffer: none may return while another one still waits for their copies."""
    cache, device = make_cache("flash_nhd"), DeferredDevice()
    copier = DeviceCopier(cache, device=device)
    arena = Arena(copier, 4, 0)
    blocks = copier.blocks([0, 1])
    device.paused = True
    blocks.read_arena(arena.view, arena.offsets(2, random.Random(0)), 0, 0, len(cache.layers))
    waiting, wait = threading.Semaphore(0), copier.wait

    def watched(events: Sequence[Event]) -> None:
        if events:
            waiting.release()
        wait(events)

    copier.wait = watched  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        drains = [pool.submit(blocks.drain) for _ in range(2)]
        both_wait = [waiting.acquire(timeout=5) for _ in drains]
        device.paused = False
        for drain in drains:
            drain.result()
    assert both_wait == [True, True]


def test_cpu_work_computes_in_the_calling_thread_alone() -> None:
    """The engine computes on the other processors. The engine's own number of threads does not change."""
    before, seen = torch.get_num_threads(), []

    def work() -> None:
        seen.append(torch.get_num_threads())
        raise ValueError("copy")

    stream = CpuDevice().stream()
    with pytest.raises(ValueError, match="copy"):
        stream.run(work)
    assert (seen, torch.get_num_threads()) == ([1], before)
