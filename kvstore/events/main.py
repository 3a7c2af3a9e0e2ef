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
from kvstore.core.errors import KVStoreError
from kvstore.core.types import NamespaceId
from kvstore.events.config import EventsConfig
from kvstore.events.publisher import Publisher
from kvstore.events.translation import Translator, last_eight_bytes, whole_key
from kvstore.observe.counters import Counters
from kvstore.observe.exposition import Sample, StoreCollector
from kvstore.observe.http import serve
from kvstore.observe.metric_definitions import common as common_metrics
from kvstore.observe.metric_definitions import events as events_metrics

logger = logging.getLogger(__name__)

_ASK_AGAIN_S: Final = 1.0
_ASK_TIMEOUT_S: Final = 1.0
_WATCH_S: Final = 0.2


class BlockTokens:
    """Tokens a block, by namespace; the server is asked for what is new, not more often than once a second."""

    def __init__(self, config: EventsConfig) -> None:
        self._config = config
        self._known: dict[NamespaceId, int] = {}
        self._asked_s = -_ASK_AGAIN_S

    def __call__(self, namespace: NamespaceId) -> int:
        tokens = self._known.get(namespace)
        if tokens is None and time.monotonic() - self._asked_s >= _ASK_AGAIN_S:
            self._asked_s = time.monotonic()
            try:
                specs = list_namespaces(
                    self._config.metadata, timeout_s=_ASK_TIMEOUT_S, tls=self._config.tls, token=self._config.token
                )
            except KVStoreError as error:
                logger.warning("the namespaces are not known, so that events say a block size of 0: %s", error)
                specs = []
            self._known |= {spec.namespace: spec.block_tokens for spec in specs}
            tokens = self._known.get(namespace)
        return tokens or 0


def run(config: EventsConfig) -> None:
    """Publishes until SIGTERM or SIGINT.

    Raises:
        Unavailable: an endpoint cannot be bound.
        KVStoreError: the metadata server refuses to tell, and will go on doing so.
    """
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for wanted in (signal.SIGINT, signal.SIGTERM):
        signal.signal(wanted, on_signal)
    counters = Counters()
    hash_of = whole_key if config.hashes == "bytes" else last_eight_bytes
    translator = Translator(hash_of, BlockTokens(config))
    publisher = Publisher(config, translator, counters)
    watcher = BlockWatcher(
        config.metadata,
        namespaces=config.namespaces,
        nodes=config.nodes,
        tiers=config.tiers,
        tls=config.tls,
        token=config.token,
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
        told = False
        while not stop.wait(_WATCH_S):
            watcher.check()
            publisher.beat()
            if not told and publisher.published.is_set():
                told = True
                logger.info("KV events at %s, replays at %s", publisher.endpoint, publisher.replay_endpoint or "no address")
                _tell_ready(config, publisher)
    finally:
        watcher.close()
        publisher.close()
        if metrics is not None:
            metrics.stop()


def _tell_ready(config: EventsConfig, publisher: Publisher) -> None:
    if config.ready_file is None:
        return
    scratch = config.ready_file.with_name(f".{config.ready_file.name}.{os.getpid()}")
    said = {"zmq": publisher.endpoint, "replay": publisher.replay_endpoint, "pid": os.getpid()}
    scratch.write_text(json.dumps(said))
    scratch.replace(config.ready_file)
