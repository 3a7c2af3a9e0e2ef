"""The server's own small records, kept beside the index so that they survive a restart and all workers see them.

======================  =========================================================  ==========
name                    value                                                      announced
======================  =========================================================  ==========
``node/<node id>``      NodeInfo of the last registration                          yes
``drain/<node id>``     DrainOrder, while the node is to drain                     yes
``left/<node id>``      the boot that ended in order                               yes
``removed/<node id>``   the living boot that was removed, and when                 no
``synced/<volume id>``  the life whose inventory is known in full                  yes
``beat/<node id>``      boot, host-wide monotonic time, usages of the last beat    no
``sequence/<node id>``  how far the boot has published (``metadata.sequence``)     no
======================  =========================================================  ==========
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from kvproto.v1.metadata_pb2 import HeartbeatRequest
from kvstore.core.types import BootId, NodeId, VolumeId
from kvstore.index.contract import Life

NODE_PREFIX: Final = "node/"
SYNCED_PREFIX: Final = "synced/"
BEAT_PREFIX: Final = "beat/"
DRAIN_PREFIX: Final = "drain/"
LEFT_PREFIX: Final = "left/"
REMOVED_PREFIX: Final = "removed/"
SEQUENCE_PREFIX: Final = "sequence/"

_LIFE: Final = struct.Struct("<Q")
_BEAT: Final = struct.Struct("<16sd")
_REMOVED: Final = struct.Struct("<16sd")


def node_note(node_id: NodeId) -> str:
    """Name of a registration."""
    return NODE_PREFIX + node_id


def synced_note(volume_id: VolumeId) -> str:
    """Name of the record that a volume's inventory is known in full."""
    return SYNCED_PREFIX + volume_id


def drain_note(node_id: NodeId) -> str:
    """Name of the order that a node is to drain."""
    return DRAIN_PREFIX + node_id


def left_note(node_id: NodeId) -> str:
    """Name of the boot of a node that ended in order."""
    return LEFT_PREFIX + node_id


def removed_note(node_id: NodeId) -> str:
    """Name of the boot of a node that was removed while it lived."""
    return REMOVED_PREFIX + node_id


def encode_removed(boot_id: BootId, at_s: float) -> bytes:
    """A removed boot as a note."""
    return _REMOVED.pack(boot_id, at_s)


def decode_removed(note: bytes | None) -> tuple[BootId, float] | None:
    """(boot, host-wide monotonic time) from a note; None where it is none."""
    if note is None or len(note) != _REMOVED.size:
        return None
    boot_id, at_s = _REMOVED.unpack(note)
    return BootId(boot_id), at_s


def beat_note(node_id: NodeId) -> str:
    """Name of a node's last heartbeat."""
    return BEAT_PREFIX + node_id


def sequence_note(node_id: NodeId) -> str:
    """Name of a node's place in its publish order."""
    return SEQUENCE_PREFIX + node_id


def encode_life(life: Life) -> bytes:
    """A life as a note."""
    return _LIFE.pack(life)


@dataclass(frozen=True, slots=True)
class Beat:
    """A node's last heartbeat.

    Args:
        boot_id: who called.
        at_s: when, on the host's monotonic clock.
        report: the heartbeat itself: its usages are shown to people.
    """

    boot_id: BootId
    at_s: float
    report: HeartbeatRequest

    def encode(self) -> bytes:
        """As a note."""
        return _BEAT.pack(self.boot_id, self.at_s) + self.report.SerializeToString()

    @classmethod
    def decode(cls, note: bytes) -> Beat | None:
        """From a note; None where it is none."""
        try:
            boot_id, at_s = _BEAT.unpack_from(note)
            return cls(BootId(boot_id), at_s, HeartbeatRequest.FromString(note[_BEAT.size :]))
        except (struct.error, DecodeError):
            return None
