"""Contract of a prefix index: which volumes hold which keys, and how long the servable prefix of a chain is.

The index is a *hint* that nodes publish; the nodes are the truth. It is nearly prefix-closed: a block is published after its
parent, and evicted before its parent except in the cases that ``kvstore.node.table`` names. Two properties follow, and both
make lookups logarithmic:

* the hit length of a chain is found by bisection;
* each replica records ``run_start``: the depth from which its volume holds the chain without a gap. One record at the end of a
  run therefore describes the whole run, and a lookup probes only the ends of runs.

If a lost node left a gap in a chain, the probes find the gap, and the hit is shorter.

A *volume epoch* is one boot of one volume. Records name volume epochs by a small number, so the loss of a volume is one write
and needs no scan. Records of closed volume epochs are removed in the background (``sweep``).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, NamedTuple, NewType, Protocol

from kvstore.core.errors import Unsupported
from kvstore.core.index_backend import IndexBackend, MetadataServerRecord
from kvstore.core.types import KEY_BYTES, BlockKey, BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId

VolumeEpoch = NewType("VolumeEpoch", int)
"""Number of one boot of one volume. Never reused within one index epoch."""


@dataclass(frozen=True, slots=True)
class VolumeEpochInfo:
    """An open volume epoch."""

    volume_epoch: VolumeEpoch
    volume_id: VolumeId
    node_id: NodeId
    tier: Tier
    boot_id: BootId


class ReplicaRun(NamedTuple):
    """Blocks ``[start, start + count)`` of the requested keys that one volume holds. A tuple, because each lookup makes some."""

    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    volume_epoch: VolumeEpoch


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest servable prefix of a chain, and its replicas.

    Args:
        blocks: number of leading blocks.
        runs: replicas; they cover ``[0, blocks)`` and may overlap.
        revision: ``PrefixIndex.revision`` of the snapshot that was read. If it differs from the caller's revision, the caller's
            set of visible volume epochs was stale.
        unknown: number of probed records that are unknown because their shard did not answer. If it is not 0, the hit may be too
            short.
    """

    blocks: int
    runs: tuple[ReplicaRun, ...]
    revision: int = field(default=0, compare=False)
    unknown: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class PackedRecords:
    """Keys and records of a part of the index, in columns: a pass over a large index makes no tuple and no key object per record.

    Args:
        keys: the keys, 16 bytes each.
        values: the record of each key.
        ordinals: numbers of all namespaces; None: the index loses none. No lookup finds records with other numbers, so digests
            leave them out, and nodes publish them again.
    """

    keys: bytes
    values: Sequence[bytes]
    ordinals: frozenset[int] | None = None

    def pairs(self) -> list[tuple[bytes, bytes]]:
        """Keys and records, in key order."""
        keys = [self.keys[at : at + KEY_BYTES] for at in range(0, len(self.keys), KEY_BYTES)]
        return sorted(zip(keys, self.values, strict=True))


class IndexedBlock(NamedTuple):
    """One key with its namespace, its depth, and the open volume epochs that hold it."""

    key: BlockKey
    namespace: NamespaceId
    depth: int
    volume_epochs: tuple[VolumeEpoch, ...]


class RemovedKeys(NamedTuple):
    """Keys that a volume epoch no longer holds: it removed them, or records of another depth replaced them."""

    volume_epoch: VolumeEpoch
    namespace: NamespaceId
    keys: Sequence[BlockKey]


