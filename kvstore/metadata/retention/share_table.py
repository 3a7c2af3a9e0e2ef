"""Shares of all quotas that were made together, and their form in the index.

The server with the role ``quota`` makes a table several times per second and writes it as a note, with the next generation. A
table that is too large for one note is several, written at once; a reader that meets parts of two tables reads again later. All
servers read it and answer heartbeats from it. A server never goes back to an older generation, so a note that a former holder
of the role writes late changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from kvproto.v1.metadata_pb2 import HeartbeatRequest
from kvstore.core.limits import MAX_NODES, MAX_NOTE_BYTES, MAX_QUOTAS
from kvstore.core.types import NodeId

SHARES_NOTE: Final = "shares"
MAX_PARTS: Final = 64
MAX_TABLE_BYTES: Final = 2 * MAX_QUOTAS * MAX_NODES * 8 + (16 << 20)
"""Limit of the decoded table: the numbers of all tenants and nodes, and a header."""
_PART_BYTES: Final = MAX_NOTE_BYTES - 1_024
_HEADER: Final = struct.Struct("<I")
_PART: Final = struct.Struct("<I8s")
"""Number of parts, and checksum of the whole."""


@dataclass(frozen=True, slots=True)
class ShareTable:
    """Shares of all quotas.

    Attributes:
        reports: boot and report number of each node that has reported what it holds.
        positions: position of each node that has shares.
        tenants: each tenant's shares by position, in DRAM and on NVMe; None: no quota for the tier.
        generation: grows with each table of an index epoch; 0: the table is not shared.
        epoch: the index epoch.
    """

    reports: Mapping[NodeId, tuple[bytes, int]]
    positions: Mapping[NodeId, int]
    tenants: Sequence[tuple[str, Sequence[int] | None, Sequence[int] | None]]
    generation: int = 0
    epoch: bytes = b""

    def includes(self, heartbeat: HeartbeatRequest) -> bool:
        """Whether the shares are made from a report of this boot."""
        known = self.reports.get(NodeId(heartbeat.node_id))
        return known is not None and known[0] == heartbeat.boot_id

    def replaces(self, other: ShareTable | None) -> bool:
        """Whether the table is newer than another one."""
        return other is None or self.epoch != other.epoch or self.generation > other.generation

    def encode(self) -> bytes:
        """Encode the table."""
        numbers = array("q")
        for _, *tiers in self.tenants:
            for shares in tiers:
                numbers.extend(shares or ())
        header = {
            "epoch": self.epoch.hex(),
            "generation": self.generation,
            "reports": {node_id: (boot_id.hex(), number) for node_id, (boot_id, number) in self.reports.items()},
            "positions": list(self.positions),
            "tenants": [(tenant, dram is not None, nvme is not None) for tenant, dram, nvme in self.tenants],
        }
        encoded = json.dumps(header).encode()
        return zlib.compress(_HEADER.pack(len(encoded)) + encoded + numbers.tobytes(), 1)

    def notes(self) -> dict[str, bytes]:
        """The table as notes, to be written at once."""
        encoded = self.encode()
        parts = [encoded[at : at + _PART_BYTES] for at in range(0, len(encoded), _PART_BYTES)]
        header = _PART.pack(len(parts), _checksum(encoded))
        return {_part_name(number): header + part for number, part in enumerate(parts)}

    @classmethod
    def read(cls, note: Callable[[str], bytes | None]) -> Self | None:
        """Read the table from notes.

        Args:
            note: reads a note; None: there is none.

        Returns:
            None: there is no table, or another one is being written.

        Raises:
            ValueError: the notes are not a table.
        """
        first = note(SHARES_NOTE)
        if first is None:
            return None
        if len(first) < _PART.size:
            raise ValueError("the record of quota shares in the index is invalid")
        count, checksum = _PART.unpack_from(first)
        if not 1 <= count <= MAX_PARTS:
            raise ValueError("the record of quota shares in the index is invalid")
        parts = [first, *(note(_part_name(number)) or b"" for number in range(1, count))]
        encoded = b"".join([part[_PART.size :] for part in parts])
        if count > 1 and _checksum(encoded) != checksum:
            return None
        return cls.decode(encoded)

    @classmethod
    def decode(cls, note: bytes) -> Self:
        """Decode a table.

        Raises:
            ValueError: this is not a table.
        """
        try:
            content = _inflate(note)
            begin = _HEADER.size + _HEADER.unpack_from(content)[0]
            header = json.loads(content[_HEADER.size : begin])
            numbers = array("q", content[begin:])
            nodes = header["positions"]
            tables = iter(range(0, len(numbers), len(nodes) or 1))

            def shares(limited: bool) -> Sequence[int] | None:
                if not limited:
                    return None
                first = next(tables) if nodes else 0
                return numbers[first : first + len(nodes)]

            return cls(
                reports={NodeId(node): (bytes.fromhex(boot), number) for node, (boot, number) in header["reports"].items()},
                positions={NodeId(node): position for position, node in enumerate(nodes)},
                tenants=[(tenant, shares(dram), shares(nvme)) for tenant, dram, nvme in header["tenants"]],
                generation=header["generation"],
                epoch=bytes.fromhex(header["epoch"]),
            )
        except (zlib.error, struct.error, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
            raise ValueError("the record of quota shares in the index is invalid") from error


def _part_name(number: int) -> str:
    return f"{SHARES_NOTE}/{number}" if number else SHARES_NOTE


def _checksum(encoded: bytes) -> bytes:
    return hashlib.blake2b(encoded, digest_size=8).digest()


def _inflate(note: bytes) -> bytes:
    """Decompress a table, up to a limit.

    Raises:
        ValueError: it is too large or incomplete.
    """
    inflater = zlib.decompressobj()
    content = inflater.decompress(note, MAX_TABLE_BYTES)
    if not inflater.eof:
        raise ValueError("the record of quota shares in the index is too large or incomplete")
    return content
