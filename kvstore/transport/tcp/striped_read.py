"""State of one read that is striped over several connections to one peer.

The request is split into *units* of consecutive blocks. Each connection takes the next unit when it is free, and requests one
more unit ahead, so that the server never waits for a request. This balances streams of different speed. With layer groups, each
stream has only one unit, so that the layers of all blocks arrive side by side.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import BlockBuffer, Layout
from kvstore.core.cancel_scope import CancelScope
from kvstore.core.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KVStoreError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from kvstore.core.types import BlockShape, Outcome, Tier
from kvstore.transport.contract import LayerProgress, ReadRequest, ReadResult
from kvstore.transport.tcp import frames
from kvstore.transport.tcp.connection_pool import Connection
from kvstore.transport.tcp.frames import DataFrame, FrameKind, ReadFrame
from kvstore.transport.tcp.receive import receive_blocks

UNIT_BYTES = 8 << 20
"""Minimum size of a unit, because each unit costs a request and a call of the provider."""
MAX_UNIT_BYTES = 64 << 20
UNIT_KEYS = 2_048
"""Maximum keys of a unit requested ahead. Its request must fit the socket buffers, else both sides could block in send."""
UNITS_AHEAD = 2
_BUDGET_MARGIN = 0.05
_BUDGET_MARGIN_S = 0.05
"""The server gets slightly less time than is left, so that its answer about late blocks still arrives before the deadline."""

_UNANSWERED = 0
_RAISED = (PermissionDenied, Unauthenticated, InvalidArgument, Unsupported)
"""Errors that mean that the call itself is wrong. All other errors mean that blocks are unavailable now."""

_OUTCOMES = {int(outcome): outcome for outcome in Outcome}
_TIERS = {int(tier): tier for tier in Tier}


TransferBytes = Callable[[npt.NDArray[np.int64], DataFrame], npt.NDArray[np.bool_]]
"""``transfer(hits, data)``: moves the bytes of these positions; returns one bool per hit: whether its checksums match."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Keys ``[first, first + count)`` of the request."""

    first: int
    count: int


def budget_ms(left_s: float) -> int:
    """Return the time budget of a request, in milliseconds, from the seconds left."""
    return max(1, min(int((left_s - min(left_s * _BUDGET_MARGIN, _BUDGET_MARGIN_S)) * 1000), frames.MAX_BUDGET_MS))


