"""Notes: the server's own small records, kept in the index so that they survive a restart and all servers of the index see them.

======================  =========================================================  ==========
name                    value                                                      announced
======================  =========================================================  ==========
``node/<node id>``      NodeInfo of the last registration                          yes
``drain/<node id>``     DrainOrder, while the node is to drain                     yes
``left/<node id>``      the boot that unregistered                                 yes
``removed/<node id>``   the live boot that was removed, and the removal's number   no
``synced/<volume id>``  the volume epoch whose inventory is complete               yes
``report/<node id>``    host and contents of the last heartbeat                    no
``refused/<node id>``   number and reason of the last refusal                      no
``shares``              shares of all quotas (``retention.share_table``)           no
======================  =========================================================  ==========

No note contains a time, because servers on several hosts share no clock. That a node is alive is recorded apart from the notes
(``Beat`` in ``kvstore.index.contract``), so that servers need not read the reports to know it.
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
REPORT_PREFIX: Final = "report/"
DRAIN_PREFIX: Final = "drain/"
LEFT_PREFIX: Final = "left/"
REFUSED_PREFIX: Final = "refused/"
REMOVED_PREFIX: Final = "removed/"

_VOLUME_EPOCH: Final = struct.Struct("<Q")
_REPORT: Final = struct.Struct("<QB")
_REFUSED: Final = struct.Struct("<Q")
_MOST_HOST_BYTES: Final = 255
_REMOVED: Final = struct.Struct("<16sQ")


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


def encode_removed(boot_id: BootId, number: int) -> bytes:
    """Encode a removed boot."""
    return _REMOVED.pack(boot_id, number)


def decode_removed(note: bytes | None) -> tuple[BootId, int] | None:
    """Decode a removed boot: (boot, number of the removal). None if the note is absent or invalid."""
    if note is None or len(note) != _REMOVED.size:
        return None
    boot_id, number = _REMOVED.unpack(note)
    return BootId(boot_id), number


def report_note(node_id: NodeId) -> str:
    """Name of the note with a node's last report."""
    return REPORT_PREFIX + node_id


def refused_note(node_id: NodeId) -> str:
    """Name of the note with the last rejected call in a node's name."""
    return REFUSED_PREFIX + node_id


def encode_volume_epoch(volume_epoch: VolumeEpoch) -> bytes:
    """Encode a volume epoch."""
    return _VOLUME_EPOCH.pack(volume_epoch)


@dataclass(frozen=True, slots=True)
class BootReport:
    """The contents of a boot's last heartbeat.

    Args:
        heartbeat: the heartbeat.
        number: number of the first heartbeat with these contents.
        host: host that sent it; empty: unknown.
    """

    heartbeat: HeartbeatRequest
    number: int
    host: str = ""

    @property
    def boot_id(self) -> BootId:
        """The boot."""
        return BootId(self.heartbeat.boot_id)

    def encode(self) -> bytes:
        """Encode as a note."""
        host = self.host.encode()[:_MOST_HOST_BYTES]
        return _REPORT.pack(self.number, len(host)) + host + self.heartbeat.SerializeToString()

    @classmethod
    def decode(cls, note: bytes) -> BootReport | None:
        """Decode a note; None if it is invalid."""
        try:
            number, host_bytes = _REPORT.unpack_from(note)
            end = _REPORT.size + host_bytes
            return cls(HeartbeatRequest.FromString(note[end:]), number, note[_REPORT.size : end].decode())
        except (struct.error, DecodeError, UnicodeDecodeError):
            return None


@dataclass(frozen=True, slots=True)
class CallRefusal:
    """The last rejected call in a node's name.

    Args:
        number: a random number: another one than before means that another call was rejected.
        why: what is wrong with the caller's token.
    """

    number: int
    why: str

    def encode(self) -> bytes:
        """Encode as a note."""
        return _REFUSED.pack(self.number) + self.why.encode()

    @classmethod
    def decode(cls, note: bytes) -> CallRefusal | None:
        """Decode a note; None if it is invalid."""
        try:
            (number,) = _REFUSED.unpack_from(note)
            return cls(number, note[_REFUSED.size :].decode())
        except (struct.error, UnicodeDecodeError):
            return None
