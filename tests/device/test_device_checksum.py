"""Checksums by the kernel, in Triton's interpreter, held against the golden vectors, the xxhash library and the native kernel."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

pytest.importorskip("triton", reason="Triton is not installed: the kernel is NOT tested here")
if torch.cuda.is_available():
    pytest.skip("the kernel is compiled on this machine", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is first imported

import triton.language as tl
from caches import ANY_GROUPS, LAYOUTS, block_bytes, make_cache
from deferred import DeferredDevice, DeferredStream, bytes_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kvclient.device import triton_checksum
from kvclient.device.copier import DeviceCopier
from kvclient.device.layouts import PagedCache
from kvclient.device.triton_checksum import LEAST_BYTES, PageHasher, TritonChecksums
from kvclient.memory.arena import ArenaMapping, ClientArena
from kvclient.memory.shared_mapping import map_file
from kvstore.core.checksum import block_checksums
from kvstore.core.errors import Internal
from kvstore.observe.limited_log import LimitedLog
from samples import sample

GOLDEN = Path(__file__).parents[1] / "core/golden/checksums.json"
SHORT = [1, 3, 8, 16, 128, 240]
EDGES = [241, 255, 256, 257]
LONG = [512, 1023, 1024, 1025, 1088, 1089, 2047, 2048, 2049, 4096, 65536, 65537, 1 << 20]


def hashed(content: np.ndarray, offsets: list[int], layers: int, length: int, *, wide: bool) -> np.ndarray:
    kernel = TritonChecksums(make_cache("mla"))
    memory = torch.from_numpy(content)
    found = kernel.of_memory(memory, torch.tensor(offsets, dtype=torch.int64), layers, length, wide=wide)
    return found.numpy().view(np.uint64)


@pytest.fixture
def _fast_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter adds with numpy only if it recognises Triton's own sum."""
    monkeypatch.setattr(triton_checksum, "_plus", vars(tl.standard)["_sum_combine"])


@pytest.mark.usefixtures("_fast_sums")
@pytest.mark.parametrize("length", [*EDGES, *LONG])
def test_checksum_of_any_length_matches_xxhash(length: int) -> None:
    content = bytes_of(length + 16, length)
    wides = [False] if length > 65_537 else [False, True] if length % 8 == 0 else [False]
    for wide in [True] if length == 1 << 20 else wides:
        at = 8 if wide else 3
        expected = xxhash.xxh3_64_intdigest(content[at : at + length].tobytes())
        assert hashed(content, [at], 1, length, wide=wide).tolist() == [[expected]]


def test_checksum_is_summed_by_the_kernel_itself() -> None:
    content = bytes_of(1089, 1)
    assert hashed(content, [0], 1, 1089, wide=False).tolist() == [[xxhash.xxh3_64_intdigest(content.tobytes())]]


