"""The stream of one model: finds its label namespaces, follows their blocks, and publishes them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Final

from kvclient.events import BlockMirror, BlockWatcher, MirroredVolume
from kvclient.events.block_groups import GroupBlockId
from kvclient.events.labels import LabelNamespace
from kvclient.nodes.namespaces import list_namespaces
from kvstore.config.events import EventsConfig
from kvstore.core import limits
from kvstore.core.errors import KVStoreError
from kvstore.core.types import NamespaceId
from kvstore.events.label_reader import LabelReader
from kvstore.events.labelled import LabelledTranslator
from kvstore.events.namespace_choice import NamespaceChoice
from kvstore.events.publisher import EventPublisher
from kvstore.events.wire import Event
from kvstore.observe.counters import Counters
from kvstore.observe.exposition import Sample
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import events as events_metrics
from kvstore.rpc.auth.tokens import TokenSource

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)

_LIST_S: Final = 2.0
"""How often new namespaces are looked for."""
_TIMEOUT_S: Final = 2.0
_RETRY_LABELS_S: Final = 30.0
_MOST_LABELS: Final = 1_024
"""Labels that are read between two updates, per namespace."""


class ModelStream:
    """Publishes the labelled blocks of one model. One thread calls all methods.

    Args:
        config: model, filters, and address of the store.
        translator: keeps the published state.
        publisher: sends the events.
        counters: counts labels, and failures of the subscription.
    """

    def __init__(
        self, config: EventsConfig, translator: LabelledTranslator, publisher: EventPublisher, counters: Counters
    ) -> None:
        self._config = config
        self._translator = translator
        self._publisher = publisher
        self._token = TokenSource.of(file=config.client.token_file)
        self._counters = counters
        self._reader = LabelReader(config, counters)
        self._choice = NamespaceChoice(config)
        self._spaces: dict[NamespaceId, LabelNamespace] = {}
        self._watcher: BlockWatcher | None = None
        self._listed_s = -_LIST_S
        self._answered = False
        self._retry_s: float | None = None

    def gauges(self) -> Iterator[Sample]:
        """Yield the gauges of the published state."""
        yield Sample(events_metrics.TOLD_BLOCKS, len(self._translator))
        yield Sample(events_metrics.UNLABELLED_BLOCKS, self._translator.unlabelled)
        yield Sample(events_metrics.IGNORED_NAMESPACES, self._choice.ignored)

    def step(self) -> None:
        """Publish what has changed since the last call. Call it several times per second.

        Raises:
            KVStoreError: the metadata server rejects the subscription permanently.
        """
        now_s = time.monotonic()
        if now_s - self._listed_s >= _LIST_S:
            self._listed_s = now_s
            self._find_namespaces()
        if self._retry_s is not None and now_s >= self._retry_s:
            self._retry_s = None
            self._translator.refresh()
        if self._watcher is None:
            if self._answered:  # no engine labels blocks of the model yet
                self._complete()
            return
        self._watcher.check()
        complete = self._update(self._watcher, now_s)
        if complete:
            self._complete()

    def _complete(self) -> None:
        if not self._publisher.published.is_set():
            self._publisher.publish(lambda: [[]])  # so that subscribers learn the number
            self._publisher.published.set()

    def _update(self, watcher: BlockWatcher, now_s: float) -> bool:
        """Publish changes and read missing labels; whether everything that can be published is."""
        wanted: dict[NamespaceId, list[GroupBlockId]] = {}
        state = {"complete": False}

        def look(mirror: BlockMirror) -> None:
            state["complete"] = mirror.complete
            batches[:], more = self._translator.update(mirror, _MOST_LABELS)
            wanted.update(more)

        def translate() -> list[list[Event]]:
            watcher.read(look)
            return batches

        batches: list[list[Event]] = []
        self._publisher.publish(translate)
        for namespace, blocks in wanted.items():
            labels = self._reader.read(self._spaces[namespace], blocks)
            self._translator.add_labels(namespace, labels)
            failed = [block for block in blocks if block not in labels]
            if failed:
                self._translator.give_up(namespace, failed)
                self._retry_s = self._retry_s or now_s + _RETRY_LABELS_S
        return state["complete"] and not wanted

    def _find_namespaces(self) -> None:
        try:
            specs = list_namespaces(
                self._config.metadata, timeout_s=_TIMEOUT_S, tls=self._config.client.tls.resolve(), token=self._token
            )
        except KVStoreError as error:
            limited.warning("namespaces unknown: new ones are published later (%s)", error)
            return
        self._answered = True
        found = self._choice.choose(specs)
        self._spaces |= {one.spec.namespace: one for one in found}
        if self._translator.use(found):
            self._watch()

    def _watch(self) -> None:
        """Subscribe to all namespaces. The new mirror begins with a snapshot, of which only the difference is published."""
        if self._watcher is not None:
            self._watcher.close()
        namespaces = self._translator.namespaces
        logger.info("publishing the blocks of model %s: %d namespaces", self._config.model, len(namespaces))
        self._watcher = BlockWatcher(
            self._config.metadata,
            namespaces=namespaces if len(namespaces) <= limits.MAX_WATCH_FILTER else (),
            tls=self._config.client.tls.resolve(),
            token=self._token,
            counters=self._counters,
            on_change=self._translator.on_change,
        )

    def close(self) -> None:
        """End the subscription and disconnect."""
        if self._watcher is not None:
            self._watcher.close()
        self._reader.close()


def volume_filter(config: EventsConfig, volume: MirroredVolume) -> bool:
    """Whether a volume is one of the configured nodes and tiers."""
    return (not config.nodes or volume.node_id in config.nodes) and (not config.tiers or volume.tier in config.tier_kinds)
