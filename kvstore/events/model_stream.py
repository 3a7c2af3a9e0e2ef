"""The stream of one model: finds its label namespaces, follows their blocks, and publishes them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
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
from kvstore.events.label_retries import LabelRetries
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
_SUBSCRIBE_S: Final = 30.0
"""Pause between two subscriptions. Each one reads a snapshot of all blocks, so namespaces that appear during the pause wait."""
_READ_S: Final = 5.0
"""Time for reading labels between two updates."""
_UNAVAILABLE_S: Final = 30.0
"""Pause after the store did not answer for a label namespace."""
_SCAN_S: Final = 600.0
"""Pause between two scans for labels whose failures were forgotten."""
_MOST_LABELS: Final = 1_024
"""Labels that are read between two updates, per namespace."""
_MOST_FAILURES: Final = 100_000


class ModelStream:
    """Publishes the labelled blocks of one model. One thread calls all methods.

    Args:
        config: model, filters, and address of the store.
        translator: keeps the published state.
        publisher: sends the events.
        counters: counts labels, and failures of the subscription.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: EventsConfig,
        translator: LabelledTranslator,
        publisher: EventPublisher,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._translator = translator
        self._publisher = publisher
        self._token = TokenSource.of(file=config.client.token_file)
        self._counters = counters
        self._clock = clock
        self._reader = LabelReader(config, counters)
        self._choice = NamespaceChoice(config)
        self._found: list[LabelNamespace] = []
        self._spaces: dict[NamespaceId, LabelNamespace] = {}
        """Namespaces that the translator publishes."""
        self._watcher: BlockWatcher | None = None
        self._watches_all = False
        self._complete = False
        """The mirror was complete at the last update."""
        self._subscribed_s = self._scanned_s = self._listed_s = float("-inf")
        self._answered = False
        self._retries = LabelRetries(_MOST_FAILURES)
        self._forgotten = 0
        self._unavailable_until_s: dict[NamespaceId, float] = {}
        self._turn = 0
        self._starting: dict[NamespaceId, int] | None = None
        """By label namespace: labels that were missing at the first complete mirror and were not tried yet. None: none was."""

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
        now_s = self._clock()
        if now_s - self._listed_s >= _LIST_S:
            self._listed_s = now_s
            self._find_namespaces()
        self._follow_found(now_s)
        if self._watcher is None:
            if self._answered:  # no engine labels blocks of the model yet
                self._set_ready()
            return
        self._watcher.check()
        self._ask_again(now_s)
        tried = self._starting is not None and not self._starting  # this update publishes the last of their blocks
        self._update(self._watcher, now_s)
        if tried:
            self._set_ready()

    def _set_ready(self) -> None:
        if not self._publisher.published.is_set():
            self._publisher.publish(lambda: [[]])  # so that subscribers learn the number
            self._publisher.published.set()

    def _update(self, watcher: BlockWatcher, now_s: float) -> None:
        """Publish changes and read missing labels."""
        wanted: dict[NamespaceId, list[GroupBlockId]] = {}

        def look(mirror: BlockMirror) -> None:
            self._complete = mirror.complete
            batches[:], more = self._translator.update(mirror, _MOST_LABELS)
            wanted.update(more)

        def translate() -> list[list[Event]]:
            watcher.read(look)
            return batches

        batches: list[list[Event]] = []
        self._publisher.publish(translate)
        if self._complete and not self._publisher.published.is_set():
            missing = self._translator.wanted
            starting = missing if self._starting is None else self._starting
            self._starting = {one: min(count, missing[one]) for one, count in starting.items() if one in missing}
        end_s = time.monotonic() + _READ_S
        turns = sorted(wanted)
        for at in range(len(turns)):
            namespace = turns[(self._turn + at) % len(turns)]
            self._read_labels(namespace, wanted[namespace], now_s, end_s)
            if time.monotonic() >= end_s:  # the others are first in the next update
                self._turn += at + 1
                break

    def _read_labels(self, namespace: NamespaceId, blocks: list[GroupBlockId], now_s: float, end_s: float) -> None:
        if self._unavailable_until_s.get(namespace, now_s) > now_s:
            self._count_tried(namespace, None)
            return
        waiting = [block for block in blocks if self._retries.is_waiting((namespace, block))]
        self._translator.give_up(namespace, waiting)
        self._count_tried(namespace, len(waiting))
        blocks = [block for block in blocks if not self._retries.is_waiting((namespace, block))]
        if not blocks:
            return
        if not self._translator.has_space:
            self._drop_labels(namespace, blocks, now_s)
            return
        read = self._reader.read(self._spaces[namespace], blocks, end_s)
        refused = self._translator.add_labels(namespace, read.labels)
        for block in read.labels:
            self._retries.succeeded((namespace, block))
        self._count_tried(namespace, len(read.labels) + len(read.failed) - len(refused))
        if refused:
            self._drop_labels(namespace, refused, now_s)
        new = self._fail(namespace, read.failed, now_s)
        if new:
            limited.warning("labels not read, tried again later (new=%d, malformed=%d)", new, read.malformed)
        if read.unavailable:
            self._unavailable_until_s[namespace] = now_s + _UNAVAILABLE_S
            self._count_tried(namespace, None)

    def _count_tried(self, namespace: NamespaceId, labels: int | None) -> None:
        """Count labels towards the start. None: the store cannot be read now, and the start waits for no more of them."""
        if self._starting and namespace in self._starting:
            self._starting[namespace] -= self._starting[namespace] if labels is None else labels
            if self._starting[namespace] <= 0:
                del self._starting[namespace]

    def _drop_labels(self, namespace: NamespaceId, blocks: Sequence[GroupBlockId], now_s: float) -> None:
        """Leave blocks without labels, since these do not fit into memory. They are tried again like failed ones."""
        self._counters.add(events_metrics.LABELS_DROPPED, len(blocks))
        limited.warning("blocks not published: events.labels_memory is used up (blocks=%d)", len(blocks))
        self._fail(namespace, blocks, now_s)
        self._count_tried(namespace, len(blocks))

    def _fail(self, namespace: NamespaceId, blocks: Sequence[GroupBlockId], now_s: float) -> int:
        """Read these labels again later. Returns how many of them failed for the first time."""
        self._translator.give_up(namespace, blocks)
        return sum(self._retries.failed((namespace, block), now_s) for block in blocks)

    def _ask_again(self, now_s: float) -> None:
        """Ask for labels again whose pause has ended."""
        for namespace, block in self._retries.take_due(now_s, _MOST_LABELS):
            if not self._translator.ask_again(namespace, block):
                self._retries.succeeded((namespace, block))
        forgotten = self._retries.forgotten - self._forgotten
        if forgotten and now_s - self._scanned_s >= _SCAN_S:
            self._scanned_s, self._forgotten = now_s, self._retries.forgotten
            self._counters.add(events_metrics.LABELS_FORGOTTEN, forgotten)
            limited.warning("all blocks scanned for labels: too many failures to remember (forgotten=%d)", forgotten)
            self._translator.refresh()

    def _find_namespaces(self) -> None:
        try:
            specs = list_namespaces(
                self._config.metadata, timeout_s=_TIMEOUT_S, tls=self._config.client.tls.resolve(), token=self._token
            )
        except KVStoreError as error:
            limited.warning("namespaces unknown: new ones are published later (%s)", error)
            return
        self._answered = True
        self._found = self._choice.choose(specs)

    def _follow_found(self, now_s: float) -> None:
        """Follow new namespaces, all that were found at once: each subscription begins with a snapshot of the store."""
        if all(one.spec.namespace in self._spaces for one in self._found):
            return
        may_subscribe = self._watcher is None or (self._complete and now_s - self._subscribed_s >= _SUBSCRIBE_S)
        if not may_subscribe and not self._watches_all:
            return
        self._translator.use(self._found)
        self._spaces = {one.spec.namespace: one for one in self._found}
        if not self._watches_all:
            self._subscribed_s = now_s
            self._watch()

    def _watch(self) -> None:
        """Subscribe to all namespaces. The new mirror begins with a snapshot, of which only the difference is published."""
        if self._watcher is not None:
            self._watcher.close()
        namespaces = self._translator.namespaces
        logger.info("publishing the blocks of model %s: %d namespaces", self._config.model, len(namespaces))
        self._complete = False
        self._watches_all = len(namespaces) > limits.MAX_WATCH_FILTER
        self._watcher = BlockWatcher(
            self._config.metadata,
            namespaces=() if self._watches_all else namespaces,
            tls=self._config.client.tls.resolve(),
            token=self._token,
            most_blocks=self._config.max_blocks,
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
