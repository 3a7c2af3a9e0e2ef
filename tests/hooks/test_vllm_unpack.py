"""Conversion of pages in the layout of vLLM's CPU kernels to plain tensors; the error names an unreadable layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvclient import CacheSpec, ClientOptions, InvalidArgument, KVClient
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.identity.namespaces import GroupFacts, group_spec
from kvclient.engines.vllm.unpack import PageLayout, find_pages
from kvstore.embedded.cluster import LocalCluster

FACTS = GroupFacts(
    model="m",
    model_digest="d",
    dtype="float32",
    block_tokens=32,
    layers=("a", "b"),
    page_bytes=2 * 32 * 128 * 4,
    page_shape=(2, 32, 128),
    kind="full",
    backend="CPU_ATTN",
    isa="vec",
    engine="0.32",
)


def facts(isa: str, dtype: str, heads: int, tokens: int, dim: int, layers: int) -> GroupFacts:
    size = heads * tokens * 2 * dim * getattr(torch, dtype).itemsize
    names = tuple(f"layer {number}" for number in range(layers))
    shape = (heads, tokens, 2 * dim)
    return replace(FACTS, isa=isa, dtype=dtype, block_tokens=tokens, page_shape=shape, page_bytes=size, layers=names)


def packed(isa: str, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A page of one head, element by element as the kernel addresses it."""
    tokens, dim = keys.shape
    page = torch.empty(2 * tokens * dim, dtype=keys.dtype)
    for token in range(tokens):
        for at in range(dim):
            if isa == "amx":
                key = ((token // 16 * (dim // 2) + at // 2) * 16 + token % 16) * 2 + at % 2
                value = ((at // 16 * (tokens // 2) + token // 2) * 16 + at % 16) * 2 + token % 2
            else:
                key, value = at * tokens + token, token * dim + at
            page[key], page[tokens * dim + value] = keys[token, at], values[token, at]
    return page


@given(
    st.sampled_from([("vec", "float32"), ("vec", "float16"), ("vec16", "float32"), ("amx", "bfloat16")]),
    st.integers(1, 2),
    st.sampled_from([16, 32]),
    st.sampled_from([16, 48]),
    st.integers(1, 2),
    st.integers(0, 2),
)
def test_unpack_pages_returns_tokens(kind: tuple[str, str], heads: int, tokens: int, dim: int, layers: int, blocks: int) -> None:
    isa, dtype = kind
    layout = PageLayout.of(group_spec(HookOptions(), facts(isa, dtype, heads, tokens, dim, layers)))
    made = torch.randn(2, layers, heads, blocks * tokens, dim).to(getattr(torch, dtype))
    memory = torch.empty((blocks, layout.block_bytes), dtype=torch.uint8)
    pages = memory.view(layout.dtype).view(blocks, layers, heads, 2 * tokens * dim)
    for block in range(blocks):
        part = made[:, :, :, block * tokens : (block + 1) * tokens]
        for layer in range(layers):
            for head in range(heads):
                pages[block, layer, head] = packed(isa, part[0, layer, head], part[1, layer, head])
    read = layout.unpack(memory)
    memory.fill_(0)
    for layer, (keys, values) in enumerate(read):
        assert torch.equal(keys[0], made[0, layer])
        assert torch.equal(values[0], made[1, layer])


def test_unpack_unsupported_layout_is_rejected() -> None:
    def spec(**changed: object) -> CacheSpec:
        return group_spec(HookOptions(), replace(FACTS, **changed))  # type: ignore[arg-type]

    assert PageLayout.of(spec()) == PageLayout("vec", torch.float32, 2, 2, 32, 64)
    for wrong in (
        spec(engine="0.33"),
        spec(backend="FLASH_ATTN", isa="device"),
        spec(isa="neon"),
        spec(kind="sliding:256"),
        spec(kind="mla", page_shape=(1, 32, 576)),
        spec(shard_count=2),
        spec(page_order=(1, 0, 2)),
        spec(dtype="fp7"),
        spec(dtype="float16"),
        spec(block_tokens=64),
        spec(page_shape=(32, 256)),
        spec(isa="amx", page_shape=(2, 32, 120), page_bytes=2 * 32 * 120 * 4),
        replace(spec(), layout="torch/2x64"),
        replace(spec(), layout_version=2),
    ):
        with pytest.raises(InvalidArgument):
            pytest.fail(str(PageLayout.of(wrong)))
    with pytest.raises(InvalidArgument, match="stored_dtype"):
        PageLayout.of(spec(codec="int8-float16-16x1"))
    layout = PageLayout.of(spec())
    for memory in (torch.zeros(1, layout.block_bytes - 4, dtype=torch.uint8), torch.zeros(layout.block_bytes, dtype=torch.uint8)):
        with pytest.raises(InvalidArgument):
            layout.unpack(memory)


def test_find_pages_several_models_of_one_name_is_rejected(tmp_path: Path) -> None:
    """The last registered model may be an older engine's, with other weights, so the caller must choose."""
    options = HookOptions()
    first, other = (group_spec(options, replace(FACTS, model_digest=digest)) for digest in ("one", "other"))
    named = group_spec(options.with_epoch("7"), FACTS)
    unreadable = group_spec(options, replace(FACTS, model_digest="x", isa="device", backend="FLASH_ATTN"))
    with LocalCluster([], tmp_path) as cluster:
        at = cluster.metadata_address

        def register(spec: CacheSpec) -> None:
            KVClient.connect(at, spec, node=None, options=ClientOptions(require_store=True)).close()

        with pytest.raises(InvalidArgument, match="no namespace of this model"):
            find_pages(at, model="m")
        for spec in (first, unreadable):
            register(spec)
        assert find_pages(at, model="m") == first
        register(other)
        register(named)
        with pytest.raises(InvalidArgument, match="namespace") as refused:
            find_pages(at, model="m")
        assert all(spec.namespace.hex() in str(refused.value) for spec in (first, other, named))
        assert unreadable.namespace.hex() not in str(refused.value)
        assert find_pages(at, model="m", weights_epoch="7") == named
        assert find_pages(at, model="m", namespace=other.namespace.hex().upper()) == other
        with pytest.raises(InvalidArgument, match="select one"):
            find_pages(at, model="m", weights_epoch="")
