"""Caches, choices and page ids that cannot be copied are rejected before any byte is copied."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from caches import ANY_GROUPS, block_bytes, make_cache
from deferred import DeferredDevice
from hypothesis import given
from hypothesis import strategies as st

from kvclient import InvalidArgument
from kvclient.device.copier import DeviceCopier
from kvclient.device.layouts import CacheLayer, PagedCache


@pytest.mark.parametrize(
    ("layers", "kind", "message"),
    [
        ([], "pages", "requires a list"),
        ([torch.zeros(4, 2)], "rows", "unknown layout"),
        ([torch.zeros(3, 4, 2)], "split", r"\[2, pages"),
        ([torch.zeros(4)], "pages", "dense"),
        ([torch.zeros(4, 6)[:, ::2]], "pages", "not contiguous"),
        ([torch.zeros(1, 6).expand(4, 6)], "pages", "overlap"),
        ([torch.zeros(4, 2), torch.zeros(5, 2)], "pages", "differs from the first"),
        ([torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.float16)], "pages", "differs from the first"),
    ],
)
def test_cache_of_unsupported_layout_is_rejected(layers: list[torch.Tensor], kind: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        PagedCache(layers, kind)  # type: ignore[arg-type]


NESTED = torch.zeros(8, 3, 4)
"""Pages of three layers; the layers of each page are adjacent."""
HALVES = torch.zeros(8, 4, 4)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([np.zeros((4, 2))], "torch tensors"),
        ([None], "torch tensors"),
        (torch.zeros(4, 2), "requires a list"),
        (7, "requires a list"),
        ([torch.zeros(4, 2, device="meta")], "on the CPU or on a CUDA device"),
        ([torch.zeros(4, 2, dtype=torch.complex64).conj()], "not its values"),
        ([torch.zeros(4, 2, dtype=torch.complex64).conj().imag], "not its values"),
        ([HALVES, HALVES], "share memory"),
        ([HALVES[:5], HALVES[3:]], "share memory"),
        ([HALVES[:4, 0:2], HALVES[:4, 1:3]], "share memory"),
        ([HALVES[::2, 0], HALVES[:4, 0]], "share memory"),
    ],
)
def test_layer_of_unsupported_type_is_rejected(layers: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        PagedCache(layers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layers", "kind"),
    [
        ([NESTED[:, layer] for layer in range(3)], "pages"),
        ([NESTED[:, layer] for layer in (2, 0, 1)], "pages"),
        ([HALVES[:4], HALVES[4:]], "pages"),
        ([HALVES[:4, :2], HALVES[:4, 2:]], "pages"),
        ([HALVES.view(8, 2, 2, 4)[:, :, layer].transpose(0, 1) for layer in range(2)], "split"),
        ([HALVES.view(8, 2, 2, 4)[:, layer].transpose(0, 1) for layer in range(2)], "split"),
        ([HALVES[::2, 0], HALVES[:4, 1]], "pages"),
    ],
)
def test_layers_interleaved_in_memory_are_accepted(layers: list[torch.Tensor], kind: str) -> None:
    assert len(PagedCache(layers, kind).layers) == len(layers)  # type: ignore[arg-type]


@given(
    strides=st.tuples(st.integers(1, 12), st.integers(1, 40)),
    counts=st.tuples(st.integers(1, 2), st.integers(1, 5)),
    part=st.integers(1, 6),
    away=st.integers(0, 60),
    split=st.booleans(),
)
def test_shared_memory_check_matches_byte_count(
    strides: tuple[int, int], counts: tuple[int, int], part: int, away: int, split: bool
) -> None:
    memory = torch.zeros(400, dtype=torch.uint8)
    small, large = strides
    parts, pages = (2, counts[1]) if split else (1, counts[1])
    shape, steps = ((parts, pages, part), (small, large, 1)) if split else ((pages, part), (large, 1))
    layers = [memory.as_strided(shape, steps, start) for start in (0, away)]
    kind = "split" if split else "pages"
    try:
        for layer in layers:
            CacheLayer(layer, kind)  # type: ignore[arg-type]
    except InvalidArgument:
        return  # pages of one layer overlap already
    first, second = (
        {start + half * small + page * large + at for half in range(parts) for page in range(pages) for at in range(part)}
        for start in (0, away)
    )
    if first & second:
        with pytest.raises(InvalidArgument, match="share memory"):
            PagedCache(layers, kind)  # type: ignore[arg-type]
    else:
        assert len(PagedCache(layers, kind).layers) == 2  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensor_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="not its values"):
        PagedCache([torch.quantize_per_tensor(torch.zeros(4, 2), 1.0, 0, torch.qint8)])


@pytest.mark.parametrize("pages_per_block", [0, -1, 13, 1.5, True, "2", None])
def test_pages_per_block_out_of_range_is_rejected(pages_per_block: object) -> None:
    with pytest.raises(InvalidArgument, match="between 1 and"):
        make_cache("mla", pages_per_block=pages_per_block)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "page_ids",
    [
        [1.5],
        [1.0],
        [True],
        ["a"],
        "12",
        [None],
        None,
        7,
        [2**70],
        [2**63],
        [[1], [2]],
        np.array([1.7]),
        np.array([True]),
        np.array([[1, 2]]),
        np.array(["1"]),
        np.array([2**64 - 1], np.uint64),
        torch.tensor([1.7]),
        torch.tensor([True]),
        torch.tensor([[1], [2]]),
        torch.tensor([1.0], dtype=torch.bfloat16),
    ],
    ids=repr,
)
def test_page_ids_not_integers_are_rejected(page_ids: object) -> None:
    with pytest.raises(InvalidArgument):
        DeviceCopier(make_cache("mla")).blocks(page_ids)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "page_ids", [[3, 1], (3, 1), np.array([3, 1], np.uint8), torch.tensor([3, 1], dtype=torch.int32), [np.int16(3), 1]], ids=repr
)
def test_page_ids_of_any_integer_type_are_accepted(page_ids: object) -> None:
    copier = DeviceCopier(make_cache("mla"))
    expected = block_bytes(copier.cache, [3, 1])
    assert np.array_equal(copier.blocks(page_ids).gather(), expected)  # type: ignore[arg-type]
    assert not copier.blocks([]).count


def test_check_of_other_namespace_is_rejected() -> None:
    caches = [make_cache(layout) for layout in ("flash_nhd", "flash_hnd", "vllm_bhnc", "vllm_permuted")]
    caches += [
        make_cache("flash_nhd", pages_per_block=2),
        make_cache("flash_nhd", dtype=torch.float16),
        make_cache("flash_nhd", layers=2),
    ]
    copiers = [DeviceCopier(cache, device=DeferredDevice()) for cache in caches]
    copiers.append(DeviceCopier(caches[0], int8=ANY_GROUPS, device=DeferredDevice()))
    specs = [copier.spec("model", 16) for copier in copiers]
    assert len({spec.namespace for spec in specs}) == len(specs)
    for copier in copiers:
        for other, spec in zip(copiers, specs, strict=True):
            if other is copier:
                copier.check(spec)
            else:
                with pytest.raises(InvalidArgument, match="does not match this KV cache"):
                    copier.check(spec)


def test_copier_unsupported_options_are_rejected() -> None:
    device = DeferredDevice()
    with pytest.raises(InvalidArgument, match="unknown strategy"):
        DeviceCopier(make_cache("mla"), strategy="fastest", device=device)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="strategy=staged"):
        DeviceCopier(make_cache("mla"), strategy="batched", int8=ANY_GROUPS, device=device)
    with pytest.raises(InvalidArgument, match="16-bit"):
        DeviceCopier(make_cache("mla", dtype=torch.float32), int8=ANY_GROUPS, device=device)
    for size in (0, -5, 1.5, True, None):
        for name in ("staging_bytes", "pin_chunk_bytes"):
            with pytest.raises(InvalidArgument, match="positive integer"):
                DeviceCopier(make_cache("mla"), device=device, **{name: size})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="kernels"):
        DeviceCopier(make_cache("mla"), strategy="direct")  # a CPU has none
    device.has_batch = device.reads_host = False
    for strategy in ("batched", "direct"):
        with pytest.raises(InvalidArgument):
            DeviceCopier(make_cache("mla"), strategy=strategy, device=device)  # type: ignore[arg-type]
    assert DeviceCopier(make_cache("mla"), device=device).strategy == "staged"
