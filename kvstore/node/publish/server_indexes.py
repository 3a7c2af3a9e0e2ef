"""Checks whether the metadata servers of a node's list have one index. If not, lookups find its blocks at some of them only."""

from __future__ import annotations

import logging
import time
from typing import Final

import grpc

from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
from kvstore.core.errors import KVStoreError
from kvstore.health.findings import HealthFinding
from kvstore.health.server_indexes import differing_indexes
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.rpc.client import RetryPolicy, call
from kvstore.rpc.failover.channel import FailoverChannel

limited: Final = LimitedLog(logging.getLogger(__name__))

ASK_S: Final = 1.0
AGAIN_S: Final = 1.0
"""Time after which servers with different indexes are asked again: while an index is created again, they differ for a moment."""


class ServerIndexes:
    """The indexes of the metadata servers that a channel reaches. Use it in one thread.

    Args:
        channel: to one server, or to several.
        counters: counts checks that found different indexes.
    """

    def __init__(self, channel: grpc.Channel, counters: Counters) -> None:
        self._channel = channel
        self._counters = counters

    def check(self) -> HealthFinding | None:
        """Ask all servers. Returns the finding if they have different indexes."""
        if not isinstance(self._channel, FailoverChannel):
            return None
        if differing_indexes(self._epochs(self._channel)) is None:
            return None
        time.sleep(AGAIN_S)
        found = differing_indexes(self._epochs(self._channel))
        if found is not None:
            self._counters.add(node_metrics.METADATA_SERVERS_DIFFER)
            limited.warning("metadata servers differ: %s", found.facts)
        return found

    @staticmethod
    def _epochs(channel: FailoverChannel) -> dict[str, bytes]:
        """The index epoch of each server that answers."""
        epochs = {}
        for address in channel.servers.addresses:
            try:
                stub = metadata_pb2_grpc.MetadataStub(channel.channel_to(address))
                answer = call(stub.GetStats, metadata_pb2.GetStatsRequest(), ASK_S, RetryPolicy(attempts=1))
            except (KVStoreError, ValueError):  # ValueError: the channel is closed
                continue
            epochs[address] = answer.index_epoch
        return epochs
