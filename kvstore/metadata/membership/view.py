"""Registrations and open volume epochs of all nodes, as of one revision of the index."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import DecodeError

from kvproto.v1.common_pb2 import DrainOrder, NodeInfo
from kvproto.v1.metadata_pb2 import LookupResponse
from kvstore.core.types import BootId, NodeId, Tier, VolumeId
from kvstore.index.contract import PrefixIndex, VolumeEpoch
from kvstore.metadata.membership.records import (
    DRAIN_PREFIX,
    LEFT_PREFIX,
    NODE_PREFIX,
    SYNCED_PREFIX,
    encode_volume_epoch,
    synced_note,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VolumeLocation:
    """A node that serves a volume epoch, and the position of the volume in its list of volumes and mounts."""

    node_id: NodeId
    volume: int


@dataclass(frozen=True, slots=True)
class MembershipView:
    """All registrations and open volume epochs.

    Attributes:
        revision: revision of the index.
        nodes: registrations.
        encoded_nodes: each registration as an encoded ``LookupResponse`` that contains only this node. Encoded messages of one
            type can be concatenated.
        locations: owner of each volume epoch.
        volume_epochs: volume epoch of each registered volume and boot.
        owners: nodes that have an open volume epoch of a volume.
        mounted: nodes that mount the volume of a durable volume epoch, and can read it without the owner.
        drain_orders: orders of nodes that are to drain.
        left: nodes whose registered boot has unregistered.
        arriving: volumes of registered boots whose inventory is not complete.
    """

    revision: int = -1
    nodes: Mapping[NodeId, NodeInfo] = field(default_factory=dict)
    encoded_nodes: Mapping[NodeId, bytes] = field(default_factory=dict)
    locations: Mapping[VolumeEpoch, VolumeLocation] = field(default_factory=dict)
    volume_epochs: Mapping[tuple[VolumeId, BootId], VolumeEpoch] = field(default_factory=dict)
    owners: Mapping[VolumeId, frozenset[NodeId]] = field(default_factory=dict)
    mounted: Mapping[VolumeEpoch, tuple[VolumeLocation, ...]] = field(default_factory=dict)
    drain_orders: Mapping[NodeId, DrainOrder] = field(default_factory=dict)
    left: frozenset[NodeId] = frozenset()
    arriving: frozenset[VolumeId] = frozenset()


def is_engine_cache(record: NodeInfo) -> bool:
    """Whether a registration is the published cache of an engine, which serves no calls and whose end loses no data."""
    return not record.control_address


def read_view(index: PrefixIndex) -> MembershipView:
    """Read registrations and volume epochs. The revision is read first, so a concurrent change only causes another read.

    A volume epoch is in the view if its node's registration lists its volume.
    """
    revision = index.revision
    notes = _read_notes(index)
    nodes = notes.nodes
    volumes, mounts = _registered_volumes(nodes), _mounts_of(nodes)
    locations: dict[VolumeEpoch, VolumeLocation] = {}
    volume_epochs: dict[tuple[VolumeId, BootId], VolumeEpoch] = {}
    owners: dict[VolumeId, set[NodeId]] = {}
    mounted: dict[VolumeEpoch, tuple[VolumeLocation, ...]] = {}
    for epoch in index.volume_epochs():
        location = volumes.get((epoch.node_id, epoch.volume_id))
        if location is None:
            continue  # between the writes of a registration; its last write changes the revision again
        locations[epoch.volume_epoch] = location
        volume_epochs[epoch.volume_id, epoch.boot_id] = epoch.volume_epoch
        owners.setdefault(epoch.volume_id, set()).add(epoch.node_id)
        if epoch.tier is Tier.NVME and epoch.volume_id in mounts:
            mounted[epoch.volume_epoch] = mounts[epoch.volume_id]
    synced = index.notes(SYNCED_PREFIX)  # after the volume epochs that the notes name
    arriving = frozenset(
        volume_id
        for (volume_id, boot_id), number in volume_epochs.items()
        if nodes[locations[number].node_id].boot_id == boot_id
        and synced.get(synced_note(volume_id)) != encode_volume_epoch(number)
    )
    return MembershipView(
        revision=revision,
        nodes=nodes,
        encoded_nodes={node_id: LookupResponse(nodes=[info]).SerializeToString() for node_id, info in nodes.items()},
        locations=locations,
        volume_epochs=volume_epochs,
        owners={volume_id: frozenset(ids) for volume_id, ids in owners.items()},
        mounted=mounted,
        drain_orders=notes.drain_orders,
        left=notes.left,
        arriving=arriving,
    )


@dataclass(frozen=True, slots=True)
class _NodeNotes:
    """Notes about nodes. The fields are those of ``MembershipView``."""

    nodes: Mapping[NodeId, NodeInfo]
    drain_orders: Mapping[NodeId, DrainOrder]
    left: frozenset[NodeId]


def _read_notes(index: PrefixIndex) -> _NodeNotes:
    nodes = dict(_decoded(index, NODE_PREFIX, NodeInfo.FromString))
    orders = dict(_decoded(index, DRAIN_PREFIX, DrainOrder.FromString))
    boots_left = dict(_decoded(index, LEFT_PREFIX, bytes))
    left = frozenset(node_id for node_id, boot in boots_left.items() if node_id in nodes and nodes[node_id].boot_id == boot)
    return _NodeNotes(nodes, orders, left)


def _decoded(index: PrefixIndex, prefix: str, decode: Callable[[bytes], T]) -> Iterator[tuple[NodeId, T]]:
    """Yield each node that has a note with this prefix, and the content of the note. Unreadable notes are logged."""
    for name, value in index.notes(prefix).items():
        try:
            content = decode(value)
        except DecodeError:
            logger.exception("unreadable note ignored: %s (a node will be asked to register again)", name)
        else:
            yield NodeId(name.removeprefix(prefix)), content


def _registered_volumes(nodes: Mapping[NodeId, NodeInfo]) -> dict[tuple[NodeId, VolumeId], VolumeLocation]:
    """Location of each volume at its owner."""
    return {
        (node_id, VolumeId(volume.volume_id)): VolumeLocation(node_id, position)
        for node_id, record in nodes.items()
        for position, volume in enumerate(record.volumes)
    }


def _mounts_of(nodes: Mapping[NodeId, NodeInfo]) -> dict[VolumeId, tuple[VolumeLocation, ...]]:
    """Locations of each mounted volume at the nodes that mount it. A node's mounts follow its own volumes."""
    mounts: dict[VolumeId, list[VolumeLocation]] = {}
    for node_id, record in nodes.items():
        for position, mount in enumerate(record.mounts, start=len(record.volumes)):
            mounts.setdefault(VolumeId(mount), []).append(VolumeLocation(node_id, position))
    return {volume_id: tuple(locations) for volume_id, locations in mounts.items()}
