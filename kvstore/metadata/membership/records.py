"""Notes: the server's own small records, kept in the index so that they survive a restart and all workers see them.

======================  =========================================================  ==========
name                    value                                                      announced
======================  =========================================================  ==========
``node/<node id>``      NodeInfo of the last registration                          yes
``drain/<node id>``     DrainOrder, while the node is to drain                     yes
``left/<node id>``      the boot that unregistered                                 yes
``removed/<node id>``   the live boot that was removed, and the time               no
``synced/<volume id>``  the volume epoch whose inventory is complete               yes
``beat/<node id>``      boot, host-wide monotonic time, host and last heartbeat    no
``refused/<node id>``   host-wide monotonic time and reason of the last refusal    no
``sequence/<node id>``  last batch that the boot published (``publish_sequence``)  no
======================  =========================================================  ==========
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from kvproto.v1.metadata_pb2 import HeartbeatRequest
from kvstore.core.types import BootId, NodeId, VolumeId
from kvstore.index.contract import VolumeEpoch

NODE_PREFIX: Final = "node/"
SYNCED_PREFIX: Final = "synced/"
HEARTBEAT_PREFIX: Final = "beat/"
DRAIN_PREFIX: Final = "drain/"
LEFT_PREFIX: Final = "left/"
REFUSED_PREFIX: Final = "refused/"
REMOVED_PREFIX: Final = "removed/"
SEQUENCE_PREFIX: Final = "sequence/"

_VOLUME_EPOCH: Final = struct.Struct("<Q")
_HEARTBEAT: Final = struct.Struct("<16sdB")
_REFUSED: Final = struct.Struct("<d")
_MOST_HOST_BYTES: Final = 255
_REMOVED: Final = struct.Struct("<16sd")


def node_note(node_id: NodeId) -> str:
    """Name of the note with a node's registration."""
    return NODE_PREFIX + node_id


def synced_note(volume_id: VolumeId) -> str:
    """Name of the note that says that a volume's inventory is complete."""
    return SYNCED_PREFIX + volume_id


def drain_note(node_id: NodeId) -> str:
    """Name of the note with a node's drain order."""
    return DRAIN_PREFIX + node_id


def left_note(node_id: NodeId) -> str:
    """Name of the note with the boot of a node that unregistered."""
    return LEFT_PREFIX + node_id


def removed_note(node_id: NodeId) -> str:
    """Name of the note with the boot of a node that was removed while it was alive."""
    return REMOVED_PREFIX + node_id


def encode_removed(boot_id: BootId, at_s: float) -> bytes:
    """Encode a removed boot."""
    return _REMOVED.pack(boot_id, at_s)


def decode_removed(note: bytes | None) -> tuple[BootId, float] | None:
    """Decode a removed boot: (boot, host-wide monotonic time). None if the note is absent or invalid."""
    if note is None or len(note) != _REMOVED.size:
        return None
    boot_id, at_s = _REMOVED.unpack(note)
    return BootId(boot_id), at_s


def heartbeat_note(node_id: NodeId) -> str:
    """Name of the note with a node's last heartbeat."""
    return HEARTBEAT_PREFIX + node_id


def refused_note(node_id: NodeId) -> str:
    """Name of the note with the last rejected call in a node's name."""
    return REFUSED_PREFIX + node_id


def sequence_note(node_id: NodeId) -> str:
    """Name of the note with a node's publish sequence."""
    return SEQUENCE_PREFIX + node_id


def encode_volume_epoch(volume_epoch: VolumeEpoch) -> bytes:
    """Encode a volume epoch."""
    return _VOLUME_EPOCH.pack(volume_epoch)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A node's last heartbeat.

    Args:
        boot_id: boot that sent it.
        at_s: time of arrival, on the host's monotonic clock.
        report: the heartbeat.
        host: host that sent it; empty: unknown.
    """

    boot_id: BootId
    at_s: float
    report: HeartbeatRequest
    host: str = ""

    def encode(self) -> bytes:
        """Encode as a note."""
        host = self.host.encode()[:_MOST_HOST_BYTES]
        return _HEARTBEAT.pack(self.boot_id, self.at_s, len(host)) + host + self.report.SerializeToString()

    @classmethod
    def decode(cls, note: bytes) -> Heartbeat | None:
        """Decode a note; None if it is invalid."""
        try:
            boot_id, at_s, host_bytes = _HEARTBEAT.unpack_from(note)
            end = _HEARTBEAT.size + host_bytes
            return cls(BootId(boot_id), at_s, HeartbeatRequest.FromString(note[end:]), note[_HEARTBEAT.size : end].decode())
        except (struct.error, DecodeError, UnicodeDecodeError):
            return None


@dataclass(frozen=True, slots=True)
class CallRefusal:
    """The last rejected call in a node's name.

    Args:
        at_s: time of the call, on the host's monotonic clock.
        why: what is wrong with the caller's token.
    """

    at_s: float
    why: str

    def encode(self) -> bytes:
        """Encode as a note."""
        return _REFUSED.pack(self.at_s) + self.why.encode()

    @classmethod
    def decode(cls, note: bytes) -> CallRefusal | None:
        """Decode a note; None if it is invalid."""
        try:
            (at_s,) = _REFUSED.unpack_from(note)
            return cls(at_s, note[_REFUSED.size :].decode())
        except (struct.error, UnicodeDecodeError):
            return None
