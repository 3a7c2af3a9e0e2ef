"""The kernel in Triton's interpreter, held against the torch reference. With a GPU, ``test_device_gpu`` runs it there."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (it is for x86-64 Linux alone): the kernel is NOT tested here")
if torch.cuda.is_available():
    pytest.skip("the kernel is compiled on this machine: test_device_gpu tests it", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is first imported

from caches import LAYOUTS, block_bytes, make_cache, snapshot
from deferred import DeferredDevice, bytes_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kvclient import InvalidArgument
from kvclient.device.copier import DeviceCopier
from kvclient.device.page_scatter import TorchScatter, try_out
from kvclient.device.triton_scatter import PIECE_WORDS, TritonScatter


@settings(max_examples=30)
@given(
    layout=st.sampled_from(LAYOUTS),
    pages_per_block=st.sampled_from([1, 2]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]),
    dims=st.tuples(st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 3, 8])),
    pad=st.integers(0, 9),
    seed=st.integers(0, 10**6),
)
def test_triton_rows_match_torch_reference(
    layout: str, pages_per_block: int, dtype: torch.dtype, dims: tuple[int, int, int], pad: int, seed: int
) -> None:
    rng = random.Random(seed)
    tokens, heads, dim = dims
    cache, other = (
        make_cache(layout, layers=2, tokens=tokens, heads=heads, dim=dim, dtype=dtype, pages_per_block=pages_per_block, seed=seed)
        for _ in range(2)
    )
    count, layers = rng.randint(0, 5), rng.randint(1, 2)
    first = rng.randint(0, 2 - layers)
    ids = cache.check_pages(rng.sample(range(cache.pages), count * pages_per_block))
    pitch = cache.row_bytes + pad
    drawn = torch.from_numpy(bytes_of(count * layers * pitch, seed)).view(count, layers, pitch)
    rows = drawn[:, :, pad:]  # pitches, and any alignment
    TritonScatter(cache).to_pages(first, rows, ids)
    TorchScatter(other).to_pages(first, rows, ids)
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(mine.words(mine.word), theirs.words(theirs.word))
    back, expected = drawn.clone(), drawn.clone()
    TritonScatter(cache).to_rows(2 - layers - first, ids, back[:, :, pad:])
    TorchScatter(cache).to_rows(2 - layers - first, ids, expected[:, :, pad:])
    assert torch.equal(back, expected)


@settings(max_examples=30)
@given(
    layout=st.sampled_from(LAYOUTS),
    pages_per_block=st.sampled_from([1, 2]),
    dims=st.tuples(st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 3, 8])),
    pitch=st.sampled_from([4096, 24, 1]),
    seed=st.integers(0, 10**6),
)
def test_triton_pool_slots_match_torch_reference(
    layout: str, pages_per_block: int, dims: tuple[int, int, int], pitch: int, seed: int
) -> None:
    rng = random.Random(seed)
    tokens, heads, dim = dims
    cache, other = (
        make_cache(layout, layers=2, tokens=tokens, heads=heads, dim=dim, pages_per_block=pages_per_block, seed=seed)
        for _ in range(2)
    )
    count = rng.randint(1, 5)
    ids = cache.check_pages(rng.sample(range(cache.pages), count * pages_per_block))
    slot = -(-2 * cache.row_bytes // pitch) * pitch
    memory = torch.from_numpy(bytes_of(8 * slot, seed).copy())
    starts = np.array(rng.sample(range(8), count)) * slot
    common = int(np.gcd.reduce([cache.row_bytes, *starts.tolist()]))
    drawn = memory.clone()
    slots = torch.from_numpy(starts)
    for mover, space in ((TritonScatter(cache), memory), (TorchScatter(other), drawn)):
        mover.move_slots(0, 2, space, slots, common, ids, to_pages=True)
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(mine.words(cache.word), theirs.words(cache.word))
    for layer in range(2):  # and each layer into the slots of the other
        for mover, space in ((TritonScatter(cache), memory), (TorchScatter(other), drawn)):
            mover.move_slots(1 - layer, 1, space[layer * cache.row_bytes :], slots, common, ids, to_pages=False)
    assert torch.equal(memory, drawn)
    for at, position in zip(starts.tolist(), range(count), strict=True):
        mine = ids[position * pages_per_block : (position + 1) * pages_per_block].tolist()
        both = memory[at : at + 2 * cache.row_bytes].view(2, -1).flip(0).reshape(-1).numpy()
        assert np.array_equal(both, block_bytes(cache, mine)[0])


def test_triton_part_longer_than_piece_is_copied() -> None:
    cache = make_cache("flash_nhd", layers=1, pages=3, tokens=PIECE_WORDS // 4 + 3, heads=2, dim=12)
    assert cache.page.part_bytes // cache.word > PIECE_WORDS
    rows = torch.from_numpy(bytes_of(2 * cache.row_bytes, 1)).view(2, 1, -1)
    ids = cache.check_pages([2, 0])
    TritonScatter(cache).to_pages(0, rows, ids)
    assert block_bytes(cache, [2, 0]).tobytes() == rows.numpy().tobytes()


COMPILE = """
import os, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from kvclient.device.triton_checksum import hash_rows
from kvclient.device.triton_scatter import PIECE_WORDS, move_layers
import triton.language as tl

