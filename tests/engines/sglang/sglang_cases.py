"""Helpers of tests with SGLang: configurations, page hashes, random pages and how to compare them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from kvstore.embedded.cluster import LocalCluster

PAGE = 16
MIB = 1 << 20


def backend_extra(cluster: LocalCluster, model: str, node: str = "n", **changes: object) -> dict[str, object]:
    """Return ``--hicache-storage-backend-extra-config`` of our backend: in place and chained by default."""
    given = {
        "backend_name": "kvstore",
        "module_path": "kvclient.engines.sglang.backend",
        "class_name": "KVStoreHiCache",
        "interface_v1": 1,
        "metadata": cluster.metadata_address,
        "node": cluster.node(node).local_socket,
        "model": model,
        "weights_epoch": "1",  # these pools have no weights
    }
    return {**given, **changes}


def hashes(chain: str, count: int) -> list[str]:
    """Return the page hashes of a chain as SGLang computes them: each over the previous one."""
    made, before = [], b""
    for page in range(count):
        before = hashlib.sha256(before + f"{chain}/{page}".encode()).digest()
        made.append(before.hex())
    return made


def prefixed(prefix: Sequence[str]) -> Any:
    """Return SGLang's description of a batch that follows some pages."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

    return HiCacheStorageExtraInfo(prefix_keys=list(prefix))


def positions(pages: Sequence[int], page_tokens: int = PAGE) -> torch.Tensor:
    """Return positions of pages in a host pool."""
    return torch.cat([torch.arange(page * page_tokens, (page + 1) * page_tokens) for page in pages])


def randomise(pool: Any, seed: int) -> None:
    """Fill a host pool."""
    generator = torch.Generator().manual_seed(seed)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=generator))


def contents(pool: Any, pages: Sequence[int], page_tokens: int = PAGE) -> torch.Tensor:
    """Return flat copies of pages."""
    return torch.stack([pool.get_data_page(page * page_tokens, flat=True).clone() for page in pages])