class IndexListener(Protocol):
    """Receives the changes of this process.

    A method is called right after the commit, in the thread that made the change. It must return soon and raise nothing. If one
    thread makes all changes, the calls are in commit order.
    """

    def opened(self, info: VolumeEpochInfo) -> None:
        """A volume epoch is open; it may have been open before."""

    def closed(self, volume_epoch: VolumeEpoch) -> None:
        """A volume epoch is closed, with all its blocks; it may have been closed before."""

    def published(self, volume_epoch: VolumeEpoch, stored: Sequence[BlockRun], removed: Sequence[RemovedKeys]) -> None:
        """A batch took effect: first ``removed``, then ``stored``. Ignored parts of the batch are left out."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """The record of one key, for diagnosis.

    Args:
        namespace: its namespace; None: no namespace has the record's number, which only damage explains.
        depth: depth in its chain.
        replicas: volume epoch and run_start of each replica, including closed volume epochs that are not swept yet.
    """

    namespace: NamespaceId | None
    depth: int
    replicas: tuple[tuple[VolumeEpoch, int], ...]


class Beat(NamedTuple):
    """The last heartbeat of a node, as the servers that share an index record it for each other.

    Args:
        boot_id: boot that sent it.
        counter: number of the heartbeat. Another value than before means that the boot is alive, also if it is smaller.
        report: number of the heartbeat whose contents are in the node's report note.
    """

    boot_id: BootId
    counter: int
    report: int


class ServerRole(StrEnum):
    """Work that one of the servers that share an index does for all of them."""

    SWEEP = "sweep"
    """Removes records of closed volume epochs, and forgets nodes that are silent for long."""
    QUOTA = "quota"
    """Divides quotas among nodes."""
    PLAN = "plan"
    """Plans loads and assigns requests."""


class LeaseHolder(NamedTuple):
    """A server, as its leases name it.

    Args:
        server: id of the server process, never used again.
        address: where other servers reach it.
    """

    server: str
    address: str


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Size and health of the index. ``blocks`` counts keys, including those of closed volume epochs that are not swept yet."""

    blocks: int
    bytes: int
    dead_volume_epochs: int
    failing: str = ""
    """Why changes by this process fail now, for example because the disk is full; empty: they succeed."""
    failing_s: float = 0.0
    """Seconds since changes began to fail."""


class RangeCheck(NamedTuple):
    """Ranges of key space whose records nodes are asked to check.

    Args:
        token: number of the check.
        ranges: the ranges.
        lost: the index lost these ranges: nodes send all their blocks in them. Else nodes compare them.
    """

    token: int
    ranges: frozenset[int]
    lost: bool