names = ["rows_at", "table", "pitch", "layer_pitch", "layers_at", "page_ids", "pages", "layers", "first_layer"]
signature = {name: "*i64" if name in ("table", "layers_at", "page_ids") else "i32" for name in names} | {"rows_at": "i64"}
for to_pages, table, alignment in ((True, False, 16), (False, True, 16), (True, True, 8), (False, False, 2)):
    word = min(alignment, 8)
    constants = {
        "WORD": {8: tl.int64, 2: tl.int16}[word], "WORD_BYTES": word, "ALIGNMENT": alignment, "TABLE": table, "PARTS": 2,
        "PART_WORDS": (32 << 10) // word, "PAGES_PER_BLOCK": 1, "TO_PAGES": to_pages, "PIECE": PIECE_WORDS,
    }
    types = signature | {name: "constexpr" for name in constants}
    source = ASTSource(move_layers, types, {(move_layers.arg_names.index(n),): v for n, v in constants.items()})
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    ptx = made.asm["ptx"]
    wide = ptx.count("ld.global.v2.b64") + ptx.count("ld.global.v4.b32")
    print("move", alignment, wide, ptx.count(".local"))

names = ["layers_at", "page_ids", "first_layer", "layers", "table", "out"]
signature = {name: "i32" if name in ("first_layer", "layers") else "*i64" for name in names}
for length, parts, wide in ((65536, 2, True), (4098, 1, False), (65536, 1, True)):
    constants = {
        "LENGTH": length, "PART_BYTES": length // parts, "PARTS": parts, "PAGES_PER_BLOCK": 1, "WIDE": wide,
    }
    types = signature | {name: "constexpr" for name in constants}
    source = ASTSource(hash_rows, types, {(hash_rows.arg_names.index(n),): v for n, v in constants.items()})
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    ptx = made.asm["ptx"]
    print("hash", length, 1, ptx.count(".local"))
"""


def test_kernel_compiled_for_hopper_moves_16_bytes(tmp_path: Path) -> None:
    """The compiler needs no GPU. With aligned addresses every load of KV has 16 bytes, and nothing spills."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = tmp_path / "compile_kernel.py"
    script.write_text(COMPILE, encoding="utf-8")
    ran = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = [(kind, *map(int, rest)) for kind, *rest in map(str.split, ran.stdout.splitlines())]
    assert len(lines) == 4 + 3
    for kind, size, wide, spilled in lines:
        assert spilled == 0
        assert (wide > 0) == (size == 16 or kind == "hash"), (kind, size)