@pytest.mark.usefixtures("_fast_sums")
def test_checksums_match_golden_vectors() -> None:
    vectors = json.loads(GOLDEN.read_text(encoding="utf-8"))["vectors"]
    most = sample(65_536, 1 << 20)
    long = [vector for vector in vectors if LEAST_BYTES <= vector["layer_block_bytes"] <= most]
    assert max(vector["layer_block_bytes"] for vector in long) == most
    for vector in long:
        layers, length = vector["layers"], vector["layer_block_bytes"]
        numbers = np.arange(layers * length)
        content = ((numbers * 31 + numbers // 256) % 256).astype(np.uint8)
        found = hashed(content, [0], layers, length, wide=not length % 8)
        assert found.astype("<u8").tobytes().hex() == vector["checksums"]


@settings(max_examples=12)
@given(
    layout=st.sampled_from(LAYOUTS),
    pages_per_block=st.sampled_from([1, 2]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]),
    dims=st.tuples(st.sampled_from([16, 31]), st.integers(1, 2), st.sampled_from([16, 20, 33])),
    seed=st.integers(0, 10**6),
)
def test_checksums_of_pages_match_those_of_blocks(
    layout: str, pages_per_block: int, dtype: torch.dtype, dims: tuple[int, int, int], seed: int
) -> None:
    rng = random.Random(seed)
    tokens, heads, dim = dims
    cache = make_cache(
        layout, layers=3, tokens=tokens, heads=heads, dim=dim, dtype=dtype, pages_per_block=pages_per_block, seed=seed
    )
    count, layers = rng.randint(0, 3), rng.randint(1, 3)
    first = rng.randint(0, 3 - layers)
    pages = rng.sample(range(cache.pages), count * pages_per_block)
    found = TritonChecksums(cache).of_pages(first, layers, cache.check_pages(pages)).numpy().view(np.uint64)
    rows = block_bytes(cache, pages).reshape(count, 3, -1)[:, first : first + layers] if count else np.empty((0, layers, 1))
    expected = [[xxhash.xxh3_64_intdigest(row.tobytes()) for row in block] for block in rows]
    assert found.tolist() == expected


# ---- copies ----
class Bed:
    """Pages on a late device that computes checksums, and a client's mapping of an arena."""

    def __init__(self, seed: int, cache: PagedCache | None = None, **choices: object) -> None:
        self.device = DeferredDevice(seed)
        self.device.memory = torch.device("cuda", 0)
        self.cache = cache or make_cache("flash_nhd", layers=3, tokens=4, heads=2, dim=20, seed=seed)
        self.copier = DeviceCopier(self.cache, device=self.device, pin=False, **choices)  # type: ignore[arg-type]
        size = self.copier.shape.block_bytes
        self.fd = os.memfd_create("test-checksum")
        os.ftruncate(self.fd, 8 * size)
        ours, self.theirs = socket.socketpair()
        self.mapping = ArenaMapping(ours, map_file(self.fd, 8 * size), 8 * size)
        self.arena = ClientArena(self.mapping, map_ahead=False, pinner=self.copier)
        self.offsets = np.array([5, 0, 3], np.uint64) * np.uint64(size)

    def close(self) -> None:
        self.device.run_all()
        self.arena.close()
        self.theirs.close()
        os.close(self.fd)


def digests(rows: np.ndarray, layers: int) -> list[list[int]]:
    return [[xxhash.xxh3_64_intdigest(row.tobytes()) for row in block.reshape(layers, -1)] for block in rows]


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Calls that hash blocks in the arena on the host."""
    calls: list[object] = []

    def note(*arguments: Any) -> Any:
        calls.append(len(calls))  # not the blocks: views keep the arena mapped
        return block_checksums(*arguments)

    monkeypatch.setattr("kvclient.memory.arena.block_checksums", note)
    return calls


@pytest.mark.usefixtures("_fast_sums")
@pytest.mark.parametrize("seed", range(3))
def test_store_checksums_are_computed_on_the_device(seed: int, on_host: list[object]) -> None:
    bed = Bed(seed)
    expected = digests(block_bytes(bed.cache, [4, 1, 7]), 3)
    assert bed.arena.copy_in(bed.copier.blocks([4, 1, 7]), bed.offsets).tolist() == expected
    assert bed.arena.copy_in(bed.copier.blocks([9, 1, 7, 4]).pick([3, 1, 2]), bed.offsets).tolist() == expected
    assert on_host == []
    bed.close()


@pytest.mark.usefixtures("_fast_sums")
@pytest.mark.parametrize("seed", range(3))
def test_load_with_bytes_changed_by_dma_is_a_miss(seed: int, on_host: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena is sound, and a copy brings another byte: only checksums of the pages can find that."""
    bed = Bed(seed)
    expected = bed.arena.copy_in(bed.copier.blocks([4, 1, 7]), bed.offsets)
    target = bed.copier.blocks([2, 8, 5])
    assert bed.arena.copy_out(bed.offsets, target, 0, 0, 3, 1, expected).tolist() == [True] * 3
    run = DeferredStream.run

    def change(stream: DeferredStream, work: Callable[[], None]) -> None:
        def changed() -> None:
            work()
            bed.cache.layers[1].tensor[0, 8, 0, 0, 0] += 1

        run(stream, changed)

    with monkeypatch.context() as patch:
        patch.setattr(DeferredStream, "run", change)
        target.read_arena(bed.mapping.view, bed.offsets, 0, 0, 3)
    pending = target.begin_checksums(0, 3, 0, 3)
    assert pending is not None
    assert (pending.result() == expected).all(axis=1).tolist() == [True, False, True]
    one = target.begin_checksums(1, 2, 2, 1)
    assert one is not None
    assert one.result().tolist() == expected[1:, 2:].tolist()
    assert on_host == []
    target.drain()
    bed.close()


@pytest.mark.parametrize("why", ["off", "int8", "wrong", "fails", "rejected", "asleep"])
def test_checksums_fall_back_to_the_host(why: str, on_host: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    choices: dict[str, object] = {"off": {"checksums": False}, "int8": {"int8": ANY_GROUPS}}.get(why, {})
    if why in {"wrong", "fails"}:

        def broken(*_: object) -> torch.Tensor:
            if why == "fails":
                raise RuntimeError("no compiler")
            return torch.zeros((1, 1), dtype=torch.int64)

        monkeypatch.setattr(TritonChecksums, "of_pages", broken)
    bed = Bed(1, **choices)
    if why == "rejected":

        def reject(*_: object) -> None:
            raise Internal("the CUDA device rejects work")

        monkeypatch.setattr(PageHasher, "begin", reject)
    buffer = bed.copier.blocks([4, 1, 7])
    if why == "asleep":
        bed.copier.suspend(10)
        assert buffer.begin_checksums(0, 3, 0, 3) is None
        bed.copier.resume()
    else:
        found = bed.arena.copy_in(buffer, bed.offsets)
        assert len(on_host) == 1
        stored = [os.pread(bed.fd, bed.copier.shape.block_bytes, at) for at in bed.offsets.tolist()]
        assert found.tolist() == digests(np.stack([np.frombuffer(block, np.uint8) for block in stored]), 3)
    counted = bed.copier.stats().get("device_checksums_by_host_total", 0)
    assert counted == (why in {"wrong", "fails", "rejected"})
    bed.close()


@pytest.mark.parametrize("length", SHORT)
def test_checksums_of_short_layer_blocks_are_by_the_host(length: int, on_host: list[object]) -> None:
    bed = Bed(1, make_cache("mla", tokens=1, dim=length, dtype=torch.uint8))
    assert not bed.copier.hashes
    expected = digests(block_bytes(bed.cache, [4, 1, 7]), 3)
    assert bed.arena.copy_in(bed.copier.blocks([4, 1, 7]), bed.offsets).tolist() == expected
    assert len(on_host) == 1
    assert "device_checksums_by_host_total" not in bed.copier.stats()
    bed.close()


def test_checksums_in_other_memory_are_tried_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The landing ring hashes contiguous memory. Its kernel is compared with the host before any copy, like that of pages."""
    monkeypatch.setattr(TritonChecksums, "of_memory", lambda *_, **__: torch.zeros((1, 1), dtype=torch.int64))
    bed = Bed(1)
    assert not bed.copier.hashes
    assert bed.copier.stats()["device_checksums_by_host_total"] == 1
    bed.close()


@pytest.mark.usefixtures("_fast_sums")
def test_suspend_waits_for_checksums() -> None:
    bed = Bed(1)
    pending = bed.copier.blocks([4, 1]).begin_checksums(0, 2, 0, 3)
    assert pending is not None
    bed.copier.suspend(10)
    assert not any(stream.work for stream in bed.device.streams), "a kernel reads pages that are unmapped"
    bed.copier.resume()
    assert pending.result().tolist() == digests(block_bytes(bed.cache, [4, 1]), 3)
    bed.close()


@pytest.mark.usefixtures("_fast_sums")
def test_suspend_waits_for_a_thread_that_begins_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(1)
    entered, go_on = threading.Event(), threading.Event()
    begin = PageHasher.begin

    def hold(*given: Any) -> Any:
        entered.set()
        assert go_on.wait(30)
        return begin(*given)

    monkeypatch.setattr(PageHasher, "begin", hold)
    with ThreadPoolExecutor(1) as threads:
        pending = threads.submit(bed.copier.blocks([4, 1]).begin_checksums, 0, 2, 0, 3)
        try:
            assert entered.wait(30)
            with pytest.raises(Internal, match="must stay mapped"):
                bed.copier.suspend(0.05)
        finally:
            go_on.set()
        assert pending.result() is not None
    bed.copier.suspend(10)
    assert not any(stream.work for stream in bed.device.streams)
    bed.close()


def test_failed_checksums_are_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(*_: object) -> None:
        raise Internal("the CUDA device rejects work")

    bed = Bed(1)
    monkeypatch.setattr(PageHasher, "begin", reject)
    monkeypatch.setattr("kvclient.device.copier._limited", LimitedLog(logging.getLogger("kvclient.device.copier")))
    for _ in range(3):
        assert bed.copier.blocks([4]).begin_checksums(0, 1, 0, 3) is None
    lines = [record.getMessage() for record in caplog.records if "checksums failed" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("device checksums failed: cpu (error=the CUDA device rejects work)")
    assert bed.copier.stats()["device_checksums_by_host_total"] == 3
    bed.close()


@pytest.mark.usefixtures("_fast_sums")
def test_checksums_of_a_hung_device_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvclient.device.copier.DRAIN_S", 0.05)
    bed = Bed(2)
    pending = bed.copier.blocks([4, 1]).begin_checksums(0, 2, 0, 3)
    assert pending is not None
    bed.device.paused = True
    with pytest.raises(Internal, match="did not end"):
        pending.result()
    assert not bed.copier.hashes
    assert bed.copier.blocks([4]).begin_checksums(0, 1, 0, 3) is None, "the device is lost"
    bed.device.paused = False
    bed.close()
