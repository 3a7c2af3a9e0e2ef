"""One read, spread over several connections to one peer: how it is cut, what has arrived, and what became of the rest.

The request is cut into *units* of consecutive blocks; each connection takes the next one as it gets free (and one more ahead, so
that the server never waits for a question), which evens out streams of different speed. With layer groups each stream has but one
unit, for the layers of all blocks are to arrive side by side.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import BlockBuffer
from kvstore.core.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KVStoreError,
    PermissionDenied,
    Unauthenticated,
    Unsupported,
)
from kvstore.core.types import BlockShape, Outcome, Tier
from kvstore.transport import frames
from kvstore.transport.arrival import receive_blocks
from kvstore.transport.contract import LayerProgress, ReadRequest, ReadResult
from kvstore.transport.frames import DataFrame, FrameKind, ReadFrame
from kvstore.transport.layout import Layout
from kvstore.transport.pool import Connection

UNIT_BYTES = 8 << 20
"""A connection's share is not cut finer: a unit costs a request and a call of the provider."""
MAX_UNIT_BYTES = 64 << 20
UNIT_KEYS = 2_048
"""Keys of a unit that is asked for ahead: its request must fit the socket buffers, or both sides could wait to send."""
UNITS_AHEAD = 2
_BUDGET_MARGIN = 0.05
_BUDGET_MARGIN_S = 0.05
"""The server is told a little less time than there is: its answer of what it could not do in time then still comes in time."""

_UNANSWERED = 0
_RAISED = (PermissionDenied, Unauthenticated, InvalidArgument, Unsupported)
"""Answers that say the call is wrong; all others only say that blocks cannot be had now."""

_OUTCOMES = {int(outcome): outcome for outcome in Outcome}
_TIERS = {int(tier): tier for tier in Tier}


Arrive = Callable[[npt.NDArray[np.int64], DataFrame], npt.NDArray[np.bool_]]
"""``arrive(hits, data)``: brings the bytes of these positions in; one a hit: whether they match (True without ``verify``)."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Keys ``[first, first + count)`` of the request."""

    first: int
    count: int


def budget_ms(left_s: float) -> int:
    """What a server is told of the time left."""
    return max(1, min(int((left_s - min(left_s * _BUDGET_MARGIN, _BUDGET_MARGIN_S)) * 1000), frames.MAX_BUDGET_MS))


