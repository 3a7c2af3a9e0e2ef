"""Process entry of ``kvstore events --zmq``."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final

import kvstore
from kvclient.events import BlockWatcher
from kvclient.nodes.namespaces import list_namespaces
from kvstore.config.events import EventsConfig
from kvstore.core.errors import KVStoreError
from kvstore.core.types import NamespaceId
from kvstore.events.publisher import EventPublisher
from kvstore.events.translation import Translator, last_eight_bytes, whole_key
from kvstore.observe.counters import Counters
from kvstore.observe.exposition import Sample, StoreCollector
from kvstore.observe.http import serve
from kvstore.observe.metric_definitions import common as common_metrics
from kvstore.observe.metric_definitions import events as events_metrics
from kvstore.rpc.auth.tokens import TokenSource

logger = logging.getLogger(__name__)

_RETRY_S: Final = 1.0
_TIMEOUT_S: Final = 1.0
_WATCH_S: Final = 0.2


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


def run(config: EventsConfig) -> None:
    """Publish events until SIGTERM or SIGINT.

    Raises:
        Unavailable: an endpoint cannot be bound.
        KVStoreError: the metadata server rejects the subscription permanently.
    """
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    counters = Counters()
    hash_of = whole_key if config.hashes == "bytes" else last_eight_bytes
    translator = Translator(hash_of, BlockTokens(config))
    publisher = EventPublisher(config, translator, counters)
    watcher = BlockWatcher(
        config.metadata,
        namespaces=config.namespace_ids,
        nodes=config.node_ids,
        tiers=config.tier_kinds,
        tls=config.client.tls.resolve(),
        token=TokenSource.of(file=config.client.token_file),
        on_change=publisher.take,
    )

    def gauges() -> Iterator[Sample]:
        yield Sample(common_metrics.BUILD_INFO, 1, {"version": kvstore.__version__})
        yield Sample(events_metrics.TOLD_BLOCKS, len(translator))

    metrics = None
    if config.metrics_listen is not None:
        collector = StoreCollector([counters, watcher.counters], [lambda: list(gauges())], process="events")
        metrics = serve(config.metrics_listen, collector, {}, counters)
    try:
        ready = False
        while not stop.wait(_WATCH_S):
            watcher.check()
            publisher.heartbeat()
            if not ready and publisher.published.is_set():
                ready = True
                logger.info("publishing KV events: %s (replay=%s)", publisher.endpoint, publisher.replay_endpoint or "none")
                _write_ready_file(config, publisher)
    finally:
        watcher.close()
        publisher.close()
        if metrics is not None:
            metrics.stop()


def _write_ready_file(config: EventsConfig, publisher: EventPublisher) -> None:
    if config.ready_file is None:
        return
    scratch = config.ready_file.with_name(f".{config.ready_file.name}.{os.getpid()}")
    content = {"zmq": publisher.endpoint, "replay": publisher.replay_endpoint, "pid": os.getpid()}
    scratch.write_text(json.dumps(content))
    scratch.replace(config.ready_file)
