"""The hot path: one lookup, on the event loop, from request to answer.

The index answers in tens of microseconds, so a lookup is not worth a thread. The answer leaves as bytes: a registration is
encoded once per view, not once per lookup, and encoded messages of one type may be joined by writing one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvproto.v1.metadata_pb2 import LookupRequest, LookupResponse
from kvstore.core.types import NamespaceId, NodeId
from kvstore.index.contract import PrefixIndex
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.rpc.codec import check_id, count_keys

_COUNTED = (metadata_metrics.LOOKUPS, metadata_metrics.LOOKUP_KEYS, metadata_metrics.LOOKUP_HIT_BLOCKS)


MOST_COUNTED: Final = 16_384
"""Namespaces whose lookups are counted each for itself: a bound on what strange ids can take."""


@dataclass(slots=True)
class LookupStats:
    """How lookups in one namespace fared, since the start."""

    lookups: int = 0
    blocks: int = 0
    hits: int = 0


class Lookups:
    """Answers lookups of one server process."""

    def __init__(self, index: PrefixIndex, nodes: NodeTable, counters: Counters) -> None:
        self._index = index
        self._nodes = nodes
        self._counters = counters
        self._asked: dict[bytes, LookupStats] = {}

    def asked(self, namespace: NamespaceId) -> LookupStats:
        """How lookups in a namespace fared."""
        return self._asked.get(namespace) or LookupStats()

    def _count(self, namespace: NamespaceId, blocks: int, hits: int) -> None:
        self._counters.add_all(_COUNTED, (1, blocks, hits))
        asked = self._asked.get(namespace)
        if asked is None:
            if len(self._asked) >= MOST_COUNTED:
                self._counters.add(metadata_metrics.LOOKUPS_UNCOUNTED)
                return
            asked = self._asked[namespace] = LookupStats()
        asked.lookups += 1
        asked.blocks += blocks
        asked.hits += hits

    def answer(self, request: LookupRequest) -> bytes:
        """How much of a chain can be served, and by whom: an encoded ``LookupResponse``.

        A namespace that nobody registered has no blocks: a miss, not an error, since the engine then does the right thing.

        Raises:
            InvalidArgument: wrong lengths or too many keys.
        """
        keys = request.keys
        namespace = NamespaceId(check_id(request.namespace_id, "namespace_id"))
        count = count_keys(keys)
        nodes = self._nodes
        hit = self._index.lookup(namespace, keys, nodes.visible)
        if hit.revision != nodes.revision:  # somebody registered or left since the nodes were read
            nodes.view()
            hit = self._index.lookup(namespace, keys, nodes.visible)
        self._count(namespace, count, hit.blocks)
        if hit.blocks == 0:
            return b""
        encoded_nodes = nodes.last_view.encoded_nodes
        positions: dict[NodeId, int] = {}
        answer = LookupResponse(hit_blocks=hit.blocks)
        add = answer.runs.add
        for start, count, volume_epoch in hit.runs:
            place = nodes.server_of(volume_epoch)
            add(start=start, count=count, node=positions.setdefault(place.node_id, len(positions)), volume=place.volume)
        return b"".join([answer.SerializeToString(), *[encoded_nodes[node_id] for node_id in positions]])
