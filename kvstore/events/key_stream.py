"""The stream of all blocks, with the store's own keys: for consumers that compute these keys themselves."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Final

from kvclient.events import BlockMirror, BlockWatcher, Change
from kvclient.nodes.namespaces import list_namespaces
from kvstore.config.events import EventsConfig
from kvstore.core.errors import KVStoreError
from kvstore.core.types import NamespaceId, Tier
from kvstore.events.publisher import EventPublisher
from kvstore.events.translation import Translator
from kvstore.observe.counters import Counters
from kvstore.observe.exposition import Sample
from kvstore.observe.metric_definitions import events as events_metrics
from kvstore.rpc.auth.tokens import TokenSource

logger = logging.getLogger(__name__)

_RETRY_S: Final = 1.0
_TIMEOUT_S: Final = 1.0


_TIERS: Final = (Tier.DRAM, Tier.NVME)
"""Tiers without a filter. What engines hold in HBM, they announce themselves."""


class BlockTokens:
    """Tokens per block, by namespace. An unknown namespace is requested from the server, at most once per second."""

    def __init__(self, config: EventsConfig) -> None:
        self._config = config
        self._token = TokenSource.of(file=config.client.token_file)
        self._known: dict[NamespaceId, int] = {}
        self._requested_s = -_RETRY_S

    def __call__(self, namespace: NamespaceId) -> int:
        tokens = self._known.get(namespace)
        if tokens is None and time.monotonic() - self._requested_s >= _RETRY_S:
            self._requested_s = time.monotonic()
            try:
                specs = list_namespaces(
                    self._config.metadata, timeout_s=_TIMEOUT_S, tls=self._config.client.tls.resolve(), token=self._token
                )
            except KVStoreError as error:
                logger.warning("namespaces unknown: events contain block_size 0 (%s)", error)
                specs = []
            self._known |= {spec.namespace: spec.block_tokens for spec in specs}
            tokens = self._known.get(namespace)
        return tokens or 0


class KeyStream:
    """Publishes all blocks.

    Args:
        config: filters, and address of the store.
        translator: keeps the published state.
        publisher: sends the events.
        counters: counts failures of the subscription.
    """

    def __init__(self, config: EventsConfig, translator: Translator, publisher: EventPublisher, counters: Counters) -> None:
        self._translator = translator
        self._publisher = publisher
        self._watcher = BlockWatcher(
            config.metadata,
            namespaces=config.namespace_ids,
            nodes=config.node_ids,
            tiers=config.tier_kinds or _TIERS,
            tls=config.client.tls.resolve(),
            token=TokenSource.of(file=config.client.token_file),
            most_blocks=config.max_blocks,
            counters=counters,
            on_change=self._take,
        )

    def _take(self, mirror: BlockMirror, change: Change) -> None:
        self._publisher.publish(lambda: self._translator.take(mirror, change))
        if mirror.complete and not self._publisher.published.is_set():
            self._publisher.publish(lambda: [[]])  # so that subscribers of an empty store learn the number
            self._publisher.published.set()

    def step(self) -> None:
        """Check the subscription; events are published by its thread.

        Raises:
            KVStoreError: the metadata server rejects the subscription permanently.
        """
        self._watcher.check()

    def gauges(self) -> Iterator[Sample]:
        """Yield the gauges of the published state."""
        yield Sample(events_metrics.TOLD_BLOCKS, len(self._translator))

    def close(self) -> None:
        """End the subscription."""
        self._watcher.close()
