"""Blocks stored as int8: two engines on a CPU share them, an engine with plain blocks does not. Unsuitable caches are refused."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch

with warnings.catch_warnings():
    warnings.simplefilter("default")  # of engines, as everywhere in this folder; modules are imported before that is set
    from vllm import _custom_ops as ops

sys.path.append(str(Path(__file__).resolve().parents[1] / "device"))

from caches import INT8_SHARE
from int8_error import attention_error
from vllm_bed import SingleEngine, VllmDriver, VllmEngine, text, tiny

from kvclient import InvalidArgument
from kvclient.engines.vllm.memory.device_pages import make_pages
from kvclient.engines.vllm.memory.int8_groups import int8_groups
from kvclient.engines.vllm.options import ConnectorOptions
from kvclient.engines.vllm.pd.options import PdOptions
from kvstore.testing.connector.driver import StoreAddress

PROMPTS = [text(1, 700), text(2, 580), text(3, 128), text(4, 31)]


@pytest.fixture
def single() -> Iterator[SingleEngine]:
    engine = SingleEngine()
    yield engine
    engine.close()


def test_int8_blocks_are_shared_only_by_engines_with_int8(folder: Path, store: StoreAddress, single: SingleEngine) -> None:
    def ask(stored_dtype: str, mode: str = "async") -> tuple[VllmEngine, list[tuple[int, ...]], list[int]]:
        driver = VllmDriver(tiny("llama", folder), load_mode=mode)
        engine = single.open(driver, store, {"salt": "int8", "stored_dtype": stored_dtype}, dtype="bfloat16")
        answers = engine.one_by_one(PROMPTS)
        assert engine.flush()
        engine.worker_side.count_device_copies()
        counts = engine.counters()
        assert counts.get("bugs", 0) == counts.get("loads_failed", 0) == counts.get("stores_failed", 0) == 0
        return engine, [one.tokens for one in answers], [one.loaded_tokens for one in answers]

    engine, computed, loaded = ask("int8")
    assert loaded == [0] * len(PROMPTS)
    whole = [(len(prompt) - 1) // engine.block_tokens * engine.block_tokens for prompt in PROMPTS]
    stored = engine.counters()["store_bytes"]
    answers = []
    for mode in ("async", "layerwise"):
        engine, tokens, loaded = ask("int8", mode)
        answers.append(tokens)
        assert loaded == whole
        assert [one[0] for one in tokens] == [one[0] for one in computed], "later tokens may differ"
        assert engine.counters()["device_loaded_bytes"] == engine.counters()["load_bytes"] > 0
    assert answers[0] == answers[1]
    engine, tokens, loaded = ask("engine")
    assert (tokens, loaded) == (computed, [0] * len(PROMPTS)), "blocks of another encoding were found"
    assert stored / engine.counters()["store_bytes"] == pytest.approx(INT8_SHARE)


@pytest.mark.parametrize(("isa", "dim", "tokens"), [("vec", 64, 32), ("vec", 128, 96), ("vec16", 80, 16), ("amx", 64, 32)])
def test_int8_groups_fit_the_pages_of_cpu_kernels(isa: str, dim: int, tokens: int) -> None:
    """Pages as vLLM's own operation writes them: the error of attention shows whether channels of the keys have own scales."""
    heads, blocks = 2, 512 // tokens
    generator = torch.Generator().manual_seed(dim)
    kv = torch.randn((2, blocks * tokens, heads, dim), generator=generator)
    kv[0, ..., torch.randperm(dim, generator=generator)[: dim // 32]] *= 20
    kv = kv.to(torch.bfloat16)
    cache = torch.zeros((blocks + 1, heads, tokens, 2 * dim), dtype=torch.bfloat16)
    slots = torch.arange(blocks * tokens)

    def write(values: torch.Tensor, pages: torch.Tensor) -> None:
        keys_of, values_of = pages.view(len(pages), heads, 2 * tokens, dim).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(values[0], values[1], keys_of, values_of, slots, isa)

    write(kv, cache)
    (pages,) = make_pages(
        [[cache]], len(cache), strategy="auto", staging_bytes=1 << 20, int8=[int8_groups(cache, "full", "CPU_ATTN", isa)]
    )
    blocks_of = pages.buffer(range(blocks))
    coded = blocks_of.gather()  # type: ignore[union-attr]
    cache.zero_()
    blocks_of.read_arena(memoryview(coded.reshape(-1)), slots[:blocks].numpy() * coded.shape[1], 0, 0, 1)  # type: ignore[union-attr]
    # each number is its index, in parts that bfloat16 holds exactly, so the page shows the position to which the kernel copies it
    number = torch.arange(kv.numel()).view(kv.shape)
    places = []
    for part in (number // 256 // 256, number // 256 % 256, number % 256):
        marks = torch.zeros_like(cache)
        write(part.to(torch.bfloat16), marks)
        places.append(marks[:blocks].to(torch.int64))
    place = (places[0] * 256 + places[1]) * 256 + places[2]
    after = torch.zeros(kv.numel(), dtype=torch.bfloat16)
    after[place.reshape(-1)] = cache[:blocks].reshape(-1)
    query = torch.randn((1, heads, 8, dim), generator=generator)
    shape = (2, blocks, tokens, heads, dim)
    assert 0 < attention_error(kv.view(shape), after.view(shape), query) <= 0.02


def test_int8_of_unknown_pages_is_refused() -> None:
    cache = torch.zeros((4, 2, 32, 128), dtype=torch.bfloat16)
    for kind, backend, isa, tensor in (
        ("mla", "CUTLASS_MLA", "device", cache),
        ("full", "FLASH_ATTN", "device", cache.view(4, 64, 128)),
        ("full", "FLEX_ATTENTION", "device", cache),
        ("full", "CPU_ATTN", "neon", cache),
        ("full", "FLASH_ATTN", "device", cache.view(4, 16, 4, 128)),
    ):
        with pytest.raises(InvalidArgument, match="int8"):
            int8_groups(tensor, kind, backend, isa)
    for dtype in (torch.float32, torch.uint8, torch.float8_e4m3fn):
        pages = cache.to(torch.float32).to(dtype)
        with pytest.raises(InvalidArgument, match="16-bit floats"):
            make_pages([[pages]], 4, strategy="auto", staging_bytes=1, int8=[int8_groups(pages, "full", "FLASH_ATTN", "device")])


def test_int8_impossible_options_are_rejected() -> None:
    with pytest.raises(InvalidArgument, match="unknown choice"):
        ConnectorOptions.from_mapping({"stored_dtype": "fp8"})
    with pytest.raises(InvalidArgument, match="staged"):
        ConnectorOptions.from_mapping({"stored_dtype": "int8", "device_copies": "batched"})
    with pytest.raises(InvalidArgument, match="handoffs"):
        PdOptions.from_mapping({"stored_dtype": "int8"})
