"""What a transport is: moves Layer Blocks of named keys between a node's memory and a caller's, over one wire.

A transport never knows what a block means. The side that *has* blocks gives it a ``BlockProvider``; the side that wants
them brings a ``BlockBuffer``. Bytes go from the provider's views to the buffer's segments with no copy in Python.

Truth and checks: a read names keys in one namespace, and the provider answers for each with verified-in-place bytes or an
outcome other than HIT. Checksums (xxh3-64 of each Layer Block, made by the producer) travel beside the bytes; the *reading*
side verifies them on arrival unless it asked for ``verify=False``, and reports CORRUPT where they differ: such bytes may lie
in the caller's buffer, but never count as a hit. On a write, the *receiving* side verifies before it commits.

Every call has a deadline (monotonic seconds). All methods here block and may be called from any thread; a provider is
called from many threads at once.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import BlockBuffer
from kvstore.core.types import BlockKey, BlockRun, BlockShape, NamespaceId, Outcome, StoreOutcome, Tier

Checksums = npt.NDArray[np.uint64]
"""``[blocks, layers]``: xxh3-64 of each Layer Block."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Layers ``[first_layer, first_layer + layer_count)`` of some blocks of one namespace.

    ``layer_group`` 0 sends each block's layers together; n > 0 sends all blocks' first n layers, then the next n, and so
    on, within each part that the provider yields: what layer-wise hand-over wants.
    """

    namespace: NamespaceId
    keys: Sequence[BlockKey]
    first_layer: int
    layer_count: int
    layer_group: int
    deadline_s: float


@dataclass(slots=True)
class ReadPart:
    """Consecutive blocks ``[first, first + len(outcomes))`` of a read, pinned until ``release`` is called (exactly once).

    ``views`` and ``checksums`` have one entry for each block whose outcome is HIT, in order; a view is the Full Block.
    """

    first: int
    outcomes: Sequence[Outcome]
    views: Sequence[memoryview]
    checksums: Checksums
    tier: Tier
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """A run of blocks to be stored. ``durable``: answer only once they are on NVMe."""

    run: BlockRun
    shape: BlockShape
    durable: bool
    deadline_s: float
    tail: bool = False
    """The last key is a partial block: it is for whoever waits for this prompt, and is not kept beyond that."""


class WriteGrant(ABC):
    """Slots granted for a write. Exactly one of ``commit`` and ``abort`` is called, once, also when the peer dies."""

    outcomes: Sequence[StoreOutcome]
    """One a key of the run: STORED where a slot is granted, else why not."""
    views: Sequence[memoryview]
    """One writable Full Block for each STORED, in order."""

    @abstractmethod
    def commit(self, checksums: Checksums, good: Sequence[bool]) -> Sequence[StoreOutcome]:
        """Makes the granted blocks with ``good`` visible (False: bytes did not match; the slot is given back).

        Args:
            checksums: ``[granted, layers]``.
            good: one a granted block.

        Returns:
            One outcome a granted block.
        """

    @abstractmethod
    def abort(self) -> None:
        """Gives all slots back; never raises."""


class BlockProvider(ABC):
    """What a node gives to its transport servers."""

    @abstractmethod
    def shape(self, namespace: NamespaceId) -> BlockShape | None:
        """Block shape of a namespace, or None where this node has never heard of it."""

    @abstractmethod
    def read(self, request: ReadRequest) -> Iterator[ReadPart]:
        """Yields parts until every key is answered, each exactly once, in any order of parts. Bounded by the deadline.

        The caller releases each part, and closes the iterator when it stops early.
        """

    @abstractmethod
    def write(self, request: WriteRequest) -> WriteGrant:
        """Grants slots. Never raises for lack of room: that is an outcome."""


@dataclass(slots=True)
class ReadResult:
    """What a read brought. ``outcomes[i]`` and ``tiers[i]`` speak of ``keys[i]``; bytes are valid only where HIT."""

    outcomes: list[Outcome]
    tiers: list[Tier]
    bytes_received: int = 0
    checksums: Checksums | None = field(default=None)
    """``[blocks, layer_count]`` as sent by the provider; rows of misses are zero."""


LayerProgress = Callable[[int, int, npt.NDArray[np.bool_]], None]
"""``on_layers(first_layer, layer_count, good)``: of these layers nothing more will come.

