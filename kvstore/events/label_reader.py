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
from kvstore.observe.metric_definitions import events as events_metrics

logger = logging.getLogger(__name__)

_DEADLINE_S = 5.0


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
        try:
            client = self._client(namespace)
            rows = np.zeros((len(blocks), namespace.spec.block_bytes), np.uint8)
            heads = client.lookup_heads([namespace.key(block) for block in blocks], deadline_s=_DEADLINE_S)
            result = client.load(heads, rows, deadline_s=_DEADLINE_S)
            for block, row, outcome in zip(blocks, rows, result.outcomes.tolist(), strict=True):
                if outcome == Outcome.HIT:
                    found[block] = BlockLabel.decode(row.tobytes())
        except InvalidArgument as error:
            logger.warning("malformed label: %s", error)
        except KVStoreError as error:
            logger.warning("labels not read: %s", error)
        self._counters.add(events_metrics.LABELS_READ, len(found))
        self._counters.add(events_metrics.LABELS_FAILED, len(blocks) - len(found))
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