class PrefixIndex(ABC):
    """A prefix index. Thread-safe; some backends may be opened by several processes at once.

    The conformance suite is ``kvstore.testing.index.suite``.
    """

    leases_roles: ClassVar[bool] = False
    """Whether servers of several hosts may share the index, and agree by leases on who holds a role. Otherwise the lease methods
    raise ``Unsupported``."""

    @property
    @abstractmethod
    def epoch(self) -> bytes:
        """The index epoch: 16 random bytes, drawn when the index was created. A new value means that all contents were lost."""

    # ---- volume epochs ----
    @abstractmethod
    def open_volume_epoch(self, volume_id: VolumeId, node_id: NodeId, tier: Tier, boot_id: BootId) -> VolumeEpoch:
        """Open a volume epoch, or find the open one of the same volume and boot. Older ones of the volume stay open."""

    @abstractmethod
    def close_volume_epoch(self, volume_epoch: VolumeEpoch) -> None:
        """Hide all blocks of a volume epoch at once, in O(1). No effect if it is unknown or closed."""

    @abstractmethod
    def volume_epochs(self) -> list[VolumeEpochInfo]:
        """All open volume epochs."""

    # ---- blocks ----
    @abstractmethod
    def publish(self, volume_epoch: VolumeEpoch, stored: Sequence[BlockRun], removed: Sequence[BlockKey]) -> None:
        """Apply one batch atomically: first ``removed``, then ``stored`` in order. Idempotent.

        A key has one namespace and one depth. Keys of a run that disagree with their record are ignored, except if the run's
        parent is held one level above in the same namespace: then the record is replaced.

        Runs of an unknown namespace are ignored and counted if the index holds as many namespaces as it may.

        Raises:
            NotFound: the volume epoch is not open.
        """

    @abstractmethod
    def lookup(self, namespace: NamespaceId, keys: bytes, visible: Container[VolumeEpoch], ends: Sequence[int] = ()) -> PrefixHit:
        """Find the longest prefix of a chain that ``visible`` volume epochs hold.

        Keys of another namespace are misses. The cost is logarithmic in the number of keys, plus the number of runs.

        Args:
            namespace: namespace of the chain.
            keys: the chain's keys from its head, 16 bytes each, concatenated.
            visible: volume epochs that can be read now.
            ends: guesses: numbers of leading blocks after which a run may end. They decide only which records are read first.

        Raises:
            Unavailable: no probed record is known.
        """

    async def lookup_async(
        self, namespace: NamespaceId, keys: bytes, visible: Container[VolumeEpoch], ends: Sequence[int] = ()
    ) -> PrefixHit:
        """As ``lookup``, on the event loop of the caller. An index that waits for other hosts overrides it."""
        return self.lookup(namespace, keys, visible, ends)

    @abstractmethod
    def describe(self, keys: Sequence[BlockKey]) -> list[IndexEntry | None]:
        """The record of each key, or None. For diagnosis: it may take milliseconds per thousand keys."""

    @abstractmethod
    def holders(self, namespace: NamespaceId, keys: Sequence[BlockKey]) -> list[tuple[VolumeEpoch, ...]]:
        """Open volume epochs that hold each key of a namespace, at any depth, visible or not."""

    async def holders_async(self, namespace: NamespaceId, keys: Sequence[BlockKey]) -> list[tuple[VolumeEpoch, ...]]:
        """As ``holders``, for a caller on an event loop. Keys whose shard does not answer in time have no holders."""
        return await asyncio.to_thread(self.holders, namespace, keys)

    # ---- the whole ----
    @abstractmethod
    def listen(self, listener: IndexListener) -> None:
        """Report the changes of this process to a listener from now on. One listener at most."""

    @abstractmethod
    def blocks_from(self, first: BlockKey | None, most: int) -> tuple[list[IndexedBlock], BlockKey | None]:
        """Read up to ``most`` records in key order, from a key on (None: from the first).

        Returns:
            Blocks of open volume epochs, as of one snapshot, and the key to continue from (None: all records were read).
        """

    # ---- anti-entropy ----
    @abstractmethod
    def keys_in_range(self, volume_epoch: VolumeEpoch, key_range: int) -> list[BlockKey]:
        """Keys of the volume epoch in one of the 4,096 ranges of key space (by the first 12 bits).

        Records with a lost number of a namespace are left out, as in digests.
        """

    @abstractmethod
    def records_in_ranges(self, first: int, count: int) -> list[tuple[bytes, bytes]]:
        """Keys and records of ``count`` ranges of key space from ``first`` on, in key order, but not of one snapshot."""

    @abstractmethod
    def packed_records(self, first: int, count: int) -> PackedRecords:
        """As ``records_in_ranges``, but in columns and in any order."""

    @abstractmethod
    def sweep(self, max_entries: int) -> bool:
        """Remove replicas of closed volume epochs from up to ``max_entries`` records, continuing after the last call.

        Returns:
            True if no closed volume epoch has records left.
        """

    def range_checks(self) -> Sequence[RangeCheck]:
        """Checks that nodes are asked to make now, because an index on other hosts lost records or may have lost some."""
        return ()

    def end_range_checks(self, tokens: Collection[int]) -> None:  # noqa: B027  # an index of this host loses no ranges
        """All living nodes have made these checks, and their changes are in the index."""

    # ---- namespaces: 16-byte digest -> serialised spec ----
    @abstractmethod
    def put_namespace(self, namespace: NamespaceId, spec: bytes) -> None:
        """Store the spec of a namespace. Idempotent.

        Raises:
            CapacityExceeded: the index holds as many namespaces as it may.
        """

    @abstractmethod
    def spec_of(self, namespace: NamespaceId) -> bytes | None:
        """The stored spec of a namespace, or None."""

    @abstractmethod
    def namespaces(self) -> list[tuple[NamespaceId, bytes]]:
        """All namespaces with their specs, in the order of their creation."""

    # ---- notes: small records of the metadata server (node registrations) ----
    def put_note(self, name: str, value: bytes | None, *, announce: bool = True) -> None:
        """Store or delete one note. See :meth:`put_notes`."""
        self.put_notes({name: value}, announce=announce)

    @abstractmethod
    def put_notes(self, notes: Mapping[str, bytes | None], *, announce: bool = True) -> None:
        """Store (or with None: delete) small named values, atomically.

        Args:
            notes: values by name.
            announce: whether `revision` grows if a value changes. False for notes that change often (reports of nodes, sequence
                numbers): other processes read those when they need them, and their caches stay valid.

        Raises:
            InvalidArgument: a name or a value is too long, or there are more than ``limits.MAX_NODES``.
        """

    @abstractmethod
    def note(self, name: str) -> bytes | None:
        """The value of a note, or None."""

    @abstractmethod
    def notes(self, prefix: str) -> dict[str, bytes]:
        """Notes whose names begin with ``prefix``. Other notes are not read."""

    # ---- heartbeats ----
    @abstractmethod
    def put_beats(self, beats: Mapping[NodeId, Beat | None]) -> None:
        """Store (or with None: delete) the last heartbeats of nodes, in one batch. `revision` stays as it is.

        Raises:
            InvalidArgument: an id or a number is out of range, or there are more than ``limits.MAX_NODES``.
        """

    @abstractmethod
    def beats(self) -> dict[NodeId, Beat]:
        """The last heartbeats of all nodes."""

    # ---- leases of roles ----
    def take_leases(
        self,
        roles: Sequence[ServerRole],  # noqa: ARG002
        holder: LeaseHolder,  # noqa: ARG002
        ttl_s: float,  # noqa: ARG002
    ) -> dict[ServerRole, LeaseHolder]:
        """Take leases that nobody holds, and renew those that ``holder`` holds, in one round trip.

        Args:
            roles: the roles.
            holder: the server that asks.
            ttl_s: the leases end this long after the index received the call. Leases of other holders count as ended if this
                process has seen no renewal for this long.

        Returns:
            The holder of each of the roles after the call.

        Raises:
            InvalidArgument: the holder's id or address is empty, too long or contains a space.
        """
        raise Unsupported("this index does not support leases")

    def free_leases(self, roles: Sequence[ServerRole], holder: LeaseHolder) -> None:  # noqa: ARG002
        """End those of the leases that ``holder`` holds."""
        raise Unsupported("this index does not support leases")

    def lease_holders(self) -> dict[ServerRole, LeaseHolder]:
        """The holder of each role that a server holds."""
        raise Unsupported("this index does not support leases")

    @property
    @abstractmethod
    def revision(self) -> int:
        """Grows with every announced change of volume epochs, namespaces or notes, by any process; caches compare it."""

    @abstractmethod
    def stats(self) -> IndexStats:
        """Size and health of the index, in O(1)."""

    @property
    def reachable(self) -> bool:
        """Whether this process can share what nodes report with the other servers of the index. It does not wait."""
        return True

    def backend(self) -> IndexBackend:
        """The servers that hold the index, as last observed. It does not wait."""
        return IndexBackend()

    async def refresh(self) -> None:  # noqa: B027  # an index of one host is always fresh
        """Read what other servers have changed until now, on the event loop: for a caller that names something unknown here.

        Raises:
            Unavailable: the index does not answer.
        """

    async def exchange_servers(self, mine: MetadataServerRecord, ended: Collection[str] = ()) -> list[MetadataServerRecord]:
        """Store the record of this metadata server, and read those of all that share the index.

        Args:
            mine: record of this server.
            ended: ids of servers whose records are deleted before.

        Raises:
            Unavailable: the index does not answer.
        """
        return [] if mine.server_id in ended else [mine]

    @abstractmethod
    def close(self) -> None:
        """Close the index and its files."""

    async def close_async(self) -> None:
        """As ``close``, without blocking the event loop of the caller."""
        await asyncio.to_thread(self.close)

    @abstractmethod
    def request_rebuild(self) -> None:
        """Drop all contents soon, and begin another index epoch. Nodes then register again and send their inventories."""
