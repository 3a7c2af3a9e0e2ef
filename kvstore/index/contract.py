"""What a prefix index is: which volumes hold which keys, and how long the leading run of a chain is that can be served.

The index is a *hint* that nodes publish (they are the truth), prefix-closed by construction: a block is published after its
parent and leaves before it. Two things follow, and both make lookups logarithmic:

* the hit length of a chain is found by bisection;
* each replica remembers ``run_start``: the depth from which its volume holds the chain without a gap. One record at the end
  of a run thus speaks for the whole run, and a lookup probes only where runs end.

Where a lost node tore a hole, the probes find it and only shorten the hit.

A *volume epoch* is one boot of one volume. Records name volume epochs by a small number, so that a volume's death is one write,
not a scan; what dead volume epochs leave behind is swept in the background.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NewType, Protocol

from kvstore.core.types import BlockKey, BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId

VolumeEpoch = NewType("VolumeEpoch", int)
"""One boot of one volume, as a number. Never used twice within one index epoch."""


@dataclass(frozen=True, slots=True)
class VolumeEpochInfo:
    """What a volume epoch stands for."""

    volume_epoch: VolumeEpoch
    volume_id: VolumeId
    node_id: NodeId
    tier: Tier
    boot_id: BootId


class ReplicaRun(NamedTuple):
    """Blocks ``[start, start + count)`` of the keys asked for lie in one volume. A tuple, for every lookup makes some."""

    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    volume_epoch: VolumeEpoch


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest servable run of leading keys, and who holds which part.

    Args:
        blocks: how many keys.
        runs: they cover ``[0, blocks)``; they may overlap.
        revision: ``PrefixIndex.revision`` in the snapshot that was read: another one than the caller went by means that the
            volume epochs it called visible were old news.
    """

    blocks: int
    runs: tuple[ReplicaRun, ...]
    revision: int = field(default=0, compare=False)


class IndexedBlock(NamedTuple):
    """What the index knows of one key: its place, and which open volume epochs hold it."""

    key: BlockKey
    namespace: NamespaceId
    depth: int
    volume_epochs: tuple[VolumeEpoch, ...]


class Removed(NamedTuple):
    """A volume epoch does not hold some blocks any more: it removed them, or they gave way to others."""

    volume_epoch: VolumeEpoch
    namespace: NamespaceId
    keys: Sequence[BlockKey]


