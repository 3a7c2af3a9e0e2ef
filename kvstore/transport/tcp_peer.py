"""The data plane's client: reads blocks of one peer straight into the caller's memory, over several connections at once.

A read runs in the caller's thread and, where it is large enough to be worth it, in helper threads of this peer, each with one
connection. All have ended before ``read`` returns: nothing writes to the destination any more. A connection that was interrupted
in the middle of a frame is closed, so late bytes have nowhere to go.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np

from kvstore.core import limits
from kvstore.core.buffers import BlockBuffer
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KVStoreError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from kvstore.core.types import KEY_BYTES, BlockRun, BlockShape, StoreOutcome
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.transport import frames
from kvstore.transport.arrival import SummedSend
from kvstore.transport.breaker import CircuitBreaker
from kvstore.transport.contract import (
    BlockPeer,
    Checksums,
    LayerProgress,
    LayerWrite,
    ReadRequest,
    ReadResult,
    ReadWatch,
    WriteRequest,
)
from kvstore.transport.frames import FrameKind, WriteFrame
from kvstore.transport.layer_write import TcpLayerWrite
from kvstore.transport.layout import Layout
from kvstore.transport.liveness import WatchedServer
from kvstore.transport.pool import AnsweredError, Connection, ConnectionPool, Ticket
from kvstore.transport.reading import UNIT_KEYS, UNITS_AHEAD, ReadState, Unit, budget_ms
from kvstore.transport.tls import PeerTls
from kvstore.transport.traffic import KvTraffic

log = logging.getLogger(__name__)
limited = LimitedLog(log)

MAX_WRITE_BYTES = 256 << 20
"""Payload of one write exchange: longer runs take several, so that a peer's slots are not held unwritten for long."""