@settings(max_examples=15)
@given(layout=st.sampled_from(LAYOUTS), pages_per_block=st.sampled_from([1, 2]), seed=st.integers(0, 10**6))
def test_direct_copies_match_oracle(layout: str, pages_per_block: int, seed: int) -> None:
    rng = random.Random(seed)
    cache = make_cache(layout, pages_per_block=pages_per_block, layers=2, seed=seed)
    device = DeferredDevice(seed)
    copier = DeviceCopier(cache, strategy="direct", device=device)
    count = rng.randint(1, 5)
    size = copier.shape.block_bytes
    memory = bytes_of(8 * size, seed)
    arena = memoryview(memory)
    offsets = np.array(rng.sample(range(8), count), np.uint64) * np.uint64(size)
    pages = rng.sample(range(cache.pages), count * pages_per_block)
    expected = block_bytes(cache, pages)
    blocks = copier.blocks(pages)
    blocks.write_arena(arena, offsets)
    blocks.drain()
    assert all(
        memory[offset : offset + size].tobytes() == row.tobytes() for offset, row in zip(offsets.tolist(), expected, strict=True)
    )
    targets = rng.sample(range(cache.pages), count * pages_per_block)
    blocks = copier.blocks(targets)
    launched = sum(stream.launches for stream in device.streams)
    blocks.read_arena(arena, offsets, 0, 1, 1)
    blocks.read_arena(arena, offsets, 0, 0, 1)
    assert sum(stream.launches for stream in device.streams) == launched + 4, "a table and a launch a layer"
    blocks.drain()
    assert np.array_equal(block_bytes(cache, targets), expected)


@pytest.mark.parametrize("works", [True, False])
def test_triton_launch_failure_falls_back_to_torch(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is installed, but no compiler for this device: the first launch fails."""
    to_rows = TritonScatter.to_rows
    errors: list[Exception] = (
        [] if works else [RuntimeError("Failed to find C compiler"), ValueError("type fp8e4nv not supported")]
    )

    def broken(self: TritonScatter, layer: int, page_ids: torch.Tensor, rows: torch.Tensor) -> None:
        if errors:
            raise errors[0]
        to_rows(self, layer, page_ids, rows)

    monkeypatch.setattr(TritonScatter, "to_rows", broken)
    device = DeferredDevice(2)
    device.memory = torch.device("cuda", 0)
    while True:
        cache = make_cache("mla", layers=2, pages=9, tokens=4, dim=8)
        copier = DeviceCopier(cache, strategy="staged", device=device)
        assert copier.stats().get("device_without_triton_total", 0) == (not works)
        expected = block_bytes(cache, [3, 7])
        assert np.array_equal(copier.blocks([3, 7]).gather(), expected)
        if errors:
            with pytest.raises(InvalidArgument, match="Triton"):
                DeviceCopier(cache, strategy="direct", device=device)
        if len(errors) < 2:
            break
        errors.pop(0)


@pytest.mark.parametrize("to_pages", [True, False])
@pytest.mark.parametrize("fault", ["fails", "wrong"])
def test_triton_table_kernel_is_tried_at_start(fault: str, to_pages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The landing ring and the pool use kernels with a table of offsets, in both directions."""
    by_table = TritonScatter.by_table

    def broken(self: TritonScatter, *given: Any, **choices: Any) -> None:
        if choices["to_pages"] != to_pages:
            by_table(self, *given, **choices)
        elif fault == "fails":
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(TritonScatter, "by_table", broken)
    device = DeferredDevice(2)
    device.memory = torch.device("cuda", 0)
    copier = DeviceCopier(make_cache("flash_nhd"), strategy="staged", device=device)
    assert copier.stats()["device_without_triton_total"] == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pages_per_block", [1, 3])
def test_triton_try_out_changes_no_page(layout: str, pages_per_block: int) -> None:
    cache = make_cache(layout, layers=2, dtype=torch.uint8, dim=5, pages_per_block=pages_per_block)
    before = snapshot(cache)
    try_out(TritonScatter, cache)
    try_out(TorchScatter, cache)
    assert all(torch.equal(layer.tensor, was) for layer, was in zip(cache.layers, before, strict=True))
