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

_AT_ONCE: Final = 4_096
"""Keys looked at in one job of the thread for long reads."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What is said of one block; of the next one of a run it is the same, one deeper."""

    state: pb.BlockState
    namespace: bytes
    head: int
    """Depth, less the position among the keys asked for."""
    replicas: tuple[tuple[VolumeEpoch, int], ...]
    part: int
    """1 behind the hit, so that runs are cut there."""


async def describe_blocks(
    index: PrefixIndex, nodes: NodeTable, reads: IndexThread, namespace: NamespaceId | None, keys: Sequence[BlockKey]
) -> pb.DescribeBlocksResponse:
    """What the index says of keys: of a chain from its head, or (no namespace) of each for itself."""
    nodes.view()  # who is there now
    visible = nodes.visible
    hit = 0
    if namespace is not None:
        hit = index.lookup(namespace, b"".join(keys), visible).blocks
    volume_epochs: Mapping[VolumeEpoch, VolumeEpochInfo] = {info.volume_epoch: info for info in index.volume_epochs()}
    answer = pb.DescribeBlocksResponse(hit_blocks=hit)
    last: _Said | None = None
    for first in range(0, len(keys), _AT_ONCE):
        entries = await reads.run(index.describe, keys[first : first + _AT_ONCE])
        for position, entry in enumerate(entries, start=first):
            said = _say(entry, position, namespace, position >= hit, volume_epochs, visible)
            if said == last:
                answer.runs[-1].count += 1
                continue
            last = said
            run = answer.runs.add(start=position, count=1, state=said.state, namespace_id=said.namespace)
            run.depth = 0 if entry is None else entry.depth
            for volume_epoch, start in said.replicas:
                _add_replica(run, volume_epochs.get(volume_epoch), start, visible=volume_epoch in visible)
    return answer


def _say(
    entry: IndexEntry | None,
    position: int,
    namespace: NamespaceId | None,
    missed: bool,
    volume_epochs: Mapping[VolumeEpoch, VolumeEpochInfo],
    visible: frozenset[VolumeEpoch],
) -> _Said:
    if entry is None:
        return _Said(pb.BLOCK_STATE_UNKNOWN, b"", 0, (), int(missed))
    held_by = [volume_epoch for volume_epoch, _ in entry.replicas]
    if namespace is not None and (entry.namespace, entry.depth) != (namespace, position):
        state = pb.BLOCK_STATE_MISPLACED
    elif any(volume_epoch in visible and volume_epoch in volume_epochs for volume_epoch in held_by):
        state = pb.BLOCK_STATE_HELD
    elif any(volume_epoch in volume_epochs for volume_epoch in held_by):
        state = pb.BLOCK_STATE_SILENT
    else:
        state = pb.BLOCK_STATE_GONE
    return _Said(state, entry.namespace or b"", entry.depth - position, entry.replicas, int(missed))


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
