"""The hot path: one lookup on the event loop, from request to encoded answer.

The embedded index answers in tens of microseconds, so a lookup does not use a thread; an index on other hosts is awaited. The
answer is made as bytes: a registration is encoded once per view, not once per lookup, and encoded messages of one type can be
concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvproto.v1.metadata_pb2 import LookupHeadsRequest, LookupHeadsResponse, LookupRequest, LookupResponse, ReplicaRun
from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import NamespaceId, NodeId
from kvstore.index.contract import PrefixIndex, VolumeEpoch
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.rpc.codec import check_id, count_keys, keys_from_packed

_COUNTERS = (metadata_metrics.LOOKUPS, metadata_metrics.LOOKUP_KEYS, metadata_metrics.LOOKUP_HIT_BLOCKS)

MOST_COUNTED: Final = 16_384
"""Maximum number of namespaces with statistics of their own."""


@dataclass(slots=True)
class LookupStats:
    """Lookups in one namespace since the start of the process."""

    lookups: int = 0
    keys: int = 0
    hit_blocks: int = 0


class Lookups:
    """Answers the lookups of one server process."""

    def __init__(self, index: PrefixIndex, nodes: NodeTable, counters: Counters) -> None:
        self._index = index
        self._nodes = nodes
        self._counters = counters
        self._stats: dict[bytes, LookupStats] = {}

    def stats(self, namespace: NamespaceId) -> LookupStats:
        """Statistics of the lookups in a namespace."""
        return self._stats.get(namespace) or LookupStats()

    def _count(self, namespace: NamespaceId, keys: int, hit_blocks: int) -> None:
        """Count one lookup. A namespace of caches is never registered: its lookups are not part of the store's hit rate."""
        stats = self._stats.get(namespace)
        if stats is None and self._index.spec_of(namespace) is None:
            self._counters.add_all(_COUNTERS[:1], (1,))
            return
        self._counters.add_all(_COUNTERS, (1, keys, hit_blocks))
        if stats is None:
            if len(self._stats) >= MOST_COUNTED:
                self._counters.add(metadata_metrics.LOOKUPS_UNCOUNTED)
                return
            stats = self._stats[namespace] = LookupStats()
        stats.lookups += 1
        stats.keys += keys
        stats.hit_blocks += hit_blocks

    async def answer(self, request: LookupRequest) -> bytes:
        """Find the servable prefix of a chain and the nodes that serve it.

        An unregistered namespace is a miss, not an error, because the engine then simply computes the prompt.

        Returns:
            An encoded ``LookupResponse``.

        Raises:
            InvalidArgument: wrong lengths, too many keys, or too many guessed ends.
            Unavailable: no shard of the index answers.
        """
        keys = request.keys
        namespace = NamespaceId(check_id(request.namespace_id, "namespace_id"))
        count = count_keys(keys)
        if len(request.ends) > limits.MAX_LOOKUP_ENDS:
            raise InvalidArgument("too many guessed ends", got=len(request.ends), limit=limits.MAX_LOOKUP_ENDS)
        ends = tuple(request.ends)
        nodes = self._nodes
        hit = await self._index.lookup_async(namespace, keys, nodes.visible, ends)
        if hit.revision != nodes.revision:  # a registration since the view was read; a later one may wait for the next lookup
            nodes.view()
            hit = await self._index.lookup_async(namespace, keys, nodes.visible, ends)
        if hit.blocks == 0:
            self._count(namespace, count, 0)
            return b""
        encoded_nodes = nodes.last_view.encoded_nodes
        positions: dict[NodeId, int] = {}
        answer = LookupResponse(hit_blocks=hit.blocks)
        add = answer.runs.add
        for start, length, volume_epoch in hit.runs:
            try:
                location = nodes.server_of(volume_epoch)
            except KeyError:  # its node registered again while the index was searched: a miss
                self._count(namespace, count, 0)
                self._counters.add(metadata_metrics.LOOKUPS_OVERTAKEN)
                return b""
            add(start=start, count=length, node=positions.setdefault(location.node_id, len(positions)), volume=location.volume)
        self._count(namespace, count, hit.blocks)
        return b"".join([answer.SerializeToString(), *[encoded_nodes[node_id] for node_id in positions]])

    async def answer_heads(self, request: LookupHeadsRequest) -> LookupHeadsResponse:
        """Find the volumes that hold blocks, each of which is the head of a separate chain.

        Raises:
            InvalidArgument: wrong lengths, or too many keys.
        """
        namespace = NamespaceId(check_id(request.namespace_id, "namespace_id"))
        keys = keys_from_packed(request.keys)
        holders = await self._index.holders_async(namespace, keys)
        view, visible = self._nodes.view(), self._nodes.visible
        answer = LookupHeadsResponse()
        positions: dict[NodeId, int] = {}
        last: dict[VolumeEpoch, ReplicaRun] = {}
        hits = 0
        for at, volume_epochs in enumerate(holders):
            served = visible.intersection(volume_epochs)
            hits += bool(served)
            for volume_epoch in served:
                run = last.get(volume_epoch)
                if run is not None and run.start + run.count == at:
                    run.count += 1
                    continue
                location = self._nodes.server_of(volume_epoch)
                if location.node_id not in positions:
                    positions[location.node_id] = len(positions)
                    answer.nodes.append(view.nodes[location.node_id])
                last[volume_epoch] = answer.runs.add(start=at, count=1, node=positions[location.node_id], volume=location.volume)
        self._count(namespace, len(keys), hits)
        return answer