class IndexListener(Protocol):
    """Is told what this process changed, right after it was committed, in the thread that did so; returns soon, raises nothing.

    Where one thread makes all changes, it is told in their order.
    """

    def opened(self, info: VolumeEpochInfo) -> None:
        """A volume epoch is open; perhaps it was before."""

    def closed(self, volume_epoch: VolumeEpoch) -> None:
        """A volume epoch is closed, with all that it held; perhaps it was before."""

    def published(self, volume_epoch: VolumeEpoch, stored: Sequence[BlockRun], removed: Sequence[Removed]) -> None:
        """A batch took effect: first what volume epochs no longer hold, then what the one holds, without what was ignored."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What the index says of one key, for people.

    Args:
        namespace: whose it is; None: of a number that no namespace has, which only damage explains.
        depth: its place in its chain.
        replicas: volume epoch and run_start of each; volume epochs that are closed are among them until they are swept.
    """

    namespace: NamespaceId | None
    depth: int
    replicas: tuple[tuple[VolumeEpoch, int], ...]


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Sizes, and whether changes fail. ``blocks`` counts keys, dead ones included until they are swept."""

    blocks: int
    bytes: int
    dead_volume_epochs: int
    failing: str = ""
    """Why changes by this process fail now, e.g. on a full disk; empty: they do not."""
    failing_s: float = 0.0
    """For how long."""


class PrefixIndex(ABC):
    """One index. Thread-safe; backends that say so may be opened by several processes at once.

    The conformance suite is ``kvstore.testing.index.suite``.
    """

    @property
    @abstractmethod
    def epoch(self) -> bytes:
        """16 random bytes drawn when the index was made; another value means that it was made anew."""

    # ---- volume epochs ----
    @abstractmethod
    def open_volume_epoch(self, volume_id: VolumeId, node_id: NodeId, tier: Tier, boot_id: BootId) -> VolumeEpoch:
        """Opens a volume epoch, or finds the open one of the same (volume, boot). Older ones of the volume stay open."""

    @abstractmethod
    def close_volume_epoch(self, volume_epoch: VolumeEpoch) -> None:
        """Hides everything that the volume epoch holds, at once, in O(1). Unknown or closed: no change."""

    @abstractmethod
    def volume_epochs(self) -> list[VolumeEpochInfo]:
        """All open volume epochs."""

    # ---- blocks ----
    @abstractmethod
    def publish(self, volume_epoch: VolumeEpoch, stored: Sequence[BlockRun], removed: Sequence[BlockKey]) -> None:
        """Applies one batch, atomically: first ``removed``, then ``stored`` in order. Applying a batch again changes nothing.

        A key has one place. A run that names another than its record, or another namespace, is ignored as far as it does;
        only where the run's parent is held right before it, in the same namespace, does the record give way.

        Runs of a namespace that is not known, where there are as many as may be, are ignored, and counted.

        Raises:
            NotFound: the volume epoch is not open.
        """

    @abstractmethod
    def lookup(self, namespace: NamespaceId, keys: bytes, visible: Container[VolumeEpoch]) -> PrefixHit:
        """Longest prefix of a packed chain (from its head) in volumes whose volume epoch is ``visible``.

        Keys of another namespace are misses. Logarithmic in the number of keys, plus the number of runs.
        """

    @abstractmethod
    def describe(self, keys: Sequence[BlockKey]) -> list[Entry | None]:
        """What the index says of each key; None: nothing. For people: it may take milliseconds a thousand keys."""

    @abstractmethod
    def holders(self, namespace: NamespaceId, keys: Sequence[BlockKey]) -> list[tuple[VolumeEpoch, ...]]:
        """Open volume epochs that hold each of some keys of a namespace, wherever in their chains; visible or not."""

    # ---- the whole ----
    @abstractmethod
    def listen(self, listener: IndexListener) -> None:
        """Tells a listener what this process changes from here on. One at most; other processes' changes are not told."""

    @abstractmethod
    def blocks_from(self, first: BlockKey | None, most: int) -> tuple[list[IndexedBlock], BlockKey | None]:
        """Looks at up to ``most`` records, in the order of keys, from a key on (None: from the first).

        Returns:
            Those that open volume epochs hold, as of one snapshot, and the key to go on from (None: that was all).
        """

    # ---- anti-entropy ----
    @abstractmethod
    def keys_in_range(self, volume_epoch: VolumeEpoch, key_range: int) -> list[BlockKey]:
        """Keys that the volume epoch holds in one of the 4,096 ranges of key space (by the first 12 bits)."""

    @abstractmethod
    def sweep(self, max_entries: int) -> bool:
        """Looks at up to ``max_entries`` records, going on where the last call ended, and drops what dead volume epochs left.

        Returns:
            True when no dead volume epoch has records left.
        """

    # ---- namespaces: 16-byte digest -> serialised spec ----
    @abstractmethod
    def put_namespace(self, namespace: NamespaceId, spec: bytes) -> None:
        """Remembers a namespace. Idempotent.

        Raises:
            CapacityExceeded: there are as many as may be.
        """

    @abstractmethod
    def spec_of(self, namespace: NamespaceId) -> bytes | None:
        """What one was put with, at once; None: it was not."""

    @abstractmethod
    def namespaces(self) -> list[tuple[NamespaceId, bytes]]:
        """All namespaces, in order of arrival."""

    # ---- small records of the server that uses the index (node registrations), kept beside it ----
    @abstractmethod
    def put_note(self, name: str, value: bytes | None, *, announce: bool = True) -> None:
        """Keeps (or, with None, drops) a small named value.

        Args:
            name: what to find it by.
            value: what to keep.
            announce: whether `revision` moves. False is for what changes often (heartbeats, sequence numbers): other
                processes poll it, and their caches stay warm.
        """

    @abstractmethod
    def note(self, name: str) -> bytes | None:
        """One of them, as it is now; None where there is none."""

    @abstractmethod
    def notes(self) -> dict[str, bytes]:
        """All of them."""

    @property
    @abstractmethod
    def revision(self) -> int:
        """Grows with every announced change of volume epochs, namespaces or notes, by any process; caches compare it."""

    @abstractmethod
    def stats(self) -> IndexStats:
        """Sizes, and whether changes fail, at once."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of files."""
