"""Chunks in vLLM's canonical layout: copied by the workers of any number of ranks, not used if a model does not qualify."""

from __future__ import annotations

import logging
import secrets
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from tier_bed import engine
from vllm_bed import BLOCK, text, tiny

from kvstore.testing.connector.driver import StoreAddress

HEADS, TOKENS, HEAD, LAYERS, BLOCKS, CHUNKS = 4, 32, 16, 2, 6, 4
PROMPTS = [text(1, 300)]
LATER_S = 30.0
FALLBACK = "canonical layout impossible for this model"


class Ranks:
    """The workers of an engine, each with its heads of all pages, over one region of host memory.

    Args:
        count: number of ranks.
        whole: pages with all heads, ``[layer, block, head, token, 2 * head]``; None: empty pages.
        heads_first: order of heads and tokens in a page.
        per_chunk: blocks of a chunk.
        engine_id: of the region.
    """

    def __init__(self, count: int, whole: Any, engine_id: str, *, heads_first: bool, per_chunk: int) -> None:
        import torch
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

        from kvclient.engines.vllm.tier.host_worker import HostWorker

        self.per_chunk = per_chunk
        self.heads = max(1, HEADS // count)
        page_bytes = self.heads * TOKENS * 2 * HEAD * 4
        row = -(-max(count * self.heads, HEADS) * TOKENS * 2 * HEAD * 4 * LAYERS * per_chunk // 4096) * 4096
        self.pages, self.workers, self.regions = [], [], []
        for rank in range(count):
            first = rank * HEADS // count
            shape = (BLOCKS, self.heads, TOKENS, 2 * HEAD) if heads_first else (BLOCKS, TOKENS, self.heads, 2 * HEAD)
            memory = [torch.zeros(shape) for _ in range(LAYERS)]
            views = memory if heads_first else [one.transpose(1, 2) for one in memory]
            if whole is not None:
                for view, one in zip(views, whole, strict=True):
                    view.copy_(one[:, first : first + self.heads])
            mappings = self._mappings(count, rank, views)
            caches = SimpleNamespace(
                tensors=[
                    SimpleNamespace(tensor=one.view(torch.int8).reshape(BLOCKS, page_bytes), page_size_bytes=page_bytes)
                    for one in memory
                ],
                group_data_refs=[
                    [SimpleNamespace(tensor_idx=at, page_size_bytes=page_bytes, mapping=one) for at, one in enumerate(mappings)]
                ],
            )
            region = SharedOffloadRegion(
                engine_id=engine_id,
                num_chunks=CHUNKS,
                rank=rank,
                kv_bytes_per_chunk=row,
                cpu_page_size=page_bytes * LAYERS * per_chunk,
            )
            self.pages.append(views)
            self.regions.append(region)
            self.workers.append(HostWorker(caches, region, per_chunk, canonical=True))

    def _mappings(self, count: int, rank: int, views: list[Any]) -> list[Any]:
        """Return the mappings that vLLM derives for these pages."""
        import torch
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import derive_canonical_mappings
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=self.heads, head_size=HEAD, dtype=torch.float32)
        names = [str(layer) for layer in range(LAYERS)]
        parallel = SimpleNamespace(
            tensor_parallel_size=count,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            world_size=count,
            rank=rank,
        )
        model = SimpleNamespace(get_total_num_kv_heads=lambda: HEADS)
        config = SimpleNamespace(parallel_config=parallel, model_config=model)
        found = derive_canonical_mappings(
            config, KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(names, spec)]), dict(zip(names, views, strict=True))
        )
        return [found[name] for name in names]

    def copy(self, *, stores: bool, blocks: list[int], chunks: list[int], skip: int = 0) -> None:
        """Copy blocks to or from chunks, in all ranks."""
        pages = SimpleNamespace(block_ids=np.array(blocks), group_sizes=[len(blocks)], block_indices=[skip])
        rows = SimpleNamespace(block_ids=np.array(chunks))
        for worker in self.workers:
            if stores:
                worker.submit_store(1, pages, rows)
            else:
                worker.submit_load(1, rows, pages)
        for worker in self.workers:
            worker.wait({1})
            assert [one.success for one in worker.get_finished()] == [True]

    def rows(self) -> Any:
        """Host memory, one row per chunk."""
        return np.asarray(self.regions[0].create_kv_memoryview()).view(np.uint8)

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.shutdown()


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("per_chunk", [1, 2])
@pytest.mark.parametrize(("storing", "loading"), [(1, 2), (2, 1), (4, 2), (8, 1), (1, 8), (2, 8)])
def test_tier_canonical_heads_move_between_ranks(storing: int, loading: int, per_chunk: int, heads_first: bool) -> None:
    import torch

    torch.manual_seed(0)
    whole = torch.randn(LAYERS, BLOCKS, HEADS, TOKENS, 2 * HEAD)
    order: dict[str, Any] = {"heads_first": heads_first, "per_chunk": per_chunk}
    blocks, chunks, targets = [5, 0, 3, 2][: 2 * per_chunk], [3, 1], [1, 4, 0, 5][: 2 * per_chunk]
    ids = [secrets.token_hex(8) for _ in range(2)]
    first = Ranks(storing, whole, ids[0], **order)
    second = Ranks(loading, None, ids[1], **order)
    try:
        first.copy(stores=True, blocks=blocks, chunks=chunks)
        used = HEADS * TOKENS * 2 * HEAD * 4 * LAYERS * per_chunk
        stored, loaded = (ranks.rows()[:, :used] for ranks in (first, second))
        loaded[chunks] = stored[chunks]
        skip = per_chunk - 1  # a load may begin within a chunk
        second.copy(stores=False, blocks=targets[skip:], chunks=chunks, skip=skip)
        pairs = list(zip(blocks, targets, strict=True))[skip:]
        for rank, views in enumerate(second.pages):
            heads = slice(rank * HEADS // loading, rank * HEADS // loading + second.heads)
            for layer, view in enumerate(views):
                for source, target in pairs:
                    assert torch.equal(view[target], whole[layer, source, heads])
                untouched = set(range(BLOCKS)) - {target for _, target in pairs}
                assert not any(view[block].any() for block in untouched)
    finally:
        first.close()
        second.close()


def test_tier_hung_copy_ends_waits_and_keeps_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from kvclient.engines.vllm.tier import host_worker
    from kvstore.core.errors import DeadlineExceeded

    gate = threading.Event()
    monkeypatch.setattr(host_worker, "run", lambda _: gate.wait(LATER_S))
    monkeypatch.setattr(host_worker, "WAIT_S", 0.1)
    ranks = Ranks(1, None, secrets.token_hex(8), heads_first=True, per_chunk=1)
    with pytest.raises(DeadlineExceeded, match=r"jobs=\[1\]"):
        ranks.copy(stores=True, blocks=[0], chunks=[1])
    ranks.close()
    assert "host memory not released" in caplog.text
    assert not ranks.rows().any(), "still mapped"
    gate.set()
    monkeypatch.setattr(host_worker, "WAIT_S", LATER_S)
    ranks.workers[0].wait({1})
    ranks.close()


@pytest.mark.parametrize("family", ["lfm2", pytest.param("gemma4", marks=pytest.mark.thorough)])
def test_tier_canonical_layout_falls_back_if_impossible(
    family: str, folder: Path, store: StoreAddress, caplog: pytest.LogCaptureFixture
) -> None:
    """States are not divided by heads: chunks are stored as without the option, after a line in the log."""
    model = tiny(family, folder)
    caplog.set_level(logging.WARNING)
    with engine(model, store, extra={"canonical_layout": True}) as served:
        computed = served.answers(PROMPTS)
        served.forget_memory()
        loaded = served.answers(PROMPTS)
    assert caplog.text.count(FALLBACK) == int(family == "lfm2")
    assert loaded[0].tokens == computed[0].tokens
    assert loaded[0].cached_tokens >= 299 // (2 * BLOCK) * 2 * BLOCK
