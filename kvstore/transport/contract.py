"""The contract of a transport: it moves layer blocks of named keys between a node's memory and a caller's, over one wire.

A transport does not interpret blocks. The side that has blocks passes a ``BlockProvider`` to the transport. The side that wants
blocks passes a ``BlockBuffer``. Bytes go from the provider's views to the buffer's segments without a copy in Python.

Verification: a read names keys of one namespace, and the provider answers each key with bytes or with an outcome other than
HIT. Checksums (xxh3-64 of each layer block, made by the producer) travel beside the bytes. The reading side verifies them on
arrival unless it passed ``verify=False``, and reports CORRUPT if they differ. Corrupt bytes may remain in the caller's buffer but
never count as a hit. On a write, the receiving side verifies before it commits.

Every call has a deadline (monotonic seconds). All methods here block and may be called from any thread. A provider is called from
many threads at once.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import BlockBuffer
from kvstore.core.cancel_scope import CancelScope
from kvstore.core.errors import Internal
from kvstore.core.types import BlockKey, BlockRun, BlockShape, NamespaceId, Outcome, StoreOutcome, Tier

Checksums = npt.NDArray[np.uint64]
"""``[blocks, layers]``: xxh3-64 of each layer block."""


class LateBytes(Internal):
    """Bytes of a failed read may still arrive. The destination of the read must never be used for anything else.

    Raised only for memory whose owner has registered it with the transport, and can set it aside: the slots of a node's arena.
    """


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Layers ``[first_layer, first_layer + layer_count)`` of some blocks of one namespace.

    ``layer_group`` 0 sends all layers of each block together. For n > 0, each part that the provider yields is sent as the first
    n layers of all its blocks, then the next n layers, and so on, as layer-wise loads need it.
    """

    namespace: NamespaceId
    keys: Sequence[BlockKey]
    first_layer: int
    layer_count: int
    layer_group: int
    deadline_s: float


@dataclass(slots=True)
class ReadPart:
    """Consecutive blocks ``[first, first + len(outcomes))`` of a read. They are pinned until ``release`` is called, exactly once.

    ``views`` and ``checksums`` have one entry per HIT, in order. A view is a full block.
    """

    first: int
    outcomes: Sequence[Outcome]
    views: Sequence[memoryview]
    checksums: Checksums
    tier: Tier
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """A run of blocks to be stored. ``durable``: answer only after the blocks are on NVMe."""

    run: BlockRun
    shape: BlockShape
    durable: bool
    deadline_s: float
    tail: bool = False
    """The last key is a partial block. It is kept only for the caller that waits for this prompt."""


class WriteGrant(ABC):
    """Slots granted for a write. Exactly one of ``commit`` and ``abort`` is called, once, also if the peer dies."""

    outcomes: Sequence[StoreOutcome]
    """One per key of the run: STORED if a slot is granted, else the reason."""
    views: Sequence[memoryview]
    """One writable full block per STORED, in order."""

    @abstractmethod
    def commit(self, checksums: Checksums, good: Sequence[bool]) -> Sequence[StoreOutcome]:
        """Make the good granted blocks visible and free the slots of the others.

        Args:
            checksums: ``[granted, layers]``.
            good: one per granted block: whether its bytes match their checksums.

        Returns:
            One outcome per granted block.
        """

    @abstractmethod
    def abort(self) -> None:
        """Free all slots. Never raises."""


class BlockProvider(ABC):
    """The blocks of a node, as its transport servers see them."""

    @abstractmethod
    def shape(self, namespace: NamespaceId) -> BlockShape | None:
        """Return the block shape of a namespace, or None if this node does not know the namespace."""

    @abstractmethod
    def read(self, request: ReadRequest) -> Iterator[ReadPart]:
        """Yield parts until every key is answered exactly once. Parts may come in any order. Bounded by the deadline.

        The caller releases each part, and closes the iterator if it stops early.
        """

    @abstractmethod
    def write(self, request: WriteRequest) -> WriteGrant:
        """Grant slots. A lack of space is an outcome, not an exception."""


@dataclass(slots=True)
class ReadResult:
    """Result of a read. ``outcomes[i]`` and ``tiers[i]`` belong to ``keys[i]``. Bytes are valid only for a HIT."""

    outcomes: list[Outcome]
    tiers: list[Tier]
    bytes_received: int = 0
    checksums: Checksums | None = field(default=None)
    """``[blocks, layer_count]`` as sent by the provider; rows of misses are zero."""


