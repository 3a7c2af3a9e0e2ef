"""Reads labels of blocks from the store."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvclient import ClientOptions, KVClient, Outcome
from kvclient.events.block_groups import GroupBlockId
from kvclient.events.labels import BlockLabel, LabelNamespace
from kvstore.config.events import EventsConfig
from kvstore.core.errors import InvalidArgument, KVStoreError
from kvstore.core.types import NamespaceId
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import events as events_metrics

limited = LimitedLog(logging.getLogger(__name__))

_MOST_BYTES: Final = 16 << 20
"""Memory for the labels of one load."""
_MOST_CLIENTS: Final = 16
"""Connected label namespaces. The one that was not used for the longest time is disconnected."""


@dataclass(slots=True)
class LabelsRead:
    """Outcome of one read.

    Attributes:
        labels: by block.
        failed: blocks whose labels are missing or malformed.
        malformed: how many of these are malformed.
        unavailable: the store did not answer, so further reads of the namespace would fail too.
    """

    labels: dict[GroupBlockId, BlockLabel] = field(default_factory=dict)
    failed: list[GroupBlockId] = field(default_factory=list)
    malformed: int = 0
    unavailable: bool = False


class LabelReader:
    """Loads labels, with a client per label namespace.

    Args:
        config: address of the store, TLS and token.
        counters: counts labels.
    """

    def __init__(self, config: EventsConfig, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        self._clients: OrderedDict[NamespaceId, KVClient] = OrderedDict()

    def read(self, namespace: LabelNamespace, blocks: Sequence[GroupBlockId], end_s: float) -> LabelsRead:
        """Read the labels of blocks until a deadline (``time.monotonic``). Blocks beyond it are in no list of the outcome."""
        read = LabelsRead()
        most = max(1, _MOST_BYTES // namespace.spec.block_bytes)
        chunk: Sequence[GroupBlockId] = ()
        try:
            client = self._client(namespace, end_s)
            for first in range(0, len(blocks), most):
                if time.monotonic() >= end_s:
                    break
                chunk = blocks[first : first + most]
                self._load(client, namespace, chunk, end_s, read)
        except KVStoreError as error:
            limited.warning("labels not read: %s", error)
            read.unavailable = True
            read.failed += chunk
        self._counters.add_all(
            (events_metrics.LABELS_READ, events_metrics.LABELS_FAILED, events_metrics.LABELS_MALFORMED),
            (len(read.labels), len(read.failed), read.malformed),
        )
        return read

    def _load(
        self, client: KVClient, namespace: LabelNamespace, blocks: Sequence[GroupBlockId], end_s: float, read: LabelsRead
    ) -> None:
        rows = np.zeros((len(blocks), namespace.spec.block_bytes), np.uint8)
        heads = client.lookup_heads([namespace.key(block) for block in blocks], deadline_s=_rest_s(end_s))
        result = client.load(heads, rows, deadline_s=_rest_s(end_s))
        for block, row, outcome in zip(blocks, rows, result.outcomes.tolist(), strict=True):
            if outcome != Outcome.HIT:
                read.failed.append(block)
                continue
            try:
                read.labels[block] = BlockLabel.decode(row.tobytes())
            except InvalidArgument:
                read.failed.append(block)
                read.malformed += 1

    def _client(self, namespace: LabelNamespace, end_s: float) -> KVClient:
        name = namespace.spec.namespace
        client = self._clients.get(name)
        if client is None:
            section = self._config.client
            options = ClientOptions(token_file=section.token_file, client_name="events", connect_deadline_s=_rest_s(end_s))
            client = KVClient.connect(self._config.metadata, namespace.spec, tls=section.tls.resolve(), options=options)
            self._clients[name] = client
            if len(self._clients) > _MOST_CLIENTS:
                self._clients.popitem(last=False)[1].close()
        self._clients.move_to_end(name)
        return client

    def close(self) -> None:
        """Disconnect."""
        for client in self._clients.values():
            client.close()


def _rest_s(end_s: float) -> float:
    """Return the time that is left, but enough for a call that begins in time."""
    return max(end_s - time.monotonic(), 0.1)
