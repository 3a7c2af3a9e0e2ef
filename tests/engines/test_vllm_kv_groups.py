"""KV cache groups as vLLM makes them for models that no CPU runs, and every refusal of the connector, without an engine."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

with warnings.catch_warnings():
    warnings.simplefilter("default")  # of engines, as everywhere in this folder; modules are imported before that is set
    from kv_groups_bed import BLOCKS, cache_of, engine, full, sparse
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

sys.path.append(str(Path(__file__).resolve().parents[1] / "device"))

from deferred import DeferredDevice, FakePinning

import kvclient.engines.vllm.connector as facade
from kvclient import InvalidArgument
from kvclient.device import PagedCache
from kvclient.engines.vllm.identity.engine_facts import check_steps, kernel_of
from kvclient.engines.vllm.identity.kv_groups import check_handoffs, group_blocks, read_groups
from kvclient.engines.vllm.memory.device_pages import device_pages, make_pages
from kvclient.engines.vllm.memory.pages import GroupPages, Pages
from kvclient.engines.vllm.options import ConnectorOptions
from kvclient.engines.vllm.tier.facts import tier_groups

LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC")
NO_CONNECTOR = "run the engine without a connector"
TIER = "use KVStoreOffloadingConnector"


def groups_of(*specs: Any) -> Any:
    """Groups of one layer each, as vLLM hands them to the connector."""
    groups = [interface.KVCacheGroupSpec([f"l{at}"], spec) for at, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups)


def host_pages(tensors: list[list[torch.Tensor]]) -> list[Pages]:
    return make_pages(tensors, BLOCKS, strategy="auto", staging_bytes=1 << 20)


def late_pages(tensors: list[list[torch.Tensor]]) -> list[Pages]:
    return device_pages(tensors, BLOCKS, DeferredDevice(1, FakePinning()), strategy="staged", staging_bytes=1 << 20)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [host_pages, late_pages])
def test_indexer_pages_are_a_part_of_the_group(layout: str, make: Callable[..., list[Pages]]) -> None:
    """vLLM's own grouping and allocation of sparse attention: every byte of a block is in one part, and in one page of it."""
    config = engine(layout)
    cache = cache_of(config, sparse())
    parts = read_groups(config, cache)
    assert [(part.kind, part.table, part.block_tokens, part.dtype) for part in parts] == [
        ("mla", 0, 64, "bfloat16"),
        ("mla", 0, 64, "uint8"),
    ]
    assert [part.layers for part in parts] == [tuple(f"{at}.{name}" for at in range(3)) for name in ("attn", "indexer")]
    assert group_blocks(parts).has_equal_pages
    caches = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout[layout])
    for tensor in caches.values():
        tensor.view(torch.uint8).random_(0, 256)
    pages = make([[caches[name] for name in part.layers] for part in parts])
    assert [one.shape.layer_block_bytes for one in pages] == [73_728, 8_448]
    assert sum(one.shape.block_bytes for one in pages) * BLOCKS == cache.kv_cache_tensors[0].size
    before = {name: tensor.clone() for name, tensor in caches.items()}
    block = [content_of(one, 4) for one in pages]
    for one, content in zip(pages, block, strict=True):
        write(one, 7, content)
    for name, tensor in caches.items():
        assert torch.equal(tensor[7].view(torch.uint8), before[name][4].view(torch.uint8)), name
        others = [at for at in range(BLOCKS) if at != 7]
        assert torch.equal(tensor[others].view(torch.uint8), before[name][others].view(torch.uint8)), name


def content_of(pages: Pages, page: int) -> list[bytes]:
    """The bytes of a page, layer by layer."""
    buffer = pages.buffer([page], pages.mark())
    if isinstance(pages, GroupPages):
        return [bytes(piece) for layer in range(pages.shape.layers) for piece in buffer.segments(0, layer, 1)]
    rows = buffer.gather().reshape(pages.shape.layers, -1)  # type: ignore[attr-defined]
    return [row.tobytes() for row in rows]


def write(pages: Pages, page: int, content: list[bytes]) -> None:
    buffer = pages.buffer([page], pages.mark())
    if isinstance(pages, GroupPages):
        for layer, data in enumerate(content):
            (piece,) = buffer.segments(0, layer, 1)
            piece[:] = data
        return
    (piece,) = buffer.segments(0, 0, pages.shape.layers)
    piece[:] = b"".join(content)
    buffer.host_copy_ready(torch.arange(1).numpy(), 0, pages.shape.layers)  # type: ignore[attr-defined]
    buffer.drain()  # type: ignore[attr-defined]


def test_unequal_heads_of_one_group_are_parts() -> None:
    """Layers of MiMo-V2 differ in their heads; vLLM puts them into one group."""
    config = engine()
    cache = cache_of(config, {"a": full(), "b": full(head_size=96), "c": full()})
    assert len(cache.kv_cache_groups) == 1
    assert [part.layers for part in read_groups(config, cache)] == [("a", "c"), ("b",)]