class TcpPeer(BlockPeer):
    """One node's data plane, as seen from another process. Connects on first use.

    Args:
        address: ``host:port`` of its ``TcpServer``.
        ticket: shown on each new connection; a callable may bring a new one each time, and is asked again when the peer says
            that one has expired. It may raise the errors that ``read`` may raise.
        streams: most connections that one read is spread over. No more are used than half the ``cores`` (or one): a stream
            keeps a core busy, and the kernel's part of it much of another. Measured with both ends on two cores, one stream
            verifies a tenth more bytes a second than two.
        cores: for the streams' threads; None: those that this process may use.
        tls: whom it trusts and the name that it expects; None: clear text.
        connect_timeout_s: for the dial, TLS and the greeting together.
        max_connections: open at once, for all reads and writes (None: four reads' worth), besides those of layer-wise writes
            (``MAX_HELD_CONNECTIONS``), which are held while somebody computes.
        breaker_failures: failures in a row after which calls fail at once ...
        breaker_open_s: ... for this long.
        socket_buffer_bytes: fixed socket buffers; None: the kernel sizes them.
        counters: where events are counted.
        traffic: class of the traffic; None: unmarked and without a cap.
        server: liveness of the node; None: each call lasts until its own deadline.
    """

    def __init__(
        self,
        address: str,
        *,
        ticket: Ticket = b"",
        streams: int = 4,
        cores: int | None = None,
        tls: PeerTls | None = None,
        connect_timeout_s: float = 5.0,
        max_connections: int | None = None,
        breaker_failures: int = 3,
        breaker_open_s: float = 1.0,
        socket_buffer_bytes: int | None = None,
        counters: Counters | None = None,
        traffic: KvTraffic | None = None,
        server: WatchedServer | None = None,
    ) -> None:
        if streams < 1:
            raise InvalidArgument("a peer takes at least one stream", streams=streams)
        self.address = address
        cores = len(os.sched_getaffinity(0)) if cores is None else cores
        self._streams = min(streams, max(1, cores // 2))
        self._counters = counters if counters is not None else Counters()
        self._pool = ConnectionPool(
            address,
            ticket=ticket,
            tls=tls,
            connect_timeout_s=connect_timeout_s,
            max_connections=max_connections if max_connections is not None else 4 * streams,
            socket_buffer_bytes=socket_buffer_bytes,
            breaker=CircuitBreaker(MonotonicClock(), failures=breaker_failures, open_s=breaker_open_s),
            counters=self._counters,
            traffic=traffic,
            server=server,
        )
        self._helpers_lock = threading.Lock()
        self._helpers: ThreadPoolExecutor | None = None
        self._max_helpers = max(1, (max_connections if max_connections is not None else 4 * streams) - 1)
        self._closed = False

    def read(
        self,
        request: ReadRequest,
        destination: BlockBuffer,
        *,
        verify: bool = True,
        on_layers: LayerProgress | None = None,
        watch: ReadWatch | None = None,
    ) -> ReadResult:
        _check_read(request, destination)
        watch = ReadWatch() if watch is None else watch

        def on_bytes(size: int) -> None:
            watch.heard(size)
            self._counters.add("transport_peer_bytes_received_total", size)

        state = self._begun_read(request, destination, verify=verify, on_layers=on_layers, on_bytes=on_bytes)
        if not request.keys:
            return state.result()
        self._check_open()
        with watch.ends_by(state.abandon):
            error = self._run_streams(state)
        if state.error is not None:
            raise state.error
        if error is not None and not state.begun([Unit(0, len(request.keys))]):
            refused = isinstance(error, (Unauthenticated, PermissionDenied))
            if refused or (not state.reached and not isinstance(error, DeadlineExceeded)):
                raise error
        state.fail_rest(error if error is not None else Unavailable("the data-plane peer was lost", address=self.address))
        if state.corrupt:
            self._counters.add("transport_peer_corrupt_blocks_total", state.corrupt)
            limited.warning("%d blocks from %s did not match their checksums: taken as misses", state.corrupt, self.address)
        return state.result()

    def write(self, request: WriteRequest, source: BlockBuffer, checksums: Checksums | None = None) -> list[StoreOutcome]:
        _check_write(request, source, checksums)
        outcomes = [StoreOutcome.LOST] * len(request.run.keys)
        if not outcomes:
            return outcomes
        self._check_open()
        layout = Layout(source, writable=False)
        at = 0  # keys answered so far
        fresh = False
        while at < len(outcomes):
            try:
                connection = self._pool.take(request.deadline_s, fresh=fresh)
            except DeadlineExceeded:
                break
            except (Unavailable, Unauthenticated, PermissionDenied):
                if at == 0:
                    raise
                break
            assert connection is not None, "take waits"
            try:
                for start, run in _runs(request.run, request.shape, at):
                    self._write_run(connection, replace(request, run=run), layout, checksums, start, outcomes)
                    at = start + len(run.keys)
                self._pool.give_back(connection)
                self._pool.went_well()
            except _NotBegunError as not_begun:
                cause = not_begun.error
                self._pool.drop(connection)
                if connection.reused and not fresh and isinstance(cause, (Unavailable, Unauthenticated)):
                    fresh = True  # it had died while idle, or its ticket had run out: that says nothing of the peer
                    continue
                if not_begun.answered:
                    if at == 0 and not cause.retryable:
                        raise cause from None
                else:
                    self._broke(cause)
                break
            except KVStoreError as error:
                self._pool.drop(connection)
                self._broke(error)
                break
            except BaseException:
                self._pool.drop(connection)
                raise
        if lost := outcomes.count(StoreOutcome.LOST):
            self._counters.add("transport_peer_writes_lost_total", lost)
        return outcomes

    def begin_write(self, request: WriteRequest) -> LayerWrite:
        _check_run(request)
        self._check_open()
        fresh = False
        while True:
            connection = self._pool.take(request.deadline_s, fresh=fresh, held=True)
            assert connection is not None, "take waits"
            reused = connection.reused
            try:
                return TcpLayerWrite(self._pool, connection, request, self._broke, self._count_sent)
            except (Unavailable, Unauthenticated):
                if not reused or fresh:
                    raise
                fresh = True  # it had died while idle, or its ticket had run out: that says nothing of the peer

    def _count_sent(self, size: int) -> None:
        self._counters.add("transport_peer_bytes_sent_total", size)

    def ping(self, deadline_s: float) -> float:
        """Seconds that a round trip takes.

        Raises:
            Unavailable, Unauthenticated, DeadlineExceeded: there was none.
        """
        self._check_open()
        connection = self._pool.take(deadline_s)
        assert connection is not None, "take waits"
        try:
            begin_s = time.monotonic()
            request_id = connection.next_id()
            connection.wire.send((frames.encode_head(FrameKind.PING, request_id),), deadline_s)
            connection.answer(request_id, FrameKind.PONG, deadline_s)
        except AnsweredError as refusal:
            self._pool.drop(connection)
            raise refusal.error from None
        except BaseException:
            self._pool.drop(connection)
            raise
        self._pool.give_back(connection)
        return time.monotonic() - begin_s

    def close(self) -> None:
        with self._helpers_lock:
            self._closed = True
            helpers = self._helpers
        self._pool.close()
        if helpers is not None:
            helpers.shutdown(wait=False)

    # ---------------------------------------------------------------- reads

    def _run_streams(self, state: ReadState) -> KVStoreError | None:
        """Runs a read to its end on all its streams: none runs any more on return. Answers what ended one early, if anything."""
        helpers: list[Future[KVStoreError | None]] = []
        try:
            if state.streams > 1:
                with self._helpers_lock:
                    if self._helpers is None and not self._closed:
                        self._helpers = ThreadPoolExecutor(self._max_helpers, f"data-{self.address}")
                    if self._helpers is not None and not self._closed:
                        helpers = [self._helpers.submit(self._stream, state, helper=True) for _ in range(state.streams - 1)]
            ended = [self._stream(state, helper=False)]
        except BaseException:
            state.abandon()
            raise
        finally:
            # a helper that has not begun by now finds nothing left to do
            begun = [helper for helper in helpers if not helper.cancel()]
            wait(begun)  # bounded: every wait of a stream has the request's deadline
        ended += [helper.result() for helper in begun]
        return next((found for found in ended if found is not None), None)

    def _stream(self, state: ReadState, *, helper: bool) -> KVStoreError | None:
        """One stream: takes connections and runs units on them until none is left. Answers what ended it early."""
        fresh = False
        while True:
            try:
                connection = self._pool.take(state.request.deadline_s, wait=not helper, fresh=fresh)
            except KVStoreError as unreachable:
                return unreachable
            if connection is None:
                return None  # all are in use by others: the caller's own stream does the work
            state.enlist(connection)
            try:
                error, again = self._run_units(state, connection)
            except BaseException:
                self._pool.drop(connection)
                raise
            finally:
                state.dismiss(connection)
            if not again or state.abandoned:
                return error
            fresh = True

    def _begun_read(
        self,
        request: ReadRequest,
        destination: BlockBuffer,
        *,
        verify: bool,
        on_layers: LayerProgress | None,
        on_bytes: Callable[[int], None],
    ) -> ReadState:
        return ReadState(request, destination, self._streams, verify=verify, on_layers=on_layers, on_bytes=on_bytes)

    def _ask(self, connection: Connection, state: ReadState, unit: Unit) -> int:
        """Asks for a unit; the id of the request."""
        request_id, deadline_s = connection.next_id(), state.request.deadline_s
        frame = frames.encode_read(request_id, state.read_frame(unit, deadline_s - time.monotonic()))
        connection.wire.send((frame,), deadline_s)
        return request_id

    def _take_in(self, connection: Connection, state: ReadState, request_id: int, unit: Unit) -> None:
        """Takes in the whole answer for a unit; raises as ``ReadState.receive_unit``."""
        state.receive_unit(connection, request_id, unit)

    def _asked_ahead(self, state: ReadState) -> int:  # noqa: ARG002 - others decide by the read
        """Units asked for before the first of them is answered."""
        return UNITS_AHEAD

    def _goes_on(self, state: ReadState, unit: Unit | None, error: KVStoreError) -> bool:  # noqa: ARG002 - see below
        """Whether a unit that failed was given back, to be read in another way."""
        return False

    def _run_units(self, state: ReadState, connection: Connection) -> tuple[KVStoreError | None, bool]:
        """Asks for units and takes them in until none is left; the connection is given back or dropped.

        Returns:
            What ended it early, and whether to go on with a new connection.
        """
        ahead: deque[tuple[int, Unit]] = deque()
        unit: Unit | None = None  # that is being asked for
        answered = 0
        try:
            while True:
                while len(ahead) < self._asked_ahead(state) and (not ahead or ahead[0][1].count <= UNIT_KEYS):
                    unit = state.take_unit()
                    if unit is None:
                        break
                    ahead.append((self._ask(connection, state, unit), unit))
                    unit = None
                if not ahead:
                    state.dismiss(connection)
                    self._pool.give_back(connection)
                    if answered:
                        self._pool.went_well()
                    return None, False
                request_id, asked = ahead[0]
                try:
                    self._take_in(connection, state, request_id, asked)
                except AnsweredError as refusal:
                    if not refusal.in_step or isinstance(refusal.error, Unauthenticated):
                        raise refusal.error from None
                    state.unit_failed(asked, refusal.error)
                ahead.popleft()
                answered += 1
        except KVStoreError as error:
            self._pool.drop(connection)
            units = [asked for _, asked in ahead] + ([] if unit is None else [unit])
            if self._goes_on(state, units[0] if units else None, error):
                state.return_units(units[1:])
                return error, True
            expired = isinstance(error, Unauthenticated) and (connection.reused or answered)
            if expired or (connection.reused and not answered and not state.begun(units) and isinstance(error, Unavailable)):
                # the ticket has run out, or the connection had died while idle: that says nothing of the peer
                state.return_units(units)
                return error, True
            if units:
                state.unit_failed(units[0], error)
                state.return_units(units[1:])  # another stream may fare better
            if not state.abandoned:
                self._broke(error)
            return error, False

    # ---------------------------------------------------------------- writes

    def _write_run(
        self,
        connection: Connection,
        request: WriteRequest,
        layout: Layout,
        checksums: Checksums | None,
        start: int,
        outcomes: list[StoreOutcome],
    ) -> None:
        """One exchange: asks for slots, sends what was granted, notes what became of each key.

        Raises:
            _NotBegunError: nothing was granted.
            KVStoreError: it broke later; what is not confirmed stays LOST.
        """
        run, shape, deadline_s = request.run, request.shape, request.deadline_s
        count = len(run.keys)
        request_id = connection.next_id()
        budget = budget_ms(deadline_s - time.monotonic())
        offered = SummedSend(layout.pieces(np.arange(start, start + count), 0, shape.layers), shape.layer_block_bytes)
        try:
            frame = WriteFrame(run, shape, request.durable, budget)
            connection.wire.send((frames.encode_write(request_id, frame),), deadline_s)
            if checksums is None:
                offered.sum_ahead()  # nearly always all is granted
            _, header = connection.answer(request_id, FrameKind.GRANT, deadline_s)
            granted = frames.decode_store_outcomes(header, count)
        except AnsweredError as refusal:
            raise _NotBegunError(refusal.error, answered=True) from None
        except KVStoreError as error:
            raise _NotBegunError(error, answered=False) from error
        places = start + np.flatnonzero(np.array(granted) == StoreOutcome.STORED)
        for place, outcome in enumerate(granted, start):
            if outcome is not StoreOutcome.STORED:
                outcomes[place] = outcome
        if not len(places):
            return
        payload_bytes = len(places) * shape.block_bytes
        head = frames.encode_head(FrameKind.PAYLOAD, request_id, 0, payload_bytes)
        if checksums is not None:
            connection.wire.send([head, *layout.pieces(places, 0, shape.layers)], deadline_s)
            sums = checksums[places]
        else:
            if len(places) < count:
                offered = SummedSend(layout.pieces(places, 0, shape.layers), shape.layer_block_bytes)
            sums = offered.run(connection.wire, head, deadline_s)
        connection.wire.send((frames.encode_checksums(request_id, sums),), deadline_s)
        try:
            _, header = connection.answer(request_id, FrameKind.WRITTEN, deadline_s)
        except AnsweredError as refusal:
            raise refusal.error from None
        for place, outcome in zip(places.tolist(), frames.decode_store_outcomes(header, len(places)), strict=True):
            outcomes[place] = outcome
        self._counters.add("transport_peer_bytes_sent_total", payload_bytes)

    # ---------------------------------------------------------------- helpers

    def _broke(self, error: KVStoreError) -> None:
        """Notes an exchange that ended badly."""
        if isinstance(error, DeadlineExceeded):
            self._counters.add("transport_peer_timeouts_total")
        else:
            self._counters.add("transport_peer_broken_total")
        log.info("data-plane peer %s: %s", self.address, error)
        if not isinstance(error, Unauthenticated):  # an answer, if not the one hoped for
            self._pool.went_wrong()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the data-plane peer is closed", address=self.address)


class _NotBegunError(Exception):
    """A write of which nothing was granted: it may be tried again as a whole. ``answered``: the peer said so itself."""

    def __init__(self, error: KVStoreError, *, answered: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.answered = answered


def _runs(run: BlockRun, shape: BlockShape, start: int) -> list[tuple[int, BlockRun]]:
    """The rest of a run from key ``start`` on, cut so that each piece fits one exchange; parents before children."""
    size = max(1, min(frames.max_write_keys(shape.layers), MAX_WRITE_BYTES // shape.block_bytes))
    return [
        (
            at,
            BlockRun(run.namespace, run.keys[at - 1] if at else run.parent, run.depth + at, run.keys[at : at + size]),
        )
        for at in range(start, len(run.keys), size)
    ]


def _check_run(request: WriteRequest) -> tuple[BlockRun, BlockShape]:
    run, shape = request.run, _check_shape(request.shape)
    if len(run.keys) > frames.max_write_keys(shape.layers) and request.tail:
        raise InvalidArgument("too many keys for one write", keys=len(run.keys))
    if not 0 <= run.depth <= limits.MAX_DEPTH - len(run.keys):
        raise InvalidArgument("chain too long", depth=run.depth, keys=len(run.keys))
    _check_ids(run.namespace, run.keys if run.parent is None else (run.parent, *run.keys))
    return run, shape


def _check_read(request: ReadRequest, destination: BlockBuffer) -> None:
    shape = _check_shape(destination.shape)
    if destination.count < len(request.keys) or len(request.keys) > limits.MAX_KEYS_PER_CALL:
        raise InvalidArgument("more keys than memory or limits allow", keys=len(request.keys), blocks=destination.count)
    if not (request.first_layer >= 0 and 0 < request.layer_count <= shape.layers - request.first_layer):
        raise InvalidArgument("no such layers", layers=shape.layers, first=request.first_layer, count=request.layer_count)
    if not 0 <= request.layer_group <= shape.layers:
        raise InvalidArgument("no such layer group", layers=shape.layers, layer_group=request.layer_group)
    _check_ids(request.namespace, request.keys)


def _check_write(request: WriteRequest, source: BlockBuffer, checksums: Checksums | None) -> None:
    run, shape = _check_run(request)
    if source.shape != shape or source.count < len(run.keys) or len(run.keys) > limits.MAX_KEYS_PER_CALL:
        raise InvalidArgument("the source is not what is to be written", shape=source.shape, expected=shape, keys=len(run.keys))
    if checksums is not None and checksums.shape != (len(run.keys), shape.layers):
        raise InvalidArgument("one checksum a Layer Block", shape=checksums.shape, expected=(len(run.keys), shape.layers))


def _check_shape(shape: BlockShape) -> BlockShape:
    return frames.check_shape(shape.layers, shape.layer_block_bytes)


def _check_ids(namespace: bytes, keys: Sequence[bytes]) -> None:
    if len(namespace) != KEY_BYTES or set(map(len, keys)) - {KEY_BYTES}:
        raise InvalidArgument("namespaces and keys take 16 bytes each")
