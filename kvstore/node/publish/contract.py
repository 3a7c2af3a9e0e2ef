"""The blocks that a publisher reads: those of a node (``BlockTable``), or those of an engine's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.core.types import VolumeId
from kvstore.node.state.change_log import ChainedBlock
from kvstore.node.state.model import NodeVolume
from kvstore.tiers.contract import VolumeUsage


class PublishedVolume(Protocol):
    """A volume with its fill."""

    @property
    def volume_id(self) -> VolumeId:
        """Its id."""

    def usage(self) -> VolumeUsage:
        """Return capacity, used bytes and blocks."""


class PublishedBlocks(Protocol):
    """The volumes of a node, and the blocks that they hold. Thread-safe."""

    @property
    def memory_volume(self) -> PublishedVolume:
        """The volume in memory: the arena, or the KV cache of an engine on its device."""

    @property
    def node_volumes(self) -> Sequence[NodeVolume]:
        """The durable volumes."""

    def held_by(self, volume: VolumeId) -> Sequence[ChainedBlock]:
        """Return all blocks that one volume holds."""