LayerProgress = Callable[[int, int, npt.NDArray[np.bool_]], None]
"""``on_layers(first_layer, layer_count, good)``: these layers are complete, and no more of their bytes will come.

``good[i]``: all layers of ``keys[i]`` up to and including these have arrived, verified if the read verifies. Blocks that are not
good have failed and will not be hits. A good block may still fail at a later layer.
"""


class ReadControl(CancelScope):
    """Cancel scope of one read, which also counts the received bytes. Thread-safe.

    A read may take long because the wire is slow or because it is dead. The number of received bytes distinguishes the two cases.
    A cancelled read returns soon, with the blocks that have arrived complete.
    """

    __slots__ = ("_bytes", "_bytes_lock")

    def __init__(self) -> None:
        super().__init__()
        self._bytes_lock = threading.Lock()
        self._bytes = 0

    @property
    def bytes_received(self) -> int:
        """Number of bytes received, including heads of frames."""
        return self._bytes

    def add_bytes(self, size: int) -> None:
        """For transports: count received bytes."""
        with self._bytes_lock:
            self._bytes += size


class LayerWrite(ABC):
    """A write under way. Exactly one of ``commit`` and ``abort`` ends it. Thread-safe."""

    granted: npt.NDArray[np.intp]
    """Ascending positions of the keys whose bytes are wanted. The node holds the others already, or lacks the space for them."""

    @property
    @abstractmethod
    def outcomes(self) -> Sequence[StoreOutcome]:
        """One per key of the run, as far as known."""

    @abstractmethod
    def put(self, first_layer: int, source: BlockBuffer) -> None:
        """Send layers ``[first_layer, first_layer + source.shape.layers)``. Only granted blocks of ``source`` are read.

        Raises:
            InvalidArgument: the layers do not exist or were put before, or the buffer has another size.
            KVStoreError: the write broke; nothing becomes visible.
        """

    @abstractmethod
    def commit(self) -> Sequence[StoreOutcome]:
        """Make the blocks visible after all layers were put, and return the outcomes.

        Raises:
            InvalidArgument: layers are missing.
            KVStoreError: the connection broke; the blocks may or may not be visible.
        """

    @abstractmethod
    def abort(self) -> None:
        """Abandon the write. No effect after ``commit``. Never raises."""


class BlockPeer(ABC):
    """One or a few connections to one node's transport server. Thread-safe. Several reads may run at once."""

    @abstractmethod
    def read(
        self,
        request: ReadRequest,
        destination: BlockBuffer,
        *,
        verify: bool = True,
        on_layers: LayerProgress | None = None,
        control: ReadControl | None = None,
    ) -> ReadResult:
        """Read blocks into ``destination``: block i of the request to block i of the buffer, layer l to layer l.

        A missing, corrupt or late block is an outcome, not an exception. So is a peer that dies during the read. After the call
        has returned, nothing writes to ``destination`` any more.

        Args:
            request: keys, layers and deadline.
            destination: the caller's memory.
            verify: compare checksums on arrival.
            on_layers: called for layers that are complete.
            control: watches and cancels the read from another thread.

        Raises:
            InvalidArgument: request and buffer do not fit, or a limit is exceeded.
            Unavailable: the peer cannot be reached.
            PermissionDenied, Unauthenticated: the peer refused the ticket or the namespace.
        """

    @abstractmethod
    def write(self, request: WriteRequest, source: BlockBuffer, checksums: Checksums | None = None) -> list[StoreOutcome]:
        """Store blocks from ``source``.

        Args:
            request: the run, its shape and the deadline.
            source: the blocks, in the order of the request's keys.
            checksums: ``[keys, layers]``, made by the producer. None: the caller is the producer, and checksums are made as bytes
                are sent.

        Returns:
            One outcome per key. LOST: the peer died before it confirmed the block.

        Raises:
            InvalidArgument, Unavailable, PermissionDenied, Unauthenticated: as ``read``.
        """

    @abstractmethod
    def begin_write(self, request: WriteRequest) -> LayerWrite:
        """Begin a write that is sent layer by layer.

        Raises:
            InvalidArgument, Unavailable, DeadlineExceeded, PermissionDenied, Unauthenticated: as ``read``.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all connections. Reads under way end with UNAVAILABLE."""