``good[i]``: the layers up to and with these have arrived of ``keys[i]`` (verified, where asked). The others have failed, and will
be no hits. A good block may still fail at a later layer.
"""


class ReadWatch:
    """Follows one read from another thread, and ends it early. Thread-safe.

    A read may take long because the wire is slow, or because it is dead; only bytes as they come in tell one from the other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0
        self._ended = False
        self._end: Callable[[], None] | None = None

    @property
    def bytes_heard(self) -> int:
        """Bytes that have come in so far, heads of frames included."""
        return self._bytes

    @property
    def ended(self) -> bool:
        """Whether ``end`` was called."""
        return self._ended

    def end(self) -> None:
        """Nobody wants the read any more: it returns soon, with what has arrived whole."""
        with self._lock:
            self._ended = True
            end = self._end
        if end is not None:
            end()

    def heard(self, size: int) -> None:
        """For transports: bytes came in."""
        with self._lock:
            self._bytes += size

    @contextmanager
    def ends_by(self, end: Callable[[], None]) -> Iterator[None]:
        """For transports: how to end the read that runs inside. Called at once where ``end`` came before; must not block."""
        with self._lock:
            self._end = end
            ended = self._ended
        try:
            if ended:
                end()
            yield
        finally:
            with self._lock:
                self._end = None


class LayerWrite(ABC):
    """A write under way. Exactly one of ``commit`` and ``abort`` ends it; thread-safe."""

    granted: npt.NDArray[np.intp]
    """Positions of the keys whose bytes are wanted, rising; the others are held already, or there is no room."""

    @property
    @abstractmethod
    def outcomes(self) -> Sequence[StoreOutcome]:
        """One a key of the run, as far as known."""

    @abstractmethod
    def put(self, first_layer: int, source: BlockBuffer) -> None:
        """Sends layers ``[first_layer, first_layer + source.shape.layers)``; only granted blocks of ``source`` are read.

        Raises:
            InvalidArgument: no such layers, or put before, or a buffer of another size.
            KVStoreError: the write broke; nothing becomes visible.
        """

    @abstractmethod
    def commit(self) -> Sequence[StoreOutcome]:
        """Makes the blocks visible, once all layers were put; the outcomes.

        Raises:
            InvalidArgument: layers are missing.
            KVStoreError: it broke; it is not known whether they are visible.
        """

    @abstractmethod
    def abort(self) -> None:
        """Gives it up. No effect after ``commit``; never raises."""


class BlockPeer(ABC):
    """A connection (or a few) to one node's transport server. Thread-safe; several reads may run at once."""

    @abstractmethod
    def read(
        self,
        request: ReadRequest,
        destination: BlockBuffer,
        *,
        verify: bool = True,
        on_layers: LayerProgress | None = None,
        watch: ReadWatch | None = None,
    ) -> ReadResult:
        """Reads blocks into ``destination`` (block i of the request to block i of the buffer; layer l to layer l).

        Never raises for a missing, corrupt or late block, nor for a peer that died in the middle: those are outcomes.
        After it has returned, nothing writes to ``destination`` any more.

        Raises:
            InvalidArgument: request and buffer do not fit, or a limit is passed.
            Unavailable: the peer cannot be reached at all.
            PermissionDenied, Unauthenticated: the peer refused the ticket or the namespace.
        """

    @abstractmethod
    def write(self, request: WriteRequest, source: BlockBuffer, checksums: Checksums | None = None) -> list[StoreOutcome]:
        """Stores blocks from ``source``. One outcome a key: LOST for what a peer that died in the middle did not confirm.

        Args:
            request: what is stored.
            source: the blocks, in the order of the request's keys.
            checksums: ``[keys, layers]``, of the producer; None: the caller is the producer, and they are made as bytes are sent.

        Raises:
            InvalidArgument, Unavailable, PermissionDenied, Unauthenticated: as ``read``.
        """

    @abstractmethod
    def begin_write(self, request: WriteRequest) -> LayerWrite:
        """Begins a write that is sent layer by layer.

        Raises:
            InvalidArgument, Unavailable, DeadlineExceeded, PermissionDenied, Unauthenticated: as ``read``.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes all connections; reads under way end with UNAVAILABLE."""