def cut(
    count: int, bytes_a_block: int, streams: int, layer_group: int, most_bytes: int = MAX_UNIT_BYTES
) -> tuple[deque[Unit], int]:
    """Cuts a read of ``count`` blocks into units, and says how many streams are worth using."""
    total = count * bytes_a_block
    streams = max(1, min(streams, count, -(-total // UNIT_BYTES)))
    if layer_group:
        size = -(-count // streams)
    else:
        # a few units a stream let the faster streams take more of them
        wanted = min(max(total // (4 * streams), UNIT_BYTES), most_bytes)
        size = max(1, min(wanted // bytes_a_block, UNIT_KEYS, -(-count // streams)))
    return deque(Unit(first, min(size, count - first)) for first in range(0, count, size)), streams


class ReadState:
    """What has arrived of one read. Streams work on disjoint units; what they share is under a lock.

    Args:
        request: what is read.
        destination: where to.
        streams: most connections to use.
        verify: whether checksums are compared.
        on_layers: told of layers that are complete.
        on_bytes: told of bytes as they come: long before anything is complete they show that the other side lives.
        most_bytes: of one unit.

    Raises:
        InvalidArgument: read-only destination.
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
        most_bytes: int = MAX_UNIT_BYTES,
    ) -> None:
        count = len(request.keys)
        self.request = request
        self._shape: BlockShape = destination.shape
        self.layout = Layout(destination, writable=True)
        self.verify = verify
        self._on_layers = on_layers
        self.on_bytes = on_bytes
        bytes_a_block = request.layer_count * self._shape.layer_block_bytes
        self._units, self.streams = cut(count, bytes_a_block, streams, request.layer_group, most_bytes)
        self._lock = threading.Lock()
        self._progress = threading.Lock()
        self._outcomes = np.full(count, _UNANSWERED, np.uint8)
        self._tiers = np.full(count, Tier.DRAM, np.uint8)
        self._checksums = np.zeros((count, request.layer_count), np.uint64)
        self._arrived = np.zeros(count, np.int32)  # layers of each block, which arrive in order
        self._layers_left = np.full(request.layer_count, count, np.int64)  # blocks that each layer waits for
        self._layers_told = 0
        self._bytes = 0
        self._error: KVStoreError | None = None
        self._late = False
        self.corrupt = 0
        self._connections: set[Connection] = set()
        self.reached = False
        """Whether a connection was had at all."""
        self.abandoned = False
        """Whether the caller has ended it: what breaks then says nothing of the peer."""

    # ---------------------------------------------------------------- connections

    def enlist(self, connection: Connection) -> None:
        """A stream works on a connection."""
        with self._lock:
            self._connections.add(connection)
            self.reached = True
            abandoned = self.abandoned
        if abandoned:
            connection.wire.shut()

    def dismiss(self, connection: Connection) -> None:
        """It no longer does."""
        with self._lock:
            self._connections.discard(connection)

    def abandon(self) -> None:
        """Ends all streams at once: the caller was interrupted, or wants nothing more."""
        with self._lock:
            self.abandoned = True
            self._units.clear()
            for connection in self._connections:  # within the lock: one that was dismissed may serve somebody else by now
                connection.wire.shut()

    # ---------------------------------------------------------------- units

    def take_unit(self) -> Unit | None:
        """The next unit to ask for; None: nothing is left, or the call has failed."""
        with self._lock:
            return self._units.popleft() if self._units and self._error is None else None

    def return_units(self, units: Sequence[Unit]) -> None:
        """Gives back units of which nothing has been answered."""
        with self._lock:
            if not self.abandoned:
                self._units.extendleft(reversed(units))

    def take_back(self, unit: Unit) -> bool:
        """Forgets what was answered for a unit and gives it back, if nothing of it has arrived; False: something has."""
        mine = slice(unit.first, unit.first + unit.count)
        if self._arrived[mine].any():
            return False
        self._outcomes[mine] = _UNANSWERED
        self.return_units([unit])
        return True

    def begun(self, units: Sequence[Unit]) -> bool:
        """Whether anything of these units has arrived."""
        return any(bool(self._outcomes[unit.first : unit.first + unit.count].any()) for unit in units)

    def read_frame(self, unit: Unit, left_s: float) -> ReadFrame:
        """The question for a unit."""
        asked = self.request
        keys = asked.keys[unit.first : unit.first + unit.count]
        return ReadFrame(
            asked.namespace, keys, self._shape, asked.first_layer, asked.layer_count, asked.layer_group, budget_ms(left_s)
        )  # fmt: skip

    def receive_unit(self, connection: Connection, request_id: int, unit: Unit) -> None:
        """Takes in the whole answer for a unit.

        Raises:
            AnsweredError: the peer answered with an error.
            KVStoreError: the wire broke or the answer is not one.
        """
        deadline_s = self.request.deadline_s
        while True:
            head, header = connection.answer(request_id, None, deadline_s)
            if head.kind is FrameKind.READ_END:
                break
            if head.kind is not FrameKind.DATA:
                raise frames.BadFrame("READ is answered by DATA", kind=head.kind.name)
            data = frames.decode_data(header, head.payload_bytes, self._shape.layer_block_bytes)
            self.take_in(unit, data, head.payload_bytes, partial(self._received, connection))
        self.check_answered(unit)

    def check_answered(self, unit: Unit) -> None:
        """Raises ``BadFrame`` unless every layer of a unit's keys was answered."""
        mine = slice(unit.first, unit.first + unit.count)
        if (self._arrived[mine] != self.request.layer_count).any():
            raise frames.BadFrame("the peer did not answer every key")

    def take_in(self, unit: Unit, data: DataFrame, payload_bytes: int, arrive: Arrive) -> None:
        """Checks that an answer fits what was asked, has its bytes brought in, and notes what became of each block.

        Raises:
            BadFrame: it does not fit.
            KVStoreError: as ``arrive``; nothing of it counts as arrived.
        """
        asked = self.request
        layer = data.first_layer - asked.first_layer
        start = unit.first + data.first
        these = slice(start, start + len(data.outcomes))
        codes = np.frombuffer(data.outcomes, np.uint8)
        if data.first + len(codes) > unit.count or not 0 <= layer <= asked.layer_count - data.layer_count:
            raise frames.BadFrame("the peer answers what was not asked")
        if (self._arrived[these] != layer).any():
            raise frames.BadFrame("the peer answers layers twice or out of order")
        hits = start + np.flatnonzero(codes == Outcome.HIT)
        if layer and not np.array_equal(self._tentative(these), codes == Outcome.HIT):
            raise frames.BadFrame("the peer changed its mind about a block")
        if not layer:
            # a hit stands only once all its layers have arrived: see ``result``
            self._outcomes[these] = codes
            self._tiers[these] = data.tier
        good = arrive(hits, data)
        self._checksums[hits, layer : layer + data.layer_count] = data.checksums
        bad = hits[~good]
        self._outcomes[bad] = Outcome.CORRUPT
        self._arrived[these] += data.layer_count
        with self._lock:
            self._bytes += payload_bytes
            self.corrupt += len(bad)
        self._layers_answered(layer, data.layer_count, len(codes))

    def _received(self, connection: Connection, hits: npt.NDArray[np.int64], data: DataFrame) -> npt.NDArray[np.bool_]:
        """Receives the bytes of an answer from the connection that it came by."""
        return receive_blocks(
            connection.wire,
            self.layout.pieces(hits, data.first_layer, data.layer_count),
            data.checksums,
            self._shape.layer_block_bytes,
            self.request.deadline_s,
            verify=self.verify,
            on_bytes=self.on_bytes,
        )

    def _tentative(self, these: slice) -> npt.NDArray[np.bool_]:
        """Which blocks the peer has called hits so far."""
        codes = self._outcomes[these]
        found: npt.NDArray[np.bool_] = (codes == Outcome.HIT) | (codes == Outcome.CORRUPT)
        return found

    # ---------------------------------------------------------------- ends

    def unit_failed(self, unit: Unit, error: KVStoreError) -> None:
        """What has not arrived of a unit will not."""
        late = isinstance(error, DeadlineExceeded)
        with self._lock:
            self._late |= late
            if isinstance(error, _RAISED) and not isinstance(error, frames.BadFrame):
                self._error = self._error or error
        mine = slice(unit.first, unit.first + unit.count)
        arrived = self._arrived[mine]
        missing = arrived < self.request.layer_count
        codes = self._outcomes[mine]
        # an outcome that the peer told stands, except a hit that did not come
        lost = missing & ((codes == _UNANSWERED) | (codes == Outcome.HIT))
        codes[lost] = Outcome.TIMEOUT if late else Outcome.UNAVAILABLE
        for layer in range(self.request.layer_count):
            self._layers_answered(layer, 1, int((arrived <= layer).sum()))

    def fail_rest(self, error: KVStoreError) -> None:
        """No stream is left: units that nobody asked for fail."""
        while (unit := self.take_unit()) is not None:
            self.unit_failed(unit, error)

    @property
    def error(self) -> KVStoreError | None:
        """The answer that the whole call is wrong, if there was one."""
        return self._error

    def result(self) -> ReadResult:
        """What the caller gets; nothing may be running any more."""
        unanswered = Outcome.TIMEOUT if self._late else Outcome.UNAVAILABLE
        self._outcomes[self._outcomes == _UNANSWERED] = unanswered
        self._checksums[self._outcomes != Outcome.HIT] = 0
        return ReadResult(
            [_OUTCOMES[code] for code in self._outcomes.tolist()],
            [_TIERS[code] for code in self._tiers.tolist()],
            self._bytes,
            self._checksums,
        )

    def _layers_answered(self, layer: int, layers: int, blocks: int) -> None:
        """Counts blocks off layers; tells the caller, in order and one at a time, of layers that wait for no block any more."""
        if self._on_layers is None:
            return
        with self._progress:
            self._layers_left[layer : layer + layers] -= blocks
            waiting = np.flatnonzero(self._layers_left[self._layers_told :] > 0)
            complete = int(waiting[0]) if len(waiting) else len(self._layers_left) - self._layers_told
            if complete:
                first = self._layers_told
                self._layers_told += complete
                # in this order: who fails a layer sets the outcome before it counts the layer as arrived
                arrived = self._arrived >= self._layers_told
                self._on_layers(self.request.first_layer + first, complete, arrived & (self._outcomes == Outcome.HIT))
