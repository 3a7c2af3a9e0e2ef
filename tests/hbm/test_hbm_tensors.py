"""Hits on the device: the pool's blocks to and from tensors of the same device, at any slots and in many layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hbm_chains import SPEC, Below, allocate, chain, in_time
from hypothesis import given
from hypothesis import strategies as st

from kvclient import CacheSpec, InvalidArgument
from kvclient.hbm import HbmPool, tensors
from kvstore.core.types import BlockShape
from kvstore.tiers.allocator import round_up

BLOCKS = 12
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def pool(request: pytest.FixtureRequest) -> Iterator[HbmPool]:
    with HbmPool(request.param, capacity_bytes=64 * SPEC.block_bytes, space_wait_s=5.0) as pool:
        yield pool
        pool.state.table.validate()


Make = Callable[[torch.device, BlockShape], torch.Tensor]


def plain(device: torch.device, shape: BlockShape) -> torch.Tensor:
    return torch.zeros((BLOCKS, shape.block_bytes), dtype=torch.uint8, device=device)


def halves(device: torch.device, shape: BlockShape) -> torch.Tensor:
    return torch.zeros((BLOCKS, shape.layers, 2, shape.layer_block_bytes // 4), dtype=torch.bfloat16, device=device)


def layer_major(device: torch.device, shape: BlockShape) -> torch.Tensor:
    return torch.zeros((shape.layers, BLOCKS, shape.layer_block_bytes), dtype=torch.uint8, device=device).transpose(0, 1)


def padded(device: torch.device, shape: BlockShape) -> torch.Tensor:
    return torch.zeros((BLOCKS, shape.block_bytes + 24), dtype=torch.uint8, device=device)[:, 8:-16]


def odd(device: torch.device, shape: BlockShape) -> torch.Tensor:
    return torch.zeros(BLOCKS * shape.block_bytes + 1, dtype=torch.uint8, device=device)[1:]


LAYOUTS: tuple[Make, ...] = (plain, halves, layer_major, padded, odd)


def as_bytes(tensor: torch.Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().reshape(BLOCKS, -1)


@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("layer_block_bytes", [8192, 1000])
def test_blocks_round_trip_through_device_tensors(pool: HbmPool, make: Make, apart: bool, layer_block_bytes: int) -> None:
    """``apart``: in slots that do not follow each other."""
    spec = CacheSpec(model="tensors", block_tokens=4, layers=3, layer_block_bytes=layer_block_bytes)
    near = pool.blocks(spec)
    keys, data = chain(BLOCKS, 1, spec)
    filled = make(pool.state.volume.device, spec.shape)
    flat = torch.from_numpy(data.array.copy().reshape(-1)).view(filled.dtype).reshape(filled.shape)
    filled.copy_(flat)
    if apart:  # every other slot of those that are free is taken by a block of another chain
        other, rest = chain(2 * BLOCKS + 4, 2, spec)
        near.insert(other, None, 0, rest, None, checksums=False)
        kept = [block for at, block in enumerate(pool.state.table.snapshot()) if at % 2]
        for block in reversed(pool.state.table.snapshot()):
            if block not in kept:
                pool.state.table.mark_clean([block], transient=True)
        pool.state.table.unpin([block for block in pool.state.table.pin_resident(kept[0].namespace, other) if block is not None])
        assert pool.usage().blocks == len(kept)
    assert near.insert_tensor(keys, None, 0, filled) == BLOCKS
    out = allocate(BLOCKS, spec)
    assert near.fetch(keys, out, in_time(), verify=False) == BLOCKS
    assert np.array_equal(out.array, data.array)
    again = make(pool.state.volume.device, spec.shape)
    assert near.copy_to_tensor(keys, again) == BLOCKS
    assert np.array_equal(as_bytes(again), data.array.reshape(BLOCKS, -1))
    assert pool.stats()["hbm_hit_blocks_total"] == 2 * BLOCKS


def test_leading_blocks_alone_are_copied(pool: HbmPool) -> None:
    near = pool.attach(SPEC, Below())
    keys, data = chain(BLOCKS, 1)
    near.insert(keys[:5], None, 0, allocate(5), None, checksums=False)
    out = torch.full((BLOCKS, SPEC.block_bytes), 7, dtype=torch.uint8, device=pool.state.volume.device)
    assert near.copy_to_tensor(keys, out) == 5
    assert not out[:5].any()
    assert bool((out[5:] == 7).all())
    rows = torch.from_numpy(data.array.copy()).to(pool.state.volume.device)
    assert near.insert_tensor(keys, None, 0, rows) == BLOCKS - 5
    assert near.insert_tensor([], None, 0, rows[:0]) == 0
    assert near.copy_to_tensor([], rows[:0]) == 0


def test_pinned_blocks_are_addressable_in_pool_memory(pool: HbmPool) -> None:
    near = pool.attach(SPEC, Below())
    keys, data = chain(BLOCKS, 1)
    near.insert(keys, None, 0, data, None, checksums=False)
    with near.pinned(keys) as found:
        assert len(found) == BLOCKS
        for at, offset in enumerate(found.offsets.tolist()):
            block = near.volume.memory[offset : offset + SPEC.block_bytes]
            assert block.device == pool.state.volume.device
            assert block.cpu().numpy().tobytes() == data.array[at].tobytes()
        pool.evict(demote=False)
        assert pool.usage().blocks == BLOCKS  # pinned


def test_tensors_that_do_not_fit_are_refused(pool: HbmPool) -> None:
    near = pool.attach(SPEC, Below())
    keys, data = chain(2, 1)
    near.insert(keys, None, 0, data, None, checksums=False)
    device, size = pool.state.volume.device, SPEC.block_bytes
    whole = torch.zeros((2, SPEC.layers, SPEC.layer_block_bytes), dtype=torch.uint8, device=device)
    wrong = {
        "size": whole[:1],
        "size of a dtype": whole.to(torch.float32),
        "device": whole.to("meta"),
        "type": whole.cpu().numpy(),
        "no strides": torch.zeros((2, size), dtype=torch.uint8, device=device).to_sparse(),
        "layout": torch.zeros((SPEC.layers, SPEC.layer_block_bytes, 2), dtype=torch.uint8, device=device).permute(2, 1, 0),
        "values turned round": torch.zeros((2, size // 8), dtype=torch.complex64, device=device).conj(),
        "rows apart": torch.zeros((2, size, 2), dtype=torch.uint8, device=device)[:, :, 0],
    }
    for name, tensor in wrong.items():
        for work in (
            lambda tensor=tensor: near.copy_to_tensor(keys, tensor),
            lambda tensor=tensor: near.insert_tensor(keys, None, 0, tensor),
        ):  # type: ignore[misc]
            with pytest.raises(InvalidArgument):
                raise AssertionError(name, work())
    with pytest.raises(InvalidArgument, match="overlap"):
        near.copy_to_tensor(keys, torch.zeros((1, size), dtype=torch.uint8, device=device).expand(2, -1))
    assert pool.stats()["hbm_lost"] == 0
    assert near.copy_to_tensor(keys, whole) == 2


@given(
    seed=st.integers(0, 1 << 20),
    layers=st.integers(1, 4),
    size=st.sampled_from([1, 100, 1024, 4096, 6144]),
    count=st.integers(0, 14),
    strided=st.booleans(),
)
def test_gather_and_scatter_match_a_loop_of_copies(seed: int, layers: int, size: int, count: int, strided: bool) -> None:
    slot = round_up(layers * size)
    memory = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, 16 * slot + 4096, dtype=np.uint8))
    offsets = np.random.default_rng(seed + 1).permutation(16)[:count].astype(np.int64) * slot + (4096 if seed % 2 else 0)
    if seed % 3 == 0:
        offsets.sort()
    rows = (
        torch.zeros((layers, count, size), dtype=torch.uint8).transpose(0, 1)
        if strided
        else torch.zeros((count, layers, size), dtype=torch.uint8)
    )
    tensors.gather(memory, offsets, rows)
    for at, offset in enumerate(offsets.tolist()):
        assert torch.equal(rows[at].reshape(-1), memory[offset : offset + layers * size])
    expected = memory.clone()
    rows = rows + 1
    for at, offset in enumerate(offsets.tolist()):
        expected[offset : offset + layers * size] = rows[at].reshape(-1)
    tensors.scatter(rows, memory, offsets)
    assert torch.equal(memory, expected)