@pytest.mark.parametrize("mode", ["INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_of_each_token_are_in_the_page(mode: str, layout: str) -> None:
    """Only a GPU computes them. vLLM's Triton backend puts two float32 per token and head behind keys and values."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    plain = full(dtype=torch.uint8, kv_quant_mode=interface.KVQuantMode[mode])
    spec = TritonAttentionBackend.customize_spec(plain)
    numbers = 64 if mode == "INT4_PER_TOKEN_HEAD" else 128
    config = engine(layout)
    cache = cache_of(config, {"a": spec, "b": spec})
    (part,) = read_groups(config, cache)
    caches = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout[layout])
    (pages,) = host_pages([[caches[name] for name in part.layers]])
    assert pages.shape.layer_block_bytes == 32 * 2 * (numbers + 2 * 4)
    caches["b"][3].view(torch.uint8).random_(0, 256)
    write(pages, 5, content_of(pages, 3))
    assert torch.equal(caches["b"][5], caches["b"][3])


def test_kernel_of_device_names_other_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's pages of fp8 are bytes, which an AMD MI300 reads as other numbers."""
    backend = SimpleNamespace(get_name=lambda: "TRITON_ATTN")
    layers = {"l0": SimpleNamespace(get_attn_backend=lambda: backend)}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    [group] = read_groups(engine(), groups_of(full()))
    assert kernel_of(config, group) == ("TRITON_ATTN", "device")
    monkeypatch.setattr(type(current_platform), "fp8_dtype", lambda *_: torch.float8_e4m3fnuz)
    assert kernel_of(config, group) == ("TRITON_ATTN", "device:float8_e4m3fnuz")


def test_gemma_4_pages_of_two_sizes_share_a_chain() -> None:
    window = interface.SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=96)
    config = engine()
    parts = read_groups(config, cache_of(config, {"a": window, "b": window, "c": full()}))
    assert sorted((part.kind, part.block_tokens) for part in parts) == [("full", 32), ("sliding:96", 64), ("sliding:96", 64)]
    blocks = group_blocks(parts)
    assert (blocks.key_tokens, blocks.block_tokens) == (32, 64)


# ---- layout of the KV cache ----
FLASH_ATTENTION = ["LBNHC", "LBHNC", "BLNHC", "BLHNC"]
"""Layouts that a worker reports, most preferred first: as FlashAttention, as FlashInfer on compute capability 10, as a CPU."""
HEADS_FIRST = ["LBHNC", "BLHNC"]
ON_CPU = ["LBHNC"]


@pytest.mark.parametrize(
    ("connector", "options", "capability", "reported", "resolved"),
    [
        ("KVStoreConnector", {}, (9, 0), FLASH_ATTENTION, "BLNHC"),
        ("KVStoreConnector", {}, (10, 0), HEADS_FIRST, "BLHNC"),
        ("KVStorePDConnector", {}, (9, 0), FLASH_ATTENTION, "BLNHC"),
        ("KVStoreConnector", {"kv_layout": "engine"}, (9, 0), FLASH_ATTENTION, "LBNHC"),
        ("KVStoreConnector", {"load_mode": "layerwise"}, (9, 0), FLASH_ATTENTION, "LBNHC"),
        ("KVStoreConnector", {}, (9, 0), ["LBNHC"], "LBNHC"),
        ("KVStoreConnector", {}, None, ON_CPU, "LBHNC"),
    ],
)
def test_vllm_resolves_the_layout_of_the_option(
    connector: str,
    options: dict[str, str],
    capability: tuple[int, int] | None,
    reported: list[str],
    resolved: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own resolution. A backend without the block-major layout keeps its own."""
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    platform = SimpleNamespace(
        device_type="cuda" if capability else "cpu",
        get_device_capability=lambda: DeviceCapability(*capability) if capability else None,
    )
    monkeypatch.setattr(facade, "current_platform", platform)
    module = "pd_connector" if connector == "KVStorePDConnector" else "connector"
    config = engine()
    config.cache_config.kv_cache_layout = None
    config.kv_transfer_config = KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path=f"kvclient.engines.vllm.{module}",
        kv_role="kv_both",
        kv_connector_extra_config=options,
    )
    assert resolve_kv_cache_layout(config, [reported]).name == resolved


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_required_layout_joins_the_layers_of_a_page(capability: tuple[int, int]) -> None:
    """The copier names joined layers as one piece: 512 KiB of Llama-3-8B instead of 64 KiB."""
    layout = ConnectorOptions().required_layout("cuda", capability)
    assert layout is not None
    config = engine(layout)
    cache = cache_of(config, {f"l{at}": full() for at in range(4)})
    caches = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout[layout])
    assert PagedCache([caches[f"l{at}"] for at in range(4)]).has_joined_layers


# ---- refusals ----
def mamba() -> Any:
    return interface.MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))


def of_kind(kind: type, **more: Any) -> Any:
    """A spec of another kind."""
    return kind(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, **more)


def refuse_groups(*specs: Any, **parallel: int) -> Callable[[], object]:
    return lambda: read_groups(engine(**parallel), groups_of(*specs))


def refuse_chunks(*specs: Any) -> Callable[[], object]:
    return lambda: tier_groups(SimpleNamespace(groups=[]), groups_of(*specs))


def refuse_steps(**change: Any) -> Callable[[], object]:
    def call() -> object:
        config = engine(pipeline_parallel_size=change.get("pipeline", 1))
        config.scheduler_config.async_scheduling = change.get("asynchronous", False)
        config.speculative_config = change.get("drafts")
        return check_steps(config)

    return call


def layerwise(groups: int, parts: int) -> Callable[[], object]:
    return lambda: ConnectorOptions(load_mode="layerwise").check_groups(groups, parts)


def refuse_handoffs(*specs: Any) -> Callable[[], object]:
    return lambda: check_handoffs(read_groups(engine(), groups_of(*specs)))


def sparse_handoffs() -> object:
    config = engine()
    return check_handoffs(read_groups(config, cache_of(config, sparse())))


def host(tensor: torch.Tensor) -> Callable[[], object]:
    return lambda: GroupPages([tensor], 4)


REFUSALS: dict[str, tuple[Callable[[], object], str, str]] = {
    "Mamba": (refuse_groups(full(), mamba()), "recurrent state", TIER),
    "DeepSeek V4": (
        refuse_groups(of_kind(interface.SlidingWindowMLASpec, sliding_window=64)),
        "latent attention with sliding windows",
        TIER,
    ),
    "encoder": (refuse_groups(of_kind(interface.EncoderOnlyAttentionSpec)), "encoder attention", NO_CONNECTOR),
    "cross attention": (refuse_groups(of_kind(interface.CrossAttentionSpec)), "cross attention", NO_CONNECTOR),
    "sink pages": (refuse_groups(of_kind(interface.SinkFullAttentionSpec, sink_len=4)), "sink pages", TIER),
    "reference windows": (refuse_groups(of_kind(interface.RSWASpec, rswa_window=64)), "windows over the answer", NO_CONNECTOR),
    "tier reference windows": (
        refuse_chunks(of_kind(interface.RSWASpec, rswa_window=64)),
        "windows over the answer",
        NO_CONNECTOR,
    ),
    "prefix LM": (refuse_groups(full(non_causal=True)), "later tokens", NO_CONNECTOR),
    "tier prefix LM": (refuse_chunks(full(), full(non_causal=True)), "later tokens", NO_CONNECTOR),
    "page sizes": (refuse_groups(full(), replace(full(), block_size=48)), "multiples of the smallest", TIER),
    "NVFP4": (refuse_groups(full(kv_quant_mode=interface.KVQuantMode.NVFP4)), "quantization", "use another kv_cache_dtype"),
    "no KV cache": (refuse_groups(), "without a KV cache", NO_CONNECTOR),
    "decode context": (
        refuse_groups(full(), decode_context_parallel_size=2),
        "context parallelism",
        "use tensor parallelism",
    ),
    "prefill context": (
        refuse_groups(full(), prefill_context_parallel_size=2),
        "context parallelism",
        "use tensor parallelism",
    ),
    "overlapping steps": (refuse_steps(asynchronous=True), "asynchronous scheduling", "use load_mode async"),
    "pipeline": (refuse_steps(pipeline=2), "pipeline parallelism", "use load_mode async"),
    "drafts": (refuse_steps(drafts=object()), "speculative decoding", "use load_mode async"),
    "layers of groups": (layerwise(2, 2), "layerwise loads of several KV cache groups", "use load_mode async"),
    "layers of parts": (
        layerwise(1, 2),
        "layerwise loads of a KV cache group with pages of several formats",
        "use load_mode async",
    ),
    "handoff of sizes": (refuse_handoffs(full(), replace(full(), block_size=64)), "handoffs", "use KVStoreConnector"),
    "handoff of parts": (sparse_handoffs, "handoffs", "use KVStoreConnector"),
    "layout": (host(torch.zeros(4, 8, 16)[:, :, ::2]), "not contiguous", "set VLLM_KV_CACHE_LAYOUT"),
    "kernel blocks": (host(torch.zeros(8, 3, 4, 8)[:, 1]), "kernel blocks", "set VLLM_KV_CACHE_LAYOUT"),
    "device": (
        lambda: make_pages([[torch.zeros(4, 8, device="meta")]], 4, strategy="auto", staging_bytes=1),
        "device",
        "use a CPU",
    ),
    "device layout": (
        lambda: late_pages([[torch.zeros(4, BLOCKS, 8).transpose(0, 1)[:, :, ::2]]]),
        "layout",
        "set VLLM_KV_CACHE_",
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=[name.replace(" ", "-") for name in REFUSALS])
def test_refusal_names_feature_and_alternative(refusal: tuple[Callable[[], object], str, str]) -> None:
    """In one sentence."""
    call, feature, alternative = refusal
    with pytest.raises(InvalidArgument) as refused:
        call()
    said = refused.value.message
    assert feature in said
    assert 0 < said.index("not supported") < said.index(alternative)
    assert ". " not in said
