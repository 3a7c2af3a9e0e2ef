"""Reads labels of blocks from the store."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

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

_DEADLINE_S = 5.0
_MOST_BYTES = 16 << 20
"""Memory for the labels of one load."""


class LabelReader:
    """Loads labels, with a client per label namespace.

    Args:
        config: address of the store, TLS and token.
        counters: counts labels.
    """

    def __init__(self, config: EventsConfig, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        self._clients: dict[NamespaceId, KVClient] = {}

    def read(self, namespace: LabelNamespace, blocks: Sequence[GroupBlockId]) -> Mapping[GroupBlockId, BlockLabel]:
        """Return the labels of blocks, as far as they can be read."""
        found: dict[GroupBlockId, BlockLabel] = {}
        most = max(1, _MOST_BYTES // namespace.spec.block_bytes)
        try:
            for first in range(0, len(blocks), most):
                found |= self._load(namespace, blocks[first : first + most])
        except KVStoreError as error:
            limited.warning("labels not read: %s", error)
        self._counters.add(events_metrics.LABELS_READ, len(found))
        self._counters.add(events_metrics.LABELS_FAILED, len(blocks) - len(found))
        return found

    def _load(self, namespace: LabelNamespace, blocks: Sequence[GroupBlockId]) -> Mapping[GroupBlockId, BlockLabel]:
        client, found = self._client(namespace), {}
        rows = np.zeros((len(blocks), namespace.spec.block_bytes), np.uint8)
        heads = client.lookup_heads([namespace.key(block) for block in blocks], deadline_s=_DEADLINE_S)
        result = client.load(heads, rows, deadline_s=_DEADLINE_S)
        for block, row, outcome in zip(blocks, rows, result.outcomes.tolist(), strict=True):
            if outcome == Outcome.HIT:
                try:
                    found[block] = BlockLabel.decode(row.tobytes())
                except InvalidArgument as error:
                    limited.warning("malformed label: %s", error)
        return found

    def _client(self, namespace: LabelNamespace) -> KVClient:
        client = self._clients.get(namespace.spec.namespace)
        if client is None:
            section = self._config.client
            options = ClientOptions(token_file=section.token_file, client_name="events", connect_deadline_s=_DEADLINE_S)
            client = KVClient.connect(self._config.metadata, namespace.spec, tls=section.tls.resolve(), options=options)
            self._clients[namespace.spec.namespace] = client
        return client

    def close(self) -> None:
        """Disconnect."""
        for client in self._clients.values():
            client.close()
