"""SGLang's tree as an engine for the connector kit: its "model" computes the KV of a page from all tokens up to it.

An answer depends on every byte of a prompt's KV in device memory after loads, so a wrong byte gives another answer.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang_cases import PAGE

from kvstore.lab import sglang_kernels as sglang_kernels
from kvstore.testing.connector.driver import EngineAnswer, StoreAddress

LAYERS, HEADS, HEAD_DIM = 4, 2, 64
TOKENS = 4096
VISIBLE_S = 2.0


def page_hashes(prompt: Sequence[int]) -> list[str]:
    """Return SGLang's hashes of the whole pages of a prompt, leaving one token to compute."""
    from sglang.srt.mem_cache.utils import get_hash_str

    whole = (len(prompt) - 1) // PAGE * PAGE
    hashes = get_hash_str(array("q", prompt[:whole]), page_size=PAGE) if whole else []
    return list(hashes)


def page_kv(page_hash: str) -> torch.Tensor:
    """Return the KV of a page, ``[K and V of each layer, tokens, heads, head_dim]``."""
    generator = torch.Generator().manual_seed(int(page_hash[:15], 16))
    return torch.randn((2 * LAYERS, PAGE, HEADS, HEAD_DIM), generator=generator)


def answer(kv: torch.Tensor, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """Derive the tokens of an answer from all KV of a prompt, ``[buffers, tokens, …]``, and from the answer's earlier tokens."""
    tail = prompt[kv.shape[1] :]
    digest = hashlib.sha256(kv.contiguous().numpy().tobytes() + str(list(tail)).encode()).digest()
    return tuple(digest[at % len(digest)] for at in range(count))


class Alone:
    """The engine without a store."""

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[EngineAnswer]:
        made = []
        for prompt in prompts:
            pages = [page_kv(one) for one in page_hashes(prompt)]
            kv = torch.cat(pages, 1) if pages else torch.empty((2 * LAYERS, 0, HEADS, HEAD_DIM))
            made.append(EngineAnswer(answer(kv, prompt, max_tokens)))
        return made

    def flush(self, timeout_s: float) -> bool:
        return True

    def forget(self) -> None: ...

    def counters(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None: ...


class TreeEngine:
    """The engine with a store below SGLang's tree."""

    def __init__(self, extra: Mapping[str, object]) -> None:
        self._extra = extra
        self._stored: list[list[str]] = []
        self._counted: dict[str, int] = {}
        self._tree = self._open()

    def _open(self) -> Any:
        from sglang.test.kits.unified_radix_cache.config import CacheConfig

        from kvstore.lab.sglang_bed import Tree

        config = CacheConfig(
            page_size=PAGE, num_layers=LAYERS, kv_size=TOKENS, head_num=HEADS, head_dim=HEAD_DIM, dtype=torch.float32
        )
        return Tree(self._extra, config=config)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[EngineAnswer]:
        return [self._one(list(prompt), max_tokens) for prompt in prompts]

    def _one(self, prompt: list[int], max_tokens: int) -> EngineAnswer:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        hashes = page_hashes(prompt)
        if not hashes:
            return Alone().generate([prompt], max_tokens)[0]
        if self._tree.allocator.available_size() < 2 * len(prompt):
            self.forget()
        tree, tokens = self._tree, prompt[: len(hashes) * PAGE]
        known = self._matched(tokens)
        loaded = tree.prefetch(tokens) - known
        if loaded > 0:
            tree.load_back(tokens)
        have = tree.match(tokens)
        old = (
            tree.cache.path_device_indices(have.last_device_node) if have.device_prefix_len else torch.empty(0, dtype=torch.int64)
        )
        new = tree.allocator.alloc(len(tokens) - len(old))
        indices = torch.cat([old, new.to(torch.int64)])
        buffers = [*tree.kv_pool.k_buffer, *tree.kv_pool.v_buffer]
        for page in range(len(old) // PAGE, len(hashes)):
            for buffer, kv in zip(buffers, page_kv(hashes[page]), strict=True):
                buffer[indices[page * PAGE : (page + 1) * PAGE]] = kv
        kv = torch.stack([buffer[indices] for buffer in buffers])
        tree.cache.insert(InsertParams(key=RadixKey(array("q", tokens)), value=indices, prev_prefix_len=len(old)))
        tree.back_up(tree.match(tokens).last_device_node)
        self._stored.append(hashes)
        return EngineAnswer(answer(kv, prompt, max_tokens), max(0, loaded))

    def _matched(self, tokens: list[int]) -> int:
        found = self._tree.match(tokens)
        return int(found.device_prefix_len + found.host_hit_length)

    def flush(self, timeout_s: float) -> bool:
        """Wait until lookups find the backups, or a timeout. The backups themselves have already completed."""
        ends_s = time.monotonic() + min(timeout_s, VISIBLE_S)
        stored, self._stored = self._stored, []
        for hashes in stored:
            while self._tree.storage.batch_exists(hashes) < len(hashes) and time.monotonic() < ends_s:
                time.sleep(0.01)
        return True

    def forget(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        cache = self._tree.cache
        cache.evict(EvictParams(num_tokens=TOKENS))
        cache.evict_host(4 * TOKENS)
        if self._tree.allocator.available_size() < TOKENS or cache.cache_controller.mem_pool_host.available_size() < TOKENS:
            self.close()
            self._tree = self._open()

    def counters(self) -> Mapping[str, int]:
        return {**self._counted, **self._tree.storage.counters()}

    def close(self) -> None:
        self._counted = dict(self.counters())
        self._tree.close()


@dataclass(frozen=True)
class SGLangDriver:
    """Creates trees with the backend."""

    model: str = "kit"
    block_tokens: int = PAGE

    def open(self, store: StoreAddress | None, options: Mapping[str, object]) -> Alone | TreeEngine:
        sglang_kernels.install()
        if store is None:
            return Alone()
        extra = {
            "backend_name": "kvstore",
            "module_path": "kvclient.engines.sglang.backend",
            "class_name": "KVStoreHiCache",
            "interface_v1": 1,
            "hicache_storage_pass_prefix_keys": True,
            "prefetch_threshold": 1,
            "model": self.model,
            "weights_epoch": "1",
            "metadata": store.metadata,
            "node": store.node,
        }
        return TreeEngine({**extra, **options})
