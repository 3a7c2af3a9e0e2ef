"""Quantisation: error bound, NaN and infinity, and stability under repeated stores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from caches import LAYOUTS, make_cache
from deferred import DeferredDevice
from fp8_error import error_bound
from hypothesis import given
from hypothesis import strategies as st

from kvclient.device.copier import DeviceCopier
from kvclient.device.fp8 import Fp8Codec
from kvclient.device.layouts import PagedCache

DTYPES = (torch.bfloat16, torch.float16)


def codec_of(elements: int, dtype: torch.dtype) -> Fp8Codec:
    return Fp8Codec(PagedCache([torch.zeros(1, elements, dtype=dtype)]))


@given(
    bits=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=64),
    exponents=st.lists(st.integers(-30, 30), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
)
def test_fp8_decoding_error_is_within_bound(bits: list[int], exponents: list[int], dtype: torch.dtype) -> None:
    anything = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype).view(1, -1)
    usual = torch.randn(len(exponents), anything.shape[1], generator=torch.Generator().manual_seed(bits[0]))
    usual = (usual * torch.tensor(exponents).float().exp2().unsqueeze(1)).to(dtype)
    rows = torch.cat([anything, usual])
    codec = codec_of(rows.shape[1], dtype)
    coded = codec.encode(rows.view(torch.uint8))
    assert coded.shape == (len(rows), codec.coded_bytes(rows.shape[1] * 2))
    back = codec.decode(coded).view(dtype)
    was, now = rows.float(), back.float()
    finite = torch.isfinite(was)
    assert torch.equal(torch.isnan(now), ~finite), "NaN and infinities come back as NaN, and nothing else does"
    largest = torch.where(finite, was.abs(), 0.0).amax(1, keepdim=True)
    differs = torch.where(finite, (now - was).abs(), 0.0)
    assert bool((differs <= error_bound(torch.where(finite, was, 0.0), largest)).all())
    assert bool((torch.where(was == 0, now, 0.0) == 0).all())
    again = codec.decode(codec.encode(back.contiguous().view(torch.uint8))).view(dtype)
    same = (again == back) | (torch.isnan(again) & torch.isnan(back))
    assert bool(same.all()), "what was decoded once does not change any more"


@given(
    bits=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=64),
    extra=st.lists(
        st.sampled_from([0x7FC0, 0xFFC0, 0x7F81, 0xFFFF, 0x7E00, 0xFE00, 0x7C01, 0x7F80, 0xFF80, 0x7C00, 0x8000, 0x0001, 0x43E8]),
        max_size=8,
    ),
    dtype=st.sampled_from(DTYPES),
)
def test_fp8_store_after_load_is_bit_exact(bits: list[int], extra: list[int], dtype: torch.dtype) -> None:
    rows = torch.tensor([bits + extra], dtype=torch.int32).to(torch.int16).view(torch.uint8)
    codec = codec_of(len(bits) + len(extra), dtype)
    coded = codec.encode(rows)
    decoded = codec.decode(coded)
    assert torch.equal(codec.encode(decoded), coded)
    assert torch.equal(codec.decode(codec.encode(decoded)), decoded)
    elements = coded[0, : len(bits) + len(extra)]
    assert not bool((elements == 0xFF).any()), "a second code of NaN"


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_scale_is_stable_for_every_largest_element(dtype: torch.dtype) -> None:
    """All 2**16 values, each in its own group: the scale depends on nothing else."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(-1, 1)
    codec = codec_of(1, dtype)
    coded = codec.encode(values.view(torch.uint8))
    assert torch.equal(codec.encode(codec.decode(coded)), coded)
    finite = torch.isfinite(values.view(dtype)).view(-1)
    was, now = values.view(dtype).float().view(-1)[finite], codec.decode(coded).view(dtype).float().view(-1)[finite]
    assert bool(((now - was).abs() <= was.abs() / 16).all())


def test_fp8_zeros_have_scale_one() -> None:
    codec = codec_of(32, torch.bfloat16)
    coded = codec.encode(torch.zeros((2, 64), dtype=torch.uint8))
    assert bytes(coded[0, :32].numpy()) == bytes(32)
    assert coded[0, 32:36].view(torch.float32).item() == 1.0
    assert bytes(coded[0, 36:].numpy()) == bytes(12)
    assert torch.equal(codec.decode(coded), torch.zeros((2, 64), dtype=torch.uint8))


def test_fp8_layout_is_fixed() -> None:
    values = torch.tensor([[1.0, -2.0, 448.0, 0.0, 3.0, 0.1, -500.0, float("inf")]], dtype=torch.bfloat16)
    coded = codec_of(8, torch.bfloat16).encode(values.view(torch.uint8))
    # scale 2, as 500 does not fit: 0.5, -1, 224, 0, 1.5, 0.05, -250 -> -256, NaN
    assert bytes(coded[0].numpy()).hex() == "30b876003c15f87f" + np.float32(2).tobytes().hex() + bytes(4).hex()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pages_per_block", [1, 2])
def test_fp8_split_layout_has_separate_k_and_v_scales(layout: str, pages_per_block: int) -> None:
    cache = make_cache(layout, pages_per_block=pages_per_block, tokens=6)
    codec = Fp8Codec(cache)
    apart = 2 if layout.startswith(("flash", "block_first")) else 1
    elements = cache.row_bytes // 2
    assert codec.coded_bytes(cache.row_bytes) == -(-(elements + 4 * apart * pages_per_block) // 16) * 16
    rows = torch.ones(1, apart * pages_per_block, elements // (apart * pages_per_block), dtype=torch.bfloat16)
    rows *= (2.0 ** torch.arange(apart * pages_per_block)).view(1, -1, 1)
    coded = codec.encode(rows.view(1, -1).view(torch.uint8))
    scales = coded[0, elements : elements + 4 * apart * pages_per_block].clone().view(torch.float32)
    assert torch.equal(scales / scales[0], 2.0 ** torch.arange(apart * pages_per_block))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_pages_take_half_the_bytes(layout: str) -> None:
    cache = make_cache(layout, tokens=16, dim=32)
    was = [layer.tensor.clone() for layer in cache.layers]
    copier = DeviceCopier(cache, fp8=True, device=DeferredDevice(3), staging_bytes=5000)
    assert copier.shape.layer_block_bytes < 0.52 * cache.row_bytes
    arena = bytearray(4 * copier.shape.block_bytes)
    offsets = np.array([2, 0, 3], np.uint64) * np.uint64(copier.shape.block_bytes)
    pages = [7, 1, 4]
    source = copier.blocks(pages)
    source.write_arena(memoryview(arena), offsets)
    source.drain()
    for layer in cache.layers:
        layer.tensor.zero_()
    target = copier.blocks(pages)
    target.read_arena(memoryview(arena), offsets, 0, 0, 3)
    target.drain()
    for layer, before in zip(cache.layers, was, strict=True):
        at = (slice(None), pages) if cache.kind == "split" else (pages,)
        now, then = layer.tensor[at].float(), before[at].float()
        assert bool(((now - then).abs() <= error_bound(then, then.abs().max())).all())
        assert not torch.equal(now, then)
