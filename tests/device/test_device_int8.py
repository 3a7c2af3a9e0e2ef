"""Quantisation: error of elements and of attention, NaN and infinity, and stability under repeated stores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from caches import INT8_SHARE, LAYOUTS, block_bytes, make_cache, token_groups
from deferred import DeferredDevice
from hypothesis import given
from hypothesis import strategies as st
from int8_error import attention_error, error_bound

from kvclient import InvalidArgument
from kvclient.device.copier import DeviceCopier
from kvclient.device.int8 import LEAST, Int8Codec, ScaleGroups
from kvclient.device.layouts import PagedCache

DTYPES = (torch.bfloat16, torch.float16)
SPECIAL = [0x7FC0, 0xFFC0, 0x7F81, 0xFFFF, 0x7E00, 0x7C01, 0x7F80, 0xFF80, 0x7C00, 0x8000, 0, 1, 0x0080, 0x7F7F, 0x7BFF]
"""NaNs, infinities, zeros, denormals and the largest numbers of both dtypes."""


def codec_of(elements: int, dtype: torch.dtype, size: int = 8, stride: int = 1) -> Int8Codec:
    """Codec of rows of keys, followed by as many values."""
    groups = ScaleGroups(elements // 2, (size, stride), (size, stride))
    return Int8Codec(PagedCache([torch.zeros(1, elements, dtype=dtype)]), groups)


def from_bits(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype)


@given(
    bits=st.lists(st.integers(0, 2**16 - 1) | st.sampled_from(SPECIAL), min_size=1, max_size=80),
    exponents=st.lists(st.integers(-120, 120), min_size=1, max_size=3),
    offset=st.floats(-1000, 1000),
    size=st.sampled_from([8, 16, 32]),
    stride=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
)
def test_int8_any_rows_have_bounded_error_and_stay(
    bits: list[int], exponents: list[int], offset: float, size: int, stride: int, dtype: torch.dtype
) -> None:
    elements = 2 * size * stride
    anything = from_bits((bits * elements)[:elements], dtype).view(1, -1)
    usual = torch.randn(len(exponents), elements, generator=torch.Generator().manual_seed(bits[0]))
    usual[:, : elements // 2] += offset
    usual = (usual * torch.tensor(exponents).float().exp2().unsqueeze(1)).to(dtype)
    usual[0, 0] = 1000 * usual[0, 1]
    rows = torch.cat([anything, usual])
    codec = codec_of(elements, dtype, size, stride)
    coded = codec.encode(rows.view(torch.uint8))
    assert coded.shape == (len(rows), codec.coded_bytes(elements * 2))
    decoded = codec.decode(coded)
    was, now = (some.view(len(rows), 2, size, stride) for some in (rows, decoded.view(dtype)))
    finite = torch.isfinite(was).all(2, keepdim=True)
    assert torch.equal(torch.isnan(now), ~finite.expand_as(now)), "a group with a NaN or an infinity is NaN, and no other"
    was, now = torch.where(finite, was, 0.0), torch.where(finite, now, 0.0)
    largest = was.abs().amax(2, keepdim=True)
    assert bool(((now.float() - was.float()).abs() <= error_bound(was, largest)).all())
    kept = largest.float() >= LEAST
    assert torch.equal(now.abs().amax(2, keepdim=True)[kept], largest[kept]), "the largest elements are exact"
    assert bool((torch.where(was == 0, now, 0.0)[:, 1] == 0).all())
    keys, exact = was[:, 0].float(), now[:, 0].float()
    keys = torch.where(largest[:, 0].float() < LEAST, 0.0, keys)
    for edge in (torch.amin, torch.amax):
        assert bool(((edge(exact, 1) - edge(keys, 1)).abs() < 2.0**-119).all()), "the smallest and largest keys are exact"
    span = keys.double().amax(1, keepdim=True) - keys.double().amin(1, keepdim=True)
    digits = keys.abs().double() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-11)
    assert bool(((exact.double() - keys.double()).abs() <= 1.01 * (span / 510 + digits + span / 255 / 100) + 2.0**-25).all())
    again = codec.encode(decoded)
    assert torch.equal(again, coded), "storing a loaded block changes no byte"
    assert torch.equal(codec.decode(again), decoded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_every_code_is_stable_at_every_scale(dtype: torch.dtype) -> None:
    """All codes of values at scales of all mantissas and several exponents: others differ by a power of two."""
    exponents = (30 << 7, 31 << 7, 127 << 7, 254 << 7) if dtype == torch.bfloat16 else (0, 1 << 10, 15 << 10, 30 << 10)
    scales = [first + at for first in exponents for at in range(128 if dtype == torch.bfloat16 else 1024)]
    scales = [one for one in scales if one > 127]  # up to 127 * 2**-24, float16 is coarser than the codes, and elements are exact
    codes = torch.arange(-128, 128, dtype=torch.int16).clamp_(min=-127).to(torch.int8).view(-1, 8).repeat(len(scales), 1)
    codes[:, 7] = 127
    codec = codec_of(16, dtype)
    coded = torch.zeros((len(codes), 32), dtype=torch.uint8)
    coded[:, 8:16] = codes.view(torch.uint8)
    coded[:, 20:22] = from_bits(scales, dtype).repeat_interleave(32).view(-1, 1).view(torch.uint8)
    assert torch.equal(codec.encode(codec.decode(coded)), coded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_every_element_alone_is_exact(dtype: torch.dtype) -> None:
    """All 2**16 numbers, each the largest or smallest of its group."""
    numbers = torch.zeros((2**16, 16), dtype=dtype)
    numbers[:, 3] = numbers[:, 11] = from_bits(list(range(2**16)), dtype)
    codec = codec_of(16, dtype)
    coded = codec.encode(numbers.view(torch.uint8))
    decoded = codec.decode(coded)
    assert torch.equal(codec.encode(decoded), coded)
    same = torch.isfinite(numbers).all(1) & (numbers.float().abs().amax(1) >= LEAST)
    assert torch.equal(decoded.view(dtype)[same], numbers[same])
    assert not bool(torch.isfinite(decoded.view(dtype))[~torch.isfinite(numbers).all(1)].any())


def test_int8_layout_is_fixed() -> None:
    keys = [1.0, -2.0, 448.0, 0.0, 3.0, 0.1, -62.0, 254.0]
    values = [1.0, -2.0, 448.0, 0.0, 3.0, 0.1, -500.0, 254.0]
    numbers = torch.tensor([*keys, *values], dtype=torch.bfloat16)
    rows = torch.stack([numbers, torch.zeros(16, dtype=torch.bfloat16), torch.full((16,), torch.inf, dtype=torch.bfloat16)])
    coded = codec_of(16, torch.bfloat16).encode(rows.view(torch.uint8))
    # keys: 31.5, 30, 255, 31, 32.5, 31.05, 0, 158 steps of 2 above -62, halves to even
    # values: 1/4, -1/2, 113.8, 0, 0.8, 0, -127, 64.5 steps of 500 / 127
    assert [bytes(row.numpy()).hex() for row in coded] == [
        "201eff1f201f009e" + "00ff720001008141" + "78c2" + "e043" + "fa43" + bytes(10).hex(),
        bytes(32).hex(),
        bytes(16).hex() + 3 * "c07f" + bytes(10).hex(),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pages_per_block", [1, 2])
def test_int8_keys_by_channel_and_values_by_token_are_exact(layout: str, pages_per_block: int) -> None:
    cache = make_cache(layout, pages_per_block=pages_per_block, tokens=16, dim=64)
    groups = token_groups(layout, cache)
    codec = Int8Codec(cache, groups)
    assert (groups.keys[0], groups.values[0]) == (16, 32)
    assert codec.coded_bytes(cache.row_bytes) == INT8_SHARE * cache.row_bytes
    for layer in cache.layers:
        keys, values = halves(layout, layer.tensor)
        tokens = -2 if keys.shape[-2] == 16 else -3
        keys.copy_(keys.select(tokens, 0).unsqueeze(tokens).clone() * 2.0 ** torch.randint(-20, 20, keys.shape[-1:]))
        values.copy_(values[..., :1].clone())
    rows = np.concatenate([block_bytes(cache, range(cache.pages))]).reshape(-1, cache.row_bytes)
    coded = codec.encode(torch.from_numpy(rows.copy()))
    assert np.array_equal(codec.decode(coded).numpy(), rows), "what does not change within a group is exact, whatever its size"


def halves(layout: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a cache; of caches without both, halves of the last axis."""
    if layout.startswith("flash"):
        return tensor[0], tensor[1]
    return (tensor[:, 0], tensor[:, 1]) if layout == "block_first_nhd" else tensor.chunk(2, dim=-1)  # type: ignore[return-value]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_int8_pages_are_stored_and_loaded(layout: str) -> None:
    cache = make_cache(layout, tokens=16, dim=64)
    was = [layer.tensor.clone() for layer in cache.layers]
    copier = DeviceCopier(cache, int8=token_groups(layout, cache), device=DeferredDevice(3), staging_bytes=5000)
    assert copier.shape.layer_block_bytes == INT8_SHARE * cache.row_bytes
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
        now, then = layer.tensor[at], before[at]
        assert bool(((now.float() - then.float()).abs() <= error_bound(then, then.abs().max())).all())
        assert not torch.equal(now, then)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_int8_pieces_of_any_size_give_the_same_bytes(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions in pieces of blocks, or of layers of a block."""
    cache = make_cache("flash_nhd", tokens=16, dim=32)
    copier = DeviceCopier(cache, int8=token_groups("flash_nhd", cache))
    expected = copier.blocks([7, 1, 4, 2, 9]).gather()
    monkeypatch.setattr("kvclient.device.copy_strategies._CODED_BYTES", {"cpu": rows * cache.row_bytes})
    assert np.array_equal(copier.blocks([7, 1, 4, 2, 9]).gather(), expected)


@pytest.mark.parametrize(("outliers", "most"), [(False, 0.01), (True, 0.02)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (4, 4, 64)])
@pytest.mark.parametrize("tokens", [16, 32])
def test_int8_attention_error_is_below_bound(
    outliers: bool, most: float, heads: int, kv_heads: int, dim: int, tokens: int
) -> None:
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        tensor = torch.randn((2, 1024 // tokens, tokens, kv_heads, dim), generator=generator)
        if outliers:  # like keys of trained models: a few channels are many times larger, or far from zero
            channels = torch.randperm(dim, generator=generator)
            tensor[0, ..., channels[: dim // 32]] *= 20
            tensor[0, ..., channels[-1]] += 20
        cache = PagedCache([tensor.to(torch.bfloat16)], "split")
        copier = DeviceCopier(cache, int8=token_groups("flash_nhd", cache))
        was = cache.layers[0].tensor.clone()
        blocks = copier.blocks(range(cache.pages))
        coded = blocks.gather()
        blocks.read_arena(memoryview(coded.reshape(-1)), np.arange(cache.pages) * coded.shape[1], 0, 0, 1)
        query = torch.randn((1, heads, 8, dim), generator=generator)
        assert coded.size == INT8_SHARE * tensor.numel() * 2
        assert 0 < attention_error(was, cache.layers[0].tensor, query) <= most


def test_int8_first_token_with_most_attention_is_precise() -> None:
    """As in trained models: channels of keys stay far from zero, and queries attend to a first token with small values."""
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn((2, 1024, 2, 64), generator=generator)
    keys[..., :8] += 12
    values[0] /= 8
    query = torch.randn((1, 6, 32, 64), generator=generator)
    query[..., 8] += 4
    keys[0, :, 8] = 18
    tensor = torch.stack([keys, values]).view(2, 64, 16, 2, 64).to(torch.bfloat16)
    cache = PagedCache([tensor], "split")
    codec = Int8Codec(cache, token_groups("flash_nhd", cache))
    rows = torch.from_numpy(block_bytes(cache, range(64)).copy())
    after = codec.decode(codec.encode(rows)).view(torch.bfloat16).view(64, 2, 16, 2, 64).transpose(0, 1)
    error = attention_error(tensor, after, query)
    assert 0 < error <= 0.01, error


def test_int8_impossible_groups_are_rejected() -> None:
    for run, size, stride in ((8, 4, 1), (8, 8, 0), (0, 8, 1)):
        for groups in ({"keys": (size, stride), "values": (8, 1)}, {"keys": (8, 1), "values": (size, stride)}):
            with pytest.raises(InvalidArgument, match="per scale"):
                ScaleGroups(run, **groups)
    for shape in ((12, 2, 8), (16, 2, 12)):
        with pytest.raises(InvalidArgument, match="per scale"):
            ScaleGroups.along(shape, (0, 1, 2), 0)
    for elements, size in ((80, 16), (7, 8)):
        with pytest.raises(InvalidArgument, match="do not divide"):
            codec_of(elements, torch.bfloat16, size)
    with pytest.raises(InvalidArgument, match="16-bit"):
        codec_of(64, torch.float8_e4m3fn)
