"""Announces and labels the blocks that the connector stores, as vLLM's requests describe them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvclient import BlockKey, CacheSpec
from kvclient.engines.vllm.announcements.engine_events import AnnouncedGroup, EngineEvents
from kvclient.engines.vllm.announcements.engine_run import EngineRun
from kvclient.engines.vllm.announcements.messages import GroupKind, engine_run, kv_events
from kvclient.engines.vllm.announcements.recent_prefixes import RecentPrefixes
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.options import ConnectorOptions
from kvclient.events.block_groups import GroupBlockId, xor
from kvclient.events.labels import MAIN_KINDS


class RequestObserver:
    """See ``StoreObserver``. A block is announced if all KV cache groups and shards hold it, with one event per group.

    Args:
        options: of the connector.
        kinds: by KV cache group.
        block_tokens: tokens of a block.
        engine_hash: see ``engine_hash_name``.
        announce: whether the engine publishes KV events.
        counters: count labels and retracted announcements.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        kinds: Sequence[GroupKind],
        block_tokens: int,
        *,
        engine_hash: str,
        announce: bool,
        counters: ConnectorCounters,
    ) -> None:
        self._kinds = kinds
        self._block_tokens = block_tokens
        self._locality = options.events_locality or None
        self._engine_hash = engine_hash
        self._labelled = options.block_labels
        self._chain = b""
        self._recent = RecentPrefixes()
        self.events = EngineEvents(options.hook, announce=announce, most_blocks=options.events_blocks, count=counters.add)

    def connect(self, specs: Sequence[CacheSpec], chain: CacheSpec) -> None:
        """Follow the blocks of a weights epoch.

        Args:
            specs: the namespaces of all groups and shards.
            chain: the namespace whose keys the connector makes.
        """
        self._chain = chain.namespace
        self._recent = RecentPrefixes()
        kind = next((kind for kind, _ in self._kinds if kind in MAIN_KINDS), "")
        self.events.connect([AnnouncedGroup(specs, self._engine_hash, kind, labelled=self._labelled)])

    def _run(self, request: Any, first: int, keys: Sequence[BlockKey]) -> EngineRun | None:  # noqa: ANN401
        ids = [GroupBlockId(xor(key, self._chain)) for key in keys]
        return engine_run(request, first, ids, self._block_tokens)

    def planned(self, request: Any, first: int, keys: Sequence[BlockKey]) -> EngineRun | None:  # noqa: ANN401
        """Follow blocks that will be stored."""
        run = self._run(request, first, keys)
        if run is not None:
            self.events.planned(run)
        return run

    def stored(self, plan: EngineRun | None) -> None:
        """Announce and label blocks that were stored."""
        if plan is not None:
            self.events.stored(plan)

    def found(self, request: Any, keys: Sequence[BlockKey]) -> None:  # noqa: ANN401
        """Label the blocks of a prefix again, in case that their labels were evicted: those that were not labelled recently."""
        if not self.events.labels:
            return
        part = self._recent.next_part(keys)
        run = self._run(request, part.start, keys[part.start : part.stop]) if part else None
        if run is not None and self.events.found(run):
            self._recent.labelled(keys, part)

    def take_events(self) -> list[Any]:
        """Return vLLM's events since the last call."""
        return kv_events(self.events.take(), self._kinds, self._block_tokens, self._locality)
