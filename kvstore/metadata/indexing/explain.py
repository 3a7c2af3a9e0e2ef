"""Explain index contents to operators: the holders of each block, and why a prefix match ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvproto.v1 import admin_pb2 as pb
from kvstore.core.types import BlockKey, NamespaceId
from kvstore.index.contract import IndexEntry, PrefixIndex, VolumeEpoch, VolumeEpochInfo
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.rpc.codec import tier_to_proto

_KEYS_PER_JOB: Final = 4_096
"""Keys per job of the thread for long reads."""


@dataclass(frozen=True, slots=True)
class _BlockFacts:
    """Facts about one block. Consecutive blocks with equal facts form one run.

    Attributes:
        state: whether and how the block is held.
        namespace: namespace of its record.
        head: depth of its record, minus its position in the request.
        replicas: volume epoch and run_start of each replica.
        after_hit: whether its position is after the hit, so that a run ends there.
    """

    state: pb.BlockState
    namespace: bytes
    head: int
    replicas: tuple[tuple[VolumeEpoch, int], ...]
    after_hit: bool


async def describe_blocks(
    index: PrefixIndex, nodes: NodeTable, reads: IndexThread, namespace: NamespaceId | None, keys: Sequence[BlockKey]
) -> pb.DescribeBlocksResponse:
    """Describe the records of a chain from its head or, without a namespace, of unrelated keys."""
    nodes.view()  # refreshes ``visible``
    visible = nodes.visible
    hit = 0
    if namespace is not None:
        hit = index.lookup(namespace, b"".join(keys), visible).blocks
    open_epochs: Mapping[VolumeEpoch, VolumeEpochInfo] = {info.volume_epoch: info for info in index.volume_epochs()}
    answer = pb.DescribeBlocksResponse(hit_blocks=hit)
    last: _BlockFacts | None = None
    for first in range(0, len(keys), _KEYS_PER_JOB):
        entries = await reads.run(index.describe, keys[first : first + _KEYS_PER_JOB])
        for position, entry in enumerate(entries, start=first):
            facts = _facts(entry, position, namespace, after_hit=position >= hit, open_epochs=open_epochs, visible=visible)
            if facts == last:
                answer.runs[-1].count += 1
                continue
            last = facts
            run = answer.runs.add(start=position, count=1, state=facts.state, namespace_id=facts.namespace)
            run.depth = 0 if entry is None else entry.depth
            for volume_epoch, start in facts.replicas:
                _add_replica(run, open_epochs.get(volume_epoch), start, visible=volume_epoch in visible)
    return answer


def _facts(
    entry: IndexEntry | None,
    position: int,
    namespace: NamespaceId | None,
    *,
    after_hit: bool,
    open_epochs: Mapping[VolumeEpoch, VolumeEpochInfo],
    visible: frozenset[VolumeEpoch],
) -> _BlockFacts:
    if entry is None:
        return _BlockFacts(pb.BLOCK_STATE_UNKNOWN, b"", 0, (), after_hit)
    holders = [volume_epoch for volume_epoch, _ in entry.replicas]
    if namespace is not None and (entry.namespace, entry.depth) != (namespace, position):
        state = pb.BLOCK_STATE_MISPLACED
    elif any(volume_epoch in visible and volume_epoch in open_epochs for volume_epoch in holders):
        state = pb.BLOCK_STATE_HELD
    elif any(volume_epoch in open_epochs for volume_epoch in holders):
        state = pb.BLOCK_STATE_SILENT
    else:
        state = pb.BLOCK_STATE_GONE
    return _BlockFacts(state, entry.namespace or b"", entry.depth - position, entry.replicas, after_hit)


def _add_replica(run: pb.DescribedRun, info: VolumeEpochInfo | None, run_start: int, *, visible: bool) -> None:
    if info is None:
        run.replicas.add(run_start=run_start)
        return
    run.replicas.add(
        volume_id=info.volume_id,
        node_id=info.node_id,
        tier=tier_to_proto(info.tier),
        visible=visible,
        run_start=run_start,
    )