def split_read(
    count: int, bytes_per_block: int, streams: int, layer_group: int, max_unit_bytes: int = MAX_UNIT_BYTES
) -> tuple[deque[Unit], int]:
    """Split a read of ``count`` blocks into units; return the units and the number of useful streams."""
    total = count * bytes_per_block
    streams = max(1, min(streams, count, -(-total // UNIT_BYTES)))
    if layer_group:
        size = -(-count // streams)
    else:
        # several units per stream, so that faster streams take more of them
        target = min(max(total // (4 * streams), UNIT_BYTES), max_unit_bytes)
        size = max(1, min(target // bytes_per_block, UNIT_KEYS, -(-count // streams)))
    return deque(Unit(first, min(size, count - first)) for first in range(0, count, size)), streams


class StripedRead:
    """Progress of one read. Streams work on disjoint units; shared state is protected by a lock.

    Args:
        request: keys, layers and deadline.
        destination: the caller's memory.
        streams: maximum number of connections.
        verify: compare checksums.
        on_layers: called for layers that are complete.
        on_bytes: called with the number of bytes as they arrive, long before a unit is complete.
        max_unit_bytes: maximum size of a unit.

    Raises:
        InvalidArgument: the destination is read-only.
    """

    def __init__(
        self,
        request: ReadRequest,
        destination: BlockBuffer,
        streams: int,
        *,
        verify: bool,
        on_layers: LayerProgress | None,
        on_bytes: Callable[[int], None] | None = None,
        max_unit_bytes: int = MAX_UNIT_BYTES,
    ) -> None:
        count = len(request.keys)
        self.request = request
        self._shape: BlockShape = destination.shape
        self.layout = Layout(destination, writable=True)
        self.verify = verify
        self._on_layers = on_layers
        self.on_bytes = on_bytes
        bytes_per_block = request.layer_count * self._shape.layer_block_bytes
        self._units, self.streams = split_read(count, bytes_per_block, streams, request.layer_group, max_unit_bytes)
        self._lock = threading.Lock()
        self._progress = threading.Lock()
        self._outcomes = np.full(count, _UNANSWERED, np.uint8)
        self._tiers = np.full(count, Tier.DRAM, np.uint8)
        self._checksums = np.zeros((count, request.layer_count), np.uint64)
        self._arrived = np.zeros(count, np.int32)  # per block: number of layers; layers arrive in order
        self._layers_left = np.full(request.layer_count, count, np.int64)  # per layer: number of blocks that have not arrived
        self._layers_reported = 0
        self._bytes = 0
        self._error: KVStoreError | None = None
        self._late = False
        self.corrupt = 0
        self._connections: set[Connection] = set()
        self.connected = False
        """Whether a connection was ever available."""
        self.scope: CancelScope | None = None
        """Ends the waits for a connection if it is cancelled."""
        self.cancelled = False
        """Whether the caller cancelled the read. Later failures are not failures of the peer."""

    # ---------------------------------------------------------------- connections

    def add_connection(self, connection: Connection) -> None:
        """Register a connection that a stream uses."""
        with self._lock:
            self._connections.add(connection)
            self.connected = True
            cancelled = self.cancelled
        if cancelled:
            connection.wire.shut()

    def remove_connection(self, connection: Connection) -> None:
        """Unregister a connection."""
        with self._lock:
            self._connections.discard(connection)

    def cancel(self) -> None:
        """End all streams at once."""
        with self._lock:
            self.cancelled = True
            self._units.clear()
            for connection in self._connections:  # under the lock, because a removed connection may already serve another read
                connection.wire.shut()

    # ---------------------------------------------------------------- units

    def next_unit(self) -> Unit | None:
        """Return the next unit to request; None: no unit is left, or the call has failed."""
        with self._lock:
            return self._units.popleft() if self._units and self._error is None else None

    def return_units(self, units: Sequence[Unit]) -> None:
        """Put unanswered units back, to be requested again."""
        with self._lock:
            if not self.cancelled:
                self._units.extendleft(reversed(units))

    def reset_unit(self, unit: Unit) -> bool:
        """Put a unit back if none of its layers has arrived. Return False if some have."""
        mine = slice(unit.first, unit.first + unit.count)
        if self._arrived[mine].any():
            return False
        self._outcomes[mine] = _UNANSWERED
        self.return_units([unit])
        return True

    def has_answers(self, units: Sequence[Unit]) -> bool:
        """Return whether any key of these units has an answer."""
        return any(bool(self._outcomes[unit.first : unit.first + unit.count].any()) for unit in units)

    def read_frame(self, unit: Unit, left_s: float) -> ReadFrame:
        """Return the READ frame for a unit."""
        request = self.request
        keys = request.keys[unit.first : unit.first + unit.count]
        return ReadFrame(
            request.namespace, keys, self._shape, request.first_layer, request.layer_count, request.layer_group, budget_ms(left_s)
        )  # fmt: skip

    def receive_unit(self, connection: Connection, request_id: int, unit: Unit) -> None:
        """Receive the complete answer for a unit.

        Raises:
            PeerError: the peer answered with an ERROR frame.
            KVStoreError: the wire broke, or the answer is malformed.
        """
        deadline_s = self.request.deadline_s
        while True:
            head, header = connection.answer(request_id, None, deadline_s)
            if head.kind is FrameKind.READ_END:
                break
            if head.kind is not FrameKind.DATA:
                raise frames.BadFrame("READ must be answered by DATA", kind=head.kind.name)
            data = frames.decode_data(header, head.payload_bytes, self._shape.layer_block_bytes)
            self.accept(unit, data, head.payload_bytes, partial(self._receive_payload, connection))
        self.check_answered(unit)

    def check_answered(self, unit: Unit) -> None:
        """Raise ``BadFrame`` unless every layer of a unit's keys was answered."""
        mine = slice(unit.first, unit.first + unit.count)
        if (self._arrived[mine] != self.request.layer_count).any():
            raise frames.BadFrame("the peer did not answer every key")

    def accept(self, unit: Unit, data: DataFrame, payload_bytes: int, transfer: TransferBytes) -> None:
        """Check a DATA frame against the request, transfer its bytes, and record the outcome of each block.

        Raises:
            BadFrame: the frame does not match the request.
            KVStoreError: as ``transfer``; none of the bytes count as arrived.
        """
        request = self.request
        layer = data.first_layer - request.first_layer
        start = unit.first + data.first
        these = slice(start, start + len(data.outcomes))
        codes = np.frombuffer(data.outcomes, np.uint8)
        if data.first + len(codes) > unit.count or not 0 <= layer <= request.layer_count - data.layer_count:
            raise frames.BadFrame("the peer sent blocks or layers that were not requested")
        if (self._arrived[these] != layer).any():
            raise frames.BadFrame("the peer sent layers twice or out of order")
        hits = start + np.flatnonzero(codes == Outcome.HIT)
        if layer and not np.array_equal(self._reported_hits(these), codes == Outcome.HIT):
            raise frames.BadFrame("the peer changed the outcome of a block")
        if not layer:
            # a hit counts only after all its layers have arrived, see ``result``
            self._outcomes[these] = codes
            self._tiers[these] = data.tier
        good = transfer(hits, data)
        self._checksums[hits, layer : layer + data.layer_count] = data.checksums
        bad = hits[~good]
        self._outcomes[bad] = Outcome.CORRUPT
        self._arrived[these] += data.layer_count
        with self._lock:
            self._bytes += payload_bytes
            self.corrupt += len(bad)
        self._count_layers(layer, data.layer_count, len(codes))

    def _receive_payload(self, connection: Connection, hits: npt.NDArray[np.int64], data: DataFrame) -> npt.NDArray[np.bool_]:
        """Receive the bytes of a DATA frame from its connection."""
        return receive_blocks(
            connection.wire,
            self.layout.pieces(hits, data.first_layer, data.layer_count),
            data.checksums,
            self._shape.layer_block_bytes,
            self.request.deadline_s,
            verify=self.verify,
            on_bytes=self.on_bytes,
        )

    def _reported_hits(self, these: slice) -> npt.NDArray[np.bool_]:
        """Return which blocks the peer has already reported as hits."""
        codes = self._outcomes[these]
        found: npt.NDArray[np.bool_] = (codes == Outcome.HIT) | (codes == Outcome.CORRUPT)
        return found

    # ---------------------------------------------------------------- failures and result

    def fail_unit(self, unit: Unit, error: KVStoreError) -> None:
        """Record that the missing blocks of a unit will not arrive."""
        late = isinstance(error, DeadlineExceeded)
        with self._lock:
            self._late |= late
            if isinstance(error, _RAISED) and not isinstance(error, frames.BadFrame):
                self._error = self._error or error
        mine = slice(unit.first, unit.first + unit.count)
        arrived = self._arrived[mine]
        missing = arrived < self.request.layer_count
        codes = self._outcomes[mine]
        # outcomes from the peer stay valid, except hits whose bytes did not arrive
        lost = missing & ((codes == _UNANSWERED) | (codes == Outcome.HIT))
        codes[lost] = Outcome.TIMEOUT if late else Outcome.UNAVAILABLE
        for layer in range(self.request.layer_count):
            self._count_layers(layer, 1, int((arrived <= layer).sum()))

    def fail_rest(self, error: KVStoreError | None, address: str) -> None:
        """Fail all units that were not requested, because no stream is left.

        Args:
            error: the error of the streams; None: they ended without one.
            address: the peer's.
        """
        while (unit := self.next_unit()) is not None:
            error = error or Unavailable("the connection to the data-plane peer was lost", address=address)
            self.fail_unit(unit, error)

    @property
    def error(self) -> KVStoreError | None:
        """The error that makes the whole call fail, if any."""
        return self._error

    def result(self) -> ReadResult:
        """Return the result. All streams must have ended."""
        unanswered = Outcome.TIMEOUT if self._late else Outcome.UNAVAILABLE
        self._outcomes[self._outcomes == _UNANSWERED] = unanswered
        self._checksums[self._outcomes != Outcome.HIT] = 0
        return ReadResult(
            [_OUTCOMES[code] for code in self._outcomes.tolist()],
            [_TIERS[code] for code in self._tiers.tolist()],
            self._bytes,
            self._checksums,
        )

    def _count_layers(self, layer: int, layers: int, blocks: int) -> None:
        """Count arrived or failed blocks per layer, and report complete layers to the caller in order, one call at a time."""
        if self._on_layers is None:
            return
        with self._progress:
            self._layers_left[layer : layer + layers] -= blocks
            waiting = np.flatnonzero(self._layers_left[self._layers_reported :] > 0)
            complete = int(waiting[0]) if len(waiting) else len(self._layers_left) - self._layers_reported
            if complete:
                first = self._layers_reported
                self._layers_reported += complete
                # in this order, because a failing unit sets the outcome before it counts the layer
                arrived = self._arrived >= self._layers_reported
                self._on_layers(self.request.first_layer + first, complete, arrived & (self._outcomes == Outcome.HIT))
