"""Process entry of ``kvstore events --zmq``."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Final

import kvstore
from kvstore.config.events import EventsConfig
from kvstore.events.key_stream import BlockTokens, KeyStream
from kvstore.events.labelled import LabelledTranslator
from kvstore.events.model_stream import ModelStream, volume_filter
from kvstore.events.publisher import EventPublisher
from kvstore.events.translation import Translator, last_eight_bytes, whole_key
from kvstore.observe.counters import Counters
from kvstore.observe.exposition import Sample, StoreCollector
from kvstore.observe.http import serve
from kvstore.observe.metric_definitions import common as common_metrics
from kvstore.process.ready_file import write_ready_file

logger = logging.getLogger(__name__)

_WATCH_S: Final = 0.2


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
    stream: ModelStream | KeyStream
    if config.model:
        labelled = LabelledTranslator(partial(volume_filter, config), most_label_bytes=config.labels_memory_bytes)
        publisher = EventPublisher(config, labelled.everything, counters)
        stream = ModelStream(config, labelled, publisher, counters)
    else:
        translator = Translator(whole_key if config.hashes == "bytes" else last_eight_bytes, BlockTokens(config))
        publisher = EventPublisher(config, translator.everything, counters)
        stream = KeyStream(config, translator, publisher, counters)

    def gauges() -> Iterator[Sample]:
        yield Sample(common_metrics.BUILD_INFO, 1, {"version": kvstore.__version__})
        yield from stream.gauges()

    metrics = None
    if config.metrics_listen is not None:
        collector = StoreCollector([counters], [lambda: list(gauges())], process="events")
        metrics = serve(config.metrics_listen, collector, {}, counters)
    try:
        ready = False
        while not stop.wait(_WATCH_S):
            stream.step()
            publisher.heartbeat()
            if not ready and publisher.published.is_set():
                ready = True
                logger.info(
                    "publishing KV events: %s (topic=%s, replay=%s)",
                    publisher.endpoint,
                    config.frame or "none",
                    publisher.replay_endpoint or "none",
                )
                if config.ready_file is not None:
                    write_ready_file(config.ready_file, zmq=publisher.endpoint, replay=publisher.replay_endpoint)
    finally:
        stream.close()
        publisher.close()
        if metrics is not None:
            metrics.stop()
