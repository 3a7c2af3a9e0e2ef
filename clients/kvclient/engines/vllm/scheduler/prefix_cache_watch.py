"""Publishes which blocks vLLM's prefix cache holds. Watches its block pool, without a setting of the user.

vLLM's own KV events were not used: they exist only if the user switches them on, the scheduler drains their queue for its own
publisher, and they name no keys of the store. The pool instead answers for any hash at once whether it holds the block. A step
hands over the keys of blocks that its requests filled, and asks the pool about these and some others; see ``CacheTracker``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvclient import BlockKey, CacheSpec
from kvclient.engine_cache.cache_namespace import cache_spec
from kvclient.engine_cache.publication import CachePublication, cache_name
from kvclient.engine_cache.tracker import CacheOffer, CacheSpace, CacheTracker, KnownBlock
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.options import ConnectorOptions


class HashedRequest(Protocol):
    """The field of vLLM's ``Request`` that this module uses."""

    block_hashes: Sequence[bytes]


class PrefixCacheWatch:
    """Follows one engine's prefix cache. Called by the scheduler's thread.

    Args:
        options: of the connector.
        chain: the namespace whose keys the connector makes.
        groups: number of vLLM's KV cache groups.
        page_name: vLLM's name of the page of a block, given its hash and group.
        capacity_bytes: bytes of the pages in all workers.
        block_bytes: bytes of a block in all groups and workers.
        counters: receive the counts.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        chain: CacheSpec,
        groups: int,
        page_name: Callable[[Any, int], bytes],
        *,
        capacity_bytes: int,
        block_bytes: int,
        counters: ConnectorCounters,
    ) -> None:
        self._counters = counters
        self._groups = groups
        self._pool: Any = None
        self._last_s = time.monotonic()
        self._tracker = CacheTracker(
            _space(chain),
            options.published_blocks,
            lambda block_hash: tuple(page_name(block_hash, group) for group in range(groups)),
            lambda count: counters.add("cache_ignored_blocks", count),
        )
        hook = options.hook
        self._publication: CachePublication | None = CachePublication(
            cache_name("vllm"),
            hook.metadata,
            capacity_bytes=capacity_bytes,
            block_bytes=block_bytes,
            take_changes=self._tracker.take_changes,
            count=self._count,
            tls=hook.tls(),
            token=hook.client_options().shown_token(),
            setting_names=("tls_ca, tls_cert and tls_key", "token_file"),
        )
        self._is_abandoned = False
        self.name = self._publication.node_id
        """Name of the cache among the store's nodes."""
        self._publication.start()

    def _count(self, name: str, more: int) -> None:
        if more:
            self._counters.add(name, more)

    def bind_pool(self, pool: Any) -> None:  # noqa: ANN401
        """Receive vLLM's block pool."""
        self._pool = pool

    def connect(self, chain: CacheSpec) -> None:
        """Publish blocks of a weights epoch, and forget those of the last one.

        Args:
            chain: the namespace whose keys the connector makes.
        """
        self._tracker.clear(_space(chain))

    def computed(self, request: HashedRequest, first: int, parent: BlockKey | None, keys: Sequence[BlockKey]) -> int:
        """Receive blocks that a request has filled, or shares. Returns how many of them vLLM has hashed."""
        hashes = request.block_hashes[first : first + len(keys)]
        if hashes:
            self._tracker.offer(CacheOffer(first, parent, keys[: len(hashes)], hashes))
        return len(hashes)

    @property
    def is_published(self) -> bool:
        """Whether the index follows this cache."""
        return self._publication is not None and self._publication.is_connected and not self._is_abandoned

    def step(self) -> None:
        """Check a part of the blocks, once per step."""
        now_s = time.monotonic()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        if self._pool is not None:
            self._tracker.step(self._missing, elapsed_s)

    def _missing(self, blocks: Sequence[KnownBlock]) -> Sequence[KnownBlock]:
        find = self._pool.cached_block_hash_to_block.get_one_block
        if self._groups == 1:
            return [block for block in blocks if find(block[1]) is None]
        return [block for block in blocks if any(find(page) is None for page in block[1:])]

    def clear(self) -> None:
        """Forget all blocks: vLLM has cleared its prefix cache."""
        self._tracker.clear()

    def abandon(self) -> None:
        """Forget all blocks, and tell routers to ignore this cache: following the pool failed."""
        self._is_abandoned = True
        self._tracker.clear()

    def close(self) -> None:
        """End the publication."""
        publication, self._publication = self._publication, None
        if publication is not None:
            publication.close()


def _space(chain: CacheSpec) -> CacheSpace:
    return CacheSpace(chain.namespace, cache_spec(chain).namespace)
